//! What the program that started this process says of it: which rank it is, and of how many.
//!
//! | launcher | rank | world size | rank on this host |
//! |---|---|---|---|
//! | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
//! | MPICH's mpiexec | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` |
//! | torchrun | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
//! | Slurm's srun | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID` |
//!
//! `SLURM_NTASKS` says nothing by itself: it is also set in a batch script, where one process runs.

use std::fmt;

use crate::error::{Error, Result};

/// The programs that start ranks as processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    OpenMpi,
    Mpich,
    Torchrun,
    Slurm,
}

/// In the order of trust: mpirun starts its processes through srun where there is Slurm, so Slurm's variables may be about
/// mpirun's own helpers.
const LAUNCHERS: [Launcher; 4] = [
    Launcher::OpenMpi,
    Launcher::Mpich,
    Launcher::Torchrun,
    Launcher::Slurm,
];

/// The names of one launcher's variables.
struct Variables {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// Others without which a set is incomplete.
    also: &'static [&'static str],
}

impl Launcher {
    const fn variables(self) -> Variables {
        let (rank, world_size, local_rank, local_size, also): (_, _, _, _, &[&str]) = match self {
            Self::OpenMpi => (
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                &[],
            ),
            Self::Mpich => (
                "PMI_RANK",
                "PMI_SIZE",
                "MPI_LOCALRANKID",
                "MPI_LOCALNRANKS",
                &[],
            ),
            Self::Torchrun => (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                &["MASTER_ADDR", "MASTER_PORT"],
            ),
            Self::Slurm => (
                "SLURM_PROCID",
                "SLURM_STEP_NUM_TASKS",
                "SLURM_LOCALID",
                // srun has no variable for it but a list for all nodes.
                "SLURM_NTASKS_PER_NODE",
                &[],
            ),
        };
        Variables {
            rank,
            world_size,
            local_rank,
            local_size,
            also,
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "mpirun of Open MPI",
            Self::Mpich => "mpiexec of MPICH",
            Self::Torchrun => "torchrun",
            Self::Slurm => "srun of Slurm",
        })
    }
}

/// This process' place among several that a launcher has started.
#[derive(Debug, Clone)]
pub(crate) struct Launched {
    pub launcher: Launcher,
    pub rank: usize,
    pub world_size: usize,
    /// The rank among those of this host; `None` where the launcher does not say.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "read where ranks are processes")
    )]
    pub local_rank: Option<usize>,
    /// Ranks on this host; `None` where the launcher does not say.
    pub local_size: Option<usize>,
}

