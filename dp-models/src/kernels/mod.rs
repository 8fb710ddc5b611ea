//! The arithmetic of the layers on the CPU: plain functions on slices of f32.
//!
//! Each loop over elements is compiled several times, for the vector units of different processors, and the best one is
//! chosen when it first runs. All versions of a loop round alike: no operation is contracted or reordered, and sums are taken
//! in a fixed number of lanes. Neither does the number of threads change a bit. (Products of matrices, by the crate `gemm`, do
//! differ in the last bits between processors.)

mod attention;
mod cross_entropy;
mod elementwise;
mod matmul;
mod norm;
mod vector;

pub(crate) use attention::{Heads, attention_backward, attention_forward};
pub(crate) use cross_entropy::{cross_entropy_backward, cross_entropy_forward};
pub(crate) use elementwise::{add_rows, column_sums, gelu, gelu_backward};
pub(crate) use matmul::{Mat, matmul};
pub(crate) use norm::{layer_norm_backward, layer_norm_forward};
