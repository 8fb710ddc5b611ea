//! What several example programs share.

pub mod checks;
pub mod closed_pipe;
pub mod html;
pub mod line_chart;
pub mod logging;
pub mod machine;
pub mod measurement;
pub mod memory_check;
pub mod options;
pub mod pages;
pub mod sizes;
pub mod statistics;
pub mod table;
pub mod train;
pub mod wines;
