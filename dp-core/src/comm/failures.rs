//! What ranks that are processes tell each other of failures.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::world_error::{Cause, RankError};

/// How a rank failed, for the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::comm) struct RemoteFailure {
    pub is_panic: bool,
    pub message: String,
    pub consequence: bool,
}

impl RemoteFailure {
    pub fn of(failure: &RankError) -> Self {
        Self {
            is_panic: matches!(failure.cause, Cause::Panic(_)),
            message: match &failure.cause {
                Cause::Panic(message) => message.clone(),
                Cause::Error(e) => e.to_string(),
            },
            consequence: failure.consequence,
        }
    }

    /// The failure of `rank`, the `order`th of all.
    pub fn into_rank_error(self, rank: usize, order: usize) -> RankError {
        RankError {
            rank,
            cause: if self.is_panic {
                Cause::Panic(self.message)
            } else {
                Cause::Error(self.message.into())
            },
            consequence: self.consequence,
            order,
        }
    }
}

/// An error that is the same fact for all ranks, found by one of them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::comm) enum Closed {
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
    #[cfg(feature = "mpi")]
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
