//! Who comes to the meeting, and who does not belong there.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use super::*;
use crate::comm::control::frame;

/// Lets rank 0 of `n` wait for the others at `place`, while `others` goes on; what rank 0 gets.
fn rank_0_waits<T>(
    place: &Place,
    n: usize,
    timeout: Duration,
    others: impl FnOnce() -> T,
) -> (Result<Control>, T) {
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| meet(place, &hello(place, 0, n), timeout));
        let result = others();
        (rank_0.join().expect("no panic"), result)
    })
}

#[test]
fn all_ranks_get_what_rank_0_has_for_them() {
    for n in 1..=4 {
        // `meet` compares the payload.
        let ranks = over_tcp(n, LONG, |control| (control.rank(), control.world_size()));
        assert_eq!(ranks, (0..n).map(|r| (r, n)).collect::<Vec<_>>());
    }
}

#[test]
fn a_rank_that_never_comes_is_named_to_all() {
    let place = place();
    let (rank_0, rank_2) = rank_0_waits(&place, 4, SHORT, || {
        meet(&place, &hello(&place, 2, 4), SHORT).expect_err("two are missing")
    });
    for error in [rank_0.expect_err("two are missing"), rank_2] {
        says(
            &error,
            &[&place.to_string(), "waited 1.", "not there: rank 1, 3"],
        );
    }
}

#[test]
fn rank_0_that_never_comes_is_named_with_host_and_port() {
    let place = place();
    let error = meet(&place, &hello(&place, 1, 2), SHORT).expect_err("nobody listens");
    says(
        &error,
        &[
            "rank 1",
            &place.to_string(),
            "rank 0 has not answered",
            "efused",
        ],
    );
    let nowhere = Place {
        host: "no-such-host.invalid".to_string(),
        ..place
    };
    let error = meet(&nowhere, &hello(&nowhere, 1, 2), SHORT).expect_err("no such host");
    says(&error, &["no-such-host.invalid:", "host name is unknown"]);
}

#[test]
fn world_sizes_that_differ_and_a_rank_twice_fail_everywhere_at_once() {
    let cases: [(&[(usize, usize)], &str); 5] = [
        (&[(1, 4)], "counts 4 ranks, rank 0 counts 3"),
        (&[(1, 3), (1, 3)], "rank 1 has come twice"),
        (&[(0, 3)], "port is in use"),
        (&[(5, 6)], "counts 6 ranks, rank 0 counts 3"),
        (
            &[(7, 3)],
            "claims to be rank 7, but ranks are below WORLD_SIZE=3",
        ),
    ];
    for (others, text) in cases {
        let (place, start) = (place(), Instant::now());
        let (rank_0, errors) = rank_0_waits(&place, 3, LONG, || {
            // The last one is the one that is wrong.
            std::thread::sleep(Duration::from_millis(200));
            std::thread::scope(|scope| {
                let ranks: Vec<_> = others
                    .iter()
                    .map(|(rank, n)| {
                        let place = &place;
                        let rank = scope.spawn(move || meet(place, &hello(place, *rank, *n), LONG));
                        std::thread::sleep(Duration::from_millis(200));
                        rank
                    })
                    .collect();
                let errors: Vec<Error> = if others[0].0 == 0 {
                    let second = ranks.into_iter().map(|r| r.join().expect("no panic"));
                    let errors = second.map(|r| r.expect_err("the port is in use")).collect();
                    // So that the first one need not wait.
                    let _ = meet(&place, &hello(&place, 1, 9), LONG);
                    errors
                } else {
                    let all = ranks.into_iter().map(|r| r.join().expect("no panic"));
                    all.map(|r| r.expect_err("they cannot meet")).collect()
                };
                errors
            })
        });
        rank_0.expect_err("they cannot meet");
        errors.iter().for_each(|e| says(e, &[text]));
        at_once(start);
    }
}

