//! Every layer and both decoders on a GPU against the CPU: values and gradients in f32, f16 and bf16, and training. Without a GPU each
//! test says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features cuda --test cuda
//! ```

#[path = "cuda/compare.rs"]
mod compare;
#[path = "cuda/layers.rs"]
mod layers;
#[path = "cuda/models.rs"]
mod models;
