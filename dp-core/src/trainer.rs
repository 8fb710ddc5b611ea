//! The interface that data parallelism and all ZeRO stages have in common.

use std::path::{Path, PathBuf};

use candle_core::Tensor;

use crate::bucket::BucketLayout;
use crate::checkpoint::{LoadOptions, LoadedCheckpoint, PendingSave, SaveOptions};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::loss::Loss;
use crate::memory::Ledger;
use crate::norm::GradNorm;
use crate::optim::{LrSchedule, Optimizer, ParamGroup};
use crate::report::{LocalReport, StepRecord, StepReport};
use crate::store::ParamStore;

/// Trains one rank's replica together with the other ranks.
///
/// The trait is dyn-compatible: `Box<dyn Trainer<Optimizer = AdamW>>` chooses the strategy at run time.
///
/// A step is `backward`, optionally `clip_grad_norm`, then `step`; every rank does the same. Gradients are averaged over
/// the ranks and over the micro-batches of the step: with a loss that is a mean over the rank's own samples, `N` ranks
/// compute what one rank computes on the joined batch, if all hold equally many samples.
pub trait Trainer {
    /// The optimizer's hyper-parameters.
    type Optimizer: Optimizer;

    #[doc(hidden)]
    fn engine(&self) -> &Engine<Self::Optimizer>;

    #[doc(hidden)]
    fn engine_mut(&mut self) -> &mut Engine<Self::Optimizer>;

