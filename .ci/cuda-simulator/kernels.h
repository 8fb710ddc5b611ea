// CUDA's words for a C++ compiler. It goes before every source of kernels; NVIDIA's own headers bring half, bfloat16 and fp8, which they
// also compute on the host.
//
// `__global__` and `__shared__` stay words until nvcc has seen them.

#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

// NVIDIA's headers, before __CUDA_ARCH__ makes them speak to a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda/std/limits>
#include <vector_types.h>

#undef __global__
#undef __shared__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __align__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

struct SimulatorPosition {
    uint3 thread_index, block_index, block_size, grid_size;
};

extern "C" {
extern __thread SimulatorPosition simulator_position __attribute__((tls_model("initial-exec")));
void simulator_sync_threads();
void simulator_sync_warp(unsigned mask);
uint64_t simulator_shuffle(unsigned mask, uint64_t value, unsigned from);
unsigned simulator_ballot(unsigned mask, bool predicate);
void *simulator_dynamic_shared();
[[noreturn]] void simulator_trap(const char *what);
}

#define threadIdx simulator_position.thread_index
#define blockIdx simulator_position.block_index
#define blockDim simulator_position.block_size
#define gridDim simulator_position.grid_size
#define warpSize 32

// A launch: its arguments are copied when it is called.
template <class... A, size_t... I>
std::function<void()> simulator_bind(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    std::tuple<A...> copies(*static_cast<A *>(arguments[I])...);
    return [kernel, copies] { std::apply(kernel, copies); };
}
template <class... A> std::function<void()> simulator_bind(void (*kernel)(A...), void **arguments) {
    return simulator_bind(kernel, arguments, std::index_sequence_for<A...>());
}

// --- Threads that meet -----------------------------------------------------------------------------------------------------------

inline void __syncthreads() { simulator_sync_threads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simulator_sync_warp(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __trap() { simulator_trap("__trap"); }

inline unsigned simulator_lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

template <class T> T simulator_shuffle_value(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "a register or two");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = simulator_shuffle(mask, bits, from);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
// Lanes in groups of `width`; beyond its group a lane takes its own value.
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return simulator_shuffle_value(mask, value, (simulator_lane() & ~(width - 1u)) | ((unsigned)lane & (width - 1u)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned self = simulator_lane(), from = self ^ (unsigned)lanes;
    return simulator_shuffle_value(mask, value, from / width > self / width ? self : from);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const unsigned self = simulator_lane(), from = self + lanes;
    return simulator_shuffle_value(mask, value, from / width != self / width ? self : from);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const unsigned self = simulator_lane();
    return simulator_shuffle_value(mask, value, self % width < lanes ? self : self - lanes);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return simulator_ballot(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return simulator_ballot(mask, predicate != 0) != 0; }

// --- Atomics: streams run at the same time ---------------------------------------------------------------------------------------

template <class T, class Change> T simulator_atomic(T *at, Change change) {
    typedef std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>> Bits;
    static_assert(sizeof(T) == sizeof(Bits), "2, 4 or 8 bytes");
    auto *bits = reinterpret_cast<Bits *>(at);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    T old;
    do {
        std::memcpy(&old, &before, sizeof old);
        const T value = change(old);
        std::memcpy(&after, &value, sizeof after);
    } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T> T atomicAdd(T *at, std::common_type_t<T> x) {
    return simulator_atomic(at, [x](T old) { return (T)(old + x); });
}
template <class T> T atomicMax(T *at, std::common_type_t<T> x) {
    return simulator_atomic(at, [x](T old) { return old < x ? x : old; });
}
template <class T> T atomicMin(T *at, std::common_type_t<T> x) {
    return simulator_atomic(at, [x](T old) { return x < old ? x : old; });
}
template <class T> T atomicExch(T *at, std::common_type_t<T> x) {
    return simulator_atomic(at, [x](T) { return x; });
}
template <class T> T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> x) {
    return simulator_atomic(at, [=](T old) { return old == expected ? x : old; });
}

// --- Bits and numbers --------------------------------------------------------------------------------------------------------------

template <class To, class From> To simulator_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return simulator_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return simulator_bits<float>(x); }
inline int __float_as_int(float x) { return simulator_bits<int>(x); }
inline float __int_as_float(int x) { return simulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return simulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return simulator_bits<double>(x); }
template <class T> T __ldg(const T *at) { return *at; }

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
using std::max;
using std::min;
// CUDA's compare numbers of any two types.
template <class A, class B, class C = std::common_type_t<A, B>> C max(A a, B b) { return std::max<C>(a, b); }
template <class A, class B, class C = std::common_type_t<A, B>> C min(A a, B b) { return std::min<C>(a, b); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }

// What the headers leave to the GPU: through f32, rounded once.
#define SIMULATOR_HALF(name, function) \
    inline __half name(__half x) { return __float2half(function(__half2float(x))); } \
    inline __nv_bfloat16 name(__nv_bfloat16 x) { return __float2bfloat16(function(__bfloat162float(x))); }
SIMULATOR_HALF(hsqrt, sqrtf)
SIMULATOR_HALF(hrsqrt, rsqrtf)
SIMULATOR_HALF(hcos, cosf)
SIMULATOR_HALF(hsin, sinf)
SIMULATOR_HALF(hexp, expf)
SIMULATOR_HALF(hlog, logf)
SIMULATOR_HALF(hceil, ceilf)
SIMULATOR_HALF(hfloor, floorf)
#undef SIMULATOR_HALF
