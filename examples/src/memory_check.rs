//! Does a job fit into this machine? Asked before anything is allocated.

use anyhow::{bail, ensure};
use candle_core::DType;
use dp_core::{EngineConfig, ParamShapes, World};
use dp_models::ModelConfig;
use dp_zero::{Sharding, TrainerPlan};

use crate::machine;
use crate::options::LARGEST;
use crate::table::size;

/// More than this no model has; with it, no number of bytes leaves 64 bits.
const MOST_PARAMETERS: u128 = 100_000_000_000_000;
const MOST_LAYERS: usize = 10_000;
const MOST_TOKENS: usize = 1 << 26;

/// What decides about the memory of a job whose ranks are threads of one process.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    /// A valid model.
    pub model: &'a ModelConfig,
    /// Of its parameters.
    pub dtype: DType,
    /// Sequences per rank and micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Ranks that share the machine's memory.
    pub ranks: usize,
    /// Strategies that run one after the other.
    pub strategies: &'a [Sharding],
    /// f32 numbers of optimizer state per element.
    pub num_states: usize,
    /// Settings of the trainer.
    pub engine: &'a EngineConfig,
}

impl Demand<'_> {
    /// Refuses a job that takes more than the machine has: on each rank [`TrainerPlan::peak`] with the estimate of activations.
    /// Where the system does not tell how much memory there is, every job passes, and so it does on GPUs, which say themselves
    /// when they are full.
    ///
    /// # Errors
    /// Bytes needed and bytes there; a model that is too large for any machine.
    pub fn check(&self, world: &World) -> anyhow::Result<()> {
        match machine::memory().filter(|_| !world.is_on_gpus()) {
            Some(available) => self.check_against(available),
            None => within_limits(self.model, self.batch, self.context),
        }
    }

    fn check_against(&self, available: u64) -> anyhow::Result<()> {
        within_limits(self.model, self.batch, self.context)?;
        let fits = |per_rank: u64| {
            let needed = u128::from(per_rank) * self.ranks as u128;
            ensure!(
                needed <= u128::from(available),
                "{} ranks take {} ({needed} bytes), the estimate of activations included, but the machine has {} ({available} bytes)",
                self.ranks,
                size(u64::try_from(needed).unwrap_or(u64::MAX)),
                size(available)
            );
            Ok(())
        };
        let activations = self.model.activations(self.batch, self.context, self.dtype);
        // A lower bound that takes no model: Llama computes its rotary angles while it is built, also for a plan.
        let parameters = (self.model.num_params() * self.dtype.size_in_bytes()) as u64;
        fits(parameters + activations.peak)?;

        let specs = ParamShapes::record(self.dtype, |vb| self.model.build(vb))?;
        for sharding in self.strategies {
            let (ranks, states) = (self.ranks, self.num_states);
            let plan = TrainerPlan::of_specs(&specs, ranks, *sharding, states, self.engine)?;
            fits(plan.peak(activations.peak))?;
        }
        Ok(())
    }
}

/// Refuses models and batches so large that their numbers of bytes would leave 64 bits.
///
/// # Errors
/// What is too large, and the limit.
pub fn within_limits(model: &ModelConfig, batch: usize, context: usize) -> anyhow::Result<()> {
    let (hidden, heads) = match model {
        ModelConfig::Gpt2(config) => (0, config.heads),
        ModelConfig::Llama(config) => (config.hidden, config.heads.max(config.num_kv_heads())),
        other => bail!("{}: its limits are not known", other.architecture()),
    };
    let (layers, width, vocab) = (model.layers(), model.width(), model.vocab_size());
    ensure!(
        layers <= MOST_LAYERS,
        "layers: must be at most {MOST_LAYERS}"
    );
    for (name, size) in [
        ("context", model.context()),
        ("width", width),
        ("heads", heads),
        ("hidden", hidden),
        ("vocab_size", vocab),
    ] {
        ensure!(size <= LARGEST, "{name}: must be at most {LARGEST}");
    }
    let wide = |n: usize| n as u128;
    let block = 12 * wide(width) + 3 * wide(hidden);
    ensure!(
        (wide(layers) * block + 2 * wide(vocab)) * wide(width) <= MOST_PARAMETERS,
        "layers, width, hidden, vocab_size: these are more than 100T parameters"
    );
    ensure!(
        batch.saturating_mul(context) <= MOST_TOKENS,
        "{batch} sequences of {context} tokens: must be at most {MOST_TOKENS} tokens per rank and micro-batch"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dp_models::GptConfig;

    fn check(ranks: usize, strategy: Sharding, available: u64) -> anyhow::Result<()> {
        let model = ModelConfig::from(GptConfig::gpt2());
        Demand {
            model: &model,
            dtype: DType::F32,
            batch: 4,
            context: 1024,
            ranks,
            strategies: &[strategy],
            num_states: 2,
            engine: &EngineConfig::default(),
        }
        .check_against(available)
    }

    /// Totals of the page on plans: 6666.37 MiB on each of two ranks with zero2, 7083.94 with ddp.
    #[test]
    fn a_job_fits_if_the_plans_of_all_ranks_do() {
        let mib = |n: u64| n << 20;
        assert!(check(2, Sharding::Zero2, 2 * mib(6667)).is_ok());
        assert!(check(2, Sharding::Ddp, 2 * mib(6667)).is_err());
        let error = check(2, Sharding::Zero2, 2 * mib(6655)).map_err(|e| e.to_string());
        let says = |words: &str| error.as_ref().is_err_and(|e| e.contains(words));
        assert!(says("2 ranks take 13.02 GiB"), "{error:?}");
        assert!(says("has 13.00 GiB"), "{error:?}");
    }

    #[test]
    fn what_no_machine_holds_is_refused_without_looking() {
        let huge = |change: fn(&mut GptConfig)| {
            let mut model = GptConfig::gpt2();
            change(&mut model);
            let checked = within_limits(&model.into(), 1, 1024);
            checked.map_err(|e| e.to_string())
        };
        let says = |checked: Result<(), String>, words: &str| {
            assert!(
                checked.as_ref().is_err_and(|e| e.contains(words)),
                "{checked:?}"
            );
        };
        says(huge(|m| m.layers = usize::MAX), "layers: must be at most");
        says(huge(|m| m.width = usize::MAX), "width: must be at most");
        says(huge(|m| m.vocab_size = 1 << 40), "vocab_size: must be");
        says(huge(|m| (m.layers, m.width) = (10_000, 1 << 20)), "100T");
        assert!(huge(|_| ()).is_ok());
        assert!(within_limits(&GptConfig::gpt2().into(), usize::MAX, 1024).is_err());
    }
}
