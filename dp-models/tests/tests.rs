//! One test binary, a module per topic.

/// Shared vocabulary: fixtures, comparison, models with known values.
mod support;

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

/// The fused layers against composed operations in f64: values, gradients, odd shapes, threads.
mod fused;
