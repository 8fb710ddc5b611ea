//! How the bytes of collectives move: what [`Engine::poll`] begins, and does when it is through.

use super::channel::data_tag;
use super::engine::{Engine, Token};
use super::staging::Contributions;
use super::transfer::{Part, parts};
use crate::buffer::with_element;
use crate::comm::Collective;
use crate::comm::reduce::reduce;
use crate::error::Result;

impl Engine {
    /// Sends what can be sent before the other ranks have joined.
    pub(super) fn send_all(&mut self, index: usize) -> Result<()> {
        let transfer = &self.transfers[index];
        let (seq, mut bytes) = (transfer.seq, 0);
        for to in transfer.others() {
            if transfer.reduction().is_some() {
                for piece in 0..transfer.num_pieces(to) {
                    let range = transfer.piece(to, piece);
                    bytes += range.len();
                    let part = Part::Contribution { home: to, piece };
                    // SAFETY: the engine keeps the transfer and its buffer until it is done, which it is not before this is
                    // sent; `Drop` leaks both if that never comes. These bytes are written only after `part` came back.
                    unsafe {
                        self.channel.send(
                            transfer.at(range.start),
                            range.len(),
                            to,
                            data_tag(seq, 0),
                            Token::Part { seq, part },
                        )?;
                    }
                }
            }
            for range in transfer.sent_whole().into_iter().flat_map(parts) {
                bytes += range.len();
                let part = Part::Result;
                // SAFETY: as above; nobody writes what is sent whole.
                unsafe {
                    self.channel.send(
                        transfer.at(range.start),
                        range.len(),
                        to,
                        data_tag(seq, 1),
                        Token::Part { seq, part },
                    )?;
                }
            }
        }
        self.traffic.sent(transfer.collective, bytes as u64);
        Ok(())
    }

    /// All ranks have joined the next collective: receives what they send.
    pub(super) fn receive_all(&mut self) -> Result<()> {
        let (rank, seq) = (self.rank(), self.num_ready);
        let Some(index) = self.index(seq) else {
            return Ok(());
        };
        let transfer = &mut self.transfers[index];
        transfer.set_ready();
        if transfer.reduction().is_some() {
            let pieces = 0..transfer.num_pieces(rank);
            self.staging
                .waiting
                .extend(pieces.map(|piece| (seq, piece)));
        }
        for (from, range) in transfer.received_whole() {
            for range in parts(range) {
                let part = Part::Result;
                // SAFETY: as in `send_all`; this part of the buffer is not sent, and not touched before the token is back.
                unsafe {
                    self.channel.receive(
                        transfer.at(range.start),
                        range.len(),
                        from,
                        data_tag(seq, 1),
                        Token::Part { seq, part },
                    )?;
                }
            }
        }
        for home in self.others() {
            self.receive_results(index, home)?;
        }
        self.forget_if_over(index);
        Ok(())
    }

    /// Receives the results of `all_reduce` that may take the place of contributions which were sent.
    fn receive_results(&mut self, index: usize, home: usize) -> Result<()> {
        let transfer = &mut self.transfers[index];
        while let Some(piece) = transfer.next_result(home) {
            let (seq, range) = (transfer.seq, transfer.piece(home, piece));
            let part = Part::Result;
            // SAFETY: as in `send_all`. MPI is through with sending these bytes, and nobody else touches them.
            unsafe {
                self.channel.receive(
                    transfer.at(range.start),
                    range.len(),
                    home,
                    data_tag(seq, 1),
                    Token::Part { seq, part },
                )?;
            }
        }
        Ok(())
    }

    /// A message is through.
    pub(super) fn finish(&mut self, token: &Token) -> Result<()> {
        match *token {
            Token::Control { .. } => {}
            Token::Staged { row } => {
                let mut rows = self.staging.used.iter_mut();
                if let Some(row) = rows.find(|r| r.index == row) {
                    row.missing -= 1;
                }
            }
            Token::Part { seq, part } => {
                let Some(index) = self.index(seq) else {
                    return Ok(());
                };
                self.transfers[index].finished_one();
                if let Part::Contribution { home, piece } = part {
                    self.transfers[index].contribution_sent(home, piece);
                    self.receive_results(index, home)?;
                }
                self.forget_if_over(index);
            }
        }
        Ok(())
    }

    /// Gives free rows to the pieces that wait, and receives the contributions to them.
    pub(super) fn fill_rows(&mut self) -> Result<()> {
        let (rank, n) = (self.rank(), self.channel.world_size());
        while let Some(row) = self.staging.next_row(n) {
            let (row, seq, piece) = (row.index, row.seq, row.piece);
            let Some(index) = self.index(seq) else {
                continue;
            };
            let len = self.transfers[index].piece(rank, piece).len();
            for from in self.others() {
                let place = self.staging.place(row, from, rank, n);
                // SAFETY: a place of its own in a row that is in use until all its contributions are there and reduced;
                // `Drop` leaks the rows if that never comes. No piece is longer than its place.
                unsafe {
                    self.channel.receive(
                        place,
                        len,
                        from,
                        data_tag(seq, 0),
                        Token::Staged { row },
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Reduces the oldest pieces whose contributions are there, and sends their results.
    pub(super) fn reduce_rows(&mut self) -> Result<()> {
        let (me, world_size) = (self.rank(), self.channel.world_size());
        while let Some(row) = self.staging.next_whole() {
            let start = self
                .staging
                .place(row.index, if me == 0 { 1 } else { 0 }, me, world_size);
            self.staging.release(&row);
            let Some(index) = self.index(row.seq) else {
                continue;
            };
            let transfer = &mut self.transfers[index];
            let Some(op) = transfer.reduction() else {
                continue;
            };
            let range = transfer.piece(me, row.piece);
            let ranks = Contributions {
                own: transfer.at(range.start),
                row: start,
                me,
                world_size,
            };
            let len = range.len() / transfer.dtype.size_in_bytes();
            with_element!(transfer.dtype, T => {
                // SAFETY: the own piece is in this rank's buffer, in the slice that it sends to nobody before, so MPI has no
                // business with it. The others are whole in the row (`missing` is 0), which is words, so aligned, and
                // which nobody touches: it is released only for later calls of `fill_rows`.
                unsafe { reduce::<T, _>(ranks, me..me + 1, len, op) };
            });
            transfer.finished_one();
            if matches!(transfer.collective, Collective::AllReduce(_)) {
                let part = Part::Result;
                for to in transfer.others() {
                    // SAFETY: as in `send_all`; the piece is reduced once, so nobody writes it any more.
                    unsafe {
                        self.channel.send(
                            transfer.at(range.start),
                            range.len(),
                            to,
                            data_tag(row.seq, 1),
                            Token::Part { seq: row.seq, part },
                        )?;
                    }
                }
                let sent = range.len() * (world_size - 1);
                self.traffic.sent(transfer.collective, sent as u64);
            }
            self.forget_if_over(index);
        }
        Ok(())
    }
}
