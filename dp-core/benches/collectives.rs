//! Collectives between ranks that are threads.
//!
//! ```text
//! cargo bench --workspace --bench collectives
//! ```
//!
//! `bench-collectives` of the examples compares the same with copying memory, and prints the columns of nccl-tests.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dp_core::{Buffer, Communicator, ReduceOp, Result, World};

type Call = fn(&dyn Communicator, Buffer) -> Result<Buffer>;

const OPS: [(&str, Call); 4] = [
    ("all_reduce", |comm, b| {
        comm.all_reduce(b, ReduceOp::Mean)?.wait()
    }),
    ("reduce_scatter", |comm, b| {
        comm.reduce_scatter(b, ReduceOp::Mean)?.wait()
    }),
    ("all_gather", |comm, b| comm.all_gather(b)?.wait()),
    ("broadcast", |comm, b| comm.broadcast(b, 0)?.wait()),
];

/// The time in which all ranks do `iterations` calls, until the last one has ended.
fn run(world: &World, call: Call, len: usize, iterations: u64) -> Result<Duration> {
    let times = world.map(|rank| -> Result<Duration> {
        let comm = rank.comm();
        let mut buffer = Buffer::from_vec(vec![1f32; len]);
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..iterations {
            buffer = call(comm.as_ref(), buffer)?;
        }
        comm.barrier()?;
        Ok(start.elapsed())
    })?;
    Ok(times.into_iter().max().unwrap_or_default())
}

fn collectives(c: &mut Criterion) {
    for world_size in [2, 4] {
        let world = World::threads(world_size)
            .expect("a positive world size")
            .with_threads_per_rank(1);
        for (name, call) in OPS {
            let mut group = c.benchmark_group(format!("{name}, {world_size} ranks"));
            for len in [1 << 10, 1 << 18, 1 << 22] {
                group.throughput(Throughput::Bytes(4 * len as u64));
                group.bench_function(BenchmarkId::from_parameter(4 * len), |b| {
                    b.iter_custom(|iterations| {
                        run(&world, call, len, iterations).expect("all ranks call the same")
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, collectives);
criterion_main!(benches);
