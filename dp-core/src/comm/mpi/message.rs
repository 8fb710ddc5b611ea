//! What ranks tell each other beside the data: small control messages, as JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender has joined its next collective. `operation` describes all that must be the same on all ranks.
    Join { operation: String },
    /// The sender has found that no collective can go on.
    Closed(Closed),
    /// The sender's closure has ended, after `num_collectives`.
    Ended {
        num_collectives: u64,
        failure: Option<RemoteFailure>,
    },
}

/// How a rank failed, for the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RemoteFailure {
    pub is_panic: bool,
    pub message: String,
    pub consequence: bool,
}

/// An error that is the same fact for all ranks, found by one of them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Closed {
    Mismatch {
        seq: u64,
        rank_a: usize,
        operation_a: String,
        rank_b: usize,
        operation_b: String,
    },
    Timeout {
        rank: usize,
        seq: u64,
        operation: String,
        missing: Vec<usize>,
        waited: Duration,
    },
}

impl Closed {
    /// `None` for errors that are one rank's own.
    pub fn of(error: &Error) -> Option<Self> {
        match error.clone() {
            Error::Mismatch {
                seq,
                rank_a,
                operation_a,
                rank_b,
                operation_b,
            } => Some(Self::Mismatch {
                seq,
                rank_a,
                operation_a,
                rank_b,
                operation_b,
            }),
            Error::Timeout {
                rank,
                seq,
                operation,
                missing,
                waited,
            } => Some(Self::Timeout {
                rank,
                seq,
                operation,
                missing,
                waited,
            }),
            _ => None,
        }
    }

    pub fn into_error(self) -> Error {
        match self {
            Self::Mismatch {
                seq,
                rank_a,
                operation_a,
                rank_b,
                operation_b,
            } => Error::Mismatch {
                seq,
                rank_a,
                operation_a,
                rank_b,
                operation_b,
            },
            Self::Timeout {
                rank,
                seq,
                operation,
                missing,
                waited,
            } => Error::Timeout {
                rank,
                seq,
                operation,
                missing,
                waited,
            },
        }
    }
}
