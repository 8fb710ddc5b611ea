//! Tables on the terminal.

use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};

/// An empty table.
pub fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(header.iter().map(Cell::new));
    table
}

/// Adds a row: numbers to the right, names to the left.
pub fn add_row(table: &mut Table, row: impl IntoIterator<Item = String>) {
    table.add_row(row.into_iter().map(|text| {
        let number = text.starts_with(|c: char| c.is_ascii_digit());
        let alignment = if number {
            CellAlignment::Right
        } else {
            CellAlignment::Left
        };
        Cell::new(text).set_alignment(alignment)
    }));
}

/// Bytes in MiB with two digits.
pub fn mib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

/// `1234567` as `1,234,567`.
pub fn thousands(value: u64) -> String {
    indicatif::HumanCount(value).to_string()
}

/// Bytes with their unit: MiB, and GiB from 10 GiB on.
pub fn size(bytes: u64) -> String {
    match bytes < 10 << 30 {
        true => format!("{} MiB", mib(bytes)),
        false => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
