//! What kernels are called with: one structure each, laid out as its twin in the CUDA source.
//!
//! Pointers are device addresses. One structure per kernel means one argument per launch, so the order of arguments cannot be
//! wrong, and a test can hand the same bytes to the same source compiled for the host.

use crate::comm::ReduceOp;
use crate::optim::{AdamWFactors, SgdFactors};

/// Most ranks whose buffers one kernel reduces: their addresses are part of its arguments.
pub(crate) const MAX_RANKS: usize = 64;

/// The slices of an optimizer's update, all of `len` elements.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Flat {
    /// f32 parameters, or the f32 masters of 16-bit ones; updated.
    pub values: u64,
    /// The 16-bit parameters, which become `values` rounded; 0 if `values` are the parameters.
    pub rounded: u64,
    /// Reduced gradients.
    pub grad: u64,
    /// f32 optimizer state; 0 where there is none.
    pub state: [u64; 2],
    pub len: u64,
    /// What is left to divide `grad` by.
    pub divisor: f32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AdamWArgs {
    pub flat: Flat,
    pub factors: AdamWFactors,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct SgdArgs {
    pub flat: Flat,
    pub factors: SgdFactors,
}

/// From one slice to another.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvertArgs {
    pub from: u64,
    pub to: u64,
    /// A `u32` that becomes 1 if a result is not finite; 0 if nobody looks.
    pub not_finite: u64,
    pub len: u64,
    pub factor: f32,
    /// 1 to add to what is there, 0 to overwrite it.
    pub accumulate: u32,
}

/// One pass over reduced gradients.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct GradientArgs {
    pub grad: u64,
    pub len: u64,
    /// One f32, the greatest absolute value.
    pub max: u64,
    /// Four `i64`, the sum of squares.
    pub limbs: u64,
    /// A `u32` that becomes 1 if an element is not finite.
    pub not_finite: u64,
    pub divisor: f32,
}

/// 16-bit parameters and their masters.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct MasterArgs {
    pub masters: u64,
    pub values: u64,
    /// A `u32` that becomes 1 if a parameter is not its master rounded.
    pub altered: u64,
    pub len: u64,
}

/// The buffers of several ranks on one device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ReduceArgs {
    pub ranks: [u64; MAX_RANKS],
    pub len: u64,
    pub world_size: u32,
    /// The first rank that gets the results, and the one after the last.
    pub first_output: u32,
    pub end_output: u32,
    /// [`op_code`]
    pub op: u32,
}

pub(super) fn op_code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Mean => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
    }
}

#[cfg(feature = "cuda")]
mod device_repr {
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

    // SAFETY: all of them are repr(C) structures of numbers, without references, and the kernels declare the same ones.
    unsafe impl DeviceRepr for super::AdamWArgs {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for super::SgdArgs {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for super::ConvertArgs {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for super::GradientArgs {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for super::MasterArgs {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for super::ReduceArgs {}
}
