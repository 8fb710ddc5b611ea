//! The measurement.
//!
//! Copies and collectives take turns, so that a machine whose speed drifts is the same for both. A turn is a batch of calls
//! between two barriers: until the slowest rank is done, also where ranks share cores. Its time over its number of calls is
//! one value, and the median of all turns is the result.

use std::time::{Duration, Instant};

use anyhow::Context;
use dp_core::{Buffer, Communicator, Element, Rank, ReduceOp, World, max_over_ranks};
use dp_examples::statistics::{least, median};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::options::{Number, Op, Options};

/// Seconds per call: medians over the turns.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Times {
    pub bytes: usize,
    pub collective: f64,
    pub memcpy: f64,
    /// The least of all turns.
    pub collective_min: f64,
    pub memcpy_min: f64,
    /// Turns of each kind.
    pub turns: usize,
}

/// A batch lasts about so long, so that its barriers do not count.
const BATCH: Duration = Duration::from_micros(200);
const MIN_TURNS: usize = 5;
const MAX_TURNS: usize = 1000;

/// Measures one operation at one size.
pub fn measure(world: &World, options: &Options, op: Op, bytes: usize) -> anyhow::Result<Times> {
    // Those of all ranks, once per rank of this process.
    let ranks = world.map(|rank| -> anyhow::Result<Vec<Times>> {
        let mine = match options.dtype {
            Number::F32 => measure_rank::<f32>(options, op, bytes, &rank),
            Number::F64 => measure_rank::<f64>(options, op, bytes, &rank),
            Number::F16 => measure_rank::<f16>(options, op, bytes, &rank),
            Number::Bf16 => measure_rank::<bf16>(options, op, bytes, &rank),
        }?;
        Ok(rank.comm().all_gather_object(&mine, "times of all ranks")?)
    })?;
    let ranks = ranks.into_iter().next().context("a process has a rank")?;
    // Ranks measure the same turns, to the skew of a barrier.
    let mean = |of: fn(&Times) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
    Ok(Times {
        collective: mean(|t| t.collective),
        memcpy: mean(|t| t.memcpy),
        collective_min: mean(|t| t.collective_min),
        memcpy_min: mean(|t| t.memcpy_min),
        ..ranks[0]
    })
}

fn measure_rank<T: Sample>(
    options: &Options,
    op: Op,
    bytes: usize,
    rank: &Rank,
) -> anyhow::Result<Times> {
    let len = bytes / size_of::<T>();
    let comm = rank.comm();
    let comm = comm.as_ref();
    let buffer = check::<T>(comm, op, len)?;

    // Zeros: sums of sums of sums stay finite.
    let mut buffer = Some(buffer);
    if let Some(buffer) = &mut buffer {
        buffer.as_mut_slice::<T>()?.fill(T::of(0));
    }
    let mut collective = || -> anyhow::Result<()> {
        let mine = buffer.take().expect("each call puts it back");
        buffer = Some(call(comm, op, mine)?);
        Ok(())
    };
    // Written, so that each has pages of its own.
    let (mut source, mut copy) = (vec![T::of(1); len + PAGE], vec![T::of(2); len + PAGE]);
    let (source, copy) = (page_aligned(&mut source, len), page_aligned(&mut copy, len));
    let mut memcpy = || -> anyhow::Result<()> {
        copy.copy_from_slice(std::hint::black_box(source));
        std::hint::black_box(&copy);
        Ok(())
    };

    // All ranks take as many turns of as many calls.
    let calls = |once: Duration| {
        let calls = BATCH.as_secs_f64() / once.as_secs_f64().max(1e-9);
        (calls as usize).clamp(1, 10_000)
    };
    let once = turn(comm, 3, &mut collective)?;
    let collective_calls = max_over_ranks(comm, calls(once))?;
    let once_copied = turn(comm, 3, &mut memcpy)?;
    let memcpy_calls = max_over_ranks(comm, calls(once_copied))?;
    let both = turn(comm, collective_calls, &mut collective)? * collective_calls as u32
        + turn(comm, memcpy_calls, &mut memcpy)? * memcpy_calls as u32;
    let turns = options.budget().as_secs_f64() / both.as_secs_f64();
    let turns = max_over_ranks(comm, (turns as usize).clamp(MIN_TURNS, MAX_TURNS))?;

    let (mut collectives, mut copies) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        copies.push(turn(comm, memcpy_calls, &mut memcpy)?.as_secs_f64());
        collectives.push(turn(comm, collective_calls, &mut collective)?.as_secs_f64());
    }
    Ok(Times {
        bytes,
        collective_min: least(&collectives),
        memcpy_min: least(&copies),
        collective: median(collectives),
        memcpy: median(copies),
        turns,
    })
}

const PAGE: usize = 4096;

/// `len` elements of a longer block, from where a page begins: from some places to some others processors copy at a twentieth
/// of their speed, and that is not what collectives are to be compared with.
fn page_aligned<T>(block: &mut [T], len: usize) -> &mut [T] {
    let offset = block.as_ptr().align_offset(PAGE);
    &mut block[offset..offset + len]
}

/// The time per call of a batch of `calls`, from when all ranks begin to when all have ended.
fn turn(
    comm: &dyn Communicator,
    calls: usize,
    call: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    comm.barrier()?;
    Ok(start.elapsed() / calls as u32)
}

fn call(comm: &dyn Communicator, op: Op, buffer: Buffer) -> dp_core::Result<Buffer> {
    let pending = match op {
        Op::AllReduce => comm.all_reduce(buffer, ReduceOp::Sum),
        Op::ReduceScatter => comm.reduce_scatter(buffer, ReduceOp::Sum),
        Op::AllGather => comm.all_gather(buffer),
        Op::Broadcast => comm.broadcast(buffer, 0),
    };
    pending?.wait()
}

/// One call on buffers that tell the ranks apart, and its result compared with what it must be. Returns the buffer.
fn check<T: Sample>(comm: &dyn Communicator, op: Op, len: usize) -> anyhow::Result<Buffer> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let result = call(comm, op, Buffer::from_vec(vec![T::of(rank + 1); len]))?;
    let values = result.as_slice::<T>()?;
    let sum = T::of(n * (n + 1) / 2);
    let slice = len / n;
    for (i, value) in values.iter().enumerate() {
        let expected = match op {
            Op::AllReduce => sum,
            Op::ReduceScatter if i / slice == rank => sum,
            // The rest is unspecified.
            Op::ReduceScatter => continue,
            Op::AllGather => T::of(i / slice + 1),
            Op::Broadcast => T::of(1),
        };
        anyhow::ensure!(
            *value == expected,
            "rank {rank}: element {i} is {value:?}, not {expected:?}"
        );
    }
    Ok(result)
}

/// An element type with test values.
trait Sample: Element + PartialEq {
    /// `value`, rounded to the type.
    fn of(value: usize) -> Self;
}

impl Sample for f32 {
    fn of(value: usize) -> Self {
        value as f32
    }
}

impl Sample for f64 {
    fn of(value: usize) -> Self {
        value as f64
    }
}

impl Sample for f16 {
    fn of(value: usize) -> Self {
        f16::from_f32(value as f32)
    }
}

impl Sample for bf16 {
    fn of(value: usize) -> Self {
        bf16::from_f32(value as f32)
    }
}
