//! [`World::map`] where this process is one rank of several, over MPI.

use std::error::Error as StdError;
use std::sync::atomic::AtomicUsize;

use crate::comm::MpiGroup;
use crate::error::{Error, Result};
use crate::launcher::Launched;
use crate::world::{Backend, Rank, World};
use crate::world_error::{Cause, RankError, WorldError};

impl World {
    /// Runs `f` on this process' rank, and returns when all ranks have ended.
    pub(crate) fn map_process<T, E, F>(&self, launched: &Launched, f: F) -> Result<T, E>
    where
        F: Fn(Rank) -> Result<T, E> + Sync,
        T: Send,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        let failed = |failures| {
            E::from(WorldError {
                world_size: self.world_size,
                failures,
            })
        };
        let error_here = |error: Error| {
            failed(vec![RankError {
                rank: launched.rank,
                cause: Cause::Error(error.into()),
                consequence: false,
                order: 0,
            }])
        };
        let group = self.begin(launched).map_err(error_here)?;
        let local_rank = launched.local_rank.unwrap_or(launched.rank);
        let outcome = self.supervise(launched.rank, group.as_ref(), &AtomicUsize::new(0), || {
            // Here, so that the others hear of it if there is no such device.
            let device = self.devices.of(local_rank).map_err(error_here)?;
            f(Rank::new(group.comm(), local_rank, device))
        });
        let (outcome, mut failures) = group.end(outcome);
        match outcome {
            Ok(value) if failures.is_empty() => return Ok(value),
            Ok(_) => {}
            Err(own) => failures.push(own),
        }
        // Who failed because of another one has no order of its own.
        failures.sort_by_key(|f| {
            (
                f.consequence,
                if f.consequence { 0 } else { f.order },
                f.rank,
            )
        });
        Err(failed(failures))
    }

    fn begin(&self, launched: &Launched) -> Result<std::sync::Arc<MpiGroup>> {
        if self.backend != Backend::default() {
            return Err(Error::misuse(
                "World::run",
                format!(
                    "{:?} is a backend for threads, but this process is a rank of several; leave the backend as it is",
                    self.backend
                ),
            ));
        }
        let patience = self.patience(launched.local_size.unwrap_or(1));
        MpiGroup::begin(launched, self.timeout, patience)
    }
}
