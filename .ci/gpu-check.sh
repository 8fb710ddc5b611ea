#!/usr/bin/env bash
# What needs a GPU, in two steps, so that the machine with the GPU needs no Rust:
#
#     .ci/gpu-check.sh pack DIR      # with cargo and a CUDA toolkit (nvcc, cuBLAS, cuRAND, NVRTC, NCCL); needs no GPU
#     DIR/gpu-check.sh [OPTIONS]     # with a GPU; under five minutes. Options are those of gpu-check: DIR/gpu-check --help
#
# Exit codes of the second: 0 all well, 1 something has failed, 2 wrong arguments, 3 there is no GPU (or no CUDA library).

set -euo pipefail

pack() {
    local dir=$1
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    mkdir -p "$dir"
    local features=(--features cuda,nccl) messages
    messages=$(mktemp)
    trap 'rm -f "$messages"' RETURN
    cargo build --release --workspace "${features[@]}" --bin gpu-check --bin memory-per-card --bin bench-train \
        --message-format json-render-diagnostics >"$messages"
    cargo test --release --workspace "${features[@]}" --no-run --test cuda --test nccl \
        --message-format json-render-diagnostics >>"$messages"
    # The programs and the tests, whose file names end in a hash, by what cargo says of them.
    python3 - "$messages" "$dir" <<'PYTHON'
import json, shutil, sys

messages, folder = sys.argv[1:]
wanted = {("dp-core", "cuda"): "dp-core-cuda", ("dp-zero", "cuda"): "dp-zero-cuda", ("dp-core", "nccl"): "dp-core-nccl"}
wanted |= {("dp-zero", "nccl"): "dp-zero-nccl"}
wanted |= {("examples", name): name for name in ("gpu-check", "memory-per-card", "bench-train")}
for line in open(messages):
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        package = message["manifest_path"].split("/")[-2]
        name = wanted.pop((package, message["target"]["name"]), None)
        if name:
            shutil.copy(message["executable"], f"{folder}/{name}")
if wanted:
    sys.exit(f"not built: {', '.join(wanted.values())}")
PYTHON
    cp examples/pytorch/gpt_train.py examples/pytorch/adamw_step.py "$dir/"
    cp .ci/gpu-check.sh "$dir/gpu-check.sh"
    du -sh "$dir"
}

run() {
    local here
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
    # The libraries of a toolkit, or of PyTorch's wheels, if the loader does not find them by itself.
    local site
    site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
    local folder
    for folder in /usr/local/cuda/lib64 ${site:+"$site"/nvidia/cu13/lib "$site"/nvidia/nccl/lib}; do
        [[ ! -d $folder ]] || LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    done
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH-}
    local missing
    [[ -x $here/gpu-check ]] || { echo "gpu-check: no program in $here; make the folder by .ci/gpu-check.sh pack DIR" >&2; exit 2; }
    missing=$(ldd "$here/gpu-check" | sed -n 's/^[[:space:]]*\(lib[^ ]*\) => not found/\1/p' | tr '\n' ' ')
    if [[ -n $missing ]]; then
        echo "gpu-check: not found: ${missing% }; libcuda.so.1 comes with the driver, so there is no GPU without it; the others are" \
            "CUDA's and NCCL's: name their folders in LD_LIBRARY_PATH" >&2
        exit 3
    fi
    exec "$here/gpu-check" "$@"
}

case ${1-} in
    pack)
        [[ $# -eq 2 ]] || { echo "usage: .ci/gpu-check.sh pack DIR" >&2; exit 2; }
        pack "$2"
        ;;
    *) run "$@" ;;
esac
