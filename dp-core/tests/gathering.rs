//! Reading the other ranks' slices of an all-gather.

use std::sync::Arc;
use std::time::Duration;

use candle_core::DType;
use dp_core::comm::{Pending, PendingCollective, Request, Traffic};
use dp_core::memory::Category;
use dp_core::{Buffer, Communicator, Error, Ledger, ReduceOp, Result};

use crate::oracle::WORLD_SIZES;
use crate::support::{both_backends, ranks, ranks_of, wait_until_freed};

/// Element i of rank s is 100 s + i.
fn numbered(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (100 * rank + i) as f32).collect()
}

#[test]
fn slices_of_the_others_are_read_and_the_own_one_stays() {
    for n in WORLD_SIZES {
        for world in both_backends(n) {
            let traffic = ranks_of(world, move |rank| {
                let (comm, r) = (rank.comm(), rank.rank());
                for slice in [0, 1, 2, 30_000] {
                    let mine = numbered(r, n * slice);
                    let buffer = Buffer::from_vec(mine.clone());
                    let place = buffer.as_slice::<f32>()?.as_ptr();
                    let mut seen = vec![f32::NAN; n * slice];
                    let gathering = comm.all_gather_reading(buffer, "values")?;
                    let buffer = gathering.wait(|at, values| {
                        seen[at.clone()].copy_from_slice(&values.as_slice::<f32>()?[at]);
                        Ok(())
                    })?;
                    let own = r * slice..(r + 1) * slice;
                    assert!(seen[own.clone()].iter().all(|x| x.is_nan()));
                    seen[own.clone()].copy_from_slice(&mine[own.clone()]);
                    let expected: Vec<f32> = (0..n * slice)
                        .map(|i| (100 * (i / slice) + i) as f32)
                        .collect();
                    assert_eq!(seen, expected);
                    assert_eq!(buffer.as_slice::<f32>()?[own.clone()], mine[own]);
                    assert_eq!(buffer.as_slice::<f32>()?.as_ptr(), place);
                }
                comm.barrier()?;
                Ok(comm.traffic())
            });
            for t in traffic {
                assert_eq!(t.all_gather.calls, 4);
                assert_eq!(t.all_gather.bytes_sent, 4 * 30_003 * (n as u64 - 1));
            }
        }
    }
}

/// A rank may overwrite its buffer as soon as it is back, however late another one reads.
#[test]
fn a_buffer_comes_back_when_all_have_read_it() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let (comm, r) = (rank.comm(), rank.rank());
            for round in 0..20 {
                let buffer = Buffer::from_vec(vec![(10 * round + r) as u32; 3]);
                let gathering = comm.all_gather_reading(buffer, "values")?;
                let mut buffer = gathering.wait(|at, values| {
                    if r == round % 3 {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    let other = at.start;
                    assert_eq!(
                        values.as_slice::<u32>()?[other],
                        (10 * round + other) as u32
                    );
                    Ok(())
                })?;
                buffer.as_mut_slice::<u32>()?.fill(u32::MAX);
            }
            Ok(())
        });
    }
}

#[test]
fn a_rank_that_does_not_read_keeps_nobody_waiting() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let (comm, r, ledger) = (rank.comm(), rank.rank(), Ledger::new());
            for round in 0..20 {
                let mine = Buffer::reserved(DType::F32, 3, &ledger, Category::Communication)?;
                let gathering = comm.all_gather_reading(mine, "values")?;
                let mut read = 0;
                match (round + r) % 4 {
                    0 => drop(gathering),
                    1 => {
                        let failed =
                            gathering.wait(|_, _| Err(Error::NoGradient { names: vec![] }));
                        assert!(matches!(failed, Err(Error::NoGradient { .. })));
                    }
                    _ => {
                        drop(gathering.wait(|_, _| {
                            read += 1;
                            Ok(())
                        })?);
                        assert_eq!(read, 2);
                    }
                }
            }
            comm.barrier()?;
            wait_until_freed(&ledger, std::thread::yield_now);
            Ok(())
        });
    }
}

/// Several under way, with other collectives between them, waited for in reverse, while the ranks help with what can be helped.
#[test]
fn gatherings_are_under_way_with_others() {
    for n in WORLD_SIZES {
        ranks(n, move |rank| {
            let (comm, r) = (rank.comm(), rank.rank());
            let mut pending = Vec::new();
            for i in 0..8 {
                let mine = Buffer::from_vec(vec![(i * n + r) as f32; n]);
                let sum = comm.all_reduce(Buffer::from_vec(vec![1f32; 70_000]), ReduceOp::Sum)?;
                pending.push((i, comm.all_gather_reading(mine, "values")?, sum));
                comm.progress();
            }
            while let Some((i, gathering, sum)) = pending.pop() {
                gathering.wait(|at, values| {
                    assert_eq!(
                        values.as_slice::<f32>()?[at.start],
                        (i * n + at.start) as f32
                    );
                    Ok(())
                })?;
                assert_eq!(sum.wait()?.as_slice::<f32>()?[69_999], n as f32);
            }
            Ok(())
        });
    }
}

/// Hands all calls on, as a communicator around another one does: it knows of nothing but `wait`.
#[derive(Debug)]
struct Around(Arc<dyn Communicator>);

struct PendingAround(Pending);

impl PendingCollective for PendingAround {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }
    fn wait(self: Box<Self>) -> Result<Buffer> {
        self.0.wait()
    }
}

impl Communicator for Around {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn world_size(&self) -> usize {
        self.0.world_size()
    }
    fn timeout(&self) -> Duration {
        self.0.timeout()
    }
    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        Ok(Pending::new(PendingAround(self.0.start(request, buffer)?)))
    }
    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }
}

/// One rank reads in place, the others read what `wait` has gathered.
#[test]
fn a_communicator_around_another_one_gathers() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let (mut comm, r) = (rank.comm(), rank.rank());
            if r > 0 {
                comm = Arc::new(Around(comm));
            }
            for _ in 0..10 {
                let gathering =
                    comm.all_gather_reading(Buffer::from_vec(numbered(r, 6)), "values")?;
                let mut seen = Vec::new();
                gathering.wait(|at, values| {
                    seen.extend_from_slice(&values.as_slice::<f32>()?[at]);
                    Ok(())
                })?;
                let other = |r: usize| [2 * r, 2 * r + 1].map(|i| (100 * r + i) as f32);
                seen.sort_by(f32::total_cmp);
                let expected: Vec<f32> = (0..3).filter(|s| *s != r).flat_map(other).collect();
                assert_eq!(seen, expected);
            }
            Ok(())
        });
    }
}
