#!/usr/bin/env bash
# Packages the three libraries as `cargo publish` would, and builds them from the packages alone, so that a file that a package
# lacks is found. They are put into a copy of the workspace in the place of their folders, and use its target folder: there
# Candle is built already, with the same features.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Those of another version would be found below, too.
rm -f "$target"/package/*.crate
cargo package --workspace --exclude dp-examples --no-verify --allow-dirty

cp Cargo.toml Cargo.lock "$scratch"
cp -r examples docs "$scratch"
for name in dp-core dp-zero dp-models; do
    package=$(ls "$target/package/$name"-*.crate)
    tar -xzf "$package" -C "$scratch"
    folder=$scratch/$(basename "$package" .crate)
    # The manifest as it is in the workspace; cargo has put its own in the place.
    mv "$folder/Cargo.toml.orig" "$folder/Cargo.toml"
    rm "$folder/Cargo.lock"
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        test -s "$folder/$file" || { echo "$name: the package has no $file" >&2; exit 1; }
    done
    mv "$folder" "$scratch/$name"
done
cd "$scratch"
CARGO_TARGET_DIR=$target cargo check --workspace --lib --locked
