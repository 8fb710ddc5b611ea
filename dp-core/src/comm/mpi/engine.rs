//! The collectives of one rank that are under way, and what it knows of the other ranks.
//!
//! Nothing here waits: [`Engine::poll`] does all that can be done now. Every rank tells every other one which collective it
//! joins, by a small control message (`peers.rs`). A collective is *ready* when all have joined, and only then anything is received for
//! it: so ranks that call different things find out, instead of reading each other's bytes as something else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::channel::Channel;
use super::message::Message;
use super::peers::Peer;
use super::staging::Staging;
use super::transfer::{Part, Transfer};
use crate::buffer::Buffer;
use crate::comm::Request;
use crate::comm::failures::RemoteFailure;
use crate::comm::rendezvous::Failure;
use crate::comm::traffic::TrafficCounters;
use crate::error::Result;

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

pub(super) struct Engine {
    pub(super) channel: Channel<Token>,
    /// Oldest first; those whose result was fetched are gone.
    pub(super) transfers: VecDeque<Transfer>,
    pub(super) staging: Staging,
    pub(super) peers: Vec<Peer>,
    /// Collectives that this rank has joined.
    pub(super) num_joined: u64,
    /// Collectives that all ranks have joined.
    pub(super) num_ready: u64,
    pub(super) failure: Option<Failure>,
    /// Another rank has found the failure.
    pub(super) is_foreign: bool,
    /// A call was answered with it: this rank's later error is a consequence.
    pub(super) told: bool,
    pub(super) num_failed: usize,
    /// What ranks that have ended say of the next run.
    pub(super) next_run: Mail,
    pub(super) traffic: Arc<TrafficCounters>,
    pub(super) completed: Vec<Token>,
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

    pub(super) fn rank(&self) -> usize {
        self.channel.rank()
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
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

    fn next_is_ready(&self) -> bool {
        let (rank, seq) = (self.rank(), self.num_ready);
        seq < self.num_joined
            && self
                .peers
                .iter()
                .enumerate()
                .all(|(r, p)| r == rank || p.num_joined > seq)
    }

    pub(super) fn index(&self, seq: u64) -> Option<usize> {
        self.transfers.binary_search_by_key(&seq, |t| t.seq).ok()
    }

    pub(super) fn forget_if_over(&mut self, index: usize) {
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
