//! Products of f32 matrices, by the crate `gemm`.

use gemm::Parallelism;

/// A matrix inside a slice.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// `rows` times `cols` numbers in row-major order.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` numbers, `stride` apart.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride: stride,
            col_stride: 1,
        }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    fn is_inside(&self) -> bool {
        is_inside(
            self.data.len(),
            [self.rows, self.cols],
            [self.row_stride, self.col_stride],
        )
    }
}

fn is_inside(len: usize, sizes: [usize; 2], strides: [usize; 2]) -> bool {
    sizes.contains(&0) || (sizes[0] - 1) * strides[0] + (sizes[1] - 1) * strides[1] < len
}

/// `out = scale a b`, or with `add` `out = out + scale a b`. `out` has rows of `b`'s columns, `out_stride` apart. In as many
/// threads as rayon's current pool has, if `parallel`.
///
/// # Panics
/// If sizes do not fit.
pub(crate) fn matmul(
    out: &mut [f32],
    out_stride: usize,
    add: bool,
    a: Mat<'_>,
    b: Mat<'_>,
    scale: f32,
    parallel: bool,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner sizes");
    assert!(
        a.is_inside() && b.is_inside() && is_inside(out.len(), [m, n], [out_stride, 1]),
        "sizes of a product"
    );
    assert!(out_stride >= n || m <= 1, "rows of the result overlap");
    let parallelism = match rayon::current_num_threads() {
        threads if parallel && threads > 1 => Parallelism::Rayon(threads),
        _ => Parallelism::None,
    };
    let stride = |s: usize| s as isize;
    // SAFETY: gemm reads a[i, l] and b[l, j], and reads and writes out[i, j], for i < m, l < k, j < n. All of these lie inside
    // their slices, which was checked above; `out` is borrowed mutably, so it overlaps with neither; its elements are
    // distinct, because its rows do not overlap. Strides fit isize, since slices do.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(out_stride),
            add,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_by_hand() {
        let a = [1., 2., 3., 4., 5., 6.]; // [2, 3]
        let b = [1., 0., 2., 1., 0., 1.]; // [3, 2]
        let mut out = [9f32; 5];
        // Rows 3 apart: the number between them is left alone.
        matmul(
            &mut out,
            3,
            false,
            Mat::new(&a, 2, 3),
            Mat::new(&b, 3, 2),
            1.0,
            false,
        );
        assert_eq!(out, [5., 5., 9., 14., 11.]);
        matmul(
            &mut out,
            3,
            true,
            Mat::new(&a, 2, 3),
            Mat::new(&b, 3, 2),
            0.5,
            false,
        );
        assert_eq!(out, [7.5, 7.5, 9., 21., 16.5]);
        let mut square = [0f32; 4];
        matmul(
            &mut square,
            2,
            false,
            Mat::new(&a, 2, 3),
            Mat::new(&a, 2, 3).t(),
            1.0,
            true,
        );
        assert_eq!(square, [14., 32., 32., 77.]);
    }

    #[test]
    #[should_panic(expected = "sizes of a product")]
    fn a_matrix_that_is_longer_than_its_slice() {
        matmul(
            &mut [0.0; 4],
            2,
            false,
            Mat::new(&[1.0; 5], 2, 3),
            Mat::new(&[1.0; 6], 3, 2),
            1.0,
            false,
        );
    }
}
