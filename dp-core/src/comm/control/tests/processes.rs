//! Ranks as processes: this test program, started again for each rank.
//!
//! The same test, [`one_rank`], is what torchrun starts in `.ci/torchrun.sh`.

use std::process::{Child, Command, Output, Stdio};

use super::*;
use crate::launcher::Launched;

/// Says what rank 1 does.
const HOW: &str = "DP_TEST_RANK_1";

/// One rank, as the environment says: joins collectives until something ends them, and prints what.
#[test]
#[ignore = "one rank of several processes; others start it"]
fn one_rank() {
    let launched = Launched::detect()
        .expect("a complete set")
        .expect("several processes");
    let place = Place::from_variables(|name| std::env::var(name).ok()).expect("a place");
    let timeout = Duration::from_secs(20);
    let (rank, n) = (launched.rank, launched.world_size);
    let control = match meet(&place, &hello(&place, rank, n), timeout) {
        Ok(control) => control,
        Err(e) => return println!("[rank {rank}] {e}"),
    };
    println!("[rank {rank}] of {n} met at {place}");
    let how = std::env::var(HOW).unwrap_or_default();
    let num = if how.is_empty() { 3 } else { 1_000_000 };
    for i in 0..num {
        if let Err(e) = join(&control, &format!("collective {i}")) {
            return println!("[rank {rank}] {e}");
        }
        match how.as_str() {
            "abort" if rank == 1 && i == 20 => std::process::abort(),
            "exit" if rank == 1 && i == 20 => std::process::exit(0),
            "" => {}
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    control.end(None).expect("all end");
    println!("[rank {rank}] done");
}

fn start(place: &Place, rank: usize, n: usize, how: &str) -> Child {
    let program = std::env::current_exe().expect("it runs");
    let name = "comm::control::tests::processes::one_rank";
    let values = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", n.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("MASTER_ADDR", place.host.clone()),
        ("MASTER_PORT", place.port.to_string()),
        (HOW, how.to_string()),
    ];
    Command::new(program)
        .args(["--exact", name, "--ignored", "--nocapture"])
        .envs(values)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

fn start_all(n: usize, how: &str) -> Vec<Child> {
    let place = place();
    (0..n).map(|rank| start(&place, rank, n, how)).collect()
}

fn text(child: Child) -> String {
    let Output { stdout, .. } = child.wait_with_output().expect("it was started");
    String::from_utf8_lossy(&stdout).into_owned()
}

#[test]
fn processes_meet_agree_and_end() {
    for (rank, child) in start_all(3, "").into_iter().enumerate() {
        let text = text(child);
        assert!(
            text.contains(&format!("[rank {rank}] of 3 met at 127.0.0.1:")),
            "{text}"
        );
        assert!(text.contains(&format!("[rank {rank}] done")), "{text}");
    }
}

#[test]
fn a_process_that_ends_without_a_word_is_named_to_all() {
    for how in ["abort", "exit"] {
        let begin = Instant::now();
        for (rank, child) in start_all(3, how).into_iter().enumerate() {
            let text = text(child);
            let named = text.contains("rank 1 failed") && text.contains("its process is gone");
            assert!(rank == 1 || named, "{how}, rank {rank}: {text}");
        }
        at_once(begin);
    }
}

#[test]
fn a_process_that_is_killed_is_named_to_all() {
    for victim in [0, 2] {
        let mut children = start_all(3, "goes on");
        std::thread::sleep(Duration::from_millis(1500));
        let begin = Instant::now();
        // SIGKILL.
        children[victim].kill().expect("it runs");
        for (rank, child) in children.into_iter().enumerate() {
            let text = text(child);
            let named = text.contains(&format!("rank {victim} failed"));
            assert!(rank == victim || named, "rank {rank}: {text}");
            assert!(text.contains("met at"), "it was killed too early: {text}");
        }
        at_once(begin);
    }
}
