//! A manifest as text.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use dp_core::Error;
use dp_core::checkpoint::{Checkpoint, Manifest, ParamRecord};

/// Ranks whose file is missing or damaged.
pub fn wrong_files(checkpoint: &Checkpoint) -> Vec<(usize, Error)> {
    let ranks = 0..checkpoint.manifest().ranks.len();
    ranks
        .filter_map(|rank| Some((rank, checkpoint.verify_rank(rank).err()?)))
        .collect()
}

/// Prints the manifest, and for each file whether it is as it should be.
pub fn print(checkpoint: &Checkpoint, wrong: &[(usize, Error)]) {
    let m = checkpoint.manifest();
    println!("{}", checkpoint.folder().display());
    println!(
        "  step {}, saved by {} on {} ranks (manifest version {})",
        m.step, m.strategy, m.world_size, m.version
    );
    println!(
        "  epoch {}, {} samples of it used, sampler seed {}",
        m.data.epoch, m.data.samples, m.data.seed
    );
    println!(
        "  bucket caps {} and {} bytes, schedule {:?}",
        m.first_bucket_cap, m.bucket_cap, m.schedule
    );
    for group in &m.groups {
        let settings = group
            .hyper_parameters
            .iter()
            .map(|(name, value)| format!("{name} {value}"));
        println!(
            "  group `{}`: {} ({})",
            group.name,
            group.optimizer,
            settings.collect::<Vec<_>>().join(", ")
        );
    }
    println!("{}", parameters(m));
    println!("{}", ranks(m, wrong));
    println!(
        "  {} trained elements, {} bytes in all",
        m.num_trained(),
        m.num_bytes()
    );
}

fn parameters(manifest: &Manifest) -> Table {
    let mut table = table(
        &["parameter", "shape", "dtype", "kind", "group", "updates"],
        &[5],
    );
    for p in &manifest.parameters {
        let group = p
            .group
            .map_or(String::new(), |g| manifest.groups[g].name.clone());
        table.add_row([
            p.name.clone(),
            format!("{:?}", p.shape),
            p.dtype.clone(),
            kind(p),
            group,
            p.updates.to_string(),
        ]);
    }
    table
}

fn kind(param: &ParamRecord) -> String {
    let kind = format!("{:?}", param.kind).to_lowercase();
    match param.tied {
        true => format!("{kind}, tied"),
        false => kind,
    }
}

fn ranks(manifest: &Manifest, wrong: &[(usize, Error)]) -> Table {
    let mut table = table(
        &["file", "bytes", "sha256", "state of the rank", "verified"],
        &[1],
    );
    for (rank, record) in manifest.ranks.iter().enumerate() {
        let ok = !wrong.iter().any(|(r, _)| *r == rank);
        let digest: String = record.sha256.chars().take(12).collect();
        table.add_row([
            record.file.clone(),
            record.bytes.to_string(),
            format!("{digest}..."),
            record.rank_state.to_string(),
            if ok { "yes" } else { "NO" }.to_string(),
        ]);
    }
    table
}

fn table(header: &[&str], numbers: &[usize]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(header.to_vec());
    for column in numbers {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
