#!/usr/bin/env bash
# Ranks as processes, over Open MPI on this machine: the same bits as threads, and every failure ends the job with its reason.
# .ci/run calls it; by itself, run it from anywhere. It installs what is missing by apt.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
target=${CARGO_TARGET_DIR:-target}

source .ci/apt.sh
for command in mpirun mpicc clang; do
    need "$command" openmpi-bin libopenmpi-dev libclang-dev clang
done

# Not all containers permit one process to read another one's memory; without it, Open MPI copies through a shared file.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
# More ranks than cores, as root, in a container.
mpi=(timeout 120 mpirun --allow-run-as-root --oversubscribe)

step() { printf '\n==> %s\n' "$*"; }

step "clippy with the feature mpi"
cargo clippy --workspace --all-targets --features dp-core/mpi -- -D warnings

step "build with the feature mpi"
programs=(quickstart existing-loop resume memory-per-card bench-collectives bench-train train-gpt finetune dp-launch)
cargo build --release --workspace --features dp-core/mpi "${programs[@]/#/--bin=}"
cargo test --release --workspace --features dp-core/mpi --test mpi --no-run
test_program=$(cargo test --release --workspace --features dp-core/mpi --test mpi --no-run --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\/mpi-[0-9a-f]*\)".*/\1/p')

for n in 2 3 4; do
    step "$n processes compute the bits of $n threads"
    "$test_program" digests --ranks "$n" >"$scratch/threads-$n"
    "${mpi[@]}" -n "$n" "$test_program" digests --ranks "$n" >"$scratch/processes"
    diff "$scratch/threads-$n" "$scratch/processes"
    wc -l <"$scratch/processes"
    "${mpi[@]}" -n "$n" "$test_program" contract
done

# expect_failure TEXT... : the last command line in `command` must fail, soon, and every rank must say each TEXT.
expect_failure() {
    local code=0 start=$SECONDS
    "${command[@]}" >"$scratch/out" 2>"$scratch/err" || code=$?
    if [[ $code -eq 0 || $code -eq 124 ]]; then
        cat "$scratch/out" "$scratch/err"
        echo "expected a failure, got code $code" >&2
        return 1
    fi
    for text in "$@"; do
        grep -qF -- "$text" "$scratch/err" || { cat "$scratch/err"; echo "nobody says: $text" >&2; return 1; }
    done
    printf 'code %s after %s s: %s\n' "$code" "$((SECONDS - start))" "$1"
}

step "a rank that fails ends the job, and all say why"
fail() { command=("${mpi[@]}" -n 3 --tag-output "$test_program" fail "$1"); }
fail error;    expect_failure "rank 1 failed: invalid test: rank 1 gives up" "rank 0, 2 of 3 stopped because of it"
for rank in 0 1 2; do grep -q "^\[1,$rank\].*rank 1 gives up" "$scratch/err"; done
fail panic;    expect_failure "rank 1 panicked: rank 1 has had enough" "rank 0, 2 of 3 stopped because of it"
for rank in 0 1 2; do grep -q "^\[1,$rank\].*has had enough" "$scratch/err"; done
fail mismatch; expect_failure "differs between ranks" "[bucket]" "[other bucket]"
fail early;    expect_failure "rank 1 finished after 9 collectives"
# mpirun sees that it is gone, and ends the others.
fail killed;   expect_failure "signal 9 (Killed)"
# Where the launcher does not, their deadline does. (mpirun hides the exit codes then.)
"${mpi[@]}" --enable-recovery -n 3 "$test_program" fail killed 2>"$scratch/err" || true
grep -m1 "failed: rank . waited 3.*not there: rank 1" "$scratch/err"
# mpirun sees nothing: the deadline of the others ends it.
fail stopped;  expect_failure "not there: rank 1"
fail late;     expect_failure "waited 3"

step "programs: threads and processes end alike"
"${mpi[@]}" -n 4 "$target/release/quickstart" | tee "$scratch/processes"
"$target/release/quickstart" --ranks 4 | diff - "$scratch/processes"
"${mpi[@]}" -n 3 "$target/release/existing-loop"
for run in threads processes; do
    # Half of the steps one way, and the other half the other way.
    "$target/release/resume" --ranks 3 --steps 20 --dir "$scratch/resume-$run" >/dev/null
