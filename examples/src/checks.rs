//! What a program's run must have computed.

/// Prints each statement and whether it holds; true if all do.
pub fn print(checks: impl IntoIterator<Item = (String, bool)>) -> bool {
    let mut all_hold = true;
    for (statement, holds) in checks {
        let mark = if holds { "[ok]    " } else { "[FAILED]" };
        println!("{mark} {statement}");
        all_hold &= holds;
    }
    all_hold
}
