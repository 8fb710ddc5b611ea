// Products of every kind against the three loops of the definition, with leading dimensions and strides that are larger than needed.

#include <cmath>
#include <random>

#include "../half.h"
#include "expect.h"

extern "C" {
int cublasCreate_v2(void **);
int cublasDestroy_v2(void *);
int cublasSetStream_v2(void *, CUstream);
int cublasGemmStridedBatchedEx(void *, int, int, int, int, int, const void *, const void *, int, int, long long, const void *, int, int,
                               long long, const void *, void *, int, int, long long, int, int, int);
int cublasDgemmStridedBatched(void *, int, int, int, int, int, const double *, const double *, int, long long, const double *, int,
                              long long, const double *, double *, int, long long, int);
}

using simulator::Bfloat16;
using simulator::Half;

struct Case {
    int transa, transb, m, n, k, batch;
    float alpha, beta;
};

template <class T>
void check(void *handle, CUstream stream, const Case &c, int type, double tolerance) {
    constexpr int COMPUTE_32F = 68;
    int rows_a = c.transa ? c.k : c.m, columns_a = c.transa ? c.m : c.k;
    int rows_b = c.transb ? c.n : c.k, columns_b = c.transb ? c.k : c.n;
    int lda = rows_a + 3, ldb = rows_b + 1, ldc = c.m + 2;
    size_t stride_a = size_t(lda) * columns_a + 5, stride_b = size_t(ldb) * columns_b + 1, stride_c = size_t(ldc) * c.n + 7;
    std::mt19937 random(1);
    auto numbers = [&](size_t count) {
        std::vector<T> values;
        for (size_t i = 0; i < count; i++) values.push_back(T(float(int(random() % 17) - 8)));
        return values;
    };
    auto a = numbers(stride_a * c.batch), b = numbers(stride_b * c.batch), before = numbers(stride_c * c.batch);
    // Of C, only what is read may be a number.
    if (c.beta == 0) before.assign(before.size(), T(NAN));
    Array<T> on_a(a), on_b(b), on_c(before);
    int code;
    if constexpr (std::is_same_v<T, double>) {
        double alpha = c.alpha, beta = c.beta;
        code = cublasDgemmStridedBatched(handle, c.transa, c.transb, c.m, c.n, c.k, &alpha, on_a.data(), lda, stride_a, on_b.data(), ldb,
                                         stride_b, &beta, on_c.data(), ldc, stride_c, c.batch);
    } else {
        code = cublasGemmStridedBatchedEx(handle, c.transa, c.transb, c.m, c.n, c.k, &c.alpha, on_a.data(), type, lda, stride_a,
                                          on_b.data(), type, ldb, stride_b, &c.beta, on_c.data(), type, ldc, stride_c, c.batch,
                                          COMPUTE_32F, -1);
    }
    EXPECT(code == 0);
    EXPECT(cuStreamSynchronize(stream) == CUDA_SUCCESS);
    auto result = on_c.read();
    for (int i = 0; i < c.batch; i++) {
        for (int column = 0; column < c.n; column++) {
            for (int row = 0; row < ldc; row++) {
                size_t at = i * stride_c + size_t(column) * ldc + row;
                if (row >= c.m) {
                    // Beside the matrix: as it was.
                    EXPECT(c.beta == 0 ? std::isnan(double(result[at])) : double(result[at]) == double(before[at]));
                    continue;
                }
                double sum = 0;
                for (int p = 0; p < c.k; p++) {
                    double left = a[i * stride_a + (c.transa ? size_t(row) * lda + p : size_t(p) * lda + row)];
                    double right = b[i * stride_b + (c.transb ? size_t(p) * ldb + column : size_t(column) * ldb + p)];
                    sum += left * right;
                }
                double expected = c.alpha * sum + (c.beta == 0 ? 0 : c.beta * double(before[at]));
                EXPECT(std::fabs(double(result[at]) - expected) <= tolerance * std::fabs(expected));
            }
        }
    }
}

int main() {
    use_device(0);
    CUstream stream = new_stream();
    void *handle;
    EXPECT(cublasCreate_v2(&handle) == 0);
    EXPECT(cublasSetStream_v2(handle, stream) == 0);
    for (int transa : {0, 1}) {
        for (int transb : {0, 1}) {
            for (Case c : {Case{transa, transb, 1, 1, 1, 1, 1, 0}, Case{transa, transb, 3, 5, 7, 2, 1, 0},
                           Case{transa, transb, 130, 250, 300, 1, 0.5, 2}, Case{transa, transb, 17, 6, 513, 3, 1, 1},
                           Case{transa, transb, 4, 4, 0, 1, 1, 2}}) {
                // Sums of small integers: exact in f32, one rounding in the others.
                check<float>(handle, stream, c, 0, 0);
                check<double>(handle, stream, c, 1, 0);
                check<Half>(handle, stream, c, 2, 0x1p-11);
                check<Bfloat16>(handle, stream, c, 14, 0x1p-8);
            }
        }
    }
    // A leading dimension that is too small is refused, as by cuBLAS.
    float one = 1;
    Array<float> four(std::vector<float>(4, 1));
    EXPECT(cublasGemmStridedBatchedEx(handle, 0, 0, 2, 2, 2, &one, four.data(), 0, 1, 0, four.data(), 0, 2, 0, &one, four.data(), 0, 2, 0,
                                      1, 68, -1) == 7);
    // Every f16 and its neighbours' middle: conversions are exact, and round to even.
    for (uint32_t bits = 0; bits < 0x7c00; bits++) {
        Half low, high;
        low.bits = bits;
        high.bits = bits + 1;
        EXPECT(Half(float(low)).bits == bits && Half(-float(low)).bits == (bits | 0x8000));
        float middle = bits + 1 < 0x7c00 ? (float(low) + float(high)) / 2 : 65520;
        EXPECT(Half(middle).bits == (bits % 2 ? bits + 1 : bits));
    }
    EXPECT(cublasDestroy_v2(handle) == 0);
    puts("cublas: passed");
}
