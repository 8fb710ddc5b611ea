//! Which samples each rank sees, ranks with different numbers of them, and evaluation that counts each one once.

mod task;

use candle_core::DType;
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    DataPosition, DistributedDataParallel, DistributedSampler, Loss, ParamStore, Rank, Remainder,
    Result, Sgd, Trainer, World, max_over_ranks, weighted_mean,
};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    deal()?;
    go_on()?;
    // Three ranks with uneven shares, and one rank with all samples, compute the same mean.
    let (one, three) = (uneven_on(1)?, uneven_on(3)?);
    assert!((one - three).abs() < 1e-6 * one.abs(), "{one} and {three}");
    Ok(())
}

// ANCHOR: deal
fn deal() -> Result<()> {
    // 10 samples for 4 ranks, in order
    let of = |rank, remainder| -> Result<Vec<usize>> {
        let sampler = DistributedSampler::new(10, 4, rank)?;
        Ok(sampler.with_remainder(remainder).indices(0))
    };
    assert_eq!(of(0, Remainder::Pad)?, [0, 4, 8]);
    assert_eq!(of(1, Remainder::Pad)?, [1, 5, 9]);
    assert_eq!(of(2, Remainder::Pad)?, [2, 6, 0]); // sample 0 again
    assert_eq!(of(2, Remainder::Drop)?, [2, 6]); // 8 and 9 wait for another epoch
    assert_eq!(of(0, Remainder::Keep)?, [0, 4, 8]); // ranks 0 and 1 have one more
    assert_eq!(of(2, Remainder::Keep)?, [2, 6]);
    Ok(())
}
// ANCHOR_END: deal

// ANCHOR: go_on
fn go_on() -> Result<()> {
    // Two ranks have used 6 of 10 samples when the run stops. It goes on with four ranks.
    let position = DataPosition {
        epoch: 3,
        samples: 6,
        seed: 7,
    };
    let mut seen = Vec::new();
    for rank in 0..2 {
        let before = DistributedSampler::new(10, 2, rank)?.with_shuffle(7);
        seen.extend(before.indices(3).into_iter().take(3));
    }
    for rank in 0..4 {
        let after = DistributedSampler::new(10, 4, rank)?.with_shuffle(position.seed);
        seen.extend(after.indices_after(position.epoch, position.samples));
    }
    seen.sort();
    assert_eq!(seen, (0..10).collect::<Vec<_>>()); // each sample once
    Ok(())
}
// ANCHOR_END: go_on

// ANCHOR: uneven
/// One epoch in which each sample weighs the same, though ranks have different numbers of them.
fn uneven(rank: &Rank, model: &impl Module, trainer: &mut impl Trainer) -> Result<()> {
    let mine = own_samples(rank);
    let batches: Vec<&[usize]> = mine.chunks(96 / rank.world_size()).collect();
    // A collective: all ranks take as many steps as the one with the most batches.
    for step in 0..max_over_ranks(rank.comm().as_ref(), batches.len())? {
        match batches.get(step) {
            Some(batch) => {
                let (x, y) = load(batch, rank.device())?;
                let (loss, count) = (mse(&model.forward(&x)?, &y)?, batch.len());
                trainer.backward_weighted(Loss::Mean { loss: &loss, count })?;
            }
            None => trainer.backward_weighted(Loss::Nothing)?, // joins the others
        }
        trainer.step()?;
    }
    Ok(())
}
// ANCHOR_END: uneven

/// With three ranks, rank 2 has but 4 samples.
fn own_samples(rank: &Rank) -> Vec<usize> {
    match (rank.world_size(), rank.rank()) {
        (3, 0) => (0..32).collect(),
        (3, 1) => (32..60).collect(),
        (3, _) => (60..64).collect(),
        _ => (0..64).collect(),
    }
}

fn uneven_on(world_size: usize) -> Result<f64> {
    let losses = World::threads(world_size)?.map(|rank| {
        let store = ParamStore::new(rank.device()).with_seed(5);
        let model = build_model(store.var_builder(DType::F32))?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
        uneven(&rank, &model, &mut trainer)?;
        let (loss, _) = evaluate(&rank, &model)?;
        Ok::<_, dp_core::Error>(loss)
    })?;
    Ok(losses[0])
}

// ANCHOR: evaluate
/// Mean loss, and the share of samples whose sign is right, over 101 held-out samples on any number of ranks.
fn evaluate(rank: &Rank, model: &impl Module) -> Result<(f64, f64)> {
    let sampler = DistributedSampler::new(101, rank.world_size(), rank.rank())?
        .with_remainder(Remainder::Keep);
    let (mut squares, mut right, mut count) = (0.0, 0.0, 0.0);
    for batch in sampler.indices(0).chunks(16) {
        let indices: Vec<usize> = batch.iter().map(|i| NUM_SAMPLES + i).collect();
        let (x, y) = load(&indices, rank.device())?;
        let predicted = model.forward(&x)?.detach();
        squares += (&predicted - &y)?.sqr()?.sum_all()?.to_scalar::<f32>()? as f64;
        let same_sign = (predicted * y)?.gt(0f32)?.to_dtype(DType::F32)?;
        right += same_sign.sum_all()?.to_scalar::<f32>()? as f64;
        count += indices.len() as f64;
    }
    // Collectives: every rank calls both, in this order, also one without samples.
    let comm = rank.comm();
    let loss = weighted_mean(comm.as_ref(), squares, count)?;
    let accuracy = weighted_mean(comm.as_ref(), right, count)?;
    Ok((loss, accuracy))
}
// ANCHOR_END: evaluate
