//! The collectives of one rank that are under way, and what it knows of the other ranks.
//!
//! Nothing here waits: [`Engine::poll`] does all that can be done now. Every rank tells every other one which collective it
//! joins, by a small control message. A collective is *ready* when all have joined, and only then anything is received for
//! it: so ranks that call different things find out, instead of reading each other's bytes as something else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{Channel, data_tag};
use super::message::{Closed, Message, RemoteFailure};
use super::staging::{Contributions, Staging};
use super::transfer::{Part, Transfer, parts};
use crate::buffer::{Buffer, with_element};
use crate::comm::reduce::reduce;
use crate::comm::rendezvous::{Failure, consequence};
use crate::comm::traffic::TrafficCounters;
use crate::comm::{Collective, Request};
use crate::error::{Error, Result};

/// What a message is for. It comes back when the message is through, and until then keeps alive what it owns.
#[derive(Debug)]
pub(super) enum Token {
    /// A control message, and its text.
    Control { _text: Arc<[u8]> },
    /// A message of a collective.
    Part { seq: u64, part: Part },
    /// A contribution to the piece in this row of staging memory has come.
    Staged { row: usize },
}

/// Control messages with their senders.
pub(super) type Mail = VecDeque<(usize, Vec<u8>)>;

/// What is known of one rank.
#[derive(Debug, Default)]
struct Peer {
    /// Collectives it has joined.
    num_joined: u64,
    /// Those of them that this rank has not joined yet.
    early: VecDeque<String>,
    /// How its closure ended, and after how many collectives.
    ended: Option<(u64, Option<RemoteFailure>)>,
    /// A wait for it has passed its deadline: nobody waits for it again.
    given_up: bool,
    /// The position of its failure in the order in which this rank heard of them.
    order: usize,
}

pub(super) struct Engine {
    channel: Channel<Token>,
    /// Oldest first; those whose result was fetched are gone.
    transfers: VecDeque<Transfer>,
    staging: Staging,
    peers: Vec<Peer>,
    /// Collectives that this rank has joined.
    num_joined: u64,
    /// Collectives that all ranks have joined.
    num_ready: u64,
    failure: Option<Failure>,
    /// Another rank has found the failure.
    is_foreign: bool,
    /// A call was answered with it: this rank's later error is a consequence.
    told: bool,
    num_failed: usize,
    /// What ranks that have ended say of the next run.
    next_run: Mail,
    traffic: Arc<TrafficCounters>,
    completed: Vec<Token>,
}

impl Engine {
    /// An engine over an idle channel. `early` is what was heard of this run before.
    pub fn new(
        channel: Channel<Token>,
        early: Mail,
        traffic: Arc<TrafficCounters>,
    ) -> Result<Self> {
        let mut engine = Self {
            peers: (0..channel.world_size()).map(|_| Peer::default()).collect(),
            channel,
            transfers: VecDeque::new(),
            staging: Staging::default(),
            num_joined: 0,
            num_ready: 0,
            failure: None,
            is_foreign: false,
            told: false,
            num_failed: 0,
            next_run: Mail::new(),
            traffic,
            completed: Vec::new(),
        };
        for (from, text) in early {
            engine.hear(from, text)?;
        }
        Ok(engine)
    }

