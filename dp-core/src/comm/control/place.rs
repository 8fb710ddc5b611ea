//! Where the ranks of a job meet, and how it is told from other jobs: from the launcher's environment variables.

use std::fmt;

use crate::error::{Error, Result};

/// Where rank 0 listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub host: String,
    pub port: u16,
    /// What the launcher calls this job; empty where it has no name.
    pub job: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Names of jobs, which are the same for all ranks of one, on all hosts. `DP_JOB_ID` is for who starts ranks by hand, and alone
/// counts where it is set.
const JOB_VARIABLES: [&str; 4] = [
    "DP_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
];

impl Place {
    /// `MASTER_ADDR` and `MASTER_PORT`, as in PyTorch's `env://`.
    ///
    /// Where `TORCHELASTIC_USE_AGENT_STORE` is `True`, torchrun itself listens at `MASTER_PORT`, with a protocol of its own, and
    /// ranks meet at the next port.
    ///
    /// # Errors
    /// [`Error::Environment`] for a variable that is missing or no port.
    pub fn from_variables(get: impl Fn(&'static str) -> Option<String>) -> Result<Self> {
        let fail = |variable, value: &str, message: &str| Error::Environment {
            variable,
            value: value.to_string(),
            message: message.to_string(),
        };
        let required = |variable, message| match get(variable).map(|v| v.trim().to_string()) {
            Some(value) if !value.is_empty() => Ok(value),
            _ => Err(fail(variable, "", message)),
        };
        let host = required(
            "MASTER_ADDR",
            "it is not set; ranks over NCCL meet there: set it to the name or address of rank 0's host, in all processes \
             (mpirun -x MASTER_ADDR=..., or export it before srun; torchrun sets it)",
        )?;
        let text = required(
            "MASTER_PORT",
            "it is not set; ranks over NCCL meet there: set it to a free port of rank 0's host, in all processes \
             (mpirun -x MASTER_PORT=..., or export it before srun; torchrun sets it)",
        )?;
        let wrong = |_| fail("MASTER_PORT", &text, "it is no port; ports are 1 to 65535");
        let mut port: u16 = text.parse().map_err(wrong)?;
        let agent = get("TORCHELASTIC_USE_AGENT_STORE");
        if agent.is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            port = port.checked_add(1).ok_or_else(|| {
                let message = "torchrun listens at this port, and ranks meet at the next one, which does not exist; choose \
                               another one";
                fail("MASTER_PORT", &text, message)
            })?;
        }
        if port == 0 {
            return Err(fail(
                "MASTER_PORT",
                &text,
                "it is no port; ports are 1 to 65535",
            ));
        }
        let mut names = JOB_VARIABLES
            .iter()
            .filter_map(|name| get(name).map(|value| format!("{name}={value}")));
        let job = match get("DP_JOB_ID") {
            Some(_) => names.next().unwrap_or_default(),
            None => names.collect::<Vec<_>>().join(" "),
        };
        Ok(Self { host, port, job })
    }
}
