//! What ranks over NCCL do beside the results of single collectives: many at a time, objects, barriers, training.

use candle_core::{DType, Tensor};
use candle_nn::Module;
use dp_core::{
    AdamW, Buffer, DistributedDataParallel, ParamStore, Rank, ReduceOp, Result, Trainer,
};

use crate::results::{floats, on_gpu};

pub fn objects_and_barriers(rank: &Rank) -> Result<()> {
    let (comm, n) = (rank.comm(), rank.world_size());
    let all: Vec<String> = comm.all_gather_object(&format!("rank {}", rank.rank()), "names")?;
    let names: Vec<String> = (0..n).map(|r| format!("rank {r}")).collect();
    assert_eq!(all, names);
    for _ in 0..100 {
        comm.barrier()?;
    }
    let traffic = comm.traffic();
    assert_eq!(
        (traffic.barrier.calls, traffic.barrier.bytes_sent),
        (100, 0)
    );
    let sent = traffic.all_gather.bytes_sent;
    assert!(n == 1 || sent > 0, "{traffic:?}");
    Ok(())
}

/// Many at a time, waited for in reverse order, or not at all.
pub fn in_flight(rank: &Rank) -> Result<()> {
    let (comm, n) = (rank.comm(), rank.world_size());
    let mut pending = Vec::new();
    for i in 0..50 {
        let buffer = on_gpu(rank, &vec![i as f32; 10_000 * n], DType::F32)?;
        let reduced = comm.all_reduce(buffer, ReduceOp::Sum)?;
        // A third of them is dropped, on some ranks only.
        if i % 3 != rank.rank() % 3 {
            pending.push((i, reduced));
        }
    }
    for (i, reduced) in pending.into_iter().rev() {
        let result = floats(&reduced.wait()?)?;
        assert!(result.iter().all(|v| *v == (i * n) as f32), "number {i}");
    }
    // Nobody waits for the last one.
    drop(comm.all_reduce(Buffer::from_vec(vec![1u8; 1 << 20]), ReduceOp::Max)?);
    Ok(())
}

/// What comes onto Candle's stream after a reduction does not wait for it: the reduction has a stream of its own.
pub fn overlaps(rank: &Rank) -> Result<()> {
    let (comm, n) = (rank.comm(), rank.world_size());
    let ones = |len| on_gpu(rank, &vec![1.0; len], DType::F32);
    // The first one connects the ranks.
    comm.all_reduce(ones(8)?, ReduceOp::Sum)?.wait()?;
    let (small, large) = (
        Tensor::zeros(8, DType::F32, rank.device())?,
        ones(16 << 20)?,
    );
    rank.device().synchronize()?;
    comm.barrier()?;
    let reduction = comm.all_reduce(large, ReduceOp::Sum)?;
    let computed = small.affine(1.0, 1.0)?.to_vec1::<f32>()?;
    let still_running = !reduction.is_done();
    assert_eq!(computed, [1.0; 8]);
    let reduced = floats(&reduction.wait()?)?;
    assert!(reduced.iter().all(|sum| *sum == n as f32));
    // One rank has nothing to reduce.
    assert!(n == 1 || still_running, "Candle's stream has waited");
    Ok(())
}

/// Reductions during backward, and an update behind them: all ranks end with the same parameters, and have learnt.
pub fn train(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device()).with_seed(3);
    let vb = store.var_builder(DType::F32);
    let first = candle_nn::linear(64, 512, vb.pp("first"))?;
    let second = candle_nn::linear(512, 1, vb.pp("second"))?;
    let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-2))?;
    let input: Vec<f32> = (0..32 * 64)
        .map(|i| ((i * 7 + rank.rank() * 13) % 11) as f32 / 11.0)
        .collect();
    let input = Tensor::from_vec(input, (32, 64), rank.device())?;
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = (second.forward(&first.forward(&input)?.relu()?)? - 1.0)?
            .sqr()?
            .mean_all()?;
        trainer.backward(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
        trainer.step()?;
    }
    assert!(losses[19] < losses[0] / 2.0, "{losses:?}");
    let digests: Vec<String> = rank
        .comm()
        .all_gather_object(&trainer.store().sha256()?, "digests")?;
    assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
    Ok(())
}
