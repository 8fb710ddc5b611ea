//! Ranks tell each other how their part went, so that all succeed or all fail.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::CheckpointProblem;
use crate::comm::Communicator;
use crate::error::{Error, Result};

#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    Done(T),
    Failed {
        /// As text: JSON has no other paths.
        path: String,
        problem: CheckpointProblem,
        message: String,
    },
}

/// Gives every rank what all ranks have got, in rank order; or, if some have failed, the error of the first of them.
/// `about`: the path that an error which names none is about.
pub(crate) fn agree<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    label: &str,
    about: &Path,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let mine = match mine {
        Ok(done) => Outcome::Done(done),
        Err(Error::Checkpoint {
            path,
            problem,
            message,
            ..
        }) => Outcome::Failed {
            path: path.to_string_lossy().into_owned(),
            problem,
            message,
        },
        Err(other) => Outcome::Failed {
            path: about.to_string_lossy().into_owned(),
            problem: CheckpointProblem::Io,
            message: other.to_string(),
        },
    };
    let all: Vec<Outcome<T>> = comm.all_gather_object(&mine, label)?;
    let mut done = Vec::with_capacity(all.len());
    for (rank, outcome) in all.into_iter().enumerate() {
        match outcome {
            Outcome::Done(value) => done.push(value),
            Outcome::Failed {
                path,
                problem,
                message,
            } => {
                return Err(Error::Checkpoint {
                    rank: Some(rank),
                    path: path.into(),
                    problem,
                    message,
                });
            }
        }
    }
    Ok(done)
}

/// [`agree`] on what rank 0 alone does.
pub(crate) fn rank_0<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    label: &str,
    about: &Path,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mine = match comm.rank() {
        // A list, because Some(()) and None are the same in JSON.
        0 => f().map(|done| vec![done]),
        _ => Ok(Vec::new()),
    };
    let first = agree(comm, label, about, mine)?
        .into_iter()
        .flatten()
        .next();
    first.ok_or_else(|| Error::invalid("checkpoint", "rank 0 has sent nothing"))
}