    /// Computes the gradients of `loss`, one number, and reduces them over the ranks while they appear. In the place of
    /// candle's `loss.backward()`.
    ///
    /// # Errors
    /// [`Error::Misuse`] if gradients of an earlier backward wait for `step`; those of Candle and of the collectives.
    fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_weighted(Loss::PerRank(loss))
    }

    /// Like [`backward`](Self::backward), where ranks hold different numbers of samples or tokens, or none; see [`Loss`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::Module;
    /// # use dp_core::{DistributedDataParallel, Loss, ParamStore, Result, Sgd, Trainer, World, max_over_ranks};
    /// # fn main() -> Result<()> {
    /// # World::threads(2)?.run(|rank| {
    /// # let store = ParamStore::new(rank.device());
    /// # let model = candle_nn::linear(2, 1, store.var_builder(DType::F32))?;
    /// # let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
    /// # let batches = vec![Tensor::ones((4, 2), DType::F32, &Device::Cpu)?; 3 - rank.rank()];
    /// let steps = max_over_ranks(rank.comm().as_ref(), batches.len())?;
    /// for i in 0..steps {
    ///     match batches.get(i) {
    ///         Some(x) => {
    ///             let loss = model.forward(x)?.sqr()?.mean_all()?;
    ///             trainer.backward_weighted(Loss::Mean { loss: &loss, count: x.dim(0)? })?;
    ///         }
    ///         None => trainer.backward_weighted(Loss::Nothing)?, // joins the others, with weight 0
    ///     }
    ///     trainer.step()?;
    /// }
    /// # assert_eq!(trainer.num_steps(), 3);
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    fn backward_weighted(&mut self, loss: Loss<'_>) -> Result<()> {
        self.engine_mut().backward(loss, 0, true)
    }

    /// Says that the forward begins now, so that what the program did since the last step (drawing a batch, an evaluation, a
    /// checkpoint) counts neither for [`LocalReport::forward`] nor for [`LocalReport::total`], and is not drawn in a
    /// [`Timeline`](crate::Timeline). Without it, the forward begins where the last step ended. Local to the rank.
    fn begin_forward(&mut self) {
        self.engine_mut().begin_forward();
    }

    /// Begins a step that averages `num_micro_batches` backward passes; see [`Accumulation`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0; [`Error::Misuse`] if gradients wait for `step`.
    fn accumulate(
        &mut self,
        num_micro_batches: usize,
    ) -> Result<Accumulation<'_, Self::Optimizer>> {
        if num_micro_batches == 0 {
            return Err(Error::invalid(
                "num_micro_batches",
                "a step needs at least one micro-batch, got 0",
            ));
        }
        self.engine().require_empty_window("accumulate")?;
        Ok(Accumulation {
            engine: self.engine_mut(),
            num_micro_batches,
            done: 0,
        })
    }

    /// Scales the gradients of this step so that their 2-norm over all parameters is at most `max_norm`, and returns
    /// the norm before: `torch.nn.utils.clip_grad_norm_`. Each element counts once, padding never. The norm is the
    /// same number on all ranks, in all stages and for all bucket caps, to the bit.
    ///
    /// # Errors
    /// [`Error::Misuse`] without gradients or when called twice; [`Error::InvalidArgument`] unless `max_norm > 0`.
    fn clip_grad_norm(&mut self, max_norm: f64) -> Result<f64> {
        self.engine_mut().clip_grad_norm(GradNorm::L2, max_norm)
    }

    /// [`clip_grad_norm`](Self::clip_grad_norm) by another norm (`norm_type` in PyTorch).
    ///
    /// # Errors
    /// As [`clip_grad_norm`](Self::clip_grad_norm).
    fn clip_grad_norm_by(&mut self, norm: GradNorm, max_norm: f64) -> Result<f64> {
        self.engine_mut().clip_grad_norm(norm, max_norm)
    }

    /// Waits for the reductions, and updates the parameters: each rank those elements whose state it keeps.
    ///
    /// # Errors
    /// [`Error::Misuse`] without gradients; those of the collectives.
    fn step(&mut self) -> Result<StepReport> {
        self.engine_mut().step()
    }

    /// [`backward`](Self::backward) and [`step`](Self::step) in one call, where nothing comes in between. In the place of
    /// candle_nn's `Optimizer::backward_step`.
    ///
    /// # Errors
    /// As both.
    fn backward_step(&mut self, loss: &Tensor) -> Result<StepReport> {
        self.backward(loss)?;
        self.step()
    }

    /// What the last step took on this rank: times, bytes sent, memory. All zero before the first step.
    fn local_report(&self) -> &LocalReport {
        self.engine().clock.last()
    }

    /// The last step as one flat JSON object, for a metrics file with a line per step; `report` is what [`step`](Self::step) has returned.
    ///
    /// ```
    /// # use candle_core::DType;
    /// # use candle_nn::Module;
    /// # use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Trainer, World};
    /// # fn main() -> Result<()> {
    /// # World::threads(1)?.run(|rank| {
    /// # let store = ParamStore::new(rank.device());
    /// # let model = candle_nn::linear(2, 1, store.var_builder(DType::F32))?;
    /// # let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
    /// # let x = candle_core::Tensor::ones((4, 2), DType::F32, rank.device())?;
    /// trainer.backward(&model.forward(&x)?.sqr()?.mean_all()?)?;
    /// let report = trainer.step()?;
    /// let line = serde_json::to_string(&trainer.record(&report)).expect("a record is plain data");
    /// assert!(line.starts_with(r#"{"step":1,"loss":"#));
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    fn record(&self, report: &StepReport) -> StepRecord {
        let groups = self.param_groups().iter().map(ParamGroup::name);
        StepRecord::new(
            report,
            self.local_report(),
            self.engine().comm().rank(),
            groups,
        )
    }

    /// Forgets the gradients of a backward or an accumulation that no step shall use. All ranks call it.
    ///
    /// # Errors
    /// Those of the collectives under way.
    fn zero_grad(&mut self) -> Result<()> {
        self.engine_mut().zero_grad()
    }

    /// The parameters.
    fn store(&self) -> &ParamStore {
        self.engine().store()
    }

    /// Bytes this trainer and its parameters hold.
    fn ledger(&self) -> &Ledger {
        self.store().ledger()
    }

    /// The bucket layout.
    fn layout(&self) -> &BucketLayout {
        self.engine().layout()
    }

    /// `ddp`, `zero1`, `zero2`.
    fn strategy_name(&self) -> &'static str {
        self.engine().strategy_name()
    }

    /// Number of optimizer steps taken.
    fn num_steps(&self) -> u64 {
        self.engine().num_steps()
    }

    /// The parameter groups.
    fn param_groups(&self) -> &[ParamGroup<Self::Optimizer>] {
        self.engine().groups().groups()
    }

    /// The parameter groups, to change hyper-parameters between steps; change them alike on all ranks.
    fn param_groups_mut(&mut self) -> &mut [ParamGroup<Self::Optimizer>] {
        self.engine_mut().groups_mut().groups_mut()
    }

    /// Sets the learning rate of all groups; call it alike on all ranks.
    fn set_learning_rate(&mut self, lr: f64) {
        for group in self.param_groups_mut() {
            group.optimizer.set_learning_rate(lr);
        }
    }

    /// Multiplies the learning rates by a schedule's factor from now on; call it alike on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the schedule's field.
    fn set_lr_schedule(&mut self, schedule: LrSchedule) -> Result<()> {
        self.engine_mut().set_schedule(schedule)
    }

    /// Overwrites a parameter, a frozen one, or a buffer by `values`, converted to its dtype; rank 0's count. Its f32 master, if
    /// it has one, becomes that value, as it is in the parameter's dtype; optimizer state stays. Collective; between two steps.
    ///
    /// # Errors
    /// [`Error::Parameter`] for an unknown name, another shape, or a value out of the dtype's range, on the other ranks
    /// [`Error::InvalidArgument`] that names the rank; [`Error::Misuse`] while gradients wait for `step`; those of the
    /// collectives.
    fn set_parameter(&mut self, name: &str, values: &Tensor) -> Result<()> {
        self.engine_mut().set_parameter(name, values)
    }

    /// Makes what the trained parameters hold on rank 0 the value on all ranks, and the f32 masters of 16-bit parameters with it
    /// where they are another one (`refresh_fp32_params` in DeepSpeed). For code that has written parameters itself; without it the next step fails with
    /// [`Error::Altered`]. Collective; also between backward and step.
    ///
    /// # Errors
    /// Those of the collectives.
    fn refresh_masters(&mut self) -> Result<()> {
        self.engine_mut().refresh_masters()
    }

    /// What the losses of the next step are multiplied by; `None` without [`LossScaling`](crate::LossScaling).
    fn loss_scale(&self) -> Option<f64> {
        self.engine().loss_scale.state.map(|s| s.scale)
    }

    /// Saves parameters, optimizer state, step count and settings as a new checkpoint in the folder `run`, and makes it the
    /// latest there. Collective; between two steps. All ranks need to see the same folder, and the slowest rank must have
    /// written its file within the World's timeout after the fastest. A folder belongs to one trainer. See
    /// [`checkpoint`](crate::checkpoint).
    ///
    /// Returns the checkpoint's own folder, when it is complete and on the disk.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks: nothing is left of the new checkpoint, and the latest is still the
    /// one before. [`Error::Misuse`] while gradients wait for `step`; those of the collectives.
    fn save(&self, run: &Path) -> Result<PathBuf> {
        self.save_with(run, &SaveOptions::default())
    }

    /// [`save`](Self::save) with settings.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn save_with(&self, run: &Path, options: &SaveOptions) -> Result<PathBuf> {
        self.engine().save(run, options)
    }

    /// [`save_with`](Self::save_with), but files are written by another thread, from a copy of this rank's share that is in
    /// the [`ledger`](Self::ledger) until they are. Training goes on at once; the checkpoint counts when
    /// [`PendingSave::wait`] has returned.
    ///
    /// # Errors
    /// As [`save`](Self::save), for what can be known at once.
    fn save_in_background(&self, run: &Path, options: &SaveOptions) -> Result<PendingSave> {
        self.engine().save_in_background(run, options)
    }

    /// Loads the checkpoint at `path`, or the latest one of the run whose folder `path` is, saved by any strategy on any
    /// number of ranks with any bucket caps. Parameters are found by name. Collective.
    ///
    /// Values, optimizer state and step counts are those saved, to the bit; with the same number of ranks the run goes on
    /// as if it had never stopped, if data order and random generators do ([`SaveOptions::with_data`],
    /// [`SaveOptions::with_rank_state`]). Everything must match, unless [`load_with`](Self::load_with) allows more.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks, before anything is changed. If the disk fails later on, the trainer
    /// refuses to train until a load has succeeded.
    fn load(&mut self, path: &Path) -> Result<LoadedCheckpoint> {
        self.load_with(path, &LoadOptions::default())
    }

    /// [`load`](Self::load) with settings.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn load_with(&mut self, path: &Path, options: &LoadOptions) -> Result<LoadedCheckpoint> {
        self.engine_mut().load(path, options)
    }

    /// [`load_with`](Self::load_with) for the start of a program that may be a restart: `None` if the run has no complete
    /// checkpoint yet.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn load_latest(
        &mut self,
        run: &Path,
        options: &LoadOptions,
    ) -> Result<Option<LoadedCheckpoint>> {
        self.engine_mut().load_latest(run, options)
    }

    /// Writes the values of all parameters and buffers to one safetensors file, which `VarBuilder::from_mmaped_safetensors`,
    /// `VarMap::load` and other languages read. Tied weights are there once, by their name. Rank 0 writes, one chunk at
    /// a time; an existing file is replaced when the new one is complete. Collective.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks.
    fn export_safetensors(&self, path: &Path) -> Result<()> {
        self.engine().export_safetensors(path)
    }

    /// Takes the values of all parameters and buffers from a safetensors file, which rank 0 reads; the file's dtype is
    /// converted. Optimizer state and step count stay. Collective. To start from a file, rather than to change over to it,
    /// see [`ParamStore::with_initial_values`].
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks, before anything is changed.
    fn import_safetensors(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        self.engine_mut().import_safetensors(path, options)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Those of the collectives.
    fn barrier(&self) -> Result<()> {
        self.engine().comm().barrier()
    }
}

