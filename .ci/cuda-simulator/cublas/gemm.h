// Matrix multiplication on the CPU: C = alpha op(A) op(B) + beta C, column-major as in BLAS.
//
// m, n, k: op(A) is m x k, op(B) is k x n, C is m x n. Blocks of both factors are copied into the order in which the inner loop reads
// them, which also turns transposed and 16-bit matrices into plain ones. Sums are in f32, or in f64 for f64.

#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace simulator {

template <class T>
struct Matrix {
    T *data;
    ptrdiff_t leading; // elements from one column to the next
    bool transposed;

    T &at(ptrdiff_t row, ptrdiff_t column) const {
        return transposed ? data[row * leading + column] : data[column * leading + row];
    }
};

template <class Sum>
struct Tile {
    typedef Sum Vector __attribute__((vector_size(32)));
    static constexpr int LANES = 32 / sizeof(Sum);
    static constexpr int ROWS = 2 * LANES;
    static constexpr int COLUMNS = 6;

    // The tile's sum over k of left[k][ROWS] right[k][COLUMNS], added to `sums`, whose columns are `leading` apart.
    static void add_product(int k, const Sum *left, const Sum *right, Sum *sums, ptrdiff_t leading) {
        Vector sum[COLUMNS][2] = {};
        for (int p = 0; p < k; p++) {
            Vector a0, a1;
            __builtin_memcpy(&a0, left + p * ROWS, sizeof a0);
            __builtin_memcpy(&a1, left + p * ROWS + LANES, sizeof a1);
            for (int j = 0; j < COLUMNS; j++) {
                Sum b = right[p * COLUMNS + j];
                sum[j][0] += a0 * b;
                sum[j][1] += a1 * b;
            }
        }
        for (int j = 0; j < COLUMNS; j++) {
            for (int i = 0; i < ROWS; i++) {
                sums[j * leading + i] += sum[j][i / LANES][i % LANES];
            }
        }
    }
};

// `get(depth, lane)` for all lanes of one panel of `width`, then the next panel; lanes from `count` on are 0.
template <class Sum, class Get>
void pack(std::vector<Sum> &packed, int width, int count, int depth, Get get) {
    packed.resize(static_cast<size_t>((count + width - 1) / width) * width * depth);
    Sum *next = packed.data();
    for (int first = 0; first < count; first += width) {
        for (int p = 0; p < depth; p++) {
            for (int lane = first; lane < first + width; lane++) {
                *next++ = lane < count ? get(p, lane) : Sum(0);
            }
        }
    }
}

// In may be const. C is not read if beta is 0, as in BLAS: it may hold anything.
template <class Sum, class A, class B, class C>
void gemm(int m, int n, int k, Sum alpha, Matrix<A> a, Matrix<B> b, Sum beta, Matrix<C> c) {
    using Panel = Tile<Sum>;
    constexpr int M = 8 * Panel::ROWS, N = 40 * Panel::COLUMNS, K = 256;
    thread_local std::vector<Sum> left, right, sums;
    sums.resize(static_cast<size_t>(M) * N);
    for (int column = 0; column < n; column += N) {
        int columns = std::min(N, n - column);
        for (int row = 0; row < m; row += M) {
            int rows = std::min(M, m - row);
            std::fill(sums.begin(), sums.end(), Sum(0));
            for (int depth = 0; depth < k; depth += K) {
                int depths = std::min(K, k - depth);
                pack(left, Panel::ROWS, rows, depths,
                     [&](int p, int i) { return static_cast<Sum>(a.at(row + i, depth + p)); });
                pack(right, Panel::COLUMNS, columns, depths,
                     [&](int p, int j) { return static_cast<Sum>(b.at(depth + p, column + j)); });
                for (int j = 0; j < columns; j += Panel::COLUMNS) {
                    for (int i = 0; i < rows; i += Panel::ROWS) {
                        Panel::add_product(depths, &left[static_cast<size_t>(i) * depths], &right[static_cast<size_t>(j) * depths],
                                           &sums[static_cast<size_t>(j) * M + i], M);
                    }
                }
            }
            for (int j = 0; j < columns; j++) {
                for (int i = 0; i < rows; i++) {
                    C &to = c.at(row + i, column + j);
                    Sum product = alpha * sums[static_cast<size_t>(j) * M + i];
                    to = beta == Sum(0) ? C(product) : C(product + beta * static_cast<Sum>(to));
                }
            }
        }
    }
}

} // namespace simulator
