//! Ranks with a GPU each, over NCCL. It is a program: without a GPU it says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features nccl --test nccl     # as many threads as there are GPUs, up to 4; one is enough for some of it
//! torchrun --no-python --nproc-per-node 2 target/debug/deps/nccl-...   # the same with processes
//! ```
//!
//! Sums are of small integers, so they are exact in any order.

use std::process::ExitCode;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::Module;
use dp_core::comm::{Collective, Request};
use dp_core::{
    AdamW, Backend, Buffer, Devices, DistributedDataParallel, Element, Error, ParamStore, Rank,
    ReduceOp, Result, Trainer, World,
};
use half::{bf16, f16};

/// The longest that anything here waits.
const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let num_gpus = (0..4)
        .take_while(|i| Device::new_cuda_with_stream(*i).is_ok())
        .count();
    if num_gpus == 0 {
        println!("no CUDA device: skipped the tests of NCCL");
        return ExitCode::SUCCESS;
    }
    match run(num_gpus) {
        Ok(n) => {
            println!("NCCL tests: passed on {n} ranks");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("NCCL tests: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(num_gpus: usize) -> Result<usize> {
    let is_launched = std::env::var_os("WORLD_SIZE").is_some();
    let world = match is_launched {
        true => World::from_env()?,
        false => World::threads(num_gpus)?,
    };
    let world = world.with_backend(Backend::Nccl).with_timeout(DEADLINE);
    // Several runs of one world, one after the other.
    world.run(|rank| {
        collectives::<f32>(&rank)?;
        collectives::<f64>(&rank)?;
        collectives::<f16>(&rank)?;
        collectives::<bf16>(&rank)?;
        collectives::<u8>(&rank)?;
        collectives::<u32>(&rank)?;
        collectives::<i64>(&rank)
    })?;
    world.run(|rank| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            on_the_gpu(&rank, dtype)?;
        }
        Ok::<(), Error>(())
    })?;
    world.run(|rank| objects_and_barriers(&rank))?;
    world.run(|rank| in_flight(&rank))?;
    world.run(|rank| train(&rank))?;
    if !is_launched {
        two_ranks_on_one_gpu();
        if world.world_size() > 1 {
            ranks_that_differ(&world);
            a_rank_that_fails(&world);
            a_rank_that_is_late(&world);
        }
    }
    Ok(world.world_size())
}

/// An element type with small integers.
trait Sample: Element + PartialEq {
    const IS_FLOAT: bool;
    fn of(value: usize) -> Self;
}

macro_rules! sample {
    ($t:ty, $is_float:expr, $of:expr) => {
        impl Sample for $t {
            const IS_FLOAT: bool = $is_float;
            fn of(value: usize) -> Self {
                $of(value)
            }
        }
    };
}
sample!(f32, true, |v| v as f32);
sample!(f64, true, |v| v as f64);
sample!(f16, true, |v| f16::from_f32(v as f32));
sample!(bf16, true, |v| bf16::from_f32(v as f32));
sample!(u8, false, |v| v as u8);
sample!(u32, false, |v| v as u32);
sample!(i64, false, |v| v as i64);

/// Element `i` of rank `r`'s buffer.
fn value(r: usize, i: usize) -> usize {
    (i % 5) + 2 * r
}

/// What element `i` of rank `me` must be after the collective; `None` where it is unspecified.
fn expected(collective: Collective, me: usize, n: usize, len: usize, i: usize) -> Option<usize> {
    let all = (0..n).map(|r| value(r, i));
    let reduced = |op| match op {
        ReduceOp::Sum => all.clone().sum(),
        // The mean of 2 r is n - 1.
        ReduceOp::Mean => (i % 5) + n - 1,
        ReduceOp::Max => all.clone().max().unwrap_or(0),
        _ => all.clone().min().unwrap_or(0),
    };
    let slice = (len / n).max(1);
    match collective {
        Collective::AllReduce(op) => Some(reduced(op)),
        Collective::ReduceScatter(op) => (i / slice == me).then(|| reduced(op)),
        Collective::AllGather => Some(value(i / slice, i)),
        Collective::Broadcast { root } => Some(value(root, i)),
        _ => None,
    }
}

fn kinds(n: usize, is_float: bool) -> Vec<Collective> {
    let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Mean];
    let ops = &ops[..if is_float { 4 } else { 3 }];
    let mut kinds = vec![
        Collective::AllGather,
        Collective::Broadcast { root: 0 },
        Collective::Broadcast { root: n - 1 },
    ];
    kinds.extend(ops.iter().map(|op| Collective::AllReduce(*op)));
    kinds.extend(ops.iter().map(|op| Collective::ReduceScatter(*op)));
    kinds
}

