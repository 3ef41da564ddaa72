#!/bin/sh
# Installs the library, the header and the pkg-config file. usage: install.sh PREFIX
# DESTDIR is put before PREFIX where files are written, as packagers expect; LIB_FROM is the folder
# with libthermalloc.so and libthermalloc.a (default: built here).
set -eu
prefix=${1:?usage: install.sh PREFIX}
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/../Cargo.toml")
major=${version%%.*}

if [ -z "${LIB_FROM:-}" ]; then
  (cd "$here/.." && cargo build --release -p thermalloc-capi)
  LIB_FROM=${CARGO_TARGET_DIR:-$here/../target}/release
fi

lib=${DESTDIR:-}$prefix/lib
include=${DESTDIR:-}$prefix/include/thermalloc
mkdir -p "$lib/pkgconfig" "$include"
install -m 755 "$LIB_FROM/libthermalloc.so" "$lib/libthermalloc.so.$version"
ln -sf "libthermalloc.so.$version" "$lib/libthermalloc.so.$major"
ln -sf "libthermalloc.so.$major" "$lib/libthermalloc.so"
install -m 644 "$LIB_FROM/libthermalloc.a" "$lib/libthermalloc.a"
install -m 644 "$here/include/thermalloc/thermalloc.h" "$include/thermalloc.h"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/thermalloc.pc.in" >"$lib/pkgconfig/thermalloc.pc"
chmod 644 "$lib/pkgconfig/thermalloc.pc"
