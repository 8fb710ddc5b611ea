//! The arithmetic of the layers on the CPU: plain functions on slices of f32, and conversions from and to 16-bit floats.
//!
//! Each loop over elements is compiled several times, for the vector units of different processors, and the best one is
//! chosen when it first runs. All versions of a loop round alike: no operation is contracted or reordered, and sums are taken
//! in a fixed number of lanes. Neither does the number of threads change a bit. (Products of matrices, by the crate `gemm`, do
//! differ in the last bits between processors.)

mod activation;
mod attention;
mod cross_entropy;
mod elementwise;
mod matmul;
mod norm;
mod rotary;
mod sixteen_bit;
mod vector;

pub(crate) use activation::{
    gelu_erf, gelu_erf_backward, gelu_tanh, gelu_tanh_backward, gelu_tanh_both, silu_gated,
    silu_gated_all, silu_gated_grad_gate,
};
pub(crate) use attention::{Heads, attention_backward, attention_forward};
pub(crate) use cross_entropy::{cross_entropy_backward, cross_entropy_rows, log_sum_exp};
pub(crate) use elementwise::{add, column_sums, multiply_kept};
pub(crate) use matmul::{Mat, matmul};
pub(crate) use norm::{NORM_ROWS, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
pub(crate) use rotary::{rotate_halves, rotate_interleaved};
pub(crate) use sixteen_bit::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
