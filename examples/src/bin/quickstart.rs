//! A small network learns the quality of red wines on several ranks, with ZeRO-2.
//!
//! ```text
//! cargo run --release --bin quickstart
//! cargo run --release --bin quickstart -- --ranks 4
//! mpirun -n 4 target/release/quickstart        # built with --features dp-core/mpi
//! ```
use candle_core::{DType, Module, Tensor};
use clap::Parser;
use dp_core::{AdamW, DistributedSampler, ParamStore, Remainder, Trainer, World, weighted_mean};
use dp_examples::{closed_pipe, wines};
use dp_models::{Activation, Mlp, MlpConfig};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};

#[derive(Parser)]
struct Options {
    /// Number of ranks; a launcher's number comes first
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
}

fn main() -> anyhow::Result<()> {
    closed_pipe::end_quietly();
    let world = World::from_env_or_threads(usize::from(Options::parse().ranks))?;
    let ranks = world.world_size();
    world.run(|rank| {
        let (x, y) = wines::load(rank.device())?;
        let (num_train, num_held_out) = (1280, x.dim(0)? - 1280);

        let store = ParamStore::new(rank.device()).with_seed(7);
        let config = MlpConfig {
            input: wines::FEATURES,
            hidden: vec![32, 32],
            output: 1,
            activation: Activation::GeluTanh,
        };
        let model = Mlp::new(&config, store.var_builder(DType::F32))?;
        let zero2 = ZeroConfig::stage(ZeroStage::Two);
        let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::with_lr(3e-3), zero2)?;

        let squared_errors = |rows: &[usize]| -> anyhow::Result<Tensor> {
            let rows = Tensor::from_iter(rows.iter().map(|i| *i as u32), rank.device())?;
            let predicted = model.forward(&x.index_select(&rows, 0)?)?;
            Ok((predicted - y.index_select(&rows, 0)?)?.sqr()?)
        };
        let train = DistributedSampler::new(num_train, ranks, rank.rank())?.with_shuffle(7);
        for epoch in 0..30 {
            for rows in train.indices(epoch).chunks(64 / ranks) {
                trainer.backward(&squared_errors(rows)?.mean_all()?)?;
                trainer.step()?;
            }
        }

        // Every held-out wine counts once, whichever rank it lies on.
        let held_out = DistributedSampler::new(num_held_out, ranks, rank.rank())?;
        let rows = held_out.with_remainder(Remainder::Keep).indices(0);
        let rows: Vec<usize> = rows.iter().map(|i| num_train + i).collect();
        let sum = squared_errors(&rows)?.sum_all()?.to_scalar::<f32>()?;
        let error = weighted_mean(rank.comm().as_ref(), f64::from(sum), rows.len() as f64)?;
        if rank.rank() == 0 {
            println!(
                "{ranks} ranks, {} steps: held-out error {error:.3}",
                trainer.num_steps()
            );
        }
        // Qualities have variance 1: that is the error of always predicting the mean.
        anyhow::ensure!(error < 0.8, "the network learned nothing: error {error}");
        Ok(())
    })
}
