//! What several example programs share.

pub mod machine;
pub mod options;
pub mod pages;
pub mod statistics;
pub mod table;
pub mod wines;
