//! A metrics file with a line per step, and a timeline of all ranks.

mod task;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::DType;
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    AdamW, DistributedSampler, Error, ParamStore, Rank, Result, Timeline, Trainer, World,
};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};
use task::{NUM_SAMPLES, build_model, load};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> Result<()> {
    let folder = std::env::temp_dir();
    let (metrics, trace) = (folder.join("metrics.jsonl"), folder.join("trace.json"));
    run(&metrics, &trace)?;
    let lines = std::fs::read_to_string(&metrics).map_err(|e| file_error(&metrics, e))?;
    assert_eq!(lines.lines().count(), 4);
    let events = std::fs::read_to_string(&trace).map_err(|e| file_error(&trace, e))?;
    assert!(events.contains("reduction of bucket 0") && events.ends_with("]\n"));
    Ok(())
}

// ANCHOR: timeline
fn run(metrics: &Path, trace: &Path) -> Result<()> {
    let timeline = Timeline::create(trace)?;
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry()
        .with(timeline.layer())
        .with(log.with_filter(LevelFilter::INFO)) // spans are on level DEBUG
        .init();
    World::threads(2)?.run(|rank| train(&rank, metrics))?;
    timeline.finish()
}
// ANCHOR_END: timeline

// ANCHOR: metrics
fn train(rank: &Rank, metrics: &Path) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = build_model(store.var_builder(DType::F32))?;
    let zero2 = ZeroConfig::stage(ZeroStage::Two);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), zero2)?;
    // Loss and norm are the same on all ranks; times and bytes are rank 0's.
    let mut file = match rank.rank() {
        0 => Some(BufWriter::new(
            File::create(metrics).map_err(|e| file_error(metrics, e))?,
        )),
        _ => None,
    };
    let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
    for batch in sampler.indices(0).chunks(32) {
        let (x, y) = load(batch, rank.device())?;
        trainer.begin_forward(); // so that loading is no part of the step
        let loss = mse(&model.forward(&x)?, &y)?;
        trainer.backward(&loss)?;
        trainer.clip_grad_norm(1.0)?;
        let report = trainer.step()?;
        if let Some(file) = &mut file {
            let line =
                serde_json::to_string(&trainer.record(&report)).expect("a record is plain data");
            writeln!(file, "{line}").map_err(|e| file_error(metrics, e))?;
        }
    }
    let local = trainer.local_report();
    println!(
        "rank {}: {:?} exposed of {:?}, {:.0} % of the reductions hidden",
        rank.rank(),
        local.exposed_communication,
        local.total,
        100.0 * local.hidden_share().unwrap_or(0.0)
    );
    Ok(())
}
// ANCHOR_END: metrics

fn file_error(path: &Path, error: std::io::Error) -> Error {
    Error::File {
        path: path.to_path_buf(),
        message: error.to_string(),
    }
}
