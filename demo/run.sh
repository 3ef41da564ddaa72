#!/usr/bin/env bash
# Builds the library and runs real programs on it beside the system allocator (about a minute).
# Needs Rust, gcc, g++ and python3. Options go to compare.py, as in: demo/run.sh --rounds 1
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release -p thermalloc-capi
exec python3 demo/compare.py "${CARGO_TARGET_DIR:-target}/release/libthermalloc.so" "$@"