    fn rank(&self) -> usize {
        self.channel.rank()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.channel.world_size()).filter(move |r| *r != rank)
    }

    /// Joins the next collective and returns its number.
    pub fn start(&mut self, request: &Request, buffer: Buffer) -> Result<u64> {
        let operation = request.describe(buffer.dtype(), buffer.len());
        self.check_open(&operation)?;
        let seq = self.num_joined;
        self.tell_all(&Message::Join {
            operation: operation.clone(),
        })?;
        for from in self.others() {
            if let Some(theirs) = self.peers[from].early.pop_front() {
                self.compare(seq, &operation, from, &theirs)?;
            }
        }
        self.num_joined += 1;
        self.traffic.called(request.collective);
        let place = (self.rank(), self.channel.world_size());
        let transfer = Transfer::new(seq, request, buffer, operation, place);
        self.transfers.push_back(transfer);
        self.send_all(self.transfers.len() - 1)?;
        self.poll()?;
        Ok(seq)
    }

    /// Does all that can be done now; false if that was nothing.
    pub fn poll(&mut self) -> Result<bool> {
        let progressed = self.try_poll();
        if let Err(error) = &progressed
            && self.failure.is_none()
        {
            self.failure = Some(Failure::Error(error.clone()));
        }
        progressed
    }

    fn try_poll(&mut self) -> Result<bool> {
        let mut progressed = false;
        while let Some((from, text)) = self.channel.next_control()? {
            self.hear(from, text)?;
            progressed = true;
        }
        while self.next_is_ready() {
            self.receive_all()?;
            self.num_ready += 1;
        }
        let mut completed = std::mem::take(&mut self.completed);
        self.channel.completed(&mut completed)?;
        progressed |= !completed.is_empty();
        for token in completed.drain(..) {
            self.finish(&token)?;
        }
        self.completed = completed;
        self.reduce_rows()?;
        self.fill_rows()?;
        Ok(progressed)
    }

    /// Sends what can be sent before the other ranks have joined.
    fn send_all(&mut self, index: usize) -> Result<()> {
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

    fn next_is_ready(&self) -> bool {
        let (rank, seq) = (self.rank(), self.num_ready);
        seq < self.num_joined
            && self
                .peers
                .iter()
                .enumerate()
                .all(|(r, p)| r == rank || p.num_joined > seq)
    }

    /// All ranks have joined the next collective: receives what they send.
    fn receive_all(&mut self) -> Result<()> {
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
    fn finish(&mut self, token: &Token) -> Result<()> {
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
    fn fill_rows(&mut self) -> Result<()> {
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
    fn reduce_rows(&mut self) -> Result<()> {
        let (me, world_size) = (self.rank(), self.channel.world_size());
        while let Some(row) = self.staging.used.pop_front_if(|row| row.missing == 0) {
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

    fn index(&self, seq: u64) -> Option<usize> {
        self.transfers.binary_search_by_key(&seq, |t| t.seq).ok()
    }

    fn forget_if_over(&mut self, index: usize) {
        if self.transfers[index].is_done() && self.transfers[index].detached {
            self.transfers.remove(index);
        }
    }

    /// Nobody will fetch the result of collective `seq`; the other ranks still get theirs.
    pub fn detach(&mut self, seq: u64) {
        if let Some(index) = self.index(seq) {
            self.transfers[index].detached = true;
            self.forget_if_over(index);
        }
    }

    /// The buffer of collective `seq`, if it is done.
    pub fn take_if_done(&mut self, seq: u64) -> Option<Buffer> {
        let index = self.index(seq)?;
        let done = self.transfers[index].is_done();
        let transfer = done.then(|| self.transfers.remove(index)).flatten()?;
        Some(transfer.into_buffer())
    }

    /// When collective `seq` was done; `None` if it is not.
    pub fn completed_at(&self, seq: u64) -> Option<Instant> {
        self.transfers[self.index(seq)?].completed_at()
    }

    /// True if no collective can succeed any more.
    pub fn is_closed(&self) -> bool {
        self.failure.is_some()
    }

    /// True once [`check`](Self::check) or [`start`](Self::start) has told this rank of another one's failure.
    pub fn was_told(&self) -> bool {
        self.told
    }

    /// The oldest collective whose work is not done.
    pub fn first_unfinished(&self) -> Option<u64> {
        self.transfers.iter().find(|t| !t.is_done()).map(|t| t.seq)
    }

    fn check_open(&mut self, operation: &str) -> Result<()> {
        let Some(failure) = self.failure.clone() else {
            return Ok(());
        };
        self.told |= self.is_foreign;
        Err(consequence(self.rank(), operation.to_string(), failure))
    }

    /// Fails if the wait for collective `seq`, which began at `start`, has no hope.
    pub fn check(&mut self, seq: u64, start: Instant, timeout: Duration) -> Result<()> {
        let rank = self.rank();
        let operation = self
            .index(seq)
            .map_or(String::new(), |i| self.transfers[i].operation.clone());
        self.check_open(&operation)?;
        let missing = |r: &usize| self.peers[*r].num_joined <= seq;
        for left in self.others().filter(missing) {
            if let Some((left_seq, _)) = self.peers[left].ended {
                return Err(Error::RankLeft {
                    rank,
                    left,
                    left_seq,
                    seq,
                    operation,
                });
            }
        }
        if start.elapsed() < timeout {
            return Ok(());
        }
        let error = Error::Timeout {
            rank,
            seq,
            operation,
            missing: self.others().filter(missing).collect(),
            waited: start.elapsed(),
        };
        self.close(error.clone());
        Err(error)
    }

    /// This rank has found an error that is one for all.
    fn close(&mut self, error: Error) {
        if let Error::Timeout { missing, .. } = &error {
            missing.iter().for_each(|r| self.peers[*r].given_up = true);
        }
        let message = Closed::of(&error);
        self.failure.get_or_insert(Failure::Error(error));
        if let Some(message) = message {
            // A rank that cannot be told will find out by its own deadline.
            let _ = self.tell_all(&Message::Closed(message));
        }
    }

    /// Reads a control message.
    fn hear(&mut self, from: usize, text: Vec<u8>) -> Result<()> {
        if self.peers[from].ended.is_some() {
            self.next_run.push_back((from, text));
            return Ok(());
        }
        let message = serde_json::from_slice(&text)
            .map_err(|e| Error::invalid("control message", format!("from rank {from}: {e}")))?;
        match message {
            Message::Join { operation } => {
                let peer = &mut self.peers[from];
                let seq = peer.num_joined;
                peer.num_joined += 1;
                if seq >= self.num_joined {
                    peer.early.push_back(operation);
                } else if let Some(index) = self.index(seq) {
                    let mine = self.transfers[index].operation.clone();
                    // Waits find the failure; what was polled for must not fail instead.
                    let _ = self.compare(seq, &mine, from, &operation);
                }
            }
            Message::Closed(closed) => {
                let error = closed.into_error();
                if let Error::Timeout { missing, .. } = &error {
                    missing.iter().for_each(|r| self.peers[*r].given_up = true);
                }
                self.is_foreign |= self.failure.is_none();
                self.failure.get_or_insert(Failure::Error(error));
            }
            Message::Ended {
                num_collectives,
                failure,
            } => {
                if let Some(failure) = &failure {
                    self.is_foreign |= self.failure.is_none();
                    self.failure.get_or_insert(Failure::Rank {
                        rank: from,
                        reason: failure.message.clone(),
                    });
                }
                self.num_failed += usize::from(failure.is_some());
                self.peers[from].order = self.num_failed;
                self.peers[from].ended = Some((num_collectives, failure));
            }
        }
        Ok(())
    }

    /// Fails if the two ranks call different collectives. The higher rank counts as the one that differs.
    fn compare(&mut self, seq: u64, mine: &str, from: usize, theirs: &str) -> Result<()> {
        if mine == theirs {
            return Ok(());
        }
        let rank = self.rank();
        let [a, b] = if rank < from {
            [(rank, mine), (from, theirs)]
        } else {
            [(from, theirs), (rank, mine)]
        };
        let error = Error::Mismatch {
            seq,
            rank_a: a.0,
            operation_a: a.1.to_string(),
            rank_b: b.0,
            operation_b: b.1.to_string(),
        };
        self.is_foreign |= rank < from && self.failure.is_none();
        self.close(error.clone());
        Err(error)
    }

    fn tell_all(&mut self, message: &Message) -> Result<()> {
        let text = serde_json::to_vec(message).map_err(|e| Error::invalid("control message", e))?;
        let text: Arc<[u8]> = text.into();
        for to in self.others() {
            let token = Token::Control {
                _text: Arc::clone(&text),
            };
            // SAFETY: the token shares the text, on the heap.
            unsafe { self.channel.send_control(&raw const *text, to, token)? };
        }
        Ok(())
    }

    /// Tells the others how this rank's closure ended.
    pub fn end(&mut self, failure: Option<RemoteFailure>) -> Result<()> {
        let num_collectives = self.num_joined;
        self.tell_all(&Message::Ended {
            num_collectives,
            failure,
        })
    }

    /// Ranks that have not ended, but for those that were given up.
    pub fn running(&self) -> Vec<usize> {
        let runs = |r: &usize| self.peers[*r].ended.is_none() && !self.peers[*r].given_up;
        self.others().filter(runs).collect()
    }

    /// How the other ranks failed: rank, failure, and its place in the order in which they were heard.
    pub fn failures(&self) -> Vec<(usize, RemoteFailure, usize)> {
        let ended = |r: usize| {
            let (_, failure) = self.peers[r].ended.as_ref()?;
            Some((r, failure.clone()?, self.peers[r].order))
        };
        self.others().filter_map(ended).collect()
    }

    /// Collectives that this rank has joined.
    pub fn num_joined(&self) -> u64 {
        self.num_joined
    }

    /// True when no control message is under way. Those to ranks that were given up may never arrive.
    pub fn has_told(&self) -> bool {
        let is_control = |token: &Token| matches!(token, Token::Control { .. });
        let sending = self.channel.tokens().iter().any(is_control);
        !(sending || self.channel.is_receiving()) || self.peers.iter().any(|p| p.given_up)
    }

    /// True when all ranks have ended, and have told so.
    pub fn all_ended(&self) -> bool {
        self.others().all(|r| self.peers[r].ended.is_some())
    }

    /// True when every message of this run was sent and received: the channel can serve another one.
    pub fn is_clean(&self) -> bool {
        let same =
            |r: usize| matches!(self.peers[r].ended, Some((n, None)) if n == self.num_joined);
        self.failure.is_none() && self.channel.is_idle() && self.others().all(same)
    }

    /// The channel, idle, and what was heard of the next run. Only when [clean](Self::is_clean).
    pub fn into_channel(mut self) -> (Channel<Token>, Mail) {
        let (rank, n) = (self.rank(), self.channel.world_size());
        let channel = std::mem::replace(&mut self.channel, Channel::closed(rank, n));
        (channel, std::mem::take(&mut self.next_run))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.channel.is_idle() {
            // MPI may still read and write these buffers. A send cannot be taken back, so they stay until the process ends.
            std::mem::forget(std::mem::take(&mut self.transfers));
            std::mem::forget(std::mem::take(&mut self.staging));
        }
    }
}
