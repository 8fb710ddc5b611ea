//! What several example programs share.

pub mod wines;
