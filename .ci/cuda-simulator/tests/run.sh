#!/usr/bin/env bash
# The simulator's own tests:
#
#     .ci/cuda-simulator/tests/run.sh INCLUDE DIR
#
# with the arguments of build.sh, which must have been called.

set -euo pipefail
[[ $# -eq 2 ]] || { echo "usage: run.sh INCLUDE DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
dir=$(cd "$2" && pwd -P)
mkdir -p "$dir/tests"
export LD_LIBRARY_PATH=$dir/lib CUDA_SIMULATOR_DEVICES=4

for source in "$here"/*.cpp; do
    name=$(basename "$source" .cpp)
    "${CXX:-c++}" -std=c++17 -O1 -pthread -Wall -Wextra -Werror "-I$1" "$source" -o "$dir/tests/$name" \
        "-L$dir/lib" -lcublas -lcurand -lnccl -lnvrtc -lcuda
    timeout 120 "$dir/tests/$name"
done
