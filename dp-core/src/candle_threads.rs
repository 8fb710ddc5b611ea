//! How many threads Candle computes with.
//!
//! Candle asks the environment variable `RAYON_NUM_THREADS` at every matrix product, else takes all cores, and cuts the
//! product into that many parts. For a rank that has fewer threads than that, the parts run one after the other and
//! repeat work: about twice the time on two cores. So the variable should say what a rank really has.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// What [`announce`] has written; 0 before. The variable then is no wish of the user.
static WRITTEN: AtomicUsize = AtomicUsize::new(0);
static WARNED: AtomicBool = AtomicBool::new(false);

fn current() -> Option<usize> {
    let value = std::env::var(VARIABLE).ok()?;
    value.trim().parse().ok().filter(|n| *n > 0)
}

/// The number that the user has asked for by the variable.
pub(crate) fn requested() -> Option<usize> {
    current().filter(|n| *n != WRITTEN.load(Ordering::Relaxed))
}

/// Tells Candle that each rank has `threads_per_rank` threads, where the process has no other threads yet; otherwise says
/// once how the user can do it.
pub(crate) fn announce(threads_per_rank: usize) {
    let parts = candle_core::utils::get_num_threads();
    if parts == threads_per_rank {
        return;
    }
    if is_only_thread() {
        WRITTEN.store(threads_per_rank, Ordering::Relaxed);
        // SAFETY: changing the environment is unsound only while another thread may read it. There is no other thread,
        // and none can appear meanwhile, because only this one could start it.
        unsafe { std::env::set_var(VARIABLE, threads_per_rank.to_string()) };
    } else if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "Candle will cut each matrix product into {parts} parts for ranks of {threads_per_rank} threads, which is slow; \
             create the World before any thread is started, or set {VARIABLE}={threads_per_rank}"
        );
    }
}

#[cfg(target_os = "linux")]
fn is_only_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

#[cfg(not(target_os = "linux"))]
fn is_only_thread() -> bool {
    false
}
