//! What [`World`](crate::World) asks of a backend whose ranks are processes.

use std::sync::Arc;

use super::{Communicator, GroupControl};
use crate::world_error::RankError;

/// This process' rank in one run.
pub(crate) trait ProcessGroup: GroupControl {
    /// The communicator of this rank.
    fn comm(self: &Arc<Self>) -> Arc<dyn Communicator>;

    /// Ends the run: waits for what this rank has under way, tells the others how it has ended, and hears the same of them.
    /// Returns this rank's outcome, and the failures of the others.
    fn end<T>(&self, outcome: Result<T, RankError>) -> (Result<T, RankError>, Vec<RankError>);
}