impl Launched {
    /// Reads the environment; `None` where no launcher has started more than one process.
    ///
    /// # Errors
    /// [`Error::Environment`] for what is no number, incomplete, out of range, or said differently by two launchers.
    pub fn detect() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// The rank among those of this host; the rank itself where the launcher does not say.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub fn local_rank(&self) -> usize {
        self.local_rank.unwrap_or(self.rank)
    }

    /// Ranks on this host; 1 where the launcher does not say.
    pub fn local_size(&self) -> usize {
        self.local_size.unwrap_or(1)
    }

    /// Refuses what this build cannot join.
    ///
    /// # Errors
    /// [`Error::Environment`] without the features `mpi` and `nccl`, and with `mpi` alone for launchers whose processes MPI
    /// cannot connect.
    pub fn check_supported(&self) -> Result<()> {
        if cfg!(feature = "nccl") {
            return Ok(());
        }
        let launcher = self.launcher;
        if launcher == Launcher::Torchrun {
            return Err(self.refused(format!(
                "processes of {launcher} talk over NCCL, with a GPU each, which this build has not: build with the feature \
                 `nccl` (cargo build --release --workspace --features dp-core/nccl); without GPUs, start them by mpirun, or the \
                 program once, without a launcher, for ranks that are threads"
            )));
        }
        if cfg!(not(feature = "mpi")) {
            return Err(self.refused(format!(
                "this build has ranks as threads of one process only; for processes of {launcher}, build with the feature `mpi` \
                 (cargo build --release --workspace --features dp-core/mpi) or, with a GPU each, `nccl`, or start the program \
                 once, without the launcher"
            )));
        }
        Ok(())
    }

    /// The error that this launcher's world cannot be joined.
    pub fn refused(&self, message: String) -> Error {
        Error::Environment {
            variable: self.launcher.variables().world_size,
            value: self.world_size.to_string(),
            message,
        }
    }

    /// The error that there is nothing for this place on its host.
    #[cfg(feature = "nccl")]
    pub fn local_rank_refused(&self, message: String) -> Error {
        let names = self.launcher.variables();
        let (variable, value) = match self.local_rank {
            Some(local_rank) => (names.local_rank, local_rank),
            None => (names.rank, self.rank),
        };
        Error::Environment {
            variable,
            value: value.to_string(),
            message,
        }
    }

    /// True if a launcher has started one process.
    ///
    /// # Errors
    /// See [`detect`](Self::detect).
    pub fn is_alone() -> Result<bool> {
        let said = Self::said(&|name| std::env::var(name).ok())?;
        Ok(said.is_some_and(|s| s.world_size == 1))
    }

    fn from_variables(get: impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>> {
        Ok(Self::said(&get)?.filter(|f| f.world_size > 1))
    }

    /// What the most trusted launcher has said.
    fn said(get: &impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>> {
        let mut found: Option<Self> = None;
        for launcher in LAUNCHERS {
            let Some(this) = launcher.read(get)? else {
                continue;
            };
            match &found {
                None => found = Some(this),
                Some(_) if launcher == Launcher::Slurm => {}
                Some(first) => first.agree(&this)?,
            }
        }
        Ok(found)
    }

    fn agree(&self, other: &Self) -> Result<()> {
        let (names, others) = (self.launcher.variables(), other.launcher.variables());
        let pairs = [
            (
                names.world_size,
                self.world_size,
                others.world_size,
                other.world_size,
            ),
            (names.rank, self.rank, others.rank, other.rank),
        ];
        match pairs
            .into_iter()
            .find(|(_, mine, _, theirs)| mine != theirs)
        {
            None => Ok(()),
            Some((variable, value, other, theirs)) => Err(Error::Environment {
                variable,
                value: value.to_string(),
                message: format!(
                    "{other}={theirs} contradicts it; unset the variables of the launcher that did not start these processes"
                ),
            }),
        }
    }
}

impl Launcher {
    /// What this launcher has said, if anything.
    fn read(self, get: &impl Fn(&'static str) -> Option<String>) -> Result<Option<Launched>> {
        let names = self.variables();
        let (rank, world_size) = (number(names.rank, get)?, number(names.world_size, get)?);
        let incomplete = |variable, value: usize, missing| {
            Err(Error::Environment {
                variable,
                value: value.to_string(),
                message: format!(
                    "it tells of several processes, but {missing} is not set; set both, as {self} does, or none"
                ),
            })
        };
        if world_size == Some(0) {
            return Err(Error::Environment {
                variable: names.world_size,
                value: "0".to_string(),
                message: "a world has at least one rank; unset it or correct it".to_string(),
            });
        }
        let (rank, world_size) = match (rank, world_size) {
            (None, None) => return Ok(None),
            // A batch script of Slurm has a SLURM_PROCID, and no step; anybody may have a variable called RANK.
            (Some(_), None) if self == Self::Slurm => return Ok(None),
            (Some(rank), None) => return incomplete(names.rank, rank, names.world_size),
            // One process has but one rank.
            (None, Some(1)) => (0, 1),
            (None, Some(size)) => return incomplete(names.world_size, size, names.rank),
            (Some(rank), Some(size)) => (rank, size),
        };
        if rank >= world_size {
            return Err(Error::Environment {
                variable: names.rank,
                value: rank.to_string(),
                message: format!(
                    "ranks are below {}={world_size}; correct one of them",
                    names.world_size
                ),
            });
        }
        for missing in names.also.iter().filter(|_| world_size > 1) {
            if get(missing).is_none() {
                return incomplete(names.world_size, world_size, missing);
            }
        }
        Ok(Some(Launched {
            launcher: self,
            rank,
            world_size,
            local_rank: number(names.local_rank, get)?,
            local_size: number(names.local_size, get)?,
        }))
    }
}

fn number(
    variable: &'static str,
    get: &impl Fn(&'static str) -> Option<String>,
) -> Result<Option<usize>> {
    let Some(value) = get(variable) else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(e) => Err(Error::Environment {
            variable,
            value,
            message: format!("not a number of processes or ranks ({e}); unset it or correct it"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &[(&str, &str)]) -> Result<Option<Launched>> {
        Launched::from_variables(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_string())
        })
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn every_launcher_is_understood() -> Result<()> {
        let sets: [(Launcher, &[(&str, &str)]); 4] = [
            (
                Launcher::OpenMpi,
                &[
                    ("OMPI_COMM_WORLD_RANK", "2"),
                    ("OMPI_COMM_WORLD_SIZE", "4"),
                    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
                ],
            ),
            (
                Launcher::Mpich,
                &[
                    ("PMI_RANK", "2"),
                    ("PMI_SIZE", "4"),
                    ("MPI_LOCALRANKID", "0"),
                ],
            ),
            (Launcher::Torchrun, &TORCHRUN),
            (
                Launcher::Slurm,
                &[
                    ("SLURM_PROCID", "2"),
                    ("SLURM_STEP_NUM_TASKS", "4"),
                    ("SLURM_LOCALID", "0"),
                ],
            ),
        ];
        for (launcher, variables) in sets {
            let found = detect(variables)?.expect("four processes");
            assert_eq!(found.launcher, launcher);
            assert_eq!(
                (found.rank, found.world_size, found.local_rank),
                (2, 4, Some(0))
            );
        }
        Ok(())
    }

    #[test]
    fn no_launcher_and_one_process_are_no_cluster() -> Result<()> {
        assert!(detect(&[])?.is_none());
        assert!(detect(&[("WORLD_SIZE", "1")])?.is_none());
        assert!(detect(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")])?.is_none());
        // A batch script, in which nothing was started yet.
        assert!(detect(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")])?.is_none());
        Ok(())
    }

    #[track_caller]
    fn refused(variables: &[(&str, &str)], parts: &[&str]) {
        let error = detect(variables).expect_err("must be refused").to_string();
        for part in parts {
            assert!(error.contains(part), "no {part:?} in {error:?}");
        }
    }

    #[test]
    fn incomplete_and_impossible_sets_name_the_variable() {
        refused(&[("WORLD_SIZE", "4")], &["WORLD_SIZE=4", "RANK is not set"]);
        refused(&[("RANK", "1")], &["RANK=1", "WORLD_SIZE is not set"]);
        refused(&TORCHRUN[..4], &["WORLD_SIZE=4", "MASTER_PORT is not set"]);
        refused(
            &[("PMI_RANK", "4"), ("PMI_SIZE", "4")],
            &["PMI_RANK=4", "below PMI_SIZE=4"],
        );
        refused(&[("PMI_RANK", "x"), ("PMI_SIZE", "4")], &["PMI_RANK=x"]);
        refused(&[("PMI_SIZE", "0")], &["PMI_SIZE=0", "at least one rank"]);
        refused(
            &[("RANK", "3"), ("WORLD_SIZE", "1")],
            &["RANK=3", "below WORLD_SIZE=1"],
        );
    }

    #[test]
    fn launchers_that_contradict_each_other_are_named() -> Result<()> {
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        refused(
            &[&open_mpi[..], &TORCHRUN].concat(),
            &["OMPI_COMM_WORLD_RANK=1", "RANK=2"],
        );
        // mpirun within Slurm: one srun per node.
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        let found = detect(&[&open_mpi[..], &slurm].concat())?.expect("four processes");
        assert_eq!(
            (found.launcher, found.rank, found.world_size),
            (Launcher::OpenMpi, 1, 4)
        );
        Ok(())
    }
}
