#!/usr/bin/env bash
# Builds the CUDA simulator: a folder that looks like a CUDA toolkit.
#
#     .ci/cuda-simulator/build.sh INCLUDE DIR
#
# INCLUDE has NVIDIA's headers (cuda.h, cuda_fp16.h, nv/target, ...), which .ci/cuda-env.sh fetches. What is up to date is not built again.
#
# Each library is a folder here, and what cudarc declares of it but the folder does not define becomes a stub (stubs.py).

set -euo pipefail
[[ $# -eq 2 ]] || { echo "usage: build.sh INCLUDE DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
include=$(cd "$1" && pwd -P)
mkdir -p "$2/bin" "$2/lib" "$2/objects"
dir=$(cd "$2" && pwd -P)

# The bindings that cargo compiles: the version in Cargo.lock.
cudarc=$(cd "$here" && cargo metadata --format-version 1 --locked --all-features | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "cudarc"))')

# For the compilers: NVIDIA's headers and ours in one folder.
mkdir -p "$dir/include"
cp -a --update "$include/." "$dir/include/"
cp --update "$here/kernels.h" "$dir/include/kernels.h"
cp --update "$here/nvcc" "$dir/bin/nvcc"

flags=(-std=c++17 -O2 -fPIC -pthread -Wall -Wextra -Werror "-I$include")

# library FOLDER SONAME BINDINGS FEATURE CODE [LIBRARIES...]: lib/SONAME of the C++ sources in FOLDER, and of stubs for the rest.
library() {
    local folder=$1 soname=$2 bindings=$3 feature=$4 code=$5
    shift 5
    local output=$dir/lib/$soname
    if [[ -e $output && -z $(find "$here/$folder" "$here"/*.{h,py,sh} "$cudarc/src/$bindings" -newer "$output" 2>/dev/null) ]]; then
        return
    fi
    local stubs=$dir/objects/$folder-stubs.c objects=() source object fast=()
    # Most of the time of a model goes there.
    [[ $folder != cublas ]] || fast=(-O3 -march=native)
    # A program is linked to it, so its variables of threads have a place from the beginning.
    [[ $folder != driver ]] || fast=(-ftls-model=initial-exec)
    python3 "$here/stubs.py" "$cudarc/src/$bindings" "$feature" "$code" >"$stubs"
    "${CC:-cc}" -O1 -fPIC -c "$stubs" -o "$stubs.o"
    for source in "$here/$folder"/*.cpp; do
        [[ -e $source ]] || continue
        object=$dir/objects/$folder-$(basename "$source").o
        "${CXX:-c++}" "${flags[@]}" ${fast[@]+"${fast[@]}"} -c "$source" -o "$object"
        objects+=("$object")
    done
    "${CXX:-c++}" -shared -pthread "-Wl,-soname,$soname" -o "$output.new" "${objects[@]}" "$stubs.o" "$@" '-Wl,-rpath,$ORIGIN' -ldl
    mv "$output.new" "$output"
    ln -sfn "$soname" "$dir/lib/${soname%%.so*}.so"
}

library driver libcuda.so.1 driver/sys/mod.rs cuda-13000 801
cuda=$dir/lib/libcuda.so.1
library nvrtc libnvrtc.so.13 nvrtc/sys/mod.rs cuda-13000 11
library cublas libcublas.so.13 cublas/sys/mod.rs cuda-13000 15 "$cuda"
library cublaslt libcublasLt.so.13 cublaslt/sys/mod.rs cuda-13000 15 "$cuda"
library curand libcurand.so.10 curand/sys/mod.rs cuda-13000 999 "$cuda"
library cudart libcudart.so.13 runtime/sys/mod.rs cuda-13000 801 "$cuda"
library nccl libnccl.so.2 nccl/sys/mod.rs nccl-02030 5 "$cuda"
