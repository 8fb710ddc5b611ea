//! Collectives of ranks that share one CUDA device: one kernel, or a few, on the buffers where they lie.
//!
//! **Who may touch a buffer when.** Each rank puts its work on a stream of its own, and the device runs streams in any order
//! and at the same time, so that the host's locks say nothing about it. Events order the streams:
//!
//! 1. A rank that leaves its buffer records an event on its own stream. What it has put there before, such as the copies of
//!    gradients into the bucket, comes before the event.
//! 2. When all buffers are there, one rank, whichever comes first, lets its own stream wait for the events of all ranks, puts
//!    the kernels of the collective on it, and records another event, *done*, behind them.
//! 3. A rank that takes its buffer back lets its own stream wait for *done*. What it puts there later, such as the update from
//!    the reduced gradients, comes after it.
//! 4. A buffer that nobody takes is freed on its own stream, after that stream has waited for its rank's event and for
//!    *done*, if the kernels were started.
//!
//! So between 1 and 3 only the kernels touch the buffers, whose stream comes after all 1 and before all 3. No rank waits on the
//! host for any of this: *done* is recorded when the kernels are started, not when they have ended. A wait of a stream always
//! ends, since events are waited for only after they were recorded, and all that comes before them are kernels that end.
//!
//! Only the rank's own thread puts work on a rank's stream, but for 4. There the handle of a stream means the same to
//! all threads, or, where it is that of the calling thread (`Device::new_cuda`), the freeing thread's stream waits.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, CudaViewMut, DriverError};
use parking_lot::{Mutex, RwLockWriteGuard};

use super::{Berth, Exchange};
use crate::buffer::{Buffer, Element, with_element};
use crate::comm::Collective;
use crate::comm::traffic::TrafficCounters;
use crate::cuda::Kernels;
use crate::error::{Error, Result};

/// The events of one collective. Unused where all buffers are in the host's memory.
pub(super) struct Streams {
    /// Some rank has left a buffer in a device's memory.
    on_device: AtomicBool,
    /// Per rank: what its stream had to do when it left its buffer.
    left: Box<[Mutex<Option<Result<CudaEvent>>>]>,
    /// The kernels, once they are started; or why they are not.
    done: Mutex<Option<Result<Arc<CudaEvent>>>>,
}

impl Streams {
    pub fn new(world_size: usize) -> Self {
        Self {
            on_device: AtomicBool::new(false),
            left: (0..world_size).map(|_| Mutex::new(None)).collect(),
            done: Mutex::new(None),
        }
    }

    /// For another collective.
    pub fn renew(&mut self) {
        if std::mem::replace(self.on_device.get_mut(), false) {
            self.left
                .iter_mut()
                .for_each(|event| *event.get_mut() = None);
            *self.done.get_mut() = None;
        }
    }

    /// True if some rank's buffer is in a device's memory. Known when the slot is ready.
    pub fn on_device(&self) -> bool {
        // Relaxed: `ready` is published after all deposits.
        self.on_device.load(Ordering::Relaxed)
    }

    /// A rank leaves its buffer (1).
    pub fn leave(&self, rank: usize, buffer: &Buffer) {
        if let Ok(memory) = buffer.cuda() {
            let stream = memory.stream();
            let event = stream.record_event(None);
            *self.left[rank].lock() = Some(event.map_err(|e| failed(&stream, e)));
            self.on_device.store(true, Ordering::Relaxed);
        }
    }

    /// A rank takes its buffer back (3).
    pub fn take(&self, buffer: &Buffer) -> Result<()> {
        if !self.on_device() {
            return Ok(());
        }
        // Without elements there is nothing to start.
        let Some(done) = self.done.lock().clone() else {
            return Ok(());
        };
        // A buffer in the host's memory has no stream, but then `done` is an error.
        let (done, stream) = (done?, buffer.cuda()?.stream());
        stream.wait(&done).map_err(|e| failed(&stream, e))
    }

    /// Before the buffers that nobody has taken are freed (4).
    pub fn before_free(&self, berths: &[Berth]) {
        let done = self.done.lock();
        for (berth, left) in berths.iter().zip(&self.left) {
            let buffer = berth.buffer.read();
            let Some(Ok(memory)) = buffer.as_ref().map(Buffer::cuda) else {
                continue;
            };
            // An error comes up in the next call that can return one.
            let stream = memory.stream();
            if let Some(Ok(event)) = &*left.lock() {
                stream.context().record_err(stream.wait(event));
            }
            if let Some(Ok(event)) = &*done {
                stream.context().record_err(stream.wait(event));
            }
        }
    }
}

