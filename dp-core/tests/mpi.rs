//! One rank of several, over MPI. It is a program, not a set of tests: `.ci/mpi.sh` builds it and starts it under mpirun.
//!
//! ```text
//! mpi digests --ranks 3                # prints what must be the same over MPI and on threads
//! mpi contract                         # what a communicator promises
//! mpi fail error|panic|mismatch|early  # rank 1 fails; all ranks must say why
//! mpi fail killed|stopped              # rank 1 sends itself SIGKILL, or SIGSTOP
//! mpi fail late                        # rank 1 does not come to the run at all
//! ```

mod contract;
// They have tests of their own, which need the harness that this program has not.
#[allow(dead_code, unused_imports)]
mod oracle;
mod spoiled;
#[allow(dead_code)]
mod support;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use candle_core::{DType, Tensor};
use candle_nn::Module;
use dp_core::{
    AdamW, Buffer, DistributedDataParallel, Error, ParamStore, Rank, ReduceOp, Result, Trainer,
    World,
};
use half::{bf16, f16};
use oracle::{Sample, everything, mixture};
use sha2::{Digest, Sha256};
use support::{Numbers, expect_error};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        // What `cargo test` starts, without mpirun: nothing to do.
        [] => return ExitCode::SUCCESS,
        ["digests", "--ranks", ranks] => digests(ranks.parse().expect("a number of ranks")),
        ["contract"] => contract(),
        ["fail", how] => fail(how),
        _ => panic!("no such command: {arguments:?}"),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // At once, so that lines of different ranks do not mix.
            let text = format!("{error}\n");
            std::io::stderr()
                .write_all(text.as_bytes())
                .expect("somebody listens");
            ExitCode::FAILURE
        }
    }
}

fn world(ranks: usize) -> Result<World> {
    Ok(World::from_env_or_threads(ranks)?.with_threads_per_rank(1))
}

/// Prints a hash of all results of all ranks: collectives of every type, a mixture of them with delays, a training.
fn digests(ranks: usize) -> Result<()> {
    let world = world(ranks)?;
    // Several runs of one world, one after the other.
    let show = |name: &str, run: &(dyn Fn(&Rank) -> Result<Vec<u64>> + Sync)| -> Result<()> {
        let all = world.map(|rank| {
            let mine = hash(&run(&rank)?);
            rank.comm().all_gather_object::<String>(&mine, "digests")
        })?;
        if world.is_main_process() {
            println!("{name} {}", all[0].join(" "));
        }
        Ok(())
    };
    show("f32", &collectives::<f32>)?;
    show("f64", &collectives::<f64>)?;
    show("f16", &collectives::<f16>)?;
    show("bf16", &collectives::<bf16>)?;
    show("u8", &collectives::<u8>)?;
    show("u32", &collectives::<u32>)?;
    show("i64", &collectives::<i64>)?;
    for delays in 0..3 {
        // Delays change nothing, so these lines are equal, too.
        show("mixture", &|rank| mixture(rank.comm().as_ref(), delays))?;
    }
    show("training", &train)
}

fn hash(words: &[u64]) -> String {
    let mut sha = Sha256::new();
    words.iter().for_each(|w| sha.update(w.to_le_bytes()));
    sha.finalize()
        .iter()
        .take(8)
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// Results and bytes sent of every collective, on lengths of no piece, one and several.
fn collectives<T: Sample>(rank: &Rank) -> Result<Vec<u64>> {
    let lens = [0, 1, 3, rank.world_size() - 1, 1030, 700_003];
    let (mut bits, traffic) = everything::<T>(rank.comm().as_ref(), &lens)?;
    bits.push(traffic.bytes_sent());
    bits.push(traffic.calls());
    Ok(bits)
}

/// Five steps of a small network, in 16 bits, with reductions during backward.
fn train(rank: &Rank) -> Result<Vec<u64>> {
    let store = ParamStore::new(rank.device()).with_seed(3);
    let vb = store.var_builder(DType::BF16);
    let (first, second) = (
        candle_nn::linear(64, 300, vb.pp("first"))?,
        candle_nn::linear(300, 10, vb.pp("second"))?,
    );
    let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-2))?;
    let mut numbers = Numbers::new(rank.rank() as u64);
    for _ in 0..5 {
        let x = numbers.tensor((8, 64)).to_dtype(DType::BF16)?;
        let hidden = matmul(&first, &x)?.relu()?;
        let loss = matmul(&second, &hidden)?.sqr()?.mean_all()?;
        trainer.backward(&loss.to_dtype(DType::F32)?)?;
        trainer.step()?;
    }
    Ok(trainer.store().sha256()?.bytes().map(u64::from).collect())
}

/// Candle has no product of bf16 matrices on the CPU.
fn matmul(layer: &candle_nn::Linear, x: &Tensor) -> Result<Tensor> {
    let weight = layer.weight().to_dtype(DType::F32)?;
    let bias = layer.bias().map(|b| b.to_dtype(DType::F32)).transpose()?;
    let y = candle_nn::Linear::new(weight, bias).forward(&x.to_dtype(DType::F32)?)?;
    Ok(y.to_dtype(DType::BF16)?)
}

/// What a communicator promises beside its results.
fn contract() -> Result<()> {
    let world = world(1)?;
    world.run(|rank| {
        let (comm, r) = (rank.comm(), rank.rank());
        assert_eq!(world.ranks_here(), r..r + 1, "this is to be run over MPI");
        contract::holds(comm.as_ref())?;
        Ok::<_, Error>(())
    })?;
    // One run after the other, the first rank being late in each.
    for round in 0..20 {
        world.run(|rank| {
            if rank.rank() == round % rank.world_size() {
                std::thread::sleep(Duration::from_millis(2));
            }
            let sum = rank
                .comm()
                .all_reduce(Buffer::from_vec(vec![round as i64]), ReduceOp::Sum)?;
            let expected = (round * rank.world_size()) as i64;
            assert_eq!(sum.wait()?.into_vec::<i64>()?, [expected]);
            Ok::<_, Error>(())
        })?;
    }
    let outer = world.map(|rank| Ok::<_, Error>(rank.comm()))?;
    expect_error(outer[0].barrier(), &["has ended"]);
    if world.is_main_process() {
        println!("contract holds");
    }
    Ok(())
}

/// Prints what `World::run` says.
fn fail(how: &str) -> Result<()> {
    let world = world(1)?.with_timeout(spoiled::TIMEOUT);
    let result = spoiled::run(&world, how);
    if result.is_err() {
        // Nothing can be done in this process any more, and it says so.
        expect_error(world.run(|_| Ok::<_, Error>(())), &["has failed"]);
    }
    result
}
