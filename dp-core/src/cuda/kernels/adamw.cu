// AdamW, in the rounding order of the host code: division by what the reduction has left, clipping, moments, parameter, and
// its 16-bit copy, in one pass.

struct AdamWArgs {
    Flat flat;
    f32 decay, beta1, beta2, rest1, rest2, correction1, correction2, lr, eps, grad_scale;
};

__device__ inline void adamw_element(const AdamWArgs &f, f32 grad, f32 &value, f32 &m, f32 &v) {
    f32 g = grad / f.flat.divisor * f.grad_scale;
    m = m * f.beta1 + g * f.rest1;
    v = v * f.beta2 + (g * g) * f.rest2;
    f32 m_hat = m * f.correction1;
    f32 v_hat = v * f.correction2;
    value = value * f.decay - (m_hat / (sqrtf(v_hat) + f.eps)) * f.lr;
}

template <class G, class P> __device__ inline void adamw(const AdamWArgs &f) {
    const G *grads = (const G *)f.flat.grad;
    P *parameters = (P *)f.flat.rounded;
    u64 len = f.flat.len;
    for (u64 i = first_element(); i < len; i += grid_stride()) {
        Tile<G> grad = load(grads, i, len);
        Tile<f32> value = load(f.flat.values, i, len);
        Tile<f32> m = load(f.flat.state[0], i, len);
        Tile<f32> v = load(f.flat.state[1], i, len);
        Tile<P> rounded;
        for (int k = 0; k < WIDTH; k++) {
            adamw_element(f, to_f32(grad.at[k]), value.at[k], m.at[k], v.at[k]);
            rounded.at[k] = Round<P>::from(value.at[k]);
        }
        store(f.flat.values, i, len, value);
        store(f.flat.state[0], i, len, m);
        store(f.flat.state[1], i, len, v);
        if (parameters) {
            store(parameters, i, len, rounded);
        }
    }
}

#define ADAMW(G, P) \
    extern "C" __global__ void __launch_bounds__(THREADS) adamw_##G##_##P(AdamWArgs args) { adamw<G, P>(args); }
FOR_FLOAT_PAIRS(ADAMW)
