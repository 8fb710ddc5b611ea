use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

use dp_core::comm::{Pending, Traffic};
use dp_core::{Backend, Buffer, Communicator, Element, ReduceOp, Result};
use half::{bf16, f16};

use crate::support::{Numbers, both_backends, ranks_of, world};

/// An element type with test values and comparable bits.
pub trait Sample: Element + PartialEq + Debug {
    const IS_FLOAT: bool;
    fn draw(numbers: &mut Numbers) -> Self;
    fn bits(self) -> u64;
}

macro_rules! sample {
    ($($t:ty, $is_float:literal, $draw:expr, $bits:expr;)*) => {$(
        impl Sample for $t {
            const IS_FLOAT: bool = $is_float;
            fn draw(numbers: &mut Numbers) -> Self {
                $draw(numbers)
            }
            fn bits(self) -> u64 {
                $bits(self)
            }
        }
    )*};
}

sample! {
    f32, true, |n: &mut Numbers| (n.unit() * 1e3) as f32, |x: f32| u64::from(x.to_bits());
    f64, true, |n: &mut Numbers| n.unit() * 1e3, f64::to_bits;
    f16, true, |n: &mut Numbers| f16::from_f64(n.unit() * 1e3), |x: f16| u64::from(x.to_bits());
    bf16, true, |n: &mut Numbers| bf16::from_f64(n.unit() * 1e3), |x: bf16| u64::from(x.to_bits());
    u8, false, |n: &mut Numbers| n.next() as u8, u64::from;
    u32, false, |n: &mut Numbers| n.next() as u32, u64::from;
    i64, false, |n: &mut Numbers| n.next() as i64, |x: i64| x as u64;
}

pub const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 8];

fn ops<T: Sample>() -> Vec<ReduceOp> {
    let mut ops = vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
    ops.extend(T::IS_FLOAT.then_some(ReduceOp::Mean));
    ops
}

/// Every collective on every length: the bits of all results that are specified, and what was sent.
pub fn everything<T: Sample>(
    comm: &dyn Communicator,
    lens: &[usize],
) -> Result<(Vec<u64>, Traffic)> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let mut bits = Vec::new();
    let mut keep = |part: &[T]| bits.extend(part.iter().map(|x| x.bits()));
    let mut numbers = Numbers::new(rank as u64);
    let mut fresh = |len: usize| (0..len).map(|_| T::draw(&mut numbers)).collect::<Vec<T>>();
    for &len in lens {
        let padded = len.next_multiple_of(n);
        let own = rank * padded / n..(rank + 1) * padded / n;
        for op in ops::<T>() {
            let sum = comm.all_reduce(Buffer::from_vec(fresh(len)), op)?.wait()?;
            keep(sum.as_slice()?);
            let sum = comm
                .reduce_scatter(Buffer::from_vec(fresh(padded)), op)?
                .wait()?;
            assert_eq!(sum.len(), padded);
            keep(&sum.as_slice()?[own.clone()]);
        }
        let gathered = comm.all_gather(Buffer::from_vec(fresh(padded)))?.wait()?;
        keep(gathered.as_slice()?);
        for root in 0..n {
            let sent = comm.broadcast(Buffer::from_vec(fresh(len)), root)?.wait()?;
            keep(sent.as_slice()?);
        }
        comm.barrier()?;
    }
    Ok((bits, comm.traffic()))
}

fn backends_agree<T: Sample>(large: usize) {
    for n in WORLD_SIZES {
        let mut lens = vec![0, 1, 3, n.saturating_sub(1), 2 * n + 1, 1030];
        if n == 3 || n == 4 {
            lens.push(large);
        }
        let [shared, naive] = both_backends(n).map(|world| {
            let lens = lens.clone();
            ranks_of(world, move |rank| {
                everything::<T>(rank.comm().as_ref(), &lens)
            })
        });
        for rank in 0..n {
            assert!(
                shared[rank].0 == naive[rank].0,
                "values of rank {rank} of {n}"
            );
            assert_eq!(
                shared[rank].1, naive[rank].1,
                "traffic of rank {rank} of {n}"
            );
        }
    }
}

#[test]
fn backends_agree_f32() {
    // Several chunks of 64 KiB per slice, and a remainder.
    backends_agree::<f32>(100_003);
}

#[test]
fn backends_agree_f64() {
    backends_agree::<f64>(40_003);
}

#[test]
fn backends_agree_f16() {
    backends_agree::<f16>(140_003);
}

#[test]
fn backends_agree_bf16() {
    backends_agree::<bf16>(140_003);
}

#[test]
fn backends_agree_integers() {
    backends_agree::<u8>(270_003);
    backends_agree::<u32>(70_003);
    backends_agree::<i64>(40_003);
}

/// 200 collectives of random kind and length, each rank sleeping, polling and waiting as `delays` says.
pub fn mixture(comm: &dyn Communicator, delays: u64) -> Result<Vec<u64>> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let mut script = Numbers::new(99);
    let mut data = Numbers::new(1000 + rank as u64);
    let mut delay = Numbers::new(delays * 64 + rank as u64);
    let mut pending = Vec::new();
    let mut bits = vec![Vec::new(); 200];
    let mut finish = |(i, specified, p): (usize, Range<usize>, Pending)| -> Result<()> {
        let buffer = p.wait()?;
        let values = &buffer.as_slice::<f32>()?[specified];
        bits[i] = values.iter().map(|x| x.bits()).collect();
        Ok(())
    };
    for i in 0..200 {
        let len = n * [1, 7, 400, 9000][script.below(4)];
        let buffer = Buffer::from_vec(data.floats(len));
        let own = rank * len / n..(rank + 1) * len / n;
        let (p, specified) = match script.below(5) {
            0 => (comm.reduce_scatter(buffer, ReduceOp::Mean)?, own),
            1 => (comm.all_gather(buffer)?, 0..len),
            2 => (comm.broadcast(buffer, i % n)?, 0..len),
            _ => (comm.all_reduce(buffer, ReduceOp::Sum)?, 0..len),
        };
        pending.push((i, specified, p));
        match delay.below(8) {
            0 => std::thread::sleep(Duration::from_micros(delay.next() % 300)),
            1 | 2 => comm.progress(),
            _ => {}
        }
        // Any one that is under way, or none: up to all of them stay under way until the end.
        if delay.below(2) == 0 {
            finish(pending.swap_remove(delay.below(pending.len())))?;
        }
    }
    pending.into_iter().try_for_each(&mut finish)?;
    Ok(bits.concat())
}

#[test]
fn delays_do_not_change_a_bit() {
    let run = |backend, delays| {
        let world = world(4).with_backend(backend);
        ranks_of(world, move |rank| mixture(rank.comm().as_ref(), delays))
    };
    let expected = run(Backend::Naive, 0);
    for delays in 0..4 {
        assert!(
            run(Backend::SharedMemory, delays) == expected,
            "delays {delays}"
        );
    }
}
