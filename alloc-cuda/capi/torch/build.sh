#!/usr/bin/env bash
# Builds libthermalloc_cuda_torch.so beside libthermalloc_cuda.so. Needs a C++ compiler, no CUDA.
# usage: build.sh DIR    the directory of libthermalloc_cuda.so
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?usage: build.sh DIR}
${CXX:-c++} -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -shared -I"$here/../include" "$here/shim.cpp" \
	-L"$dir" -lthermalloc_cuda -Wl,-rpath,'$ORIGIN' -o "$dir/libthermalloc_cuda_torch.so"
