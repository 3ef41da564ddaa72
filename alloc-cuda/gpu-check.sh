#!/usr/bin/env bash
# Checks the device pool on a machine with a GPU, in under eight minutes: builds, runs the tests, settles
# what only a real driver can, and measures beside cudaMalloc, cudaMallocAsync and, where Python has
# torch, its caching allocator. Prints one table.
# usage: alloc-cuda/gpu-check.sh [--no-tests]
set -uo pipefail
cd "$(dirname "$0")/.."

tests=yes
case "${1:-}" in
'') ;;
--no-tests) tests=no ;;
*)
	echo "usage: alloc-cuda/gpu-check.sh [--no-tests]" >&2
	exit 2
	;;
esac

target=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
results=()
failed=0
# Less than eight minutes in all, whatever the parts take.
deadline=465

# The seconds that a part may take: its own limit, or what is left.
within() {
	local left=$((deadline - SECONDS))
	[ $left -lt 1 ] && left=1
	echo $(($1 < left ? $1 : left))
}

row() {
	results+=("$(printf '%-44s %s' "$1" "$2")")
}

step() {
	printf '\n== %s (%s s)\n' "$1" "$SECONDS"
}

# Runs a command within a time limit; a row says how it went.
check() {
	local name=$1 limit=$2
	shift 2
	if timeout "$(within "$limit")" "$@"; then
		row "$name" ok
	else
		row "$name" "FAILED ($?)"
		failed=1
	fi
}

# Not `grep -q`: it would end ldconfig, and with that the pipe, before its end.
if ! ldconfig -p 2>/dev/null | grep 'libcuda\.so\.1' >/dev/null && [ ! -e /usr/lib/x86_64-linux-gnu/libcuda.so.1 ] &&
	! ls ${LD_LIBRARY_PATH:+${LD_LIBRARY_PATH//:/ }} 2>/dev/null | grep '^libcuda\.so' >/dev/null; then
	echo "thermalloc: gpu-check: there is no libcuda.so.1: this needs a machine with a GPU" >&2
	exit 3
fi

if ! command -v cargo >/dev/null; then
	echo "thermalloc: gpu-check: there is no cargo: install Rust (https://rustup.rs)" >&2
	exit 3
fi

step 'build'
check 'build' 240 cargo build --release -p thermalloc-cuda-bench -p thermalloc-cuda-capi
bench=$target/release/thermalloc-cuda-bench
if [ ! -x "$bench" ]; then
	echo "thermalloc: gpu-check: the bench was not built: see above" >&2
	exit 1
fi

if [ $tests = yes ]; then
	step 'tests on the simulated driver'
	check 'tests, simulated' 150 cargo test --release -p thermalloc-cuda
fi

step 'questions to the driver'
answers=$(timeout "$(within 60)" "$bench" real) || { failed=1; row 'real driver' FAILED; }
printf '%s\n' "$answers"
while IFS='|' read -r name value; do
	[ -n "$name" ] && row "$name" "$value"
done <<<"$answers"

step 'host cost without a driver call'
timeout "$(within 60)" "$bench" cost || failed=1

if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
	step 'torch'
	check 'shim for torch' 60 alloc-cuda/capi/torch/build.sh "$target/release"
	for who in native thermalloc; do
		found=$(THERMALLOC_CUDA_LIB=$target/release PYTHONPATH=$PWD/python timeout "$(within 90)" \
			python3 alloc-cuda/capi/torch/measure.py $who) || { failed=1; found=FAILED; }
		row "torch step, $who allocator" "$found"
	done
else
	row 'torch' 'not there, or without a device'
fi

printf '\n%-44s %s\n' check result
printf '%s\n' "${results[@]}"
printf '%-44s %s\n' 'seconds' "$SECONDS"
exit $failed
