//! The [`tracing`] spans of a training step.
//!
//! All have the target [`TARGET`], level `DEBUG`, and the fields `rank` and `step`: the number of the step they are part of,
//! from 1, or for checkpoints of the last one taken. Without a subscriber they cost a comparison each, and nothing is allocated.
//!
//! | span | from, to | further fields |
//! |---|---|---|
//! | `forward` | the end of the last step or micro-batch, or [`Trainer::begin_forward`](crate::Trainer::begin_forward), to backward | `micro_batch` |
//! | `backward` | [`Trainer::backward`](crate::Trainer::backward), with what it waits for | `micro_batch` |
//! | `reduction` | of one bucket: from its launch to its last byte, also while other spans are open | `micro_batch`, `bucket`, `bytes`, `op` |
//! | `wait_in_backward` | no buffer is free before an earlier reduction is complete, or reductions are not to overlap | |
//! | `wait` | the first of clipping and step: what is left of the reductions, and the summary of all ranks | |
//! | `clip` | the norm of the gradients, over all ranks | |
//! | `optimizer` | the update of the elements that the rank owns | |
//! | `gather` | updated parameters to all ranks; only with ZeRO | |
//! | `broadcast_buffers` | rank 0's buffers to all ranks, if there are any | |
//! | `save`, `load` | a checkpoint; in the background only the copying | |
//!
//! `micro_batch` counts from 0 in each step. `bytes` is the length of the bucket with padding, in the dtype that is sent, and `op` the
//! collective, e.g. `reduce_scatter(mean)`. Two fields are filled before a span closes: `completed_ns_ago` of a `reduction`, because
//! the rank may see late that it is complete, and `discarded` of a `forward` that turned out not to be one: there was another
//! `begin_forward`, or no backward any more.
//!
//! `forward` and `reduction` have no parent and are not entered. The others are, one inside the other. [`Timeline`](crate::Timeline) draws
//! all of them.

/// The target of all spans of a training step.
pub const TARGET: &str = "dp_core::step";

/// A span of a step that is entered: for work of this thread.
macro_rules! phase {
    ($name:literal, $rank:expr, $step:expr $(, $field:ident = $value:expr)*) => {
        tracing::debug_span!(
            target: $crate::trace::TARGET, $name, rank = $rank, step = $step $(, $field = $value)*
        )
        .entered()
    };
}

/// A span of a step that others may overlap. No parent, which would not close before it.
macro_rules! overlapping {
    ($name:literal, $rank:expr, $step:expr, $($fields:tt)+) => {
        tracing::debug_span!(
            target: $crate::trace::TARGET, parent: None, $name, rank = $rank, step = $step, $($fields)+
        )
    };
}

pub(crate) use {overlapping, phase};
