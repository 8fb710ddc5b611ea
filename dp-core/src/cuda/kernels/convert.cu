// From one slice to another: conversions, and gradients on their way into a bucket. Computed in f32, rounded once.

struct ConvertArgs {
    const void *from;
    void *to;
    u32 *not_finite; // 0 if nobody looks
    u64 len;
    f32 factor;
    u32 accumulate;
};

// A factor of 1 is left out, as on the host: 0 + (-0) would lose its sign.
__device__ inline f32 combine(const ConvertArgs &a, f32 x, f32 before) {
    if (a.factor == 1.0f) {
        return a.accumulate ? before + x : x;
    }
    return (a.accumulate ? before : 0.0f) + x * a.factor;
}

template <class F, class T> __device__ inline void convert(const ConvertArgs &a) {
    const F *from = (const F *)a.from;
    T *to = (T *)a.to;
    bool all_finite = true;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<F> x = load(from, i, a.len);
        Tile<T> result = Tile<T>();
        if (a.accumulate) {
            result = load(to, i, a.len);
        }
        for (int k = 0; k < WIDTH; k++) {
            result.at[k] = Round<T>::from(combine(a, to_f32(x.at[k]), to_f32(result.at[k])));
            all_finite = all_finite && is_finite(to_f32(result.at[k]));
        }
        store(to, i, a.len, result);
    }
    if (a.not_finite && !all_finite) {
        // Whoever writes, writes the same.
        *a.not_finite = 1;
    }
}

#define CONVERT(F, T) \
    extern "C" __global__ void __launch_bounds__(THREADS) convert_##F##_##T(ConvertArgs args) { convert<F, T>(args); }
FOR_FLOAT_PAIRS(CONVERT)