done
"$target/release/resume" --ranks 3 --steps 40 --dir "$scratch/resume-threads" | tail -1 >"$scratch/threads.end"
"${mpi[@]}" -n 3 "$target/release/resume" --steps 40 --dir "$scratch/resume-processes" | tail -1 | diff "$scratch/threads.end" -
cat "$scratch/threads.end"
small=(--steps 3 --batch 1 --context 16 --layers 1 --width 32 --heads 2)
"$target/release/memory-per-card" --ranks 3 "${small[@]}" --out "$scratch/threads.d" >/dev/null
"${mpi[@]}" -n 3 "$target/release/memory-per-card" "${small[@]}" --out "$scratch/processes.d"
python3 - "$scratch/threads.d/report.json" "$scratch/processes.d/report.json" <<'PYTHON'
import json, sys

threads, processes = ([s for s in json.load(open(path))["strategies"]] for path in sys.argv[1:])
for a, b in zip(threads, processes, strict=True):
    for key in ("name", "params_sha256", "losses", "bytes_sent_per_step"):
        assert a[key] == b[key], (a["name"], key, a[key], b[key])
    assert len(a["ranks"]) == len(b["ranks"]) == 3
    print(a["name"], a["params_sha256"][:16], "on threads and processes")
PYTHON

for run in threads processes; do
    train=("$target/release/train-gpt" --config examples/configs/gpt-bytes.json --set "run.out=$scratch/gpt-$run" --ranks 2
        --set run.save_every=0 --set scheduler.params.total_num_steps=300)
    # Half of the steps one way, and the other half the other way.
    "${train[@]}" --set run.steps=10 >/dev/null
    [[ $run == threads ]] || train=("${mpi[@]}" -n 2 "${train[@]}")
    "${train[@]}" --set run.steps=20 --resume latest | tail -1 >"$scratch/gpt-$run.end"
done
diff "$scratch/gpt-threads.end" "$scratch/gpt-processes.end"
cat "$scratch/gpt-threads.end"

# It converts a model once, for all ranks of one process.
python3 -c 'import struct, sys; sys.stdout.buffer.write(struct.pack("<1000H", *(i * i % 31 for i in range(1000))))' >"$scratch/tokens.bin"
command=("${mpi[@]}" -n 2 "$target/release/finetune" --model dp-models/tests/fixtures/gpt2_hugging_face
    --config examples/configs/finetune.json --set "data.train=$scratch/tokens.bin" --set data.context=11
    --set "run.sample.prompt=1 2" --set "run.out=$scratch/finetune")
expect_failure "the ranks of this program are threads of one process"

step "benchmarks: the losses of PyTorch, and results that are right"
"${mpi[@]}" -n 2 "$target/release/bench-train" --context 16 --width 8 --layers 2 --heads 2 --batch 8 --lr 0.01 \
    --init examples/tests/fixtures/gpt-tied.safetensors --data LICENSE-APACHE --expect examples/tests/fixtures/gpt-tied.json \
    --overlap-comm on,off --communication-dtype f32,bf16
"${mpi[@]}" -n 3 "$target/release/bench-collectives" --max-bytes 64K --budget-ms 20

step "dp-launch starts ranks over MPI: whole lines with their rank, the exit code of the first that fails"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launch=(timeout 120 "$target/release/dp-launch" --mpi)
"${launch[@]}" -n 3 "$target/release/quickstart" >"$scratch/out"
"$target/release/quickstart" --ranks 3 | sed 's/^/[rank 0] /' | diff - "$scratch/out"
command=("${launch[@]}" -n 3 "$test_program" fail error)
expect_failure "[rank 0] rank 1 failed: invalid test: rank 1 gives up" "dp-launch: mpirun failed first"
command=("${launch[@]}" -n 2 sh -c 'echo "last words" >&2; [ "$OMPI_COMM_WORLD_RANK" = 1 ] && exit 7; sleep 60')
expect_failure "[rank 1] last words" "Exit code:    7" "dp-launch: mpirun failed first"
unset OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM

step "two hosts: network namespaces, TCP"
code=0
.ci/two-hosts.sh -n 4 -- "$test_program" contract || code=$?
if [[ $code -eq 77 ]]; then
    echo "SKIPPED: network namespaces are not permitted here"
else
    [[ $code -eq 0 ]]
    .ci/two-hosts.sh -n 4 -- "$test_program" digests --ranks 4 | diff "$scratch/threads-4" -
    # Only that it runs: what it measures at this size, on this machine, says nothing.
    .ci/bench-network.sh --context 16 --width 64 --layers 2 --steps 3 --warmup 1 --rounds 1 || code=$?
    [[ $code -eq 0 || $code -eq 77 ]]
    [[ $code -eq 0 ]] || echo "SKIPPED: tc cannot limit a network here"
fi

printf '\nMPI checks passed in %s s.\n' "$SECONDS"
