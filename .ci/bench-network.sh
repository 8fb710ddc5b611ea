#!/usr/bin/env bash
# What overlap and 16-bit communication are worth on a slow network: bench-train with 2 ranks on two "hosts" of this machine,
# joined by 1 Gbit/s, with overlap on and off, and gradients sent in f32 and bf16.
#
#     .ci/bench-network.sh [OPTIONS OF bench-train...]       RATE=10gbit for another network
#
# Needs root, Open MPI and a machine that is idle otherwise. Exit code 77: see two-hosts.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rate=${RATE:-1gbit}
bench=${CARGO_TARGET_DIR:-target}/release/bench-train
cargo build --release --workspace --features dp-core/mpi --bin bench-train

# Not all containers permit one process to read another one's memory.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
printf '2 ranks, each on a host of its own, %s between them; load %s\n' "$rate" "$(cut -d' ' -f1-3 /proc/loadavg)"
# Buckets of 1 MiB: the model is small, and in one bucket nothing could overlap. The options given come last, and so count.
.ci/two-hosts.sh -n 2 --rate "$rate" --timeout 1800 -- "$bench" --strategies ddp,zero2 --overlap-comm on,off \
    --communication-dtype f32,bf16 --bucket-kib 1024 --batch 8 --steps 8 --warmup 2 --rounds 3 "$@"
