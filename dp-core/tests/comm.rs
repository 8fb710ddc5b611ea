use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DType;
use dp_core::comm::{Pending, PendingCollective, Request, Traffic};
use dp_core::memory::Category;
use dp_core::{Buffer, Communicator, Error, Ledger, ReduceOp, Result};
use half::{bf16, f16};

use crate::oracle::{Sample, WORLD_SIZES};
use crate::support::{both_backends, expect_error, ranks, ranks_of};

/// What `all_reduce` makes of one value per rank, on both backends and by `reduce_scatter` too.
#[track_caller]
fn reduced<T: Sample>(op: ReduceOp, inputs: &[T]) -> T {
    let n = inputs.len();
    let [shared, naive] = both_backends(n).map(|world| {
        let inputs = inputs.to_vec();
        let results = ranks_of(world, move |rank| {
            let comm = rank.comm();
            let mine = vec![inputs[rank.rank()]; n];
            let all = comm
                .all_reduce(Buffer::from_vec(mine.clone()), op)?
                .wait()?;
            let scattered = comm.reduce_scatter(Buffer::from_vec(mine), op)?.wait()?;
            let (all, own) = (
                all.into_vec::<T>()?,
                scattered.into_vec::<T>()?[rank.rank()],
            );
            assert!(
                all.iter().all(|x| x.bits() == own.bits()),
                "{all:?} against {own:?}"
            );
            Ok(own)
        });
        assert!(
            results.iter().all(|x| x.bits() == results[0].bits()),
            "ranks differ: {results:?}"
        );
        results[0]
    });
    assert_eq!(
        shared.bits(),
        naive.bits(),
        "backends differ: {shared:?} and {naive:?}"
    );
    shared
}

#[test]
fn sixteen_bit_floats_accumulate_in_f32_and_round_once() {
    // In bf16 256 + 1 is 256: adding in bf16 would give 64.5.
    let spread = [256.0, 1.0, 1.0, 2.0].map(bf16::from_f32);
    assert_eq!(reduced(ReduceOp::Mean, &spread), bf16::from_f32(65.0));
    // The sum overflows f16, the mean does not.
    let large = [40_000.0; 2].map(f16::from_f32);
    assert_eq!(reduced(ReduceOp::Mean, &large), large[0]);
    assert_eq!(reduced(ReduceOp::Sum, &large), f16::INFINITY);
}

#[test]
fn floats_are_added_in_rank_order() {
    // ((1e8 + 1) - 1e8) + 1 = 1 in f32; other orders give 0 or 2.
    assert_eq!(reduced(ReduceOp::Sum, &[1e8f32, 1.0, -1e8, 1.0]), 1.0);
    assert_eq!(reduced(ReduceOp::Sum, &[1.0f32, 1e8, -1e8, 1.0]), 1.0);
    assert_eq!(reduced(ReduceOp::Sum, &[1e8f32, -1e8, 1.0, 1.0]), 2.0);
    // One division, not a product with the inverse: 7/3 rounded.
    assert_eq!(reduced(ReduceOp::Mean, &[1.0f32, 2.0, 4.0]), 7.0f32 / 3.0);
    assert_eq!(reduced(ReduceOp::Mean, &[1.0f64, 2.0, 4.0]), 7.0 / 3.0);
}

#[test]
fn integers_add_and_wrap() {
    assert_eq!(reduced(ReduceOp::Sum, &[1u32, 2, 3]), 6);
    assert_eq!(reduced(ReduceOp::Sum, &[200u8, 100]), 44);
    assert_eq!(reduced(ReduceOp::Max, &[-5i64, -7, -6]), -5);
    assert_eq!(reduced(ReduceOp::Min, &[5u8, 7, 6]), 5);
    assert_eq!(reduced(ReduceOp::Max, &[1u32, u32::MAX, 0]), u32::MAX);
}

#[test]
fn nan_is_not_lost_in_max_and_min() {
    for op in [ReduceOp::Max, ReduceOp::Min] {
        assert!(reduced(op, &[f32::NAN, 1.0, 2.0]).is_nan());
        assert!(reduced(op, &[1.0f32, f32::NAN, 2.0]).is_nan());
        assert!(reduced(op, &[1.0f32, 2.0, f32::NAN]).is_nan());
        assert!(reduced(op, &[1.0, f64::NAN]).is_nan());
        assert!(reduced(op, &[f16::ONE, f16::NAN]).is_nan());
        assert!(reduced(op, &[bf16::NAN, bf16::ONE]).is_nan());
    }
    assert_eq!(reduced(ReduceOp::Max, &[f32::NEG_INFINITY, -3.0]), -3.0);
}

