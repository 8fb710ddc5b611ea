//! What ranks know of each other: who has joined what, who has ended, and why no collective can go on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::{Engine, Token};
use super::message::Message;
use crate::comm::failures::{Closed, RemoteFailure};
use crate::comm::rendezvous::{Failure, consequence};
use crate::error::{Error, Result};

/// What is known of one rank.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// Collectives it has joined.
    pub num_joined: u64,
    /// Those of them that this rank has not joined yet.
    pub early: VecDeque<String>,
    /// How its closure ended, and after how many collectives.
    pub ended: Option<(u64, Option<RemoteFailure>)>,
    /// A wait for it has passed its deadline: nobody waits for it again.
    pub given_up: bool,
    /// The position of its failure in the order in which this rank heard of them.
    pub order: usize,
}

impl Engine {
    pub(super) fn check_open(&mut self, operation: &str) -> Result<()> {
        let Some(failure) = self.failure.clone() else {
            return Ok(());
        };
        self.told |= self.is_foreign;
        Err(consequence(self.rank(), operation.to_string(), failure))
    }

    /// Fails if the wait for collective `seq`, which began at `start`, has no hope.
    pub fn check(&mut self, seq: u64, start: Instant, timeout: Duration) -> Result<()> {
        let missing = |r: &usize| self.peers[*r].num_joined <= seq;
        let mut absent = self.others().filter(missing);
        let left = absent.find_map(|r| Some((r, self.peers[r].ended.as_ref()?.0)));
        let waited = start.elapsed();
        // Asked at each look of a wait: without a failure, nothing is allocated.
        if self.failure.is_none() && left.is_none() && waited < timeout {
            return Ok(());
        }
        let rank = self.rank();
        let operation = self
            .index(seq)
            .map_or(String::new(), |i| self.transfers[i].operation.clone());
        self.check_open(&operation)?;
        if let Some((left, left_seq)) = left {
            return Err(Error::RankLeft {
                rank,
                left,
                left_seq,
                seq,
                operation,
            });
        }
        let missing = |r: &usize| self.peers[*r].num_joined <= seq;
        let error = Error::Timeout {
            rank,
            seq,
            operation,
            missing: self.others().filter(missing).collect(),
            waited,
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
    pub(super) fn hear(&mut self, from: usize, text: Vec<u8>) -> Result<()> {
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
    pub(super) fn compare(
        &mut self,
        seq: u64,
        mine: &str,
        from: usize,
        theirs: &str,
    ) -> Result<()> {
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

    pub(super) fn tell_all(&mut self, message: &Message) -> Result<()> {
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
}
