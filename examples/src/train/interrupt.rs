//! Ctrl-C ends a run after the step that is under way.

use std::sync::atomic::{AtomicUsize, Ordering};

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// From now on Ctrl-C, SIGTERM and SIGHUP are remembered; the second one ends the process at once.
///
/// # Errors
/// The system refuses a handler, or there is one already.
pub fn listen() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if SIGNALS.fetch_add(1, Ordering::SeqCst) > 0 {
            std::process::exit(130);
        }
        eprintln!(
            "\nstopping after this step; once more stops at once, and loses what is not saved"
        );
    })?;
    Ok(())
}

/// True once a signal has come.
pub fn is_requested() -> bool {
    SIGNALS.load(Ordering::SeqCst) > 0
}
