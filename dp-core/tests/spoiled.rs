//! A run of several processes that rank 1 spoils, for tests of what the others say.

use std::time::Duration;

use dp_core::comm::{Collective, Request};
use dp_core::{Buffer, Error, ReduceOp, Result, World};

/// The deadline of a collective where a rank is to miss it.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// Ten collectives, of which rank 1 spoils the fifth; how: `error`, `panic`, `early`, `killed`, `stopped`, `mismatch`, or `late`,
/// when it does not come to the run at all.
pub fn run(world: &World, how: &str) -> Result<()> {
    if how == "late" && world.ranks_here().contains(&1) {
        std::thread::sleep(Duration::from_secs(60));
    }
    world.run(|rank| {
        let comm = rank.comm();
        for i in 0..10 {
            // In flight when rank 1 fails.
            let large = comm.all_reduce(Buffer::from_vec(vec![1f32; 300_000]), ReduceOp::Sum)?;
            let mut label = "bucket";
            match (i, rank.rank(), how) {
                (4, 1, "error") => return Err(Error::invalid("test", "rank 1 gives up")),
                (4, 1, "panic") => panic!("rank 1 has had enough"),
                (4, 1, "early") => return Ok(()),
                (4, 1, "killed") => send_itself("KILL"),
                (4, 1, "stopped") => send_itself("STOP"),
                (4, 1, "mismatch") => label = "other bucket",
                _ => {}
            }
            let buffer = Buffer::from_vec(vec![1f32; 10]);
            let request = Request::new(Collective::AllReduce(ReduceOp::Sum), label);
            comm.start(request, buffer)?.wait()?;
            large.wait()?;
        }
        Ok(())
    })
}

fn send_itself(signal: &str) {
    let pid = std::process::id().to_string();
    let status = std::process::Command::new("kill")
        .args(["-s", signal, &pid])
        .status();
    assert!(status.is_ok_and(|s| s.success()), "kill works");
    // The signal may take a moment.
    std::thread::sleep(Duration::from_secs(1));
}
