//! Makes the allocator keep the pages that it has.
//!
//! Tensors come and go in each step, at the same sizes. mimalloc gives pages back to the system a second after they are freed,
//! and then a later step pays for them again, with a page fault and a zeroed page each: 28,000 faults in 12 steps of a GPT of
//! 3.3M parameters on 2,048 tokens, against 500 with this.

use libmimalloc_sys::{mi_option_get, mi_option_set};

/// `mi_option_purge_delay` of `mimalloc.h`, for which the binding has no name.
const PURGE_DELAY: i32 = 15;
/// What it is unless set, in milliseconds.
const DEFAULT: std::ffi::c_long = 1000;
const NEVER: std::ffi::c_long = -1;

/// From now on the process keeps its pages until it ends. An option that the environment has set
/// (`MIMALLOC_PURGE_DELAY`) is left alone.
pub fn keep() {
    // SAFETY: options are plain numbers that may be read and set at any time; the index is inside their table. Should it mean
    // another option in another version, its value would hardly be this option's default, and nothing is set.
    unsafe {
        if mi_option_get(PURGE_DELAY) == DEFAULT {
            mi_option_set(PURGE_DELAY, NEVER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_the_one_that_is_meant() {
        // SAFETY: as in `keep`.
        assert_eq!(unsafe { mi_option_get(PURGE_DELAY) }, DEFAULT);
        keep();
        // SAFETY: as in `keep`.
        assert_eq!(unsafe { mi_option_get(PURGE_DELAY) }, NEVER);
    }
}
