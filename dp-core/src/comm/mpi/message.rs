//! What ranks tell each other beside the data: small control messages, as JSON.

use serde::{Deserialize, Serialize};

use crate::comm::failures::{Closed, RemoteFailure};

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
