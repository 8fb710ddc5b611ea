//! Training a decoder from a configuration: what `train-gpt` and `finetune` have in common.
//!
//! 0. [`program`]: both programs, from the command line to the exit code.
//! 1. [`config`]: DeepSpeed's keys, and the sections `model`, `data` and `run`; [`pretrained`]: a model that is there already.
//! 2. [`subject`]: what is trained, known without the data. [`job`]: the data loaded, and everything checked that can be
//!    before a rank starts.
//!    [`identity`]: is it the run that a checkpoint is of?
//! 3. [`training`]: the loop, on every rank.
//! 4. [`evaluation`], [`sampling`]: the loss on held-out text, and text of the model's own.
//! 5. [`monitor`]: progress, `metrics.jsonl`, TensorBoard's event files; [`report`]: the report of the run.

pub mod config;
pub mod dataset;
pub mod evaluation;
pub mod identity;
pub mod interrupt;
pub mod job;
pub mod monitor;
pub mod pretrained;
pub mod program;
pub mod report;
pub mod run_folder;
pub mod sampling;
pub mod subject;
pub mod tensorboard;
pub mod tokenizer;
pub mod training;