/// Every collective on buffers of the host.
fn collectives<T: Sample>(rank: &Rank) -> Result<()> {
    let (comm, me, n) = (rank.comm(), rank.rank(), rank.world_size());
    for len in [0, n, 60 * n, 100_000 * n] {
        for collective in kinds(n, T::IS_FLOAT) {
            let mine: Vec<T> = (0..len).map(|i| T::of(value(me, i))).collect();
            let request = Request::new(collective, "host");
            let result = comm.start(request, Buffer::from_vec(mine))?.wait()?;
            for (i, got) in result.as_slice::<T>()?.iter().enumerate() {
                if let Some(value) = expected(collective, me, n, len, i) {
                    assert_eq!(*got, T::of(value), "{collective} of {len}, element {i}");
                }
            }
        }
    }
    Ok(())
}

/// A buffer on the rank's GPU, computed there.
fn on_gpu(rank: &Rank, values: &[f32], dtype: DType) -> Result<Buffer> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(dtype);
    vb.get_with_hints(values.len(), "x", candle_nn::Init::Const(0.0))?;
    let param = store.get("x").expect("was made");
    param.write(0..values.len(), values)?;
    let mut buffer = Buffer::zeros_on(dtype, values.len(), rank.device())?;
    param.copy_to(0..values.len(), &mut buffer, 0)?;
    Ok(buffer)
}

fn floats(buffer: &Buffer) -> Result<Vec<f32>> {
    Ok(match buffer.dtype() {
        DType::F16 => buffer.to_vec::<f16>()?.iter().map(|v| v.to_f32()).collect(),
        DType::BF16 => buffer
            .to_vec::<bf16>()?
            .iter()
            .map(|v| v.to_f32())
            .collect(),
        _ => buffer.to_vec::<f32>()?,
    })
}

/// Every collective in place, right behind the kernels that write the buffer, and read right after.
fn on_the_gpu(rank: &Rank, dtype: DType) -> Result<()> {
    let (comm, me, n) = (rank.comm(), rank.rank(), rank.world_size());
    for len in [n, 1000 * n, 500_000 * n] {
        let mine: Vec<f32> = (0..len).map(|i| value(me, i) as f32).collect();
        for collective in kinds(n, true) {
            let buffer = on_gpu(rank, &mine, dtype)?;
            let result = comm
                .start(Request::new(collective, "GPU"), buffer)?
                .wait()?;
            for (i, got) in floats(&result)?.into_iter().enumerate() {
                if let Some(value) = expected(collective, me, n, len, i) {
                    assert_eq!(
                        got, value as f32,
                        "{collective} of {len} {dtype:?}, element {i}"
                    );
                }
            }
        }
    }
    Ok(())
}

fn objects_and_barriers(rank: &Rank) -> Result<()> {
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
fn in_flight(rank: &Rank) -> Result<()> {
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

/// Reductions during backward, and an update behind them: all ranks end with the same parameters, and have learnt.
fn train(rank: &Rank) -> Result<()> {
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

fn two_ranks_on_one_gpu() {
    let world = World::threads(2).expect("two ranks");
    let world = world
        .with_backend(Backend::Nccl)
        .with_devices(Devices::Cuda(vec![0]));
    fails(
        world.run(|_| Ok(())),
        &["ranks 0 and 1 both have GPU 0", "NCCL needs a GPU"],
    );
}

#[track_caller]
fn fails(result: Result<()>, parts: &[&str]) {
    let text = result.expect_err("this must fail").to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

fn ranks_that_differ(world: &World) {
    let result = world.run(|rank| {
        rank.comm().barrier()?;
        let len = if rank.rank() == 1 { 600_000 } else { 500_000 };
        let buffer = on_gpu(&rank, &vec![1.0; len], DType::F32)?;
        let error = rank.comm().all_reduce(buffer, ReduceOp::Sum)?.wait();
        let error = error.expect_err("ranks differ");
        assert!(matches!(error, Error::Mismatch { seq: 1, .. }), "{error}");
        Err(error)
    });
    fails(
        result,
        &["of 600000 f32", "of 500000 f32", "differs between ranks"],
    );
}

fn a_rank_that_fails(world: &World) {
    let result = world.run(|rank| {
        if rank.rank() == 1 {
            return Err(Error::invalid("test", "rank 1 gives up"));
        }
        let buffer = on_gpu(&rank, &[1.0; 1000], DType::F32)?;
        rank.comm()
            .all_reduce(buffer, ReduceOp::Sum)?
            .wait()
            .map(drop)
    });
    fails(
        result,
        &[
            "rank 1 failed: invalid test: rank 1 gives up",
            "stopped because of it",
        ],
    );
}

fn a_rank_that_is_late(world: &World) {
    let short = world.clone().with_timeout(Duration::from_secs(3));
    let result = short.run(|rank| {
        rank.comm().barrier()?;
        if rank.rank() == 1 {
            std::thread::sleep(Duration::from_secs(5));
        }
        let buffer = on_gpu(&rank, &[1.0; 1000], DType::F32)?;
        rank.comm()
            .all_reduce(buffer, ReduceOp::Sum)?
            .wait()
            .map(drop)
    });
    fails(result, &["waited 3", "not there: rank 1"]);
}
