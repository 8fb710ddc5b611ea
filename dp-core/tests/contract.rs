//! What a communicator promises beside its results, whatever its backend.

use std::time::{Duration, Instant};

use candle_core::DType;
use dp_core::comm::Pending;
use dp_core::memory::Category;
use dp_core::{Buffer, Communicator, Ledger, ReduceOp, Result};

use crate::support::{expect_error, wait_until_freed};

/// Checks it; all ranks must call it.
pub fn holds(comm: &dyn Communicator) -> Result<()> {
    many_in_flight_waited_for_in_reverse(comm)?;
    dropped_collectives_serve_the_others_and_free_their_buffers(comm)?;
    progress_finishes_collectives_without_wait(comm)?;
    impossible_requests_name_what_is_wrong(comm)?;
    buffers_come_back_in_place(comm)?;
    words_of_any_length(comm)
}

fn many_in_flight_waited_for_in_reverse(comm: &dyn Communicator) -> Result<()> {
    let start = |i: usize| -> Result<Pending> {
        let mine = vec![(comm.rank() * i) as f32; 1 + i * 50_000];
        comm.all_reduce(Buffer::from_vec(mine), ReduceOp::Sum)
    };
    let mut pending = (0..12).map(start).collect::<Result<Vec<_>>>()?;
    let ranks: usize = (0..comm.world_size()).sum();
    while let Some(p) = pending.pop() {
        let i = pending.len();
        let sum = p.wait()?.into_vec::<f32>()?;
        assert_eq!(sum, vec![(ranks * i) as f32; 1 + i * 50_000]);
    }
    Ok(())
}

fn dropped_collectives_serve_the_others_and_free_their_buffers(
    comm: &dyn Communicator,
) -> Result<()> {
    let (ledger, n) = (Ledger::new(), comm.world_size());
    for round in 0..20 {
        let mine = Buffer::reserved(DType::U8, 10_000, &ledger, Category::Communication)?;
        let pending = comm.all_reduce(mine, ReduceOp::Sum)?;
        if comm.rank() == round % n {
            drop(pending);
        } else {
            pending.wait()?;
        }
    }
    // Done on all ranks when all have come to the end of it.
    wait_until_freed(&ledger, || comm.progress());
    comm.barrier()
}

fn progress_finishes_collectives_without_wait(comm: &dyn Communicator) -> Result<()> {
    let pending = comm.all_reduce(Buffer::from_vec(vec![1.0f32; 300_000]), ReduceOp::Mean)?;
    let start = Instant::now();
    while !pending.is_done() {
        assert!(start.elapsed() < Duration::from_secs(20), "no progress");
        comm.progress();
    }
    assert_eq!(pending.wait()?.as_slice::<f32>()?[299_999], 1.0);
    Ok(())
}

fn impossible_requests_name_what_is_wrong(comm: &dyn Communicator) -> Result<()> {
    let n = comm.world_size();
    let ints = Buffer::from_vec(vec![1i64; 4]);
    expect_error(
        comm.all_reduce(ints, ReduceOp::Mean),
        &["average of integers"],
    );
    if n > 1 {
        let odd = Buffer::from_vec(vec![1f32; n + 1]);
        expect_error(comm.all_gather(odd), &["multiple of the"]);
    }
    // Neither has used up a place in the sequence.
    comm.barrier()
}

fn buffers_come_back_in_place(comm: &dyn Communicator) -> Result<()> {
    // More than one message of a kind between two ranks.
    let buffer = Buffer::from_vec(vec![1.0f32; 1_000_003]);
    let before = buffer.as_slice::<f32>()?.as_ptr();
    let sum = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
    assert_eq!(sum.as_slice::<f32>()?.as_ptr(), before);
    let n = comm.world_size() as f32;
    assert!(sum.as_slice::<f32>()?.iter().all(|x| *x == n));
    Ok(())
}

fn words_of_any_length(comm: &dyn Communicator) -> Result<()> {
    let (r, n) = (comm.rank(), comm.world_size());
    let words: Vec<Vec<u8>> = comm.all_gather_bytes(&vec![r as u8; r], "words")?;
    assert_eq!(words, (0..n).map(|r| vec![r as u8; r]).collect::<Vec<_>>());
    Ok(())
}