#[test]
fn two_ranks_on_one_gpu_are_named_before_anything_else_happens() {
    let (place, start) = (place(), Instant::now());
    let with_gpu = |rank| Hello {
        device: Some(format!("GPU-{}", rank / 2)),
        ..hello(&place, rank, 4)
    };
    let errors = std::thread::scope(|scope| {
        let meetings: Vec<_> = (0..4)
            .map(|rank| {
                let (place, hello) = (&place, with_gpu(rank));
                scope.spawn(move || meet(place, &hello, LONG).expect_err("two on one GPU"))
            })
            .collect();
        meetings
            .into_iter()
            .map(|m| m.join().expect("no panic").to_string())
            .collect::<Vec<_>>()
    });
    for error in errors {
        assert!(error.contains("both have GPU-"), "{error}");
    }
    at_once(start);
}

#[test]
fn another_job_on_the_port_is_sent_away_and_the_first_one_goes_on() {
    let place = place();
    let other = Place {
        job: "job=2".to_string(),
        ..place.clone()
    };
    let (rank_0, rank_1) = rank_0_waits(&place, 2, LONG, || {
        let stranger = meet(&other, &hello(&other, 1, 2), LONG).expect_err("another job");
        says(
            &stranger,
            &["of job job=2", "rank 0 here is of job job=1", "MASTER_PORT"],
        );
        meet(&place, &hello(&place, 1, 2), LONG)
    });
    rank_0.expect("rank 1 has come");
    rank_1.expect("rank 0 has come");

    // Rank 0 of the second job finds the port in use.
    let listener = TcpListener::bind((place.host.as_str(), place.port)).expect("free again");
    let error = meet(&other, &hello(&other, 0, 2), LONG).expect_err("in use");
    says(
        &error,
        &["rank 0", &place.to_string(), "the port is in use"],
    );
    drop(listener);
}

