//! The kernels' arithmetic against the host's, bit by bit, without a GPU; and whether NVRTC compiles them.

/// AdamW and SGD: several steps, all dtypes.
mod optimizers;

/// Conversions, and gradients into buckets.
mod conversions;

/// Norm and non-finite gradients.
mod gradients;

/// Masters of 16-bit parameters.
mod masters;

/// Reductions of ranks on one device.
mod reductions;

/// NVRTC, where its library is.
mod nvrtc;

/// The kernels, compiled for the host.
mod emulation;

/// Awkward slices.
mod slices;

use emulation::Emulation;

/// The compiled kernels, or the end of a test that cannot run.
macro_rules! kernels_or_skip {
    () => {
        match crate::cuda::tests::Emulation::get() {
            Some(emulation) => emulation,
            None => return Ok(()),
        }
    };
}
use kernels_or_skip;

/// Calls a generic function with every trained dtype.
macro_rules! for_floats {
    ($f:ident($($arg:expr),*)) => {
        $f::<f32>($($arg),*)?;
        $f::<half::f16>($($arg),*)?;
        $f::<half::bf16>($($arg),*)?;
    };
}
use for_floats;

/// With every pair of them.
macro_rules! for_float_pairs {
    ($f:ident($($arg:expr),*)) => {
        $f::<f32, f32>($($arg),*)?;
        $f::<f32, half::f16>($($arg),*)?;
        $f::<f32, half::bf16>($($arg),*)?;
        $f::<half::f16, f32>($($arg),*)?;
        $f::<half::f16, half::f16>($($arg),*)?;
        $f::<half::f16, half::bf16>($($arg),*)?;
        $f::<half::bf16, f32>($($arg),*)?;
        $f::<half::bf16, half::f16>($($arg),*)?;
        $f::<half::bf16, half::bf16>($($arg),*)?;
    };
}
use for_float_pairs;
