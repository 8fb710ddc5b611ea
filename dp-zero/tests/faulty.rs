use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dp_core::comm::{Pending, PendingCollective, Request, Traffic};
use dp_core::{Buffer, Communicator, Error, Rank, Result};

/// What goes wrong in a rank's communicator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// Every collective starts some time late, differently each time.
    Delay { seed: usize },
    /// The collective with this number returns an error.
    Fails { at: usize },
    /// The collective with this number panics.
    Panics { at: usize },
    /// The collective with this number never reaches the others.
    IsLost { at: usize },
}

/// A rank's communicator with a fault.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    fault: Fault,
    calls: AtomicUsize,
}

impl Faulty {
    pub fn new(rank: &Rank, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            inner: rank.comm(),
            fault,
            calls: AtomicUsize::new(0),
        })
    }

    /// Collectives started so far.
    pub fn num_calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn progress(&self) {
        self.inner.progress();
    }
    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Delay { seed } => {
                let turn = (call * 7 + self.rank() * 13 + seed * 31) % 5;
                std::thread::sleep(Duration::from_micros(150 * turn as u64));
            }
            Fault::Fails { at } if at == call => {
                return Err(Error::misuse("start", "the cable is out"));
            }
            Fault::Panics { at } if at == call => panic!("the cable is out"),
            Fault::IsLost { at } if at == call => return Ok(Pending::new(Lost(self.timeout()))),
            _ => {}
        }
        self.inner.start(request, buffer)
    }
}

/// Waits for what does not come, longer than the others do.
struct Lost(Duration);

impl PendingCollective for Lost {
    fn is_done(&self) -> bool {
        false
    }
    fn wait(self: Box<Self>) -> Result<Buffer> {
        std::thread::sleep(2 * self.0);
        Err(Error::misuse("wait", "the message is lost"))
    }
}