#[test]
fn garbage_silence_and_half_a_message_do_not_disturb_the_meeting() {
    let place = place();
    let address = (place.host.as_str(), place.port);
    let (rank_0, rank_1) = rank_0_waits(&place, 2, LONG, || {
        let mut crowd = Vec::new();
        let connect = || loop {
            // Rank 0 may not listen yet.
            match TcpStream::connect(address) {
                Ok(stream) => return stream,
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        for text in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"",
            b"dpc1\xff\xff\xff\xff",
            b"dpc1\x02\0\0\0{}",
            b"dp",
        ] {
            let mut stream = connect();
            stream.write_all(text).expect("somebody listens");
            crowd.push(stream);
        }
        // One that goes at once.
        drop(connect());
        let rank_1 = meet(&place, &hello(&place, 1, 2), LONG);
        // Who speaks nonsense was sent away: its connection is over.
        for stream in [&crowd[0], &crowd[2], &crowd[3]] {
            stream.set_read_timeout(Some(LONG)).expect("a deadline");
            let mut stream = stream;
            let end = stream.read(&mut [0]);
            assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
        }
        rank_1
    });
    rank_0.expect("rank 1 has come");
    rank_1.expect("rank 0 has come");
}

#[test]
fn strangers_that_rank_0_has_sent_away_are_in_its_error() {
    let place = place();
    let (rank_0, ()) = rank_0_waits(&place, 2, SHORT, || {
        std::thread::sleep(Duration::from_millis(300));
        let mut stream = TcpStream::connect((place.host.as_str(), place.port)).expect("it listens");
        stream.write_all(b"hello, world").expect("it listens");
    });
    let error = rank_0.expect_err("nobody has come");
    says(
        &error,
        &["not there: rank 1", "sent away: 127.0.0.1:", "begins with"],
    );
}

#[test]
fn a_foreign_listener_is_told_from_rank_0() {
    let place = place();
    let listener = TcpListener::bind((place.host.as_str(), place.port)).expect("a free port");
    // One that answers in its own way, one that says nothing, one that hangs up.
    let answers: [(Option<&[u8]>, &[&str]); 3] = [
        (
            Some(b"SSH-2.0-OpenSSH_9.6\r\n"),
            &["something else", "SSH-", "MASTER_PORT"],
        ),
        (Some(b""), &["has not answered", "says nothing"]),
        (None, &["has not answered", "without an answer"]),
    ];
    for (answer, parts) in answers {
        let error = std::thread::scope(|scope| {
            let rank_1 = scope
                .spawn(|| meet(&place, &hello(&place, 1, 2), SHORT).expect_err("it is not rank 0"));
            let mut streams = Vec::new();
            listener.set_nonblocking(true).expect("it can");
            while !rank_1.is_finished() {
                match (listener.accept(), answer) {
                    (Ok((mut stream, _)), Some(text)) => {
                        // It may have gone.
                        let _ = stream.write_all(text);
                        streams.push(stream);
                    }
                    (Ok((stream, _)), None) => {
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                    (Err(_), _) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
            rank_1.join().expect("no panic")
        });
        says(&error, &["rank 1", &place.to_string()]);
        says(&error, parts);
    }
}

#[test]
fn a_rank_that_comes_and_goes_is_named() {
    let (place, start) = (place(), Instant::now());
    let (rank_0, ()) = rank_0_waits(&place, 3, LONG, || {
        std::thread::sleep(Duration::from_millis(300));
        let stream = TcpStream::connect((place.host.as_str(), place.port)).expect("it listens");
        frame::send(&stream, &hello(&place, 2, 3)).expect("it listens");
        std::thread::sleep(Duration::from_millis(300));
    });
    let error = rank_0.expect_err("rank 2 has gone");
    says(
        &error,
        &["rank 2 at 127.0.0.1:", "gone before all ranks had"],
    );
    at_once(start);
}

#[test]
fn runs_come_one_after_the_other_at_one_port_and_are_counted() {
    let place = place();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let place = &place;
            scope.spawn(move || {
                for run in 0..5 {
                    let hello = Hello {
                        run,
                        ..hello(place, rank, 3)
                    };
                    let control = meet(place, &hello, LONG).expect("all come to each run");
                    join(&control, "barrier").expect("all are there");
                    control.end(None).expect("all end");
                }
            });
        }
    });
    let (rank_0, error) = rank_0_waits(&place, 2, LONG, || {
        let second = Hello {
            run: 1,
            ..hello(&place, 1, 2)
        };
        meet(&place, &second, LONG).expect_err("another run")
    });
    rank_0.expect_err("another run");
    says(&error, &["in run 2", "rank 0 in run 1", "equally often"]);
}

#[test]
fn the_place_comes_from_the_environment() {
    let read = |variables: &[(&'static str, &str)]| {
        Place::from_variables(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_string())
        })
    };
    let both = [("MASTER_ADDR", "node-1"), ("MASTER_PORT", "29500")];
    let place = |port, job: &str| Place {
        host: "node-1".to_string(),
        port,
        job: job.to_string(),
    };
    assert_eq!(read(&both).expect("complete"), place(29500, ""));

    // torchrun's agent listens at the port itself.
    let agent = [
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "7"),
    ];
    let found = read(&[&both[..], &agent].concat()).expect("complete");
    assert_eq!(found, place(29501, "TORCHELASTIC_RUN_ID=7"));
    let named = [("SLURM_JOB_ID", "12"), ("DP_JOB_ID", "mine")];
    let found = read(&[&both[..], &named].concat()).expect("complete");
    assert_eq!(found, place(29500, "DP_JOB_ID=mine"));

    let refused = |variables: &[(&'static str, &str)], parts: &[&str]| {
        says(&read(variables).expect_err("must be refused"), parts);
    };
    refused(&both[1..], &["MASTER_ADDR=:", "not set"]);
    refused(&both[..1], &["MASTER_PORT=:", "not set"]);
    refused(
        &[both[0], ("MASTER_PORT", "70000")],
        &["MASTER_PORT=70000", "no port"],
    );
    refused(
        &[both[0], ("MASTER_PORT", "0")],
        &["MASTER_PORT=0", "no port"],
    );
    refused(
        &[both[0], ("MASTER_PORT", "65535"), agent[0]],
        &["MASTER_PORT=65535", "next one"],
    );
}
