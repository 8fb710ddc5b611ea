//! Differentiable layers that `candle_nn` lacks, or that are slow to train with.
//!
//! In f32, f16 and bf16 on the CPU each is one node of the graph, a custom operation with a backward pass of its own. Candle's backward
//! allocates zeros and adds to them for each edge, so fewer nodes are what makes training fast. On other devices, and in
//! f64, a layer is composed of Candle's operations.
//!
//! Shapes use these letters: `B` sequences in the batch, `T` positions in a sequence, `D` width of the model, `H` heads,
//! `E = D / H` width of a head, `V` size of the vocabulary, `..` any leading dimensions.
//!
//! 16-bit inputs (f16, bf16) are computed in f32 inside each node and rounded once on the way out; what a node keeps for its
//! backward pass is 16 bit. `values.rs` has the access to numbers of the three types, `chunks.rs` computes with them.

mod activated_linear;
mod causal_mask;
mod causal_self_attention;
mod chunks;
mod cross_entropy;
mod dropout;
mod embedding;
mod gelu;
mod layer_norm;
mod linear;
mod rms_norm;
mod rotary;
mod softmax;
mod swiglu;
mod values;
mod widen;

pub use activated_linear::{gelu_linear, silu_gated_linear};
pub use causal_mask::CausalMask;
pub use causal_self_attention::{CausalSelfAttention, attention};
pub use cross_entropy::cross_entropy;
pub use dropout::Dropout;
pub use embedding::{embed, embedding};
pub use gelu::{gelu_erf, gelu_tanh};
pub use layer_norm::LayerNorm;
pub use linear::linear;
pub use rms_norm::RmsNorm;
pub use rotary::{Rotary, RotaryPairs};
pub use softmax::softmax;
pub use swiglu::{SwiGlu, silu_gated};
