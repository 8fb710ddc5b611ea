//! What the other programs have found, in a line, from the JSON that they write. `None` if it is not there.

use std::path::Path;

use serde_json::Value;

/// The greatest peak of a rank for each strategy, from the report of memory-per-card.
pub fn memory_per_card(report: &Path) -> Option<String> {
    let report = read(report)?;
    let peak_of = |strategy: &Value| {
        let ranks = strategy["ranks"].as_array()?;
        let peaks: Option<Vec<u64>> = ranks.iter().map(|rank| rank["peak"].as_u64()).collect();
        let mib = peaks?.into_iter().max()? as f64 / f64::from(1 << 20);
        Some(format!("{} {mib:.1}", strategy["name"].as_str()?))
    };
    let strategies = report["strategies"].as_array()?.iter();
    let peaks: Option<Vec<String>> = strategies.map(peak_of).collect();
    Some(format!("peak per rank, MiB: {}", peaks?.join(", ")))
}

/// The speed of the first row of bench-train's report.
pub fn bench_train(report: &Path) -> Option<String> {
    speed(&read(report)?["rows"][0])
}

/// The speed from what the scripts for PyTorch print.
pub fn pytorch(line: &str) -> Option<String> {
    speed(&serde_json::from_str(line).ok()?)
}

fn read(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn speed(row: &Value) -> Option<String> {
    let step = format!("step_ms {:.4}", row["step_ms"].as_f64()?);
    Some(match row["tokens_per_second"].as_f64() {
        Some(tokens) => format!("{step}, {tokens:.0} tokens/s"),
        None => step,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_become_a_line() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("report.json");
        assert_eq!(memory_per_card(&path), None, "there is no file");
        std::fs::write(
            &path,
            r#"{"strategies": [{"name": "ddp", "ranks": [{"peak": 1048576}, {"peak": 3145728}]},
                {"name": "zero2", "ranks": [{"peak": 2097152}]}]}"#,
        )?;
        let peaks = "peak per rank, MiB: ddp 3.0, zero2 2.0";
        assert_eq!(memory_per_card(&path).as_deref(), Some(peaks));
        assert_eq!(bench_train(&path), None, "it is of another program");

        std::fs::write(
            &path,
            r#"{"rows": [{"step_ms": 2.5, "tokens_per_second": 400.4}, {}]}"#,
        )?;
        let speed = "step_ms 2.5000, 400 tokens/s";
        assert_eq!(bench_train(&path).as_deref(), Some(speed));
        assert_eq!(memory_per_card(&path), None);

        let line = r#"{"torch": "2.15", "step_ms": 0.75}"#;
        assert_eq!(pytorch(line).as_deref(), Some("step_ms 0.7500"));
        assert_eq!(pytorch("Traceback (most recent call last):"), None);
        Ok(())
    }
}
