//! The loops of collectives: a range of elements of one rank or of all, to one range of results on one rank or on all.
//!
//! Each element is read once from each rank and written once to each rank that gets the result. Between the two it is in a
//! register: a tile is so small that all ranks' values of it are added before the next one is looked at, so nothing is
//! kept in memory on the way, and the results may overwrite the inputs.

use std::ops::Range;

use multiversion::multiversion;

use super::ReduceOp;
use crate::buffer::Element;

/// Elements of a tile: 128 bytes of f32, two cache lines of each rank.
const TILE: usize = 32;

/// Where the elements of each rank lie.
pub(super) trait Ranks<T>: Copy {
    /// The number of ranks.
    fn world_size(&self) -> usize;
    /// The first element of `rank`'s part of the range.
    fn start(&self, rank: usize) -> *mut T;
}

/// Reduces `len` elements of all ranks by `op`, in rank order, and writes the results to the ranks `outputs`.
///
/// # Safety
/// `ranks.start(r)` is valid for reads and writes of `len` elements for each rank `r`, the ranks' parts do not overlap, and
/// nobody else accesses them during the call.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(super) unsafe fn reduce<T: Element, R: Ranks<T>>(
    ranks: R,
    outputs: Range<usize>,
    len: usize,
    op: ReduceOp,
) {
    let divisor = ranks.world_size() as f64;
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match op {
            ReduceOp::Sum => tiles(ranks, outputs, len, T::add, |a| a),
            ReduceOp::Mean => tiles(ranks, outputs, len, T::add, |a| T::divide(a, divisor)),
            ReduceOp::Max => tiles(ranks, outputs, len, T::max, |a| a),
            ReduceOp::Min => tiles(ranks, outputs, len, T::min, |a| a),
        }
    }
}

/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn tiles<T: Element, R: Ranks<T>>(
    ranks: R,
    outputs: Range<usize>,
    len: usize,
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(T::Acc) -> T::Acc,
) {
    let whole = len / TILE * TILE;
    for from in (0..whole).step_by(TILE) {
        // A constant length: its loops become a few vector instructions.
        // SAFETY: inside `len`.
        unsafe { tile(ranks, &outputs, from, TILE, &combine, &finish) };
    }
    if whole < len {
        // SAFETY: inside `len`.
        unsafe { tile(ranks, &outputs, whole, len - whole, &combine, &finish) };
    }
}

/// Elements `from..from + count`, at most a tile.
///
/// # Safety
/// As [`reduce`], with `from + count <= len`.
#[inline(always)]
unsafe fn tile<T: Element, R: Ranks<T>>(
    ranks: R,
    outputs: &Range<usize>,
    from: usize,
    count: usize,
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(T::Acc) -> T::Acc,
) {
    // SAFETY: in bounds by the caller's promise; the elements are initialised numbers, and nobody writes them while the
    // slice lives: the results are written below.
    let input = |rank: usize| unsafe {
        std::slice::from_raw_parts(ranks.start(rank).add(from).cast_const(), count)
    };
    let zero = T::ZERO.to_acc();
    let (mut acc, mut other) = ([zero; TILE], [zero; TILE]);
    T::widen(input(0), &mut acc[..count]);
    for rank in 1..ranks.world_size() {
        T::widen(input(rank), &mut other[..count]);
        for (a, x) in acc[..count].iter_mut().zip(&other[..count]) {
            *a = combine(*a, *x);
        }
    }
    for a in &mut acc[..count] {
        *a = finish(*a);
    }
    let mut results = [T::ZERO; TILE];
    T::narrow(&acc[..count], &mut results[..count]);
    for rank in outputs.clone() {
        // SAFETY: in bounds by the caller's promise; the results are on this thread's stack.
        unsafe {
            std::ptr::copy_nonoverlapping(results.as_ptr(), ranks.start(rank).add(from), count);
        }
    }
}

/// Copies `len` elements of the rank `source` to all others.
///
/// Not `memcpy`, although it is a copy: glibc's uses `rep movsb` for sizes like ours, and some processors (Zen 3) do that at
/// a twentieth of their speed where the destination begins some bytes above the source, modulo 4096. A range of a flat
/// buffer begins anywhere.
///
/// # Safety
/// As [`reduce`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(super) unsafe fn copy<T: Element, R: Ranks<T>>(ranks: R, source: usize, len: usize) {
    for from in (0..len).step_by(TILE) {
        let count = TILE.min(len - from);
        // SAFETY: in bounds, and two ranks' parts do not overlap, by the caller's promise.
        unsafe {
            let values = ranks.start(source).add(from).cast_const();
            for rank in (0..ranks.world_size()).filter(|r| *r != source) {
                let out = ranks.start(rank).add(from);
                if count == TILE {
                    // A constant length: some vector instructions instead of a call.
                    std::ptr::copy_nonoverlapping(values, out, TILE);
                } else {
                    std::ptr::copy_nonoverlapping(values, out, count);
                }
            }
        }
    }
}
