// The buffers of several ranks on one device, reduced in rank order. 16-bit floats are added in f32 and rounded once.

#define MAX_RANKS 64

struct ReduceArgs {
    void *ranks[MAX_RANKS];
    u64 len;
    u32 world_size, first_output, end_output, op;
};

// What a type is added up in.
template <class T> struct Accumulator {
    typedef T type;
    __device__ static T to(T x) { return x; }
    __device__ static T from(T x) { return x; }
};
template <> struct Accumulator<f16> {
    typedef f32 type;
    __device__ static f32 to(f16 x) { return to_f32(x); }
    __device__ static f16 from(f32 x) { return Round<f16>::from(x); }
};
template <> struct Accumulator<bf16> {
    typedef f32 type;
    __device__ static f32 to(bf16 x) { return to_f32(x); }
    __device__ static bf16 from(f32 x) { return Round<bf16>::from(x); }
};

// Signed sums wrap on the host; in C they do so only without a sign.
__device__ inline i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
template <class A> __device__ inline A plus(A a, A b) { return a + b; }

// As the host numbers them.
enum { SUM, MEAN, MAX, MIN };

// A NaN is unequal to itself, and wins.
template <class A> __device__ inline A combine(u32 op, A a, A b) {
    if (op == MAX) {
        return a != a || a > b ? a : b;
    }
    if (op == MIN) {
        return a != a || a < b ? a : b;
    }
    return plus(a, b);
}

template <class T> __device__ inline void reduce(const ReduceArgs &a) {
    typedef Accumulator<T> Acc;
    typedef typename Acc::type A;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<T> x = load((const T *)a.ranks[0], i, a.len);
        A sum[WIDTH];
        for (int k = 0; k < WIDTH; k++) {
            sum[k] = Acc::to(x.at[k]);
        }
        for (u32 rank = 1; rank < a.world_size; rank++) {
            x = load((const T *)a.ranks[rank], i, a.len);
            for (int k = 0; k < WIDTH; k++) {
                sum[k] = combine<A>(a.op, sum[k], Acc::to(x.at[k]));
            }
        }
        for (int k = 0; k < WIDTH; k++) {
            // Of floats: the mean of integers is refused before.
            x.at[k] = Acc::from(a.op == MEAN ? sum[k] / (A)a.world_size : sum[k]);
        }
        for (u32 rank = a.first_output; rank < a.end_output; rank++) {
            store((T *)a.ranks[rank], i, a.len, x);
        }
    }
}

#define REDUCE(T) \
    extern "C" __global__ void __launch_bounds__(THREADS) reduce_##T(ReduceArgs args) { reduce<T>(args); }
FOR_FLOATS(REDUCE) REDUCE(f64) REDUCE(u8) REDUCE(u32) REDUCE(i64)
