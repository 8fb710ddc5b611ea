//! What can be wrong with a configuration.

use std::path::PathBuf;

/// What is wrong with a configuration. Keys are paths from the top, `zero_optimization.stage`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's message.
        source: std::io::Error,
    },
    /// The text is not JSON, or has a key twice.
    #[error("the configuration is not JSON: {message}")]
    NotJson {
        /// The parser's message, with line and column.
        message: String,
    },
    /// No such key.
    #[error("`{key}` is no known key; did you mean `{nearest}`?")]
    UnknownKey {
        /// The key.
        key: String,
        /// The known key that is most like it, never `key` itself.
        nearest: String,
    },
    /// No such key, nor one that is like it.
    #[error("`{key}` is no known key; the keys there are {}", quoted(known))]
    NoSuchKey {
        /// The key.
        key: String,
        /// Paths of the keys that its section has.
        known: Vec<String>,
    },
    /// The section would have this key if it were of another type.
    #[error("`{key}` is a key of {}, not of {own}, which has {}", types.join(", "), quoted(known))]
    KeyOfAnotherType {
        /// The key.
        key: String,
        /// The types that have it.
        types: Vec<String>,
        /// The type that the configuration says.
        own: String,
        /// Paths of the keys that this type has.
        known: Vec<String>,
    },
    /// DeepSpeed has this, and it is not there yet here.
    #[error("`{key}` is {value}: {reason}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it would take.
        reason: String,
    },
    /// Not a value for this key.
    #[error("`{key}`: {message}")]
    Invalid {
        /// The key.
        key: String,
        /// What is wrong, and what is right.
        message: String,
    },
    /// Two keys that cannot hold together.
    #[error("`{first}` and `{second}` contradict each other: {reason}")]
    Contradiction {
        /// One key.
        first: String,
        /// The other.
        second: String,
        /// Why.
        reason: String,
    },
}

/// The last parts of paths.
fn quoted(paths: &[String]) -> String {
    let last = |path: &String| format!("`{}`", path.rsplit('.').next().unwrap_or(path));
    paths.iter().map(last).collect::<Vec<_>>().join(", ")
}

impl ConfigError {
    /// [`ConfigError::Invalid`].
    pub fn invalid(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid {
            key: key.into(),
            message: message.into(),
        }
    }

    /// [`ConfigError::Contradiction`].
    pub fn contradiction(
        first: impl Into<String>,
        second: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self::Contradiction {
            first: first.into(),
            second: second.into(),
            reason: reason.into(),
        }
    }
}
