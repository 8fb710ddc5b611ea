//! What a measurement was made on and with: without it, a number says nothing.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;

/// Where the numbers of a report come from; flattened into it.
#[derive(Debug, Clone, Serialize)]
pub struct Provenance {
    /// The arguments of the program.
    pub arguments: Vec<String>,
    /// The machine at the start of the program.
    pub hardware: Hardware,
    /// Versions of what decides the speed.
    pub versions: BTreeMap<&'static str, &'static str>,
    /// Seconds since 1970.
    pub unix_time: u64,
}

impl Provenance {
    /// Of this program, now.
    pub fn now() -> Self {
        let since_1970 = SystemTime::UNIX_EPOCH.elapsed();
        Self {
            arguments: std::env::args().skip(1).collect(),
            hardware: Hardware::now(),
            versions: versions(),
            unix_time: since_1970.map_or(0, |t| t.as_secs()),
        }
    }

    /// One line: processor, cores, load, versions.
    pub fn summary(&self) -> String {
        let (cpu, cores) = (&self.hardware.cpu, self.hardware.cores);
        let load = self.hardware.load_average.unwrap_or(f64::NAN);
        let versions = self.versions.iter().map(|(n, v)| format!("{n} {v}"));
        let versions: Vec<String> = versions.collect();
        format!(
            "{cpu}, {cores} cores, load {load:.1} before; {}",
            versions.join(", ")
        )
    }
}

/// The machine, as the system describes it.
#[derive(Debug, Clone, Serialize)]
pub struct Hardware {
    /// The processor's name; empty where the system does not tell it.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Processes that wanted a core, as a mean over the minute before: more than none makes measurements worse.
    pub load_average: Option<f64>,
}

impl Hardware {
    /// This machine, now.
    pub fn now() -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            cpu: line_of("/proc/cpuinfo", "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory(),
            load_average: load.and_then(|l| l.split(' ').next()?.parse().ok()),
        }
    }
}

/// The machine's memory in bytes, where the system tells it.
pub fn memory() -> Option<u64> {
    let kib = line_of("/proc/meminfo", "MemTotal")?;
    Some(kib.strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// The value of the first line `name: value` of a file.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|l| l.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// Versions of this program, of the compiler and of what decides the speed.
pub fn versions() -> BTreeMap<&'static str, &'static str> {
    let mut versions = BTreeMap::from([
        ("dp-examples", env!("CARGO_PKG_VERSION")),
        ("rustc", env!("RUSTC_VERSION").trim_start_matches("rustc ")),
    ]);
    for name in ["candle-core", "gemm", "mimalloc", "rayon"] {
        versions.extend(locked_version(name).map(|v| (name, v)));
    }
    versions
}

/// The version of a package in the lock file that this program was built with; of several, the newest.
fn locked_version(name: &str) -> Option<&'static str> {
    const LOCK: &str = include_str!("../../Cargo.lock");
    let header = format!("name = \"{name}\"\nversion = \"");
    let found = LOCK.rmatch_indices(&header).next()?.0;
    LOCK[found + header.len()..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let versions = versions();
        assert_eq!(versions.len(), 6, "{versions:?}");
        assert!(versions["rustc"].starts_with("1."), "{versions:?}");
        for version in versions.values() {
            assert!(
                version.contains(|c: char| c.is_ascii_digit()),
                "{versions:?}"
            );
        }
    }
}