impl Exchange {
    /// Starts the kernels (2), unless another rank has. True if it did. `rank`: whose thread this is.
    pub(super) fn start_kernels(&self, rank: usize, traffic: &[TrafficCounters]) -> bool {
        // All chunks are claimed at once.
        let claim = (Ordering::Relaxed, Ordering::Relaxed);
        let claimed = self
            .next_chunk
            .compare_exchange(0, self.num_chunks, claim.0, claim.1);
        if claimed.is_err() || self.num_chunks == 0 {
            return false;
        }
        let started = self.run_on_device(rank);
        if started.is_ok() {
            for home in 0..self.berths.len() {
                self.count(home, self.slice(home).len(), traffic);
            }
        }
        *self.streams.done.lock() = Some(started);
        self.finish_chunks(self.num_chunks);
        true
    }

    fn run_on_device(&self, rank: usize) -> Result<Arc<CudaEvent>> {
        let mut buffers: Vec<_> = self.berths.iter().map(|b| b.buffer.write()).collect();
        check_places(&buffers)?;
        let stream = match &*buffers[rank] {
            Some(buffer) => buffer.cuda()?.stream(),
            None => return Err(Error::invalid("collective", "a buffer was taken too early")),
        };
        for event in &self.streams.left {
            if let Some(event) = &*event.lock() {
                let event = event.as_ref().map_err(Error::clone)?;
                stream.wait(event).map_err(|e| failed(&stream, e))?;
            }
        }
        let kernels = Kernels::on(&stream)?;
        with_element!(self.dtype, T => self.launch::<T>(&kernels, &mut buffers)?);
        let done = stream.record_event(None);
        Ok(Arc::new(done.map_err(|e| failed(&stream, e))?))
    }

    fn launch<T: Element>(
        &self,
        kernels: &Kernels,
        buffers: &mut [RwLockWriteGuard<'_, Option<Buffer>>],
    ) -> Result<()> {
        let (n, whole) = (buffers.len(), 0..self.len);
        match self.collective {
            Collective::AllReduce(op) => {
                kernels.reduce(&mut views::<T>(buffers, &whole)?, 0..n, op)
            }
            Collective::ReduceScatter(op) => (0..n).try_for_each(|home| {
                let mut slices = views::<T>(buffers, &self.slice(home))?;
                kernels.reduce(&mut slices, home..home + 1, op)
            }),
            Collective::AllGather => (0..n).try_for_each(|home| {
                kernels.broadcast(&mut views::<T>(buffers, &self.slice(home))?, home)
            }),
            Collective::Broadcast { root } => {
                kernels.broadcast(&mut views::<T>(buffers, &whole)?, root)
            }
            Collective::Barrier => Ok(()),
        }
    }
}

/// Elements `range` of each rank's buffer.
fn views<'a, T: Element>(
    buffers: &'a mut [RwLockWriteGuard<'_, Option<Buffer>>],
    range: &Range<usize>,
) -> Result<Vec<CudaViewMut<'a, T>>> {
    let buffers = buffers.iter_mut().filter_map(|buffer| buffer.as_mut());
    buffers
        .map(|buffer| buffer.cuda_mut()?.view_mut(range.clone()))
        .collect()
}

/// Refuses buffers that no one device reaches.
fn check_places(buffers: &[RwLockWriteGuard<'_, Option<Buffer>>]) -> Result<()> {
    let places = || {
        let buffers = buffers.iter().filter_map(|buffer| buffer.as_ref());
        buffers.map(Buffer::location).enumerate()
    };
    let Some((_, first)) = places().next() else {
        return Ok(());
    };
    match places().find(|(_, place)| *place != first) {
        Some((rank, place)) => {
            let message = format!(
                "rank 0 has its buffer on {first:?}, rank {rank} on {place:?}; threads need all of them on one device, and \
                 ranks with a GPU each talk over NCCL"
            );
            Err(Error::invalid("devices", message))
        }
        None => Ok(()),
    }
}

fn failed(stream: &CudaStream, error: DriverError) -> Error {
    Error::cuda(stream.context().ordinal(), "an event of a stream", error)
}
