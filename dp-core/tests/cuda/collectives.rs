//! Collectives on buffers in the memory of one GPU give the bits of those in the host's.

use std::ops::Range;

use candle_core::{DType, Device};
use dp_core::comm::{Collective, Request};
use dp_core::{Backend, Buffer, ParamStore, Rank, ReduceOp, Result};
use half::{bf16, f16};

use crate::harness::{Test, gpu_world};
use crate::support::{Numbers, failing_ranks, ranks_of, world};

pub const TESTS: &[Test] = &[
    ("collectives: the bits of the host", same_bits),
    ("collectives: many at a time, in order", || {
        many_at_a_time(true)
    }),
    ("collectives: the same, where cudarc orders nothing", || {
        many_at_a_time(false)
    }),
    (
        "collectives: buffers on host and device do not mix",
        mixed_places,
    ),
    (
        "collectives: dropped and failed ones free their memory",
        dropped,
    ),
    (
        "collectives: dropped ones are freed behind their kernels",
        dropped_at_once,
    ),
];

const LENGTHS: [usize; 6] = [0, 1, 31, 33, 1000, 70_001];

/// A rank's numbers: large and small ones, infinities, and sums that must be rounded.
fn mine(rank: usize, len: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers::new(seed + 1000 * rank as u64);
    let special = [f32::INFINITY, f32::MIN_POSITIVE, -0.0, 65504.0];
    let mut values = numbers.floats(len);
    for v in &mut values {
        match numbers.below(50) {
            0 => *v = special[numbers.below(special.len())],
            1 => *v *= 1e4,
            2 => *v *= 1e-4,
            _ => {}
        }
    }
    values
}

/// A buffer of f32, f16 or bf16 values on the rank's device.
fn buffer(values: &[f32], dtype: DType, device: &Device) -> Result<Buffer> {
    let store = ParamStore::new(device);
    let vb = store.var_builder(dtype);
    vb.get_with_hints(values.len(), "x", candle_nn::Init::Const(0.0))?;
    let param = store.get("x").expect("was made");
    param.write(0..values.len(), values)?;
    let mut buffer = Buffer::zeros_on(dtype, values.len(), device)?;
    param.copy_to(0..values.len(), &mut buffer, 0)?;
    Ok(buffer)
}

/// The bits of elements `of`; a NaN is a NaN, whatever its bits.
fn bits(buffer: &Buffer, of: Range<usize>) -> Result<Vec<u32>> {
    let bit = |is_nan: bool, bits: u32| if is_nan { u32::MAX } else { bits };
    Ok(match buffer.dtype() {
        DType::F32 => {
            let values = &buffer.to_vec::<f32>()?[of];
            values
                .iter()
                .map(|x| bit(x.is_nan(), x.to_bits()))
                .collect()
        }
        DType::F16 => {
            let values = &buffer.to_vec::<f16>()?[of];
            let bits = values.iter().map(|x| bit(x.is_nan(), x.to_bits().into()));
            bits.collect()
        }
        _ => {
            let values = &buffer.to_vec::<bf16>()?[of];
            let bits = values.iter().map(|x| bit(x.is_nan(), x.to_bits().into()));
            bits.collect()
        }
    })
}

/// What this rank has after each collective, as bits.
fn outcomes(rank: &Rank, dtype: DType) -> Result<Vec<Vec<u32>>> {
    let (r, n) = (rank.rank(), rank.world_size());
    let mut all = Vec::new();
    let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        let len = len.next_multiple_of(n);
        let own = r * len / n..(r + 1) * len / n;
        let collectives = ops
            .iter()
            .flat_map(|op| [Collective::AllReduce(*op), Collective::ReduceScatter(*op)])
            .chain([Collective::AllGather, Collective::Broadcast { root: n - 1 }]);
        for collective in collectives {
            let x = buffer(&mine(r, len, seed as u64), dtype, rank.device())?;
            let x = rank.comm().start(Request::new(collective, ""), x)?.wait()?;
            let visible = match collective {
                Collective::ReduceScatter(_) => own.clone(),
                _ => 0..len,
            };
            all.push(bits(&x, visible)?);
        }
    }
    Ok(all)
}

fn same_bits() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for n in 1..=4 {
            let expected = ranks_of(world(n), move |rank| outcomes(&rank, dtype));
            for backend in [Backend::SharedMemory, Backend::Naive] {
                let gpu = gpu_world(n).with_backend(backend);
                let got = ranks_of(gpu, move |rank| outcomes(&rank, dtype));
                assert!(got == expected, "{dtype:?} on {n} ranks, {backend:?}");
            }
        }
    }
}

