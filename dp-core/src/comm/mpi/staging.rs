//! Where contributions of other ranks are received before they are reduced.
//!
//! A few rows of fixed size serve all collectives, in the order of their pieces. That order is the same on all ranks, and
//! every rank sends without waiting for a row, so the oldest piece always gets what it waits for.

use std::collections::VecDeque;

use super::transfer::piece_bytes;
use crate::buffer::Element;
use crate::comm::reduce::Ranks;

/// Pieces that are received at a time: one is reduced while the next ones are on their way.
const NUM_ROWS: usize = 4;

/// A row in use: the contributions to one piece of this rank's slice.
#[derive(Debug)]
pub(super) struct Row {
    pub index: usize,
    pub seq: u64,
    pub piece: usize,
    /// Contributions that have not come yet.
    pub missing: usize,
}

/// The rows; at most 8 MiB up to 129 ranks, and 64 KiB per rank above.
#[derive(Default)]
pub(super) struct Staging {
    /// Allocated when first used. In words, so that elements of every dtype are aligned.
    memory: Vec<Box<[u64]>>,
    free: Vec<usize>,
    /// Oldest first.
    pub used: VecDeque<Row>,
    /// Pieces that have no row yet, as collective and piece.
    pub waiting: VecDeque<(u64, usize)>,
}

impl Staging {
    /// Gives the next piece that waits a row, if there is a free one.
    pub fn next_row(&mut self, world_size: usize) -> Option<&Row> {
        if self.waiting.is_empty() {
            return None;
        }
        if self.free.is_empty() && self.memory.len() < NUM_ROWS {
            let words = (world_size - 1) * piece_bytes(world_size) / size_of::<u64>();
            self.free.push(self.memory.len());
            self.memory.push(vec![0; words].into_boxed_slice());
        }
        let index = self.free.pop()?;
        let (seq, piece) = self.waiting.pop_front()?;
        self.used.push_back(Row {
            index,
            seq,
            piece,
            missing: world_size - 1,
        });
        self.used.back()
    }

    /// Takes the oldest row in use, if all contributions are there: results leave in the order of pieces.
    pub fn next_whole(&mut self) -> Option<Row> {
        self.used.front().filter(|row| row.missing == 0)?;
        self.used.pop_front()
    }

    /// Where the contribution of `from` to the piece in row `index` is, on rank `me`.
    pub fn place(&mut self, index: usize, from: usize, me: usize, world_size: usize) -> *mut u8 {
        let slot = if from < me { from } else { from - 1 };
        let start: *mut u8 = self.memory[index].as_mut_ptr().cast();
        start.wrapping_add(slot * piece_bytes(world_size))
    }

    /// The row is free again.
    pub fn release(&mut self, row: &Row) {
        self.free.push(row.index);
    }
}

/// A piece in this rank's buffer, and the other ranks' contributions in a row.
#[derive(Clone, Copy)]
pub(super) struct Contributions {
    pub own: *mut u8,
    pub row: *mut u8,
    pub me: usize,
    pub world_size: usize,
}

impl<T: Element> Ranks<T> for Contributions {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.world_size
    }

    #[inline(always)]
    fn start(&self, rank: usize) -> *mut T {
        if rank == self.me {
            return self.own.cast();
        }
        let slot = if rank < self.me { rank } else { rank - 1 };
        self.row
            .wrapping_add(slot * piece_bytes(self.world_size))
            .cast()
    }
}
