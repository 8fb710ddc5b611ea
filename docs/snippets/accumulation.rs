//! Gradient accumulation and clipping: what they compute, and what they send.

mod task;

use candle_core::{DType, Tensor};
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    EngineConfig, GradNorm, Loss, NonFinite, ParamStore, Rank, Result, Sgd, SkipReason, Trainer,
    World,
};
use dp_zero::Sharding;
use task::{NUM_SAMPLES, build_model, load};

type AnyTrainer = Box<dyn Trainer<Optimizer = Sgd>>;

fn main() -> Result<()> {
    World::threads(2)?.run(|rank| {
        same_gradient(&rank)?;
        bytes_sent(&rank)?;
        by_tokens(&rank)?;
        clipping(&rank)?;
        not_finite(&rank)
    })
}

fn trainer(rank: &Rank, sharding: Sharding) -> Result<(impl Module + use<>, AnyTrainer)> {
    let store = ParamStore::new(rank.device()).with_seed(3);
    let model = build_model(store.var_builder(DType::F32))?;
    let mut config = EngineConfig::default();
    config.non_finite = NonFinite::SkipStep;
    let trainer = dp_zero::trainer(sharding, store, rank.comm(), Sgd::new(0.1), config)?;
    Ok((model, trainer))
}

// ANCHOR: window
/// One step over this rank's `samples`, at most `micro_batch` of them at a time.
fn step(
    trainer: &mut AnyTrainer,
    model: &impl Module,
    samples: &[usize],
    micro_batch: usize,
) -> Result<dp_core::StepReport> {
    let mut window = trainer.accumulate(samples.len().div_ceil(micro_batch))?;
    for samples in samples.chunks(micro_batch) {
        let (x, y) = load(samples, &candle_core::Device::Cpu)?;
        let loss = mse(&model.forward(&x)?, &y)?;
        // The last micro-batch may be smaller, so each loss says what it is the mean of.
        let count = samples.len();
        window.backward_weighted(Loss::Mean { loss: &loss, count })?;
    }
    window.finish()?;
    trainer.step()
}
// ANCHOR_END: window

/// This rank's part of 40 samples.
fn own_samples(rank: &Rank) -> Vec<usize> {
    (0..40).filter(|i| i % 2 == rank.rank()).collect()
}

// ANCHOR: same
fn same_gradient(rank: &Rank) -> Result<()> {
    let mut losses = Vec::new();
    for micro_batch in [20, 10, 6] {
        let (model, mut trainer) = trainer(rank, Sharding::Ddp)?;
        let report = step(&mut trainer, &model, &own_samples(rank), micro_batch)?;
        assert_eq!(report.num_micro_batches, 20usize.div_ceil(micro_batch));
        assert_eq!(report.weight, 40.0); // samples on both ranks
        let held_out: Vec<usize> = (NUM_SAMPLES..NUM_SAMPLES + 4).collect();
        let (x, y) = load(&held_out, rank.device())?;
        losses.push(mse(&model.forward(&x)?, &y)?.to_scalar::<f32>()?);
    }
    // 20, 10 + 10 and 6 + 6 + 6 + 2: the same step but for rounding
    assert!(losses.iter().all(|l| (l - losses[0]).abs() < 1e-6));
    Ok(())
}
// ANCHOR_END: same

// ANCHOR: bytes
fn bytes_sent(rank: &Rank) -> Result<()> {
    let sent = |sharding, micro_batch| -> Result<u64> {
        let (model, mut trainer) = trainer(rank, sharding)?;
        step(&mut trainer, &model, &own_samples(rank), micro_batch)?;
        Ok(trainer.local_report().bytes_sent)
    };
    let gradients = 130 * 4; // 129 parameters and one element of padding, in f32
    // Four micro-batches cost plain data parallelism and stage 1 nothing more than one does,
    assert_eq!(sent(Sharding::Ddp, 5)?, sent(Sharding::Ddp, 20)?);
    assert_eq!(sent(Sharding::Zero1, 5)?, sent(Sharding::Zero1, 20)?);
    // and stage 2 three reduce-scatters more, (N-1)/N of the gradients each.
    let more = sent(Sharding::Zero2, 5)? - sent(Sharding::Zero2, 20)?;
    assert_eq!(more, 3 * gradients / 2);
    Ok(())
}
// ANCHOR_END: bytes

