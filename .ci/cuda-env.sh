#!/usr/bin/env bash
# What it takes to check the features `cuda` and `nccl` on a machine without a GPU and without CUDA:
#
#     settings=$(.ci/cuda-env.sh DIR) && eval "$settings"
#
# - DIR/bin/nvcc, a stand-in for the compiler. Candle's build scripts call nvcc for Candle's own kernels, whose results only a linker
#   and a GPU look at. The stand-in writes empty ones, so clippy and rustdoc work, and nothing can be linked.
# - DIR/lib/libnvrtc.so, the real run-time compiler, from NVIDIA's wheel on PyPI (about 90 MB to download): it needs no GPU, and compiles
#   this project's own kernels in a test.
#
# It prints the variables to set, and nothing else; a second call with the same DIR downloads nothing. Use a target folder of its own
# with it: cargo would take the empty results for real ones in a later build with a real nvcc.

set -euo pipefail

[[ $# -eq 1 ]] || { echo "usage: cuda-env.sh DIR" >&2; exit 2; }
source "$(dirname "${BASH_SOURCE[0]}")/apt.sh"
mkdir -p "$1/bin" "$1/lib" "$1/include"
dir=$(cd "$1" && pwd -P)

# The version of CUDA that NCCL, the driver of the 580 series and cudarc 0.19 agree on.
nvrtc='nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575'

cat >"$dir/bin/nvcc" <<'NVCC'
#!/usr/bin/env bash
# Stand-in for nvcc: empty results under the right names.
set -eu
output='' folder=. kind='' sources=()
while (($#)); do
    case $1 in
        -o) output=$2; shift ;;
        --output-directory) folder=$2; shift ;;
        --ptx | --lib | -c | --version) kind=$1 ;;
        *.cu) sources+=("$1") ;;
    esac
    shift
done
case $kind in
    --version) printf 'nvcc: stand-in\n\n\nCuda compilation tools, release 13.0, V13.0.88\n' ;;
    --lib) printf '!<arch>\n' >"$output" ;;
    -c) : >"$output" ;;
    --ptx)
        for source in "${sources[@]}"; do
            name=${source##*/}
            : >"${output:-$folder/${name%.cu}.ptx}"
        done
        ;;
    *) echo "stand-in for nvcc: nothing to do" >&2; exit 1 ;;
esac
NVCC
chmod +x "$dir/bin/nvcc"

if [[ ! -e $dir/lib/libnvrtc.so ]]; then
    python=python3
    if ! python3 -m pip --version >/dev/null 2>&1; then
        need_venv >&2
        python3 -m venv "$dir/python"
        python=$dir/python/bin/python
    fi
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    printf '%s\n' "$nvrtc" >"$scratch/requirements"
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-cache-dir --no-deps --no-compile \
        --only-binary=:all: --require-hashes --target "$scratch/wheel" -r "$scratch/requirements" >&2
    cp "$scratch"/wheel/nvidia/cu13/lib/libnvrtc{,-builtins}.so.* "$dir/lib/"
    # The names without a version last: they say that the rest is there.
    for library in libnvrtc-builtins libnvrtc; do
        found=$(find "$dir/lib" -name "$library.so.*" | sort | head -1)
        [[ -n $found ]] || { echo "no $library in NVIDIA's wheel" >&2; exit 1; }
        ln -sfn "${found##*/}" "$dir/lib/$library.so"
    done
fi

cat <<EXPORTS
export CUDA_HOME='$dir'
export NVCC='$dir/bin/nvcc'
export CUDARC_CUDA_VERSION=13000
export CUDA_COMPUTE_CAP=90
EXPORTS
