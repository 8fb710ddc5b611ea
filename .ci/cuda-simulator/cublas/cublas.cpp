// libcublas.so.13: the functions of cuBLAS that Candle calls. The others are stubs, see stubs.py.
//
// Not simulated: formats with less precision inside (TF32, CUBLAS_COMPUTE_16F). Sums are in f32, those of f64 in f64.

#include <cstdint>

#include "../device_memory.h"
#include "gemm.h"
#include "../half.h"

namespace {

using simulator::Bfloat16;
using simulator::Half;
using simulator::Matrix;

// The values of cuBLAS' enumerations.
enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Operation { OP_N = 0, OP_T = 1, OP_C = 2 };
enum PointerMode { POINTERS_TO_HOST = 0, POINTERS_TO_DEVICE = 1 };
enum DataType { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum ComputeType {
    COMPUTE_16F = 64,
    COMPUTE_16F_PEDANTIC = 65,
    COMPUTE_32F = 68,
    COMPUTE_32F_PEDANTIC = 69,
    COMPUTE_64F = 70,
    COMPUTE_64F_PEDANTIC = 71,
    COMPUTE_32F_FAST_16F = 74,
    COMPUTE_32F_FAST_16BF = 75,
    COMPUTE_32F_FAST_TF32 = 77,
};

struct Handle {
    int device;
    CUstream stream = nullptr;
    int pointer_mode = POINTERS_TO_HOST;
    int math_mode = 0;
};

// What one call of a gemm is about, but for the types.
struct Shape {
    int transa, transb, m, n, k;
};

struct Operand {
    const void *data;
    int leading;
    long long stride; // elements from one matrix of the batch to the next
};

bool is_operation(int op) { return op == OP_N || op == OP_T || op == OP_C; }

// The elements from the first of the batch to behind the last.
size_t extent(int rows, int columns, const Operand &operand, int batch) {
    if (rows == 0 || columns == 0) return 0;
    return static_cast<size_t>(operand.stride) * (batch - 1) + static_cast<size_t>(operand.leading) * (columns - 1) + rows;
}

// A scalar, read when the call is made or, in device memory, when its turn in the stream has come.
template <class Sum, class Scalar>
struct Factor {
    const Scalar *pointer;
    Sum value;