// ANCHOR: tokens
/// Sequences of different lengths: each token weighs the same, on whichever rank and in whichever micro-batch it is.
fn by_tokens(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let w = store.var_builder(DType::F32).get_with_hints(
        (),
        "w",
        candle_nn::Init::Const(1.0), // the loss of a token is w times a number
    )?;
    let config = EngineConfig::default();
    let mut trainer = dp_zero::trainer(Sharding::Zero1, store, rank.comm(), Sgd::new(1.0), config)?;
    // Tokens of two micro-batches on each of two ranks; the second one of rank 1 is empty.
    let micro_batches: [&[f32]; 2] = match rank.rank() {
        0 => [&[1.0, 2.0, 3.0], &[4.0]],
        _ => [&[5.0, 6.0], &[]],
    };
    let mut window = trainer.accumulate(2)?;
    for tokens in micro_batches {
        if tokens.is_empty() {
            window.backward_weighted(Loss::Nothing)?;
            continue;
        }
        let losses = Tensor::new(tokens, rank.device())?.broadcast_mul(&w)?;
        let (loss, count) = (losses.sum_all()?, tokens.len());
        window.backward_weighted(Loss::Sum { loss: &loss, count })?;
    }
    window.finish()?;
    let report = trainer.step()?;
    assert_eq!(report.weight, 6.0); // tokens
    assert_eq!(report.loss, Some(3.5)); // (1 + 2 + 3 + 4 + 5 + 6) / 6
    assert_eq!(w.to_scalar::<f32>()?, 1.0 - 3.5); // so is the gradient
    Ok(())
}
// ANCHOR_END: tokens

// ANCHOR: clip
fn clipping(rank: &Rank) -> Result<()> {
    let (model, mut trainer) = trainer(rank, Sharding::Zero2)?;
    let (x, y) = load(&own_samples(rank), rank.device())?;
    trainer.backward(&(mse(&model.forward(&x)?, &y)? * 1000.0)?)?;
    let norm = trainer.clip_grad_norm(1.0)?; // over all parameters and ranks; before clipping
    assert!(norm > 1.0);
    assert_eq!(trainer.step()?.grad_norm, Some(norm));

    trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
    let greatest = trainer.clip_grad_norm_by(GradNorm::Inf, 0.1)?; // the greatest |element|
    assert_eq!(trainer.step()?.grad_norm, Some(greatest));

    // To look at the norm only, give a limit that it does not reach.
    trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
    trainer.clip_grad_norm(f64::MAX)?;
    trainer.step()?;
    Ok(())
}
// ANCHOR_END: clip

// ANCHOR: skip
fn not_finite(rank: &Rank) -> Result<()> {
    let (model, mut trainer) = trainer(rank, Sharding::Zero1)?;
    let before = trainer.store().sha256()?;
    let (x, y) = load(&own_samples(rank), rank.device())?;
    let factor = if rank.rank() == 1 { f64::NAN } else { 1.0 }; // one bad batch, on one rank
    trainer.backward(&(mse(&model.forward(&x)?, &y)? * factor)?)?;
    let norm = trainer.clip_grad_norm(1.0)?;
    let report = trainer.step()?; // with NonFinite::SkipStep
    assert!(norm.is_nan());
    let Some(SkipReason::NonFinite { rank: 1, .. }) = report.skipped else {
        panic!("all ranks are told that it was rank 1");
    };
    assert_eq!((report.step, trainer.store().sha256()?), (0, before)); // as if nothing had been
    Ok(())
}
// ANCHOR_END: skip
