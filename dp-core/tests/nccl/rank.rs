//! One rank of several processes: what a launcher starts.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use dp_core::comm::{Collective, Request};
use dp_core::{Backend, Buffer, Error, ReduceOp, Result, World};

use crate::support::expect_error;
use crate::{DEADLINE, behaviour, contract, results};

/// The deadline of a collective where a rank is to miss it.
const SHORT: Duration = Duration::from_secs(3);

pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => promises(),
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

fn world() -> Result<World> {
    Ok(World::from_env()?
        .with_backend(Backend::Nccl)
        .with_threads_per_rank(1))
}

/// All that threads promise; several runs of one world, one after the other.
fn promises() -> Result<()> {
    let world = world()?.with_timeout(DEADLINE);
    world.run(|rank| results::are_right(&rank))?;
    world.run(|rank| contract::holds(rank.comm().as_ref()))?;
    world.run(|rank| behaviour::objects_and_barriers(&rank))?;
    world.run(|rank| behaviour::in_flight(&rank))?;
    world.run(|rank| behaviour::train(&rank))?;
    let outer = world.map(|rank| Ok::<_, Error>(rank.comm()))?;
    expect_error(outer[0].barrier(), &["has ended"]);
    if world.is_main_process() {
        println!("{} processes: all holds", world.world_size());
    }
    Ok(())
}

/// Ten collectives, of which rank 1 spoils the fifth.
fn fail(how: &str) -> Result<()> {
    let world = world()?.with_timeout(SHORT);
    if how == "late" && world.ranks_here().contains(&1) {
        std::thread::sleep(Duration::from_secs(60));
    }
    world.run(|rank| {
        let comm = rank.comm();
        for i in 0..10 {
            // In flight when rank 1 fails.
            let large = comm.all_reduce(Buffer::from_vec(vec![1f32; 300_000]), ReduceOp::Sum)?;
            let label = match (i, rank.rank(), how) {
                (4, 1, "error") => return Err(Error::invalid("test", "rank 1 gives up")),
                (4, 1, "panic") => panic!("rank 1 has had enough"),
                (4, 1, "early") => return Ok(()),
                (4, 1, "killed") => signal("KILL"),
                (4, 1, "stopped") => signal("STOP"),
                (4, 1, "mismatch") => "other bucket",
                _ => "bucket",
            };
            let buffer = Buffer::from_vec(vec![1f32; 10]);
            let request = Request::new(Collective::AllReduce(ReduceOp::Sum), label);
            comm.start(request, buffer)?.wait()?;
            large.wait()?;
        }
        Ok(())
    })
}

fn signal(name: &str) -> &'static str {
    let pid = std::process::id().to_string();
    let status = std::process::Command::new("kill")
        .args(["-s", name, &pid])
        .status();
    assert!(status.is_ok_and(|s| s.success()), "kill works");
    // The signal may take a moment.
    std::thread::sleep(Duration::from_secs(1));
    "bucket"
}
