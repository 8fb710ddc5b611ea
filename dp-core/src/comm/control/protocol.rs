//! What ranks and rank 0 tell each other over the control channel, as JSON.
//!
//! ```text
//! rank r                                rank 0
//!   Hello            ->                               registers
//!                    <-   Waiting, once a second      until all have registered
//!                    <-   Welcome | Refused
//!   Joined           ->                               compares
//!                    <-   Agreed                      all ranks have joined alike
//!   TimedOut         ->                               knows who is missing
//!                    <-   Closed                      a mismatch or a timeout: to all
//!   Ended            ->
//!                    <-   Ended                       of every other rank
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::comm::failures::{Closed, RemoteFailure};

/// Changes when ranks of two versions would not understand each other.
pub(super) const PROTOCOL: u32 = 1;

/// Who comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    /// Version of this crate.
    pub version: String,
    /// The job that the launcher has started; empty where it has no name.
    pub job: String,
    /// The position of this run among those of its process, from 0.
    pub run: u64,
    pub rank: usize,
    pub world_size: usize,
    /// What no other rank may have, too: the GPU.
    pub device: Option<String>,
}

impl Hello {
    pub fn new(job: &str, rank: usize, world_size: usize) -> Self {
        Self {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_string(),
            job: job.to_string(),
            run: 0,
            rank,
            world_size,
            device: None,
        }
    }
}

/// What rank 0 says to who has come.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// These ranks have not come yet.
    Waiting { missing: Vec<usize> },
    /// The run does not begin, or not with you.
    Refused { reason: String },
    /// All have come. What rank 0 has for all: NCCL's unique id.
    Welcome { payload: Vec<u8> },
}

/// From a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// It has joined its next collective. `operation` describes all that must be the same on all ranks.
    Joined { operation: String },
    /// Its wait in collective `seq` has passed its deadline.
    TimedOut {
        seq: u64,
        operation: String,
        waited: Duration,
    },
    /// Its closure has ended.
    Ended { failure: Option<RemoteFailure> },
}

/// From rank 0 to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum News {
    /// The first `num` collectives are joined by all ranks, alike.
    Agreed { num: u64 },
    /// No collective can go on.
    Closed(Closed),
    /// The closure of `rank` has ended, after `num_collectives`, or its process is gone.
    Ended {
        rank: usize,
        num_collectives: u64,
        failure: Option<RemoteFailure>,
    },
}