/// Each rank's stream is still busy when its buffer is left, and the results are used at once. `tracked`: cudarc's slices carry events
/// of their own, which order some of it, too.
fn many_at_a_time(tracked: bool) {
    let sums = ranks_of(gpu_world(4), move |rank| {
        if !tracked {
            untracked(&rank)?;
        }
        let len = 1 << 18;
        let on_device = |value: f32| buffer(&vec![value; len], DType::F32, rank.device());
        // The host waits for these, and for nothing that comes later.
        let (zeros, mut busy, mut total) = (on_device(0.0)?, on_device(0.0)?, on_device(0.0)?);
        let mine = (0..20).map(|i| on_device((rank.rank() + i) as f32));
        let mine = mine.collect::<Result<Vec<_>>>()?;
        let mut pending = Vec::new();
        for (i, mine) in mine.iter().enumerate() {
            // By turns, one rank's stream is far behind when the others start the collective.
            if i % 4 == rank.rank() {
                (0..20).try_for_each(|_| busy.add_from(&zeros, 0..len))?;
            }
            let mut x = Buffer::zeros_on(DType::F32, len, rank.device())?;
            x.add_from(mine, 0..len)?;
            pending.push(rank.comm().all_reduce(x, ReduceOp::Sum)?);
            // Some are waited for at once, some are many at a time.
            if i < 10 || i == 19 {
                for p in pending.drain(..) {
                    total.add_from(&p.wait()?, 0..len)?;
                }
            }
        }
        total.to_vec::<f32>()
    });
    // Sum over i of (0 + 1 + 2 + 3) + 4 i.
    let expected = 20.0 * 6.0 + 4.0 * 190.0;
    for sum in sums {
        assert!(sum.iter().all(|x| *x == expected), "{}", sum[0]);
    }
}

fn mixed_places() {
    let error = failing_ranks(gpu_world(2), |rank| {
        let device = match rank.rank() {
            0 => rank.device().clone(),
            _ => Device::Cpu,
        };
        let x = Buffer::zeros_on(DType::F32, 10, &device)?;
        rank.comm().all_reduce(x, ReduceOp::Sum)?.wait().map(drop)
    });
    assert_eq!(error.failures().len(), 2, "{error}");
    let text = error.to_string();
    assert!(text.contains("rank 0 has its buffer on Cuda"), "{text}");
    assert!(text.contains("rank 1 on Cpu"), "{text}");
}

fn dropped() {
    ranks_of(gpu_world(2), |rank| {
        for _ in 0..50 {
            let x = buffer(&vec![1.0; 1 << 20], DType::F32, rank.device())?;
            drop(rank.comm().all_reduce(x, ReduceOp::Sum)?);
        }
        let x = buffer(&[1.0; 8], DType::F32, rank.device())?;
        let sum = rank.comm().all_reduce(x, ReduceOp::Sum)?.wait()?;
        assert_eq!(sum.to_vec::<f32>()?, [2.0; 8]);
        Ok(())
    });
    // A rank that fails while its buffer is with the communicator; then a new world on the same GPU works.
    let error = failing_ranks(gpu_world(2), |rank| {
        let x = buffer(&vec![1.0; 1 << 20], DType::F32, rank.device())?;
        let pending = rank.comm().all_reduce(x, ReduceOp::Sum)?;
        if rank.rank() == 1 {
            return Err(dp_core::Error::misuse("test", "rank 1 gives up"));
        }
        rank.comm().barrier()?;
        pending.wait().map(drop)
    });
    assert!(error.to_string().contains("rank 1 gives up"), "{error}");
    ranks_of(gpu_world(2), |rank| rank.comm().barrier());
}

/// Nobody takes the buffers, and cudarc orders nothing: only the communicator knows when they may be freed.
fn dropped_at_once() {
    ranks_of(gpu_world(4), |rank| {
        untracked(&rank)?;
        let len = 1 << 18;
        for i in 0..20 {
            let x = buffer(&vec![1.0; len], DType::F32, rank.device())?;
            let mut busy = Buffer::zeros_on(DType::F32, len, rank.device())?;
            if i % 4 != rank.rank() {
                drop(rank.comm().all_reduce(x, ReduceOp::Sum)?);
                continue;
            }
            // By turns, one rank comes last and waits, so the kernels are on its stream, which is far behind.
            std::thread::sleep(std::time::Duration::from_millis(5));
            (0..100).try_for_each(|_| busy.fill_zero(0..len))?;
            let sum = rank.comm().all_reduce(x, ReduceOp::Sum)?.wait()?;
            assert_eq!(sum.to_vec::<f32>()?[len - 1], 4.0);
        }
        rank.comm().barrier()
    });
}

fn untracked(rank: &Rank) -> Result<()> {
    // SAFETY: collectives promise to order what ranks do with their buffers, and a rank uses one stream.
    unsafe { rank.device().as_cuda_device()?.disable_event_tracking() };
    Ok(())
}
