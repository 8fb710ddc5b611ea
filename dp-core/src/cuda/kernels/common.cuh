// Goes before every source: the types, the conversions, and how a grid walks over memory.
//
// Types are named as Rust names them. Conversions are in integers, not the hardware's, because these give a NaN other bits than
// the host does. Nothing here needs CUDA's headers, which are not there when a program runs.

// Once, where several sources are compiled as one.
#ifndef COMMON
#define COMMON

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

__device__ inline f32 to_f32(f32 x) { return x; }

// A bf16 is the upper half of a f32.
__device__ inline f32 to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline f32 to_f32(f16 x) {
    // An exponent of f32 is greater by 127 - 15. The product also normalises what is subnormal.
    const f32 rescale = __uint_as_float((127u + 127u - 15u) << 23);
    u32 finite = __float_as_uint(__uint_as_float((x.bits & 0x7fffu) << 13) * rescale);
    // Infinity and NaN come out as 2^16 and more: their exponent follows.
    u32 special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return __uint_as_float(finite | special | (x.bits & 0x8000u) << 16);
}

// Rounding to nearest even; a NaN becomes quiet and keeps its upper bits.
template <class T> struct Round;

template <> struct Round<f32> {
    __device__ static f32 from(f32 x) { return x; }
};

template <> struct Round<bf16> {
    __device__ static bf16 from(f32 x) {
        u32 bits = __float_as_uint(x);
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return bf16{(unsigned short)(is_nan ? (bits >> 16) | 0x40u : rounded)};
    }
};

template <> struct Round<f16> {
    __device__ static f16 from(f32 x) {
        u32 bits = __float_as_uint(x);
        u32 sign = (bits >> 16) & 0x8000u;
        u32 magnitude = bits & 0x7fffffffu;
        u32 rounded;
        if (magnitude >= (127u + 16u) << 23) { // beyond all finite f16
            bool is_nan = magnitude > 0x7f800000u;
            rounded = is_nan ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
        } else if (magnitude < (127u - 14u) << 23) { // subnormal
            // 1/2 has the last place of a subnormal f16, 2^-24: adding it rounds there.
            const u32 half = (127u - 1u) << 23;
            rounded = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(half)) - half;
        } else {
            // Half a place up, less one where the place is even; a carry goes on into the exponent, up to infinity.
            u32 odd = (magnitude >> 13) & 1u;
            rounded = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
        }
        return f16{(unsigned short)(rounded | sign)};
    }
};

__device__ inline bool is_finite(f32 x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Each thread takes this many neighbours at a time, by one instruction where the address allows it.
#define WIDTH 4
// Threads of a block, at most.
#define THREADS 256

template <class T> struct alignas(WIDTH * sizeof(T)) Tile {
    T at[WIDTH];
};

template <class T> __device__ inline bool is_aligned(const T *slice) {
    return (u64)slice % sizeof(Tile<T>) == 0;
}

// Elements i, i + 1, ... of a slice of `len`; zeros beyond its end.
template <class T> __device__ inline Tile<T> load(const T *slice, u64 i, u64 len) {
    if (i + WIDTH <= len && is_aligned(slice)) {
        return *reinterpret_cast<const Tile<T> *>(slice + i);
    }
    Tile<T> tile;
    for (int k = 0; k < WIDTH; k++) {
        tile.at[k] = i + k < len ? slice[i + k] : T();
    }
    return tile;
}

template <class T> __device__ inline void store(T *slice, u64 i, u64 len, const Tile<T> &tile) {
    if (i + WIDTH <= len && is_aligned(slice)) {
        *reinterpret_cast<Tile<T> *>(slice + i) = tile;
        return;
    }
    for (int k = 0; k < WIDTH; k++) {
        if (i + k < len) {
            slice[i + k] = tile.at[k];
        }
    }
}

// The first element of this thread, and how far it is to its next ones: a grid-stride loop.
__device__ inline u64 first_element() { return ((u64)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; }
__device__ inline u64 grid_stride() { return (u64)gridDim.x * blockDim.x * WIDTH; }

// Kernels of one float, and of two: KERNEL is a macro of the types.
#define FOR_FLOATS(KERNEL) KERNEL(f32) KERNEL(f16) KERNEL(bf16)
#define FOR_FLOAT_PAIRS(KERNEL) \
    KERNEL(f32, f32) KERNEL(f32, f16) KERNEL(f32, bf16) \
    KERNEL(f16, f32) KERNEL(f16, f16) KERNEL(f16, bf16) \
    KERNEL(bf16, f32) KERNEL(bf16, f16) KERNEL(bf16, bf16)

// The slices of an optimizer's update.
struct Flat {
    f32 *values;
    void *rounded; // 0 if `values` are the parameters
    const void *grad;
    f32 *state[2];
    u64 len;
    f32 divisor;
};

#endif
