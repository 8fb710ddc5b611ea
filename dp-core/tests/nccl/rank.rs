//! One rank of several processes: what a launcher starts.

use std::io::Write;
use std::process::ExitCode;

use dp_core::{Backend, Error, Result, World};

use crate::support::expect_error;
use crate::{DEADLINE, behaviour, contract, results, spoiled};

pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => promises(),
        ["fail", how] => {
            world().and_then(|world| spoiled::run(&world.with_timeout(spoiled::TIMEOUT), how))
        }
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
