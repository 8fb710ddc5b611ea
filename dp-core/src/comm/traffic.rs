//! Counted bytes per collective.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::Collective;

/// Calls and bytes of one kind of collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CollectiveTraffic {
    /// Collectives joined by this rank.
    pub calls: u64,
    /// Bytes that went from this rank to others.
    pub bytes_sent: u64,
}

/// What one rank has sent, per kind of collective.
///
/// Bytes are counted where they are moved. Slice `s` of a buffer is reduced at its home, rank `s`: each other rank
/// sends its slice `s` there (reduction), and rank `s` sends the result to each other rank (gathering). With `S` bytes
/// in the buffer and `N` ranks, one rank so sends `2 (N-1)/N S` in an all_reduce and `(N-1)/N S` in a reduce_scatter
/// or an all_gather, the optimum that ring algorithms reach. A broadcast sends `(N-1) S` from its root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// All-reduce.
    pub all_reduce: CollectiveTraffic,
    /// Reduce-scatter.
    pub reduce_scatter: CollectiveTraffic,
    /// All-gather.
    pub all_gather: CollectiveTraffic,
    /// Broadcast.
    pub broadcast: CollectiveTraffic,
    /// Barrier.
    pub barrier: CollectiveTraffic,
}

impl Traffic {
    /// Bytes sent over all kinds.
    pub fn bytes_sent(&self) -> u64 {
        self.kinds().iter().map(|k| k.bytes_sent).sum()
    }

    /// Calls over all kinds.
    pub fn calls(&self) -> u64 {
        self.kinds().iter().map(|k| k.calls).sum()
    }

    fn kinds(&self) -> [CollectiveTraffic; 5] {
        [
            self.all_reduce,
            self.reduce_scatter,
            self.all_gather,
            self.broadcast,
            self.barrier,
        ]
    }
}

/// The counters behind [`Traffic`]; written by whichever rank does the moving.
/// Aligned so that two ranks' counters share no cache line, nor a pair of lines that is fetched together.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct TrafficCounters([[AtomicU64; 2]; 5]);

impl TrafficCounters {
    pub(super) fn called(&self, collective: Collective) {
        self.0[index(collective)][0].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sent(&self, collective: Collective, bytes: u64) {
        self.0[index(collective)][1].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Traffic {
        let read = |i: usize| CollectiveTraffic {
            calls: self.0[i][0].load(Ordering::Relaxed),
            bytes_sent: self.0[i][1].load(Ordering::Relaxed),
        };
        Traffic {
            all_reduce: read(0),
            reduce_scatter: read(1),
            all_gather: read(2),
            broadcast: read(3),
            barrier: read(4),
        }
    }
}

fn index(collective: Collective) -> usize {
    match collective {
        Collective::AllReduce(_) => 0,
        Collective::ReduceScatter(_) => 1,
        Collective::AllGather => 2,
        Collective::Broadcast { .. } => 3,
        Collective::Barrier => 4,
    }
}

/// The bytes that rank `rank` of `n` sends for a buffer of `len` elements of `size` bytes: what the other
/// backends count where they move them. For a backend that does not see its bytes.
#[cfg(any(test, feature = "nccl"))]
pub(super) fn bytes_sent(
    collective: Collective,
    rank: usize,
    n: usize,
    len: usize,
    size: usize,
) -> u64 {
    let own = (rank + 1) * len / n - rank * len / n;
    let (reduced, gathered) = (len - own, own * (n - 1));
    let elements = match collective {
        Collective::AllReduce(_) => reduced + gathered,
        Collective::ReduceScatter(_) => reduced,
        Collective::AllGather => gathered,
        Collective::Broadcast { root } if root == rank => len * (n - 1),
        Collective::Broadcast { .. } | Collective::Barrier => 0,
    };
    (elements * size) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{ReduceOp, Request};
    use crate::{Buffer, Result, World};

    #[test]
    fn the_formula_gives_what_is_counted() -> Result<()> {
        for n in 1..=4 {
            World::threads(n)?.run(|rank| {
                let comm = rank.comm();
                let mut expected = 0;
                for len in [0, 12, 24, 12 * 5000] {
                    for collective in [
                        Collective::AllReduce(ReduceOp::Sum),
                        Collective::ReduceScatter(ReduceOp::Sum),
                        Collective::AllGather,
                        Collective::Broadcast { root: n - 1 },
                        Collective::Barrier,
                    ] {
                        let buffer = Buffer::from_vec(vec![1.0f32; len]);
                        comm.start(Request::new(collective, ""), buffer)?.wait()?;
                        expected += bytes_sent(collective, rank.rank(), n, len, 4);
                    }
                }
                // Lengths that the ranks do not divide: slices differ by one element.
                for len in [1, 7, 1031] {
                    let op = ReduceOp::Sum;
                    comm.all_reduce(Buffer::from_vec(vec![1i64; len]), op)?
                        .wait()?;
                    expected += bytes_sent(Collective::AllReduce(op), rank.rank(), n, len, 8);
                }
                // Other ranks may still be moving what is counted for this one.
                comm.barrier()?;
                assert_eq!(comm.traffic().bytes_sent(), expected);
                Ok::<(), crate::Error>(())
            })?;
        }
        Ok(())
    }
}
