#!/usr/bin/env bash
# What it takes to build and run the features `cuda` and `nccl` on a machine without a GPU and without CUDA:
#
#     settings=$(.ci/cuda-env.sh DIR) && eval "$settings"
#
# - DIR/toolkit: the real run-time compiler NVRTC, which needs no GPU and compiles this project's own kernels in a test; and CUDA's
#   headers. From NVIDIA's wheels on PyPI (about 95 MB to download).
# - DIR/simulator: the CUDA simulator, which the features are linked to and run on (.ci/cuda-simulator/README.md).
#
# It prints the variables to set, and nothing else; a second call with the same DIR downloads nothing. DIR is a target folder of its own,
# the one that the settings name: cargo would take the simulator's kernels for real ones in a later build with a real nvcc.

set -euo pipefail

[[ $# -eq 1 ]] || { echo "usage: cuda-env.sh DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/apt.sh"
mkdir -p "$1/toolkit/lib" "$1/toolkit/include"
dir=$(cd "$1" && pwd -P)
toolkit=$dir/toolkit

# The version of CUDA that NCCL, the driver of the 580 series and cudarc 0.19 agree on.
wheels='nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649'

if [[ ! -e $toolkit/complete ]]; then
    python=python3
    if ! python3 -m pip --version >/dev/null 2>&1; then
        need_venv >&2
        python3 -m venv "$toolkit/python"
        python=$toolkit/python/bin/python
    fi
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    printf '%s\n' "$wheels" >"$scratch/requirements"
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-cache-dir --no-deps --no-compile \
        --only-binary=:all: --require-hashes --target "$scratch/wheels" -r "$scratch/requirements" >&2
    cp -r "$scratch"/wheels/nvidia/cu13/include/. "$toolkit/include/"
    cp "$scratch"/wheels/nvidia/cu13/lib/libnvrtc{,-builtins}.so.* "$toolkit/lib/"
    for library in libnvrtc-builtins libnvrtc; do
        found=$(find "$toolkit/lib" -name "$library.so.*" | sort | head -1)
        [[ -n $found ]] || { echo "no $library in NVIDIA's wheel" >&2; exit 1; }
        ln -sfn "${found##*/}" "$toolkit/lib/$library.so"
    done
    # Last: it says that the rest is there.
    touch "$toolkit/complete"
fi

"$here/cuda-simulator/build.sh" "$toolkit/include" "$dir/simulator" >&2
# The test of the real NVRTC finds it here, also where programs are linked to the simulator's in `lib`.
ln -sfn "$toolkit/lib" "$dir/simulator/lib64"

# What compiles kernels has changed: neither cargo nor the build script of Candle's kernels looks at it.
compiler=$(cat "$dir"/simulator/bin/nvcc "$dir"/simulator/include/kernels.h | sha256sum)
if [[ $compiler != "$(cat "$dir/simulator/compiler" 2>/dev/null)" ]]; then
    rm -rf "$dir"/*/build/candle-kernels-* "$dir"/*/.fingerprint/candle-kernels-*
    printf '%s\n' "$compiler" >"$dir/simulator/compiler"
fi

cat <<EXPORTS
export CARGO_TARGET_DIR='$dir'
export CUDA_HOME='$dir/simulator'
export NVCC='$dir/simulator/bin/nvcc'
export CUDARC_CUDA_VERSION=13000
export CUDA_COMPUTE_CAP=90
export LD_LIBRARY_PATH='$dir/simulator/lib'
EXPORTS
