//! A loop of one's own that takes its settings from a DeepSpeed configuration.

mod task;

use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{DistributedSampler, ParamStore, Result, World};
use dp_zero::DeepSpeedConfig;
use task::{NUM_SAMPLES, build_model, load};

const CONFIG: &str = r#"{
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": { "stage": 2 },
    "optimizer": { "type": "AdamW", "params": { "lr": 1e-2 } },
    "scheduler": { "type": "WarmupCosineLR", "params": { "warmup_num_steps": 5 } }
}"#;
const STEPS: u64 = 40;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // ANCHOR: config
    let config = DeepSpeedConfig::from_json(CONFIG)?; // or from_file
    let world = World::threads(4)?;
    let sizes = config.batch_sizes(world.world_size())?;
    println!("{sizes}");
    // ANCHOR_END: config
    world.run(|rank| -> Result<()> {
        // ANCHOR: train
        let store = ParamStore::new(rank.device());
        let model = build_model(store.var_builder(config.dtype()))?;
        let mut trainer = config.trainer(store, rank.comm(), Some(STEPS))?;

        let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        let order = sampler.indices(0);
        let mut micro_batches = order.chunks(sizes.micro_batch_size).cycle();
        while trainer.num_steps() < STEPS {
            let mut window = trainer.accumulate(sizes.accumulation_steps)?;
            for indices in micro_batches.by_ref().take(sizes.accumulation_steps) {
                let (x, y) = load(indices, rank.device())?;
                window.backward(&mse(&model.forward(&x)?, &y)?)?;
            }
            window.finish()?;
            trainer.clip_grad_norm(config.gradient_clipping)?;
            let report = trainer.step()?;
            if rank.rank() == 0 && report.step % config.steps_per_print == 0 {
                println!(
                    "step {} loss {:.4}",
                    report.step,
                    report.loss.unwrap_or(f64::NAN)
                );
            }
        }
        // ANCHOR_END: train
        assert!(trainer.num_steps() == STEPS && trainer.strategy_name() == "zero2");
        Ok(())
    })?;
    Ok(())
}
