//! How a [`World`](crate::World) ended badly.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;

/// Why a [`World`](crate::World) ended badly: the first failing rank's own error, then those of the others.
pub struct WorldError {
    pub(crate) world_size: usize,
    pub(crate) failures: Vec<RankError>,
}

impl WorldError {
    /// The failed ranks: those that failed by themselves first, in the order of time, then those that failed because
    /// of them.
    pub fn failures(&self) -> &[RankError] {
        &self.failures
    }
}

impl fmt::Display for WorldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, others) = match self.failures.split_first() {
            Some(split) => split,
            None => return write!(f, "no rank failed"),
        };
        write!(f, "{first}")?;
        // An error that all ranks get alike is said once.
        let said = first.cause.to_string();
        let is_new = |o: &&RankError| !o.consequence && !said.contains(&o.cause.to_string());
        for other in others.iter().filter(is_new) {
            write!(f, "\nalso {other}")?;
        }
        let stopped: Vec<String> = others
            .iter()
            .filter(|o| o.consequence)
            .map(|o| o.rank.to_string())
            .collect();
        if !stopped.is_empty() {
            write!(
                f,
                "\nrank {} of {} stopped because of it",
                stopped.join(", "),
                self.world_size
            )?;
        }
        Ok(())
    }
}

/// The message, so that `fn main() -> Result<(), E>` shows it as it is meant to be read.
impl fmt::Debug for WorldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for WorldError {
    /// What is below the first rank's error, which the message has already.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.failures.first()?.cause {
            Cause::Error(e) => e.source(),
            Cause::Panic(_) => None,
        }
    }
}

/// How one rank failed.
#[derive(Debug)]
pub struct RankError {
    pub(crate) rank: usize,
    pub(crate) cause: Cause,
    pub(crate) consequence: bool,
    /// Position in the order in which ranks failed.
    pub(crate) order: usize,
}

impl RankError {
    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The error that the rank's closure returned; `None` if it panicked.
    pub fn error(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        match &self.cause {
            Cause::Error(e) => Some(e.as_ref()),
            Cause::Panic(_) => None,
        }
    }

    /// True if another rank's failure had been reported to this rank before it failed.
    pub fn is_consequence(&self) -> bool {
        self.consequence
    }
}

impl fmt::Display for RankError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::Error(e) => write!(f, "rank {} failed: {e}", self.rank),
            Cause::Panic(message) => write!(f, "rank {} panicked: {message}", self.rank),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Cause {
    Error(Box<dyn StdError + Send + Sync>),
    Panic(String),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(e) => write!(f, "{e}"),
            Self::Panic(message) => write!(f, "panic: {message}"),
        }
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    match panic.downcast_ref::<&str>() {
        Some(text) => (*text).to_string(),
        None => panic
            .downcast_ref::<String>()
            .cloned()
            .unwrap_or_else(|| "a panic without a message".to_string()),
    }
}
