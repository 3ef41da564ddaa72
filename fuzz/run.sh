#!/usr/bin/env bash
# Fuzzes every target for some seconds each; a finding is left in fuzz/artifacts and fails.
# usage: fuzz/run.sh [seconds]    default 60
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}

missing=0
need() {
	echo "fuzz/run.sh: $1 is missing: $2" >&2
	missing=1
}
cargo +nightly --version >/dev/null 2>&1 || need 'a nightly toolchain' 'rustup toolchain install nightly --profile minimal'
cargo fuzz --version >/dev/null 2>&1 || need 'cargo-fuzz' 'cargo install cargo-fuzz --locked'
[ $missing = 0 ] || exit 1

for target in operations conf malloc_conf; do
	echo "== $target"
	# AddressSanitizer watches the system allocator, which only the harness uses here.
	cargo +nightly fuzz run --sanitizer none "$target" -- \
		-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1
done