/// Several backward passes that make one step; `no_sync` in PyTorch, `gradient_accumulation_steps` in DeepSpeed.
///
/// Gradients are reduced with the last micro-batch (by strategies that shard gradients: with each). A window may end
/// early, at the end of an epoch, by [`finish`](Self::finish); then the mean is over the micro-batches there were. All
/// ranks do the same number; one that has no data left passes [`Loss::Nothing`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Trainer, World};
/// # fn main() -> Result<()> {
/// # World::threads(1)?.run(|rank| {
/// # let store = ParamStore::new(rank.device());
/// # let model = candle_nn::linear(2, 1, store.var_builder(DType::F32))?;
/// # let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
/// # let micro_batches = vec![Tensor::ones((4, 2), DType::F32, &Device::Cpu)?; 3];
/// let mut window = trainer.accumulate(micro_batches.len())?;
/// for x in &micro_batches {
///     window.backward(&model.forward(x)?.mean_all()?)?;
/// }
/// window.finish()?;
/// trainer.step()?;
/// # Ok(())
/// # })
/// # }
/// ```
///
/// The guard borrows the trainer, so a step in the middle of a window does not compile:
///
/// ```compile_fail,E0499
/// # use dp_core::{DistributedDataParallel, Result, Sgd, Trainer};
/// # use candle_core::Tensor;
/// fn step_too_early(trainer: &mut DistributedDataParallel<Sgd>, loss: &Tensor) -> Result<()> {
///     let mut window = trainer.accumulate(2)?;
///     window.backward(loss)?;
///     trainer.step()?;
///     window.backward(loss)
/// }
/// ```
#[derive(Debug)]
#[must_use = "call backward for each micro-batch, then finish"]
pub struct Accumulation<'a, O: Optimizer> {
    engine: &'a mut Engine<O>,
    num_micro_batches: usize,
    done: usize,
}

impl<O: Optimizer> Accumulation<'_, O> {
    /// Adds the gradients of one micro-batch.
    ///
    /// # Errors
    /// [`Error::Misuse`] after the last one; otherwise as [`Trainer::backward`].
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_weighted(Loss::PerRank(loss))
    }

    /// Adds the gradients of one micro-batch with its weight; see [`Loss`].
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_weighted(&mut self, loss: Loss<'_>) -> Result<()> {
        if self.done == self.num_micro_batches {
            let message = format!("all {} micro-batches of this window are done", self.done);
            return Err(Error::misuse("Accumulation::backward", message));
        }
        let last = self.done + 1 == self.num_micro_batches;
        self.engine.backward(loss, self.done, last)?;
        self.done += 1;
        Ok(())
    }

    /// As [`Trainer::begin_forward`], for the next micro-batch.
    pub fn begin_forward(&mut self) {
        self.engine.begin_forward();
    }

    /// Ends the window; call `step` next. Without any micro-batch there is nothing to step.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn finish(self) -> Result<()> {
        self.engine.end_window()
    }

    /// Micro-batches done so far.
    pub fn num_done(&self) -> usize {
        self.done
    }
}
