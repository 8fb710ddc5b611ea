// Stochastic gradient descent, in the rounding order of the host code, with the division, clipping and 16-bit copy of AdamW's
// kernel.

struct SgdArgs {
    Flat flat;
    f32 lr, decay, momentum, keep, grad_scale;
    u32 first, nesterov;
};

__device__ inline void sgd_element(const SgdArgs &f, f32 grad, f32 &value, f32 &buffer) {
    f32 g = grad / f.flat.divisor * f.grad_scale;
    if (f.decay != 0.0f) {
        g = g + f.decay * value;
    }
    f32 direction = g;
    if (f.momentum != 0.0f) {
        buffer = f.first ? g : buffer * f.momentum + g * f.keep;
        direction = f.nesterov ? g + f.momentum * buffer : buffer;
    }
    value = value - direction * f.lr;
}

template <class G, class P> __device__ inline void sgd(const SgdArgs &f) {
    const G *grads = (const G *)f.flat.grad;
    P *parameters = (P *)f.flat.rounded;
    u64 len = f.flat.len;
    bool has_state = f.momentum != 0.0f;
    for (u64 i = first_element(); i < len; i += grid_stride()) {
        Tile<G> grad = load(grads, i, len);
        Tile<f32> value = load(f.flat.values, i, len);
        Tile<f32> buffer = Tile<f32>();
        if (has_state) {
            buffer = load(f.flat.state[0], i, len);
        }
        Tile<P> rounded;
        for (int k = 0; k < WIDTH; k++) {
            sgd_element(f, to_f32(grad.at[k]), value.at[k], buffer.at[k]);
            rounded.at[k] = Round<P>::from(value.at[k]);
        }
        store(f.flat.values, i, len, value);
        if (has_state) {
            store(f.flat.state[0], i, len, buffer);
        }
        if (parameters) {
            store(parameters, i, len, rounded);
        }
    }
}

#define SGD(G, P) \
    extern "C" __global__ void __launch_bounds__(THREADS) sgd_##G##_##P(SgdArgs args) { sgd<G, P>(args); }
FOR_FLOAT_PAIRS(SGD)
