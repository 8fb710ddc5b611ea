#!/usr/bin/env bash
# Ranks with a GPU each, over NCCL, on the CUDA simulator with four devices: as threads, as processes, and the programs under dp-launch.
# .ci/cuda.sh calls it; by itself:
#
#     settings=$(.ci/cuda-env.sh target/cuda) && eval "$settings" && .ci/nccl.sh

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${CUDA_HOME-} && -e $CUDA_HOME/lib/libnccl.so.2 ]] || { echo "nccl.sh: needs the settings of cuda-env.sh, see its head" >&2; exit 2; }
target=${CARGO_TARGET_DIR:-target}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CUDA_SIMULATOR_DEVICES=4

step() { printf '\n==> %s\n' "$*"; }

# logged COMMAND... : its output is shown if it fails.
logged() {
    "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log"; echo "failed: $*" >&2; return 1; }
}

features=(--workspace --features "cuda,nccl")

step "tests of NCCL"
cargo test "${features[@]}" --test nccl

step "the same, where everything on a device begins late: what does not wait for an event shows"
CUDA_SIMULATOR_DELAY_US=300 cargo test "${features[@]}" --test nccl -- threads:

step "programs: processes with a GPU each, started by dp-launch"
cargo build "${features[@]}" --bin dp-launch --bin quickstart --bin existing-loop --bin resume --bin memory-per-card --bin train-gpt
launch=(timeout 120 "$target/debug/dp-launch")
"${launch[@]}" -n 2 "$target/debug/quickstart" | tee "$scratch/out"
grep -q '^\[rank 0\] 2 ranks, 600 steps: held-out error 0\.' "$scratch/out"
logged "${launch[@]}" -n 3 "$target/debug/existing-loop"

# Half of the steps over NCCL, and the other half as threads on the CPU.
logged "${launch[@]}" -n 2 "$target/debug/resume" --steps 20 --dir "$scratch/resume"
logged "$target/debug/resume" --ranks 3 --steps 40 --dir "$scratch/resume"
grep -q '^from step 20 of 2 ranks' "$scratch/log"

small=(--steps 3 --batch 1 --context 16 --layers 1 --width 32 --heads 2)
logged "${launch[@]}" -n 4 "$target/debug/memory-per-card" "${small[@]}" --out "$scratch/own"
for ranks in 2 4; do
    # On one GPU, without NCCL.
    logged "$target/debug/memory-per-card" --device cuda --ranks "$ranks" "${small[@]}" --out "$scratch/shared-$ranks"
done

train=("$target/debug/train-gpt" --config examples/configs/gpt-bytes.json)
tiny=(--set run.steps=24 --set run.save_every=12 --set run.eval_every=12 --set run.sample.tokens=8 --set train_batch_size=4
    --set model.context=16 --set model.width=16 --set model.layers=1)
logged "${launch[@]}" -n 2 "${train[@]}" "${tiny[@]}" --set "run.out=$scratch/gpt"
sed -n 's/^\[rank 0\] \(24 steps done.*\)/\1/p' "$scratch/log" >"$scratch/own.end"
logged "${train[@]}" "${tiny[@]}" --set "run.out=$scratch/gpt-shared" --device cuda
# Two numbers have one sum, whoever adds them.
tail -1 "$scratch/log" | diff "$scratch/own.end" -
cat "$scratch/own.end"

# expect_failure TEXT COMMAND... : it must fail, and say so.
expect_failure() {
    local text=$1 code=0
    shift
    "$@" >"$scratch/out" 2>&1 || code=$?
    if [[ $code -eq 0 || $code -eq 124 ]] || ! grep -qF -- "$text" "$scratch/out"; then
        cat "$scratch/out"
        echo "expected a failure with: $text; got code $code" >&2
        return 1
    fi
    printf 'code %s: %s\n' "$code" "$text"
}

step "what cannot be: a GPU too few, and a model that the GPUs do not hold, whatever the host does"
expect_failure "this process sees 4 GPUs, so there is none for it" "${launch[@]}" -n 5 "$target/debug/quickstart"
CUDA_SIMULATOR_MEMORY_MIB=64 expect_failure "CUDA_ERROR_OUT_OF_MEMORY" "${launch[@]}" -n 2 "${train[@]}" --set "run.out=$scratch/huge" \
    --set model.width=4096 --set model.heads=32 --set model.layers=60

printf '\nNCCL checks passed in %s s.\n' "$SECONDS"
