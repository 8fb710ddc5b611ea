//! The loops of a training step on NVIDIA GPUs: kernels in CUDA C, compiled at run time by NVRTC.
//!
//! [`Kernels`] belongs to a stream. Each method puts its work on it and returns at once; nothing is copied to the host. In
//! the order of a training step:
//!
//! | method | host code | what it does |
//! |---|---|---|
//! | [`read_gradient`](Kernels::read_gradient) | `precision::read_gradient` | a gradient into its bucket, weighted, added, looked at |
//! | [`convert`](Kernels::convert), [`add`](Kernels::add) | `precision::convert`, `add` | between dtypes; sums in f32, rounded once |
//! | [`reduce`](Kernels::reduce), [`broadcast`](Kernels::broadcast) | `comm/reduce.rs` | buffers of several ranks on one device |
//! | [`find_altered`](Kernels::find_altered), [`refresh_altered`](Kernels::refresh_altered) | `masters.rs` | 16-bit parameters against their masters |
//! | [`find_non_finite`](Kernels::find_non_finite) | `mean_gradient.rs` | NaN and infinity in reduced gradients |
//! | [`max_abs`](Kernels::max_abs), [`sum_of_squares`](Kernels::sum_of_squares) | `norm.rs` | the gradient norm |
//! | [`adamw`](Kernels::adamw), [`sgd`](Kernels::sgd) | `optim/` | division, clipping, update and rounding in one pass |
//!
//! **Same bits.** Kernels compute each element by the operations of the host code, in its order; NVRTC is told to contract
//! nothing and to round division and square root as IEEE 754 says. Sums over elements are integers. So the results are the
//! host's to the bit, with one exception: the sign and payload of a NaN that arithmetic makes, which CUDA does not keep. (Conversions keep
//! them.)
//!
//! **Streams.** Candle's `Device::new_cuda` uses the stream of the calling thread, so a `Kernels` made from such a device must be
//! used on the thread that uses the device. Whoever passes what another stream writes has let this one wait for it before:
//! cudarc's slices carry events for that, but a device may be without them (`comm/exchange/cuda.rs` relies on its own).
//!
//! **Lengths** are `u64` throughout, and every kernel is a grid-stride loop, so buffers may be longer than 2^31.

mod args;
mod sources;

#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod convert;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod masters;
#[cfg(feature = "cuda")]
mod norm;
#[cfg(feature = "cuda")]
mod reduce;
#[cfg(feature = "cuda")]
mod update;

#[cfg(feature = "cuda")]
pub(crate) use kernels::{CudaFloat, Kernels};
#[cfg(feature = "cuda")]
pub(crate) use update::Update;
