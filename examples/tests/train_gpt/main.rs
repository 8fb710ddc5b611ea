//! `train-gpt` as a user runs it: a trained model, a run that goes on, a picture, a sample, and what is refused.

/// A run of the program with a configuration that a test changes.
mod support;

/// What a run computes and leaves.
mod training;

/// Runs that are stopped and go on.
mod resuming;

/// What cannot be, or ends badly.
mod refusals;

/// The configurations and the page about them.
mod reference;
