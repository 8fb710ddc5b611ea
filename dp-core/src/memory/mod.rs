//! Where the bytes are: a [`Ledger`] of what the framework keeps by purpose, and a [`CountingAllocator`] that
//! measures everything else.
//!
//! The ledger knows model states (parameters, gradients, optimizer state, communication buffers) exactly, because
//! every such block is created with a [`Reservation`]. Activations and temporaries belong to Candle and to the model;
//! they are measured as the heap that no reservation explains. On a GPU the driver counts instead: [`device_memory`].

mod allocator;
mod device;
mod ledger;

pub(crate) use allocator::set_thread_rank;
pub use allocator::{CountingAllocator, HeapUsage, heap_usage, reset_heap_peak};
pub(crate) use device::keep_freed_memory;
pub use device::{DeviceMemory, device_memory, reset_device_peak};
pub use ledger::{Category, Ledger, LedgerSnapshot, Reservation};
