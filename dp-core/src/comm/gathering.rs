//! An all_gather whose result nobody needs in one piece.

use std::ops::Range;

use super::Pending;
use crate::buffer::Buffer;
use crate::error::Result;

/// What is done with each slice of the other ranks: its place in the gathered buffer, and a buffer that has its elements there.
/// Elements elsewhere are not to be looked at.
pub(super) type ReadSlice<'a> = dyn FnMut(Range<usize>, &Buffer) -> Result<()> + 'a;

/// An all_gather under way, of which each rank reads the other ranks' slices one by one.
///
/// Ranks that are threads read each slice where its owner has left it: it is not copied to the reader's buffer first, which
/// would be read and written once more for each element. For other backends, and on devices, this is an all_gather, and the
/// slices are read from the rank's own buffer.
///
/// ```
/// # use dp_core::{Buffer, Result, World};
/// # fn main() -> Result<()> {
/// World::threads(3)?.run(|rank| {
///     let mut mine = vec![0f32; 6];
///     mine[2 * rank.rank()..][..2].fill(rank.rank() as f32);
///     let mut sum = 0.0;
///     let gathering = rank.comm().all_gather_reading(Buffer::from_vec(mine), "values")?;
///     gathering.wait(|at, values| {
///         sum += values.as_slice::<f32>()?[at].iter().sum::<f32>();
///         Ok(())
///     })?;
///     assert_eq!(sum, 2.0 * (0..3).filter(|r| *r != rank.rank()).sum::<usize>() as f32);
///     Ok(())
/// })
/// # }
/// ```
#[must_use = "the slices are read in wait"]
#[derive(Debug)]
pub struct Gathering {
    pending: Pending,
    rank: usize,
    world_size: usize,
}

impl Gathering {
    pub(super) fn new(pending: Pending, rank: usize, world_size: usize) -> Self {
        Self {
            pending,
            rank,
            world_size,
        }
    }

    /// Waits for the slices of the other ranks, and calls `read` with each: with its place in the gathered buffer, and with a
    /// buffer that has its elements there. The rank's own buffer comes back when all ranks have read what they want; of its
    /// elements, those of the own slice are as they were, others are unspecified.
    ///
    /// # Errors
    /// See [`Pending::wait`]; those of `read`, after all have read.
    pub fn wait(self, mut read: impl FnMut(Range<usize>, &Buffer) -> Result<()>) -> Result<Buffer> {
        let (rank, world_size) = (self.rank, self.world_size);
        match self.pending.wait_reading(&mut read) {
            Ok(buffer) => buffer,
            Err(pending) => {
                let buffer = pending.wait()?;
                let len = buffer.len();
                for other in others(rank, world_size) {
                    read(slice(other, len, world_size), &buffer)?;
                }
                Ok(buffer)
            }
        }
    }
}

/// The ranks to read from: the next one first, so that not all read from the same.
pub(super) fn others(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (1..world_size).map(move |step| (rank + step) % world_size)
}

/// What `rank` leaves of `len` gathered elements.
pub(super) fn slice(rank: usize, len: usize, world_size: usize) -> Range<usize> {
    rank * len / world_size..(rank + 1) * len / world_size
}
