#!/usr/bin/env bash
# All checks of this repository, in the order of how soon they fail; stops at the first failure.
# usage: ./test.sh [--quick]    --quick leaves out the models, the fault cases and the demo
set -euo pipefail
cd "$(dirname "$0")"

quick=no
case "${1:-}" in
'') ;;
--quick) quick=yes ;;
*)
	echo "usage: ./test.sh [--quick]" >&2
	exit 2
	;;
esac

target=${CARGO_TARGET_DIR:-$PWD/target}
library=$target/release/libthermalloc.so

step() {
	printf '\n== %s (%s s)\n' "$1" "$SECONDS"
}

step 'format'
cargo fmt --all --check

step 'lints'
cargo clippy --workspace --all-targets -- -D warnings

step 'release library'
cargo build --release -p thermalloc-capi -p thermalloc-threads
test -f "$library"

step 'unit, property and process tests'
cargo test --workspace

step 'Python package'
THERMALLOC_LIB=$library THERMALLOC_TOOL=$target/debug/thermalloc python3 -m unittest discover -s python/tests

step 'documentation'
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps

if [ $quick = no ]; then
	step 'loom: interleavings of the shipped synchronisation'
	RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=$target/loom \
		cargo test -p thermalloc --release --lib loom_
	RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=$target/loom \
		cargo test -p thermalloc-cuda --release --lib loom_

	step 'demo: real programs, one round'
	demo/run.sh --rounds 1

	# A set of fault programs kept beside the repository; absent in a plain clone.
	cases=../shared/cases/run.sh
	if [ -f $cases ]; then
		step 'fault cases'
		build=$(mktemp -d)
		trap 'rm -rf "$build"' EXIT
		PRELOAD=$library CASES_BUILD=$build bash $cases
	fi
fi

step 'all checks passed'
