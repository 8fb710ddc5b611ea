//! Integration tests of dp-zero: one binary, a module per topic. World sizes are written in the tests, every test that
//! runs ranks has a hang guard.

/// Shared vocabulary: guarded ranks, a trainer of any strategy, a model with every kind of parameter.
mod support;

/// What the public types promise to the compiler, and the conversions between them.
mod api;

/// Data parallelism, stage 1 and stage 2 give the same bits, and W ranks are one rank on the joined batch.
mod parity;

/// Probe parameters with exact values, in every strategy.
mod cases;

/// What goes wrong or late in the middle of backward.
mod backward;

/// How much of the communication backward hides.
mod hidden_communication;

/// Bytes held and bytes sent: counted against predicted.
mod memory;

/// What a step reports: the mean loss on all ranks, times, bytes, a line of a metrics file.
mod step_report;

/// 16-bit parameters with f32 masters: exact values, and the same bits in all strategies.
mod mixed_precision;

/// f32 masters: refreshed, guarded, saved and loaded.
mod masters;

/// Loss scaling for f16.
mod loss_scaling;

/// Gradients that travel in fewer bits than they are kept in.
mod communication_dtype;

/// What a step does when ranks hold different amounts of data, or none.
mod weights;

/// Steps that are skipped or refused on all ranks together; schedules; ranks that have drifted apart.
mod safeguards;

/// DeepSpeed's configurations, read.
mod config;

/// What is said of a configuration that cannot be, and what is no error.
mod config_errors;

/// Misuse, and what only some ranks do: named, or the right value.
mod misuse;

/// Random numbers: different on each rank where they must be, equal where they must be.
mod randomness;

/// Random models, strategies and settings: all compute what one rank computes, bit for bit.
mod property;

/// The communicator that goes wrong, for other modules.
mod faulty;

/// A communicator that delays, fails, panics or loses messages, at every place of two steps.
mod faults;

/// What is planned before a trainer is made is what the trainer counts; the figures of the ZeRO paper.
mod plan;

/// Checkpoints: any trainer loads what any other has saved, and goes on as if nothing had happened.
mod checkpoint;

/// What comes back from a checkpoint: each number and setting, in the right place.
mod checkpoint_state;

/// Checkpoints that cannot be written, are missing, of another model, or out of reach.
mod checkpoint_faults;

/// Files that are damaged: named, never loaded.
mod checkpoint_damage;

/// Plain files of weights: candle reads ours, we read candle's.
mod weight_files;
