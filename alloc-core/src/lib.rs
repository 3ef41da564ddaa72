//! thermalloc: a memory allocator that keeps hot pages warm and gives cold ones back.
//!
//! Layers, each knowing only the one below:
//! `api` (entry points) -> `front` (per-CPU caches) -> `arena` (slabs) -> `extent` (pages) -> `os`.
//! `heat` decides what is cold; `control` holds the option and the statistics table.
#![cfg_attr(not(any(test, loom)), no_std)]
#![cfg_attr(loom, allow(dead_code, reason = "a loom build has a part of the modules"))]

#[cfg(any(test, loom))]
extern crate std;

#[cfg(not(loom))]
pub mod api;
#[cfg(not(loom))]
pub(crate) mod arena;
#[cfg(not(loom))]
mod background;
#[cfg(not(loom))]
mod companion;
#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod ctl;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod embed;
#[cfg(not(loom))]
pub(crate) mod explicit;
#[cfg(not(loom))]
pub mod extended;
#[cfg(not(loom))]
pub(crate) mod extent;
pub(crate) mod fatal;
#[cfg(not(loom))]
pub(crate) mod front;
#[cfg(not(loom))]
mod handle;
#[cfg(not(loom))]
pub(crate) mod heat;
#[cfg(all(feature = "lab", not(loom)))]
#[doc(hidden)]
pub mod lab;
pub(crate) mod os;
#[cfg(not(loom))]
pub(crate) mod policy;
#[cfg(not(loom))]
pub(crate) mod process;
#[cfg(not(loom))]
pub mod prof;
pub(crate) mod sync;
#[cfg(not(loom))]
pub(crate) use front::tcaches;
#[cfg(not(loom))]
pub(crate) mod thread;
#[cfg(not(loom))]
mod trace_file;

// A loom build has what synchronises and no more: loom's types can't be in a `static`.
#[cfg(loom)]
pub(crate) mod arena {
    pub(crate) mod slab;
    pub(crate) mod transfer;
}
#[cfg(loom)]
pub(crate) mod front {
    pub(crate) mod entry;
    pub(crate) mod size_class;
}

#[cfg(not(loom))]
pub use handle::{Arena, ArenaError};

#[cfg(not(loom))]
use core::alloc::{GlobalAlloc, Layout};

/// The allocator, for `#[global_allocator]`.
///
/// ```
/// #[global_allocator]
/// static GLOBAL: thermalloc::Thermalloc = thermalloc::Thermalloc;
/// assert_eq!(vec![1u8; 1000].len(), 1000);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[cfg(not(loom))]
pub struct Thermalloc;

/// Every block of at least 16 bytes has this alignment, whatever its layout asks.
#[cfg(not(loom))]
const MIN_ALIGN: usize = 16;

#[cfg(not(loom))]
// SAFETY: `api` returns null or a block of at least `layout.size()` bytes with the alignment
// asked for, that overlaps no other live block, and keeps the contents on realloc.
unsafe impl GlobalAlloc for Thermalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= MIN_ALIGN {
            api::alloc(layout.size())
        } else {
            api::alloc_aligned(layout.size(), layout.align())
        }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller passes a live block of ours with its layout.
        unsafe { api::free_sized(ptr, layout.size(), layout.align()) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= MIN_ALIGN {
            api::alloc_zeroed(layout.size())
        } else {
            api::alloc_aligned_zeroed(layout.size(), layout.align())
        }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller passes a live block of ours with its layout.
        unsafe { api::realloc_aligned(ptr, new_size, layout.align()) }
    }
}
