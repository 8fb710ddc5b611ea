//! Ranks as threads, with and without TCP, and as processes, one of which is killed.

mod meeting;
mod processes;
mod runs;

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use super::{Control, Hello, Place};
use crate::error::{Error, Result};

/// For what is to succeed, or to fail by itself.
const LONG: Duration = Duration::from_secs(30);
/// For what is to fail by its deadline.
const SHORT: Duration = Duration::from_millis(1500);

/// A place with a port that was free a moment ago.
fn place() -> Place {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    Place {
        host: "127.0.0.1".to_string(),
        port,
        job: "job=1".to_string(),
    }
}

fn hello(place: &Place, rank: usize, world_size: usize) -> Hello {
    Hello::new(&place.job, rank, world_size)
}

fn meet(place: &Place, hello: &Hello, timeout: Duration) -> Result<Control> {
    let (control, payload) = Control::meet(place, hello, timeout, || Ok(vec![7; 128]))?;
    assert_eq!(payload, [7; 128]);
    Ok(control)
}

/// Runs `f` on `n` ranks that have met over TCP; their results, in rank order.
fn over_tcp<T: Send>(
    n: usize,
    timeout: Duration,
    f: impl Fn(Control) -> T + Send + Sync,
) -> Vec<T> {
    let place = place();
    let (place, f) = (&place, &f);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..n)
            .map(|rank| {
                scope.spawn(move || {
                    f(meet(place, &hello(place, rank, n), timeout).expect("all are there"))
                })
            })
            .collect();
        let results = ranks.into_iter().map(|r| r.join().expect("no panic"));
        results.collect()
    })
}

/// The same within one process, without TCP.
fn in_process<T: Send>(
    n: usize,
    timeout: Duration,
    f: impl Fn(Control) -> T + Send + Sync,
) -> Vec<T> {
    let f = &f;
    std::thread::scope(|scope| {
        let controls = Control::in_process(n, timeout).into_iter();
        let ranks: Vec<_> = controls.map(|c| scope.spawn(move || f(c))).collect();
        let results = ranks.into_iter().map(|r| r.join().expect("no panic"));
        results.collect()
    })
}

/// Joins one collective and waits for the others.
fn join(control: &Control, operation: &str) -> Result<()> {
    let seq = control.join(operation)?;
    control.wait(seq, operation)
}

#[track_caller]
fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

/// Fails if it has taken half of the long deadline: then something has waited for it.
#[track_caller]
fn at_once(start: Instant) {
    assert!(start.elapsed() < LONG / 2, "it took {:?}", start.elapsed());
}
