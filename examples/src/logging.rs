//! Where the programs' log and timeline go.

use std::path::{Path, PathBuf};

use dp_core::{Timeline, World};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Logs to stderr from now on, and draws a timeline to the file `trace` if there is one, until it is dropped or finished.
///
/// # Errors
/// If the file cannot be written, or the program logs already.
pub fn init(trace: Option<&Path>) -> anyhow::Result<Option<Timeline>> {
    let timeline = trace.map(Timeline::create).transpose()?;
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_filter(LevelFilter::INFO);
    tracing_subscriber::registry()
        .with(log)
        .with(timeline.as_ref().map(Timeline::layer))
        .try_init()?;
    Ok(timeline)
}

/// Where this process draws its timeline, since each has its own: `path`, and with its rank added for all but the main process.
pub fn trace_of(path: &Path, world: &World) -> PathBuf {
    match world.is_main_process() {
        true => path.to_path_buf(),
        false => PathBuf::from(format!("{}.{}", path.display(), world.ranks_here().start)),
    }
}