#[test]
fn what_the_collectives_leave_where() {
    for n in [1, 2, 3, 4] {
        ranks(n, move |rank| {
            let (comm, r) = (rank.comm(), rank.rank());
            // Element i of rank s is 100 s + i; slices of two elements.
            let mine = |r: usize| (0..2 * n).map(|i| (100 * r + i) as f32).collect::<Vec<_>>();
            let gathered = comm.all_gather(Buffer::from_vec(mine(r)))?.wait()?;
            let expected: Vec<f32> = (0..2 * n).map(|i| (100 * (i / 2) + i) as f32).collect();
            assert_eq!(gathered.as_slice::<f32>()?, expected);

            let sum = comm
                .reduce_scatter(Buffer::from_vec(mine(r)), ReduceOp::Sum)?
                .wait()?;
            let ranks = 100 * (0..n).sum::<usize>();
            let expected = [2 * r, 2 * r + 1].map(|i| (ranks + n * i) as f32);
            assert_eq!(sum.as_slice::<f32>()?[2 * r..2 * r + 2], expected);

            for root in 0..n {
                let sent = comm.broadcast(Buffer::from_vec(mine(r)), root)?.wait()?;
                assert_eq!(sent.into_vec::<f32>()?, mine(root));
            }
            Ok(())
        });
    }
}

#[test]
fn buffers_come_back_without_a_copy() {
    ranks(2, |rank| {
        let buffer = Buffer::from_vec(vec![1.0f32; 1000]);
        let before = buffer.as_slice::<f32>()?.as_ptr();
        let after = rank.comm().all_reduce(buffer, ReduceOp::Sum)?.wait()?;
        assert_eq!(before, after.as_slice::<f32>()?.as_ptr());
        Ok(())
    });
}

#[test]
fn many_in_flight_waited_for_in_reverse() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let comm = rank.comm();
            let start = |i: usize| -> Result<Pending> {
                let mine = Buffer::from_vec(vec![(rank.rank() * i) as f32; 1 + i * 5000]);
                comm.all_reduce(mine, ReduceOp::Sum)
            };
            let mut pending = (0..12)
                .map(|i| Ok((i, start(i)?)))
                .collect::<Result<Vec<_>>>()?;
            while let Some((i, p)) = pending.pop() {
                let sum = p.wait()?.into_vec::<f32>()?;
                assert_eq!(sum, vec![(3 * i) as f32; 1 + i * 5000]);
            }
            Ok(())
        });
    }
}

#[test]
fn a_dropped_pending_still_serves_the_others() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let comm = rank.comm();
            for round in 0..20 {
                let mine = Buffer::from_vec(vec![1.0f32; 10_000]);
                let pending = comm.all_reduce(mine, ReduceOp::Sum)?;
                if rank.rank() == round % 3 {
                    drop(pending);
                } else {
                    assert!(pending.wait()?.as_slice::<f32>()?.iter().all(|x| *x == 3.0));
                }
            }
            comm.barrier()
        });
    }
}

#[test]
fn a_collective_that_all_ranks_drop_frees_its_buffers() {
    for world in both_backends(3) {
        ranks_of(world, |rank| {
            let (comm, ledger) = (rank.comm(), Ledger::new());
            for _ in 0..5 {
                let mine = Buffer::reserved(DType::F32, 1000, &ledger, Category::Communication)?;
                drop(comm.all_reduce(mine, ReduceOp::Sum)?);
            }
            // Everybody has joined and dropped all five; another rank may still be looking at one.
            comm.barrier()?;
            let start = Instant::now();
            while ledger.current().communication > 0 {
                assert!(
                    start.elapsed() < Duration::from_secs(5),
                    "{:?}",
                    ledger.current()
                );
                std::thread::yield_now();
            }
            let sum = comm
                .all_reduce(Buffer::from_vec(vec![1u8]), ReduceOp::Sum)?
                .wait()?;
            assert_eq!(sum.into_vec::<u8>()?, [3]);
            Ok(())
        });
    }
}

#[test]
fn progress_finishes_collectives_without_wait() {
    for n in [1, 2, 3, 4] {
        ranks(n, move |rank| {
            let comm = rank.comm();
            let pending = comm.all_reduce(Buffer::from_vec(vec![1.0f32; 50_000]), ReduceOp::Sum)?;
            let other = comm.all_gather(Buffer::from_vec(vec![rank.rank() as u8; n]))?;
            while !(pending.is_done() && other.is_done()) {
                comm.progress();
            }
            assert_eq!(pending.wait()?.as_slice::<f32>()?[49_999], n as f32);
            assert_eq!(
                other.wait()?.into_vec::<u8>()?,
                (0..n as u8).collect::<Vec<_>>()
            );
            Ok(())
        });
    }
}

