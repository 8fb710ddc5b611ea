//! Training that can be stopped at any moment: it goes on from its last checkpoint, on as many ranks and with whatever
//! strategy it is given then.
//!
//! ```text
//! cargo run --release --bin resume                                # stop it with Ctrl-C, and start it again
//! cargo run --release --bin resume -- --ranks 4 --strategy zero2
//! ```
use std::path::PathBuf;

use candle_core::{DType, Module, Tensor};
use candle_nn::ModuleT;
use clap::{Parser, ValueEnum};
use dp_core::{
    AdamW, DataPosition, DistributedSampler, EngineConfig, Error, LoadOptions, ParamStore, Rank,
    SaveOptions, World,
};
use dp_examples::{closed_pipe, wines};
use dp_models::Dropout;
use dp_zero::{Sharding, trainer};

const SEED: u64 = 7;
const BATCH: usize = 48;

#[derive(Parser, Clone)]
struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    ranks: u16,
    /// What is sharded over the ranks
    #[arg(long, value_enum, default_value_t = Strategy::Zero1)]
    strategy: Strategy,
    /// Folder of the run
    #[arg(long, default_value = "target/resume")]
    dir: PathBuf,
    /// Optimizer steps of the whole run
    #[arg(long, default_value_t = 400)]
    steps: u64,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    save_every: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Strategy {
    Ddp,
    Zero1,
    Zero2,
}

impl From<Strategy> for Sharding {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Ddp => Self::Ddp,
            Strategy::Zero1 => Self::Zero1,
            Strategy::Zero2 => Self::Zero2,
        }
    }
}

fn main() -> anyhow::Result<()> {
    closed_pipe::end_quietly();
    let options = Options::parse();
    let ranks = usize::from(options.ranks);
    World::from_env_or_threads(ranks)?.run(|rank| train(&options, &rank))
}

fn train(options: &Options, rank: &Rank) -> anyhow::Result<()> {
    let (x, y) = wines::load(rank.device())?;
    let store = ParamStore::new(rank.device()).with_seed(SEED);
    let vb = store.var_builder(DType::F32);
    let hidden = candle_nn::linear(wines::FEATURES, 64, vb.pp("hidden"))?;
    let output = candle_nn::linear(64, 1, vb.pp("output"))?;
    let dropout = Dropout::new(0.1, rank.seed(SEED))?;
    let (comm, adamw) = (rank.comm(), AdamW::with_lr(3e-3));
    let mut trainer = trainer(
        options.strategy.into(),
        store,
        comm,
        adamw,
        EngineConfig::default(),
    )?;

    let sampler =
        DistributedSampler::new(x.dim(0)?, rank.world_size(), rank.rank())?.with_shuffle(SEED);
    let mut position = DataPosition {
        seed: SEED,
        ..DataPosition::default()
    };
    if let Some(loaded) = trainer.load_latest(&options.dir, &LoadOptions::new())? {
        position = loaded.data;
        if let Some(stream) = loaded.rank_state()? {
            dropout.seek(stream);
        }
        if rank.rank() == 0 {
            println!(
                "from step {} of {} ranks, {}",
                loaded.step,
                loaded.world_size,
                loaded.folder.display()
            );
        }
    }

    while trainer.num_steps() < options.steps {
        let rows = sampler.indices_after(position.epoch, position.samples);
        for rows in rows.chunks(BATCH / rank.world_size()) {
            let rows = Tensor::from_iter(rows.iter().map(|i| *i as u32), rank.device())?;
            let h =
                dropout.forward_t(&hidden.forward(&x.index_select(&rows, 0)?)?.tanh()?, true)?;
            let loss = (output.forward(&h)? - y.index_select(&rows, 0)?)?
                .sqr()?
                .mean_all()?;
            trainer.backward(&loss)?;
            trainer.step()?;
            position.samples += rows.elem_count() * rank.world_size();
            let step = trainer.num_steps();
            if step.is_multiple_of(options.save_every) || step == options.steps {
                let save = SaveOptions::new()
                    .keep_last(2)?
                    .with_data(position)
                    .with_rank_state(&dropout.position())?;
                let saved = trainer.save_with(&options.dir, &save);
                if rank.rank() == 0 {
                    match &saved {
                        Ok(_) => {
                            println!("step {step} saved, loss {:.4}", loss.to_scalar::<f32>()?)
                        }
                        Err(e) => eprintln!("step {step} not saved: {e}"),
                    }
                }
                // A full disk is no reason to stop: the last checkpoint is as it was, and the next save may work.
                let go_on = matches!(saved, Err(Error::Checkpoint { .. })) && step < options.steps;
                if !go_on {
                    saved?;
                }
            }
            if step == options.steps {
                break;
            }
        }
        if trainer.num_steps() < options.steps {
            position.epoch += 1;
            position.samples = 0;
        }
    }
    let digest = trainer.store().sha256()?;
    if rank.rank() == 0 {
        println!("{} steps done, parameters {digest}", trainer.num_steps());
    }
    Ok(())
}
