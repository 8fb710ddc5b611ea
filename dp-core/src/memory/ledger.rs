//! Bytes that the framework itself keeps, by category.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::allocator::{add_tracked, current_slot};

/// What a block of memory is for. The first three are the ZeRO paper's *model states*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Category {
    /// Parameters (trained and frozen) and buffers such as batch-norm statistics.
    Parameters,
    /// Gradients that live from backward to the step: whole buckets, or this rank's shards.
    Gradients,
    /// Optimizer state: the moments of AdamW, the momentum of SGD.
    Optimizer,
    /// Buffers that exist only to send or receive.
    Communication,
    /// Copies that a checkpoint in the background is written from.
    Checkpoint,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Communication,
        Category::Checkpoint,
    ];
}

#[derive(Debug, Default)]
struct Account {
    current: AtomicU64,
    peak: AtomicU64,
}

/// Current and peak bytes per [`Category`] of one rank.
///
/// Cloning gives another handle on the same ledger.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    accounts: Arc<[Account; 5]>,
}

/// The ledger at one moment, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerSnapshot {
    /// Bytes of [`Category::Parameters`].
    pub parameters: u64,
    /// Bytes of [`Category::Gradients`].
    pub gradients: u64,
    /// Bytes of [`Category::Optimizer`].
    pub optimizer: u64,
    /// Bytes of [`Category::Communication`].
    pub communication: u64,
    /// Bytes of [`Category::Checkpoint`].
    pub checkpoint: u64,
}

impl LedgerSnapshot {
    /// Parameters + gradients + optimizer state: the ZeRO paper's model states.
    pub fn model_states(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Self {
        Self::default()
    }

    /// Enters `bytes` under `category` until the reservation is dropped.
    ///
    /// Reserve *before* allocating and drop *after* freeing: then the heap never holds more framework bytes than the
    /// ledger knows, and what [`HeapUsage`](super::HeapUsage) calls untracked is never too high.
    pub fn reserve(&self, category: Category, bytes: u64) -> Reservation {
        self.reserve_on(&Device::Cpu, category, bytes)
    }

    /// [`reserve`](Self::reserve) for memory of `device`. What lies in another memory than the host's is no part of
    /// [`HeapUsage`](super::HeapUsage).
    pub fn reserve_on(&self, device: &Device, category: Category, bytes: u64) -> Reservation {
        let account = &self.accounts[category as usize];
        let now = account.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        account.peak.fetch_max(now, Ordering::Relaxed);
        let slot = device.is_cpu().then(current_slot);
        if let Some(slot) = slot {
            add_tracked(slot, bytes as i64);
        }
        Reservation {
            ledger: self.clone(),
            category,
            bytes,
            slot,
        }
    }

    /// Bytes held now.
    pub fn current(&self) -> LedgerSnapshot {
        self.read(|a| a.current.load(Ordering::Relaxed))
    }

    /// Highest value of each category since the start or the last [`reset_peak`](Self::reset_peak). The categories
    /// may have peaked at different moments.
    pub fn peak(&self) -> LedgerSnapshot {
        self.read(|a| a.peak.load(Ordering::Relaxed))
    }

    /// Makes the current values the peaks.
    pub fn reset_peak(&self) {
        for a in self.accounts.iter() {
            a.peak
                .store(a.current.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn read(&self, f: impl Fn(&Account) -> u64) -> LedgerSnapshot {
        let [parameters, gradients, optimizer, communication, checkpoint] =
            Category::ALL.map(|c| f(&self.accounts[c as usize]));
        LedgerSnapshot {
            parameters,
            gradients,
            optimizer,
            communication,
            checkpoint,
        }
    }
}

/// An entry of a [`Ledger`]; dropping it takes the bytes off again.
#[derive(Debug)]
pub struct Reservation {
    ledger: Ledger,
    category: Category,
    bytes: u64,
    /// Whose heap holds the bytes, if a heap does.
    slot: Option<usize>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.ledger.accounts[self.category as usize]
            .current
            .fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some(slot) = self.slot {
            add_tracked(slot, -(self.bytes as i64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_add_up_and_go_away() {
        let ledger = Ledger::new();
        let a = ledger.reserve(Category::Gradients, 100);
        let b = ledger.reserve(Category::Gradients, 50);
        drop(a);
        assert_eq!(ledger.current().gradients, 50);
        assert_eq!(ledger.peak().gradients, 150);
        ledger.reset_peak();
        assert_eq!(ledger.peak().gradients, 50);
        drop(b);
        assert_eq!(ledger.current(), LedgerSnapshot::default());
    }
}
