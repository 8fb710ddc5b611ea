//! What several example programs share.

pub mod checks;
pub mod machine;
pub mod options;
pub mod pages;
pub mod statistics;
pub mod table;
pub mod wines;
