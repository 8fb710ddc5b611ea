//! `dp-launch` as a user runs it, with shell scripts as ranks: what it prints and returns, and that nothing is left running.
#![cfg(target_os = "linux")]

use std::error::Error;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const DP_LAUNCH: &str = env!("CARGO_BIN_EXE_dp-launch");
/// Long enough for a machine that is busy with other things; what is waited for usually takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn launch(ranks: &str, script: &str) -> Command {
    launch_with(&["-n", ranks], script)
}

fn launch_with(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(DP_LAUNCH);
    command.args(options).args(["--", "sh", "-c", script]);
    command.stdin(Stdio::null());
    command
}

fn text(output: &Output) -> (String, String) {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|t| String::from_utf8_lossy(t).into_owned());
    (out, err)
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// A launcher that is killed, with all that it has started, if the test fails first.
struct Running {
    child: Child,
}

impl Running {
    fn start(mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self {
            child: command.spawn()?,
        })
    }

    fn signal(&self, signal: &str) -> Result {
        send(signal, self.child.id())
    }

    /// The supervisor.
    fn supervisor(&self) -> Result<u32> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        Ok(children
            .split_whitespace()
            .next()
            .ok_or("a supervisor")?
            .parse()?)
    }

    fn end(mut self) -> Result<Output> {
        wait_until("the launcher has ended", || {
            Ok(self.child.try_wait()?.is_some())
        })?;
        let child = std::mem::replace(&mut self.child, Command::new("true").spawn()?);
        Ok(child.wait_with_output()?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(signal: &str, pid: u32) -> Result {
    let status = Command::new("kill")
        .args(["-s", signal, "--", &pid.to_string()])
        .status()?;
    assert!(status.success(), "kill -s {signal} {pid}");
    Ok(())
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result {
    let start = Instant::now();
    while !holds()? {
        assert!(
            start.elapsed() < DEADLINE,
            "not within {DEADLINE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Where the processes of a test write their ids, a file each.
struct Pids {
    dir: tempfile::TempDir,
}

impl Pids {
    fn new() -> Result<Self> {
        Ok(Self {
            dir: tempfile::tempdir()?,
        })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Shell: writes the id of the shell's last background process, or its own, to a file of that name.
    fn note(&self, pid: &str, name: &str) -> String {
        // A rename, so that no half of a number is ever read.
        let path = self.path().display();
        format!("echo {pid} >{path}/{name}.new && mv {path}/{name}.new {path}/{name}")
    }

    /// Waits for `count` of them.
    fn wait(&self, count: usize) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        wait_until(&format!("{count} processes run"), || {
            pids.clear();
            for entry in fs::read_dir(self.path())? {
                let path: PathBuf = entry?.path();
                if path.extension().is_none() {
                    pids.push(fs::read_to_string(path)?.trim().parse()?);
                }
            }
            Ok(pids.len() == count)
        })?;
        Ok(pids)
    }
}

/// Not there, or a zombie that its new parent will reap.
fn is_gone(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat
            .rsplit_once(')')
            .is_some_and(|(_, rest)| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    }
}

/// For what must have been ended before the launcher was.
#[track_caller]
fn assert_gone(pids: &[u32]) {
    for pid in pids {
        assert!(is_gone(*pid), "process {pid} is still there");
    }
}

#[test]
fn ranks_have_torchruns_variables_and_their_lines_a_prefix() -> Result {
    let script = "echo \"$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR, ${PMI_RANK-none}\"; \
                  echo \"port $MASTER_PORT\"; echo \"error $RANK\" >&2; cat";
    let mut command = launch("3", script);
    command.env("RANK", "7").env("PMI_RANK", "7");
    let output = command.output()?;
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let (ports, others): (Vec<&str>, Vec<&str>) = sorted(&out)
        .into_iter()
        .partition(|line| line.contains("port"));
    assert_eq!(
        others,
        [0, 1, 2].map(|r| format!("[rank {r}] {r} of 3, {r} of 3, 127.0.0.1, none"))
    );
    let port = ports[0].strip_prefix("[rank 0] port ").ok_or("a port")?;
    assert!(port.parse::<u16>()? > 0);
    assert_eq!(ports, [0, 1, 2].map(|r| format!("[rank {r}] port {port}")));
    assert_eq!(
        sorted(&err),
        [0, 1, 2].map(|r| format!("[rank {r}] error {r}"))
    );
    Ok(())
}

#[test]
fn launchers_at_the_same_time_have_different_ports() -> Result {
    let pids = Pids::new()?;
    let script = format!("{}; sleep 600", pids.note("$$", "$MASTER_PORT"));
    let launchers: Vec<Running> = (0..8)
        .map(|_| Running::start(launch("1", &script)))
        .collect::<Result<_>>()?;
    // The file's name is the port.
    pids.wait(8)?;
    for launcher in launchers {
        launcher.signal("TERM")?;
        assert_eq!(launcher.end()?.status.code(), Some(128 + 15));
    }
    Ok(())
}

#[test]
fn the_first_failure_ends_all_and_gives_the_exit_code() -> Result {
    let pids = Pids::new()?;
    let script = format!(
        "sleep 600 & {}; {}; while [ \"$(ls {} | grep -vc new)\" -lt 6 ]; do sleep 0.01; done; \
         [ $RANK = 1 ] && {{ echo 'the last words' >&2; exit 7; }}; wait",
        pids.note("$!", "background-$RANK"),
        pids.note("$$", "rank-$RANK"),
        pids.path().display(),
    );
    let launcher = Running::start(launch("3", &script))?;
    let all = pids.wait(6)?;
    let output = launcher.end()?;
    let (_, err) = text(&output);
    assert_eq!(output.status.code(), Some(7), "{err}");
    assert!(err.contains("[rank 1] the last words\n"), "{err}");
    assert!(
        err.contains("dp-launch: rank 1 failed: exit code 7; ending all others\n"),
        "{err}"
    );
    assert!(
        err.contains("dp-launch: rank 1 failed first, after "),
        "{err}"
    );
    assert!(
        err.contains("its last lines on stderr:\n  | the last words\n"),
        "{err}"
    );
    // Those that were ended did not fail.
    assert!(!err.contains("then:"), "{err}");
    assert_gone(&all);
    Ok(())
}

#[test]
fn a_rank_that_is_killed_is_named_with_the_signal() -> Result {
    let output = launch("2", "[ $RANK = 1 ] && kill -9 $$; sleep 600").output()?;
    let (_, err) = text(&output);
    assert_eq!(output.status.code(), Some(128 + 9), "{err}");
    assert!(err.contains("rank 1 failed first, after "), "{err}");
    assert!(
        err.contains("signal 9 (SIGKILL)\n  it has written nothing to stderr"),
        "{err}"
    );
    Ok(())
}

/// Two ranks, each with a child in its group and one in a session of its own; none ends by SIGTERM if `stubborn`.
fn family(pids: &Pids, stubborn: bool) -> String {
    let trap = if stubborn { "trap '' TERM;" } else { "" };
    format!(
        "{trap} sleep 600 & {}; setsid sleep 600 & {}; {}; wait; sleep 600",
        pids.note("$!", "child-$RANK"),
        pids.note("$!", "daemon-$RANK"),
        pids.note("$$", "rank-$RANK"),
    )
}

#[test]
fn signals_to_the_launcher_end_everything() -> Result {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1), ("QUIT", 3)] {
        let pids = Pids::new()?;
        let launcher = Running::start(launch("2", &family(&pids, false)))?;
        let all = pids.wait(6)?;
        launcher.signal(signal)?;
        let output = launcher.end()?;
        let (_, err) = text(&output);
        assert_eq!(output.status.code(), Some(128 + number), "{err}");
        assert!(
            err.contains(&format!("dp-launch: SIG{signal}; ending all ranks")),
            "{err}"
        );
        assert!(!err.contains("SIGKILL"), "{err}");
        assert_gone(&all);
    }
    Ok(())
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_after_the_grace_period_or_a_second_signal() -> Result {
    for (grace, signals) in [("0.2", 1), ("600", 2)] {
        let pids = Pids::new()?;
        let command = launch_with(&["-n", "2", "--grace", grace], &family(&pids, true));
        let launcher = Running::start(command)?;
        let all = pids.wait(6)?;
        for _ in 0..signals {
            launcher.signal("INT")?;
            // Two at once would be one.
            std::thread::sleep(Duration::from_millis(300));
        }
        let output = launcher.end()?;
        let (_, err) = text(&output);
        assert_eq!(output.status.code(), Some(128 + 2), "{err}");
        assert!(
            err.contains("dp-launch: SIGKILL for rank 0, rank 1"),
            "{err}"
        );
        assert_gone(&all);
    }
    Ok(())
}

#[test]
fn sigkill_of_the_launcher_leaves_nothing() -> Result {
    for stubborn in [false, true] {
        let pids = Pids::new()?;
        let options = ["-n", "2", "--grace", "0.2"];
        let mut command = launch_with(&options, &family(&pids, stubborn));
        // As `timeout -s KILL` does it: to the launcher's whole group.
        command.process_group(0);
        let launcher = Running::start(command)?;
        let mut all = pids.wait(6)?;
        all.push(launcher.supervisor()?);
        let status = Command::new("kill")
            .args(["-s", "KILL", "--", &format!("-{}", launcher.child.id())])
            .status()?;
        assert!(status.success());
        let output = launcher.end()?;
        assert_eq!(output.status.signal(), Some(9));
        wait_until("all processes are gone", || {
            Ok(all.iter().all(|pid| is_gone(*pid)))
        })?;
    }
    Ok(())
}

#[test]
fn sigkill_of_the_supervisor_leaves_nothing() -> Result {
    let pids = Pids::new()?;
    let launcher = Running::start(launch("2", &family(&pids, true)))?;
    let all = pids.wait(6)?;
    send("KILL", launcher.supervisor()?)?;
    let output = launcher.end()?;
    let (_, err) = text(&output);
    assert_eq!(output.status.code(), Some(128 + 9), "{err}");
    assert!(
        err.contains("its supervising process was ended by SIGKILL"),
        "{err}"
    );
    assert_gone(&all);
    Ok(())
}

#[test]
fn what_ranks_leave_running_is_ended_and_does_not_hold_up_the_end() -> Result {
    let pids = Pids::new()?;
    // They hold the rank's stdout and stderr.
    let script = format!(
        "sleep 600 & {}; setsid sleep 600 & {}; echo done",
        pids.note("$!", "child-$RANK"),
        pids.note("$!", "daemon-$RANK"),
    );
    let launcher = Running::start(launch("2", &script))?;
    let all = pids.wait(4)?;
    let output = launcher.end()?;
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(sorted(&out), ["[rank 0] done", "[rank 1] done"]);
    assert_gone(&all);
    Ok(())
}

#[test]
fn lines_are_whole_and_in_order_and_none_is_lost() -> Result {
    // Ranks that end at once after a lot of output, the last line without an end.
    let script =
        "i=0; while [ $i -lt 300 ]; do seq -f \"$RANK %g\" 1 50; i=$((i + 1)); done; printf last";
    let output = launch("4", script).output()?;
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let mut expected: Vec<std::collections::VecDeque<String>> = Vec::new();
    for rank in 0..4 {
        let numbers = (0..300).flat_map(|_| 1..=50);
        let lines = numbers.map(|i| format!("[rank {rank}] {rank} {i}"));
        expected.push(lines.chain([format!("[rank {rank}] last")]).collect());
    }
    for line in out.lines() {
        let rank: usize = line.get(6..7).ok_or_else(|| line.to_string())?.parse()?;
        assert_eq!(expected[rank].pop_front().as_deref(), Some(line));
    }
    assert!(expected.iter().all(std::collections::VecDeque::is_empty));
    Ok(())
}

#[test]
fn lines_of_any_length_arrive() -> Result {
    let script = "head -c 5000000 /dev/zero | tr '\\0' x; [ $RANK = 0 ] && head -c 5000000 /dev/zero | tr '\\0' y >&2";
    let output = launch("2", &format!("{script}; exit 0")).output()?;
    assert_eq!(output.status.code(), Some(0));
    let count = |text: &[u8], byte| text.iter().filter(|b| **b == byte).count();
    assert_eq!(count(&output.stdout, b'x'), 10_000_000);
    assert_eq!(count(&output.stderr, b'y'), 5_000_000);
    // In pieces of 1 MiB.
    assert_eq!(count(&output.stdout, b'\n'), 2 * 5);
    for line in output
        .stdout
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
    {
        let rest = &line[b"[rank 0] ".len()..];
        assert!(rest.len() <= 1 << 20 && rest.iter().all(|b| *b == b'x'));
    }
    Ok(())
}

#[test]
fn output_that_nobody_reads_ends_the_job() -> Result {
    let pids = Pids::new()?;
    let script = format!(
        "{}; while echo line; do :; done; sleep 600",
        pids.note("$$", "rank-$RANK")
    );
    let mut launcher = Running::start(launch("2", &script))?;
    let all = pids.wait(2)?;
    drop(launcher.child.stdout.take());
    let output = launcher.end()?;
    let (_, err) = text(&output);
    assert_eq!(output.status.code(), Some(128 + 13), "{err}");
    assert!(err.contains("SIGPIPE; ending all ranks"), "{err}");
    assert_gone(&all);
    Ok(())
}

#[test]
fn programs_that_cannot_be_started_and_wrong_command_lines() -> Result {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("file");
    fs::write(&file, "no program")?;
    let file = file.to_str().ok_or("a path in UTF-8")?;
    let cases: [(&[&str], i32, &str); 6] = [
        (
            &["-n", "2", "no-such-program"],
            127,
            "cannot start no-such-program",
        ),
        (&["-n", "2", file], 126, "cannot start"),
        (&["-n", "0", "true"], 2, "0 is not in 1..=1024"),
        (&["-n", "2"], 2, "<PROGRAM>"),
        (&["true"], 2, "--ranks"),
        (&["-n", "2", "--mpi-arg", "x", "true"], 2, "--mpi"),
    ];
    for (arguments, code, message) in cases {
        let output = Command::new(DP_LAUNCH).args(arguments).output()?;
        let (_, err) = text(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {err}");
        assert!(err.contains(message), "{arguments:?}: {err}");
        assert!(!err.contains("panicked"), "{arguments:?}: {err}");
    }
    Ok(())
}
