//! One test binary, a module per topic.

/// Shared vocabulary: fixtures, comparison, models with known values.
mod support;

/// Shared: values and gradients of a layer against f64, finite differences and 16 bits.
mod gradcheck;

/// Shared: the heap of a thread, in bytes.
mod allocations;

/// Each layer and the MLP against PyTorch: values and gradients, odd shapes, 16 bits, errors.
mod layers;

/// The GPT against PyTorch: names, logits, loss and every gradient.
mod gpt_parity;

/// What a GPT is made of: config errors, number, order and initial values of the parameters.
mod gpt_parameters;

/// How a GPT behaves: causality, gradient reach, input errors.
mod gpt_behaviour;

/// A GPT learns a text by heart and repeats it.
mod overfit;

/// Texts, windows and batches.
mod tokens;

/// Dropout: rates, scale, seeds, gradient.
mod dropout;

/// The layers of a GPT, fused against composed in f64: values, gradients, odd shapes, 16 bits, threads.
mod fused;

/// The layers of Llama: values, gradients, odd shapes, 16 bits, errors.
mod llama_layers;

/// Numbers from PyTorch for layers without a fixture, and in bf16.
mod pytorch_values;

/// 16-bit models: mixtures with f32, training, memory of activations.
mod sixteen_bit;

/// A Llama: against Hugging Face (logits, loss, every gradient); its parameters; how it behaves; config errors.
mod llama;

/// Any decoder from a config: JSON, its schema, errors, generation.
mod model_config;

/// GPT-2 in the layout of Hugging Face: logits, both directions to the bit, old files, every error.
mod hugging_face;
