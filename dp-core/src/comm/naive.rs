//! The slow, obvious backend: the oracle that the others are tested against.
//!
//! Each rank leaves a copy of its buffer; when all copies are there, each rank computes its own result from them,
//! element by element, in rank order. No sharing, no chunks, no progress before `wait`. Buffers in a device's memory are
//! copied to the host and back.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use candle_core::{DType, DeviceLocation};

use super::rendezvous::{GroupControl, Patience, Payload, Rendezvous, Slot};
use super::traffic::TrafficCounters;
use super::{Collective, Communicator, Pending, PendingCollective, ReduceOp, Request, Traffic};
use crate::buffer::{Buffer, Element, with_element};
use crate::error::Result;

type Copies = Vec<OnceLock<Buffer>>;

impl Payload for Copies {
    /// They are memory.
    const KEPT: usize = 0;

    fn new(_: &Request, _: DType, _: usize, world_size: usize) -> Self {
        (0..world_size).map(|_| OnceLock::new()).collect()
    }

    fn renew(&mut self, _: &Request, _: DType, _: usize) {
        self.iter_mut().for_each(|copy| drop(copy.take()));
    }
}

/// Creates a group of `world_size` ranks on the naive backend.
pub(crate) fn naive_group(
    world_size: usize,
    timeout: Duration,
) -> (Vec<Arc<dyn Communicator>>, Arc<dyn GroupControl>) {
    let meeting = Arc::new(Rendezvous::<Copies>::new(
        world_size,
        timeout,
        Patience::NONE,
    ));
    let comms = (0..world_size)
        .map(|rank| {
            Arc::new(NaiveComm {
                rank,
                meeting: Arc::clone(&meeting),
                traffic: TrafficCounters::default(),
            }) as Arc<dyn Communicator>
        })
        .collect();
    (comms, meeting)
}

struct NaiveComm {
    rank: usize,
    meeting: Arc<Rendezvous<Copies>>,
    traffic: TrafficCounters,
}

impl fmt::Debug for NaiveComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NaiveComm")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size())
            .finish()
    }
}

impl Communicator for NaiveComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.meeting.world_size()
    }

    fn timeout(&self) -> Duration {
        self.meeting.timeout()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let (dtype, len, n) = (buffer.dtype(), buffer.len(), self.world_size());
        request.validate(dtype, len, n)?;
        let collective = request.collective;
        self.traffic.called(collective);
        self.traffic.sent(
            collective,
            self.bytes_by_formula(collective, dtype.size_in_bytes(), len),
        );
        let copy = with_element!(dtype, T => Buffer::from_vec(buffer.to_vec::<T>()?));
        let slot = self
            .meeting
            .join(self.rank, request, dtype, len, |copies: &Copies| {
                // A rank joins each slot once, so its cell is empty.
                let _ = copies[self.rank].set(copy);
            })?;
        Ok(Pending::new(NaivePending {
            rank: self.rank,
            meeting: Arc::clone(&self.meeting),
            slot,
            buffer,
        }))
    }

    fn traffic(&self) -> Traffic {
        self.traffic.read()
    }
}

impl NaiveComm {
    /// What [`Traffic`] describes, as a formula: the other backends count while they move.
    fn bytes_by_formula(&self, collective: Collective, element: usize, len: usize) -> u64 {
        let n = self.world_size();
        let own = (self.rank + 1) * len / n - self.rank * len / n;
        let elements = match collective {
            Collective::AllReduce(_) => (len - own) + own * (n - 1),
            Collective::ReduceScatter(_) => len - own,
            Collective::AllGather => own * (n - 1),
            Collective::Broadcast { root } if root == self.rank => len * (n - 1),
            Collective::Broadcast { .. } | Collective::Barrier => 0,
        };
        (elements * element) as u64
    }
}

struct NaivePending {
    rank: usize,
    meeting: Arc<Rendezvous<Copies>>,
    slot: Arc<Slot<Copies>>,
    buffer: Buffer,
}

impl PendingCollective for NaivePending {
    fn is_done(&self) -> bool {
        self.slot.is_ready() || self.meeting.is_closed()
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let Self {
            rank,
            meeting,
            slot,
            mut buffer,
        } = *self;
        meeting.wait_until(rank, &slot, || slot.is_ready(), || {})?;
        with_element!(slot.dtype, T => {
            let copies: Vec<&[T]> = slot
                .payload
                .iter()
                .filter_map(OnceLock::get)
                .map(Buffer::as_slice::<T>)
                .collect::<Result<_>>()?;
            let collective = slot.request.collective;
            match buffer.location() {
                DeviceLocation::Cpu => fill(collective, rank, &copies, buffer.as_mut_slice()?),
                _ => {
                    let mut values = buffer.to_vec::<T>()?;
                    fill(collective, rank, &copies, &mut values);
                    buffer.write_with::<T>(0..values.len(), |at, out| {
                        out.copy_from_slice(&values[at]);
                        Ok(())
                    })?;
                }
            }
        });
        Ok(buffer)
    }
}

fn fill<T: Element>(collective: Collective, rank: usize, copies: &[&[T]], out: &mut [T]) {
    let (n, len) = (copies.len(), out.len());
    for (i, out) in out.iter_mut().enumerate() {
        match collective {
            Collective::AllReduce(op) => *out = reduce_one(op, copies, i),
            Collective::ReduceScatter(op) if i / (len / n) == rank => {
                *out = reduce_one(op, copies, i);
            }
            Collective::ReduceScatter(_) | Collective::Barrier => {}
            Collective::AllGather => *out = copies[i / (len / n)][i],
            Collective::Broadcast { root } => *out = copies[root][i],
        }
    }
}

pub(crate) fn reduce_one<T: Element>(op: ReduceOp, copies: &[&[T]], i: usize) -> T {
    let mut acc = copies[0][i].to_acc();
    for copy in &copies[1..] {
        let x = copy[i].to_acc();
        acc = match op {
            ReduceOp::Max => T::max(acc, x),
            ReduceOp::Min => T::min(acc, x),
            _ => T::add(acc, x),
        };
    }
    T::from_acc(match op {
        ReduceOp::Mean => T::divide(acc, copies.len() as f64),
        _ => acc,
    })
}
