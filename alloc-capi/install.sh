#!/bin/sh
# Installs the library, the headers and the pkg-config file. usage: install.sh PREFIX
# lib/thermalloc and include/thermalloc/compat stand in for jemalloc: its library's and its header's names,
# and a jemalloc.pc. Neither is on a search path unless somebody puts it there.
# DESTDIR is put before PREFIX where files are written, as packagers expect; LIB_FROM is the folder
# with libthermalloc.so and libthermalloc.a (default: built here).
set -eu
prefix=${1:?usage: install.sh PREFIX}
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/../Cargo.toml")
major=${version%%.*}

if [ -z "${LIB_FROM:-}" ]; then
  (cd "$here/.." && cargo build --release -p thermalloc-capi -p thermalloc-threads)
  LIB_FROM=${CARGO_TARGET_DIR:-$here/../target}/release
fi

lib=${DESTDIR:-}$prefix/lib
include=${DESTDIR:-}$prefix/include/thermalloc
compat=$lib/thermalloc
mkdir -p "$lib/pkgconfig" "$compat/pkgconfig" "$include/compat/jemalloc"
install -m 755 "$LIB_FROM/libthermalloc.so" "$lib/libthermalloc.so.$version"
ln -sf "libthermalloc.so.$version" "$lib/libthermalloc.so.$major"
ln -sf "libthermalloc.so.$major" "$lib/libthermalloc.so"
if [ -f "$LIB_FROM/libthermalloc_threads.so" ]; then
  install -m 755 "$LIB_FROM/libthermalloc_threads.so" "$lib/libthermalloc_threads.so"
fi
# Variables that a program may define itself: two strong ones would not link.
set --
for p in '' je_ jemalloc_; do
  for name in malloc_conf malloc_conf_2_conf_harder malloc_message; do
    set -- "$@" "--weaken-symbol=$p$name"
  done
done
objcopy "$@" "$LIB_FROM/libthermalloc.a" "$lib/libthermalloc.a"
chmod 644 "$lib/libthermalloc.a"
for name in libjemalloc.so.2 libjemalloc.so; do
  ln -sf "../libthermalloc.so.$major" "$compat/$name"
done
for header in thermalloc.h jemalloc.h compat/jemalloc/jemalloc.h; do
  install -m 644 "$here/include/thermalloc/$header" "$include/$header"
done
pc() {
  sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/$1.pc.in" >"$2/$1.pc"
  chmod 644 "$2/$1.pc"
}
pc thermalloc "$lib/pkgconfig"
pc jemalloc "$compat/pkgconfig"
