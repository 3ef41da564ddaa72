#!/bin/sh
# Builds the newest peers from their crates into benches/target/peers/*.so, to be preloaded.
# Needs cargo, gcc, g++, cmake and python3. Options are each project's own defaults.
set -eu
cd "$(dirname "$0")"
build=$PWD/../target/peers-build
out=$PWD/../target/peers
mkdir -p "$out"
export CARGO_TARGET_DIR="$build"
# What upstream's own build of a library to preload uses; without it each call to tcmalloc would ask __tls_get_addr.
export CXXFLAGS="-ftls-model=initial-exec"

# The static libraries are named by the build scripts' messages, so an old build folder cannot mislead.
cargo build --release --locked --message-format=json >"$out/build.json"
archive() { # package, file
    python3 - "$out/build.json" "$1" "$2" <<'PY'
import json, pathlib, sys
log, package, name = sys.argv[1:]
for line in open(log):
    m = json.loads(line)
    if m.get("reason") == "build-script-executed" and package in m["package_id"]:
        print(next(pathlib.Path(m["out_dir"]).rglob(name)))
PY
}
whole() { # output, archive, linker options...
    so=$1 a=$2
    shift 2
    g++ -shared -O2 -static-libstdc++ -static-libgcc -o "$out/$so" -Wl,--whole-archive "$a" -Wl,--no-whole-archive "$@" -lpthread -ldl
    echo "built $out/$so"
}

whole libjemalloc.so "$(archive tikv-jemalloc-sys libjemalloc_pic.a)"

# This crate compiles tcmalloc without its malloc aliases; the linker gives the functions their
# usual names back, so that a call costs what it costs in a plain build.
names="_Znwm=New _Znam=NewArray _ZdlPv=Delete _ZdaPv=DeleteArray _ZdlPvm=DeleteSized _ZdaPvm=DeleteArraySized
malloc=Malloc free=Free cfree=Cfree calloc=Calloc realloc=Realloc memalign=Memalign posix_memalign=PosixMemalign
aligned_alloc=AlignedAlloc valloc=Valloc pvalloc=Pvalloc malloc_usable_size=MallocSize"
# shellcheck disable=SC2046
whole libtcmalloc.so "$(archive libtcmalloc-sys libtcmalloc.a)" \
    $(for n in $names; do echo "-Wl,--defsym=${n%=*}=TCMallocInternal${n#*=}"; done)

# The rest are built as upstream builds its library to preload, by the sources' own CMake files.
sources() { # package, folder in it
    cargo metadata --locked --format-version 1 | python3 -c '
import json, os, sys
for p in json.load(sys.stdin)["packages"]:
    if p["name"] == sys.argv[1]:
        print(os.path.join(os.path.dirname(p["manifest_path"]), sys.argv[2]))' "$1" "$2"
}

# A Release build with all defaults: MI_OVERRIDE is on, and thread-local variables are initial-exec.
cmake -S "$(sources vey-mimalloc-sys mimalloc)" -B "$build/mimalloc" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build/mimalloc" --target mimalloc >/dev/null
cp -L "$build/mimalloc/libmimalloc.so" "$out/libmimalloc.so"
echo "built $out/libmimalloc.so"

# snmalloc's crate builds the entry points for Rust only; its own shim is built from the same sources.
cmake -S "$(sources snmalloc-sys upstream)" -B "$build/snmalloc" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build/snmalloc" --target snmallocshim >/dev/null
cp "$build/snmalloc/libsnmallocshim.so" "$out/libsnmalloc.so"
echo "built $out/libsnmalloc.so"

# The versions, for the notes beside a table.
cargo metadata --locked --format-version 1 | python3 -c '
import json, sys
for p in json.load(sys.stdin)["packages"]:
    if p["name"].endswith("-sys") and "malloc" in p["name"]:
        print(p["name"], p["version"])' | tee "$out/versions"
