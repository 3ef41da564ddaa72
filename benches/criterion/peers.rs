//! The allocators: a handle each, and `free` without a size where the handle's own is told it.

use crate::paths::{self, Path};
use std::alloc::{GlobalAlloc, System};
use std::time::Duration;

/// An allocator, whatever its type.
pub trait Peer {
    fn name(&self) -> &'static str;

    /// Whether it has what `path` needs.
    fn has(&self, path: Path) -> bool;

    /// Time of `iters` operations in each of `threads` threads.
    fn time(&self, path: Path, size: usize, threads: usize, iters: u64) -> Duration;
}

/// Frees a block without its size.
pub type Free = unsafe fn(*mut u8);

struct Handle<A> {
    name: &'static str,
    alloc: A,
    free: Free,
}

impl<A: GlobalAlloc + Sync> Peer for Handle<A> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn has(&self, path: Path) -> bool {
        // The C library's handle never says a size: one of the two cases tells all.
        path != Path::FreeSized || self.name != "glibc"
    }

    fn time(&self, path: Path, size: usize, threads: usize, iters: u64) -> Duration {
        paths::time(&self.alloc, self.free, path, size, threads, iters)
    }
}

unsafe fn glibc_free(p: *mut u8) {
    // SAFETY: the caller's block is malloc's.
    unsafe { libc::free(p.cast()) }
}

unsafe fn thermalloc_free(p: *mut u8) {
    // SAFETY: the caller's block is thermalloc's.
    unsafe { thermalloc::api::free(p) }
}

unsafe fn jemalloc_free(p: *mut u8) {
    // SAFETY: the caller's block is jemalloc's.
    unsafe { tikv_jemalloc_sys::free(p.cast()) }
}

unsafe fn mimalloc_free(p: *mut u8) {
    // SAFETY: the caller's block is mimalloc's.
    unsafe { libmimalloc_sys::mi_free(p.cast()) }
}

unsafe fn snmalloc_free(p: *mut u8) {
    // SAFETY: the caller's block is snmalloc's.
    unsafe { snmalloc_sys::sn_free(p.cast()) }
}

unsafe fn tcmalloc_free(p: *mut u8) {
    // SAFETY: the caller's block is tcmalloc's, with malloc's alignment.
    unsafe { libtcmalloc_sys::TCMallocInternalDeleteAligned(p.cast(), 16) }
}

pub fn all() -> [&'static dyn Peer; 6] {
    static THERMALLOC: Handle<thermalloc::Thermalloc> =
        Handle { name: "thermalloc", alloc: thermalloc::Thermalloc, free: thermalloc_free };
    static GLIBC: Handle<System> = Handle { name: "glibc", alloc: System, free: glibc_free };
    static JEMALLOC: Handle<tikv_jemallocator::Jemalloc> =
        Handle { name: "jemalloc", alloc: tikv_jemallocator::Jemalloc, free: jemalloc_free };
    static MIMALLOC: Handle<mimalloc::MiMalloc> =
        Handle { name: "mimalloc", alloc: mimalloc::MiMalloc, free: mimalloc_free };
    static SNMALLOC: Handle<snmalloc_rs::SnMalloc> =
        Handle { name: "snmalloc", alloc: snmalloc_rs::SnMalloc, free: snmalloc_free };
    static TCMALLOC: Handle<tcmalloc_better::TCMalloc> =
        Handle { name: "tcmalloc", alloc: tcmalloc_better::TCMalloc, free: tcmalloc_free };
    [&THERMALLOC, &GLIBC, &JEMALLOC, &MIMALLOC, &SNMALLOC, &TCMALLOC]
}