#[test]
fn bytes_sent_follow_the_formulas() {
    for n in WORLD_SIZES {
        for world in both_backends(n) {
            let traffic = ranks_of(world, move |rank| {
                let comm = rank.comm();
                let buffer = || Buffer::from_vec(vec![1.0f32; 8 * 3 * 1000]);
                comm.all_reduce(buffer(), ReduceOp::Mean)?.wait()?;
                comm.reduce_scatter(buffer(), ReduceOp::Mean)?.wait()?;
                comm.all_gather(buffer())?.wait()?;
                comm.broadcast(buffer(), n - 1)?.wait()?;
                // After it, every rank has waited, so all bytes of the others have moved as well.
                comm.barrier()?;
                Ok(comm.traffic())
            });
            let (n, s) = (n as u64, 4 * 8 * 3 * 1000u64);
            for (rank, t) in traffic.iter().enumerate() {
                assert_eq!(t.all_reduce.bytes_sent, 2 * (n - 1) * s / n);
                assert_eq!(t.reduce_scatter.bytes_sent, (n - 1) * s / n);
                assert_eq!(t.all_gather.bytes_sent, (n - 1) * s / n);
                let from_root = if rank as u64 == n - 1 { (n - 1) * s } else { 0 };
                assert_eq!(t.broadcast.bytes_sent, from_root);
                assert_eq!((t.barrier.calls, t.barrier.bytes_sent), (1, 0));
                assert_eq!(t.calls(), 5);
                assert_eq!(t.bytes_sent(), 4 * (n - 1) * s / n + from_root);
            }
        }
    }
}

#[test]
fn bytes_of_uneven_slices_add_up() {
    for world in both_backends(4) {
        let traffic = ranks_of(world, |rank| {
            let comm = rank.comm();
            comm.all_reduce(Buffer::from_vec(vec![1u8; 7]), ReduceOp::Sum)?
                .wait()?;
            comm.barrier()?;
            Ok(comm.traffic().all_reduce.bytes_sent)
        });
        // Slices of 1, 2, 2 and 2: each rank sends the others' slices home and its own to three others.
        assert_eq!(traffic, [6 + 3, 5 + 6, 5 + 6, 5 + 6]);
    }
}

#[test]
fn impossible_requests_name_what_is_wrong() {
    for world in both_backends(2) {
        ranks_of(world, |rank| {
            let comm = rank.comm();
            let ints = || Buffer::from_vec(vec![1i64; 4]);
            let floats = |n: usize| Buffer::from_vec(vec![1f32; n]);
            let mean = "average of integers";
            expect_error(
                comm.all_reduce(ints(), ReduceOp::Mean),
                &["all_reduce(mean) of 4 i64", mean],
            );
            expect_error(comm.reduce_scatter(ints(), ReduceOp::Mean), &[mean]);
            expect_error(
                comm.reduce_scatter(floats(3), ReduceOp::Sum),
                &["of 3 f32", "multiple of the 2 ranks"],
            );
            expect_error(
                comm.all_gather(floats(5)),
                &["all_gather of 5 f32", "multiple of the 2 ranks"],
            );
            let error = expect_error(
                comm.broadcast(floats(1), 2),
                &["root 2", "below the 2 ranks"],
            );
            assert!(matches!(error, Error::InvalidArgument { .. }));
            // Nothing of this has used up a place in the sequence.
            comm.barrier()
        });
    }
}

#[test]
fn byte_strings_may_differ_in_length() {
    let text = |rank: usize| b"abcdefghij"[..[3, 0, 10, 1][rank]].to_vec();
    for n in [1, 2, 3, 4] {
        for world in both_backends(n) {
            let all = ranks_of(world, move |rank| {
                rank.comm().all_gather_bytes(&text(rank.rank()), "words")
            });
            let expected: Vec<_> = (0..n).map(text).collect();
            assert!(all.iter().all(|a| *a == expected), "{all:?}");
        }
    }
    let empty = ranks(3, |rank| rank.comm().all_gather_bytes(&[], "nothing"));
    assert_eq!(empty, vec![vec![Vec::<u8>::new(); 3]; 3]);
}

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
            let start = Instant::now();
            while ledger.current().communication > 0 {
                assert!(start.elapsed() < Duration::from_secs(5));
                std::thread::yield_now();
            }
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
