// What the simulator's own tests are written with. They are programs: the first failure ends one with code 1.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda.h>

#define EXPECT(condition)                                                                                                                  \
    do {                                                                                                                                   \
        if (!(condition)) {                                                                                                                \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                                      \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

// The primary context of a device, current in this thread.
inline CUcontext use_device(int device) {
    EXPECT(cuInit(0) == CUDA_SUCCESS);
    CUcontext context;
    EXPECT(cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS);
    EXPECT(cuCtxSetCurrent(context) == CUDA_SUCCESS);
    return context;
}

inline CUstream new_stream() {
    CUstream stream;
    EXPECT(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    return stream;
}

// Numbers in device memory.
template <class T>
struct Array {
    size_t count;
    CUdeviceptr pointer = 0;

    explicit Array(size_t count) : count(count) { EXPECT(cuMemAlloc(&pointer, count * sizeof(T)) == CUDA_SUCCESS); }
    explicit Array(const std::vector<T> &values) : Array(values.size()) { write(values); }
    ~Array() { cuMemFree(pointer); }
    Array(const Array &) = delete;

    T *data() const { return reinterpret_cast<T *>(pointer); }
    void write(const std::vector<T> &values) {
        EXPECT(cuMemcpyHtoD(pointer, values.data(), values.size() * sizeof(T)) == CUDA_SUCCESS);
    }
    std::vector<T> read() const {
        std::vector<T> values(count);
        EXPECT(cuMemcpyDtoH(values.data(), pointer, count * sizeof(T)) == CUDA_SUCCESS);
        return values;
    }
};
