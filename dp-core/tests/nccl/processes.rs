//! Ranks that are processes: this program again, as torchrun would start it.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::gpus;
use crate::harness::Test;

pub const TESTS: &[Test] = &[
    ("processes: what threads promise", promises),
    ("processes: one that fails is named by all", failures),
    ("processes: errors of NCCL's own", errors_of_nccl),
];

/// What ranks may take for their results, and to end after one has failed: the deadline of their collectives and of the abort,
/// 3 s and 10 s, and the start.
const LONGEST: Duration = Duration::from_secs(120);
const SOON: Duration = Duration::from_secs(30);

/// How a process has ended; `None` if it was still there at the deadline.
#[derive(Debug)]
struct Ended {
    status: Option<ExitStatus>,
    /// It was still there then.
    after: Duration,
    errors: String,
}

/// Starts `n` ranks with more arguments and variables, and waits for all of them, but for `hopeless`; those that are still there then
/// are killed.
fn ranks(
    n: usize,
    arguments: &[&str],
    more: &[(&str, &str)],
    hopeless: Option<usize>,
    longest: Duration,
) -> Vec<Ended> {
    let program = std::env::current_exe().expect("a test binary knows where it is");
    let port = free_port();
    let begin = Instant::now();
    let start = |rank: usize| {
        Command::new(&program)
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", n.to_string())
            .env("LOCAL_WORLD_SIZE", n.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .envs(more.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the test binary can be run again")
    };
    let mut children: Vec<(usize, Child)> = (0..n).map(|rank| (rank, start(rank))).collect();
    // Whoever is not waited for comes last.
    children.sort_by_key(|(rank, _)| Some(*rank) == hopeless);
    let finish = |(rank, child): (usize, Child)| match Some(rank) == hopeless {
        true => (rank, finish(child, begin, Duration::ZERO)),
        false => (rank, finish(child, begin, longest)),
    };
    let mut ended: Vec<(usize, Ended)> = children.into_iter().map(finish).collect();
    ended.sort_by_key(|(rank, _)| *rank);
    ended.into_iter().map(|(_, ended)| ended).collect()
}

fn finish(mut child: Child, begin: Instant, longest: Duration) -> Ended {
    let look = |child: &mut Child| child.try_wait().expect("a child of this process");
    let mut after = Duration::ZERO;
    let mut status = look(&mut child);
    while status.is_none() && after < longest {
        std::thread::sleep(Duration::from_millis(20));
        after = begin.elapsed();
        status = look(&mut child);
    }
    // One that is stopped is there for ever.
    let _ = child.kill();
    let _ = child.wait();
    let mut errors = String::new();
    let mut pipe = child.stderr.take().expect("a pipe");
    // What is not UTF-8 is no message of ours.
    let _ = pipe.read_to_string(&mut errors);
    Ended {
        status,
        after,
        errors,
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn promises() {
    for n in 2..=gpus() {
        for (rank, ended) in ranks(n, &[], &[], None, LONGEST).into_iter().enumerate() {
            let success = ended.status.is_some_and(|status| status.success());
            assert!(success, "rank {rank} of {n}: {ended:?}");
        }
    }
}

/// All ranks but rank 1 end soon, with an error that has all of `texts`.
#[track_caller]
fn all_say(how: &str, more: &[(&str, &str)], texts: &[&str]) -> Vec<Ended> {
    let n = gpus();
    let hopeless = ["stopped", "late"].contains(&how).then_some(1);
    let ended = ranks(n, &["fail", how], more, hopeless, SOON);
    for (rank, ended) in ended.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let code = ended.status.and_then(|status| status.code());
        assert_eq!(code, Some(1), "{how}: rank {rank} of {n}: {ended:?}");
        let said = texts.iter().all(|text| ended.errors.contains(text));
        assert!(
            said,
            "{how}: rank {rank} of {n} does not say {texts:?}: {ended:?}"
        );
    }
    ended
}

fn failures() {
    if gpus() == 1 {
        println!("skipped: there is one GPU");
        return;
    }
    let code = |ended: &[Ended]| ended[1].status.and_then(|status| status.code());
    let ended = all_say(
        "error",
        &[],
        &["rank 1 failed: invalid test: rank 1 gives up"],
    );
    assert_eq!(code(&ended), Some(1));
    let ended = all_say("panic", &[], &["rank 1 panicked: rank 1 has had enough"]);
    assert_eq!(code(&ended), Some(1));
    all_say("mismatch", &[], &["differs between ranks"]);
    all_say("early", &[], &["rank 1 finished after 9 collectives"]);
    let ended = all_say("killed", &[], &["rank 1 failed", "its process is gone"]);
    assert_eq!(ended[1].status.and_then(|s| s.signal()), Some(9));
    all_say("stopped", &[], &["not there: rank 1"]);
    all_say("late", &[], &["not there: rank 1"]);
}

/// The CUDA simulator makes them.
fn errors_of_nccl() {
    if gpus() == 1 || std::env::var_os("CUDA_SIMULATOR_DEVICES").is_none() {
        println!("skipped: only the CUDA simulator has them, with several devices");
        return;
    }
    let fail = "CUDA_SIMULATOR_NCCL_FAIL";
    let broken = ["remote process exited or there was a network error"];
    all_say("none", &[(fail, "1:5")], &broken);
    all_say("none", &[(fail, "1:init")], &broken);
    // An abort that never ends: the process gives it up after 10 s, and ends.
    let ended = all_say("error", &[(fail, "1:abort")], &["rank 1 gives up"]);
    let code = ended[1].status.and_then(|status| status.code());
    assert_eq!(code, Some(1), "{ended:?}");
    assert!(ended[1].after > Duration::from_secs(10), "{ended:?}");
}
