//! Models a Candle user would train, and the differentiable layers that `candle_nn` lacks.
//!
//! A model here knows nothing of ranks. It takes its parameters from a `candle_nn::VarBuilder` and its batch as tensors,
//! so the same model runs in one process, under data parallelism and under ZeRO.
//!
//! # One forward pass of the GPT
//!
//! 1. [`ByteTokens::batch`] cuts windows out of a text: inputs `[B, T]`, and targets, which are the inputs one byte later.
//! 2. [`Gpt::loss`] checks them (length, token ids), looks up token embeddings and adds position embeddings.
//! 3. Each block adds attention, then a multi-layer perceptron, to what it was given:
//!    [`LayerNorm`] -> [`CausalSelfAttention`] (one `qkv` projection, one [`CausalMask`] shared by all blocks, [`softmax`])
//!    -> add; [`LayerNorm`] -> linear -> [`gelu_tanh`] -> linear -> add.
//! 4. A last [`LayerNorm`], and the head turns every position into `V` logits. The tied head is the token embedding itself.
//! 5. [`cross_entropy`] is the mean over all positions of the batch, one scalar on which `backward()` is called.
//!
//! [`Llama`] is the other decoder, with [`RmsNorm`], [`SwiGlu`], and [`Rotary`] positions in an attention whose queries may share
//! keys and values. [`ModelConfig`] is the shape of either, as a config file has it, and builds a [`CausalLm`]: what a program
//! trains, asks for a loss and lets [`generate`](CausalLm::generate) when it does not care which one it is. For other models
//! there are [`gelu_erf`] and [`Dropout`]. [`gpt::hugging_face`] converts published GPT-2 checkpoints, in both directions.
//!
//! # Dtypes
//!
//! On the CPU the layers take f32, f16, bf16 and f64. 16-bit numbers are computed with in f32, sums included, and rounded once
//! where a layer returns them; what stays in memory for the backward pass is 16 bit. [`cross_entropy`] of 16-bit logits is an
//! f32 loss, so there is room to scale it. f32, f16 and bf16 may be mixed: **a result has the dtype of the layer's input, and a
//! gradient that of what it belongs to.** So a bf16 model may keep its [`LayerNorm`] weights, or all weights, in f32. f64 is
//! mixed with nothing.
//!
//! Every step is made of operations with a backward pass, so each parameter gets a gradient. Three fast `candle_nn`
//! operations (its `LayerNorm` on contiguous input, `softmax_last_dim`, `rope`) have none, and are not used.
//!
//! # Example
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_nn::{VarBuilder, VarMap};
//! use dp_models::{ByteTokens, Gpt, GptConfig};
//!
//! let device = Device::Cpu;
//! let config = GptConfig { context: 8, ..GptConfig::mini() };
//! let vars = VarMap::new();
//! let gpt = Gpt::new(&config, VarBuilder::from_varmap(&vars, DType::F32, &device))?;
//!
//! let text = ByteTokens::from_bytes("the cat sat on the mat, the rat sat on the cat")?;
//! let (inputs, targets) = text.batch(&[0, 11, 23], config.context, &device)?;
//! let loss = gpt.loss(&inputs, &targets)?;
//!
//! // An untrained model is as good as guessing: the loss is near ln(256) = 5.55.
//! assert!((loss.to_scalar::<f32>()? - 256f32.ln()).abs() < 0.5);
//! let grads = loss.backward()?;
//! assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
//! # Ok::<(), candle_core::Error>(())
//! ```

pub mod tokens;

pub mod activations;
pub mod gpt;
pub mod llama;
pub mod mlp;

mod causal_lm;
mod generate;
mod model_config;

pub mod kernels;
mod layers;

mod ids;
mod init;
mod safetensors_file;

pub use activations::Activations;
pub use causal_lm::CausalLm;
pub use generate::Sampling;
pub use gpt::{Gpt, GptConfig};
pub use layers::{
    CausalMask, CausalSelfAttention, Dropout, LayerNorm, RmsNorm, Rotary, RotaryPairs, SwiGlu,
    attention, cross_entropy, embed, embedding, gelu_erf, gelu_linear, gelu_tanh, linear,
    silu_gated, silu_gated_linear, softmax,
};
pub use llama::{Llama, LlamaConfig};
pub use mlp::{Activation, Mlp, MlpConfig};
pub use model_config::ModelConfig;
pub use tokens::ByteTokens;
