use half::{bf16, f16};

use super::super::args::{MAX_RANKS, ReduceArgs, op_code};
use super::super::sources::Kernel;
use super::kernels_or_skip;
use super::slices::{LENGTHS, Memory, awkward, narrowed, rng};
use crate::buffer::Element;
use crate::comm::{ReduceOp, reduce_one};
use crate::error::Result;

/// Reduces the ranks' buffers, and compares each with the naive backend's element.
fn check<T: Element>(
    values: impl Fn(u64) -> Vec<T>,
    world_size: usize,
    outputs: std::ops::Range<usize>,
    op: ReduceOp,
    is_same: impl Fn(T, T) -> bool,
) -> Result<()> {
    let kernels = kernels_or_skip!();
    let before: Vec<Vec<T>> = (0..world_size as u64).map(values).collect();
    let len = before[0].len();
    let mut memory: Vec<Memory<T>> = before
        .iter()
        .enumerate()
        .map(|(rank, values)| Memory::new(values, (rank * (len % 2)) % 5))
        .collect();
    let mut ranks = [0; MAX_RANKS];
    for (address, memory) in ranks.iter_mut().zip(&mut memory) {
        *address = memory.address();
    }
    let args = ReduceArgs {
        ranks,
        len: len as u64,
        world_size: world_size as u32,
        first_output: outputs.start as u32,
        end_output: outputs.end as u32,
        op: op_code(op),
    };
    // SAFETY: each rank's slice has `len` elements.
    unsafe { kernels.launch(Kernel::of("reduce", T::DTYPE), &args) };
    let copies: Vec<&[T]> = before.iter().map(Vec::as_slice).collect();
    for (rank, memory) in memory.iter().enumerate() {
        for (i, got) in memory.get().iter().enumerate() {
            let expected = match outputs.contains(&rank) {
                true => reduce_one(op, &copies, i),
                false => copies[rank][i],
            };
            assert!(
                is_same(*got, expected),
                "{op} of {world_size} ranks to {outputs:?}, element {i} of {len} on rank {rank}: {got:?}, the host's is {expected:?}"
            );
        }
    }
    Ok(())
}

fn all_cases<T: Element>(
    values: impl Fn(&[f32], u64) -> Vec<T>,
    ops: &[ReduceOp],
    is_same: impl Fn(T, T) -> bool,
) -> Result<()> {
    for len in LENGTHS {
        let of_rank = |rank: u64| {
            let seed = len as u64 + 10_000 * rank;
            values(&awkward(&mut rng(seed), len), seed)
        };
        for op in ops {
            check(of_rank, 1, 0..1, *op, &is_same)?;
            check(of_rank, 2, 1..2, *op, &is_same)?;
            check(of_rank, 3, 0..3, *op, &is_same)?;
        }
    }
    // As many ranks as there may be.
    let of_rank = |rank: u64| values(&awkward(&mut rng(rank), 50), rank);
    check(of_rank, MAX_RANKS, 0..MAX_RANKS, ops[0], &is_same)
}

const FLOAT_OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
const INTEGER_OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

fn floats<T: Element<Acc = f32>>() -> Result<()> {
    let is_same = |a: T, b: T| {
        let (a, b) = (a.to_acc(), b.to_acc());
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    };
    all_cases(|x, _| narrowed::<T>(x), &FLOAT_OPS, is_same)
}

#[test]
fn f32_f16_bf16() -> Result<()> {
    floats::<f32>()?;
    floats::<f16>()?;
    floats::<bf16>()
}

#[test]
fn f64() -> Result<()> {
    let values = |x: &[f32], _| x.iter().map(|x| f64::from(*x) * 1.1).collect();
    let is_same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    all_cases::<f64>(values, &FLOAT_OPS, is_same)
}

/// Sums wrap.
#[test]
fn integers() -> Result<()> {
    let mixed = |x: &[f32], seed: u64| -> Vec<u64> {
        let bits = x.iter().map(|x| u64::from(x.to_bits()));
        bits.map(|b| (b + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect()
    };
    let cast = |x: &[f32], seed| mixed(x, seed).into_iter();
    all_cases::<u8>(
        |x, s| cast(x, s).map(|x| (x >> 32) as u8).collect(),
        &INTEGER_OPS,
        |a, b| a == b,
    )?;
    all_cases::<u32>(
        |x, s| cast(x, s).map(|x| (x >> 32) as u32).collect(),
        &INTEGER_OPS,
        |a, b| a == b,
    )?;
    all_cases::<i64>(
        |x, s| cast(x, s).map(|x| x as i64).collect(),
        &INTEGER_OPS,
        |a, b| a == b,
    )
}
