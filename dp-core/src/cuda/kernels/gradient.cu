// One pass over reduced gradients: the parts of the norm, and whether all are finite. An element counts as itself over
// `divisor`. Threads meet in integers, so their order changes nothing.

struct GradientArgs {
    const void *grad;
    u64 len;
    f32 *max;
    u64 *limbs;
    u32 *not_finite;
    f32 divisor;
};

// Absolute values are ordered as their bits are, and a NaN is above infinity: so it wins.
template <class G> __device__ inline void max_abs(const GradientArgs &a) {
    __shared__ u32 of_block;
    const G *grads = (const G *)a.grad;
    u32 max = 0;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<G> grad = load(grads, i, a.len);
        for (int k = 0; k < WIDTH; k++) {
            u32 magnitude = __float_as_uint(to_f32(grad.at[k]) / a.divisor) & 0x7fffffffu;
            max = magnitude > max ? magnitude : max;
        }
    }
    if (threadIdx.x == 0) {
        of_block = 0;
    }
    __syncthreads();
    atomicMax(&of_block, max);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicMax((u32 *)a.max, of_block);
    }
}

// The least e with x < 2^e, for finite x > 0. Every f32 is a normal f64.
__device__ inline int exponent_above(f32 x) {
    return x == 0.0f ? 0 : (int)((__double_as_longlong((f64)x) >> 52) & 0x7ff) - 1022;
}

// (x / 2^e)^2 in units of 2^-62, cut off, for |x| < 2^e. With x = m 2^k it is m^2 shifted.
__device__ inline u64 scaled_square(f32 x, int e) {
    u32 bits = __float_as_uint(x) & 0x7fffffffu;
    u32 field = bits >> 23;
    u64 m = field == 0 ? bits : (bits & 0x7fffffu) | 0x800000u;
    int k = (field == 0 ? 1 : (int)field) - 150;
    int shift = 2 * (k - e) + 62;
    u64 square = m * m;
    return shift >= 0 ? square << shift : shift > -64 ? square >> -shift : 0;
}

template <class G> __device__ inline void sum_of_squares(const GradientArgs &a) {
    __shared__ u64 of_block[3];
    f32 max = *a.max;
    if (!is_finite(max)) {
        return; // all threads alike: the norm is `max`
    }
    int e = exponent_above(max);
    const G *grads = (const G *)a.grad;
    // In halves of 32 bits, a thread may add 2^32 squares.
    u64 high = 0, low = 0;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<G> grad = load(grads, i, a.len);
        for (int k = 0; k < WIDTH; k++) {
            u64 square = scaled_square(to_f32(grad.at[k]) / a.divisor, e);
            high += square >> 32;
            low += square & 0xffffffffu;
        }
    }
    high += low >> 32;
    if (threadIdx.x == 0) {
        of_block[0] = of_block[1] = of_block[2] = 0;
    }
    __syncthreads();
    // Limbs of 32 bits: 2^31 threads may add theirs before a limb is full.
    atomicAdd(&of_block[0], low & 0xffffffffu);
    atomicAdd(&of_block[1], high & 0xffffffffu);
    atomicAdd(&of_block[2], high >> 32);
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int limb = 0; limb < 3; limb++) {
            atomicAdd(&a.limbs[limb], of_block[limb]);
        }
    }
}

template <class G> __device__ inline void find_non_finite(const GradientArgs &a) {
    const G *grads = (const G *)a.grad;
    bool all_finite = true;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<G> grad = load(grads, i, a.len);
        for (int k = 0; k < WIDTH; k++) {
            all_finite = all_finite && is_finite(to_f32(grad.at[k]) / a.divisor);
        }
    }
    if (!all_finite) {
        *a.not_finite = 1;
    }
}

#define GRADIENT(G) \
    extern "C" __global__ void __launch_bounds__(THREADS) max_abs_##G(GradientArgs args) { max_abs<G>(args); } \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares_##G(GradientArgs args) { \
        sum_of_squares<G>(args); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) find_non_finite_##G(GradientArgs args) { \
        find_non_finite<G>(args); \
    }
FOR_FLOATS(GRADIENT)
