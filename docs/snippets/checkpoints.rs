//! Runs that stop and go on: on other ranks, bit for bit, with a new last layer; and weights for other programs.

mod task;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::loss::mse;
use candle_nn::{Module, ModuleT, VarBuilder, VarMap, linear};
use dp_core::checkpoint::{Checkpoint, PendingSave};
use dp_core::{
    AdamW, DataPosition, DistributedSampler, Error, HyperParameters, LoadOptions, ParamStore, Rank,
    Result, SaveOptions, Trainer, World,
};
use dp_models::Dropout;
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    let folder = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let root = folder.path();

    // ANCHOR: elsewhere
    let run = root.join("run");
    World::threads(4)?.run(|rank| train(&rank, ZeroStage::Two, &run, 20))?;
    World::threads(2)?.run(|rank| train(&rank, ZeroStage::One, &run, 40))?; // from step 20 on
    // ANCHOR_END: elsewhere
    let checkpoint = Checkpoint::open(&run)?;
    checkpoint.verify()?;
    assert_eq!(checkpoint.manifest().step, 40);

    // 30 steps at once, and in two parts.
    let (whole, parts) = (root.join("whole"), root.join("parts"));
    let train =
        |run: &Path, steps| World::threads(2)?.map(|rank| train_with_dropout(&rank, run, steps));
    let straight = train(&whole, 30)?;
    train(&parts, 10)?;
    assert_eq!(train(&parts, 30)?, straight);

    World::threads(2)?.run(|rank| new_last_layer(&rank, &run))?;
    World::threads(2)?.run(|rank| in_the_background(&rank, &root.join("background")))?;
    World::threads(2)?.run(|rank| going_on_without(&rank, root))?;

    let file = root.join("weights.safetensors");
    World::threads(2)?.run(|rank| export_and_import(&rank, &run, &file))?;
    plain_candle(&file)?;
    println!("all runs went on");
    Ok(())
}

fn zero(store: ParamStore, rank: &Rank, stage: ZeroStage) -> Result<ZeroOptimizer<AdamW>> {
    ZeroOptimizer::new(
        store,
        rank.comm(),
        AdamW::with_lr(1e-2),
        ZeroConfig::stage(stage),
    )
}

// ANCHOR: train
fn train(rank: &Rank, stage: ZeroStage, run: &Path, steps: u64) -> Result<()> {
    let store = ParamStore::new(rank.device()).with_seed(42);
    let model = build_model(store.var_builder(DType::F32))?;
    let mut trainer = zero(store, rank, stage)?;

    trainer.load_latest(run, &LoadOptions::new())?; // nothing, at the first start
    while trainer.num_steps() < steps {
        let (x, y) = load(&[rank.rank(), trainer.num_steps() as usize], rank.device())?;
        trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
        trainer.step()?;
        if trainer.num_steps().is_multiple_of(10) {
            trainer.save(run)?; // all ranks; returns when the checkpoint is complete
        }
    }
    Ok(())
}
// ANCHOR_END: train

// ANCHOR: bit_for_bit
fn train_with_dropout(rank: &Rank, run: &Path, steps: u64) -> Result<String> {
    let store = ParamStore::new(rank.device()).with_seed(42);
    let model = build_model(store.var_builder(DType::F32))?;
    let dropout = Dropout::new(0.1, rank.seed(42))?;
    let mut trainer = zero(store, rank, ZeroStage::Two)?;

    let mut position = DataPosition {
        seed: 42,
        ..DataPosition::default()
    };
    if let Some(loaded) = trainer.load_latest(run, &LoadOptions::new())? {
        position = loaded.data;
        if let Some(stream) = loaded.rank_state()? {
            dropout.seek(stream);
        }
    }
    let ranks = rank.world_size();
    let sampler =
        DistributedSampler::new(NUM_SAMPLES, ranks, rank.rank())?.with_shuffle(position.seed);
    loop {
        let rest = sampler.indices_after(position.epoch, position.samples);
        for indices in rest.chunks(32 / ranks) {
            if trainer.num_steps() == steps {
                return trainer.store().sha256();
            }
            let (x, y) = load(indices, rank.device())?;
            let loss = mse(&model.forward(&dropout.forward_t(&x, true)?)?, &y)?;
            trainer.backward(&loss)?;
            trainer.step()?;
            position.samples += indices.len() * ranks; // used by all ranks together
            if trainer.num_steps().is_multiple_of(10) {
                let options = SaveOptions::new()
                    .with_data(position)
                    .with_rank_state(&dropout.position())?
                    .keep_last(2)?;
                trainer.save_with(run, &options)?;
            }
        }
        position.epoch += 1;
        position.samples = 0;
    }
}
// ANCHOR_END: bit_for_bit

