//! One collective of one rank: which bytes go where, and what is left to do.
//!
//! Slice `s` of a buffer is at home on rank `s`, as in the shared-memory backend, and is cut into pieces. A reduction has
//! two halves:
//!
//! 1. Each rank sends its *contribution* to each piece to the piece's home. The home receives those of all ranks side by
//!    side in a row of staging memory, and reduces them with its own, in rank order.
//! 2. `all_reduce` only: the home sends each *result* to all others as soon as it is there. They receive it in the place
//!    of their contribution, once that is sent.
//!
//! Gathering and broadcasting have the second half only. So each element that is reduced crosses the network as often as in
//! the best ring algorithm, `2 (N-1)/N` times per rank, and its sum does not depend on who comes first.

use std::ops::Range;
use std::time::Instant;

use candle_core::DType;

use crate::buffer::Buffer;
use crate::comm::{Collective, ReduceOp, Request};

/// Bytes that a row of staging memory should have: the contributions of all other ranks to one piece.
const ROW_BYTES: usize = 2 << 20;

/// What a message of a collective is for; comes back when the message is through.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// This rank's contribution to a piece of slice `home` was sent.
    Contribution { home: usize, piece: usize },
    /// Something was sent, or received where it belongs.
    Result,
}

/// A collective that this rank has joined.
pub(super) struct Transfer {
    pub seq: u64,
    pub collective: Collective,
    pub dtype: DType,
    /// The request in words, with all that must be the same on all ranks.
    pub operation: String,
    /// Nobody will ask for the result.
    pub detached: bool,
    len: usize,
    rank: usize,
    world_size: usize,
    /// Elements of a piece of a reduction; the last one of a slice may have fewer.
    piece_len: usize,
    buffer: Buffer,
    /// Where the buffer's elements are, on the heap: they do not move when the buffer does.
    start: *mut u8,
    /// All ranks have joined: what they send may be received.
    is_ready: bool,
    /// Messages and reductions until the collective is done.
    remaining: usize,
    completed_at: Option<Instant>,
    /// `all_reduce`: per slice, the contributions sent, and the pieces whose results are being received.
    homes: Vec<Home>,
}

#[derive(Default, Clone)]
struct Home {
    sent: Vec<bool>,
    receiving: usize,
}

// SAFETY: the pointer is to elements that this transfer owns.
unsafe impl Send for Transfer {}

/// Bytes of one piece of a reduction among `world_size` ranks: the same on all of them.
pub(super) fn piece_bytes(world_size: usize) -> usize {
    let fair = ROW_BYTES / world_size.saturating_sub(1).max(1);
    // Whole elements of any dtype; large enough that a message is worth it.
    fair.clamp(16 << 10, 512 << 10) / 8 * 8
}

impl Transfer {
    pub fn new(
        seq: u64,
        request: &Request,
        mut buffer: Buffer,
        operation: String,
        (rank, world_size): (usize, usize),
    ) -> Self {
        let mut transfer = Self {
            seq,
            collective: request.collective,
            dtype: buffer.dtype(),
            operation,
            detached: false,
            len: buffer.len(),
            rank,
            world_size,
            piece_len: piece_bytes(world_size) / buffer.dtype().size_in_bytes(),
            start: buffer.as_mut_ptr(),
            buffer,
            is_ready: false,
            remaining: 0,
            completed_at: None,
            homes: Vec::new(),
        };
        let others = world_size - 1;
        let own = transfer.num_pieces(rank);
        let foreign: usize = transfer.others().map(|r| transfer.num_pieces(r)).sum();
        transfer.remaining = match request.collective {
            Collective::AllReduce(_) => foreign + own + own * others + foreign,
            Collective::ReduceScatter(_) => foreign + own,
            Collective::AllGather | Collective::Broadcast { .. } => {
                let sent: usize = transfer.sent_whole().map_or(0, |r| parts(r).count()) * others;
                let received: usize = transfer
                    .received_whole()
                    .map(|(_, r)| parts(r).count())
                    .sum();
                sent + received
            }
            Collective::Barrier => 0,
        };
        if matches!(request.collective, Collective::AllReduce(_)) {
            transfer.homes = (0..world_size)
                .map(|home| Home {
                    sent: vec![false; transfer.num_pieces(home)],
                    receiving: 0,
                })
                .collect();
        }
        transfer
    }

    /// The reduction, if it is one.
    pub fn reduction(&self) -> Option<ReduceOp> {
        match self.collective {
            Collective::AllReduce(op) | Collective::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }

    pub fn set_ready(&mut self) {
        self.is_ready = true;
        self.note_completion();
    }

    pub fn is_done(&self) -> bool {
        self.is_ready && self.remaining == 0
    }

    pub fn completed_at(&self) -> Option<Instant> {
        self.completed_at
    }

    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// One message or reduction less.
    pub fn finished_one(&mut self) {
        self.remaining -= 1;
        self.note_completion();
    }

    fn note_completion(&mut self) {
        if self.is_done() {
            self.completed_at = Some(Instant::now());
        }
    }

    /// The other ranks, beginning after this one, so that not all begin with the same.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, n) = (self.rank, self.world_size);
        (1..n).map(move |i| (rank + i) % n)
    }

    /// Pieces of slice `home` of a reduction.
    pub fn num_pieces(&self, home: usize) -> usize {
        self.slice(home).len().div_ceil(self.piece_len)
    }

    /// The bytes of a piece, from the buffer's start.
    pub fn piece(&self, home: usize, piece: usize) -> Range<usize> {
        let slice = self.slice(home);
        let start = slice.start + piece * self.piece_len;
        self.bytes(start..(start + self.piece_len).min(slice.end))
    }

    /// The address of byte `offset` of the buffer.
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    /// Bytes that this rank sends to each other rank as they are, in the second half.
    pub fn sent_whole(&self) -> Option<Range<usize>> {
        match self.collective {
            Collective::AllGather => Some(self.bytes(self.slice(self.rank))),
            Collective::Broadcast { root } if root == self.rank => Some(self.bytes(0..self.len)),
            _ => None,
        }
    }

    /// Bytes that other ranks send as they are, with the sender.
    pub fn received_whole(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.others().filter_map(|from| match self.collective {
            Collective::AllGather => Some((from, self.bytes(self.slice(from)))),
            Collective::Broadcast { root } if root == from => Some((from, self.bytes(0..self.len))),
            _ => None,
        })
    }

    /// Notes that a contribution was sent: its place is free for the result.
    pub fn contribution_sent(&mut self, home: usize, piece: usize) {
        if let Some(home) = self.homes.get_mut(home) {
            home.sent[piece] = true;
        }
    }

    /// The next piece of slice `home` whose result can be received now; each is given once, in order, since messages of two
    /// ranks come in the order they were sent.
    pub fn next_result(&mut self, home: usize) -> Option<usize> {
        let home = self.homes.get_mut(home).filter(|_| self.is_ready)?;
        let piece = home.receiving;
        home.sent.get(piece).filter(|sent| **sent)?;
        home.receiving += 1;
        Some(piece)
    }

    fn slice(&self, home: usize) -> Range<usize> {
        home * self.len / self.world_size..(home + 1) * self.len / self.world_size
    }

    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        let size = self.dtype.size_in_bytes();
        elements.start * size..elements.end * size
    }
}

/// Cuts bytes into messages of at most 1 GiB: MPI counts with 32 bits.
pub(super) fn parts(bytes: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    const MOST: usize = 1 << 30;
    bytes
        .clone()
        .step_by(MOST)
        .map(move |start| start..(start + MOST).min(bytes.end))
}
