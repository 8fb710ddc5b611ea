#!/usr/bin/env bash
# The features `cuda` and `nccl`, as far as a machine without a GPU can check them: the code is checked by clippy, the kernels are
# compiled by NVRTC. What runs needs a GPU: .ci/gpu-check.sh.
# .ci/run calls it; by itself, run it from anywhere.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

step() { printf '\n==> %s\n' "$*"; }

settings=$(.ci/cuda-env.sh "$target/cuda/toolkit")

step "clippy with the features cuda and nccl"
(
    eval "$settings"
    # Of its own, see cuda-env.sh.
    export CARGO_TARGET_DIR=$target/cuda
    cargo clippy --workspace --all-targets --features cuda,nccl -- -D warnings
)

step "NVRTC compiles every kernel"
output=$(CUDA_HOME="$target/cuda/toolkit" cargo test --workspace --lib -- --nocapture cuda::tests::nvrtc 2>&1) ||
    { printf '%s\n' "$output"; exit 1; }
printf '%s\n' "$output" | grep -E 'cuda::tests::nvrtc.* ok$|skipped' || true
# Without NVRTC the test says so and passes.
if grep -q skipped <<<"$output" || ! grep -qE 'cuda::tests::nvrtc::.*\bok$' <<<"$output"; then
    printf '%s\n' "$output"
    echo "no kernel was compiled" >&2
    exit 1
fi
