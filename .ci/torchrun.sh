#!/usr/bin/env bash
# The meeting of ranks that torchrun has started, without GPUs: torchrun's agent owns MASTER_PORT, and ranks meet at the next one.
# .ci/run calls it where there is a torchrun; by itself, run it from anywhere. TORCHRUN names another one than that of PATH.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torchrun=${TORCHRUN:-torchrun}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

program=$(cargo test --workspace --lib --no-run --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\/dp_core-[0-9a-f]*\)".*/\1/p')
one_rank=("$program" --exact comm::control::tests::processes::one_rank --ignored --nocapture)

# expect N TEXT: each of the N ranks says TEXT.
expect() {
    local rank
    for ((rank = 0; rank < $1; rank++)); do
        grep -qF "[rank $rank] $2" "$scratch/out" || { cat "$scratch/out"; echo "rank $rank does not say: $2" >&2; return 1; }
    done
    grep -F "[rank 0] $2" "$scratch/out"
}

for n in 2 3; do
    timeout 120 "$torchrun" --standalone --no-python --nproc-per-node "$n" "${one_rank[@]}" >"$scratch/out" 2>&1 ||
        { cat "$scratch/out"; exit 1; }
    expect "$n" "of $n met at "
    expect "$n" done
done

# Two agents, as on two hosts, with a port that is said: the ranks' port is the next one.
port=$((20000 + RANDOM % 10000))
agents=()
for node in 0 1; do
    timeout 120 "$torchrun" --no-python --nnodes 2 --nproc-per-node 2 --node-rank "$node" --master-addr 127.0.0.1 --master-port "$port" \
        "${one_rank[@]}" >"$scratch/out-$node" 2>&1 &
    agents+=($!)
done
for agent in "${agents[@]}"; do
    wait "$agent" || { cat "$scratch"/out-*; exit 1; }
done
cat "$scratch"/out-* >"$scratch/out"
expect 4 "of 4 met at 127.0.0.1:$((port + 1))"
expect 4 done
