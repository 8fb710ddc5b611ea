// 16-bit parameters against their f32 masters.

struct MasterArgs {
    f32 *masters;
    const void *values;
    u32 *altered;
    u64 len;
};

__device__ inline bool is_nan(f32 x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }

// A NaN is a NaN, whatever its bits.
template <class P> __device__ inline bool is_rounded(f32 master, f32 value) {
    f32 rounded = to_f32(Round<P>::from(master));
    return __float_as_uint(rounded) == __float_as_uint(value) || (is_nan(rounded) && is_nan(value));
}

template <class P> __device__ inline void find_altered(const MasterArgs &a) {
    const P *values = (const P *)a.values;
    bool same = true;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<f32> master = load(a.masters, i, a.len);
        Tile<P> value = load(values, i, a.len);
        for (int k = 0; k < WIDTH; k++) {
            same = same && is_rounded<P>(master.at[k], to_f32(value.at[k]));
        }
    }
    if (!same) {
        *a.altered = 1;
    }
}

template <class P> __device__ inline void refresh_altered(const MasterArgs &a) {
    const P *values = (const P *)a.values;
    for (u64 i = first_element(); i < a.len; i += grid_stride()) {
        Tile<f32> master = load(a.masters, i, a.len);
        Tile<P> value = load(values, i, a.len);
        for (int k = 0; k < WIDTH; k++) {
            f32 wide = to_f32(value.at[k]);
            master.at[k] = is_rounded<P>(master.at[k], wide) ? master.at[k] : wide;
        }
        store(a.masters, i, a.len, master);
    }
}

#define MASTERS(P) \
    extern "C" __global__ void __launch_bounds__(THREADS) find_altered_##P(MasterArgs args) { find_altered<P>(args); } \
    extern "C" __global__ void __launch_bounds__(THREADS) refresh_altered_##P(MasterArgs args) { \
        refresh_altered<P>(args); \
    }
FOR_FLOATS(MASTERS)
