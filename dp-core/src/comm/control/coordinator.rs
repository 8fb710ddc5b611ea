//! What rank 0 does for all: it compares which collectives the ranks join, and passes on how they end.
//!
//! NCCL itself compares nothing: ranks that call different collectives hang, or read each other's bytes as something else.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

use super::frame;
use super::protocol::{News, Report};
use super::view::View;
use crate::comm::failures::{Closed, RemoteFailure};

/// Where a rank hears news.
#[derive(Debug)]
pub(super) enum Outlet {
    /// In this process.
    Here(Arc<View>),
    There(TcpStream),
}

#[derive(Debug)]
struct Member {
    outlet: Outlet,
    num_joined: u64,
    ended: bool,
}

/// A collective that some rank has not joined yet.
#[derive(Debug)]
struct Open {
    first: usize,
    operation: String,
    num_joined: usize,
}

#[derive(Debug)]
struct State {
    members: Vec<Member>,
    open: VecDeque<Open>,
    first_open: u64,
    closed: bool,
}

#[derive(Debug)]
pub(super) struct Coordinator(Mutex<State>);

impl Coordinator {
    /// For the ranks behind `outlets`, in rank order.
    pub fn new(outlets: impl IntoIterator<Item = Outlet>) -> Arc<Self> {
        let members = outlets.into_iter().map(|outlet| Member {
            outlet,
            num_joined: 0,
            ended: false,
        });
        Arc::new(Self(Mutex::new(State {
            members: members.collect(),
            open: VecDeque::new(),
            first_open: 0,
            closed: false,
        })))
    }

    /// `from` has said something.
    pub fn hear(&self, from: usize, report: Report) {
        let mut state = self.0.lock();
        match report {
            Report::Joined { operation } => state.joined(from, operation),
            Report::TimedOut {
                seq,
                operation,
                waited,
            } => {
                let missing = |r: &usize| state.members[*r].num_joined <= seq;
                let timeout = Closed::Timeout {
                    rank: from,
                    seq,
                    operation,
                    missing: (0..state.members.len()).filter(missing).collect(),
                    waited,
                };
                state.close(timeout);
            }
            Report::Ended { failure } => state.ended(from, failure),
        }
    }

    /// The connection to `rank` has broken.
    pub fn lost(&self, rank: usize, why: &str) {
        let mut state = self.0.lock();
        if !state.members[rank].ended {
            state.ended(rank, Some(gone(why)));
        }
    }

    /// Says to the ranks of other processes that nothing more will come, or breaks the connections.
    pub fn hang_up(&self, how: Shutdown) {
        for member in &self.0.lock().members {
            if let Outlet::There(stream) = &member.outlet {
                // It may be broken already.
                let _ = stream.shutdown(how);
            }
        }
    }
}

/// How the end of a process is called that did not say anything.
pub(super) fn gone(why: &str) -> RemoteFailure {
    RemoteFailure {
        is_panic: false,
        message: format!(
            "its process is gone, or the network to it ({why}); look at what it printed, or whether it was killed"
        ),
        consequence: false,
    }
}

impl State {
    fn joined(&mut self, from: usize, operation: String) {
        let member = &mut self.members[from];
        let seq = member.num_joined;
        member.num_joined += 1;
        let index = (seq - self.first_open) as usize;
        if index == self.open.len() {
            self.open.push_back(Open {
                first: from,
                operation,
                num_joined: 1,
            });
        } else {
            let open = &mut self.open[index];
            open.num_joined += 1;
            if open.operation != operation {
                let mismatch = Closed::Mismatch {
                    seq,
                    rank_a: open.first,
                    operation_a: open.operation.clone(),
                    rank_b: from,
                    operation_b: operation,
                };
                self.close(mismatch);
            }
        }
        // Ranks join in order, so collectives are complete in order.
        if self.open[0].num_joined == self.members.len() {
            self.open.pop_front();
            self.first_open += 1;
            if !self.closed {
                let num = self.first_open;
                self.tell_all(&News::Agreed { num }, None);
            }
        }
    }

    /// The first reason is the one for all.
    fn close(&mut self, closed: Closed) {
        if !self.closed {
            self.closed = true;
            self.tell_all(&News::Closed(closed), None);
        }
    }

    fn ended(&mut self, rank: usize, failure: Option<RemoteFailure>) {
        let member = &mut self.members[rank];
        member.ended = true;
        let num_collectives = member.num_joined;
        self.closed |= failure.is_some();
        let news = News::Ended {
            rank,
            num_collectives,
            failure,
        };
        self.tell_all(&news, Some(rank));
    }

    /// A send blocks only when the other side has left some 10,000 messages unread. It cannot come to that: it must read
    /// `Agreed` to go on. The write timeout of the stream is for the case that it does.
    fn tell_all(&self, news: &News, except: Option<usize>) {
        for (rank, member) in self.members.iter().enumerate() {
            if Some(rank) == except {
                continue;
            }
            match &member.outlet {
                Outlet::Here(view) => view.hear(news.clone()),
                Outlet::There(stream) => {
                    if let Err(e) = frame::send(stream, news) {
                        // The thread that reads from it will find the same, and say so to all.
                        tracing::debug!("cannot tell rank {rank}: {e}");
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                }
            }
        }
    }
}