fn new_last_layer(rank: &Rank, run: &Path) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    let (hidden, classes) = (
        linear(2, 32, vb.pp("hidden"))?,
        linear(32, 3, vb.pp("classes"))?,
    );
    let config = ZeroConfig::stage(ZeroStage::Two);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::with_lr(1e-4), config)?;
    assert!(trainer.load(run).is_err());
    // ANCHOR: options
    let options = LoadOptions::new()
        .with_hyper_parameters(HyperParameters::Current) // this program's learning rate
        .with_new_params(|name| name.starts_with("classes."))
        .with_dropped_params(|name| name.starts_with("out."));
    let loaded = trainer.load_with(run, &options)?;
    assert_eq!(loaded.new_params, ["classes.weight", "classes.bias"]);
    assert_eq!(loaded.dropped_params, ["out.weight", "out.bias"]);
    // ANCHOR_END: options
    let (x, _) = load(&[rank.rank()], rank.device())?;
    let loss = classes
        .forward(&hidden.forward(&x)?.tanh()?)?
        .sqr()?
        .mean_all()?;
    trainer.backward(&loss)?;
    trainer.step()?;
    Ok(())
}

fn in_the_background(rank: &Rank, run: &Path) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = build_model(store.var_builder(DType::F32))?;
    let mut trainer = zero(store, rank, ZeroStage::Two)?;
    let (x, y) = load(&[rank.rank()], rank.device())?;
    // ANCHOR: background
    let mut pending: Option<PendingSave> = None;
    for step in 1..=30 {
        trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
        trainer.step()?;
        if step % 10 == 0 {
            if let Some(earlier) = pending.take() {
                earlier.wait()?; // all ranks; now it is the latest
            }
            pending = Some(trainer.save_in_background(run, &SaveOptions::new())?);
        }
    }
    if let Some(last) = pending {
        last.wait()?;
    }
    // ANCHOR_END: background
    assert_eq!(trainer.load(run)?.step, 30);
    Ok(())
}

fn going_on_without(rank: &Rank, root: &Path) -> Result<()> {
    let store = ParamStore::new(rank.device());
    build_model(store.var_builder(DType::F32))?;
    let trainer = zero(store, rank, ZeroStage::Two)?;
    if rank.rank() == 0 {
        std::fs::write(root.join("file"), "not a folder").map_err(candle_core::Error::wrap)?;
    }
    rank.comm().barrier()?;
    let run = &root.join("file");
    // ANCHOR: failed
    match trainer.save(run) {
        Ok(folder) => println!("saved to {}", folder.display()),
        // The same on all ranks. The run goes on, and the next save may succeed.
        Err(error @ Error::Checkpoint { .. }) => eprintln!("not saved: {error}"),
        Err(error) => return Err(error),
    }
    // ANCHOR_END: failed
    assert!(trainer.save(run).is_err());
    trainer.barrier()
}

fn export_and_import(rank: &Rank, run: &Path, file: &Path) -> Result<()> {
    let store = ParamStore::new(rank.device());
    build_model(store.var_builder(DType::F32))?;
    let mut trainer = zero(store, rank, ZeroStage::Two)?;
    trainer.load(run)?;
    // ANCHOR: export
    trainer.export_safetensors(file)?;
    // ANCHOR_END: export
    let expected = trainer.store().sha256()?;

    // ANCHOR: import
    // Before there is a trainer:
    let store = ParamStore::new(rank.device()).with_initial_values(file)?;
    build_model(store.var_builder(DType::F32))?;
    // Afterwards:
    trainer.import_safetensors(file, &LoadOptions::new())?;
    // ANCHOR_END: import
    assert_eq!(store.sha256()?, expected);
    assert_eq!(trainer.store().sha256()?, expected);
    Ok(())
}

fn plain_candle(file: &Path) -> Result<()> {
    let x = Tensor::new(&[[0.5f32, -0.5]], &Device::Cpu)?;
    // ANCHOR: candle
    // SAFETY: nobody changes the file while it is mapped.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu)? };
    let mapped = build_model(vb)?;

    let mut varmap = VarMap::new();
    let model = build_model(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    varmap.load(file)?; // overwrites the variables of the model
    // ANCHOR_END: candle
    let y = |model: &dyn Module| model.forward(&x)?.flatten_all()?.to_vec1::<f32>();
    assert_eq!(y(&mapped)?, y(&model)?);
    Ok(())
}
