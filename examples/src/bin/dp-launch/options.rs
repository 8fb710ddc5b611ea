//! The command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::Parser;

/// Starts a program N times on this machine, as N ranks, and ends all of them when one fails.
#[derive(Debug, Clone, Parser)]
#[command(name = "dp-launch", version, after_help = AFTER_HELP)]
pub struct Options {
    /// Number of ranks to start
    #[arg(short = 'n', long = "ranks", visible_alias = "nproc-per-node", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: u16,
    /// Start the ranks through Open MPI's mpirun, as programs built with the feature `mpi` need it
    #[arg(long)]
    pub mpi: bool,
    /// An argument for mpirun; may be given several times
    #[arg(
        long,
        value_name = "ARGUMENT",
        requires = "mpi",
        allow_hyphen_values = true
    )]
    pub mpi_arg: Vec<OsString>,
    /// Seconds from SIGTERM to SIGKILL for ranks that have to end
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub grace: Duration,
    /// MASTER_ADDR of the ranks: the host where rank 0 listens
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub master_addr: String,
    /// MASTER_PORT of the ranks; one that is free unless given
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Environment of the ranks, as torchrun sets it: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. What \
other launchers have set is removed. Programs that meet at MASTER_ADDR:MASTER_PORT can join: those on NCCL, or on \
torch.distributed. Ranks over MPI cannot, since MPI's processes meet at a server that only its own launcher has: use --mpi, \
which runs mpirun and sets none of these variables. A program whose ranks are threads needs no launcher, and refuses one.

Output: each line of a rank is written whole, with its rank in front, stdout to stdout and stderr to stderr. Lines of more \
than 1 MiB are cut. The ranks' stdin is empty.

Ends: when a rank fails, on Ctrl-C, SIGTERM, SIGHUP or SIGQUIT, and when nobody reads the output any more, all ranks get SIGTERM \
and after --grace seconds SIGKILL, with their process groups and all else that they have started; a second Ctrl-C is SIGKILL at \
once. When all ranks have ended, what they have left running is ended in the same way.

Exit code: 0 if all ranks end with 0; that of the first rank that failed, or 128 + N if signal N ended it; 128 + N after \
signal N to dp-launch; 127 if there is no such program, 126 if it cannot be started; 2 for a wrong command line.";

/// Seconds of at most a day.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.0..=86_400.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        Ok(_) => Err("must be from 0 to 86400".to_string()),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_after_the_program_are_its_own() -> Result<(), clap::Error> {
        let parse = |line: &str| Options::try_parse_from(line.split(' '));
        for line in [
            "dp-launch -n 2 program -n 3 --mpi",
            "dp-launch -n 2 -- program -n 3 --mpi",
        ] {
            let options = parse(line)?;
            assert_eq!((options.ranks, options.mpi), (2, false));
            assert_eq!(options.program, ["program", "-n", "3", "--mpi"]);
        }
        let options = parse("dp-launch -n 2 --mpi --mpi-arg --bind-to --mpi-arg none program")?;
        assert_eq!(options.mpi_arg, ["--bind-to", "none"]);
        for wrong in [
            "-n 0 program",
            "-n 2",
            "program",
            "-n 2 --mpi-arg x program",
            "-n 2 --grace -1 program",
            "-n 2 --grace NaN program",
        ] {
            assert!(parse(&format!("dp-launch {wrong}")).is_err(), "{wrong}");
        }
        Ok(())
    }
}
