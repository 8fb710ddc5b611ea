//! all_reduce between the GPUs, with the columns of nccl-tests' all_reduce_perf. Ranks are threads.

use std::time::Instant;

use anyhow::ensure;
use candle_core::DType;
use dp_core::{Backend, Buffer, ParamStore, Rank, ReduceOp, World};
use dp_examples::table::{add_row, new_table};

const SIZES: [usize; 5] = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];
const CALLS: usize = 20;

/// Seconds per call, and the number of wrong elements of a first one.
type Times = Vec<(f64, usize)>;

/// Prints the table, and returns what it says of the largest size.
pub fn measure(num_gpus: usize) -> anyhow::Result<String> {
    let world = World::threads(num_gpus)?.with_backend(Backend::Nccl);
    let times = world.map(|rank| measure_rank(&rank))?;
    // Ranks measure the same calls, to the skew of a barrier.
    let times = &times[0];
    let busbw = print(times, num_gpus);
    let wrong: usize = times.iter().map(|(_, wrong)| wrong).sum();
    ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(format!("busbw {busbw:.1} GB/s at 256 MiB"))
}

fn measure_rank(rank: &Rank) -> anyhow::Result<Times> {
    let (comm, n) = (rank.comm(), rank.world_size());
    let mut times = Vec::new();
    for bytes in SIZES {
        let len = bytes / 4;
        let store = ParamStore::new(rank.device());
        let vb = store.var_builder(DType::F32);
        vb.get_with_hints(len, "ones", candle_nn::Init::Const(1.0))?;
        let mut buffer = Buffer::zeros_on(DType::F32, len, rank.device())?;
        let ones = store.get("ones").expect("was made");
        ones.copy_to(0..len, &mut buffer, 0)?;
        // The first one makes NCCL connect, and is looked at. What the others compute does not matter to their time.
        buffer = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
        let sums = buffer.to_vec::<f32>()?;
        let wrong = sums.iter().filter(|v| **v != n as f32).count();
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            buffer = comm.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
        }
        times.push((start.elapsed().as_secs_f64() / CALLS as f64, wrong));
    }
    Ok(times)
}

fn print(times: &Times, n: usize) -> f64 {
    let mut table = new_table(&[
        "size (B)",
        "count",
        "type",
        "redop",
        "time (us)",
        "algbw (GB/s)",
        "busbw (GB/s)",
        "#wrong",
    ]);
    let mut last = 0.0;
    for (bytes, (time, wrong)) in SIZES.into_iter().zip(times) {
        let algbw = bytes as f64 / time / 1e9;
        last = algbw * 2.0 * (n - 1) as f64 / n as f64;
        let cells = [
            bytes.to_string(),
            (bytes / 4).to_string(),
            "float".to_string(),
            "sum".to_string(),
            format!("{:.1}", time * 1e6),
            format!("{algbw:.2}"),
            format!("{last:.2}"),
            wrong.to_string(),
        ];
        add_row(&mut table, cells);
    }
    println!("{table}");
    last
}
