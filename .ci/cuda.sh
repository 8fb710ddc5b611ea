#!/usr/bin/env bash
# The features `cuda` and `nccl` on a machine without a GPU: clippy looks at the code, NVIDIA's NVRTC compiles the kernels, and the tests
# run, if asked for, on the CUDA simulator (.ci/cuda-simulator/README.md). On a GPU: .ci/gpu-check.sh.
# .ci/run calls it; by itself, run it from anywhere.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

step() { printf '\n==> %s\n' "$*"; }

step "the CUDA simulator"
settings=$(.ci/cuda-env.sh "$target/cuda")

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

eval "$settings"
step "clippy with the features cuda and nccl"
cargo clippy --workspace --all-targets --features cuda,nccl -- -D warnings

step "tests of the simulator"
.ci/cuda-simulator/tests/run.sh "$target/cuda/toolkit/include" "$target/cuda/simulator"

# A quarter of an hour, so it is asked for.
if [[ -z ${CUDA_SIMULATOR_TESTS:-} ]]; then
    echo "SKIPPED: the tests of CUDA and NCCL on the simulator; CUDA_SIMULATOR_TESTS=1 .ci/cuda.sh runs them"
    exit
fi

step "tests with the features cuda and nccl, on the simulator"
# The second time each piece of work on a stream begins late; with those tests alone, since that takes its time.
cargo test --workspace --features cuda,nccl --lib --bin gpu-check --test cuda
CUDA_SIMULATOR_DELAY_US=100 cargo test --workspace --features cuda,nccl --test cuda -- collectives training repeated

.ci/nccl.sh
