//! Tells the programs which compiler built them; their reports name it.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let compiler = std::env::var_os("RUSTC").expect("Cargo sets it for build scripts");
    let output = Command::new(compiler).arg("--version").output();
    let version = output
        .ok()
        .and_then(|o| String::from_utf8(o.stdout).ok())
        .unwrap_or_default();
    println!("cargo::rustc-env=RUSTC_VERSION={}", version.trim());
}