    Factor(const Handle &handle, const void *at) : pointer(static_cast<const Scalar*>(at)), value() {
        if (handle.pointer_mode == POINTERS_TO_HOST) {
            value = static_cast<Sum>(*pointer);
            pointer = nullptr;
        }
    }
    Sum read() const { return pointer ? static_cast<Sum>(*pointer) : value; }
};

template <class T, class Sum, class Scalar>
int gemm_batched(Handle *handle, const Shape &shape, const void *alpha, const Operand &a, const Operand &b, const void *beta,
                 const Operand &c, int batch, const char *call) {
    auto [transa, transb, m, n, k] = shape;
    if (!handle) return NOT_INITIALIZED;
    int rows_a = transa == OP_N ? m : k, rows_b = transb == OP_N ? k : n;
    auto fits = [](const Operand &operand, int rows) { return operand.leading >= std::max(1, rows); };
    if (!is_operation(transa) || !is_operation(transb) || m < 0 || n < 0 || k < 0 || batch < 0 || !alpha || !beta) {
        return INVALID_VALUE;
    }
    if (!fits(a, rows_a) || !fits(b, rows_b) || !fits(c, m)) return INVALID_VALUE;
    if (m == 0 || n == 0 || batch == 0) return SUCCESS;
    Factor<Sum, Scalar> by(*handle, alpha), keep(*handle, beta);
    simulator::enqueue(handle->stream, [=, device = handle->device] {
        size_t elements_a = extent(rows_a, transa == OP_N ? k : m, a, batch);
        size_t elements_b = extent(rows_b, transb == OP_N ? n : k, b, batch);
        simulator::require_device_memory(a.data, elements_a * sizeof(T), device, call, "A");
        simulator::require_device_memory(b.data, elements_b * sizeof(T), device, call, "B");
        simulator::require_device_memory(c.data, extent(m, n, c, batch) * sizeof(T), device, call, "C");
        for (int i = 0; i < batch; i++) {
            auto matrix = [i](const Operand &operand, bool transposed) {
                return Matrix<const T>{static_cast<const T*>(operand.data) + operand.stride * i, operand.leading, transposed};
            };
            T *result = static_cast<T*>(const_cast<void*>(c.data)) + c.stride * i;
            simulator::gemm<Sum>(m, n, k, by.read(), matrix(a, transa != OP_N), matrix(b, transb != OP_N), keep.read(),
                                 Matrix<T>{result, c.leading, false});
        }
    });
    return SUCCESS;
}

int gemm_by_type(Handle *handle, const Shape &shape, const void *alpha, const Operand &a, int type_a, const Operand &b, int type_b,
                 const void *beta, const Operand &c, int type_c, int batch, int compute, const char *call) {
    if (type_a == type_b && type_b == type_c) {
        switch (compute) {
            case COMPUTE_32F:
            case COMPUTE_32F_PEDANTIC:
            case COMPUTE_32F_FAST_16F:
            case COMPUTE_32F_FAST_16BF:
            case COMPUTE_32F_FAST_TF32:
                if (type_a == R_32F) return gemm_batched<float, float, float>(handle, shape, alpha, a, b, beta, c, batch, call);
                if (type_a == R_16F) return gemm_batched<Half, float, float>(handle, shape, alpha, a, b, beta, c, batch, call);
                if (type_a == R_16BF) return gemm_batched<Bfloat16, float, float>(handle, shape, alpha, a, b, beta, c, batch, call);
                break;
            case COMPUTE_16F:
            case COMPUTE_16F_PEDANTIC:
                if (type_a == R_16F) return gemm_batched<Half, float, Half>(handle, shape, alpha, a, b, beta, c, batch, call);
                break;
            case COMPUTE_64F:
            case COMPUTE_64F_PEDANTIC:
                if (type_a == R_64F) return gemm_batched<double, double, double>(handle, shape, alpha, a, b, beta, c, batch, call);
                break;
        }
    }
    std::fprintf(stderr, "CUDA simulator: %s of types %d, %d, %d with compute type %d is not simulated\n", call, type_a, type_b, type_c,
                 compute);
    return NOT_SUPPORTED;
}

} // namespace

// Candle's stream comes as a pointer to the runtime's type, which is the driver's.
extern "C" {

int cublasCreate_v2(Handle** handle) {
    if (!handle) return INVALID_VALUE;
    int device = simulator::current_device();
    if (device < 0) return NOT_INITIALIZED;
    *handle = new Handle{device};
    return SUCCESS;
}

int cublasDestroy_v2(Handle *handle) {
    if (!handle) return NOT_INITIALIZED;
    delete handle;
    return SUCCESS;
}

int cublasSetStream_v2(Handle *handle, CUstream stream) {
    if (!handle) return NOT_INITIALIZED;
    handle->stream = stream;
    return SUCCESS;
}

int cublasGetStream_v2(Handle *handle, CUstream *stream) {
    if (!handle) return NOT_INITIALIZED;
    *stream = handle->stream;
    return SUCCESS;
}

int cublasSetPointerMode_v2(Handle *handle, int mode) {
    if (!handle) return NOT_INITIALIZED;
    if (mode != POINTERS_TO_HOST && mode != POINTERS_TO_DEVICE) return INVALID_VALUE;
    handle->pointer_mode = mode;
    return SUCCESS;
}

int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    if (!handle) return NOT_INITIALIZED;
    *mode = handle->pointer_mode;
    return SUCCESS;
}

int cublasSetMathMode(Handle *handle, int mode) {
    if (!handle) return NOT_INITIALIZED;
    handle->math_mode = mode;
    return SUCCESS;
}

int cublasGetMathMode(Handle *handle, int *mode) {
    if (!handle) return NOT_INITIALIZED;
    *mode = handle->math_mode;
    return SUCCESS;
}

int cublasGetVersion_v2(Handle*, int *version) {
    *version = 130100;
    return SUCCESS;
}

int cublasSgemm_v2(Handle *handle, int transa, int transb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b,
                   int ldb, const float *beta, float *c, int ldc) {
    return gemm_batched<float, float, float>(handle, {transa, transb, m, n, k}, alpha, {a, lda, 0}, {b, ldb, 0}, beta, {c, ldc, 0}, 1,
                                             "cublasSgemm");
}

int cublasDgemm_v2(Handle *handle, int transa, int transb, int m, int n, int k, const double *alpha, const double *a, int lda,
                   const double *b, int ldb, const double *beta, double *c, int ldc) {
    return gemm_batched<double, double, double>(handle, {transa, transb, m, n, k}, alpha, {a, lda, 0}, {b, ldb, 0}, beta, {c, ldc, 0}, 1,
                                                "cublasDgemm");
}

int cublasSgemmStridedBatched(Handle *handle, int transa, int transb, int m, int n, int k, const float *alpha, const float *a, int lda,
                              long long stride_a, const float *b, int ldb, long long stride_b, const float *beta, float *c, int ldc,
                              long long stride_c, int batch) {
    return gemm_batched<float, float, float>(handle, {transa, transb, m, n, k}, alpha, {a, lda, stride_a}, {b, ldb, stride_b}, beta,
                                             {c, ldc, stride_c}, batch, "cublasSgemmStridedBatched");
}

int cublasDgemmStridedBatched(Handle *handle, int transa, int transb, int m, int n, int k, const double *alpha, const double *a, int lda,
                              long long stride_a, const double *b, int ldb, long long stride_b, const double *beta, double *c, int ldc,
                              long long stride_c, int batch) {
    return gemm_batched<double, double, double>(handle, {transa, transb, m, n, k}, alpha, {a, lda, stride_a}, {b, ldb, stride_b}, beta,
                                                {c, ldc, stride_c}, batch, "cublasDgemmStridedBatched");
}

int cublasGemmEx(Handle *handle, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int type_a, int lda,
                 const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute, int) {
    return gemm_by_type(handle, {transa, transb, m, n, k}, alpha, {a, lda, 0}, type_a, {b, ldb, 0}, type_b, beta, {c, ldc, 0}, type_c, 1,
                        compute, "cublasGemmEx");
}

int cublasGemmStridedBatchedEx(Handle *handle, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int type_a,
                               int lda, long long stride_a, const void *b, int type_b, int ldb, long long stride_b, const void *beta,
                               void *c, int type_c, int ldc, long long stride_c, int batch, int compute, int) {
    return gemm_by_type(handle, {transa, transb, m, n, k}, alpha, {a, lda, stride_a}, type_a, {b, ldb, stride_b}, type_b, beta,
                        {c, ldc, stride_c}, type_c, batch, compute, "cublasGemmStridedBatchedEx");
}

} // extern "C"
