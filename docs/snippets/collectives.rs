//! The three collectives that everything is made of, on two ranks and four numbers.

use dp_core::{Buffer, Rank, ReduceOp, Result, World};

fn main() -> Result<()> {
    World::threads(2)?.run(collectives)
}

// ANCHOR: collectives
fn collectives(rank: Rank) -> Result<()> {
    let (r, comm) = (rank.rank(), rank.comm());
    let mine = || match r {
        0 => Buffer::from_vec(vec![1f32, 2.0, 3.0, 4.0]),
        _ => Buffer::from_vec(vec![10f32, 20.0, 30.0, 40.0]),
    };

    // all_reduce: everybody gets the sum.
    let sum = comm.all_reduce(mine(), ReduceOp::Sum)?.wait()?;
    assert_eq!(sum.as_slice::<f32>()?, [11.0, 22.0, 33.0, 44.0]);

    // reduce_scatter: rank r gets slice r of the sum, in its place.
    let buffer = comm.reduce_scatter(mine(), ReduceOp::Sum)?.wait()?;
    let slice = &buffer.as_slice::<f32>()?[2 * r..2 * r + 2];
    assert_eq!(slice, [[11.0, 22.0], [33.0, 44.0]][r]);

    // all_gather: slice r of rank r goes to everybody.
    let buffer = comm.all_gather(buffer)?.wait()?;
    assert_eq!(buffer.as_slice::<f32>()?, sum.as_slice::<f32>()?);

    // Bytes sent are counted. The buffers have 16 bytes, and N = 2.
    let traffic = comm.traffic();
    assert_eq!(traffic.all_reduce.bytes_sent, 16); // 2 (N-1)/N
    assert_eq!(traffic.reduce_scatter.bytes_sent, 8); // (N-1)/N
    assert_eq!(traffic.all_gather.bytes_sent, 8); // (N-1)/N
    Ok(())
}
// ANCHOR_END: collectives
