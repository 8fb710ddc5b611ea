use candle_core::DType;
use dp_core::comm::Pending;
use dp_core::memory::Category;
use dp_core::{Buffer, Error, Ledger, ReduceOp, Result};
use half::{bf16, f16};

use crate::oracle::{Sample, WORLD_SIZES};
use crate::support::{both_backends, expect_error, ranks, ranks_of, wait_until_freed};

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
            wait_until_freed(&ledger, std::thread::yield_now);
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
