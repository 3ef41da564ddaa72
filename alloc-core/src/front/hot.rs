//! What the fast paths read besides the thread's block and the CPU's region, in one place: where the
//! window and its class map are, the regions by CPU index, the classes of tiny sizes.
//!
//! Defined in assembly so that a section reaches it from any kind of library without a table of
//! offsets in between. The words are written by those who own the facts: the window, and the front
//! end when the CPU caches are there.

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::cpu_cache::NO_TABLE;
use super::rseq::Entry;
use super::size_class::{SLAB_MAX, SizeClass, TINY_MAX};
use crate::extent::page_map::Reach;

/// The name of the block: hidden, and of this version.
#[doc(hidden)]
#[macro_export]
macro_rules! __hot {
    () => {
        concat!(
            "thermalloc_hot_",
            env!("CARGO_PKG_VERSION_MAJOR"),
            "_",
            env!("CARGO_PKG_VERSION_MINOR"),
            "_",
            env!("CARGO_PKG_VERSION_PATCH")
        )
    };
}
pub(super) use crate::__hot as symbol;

/// The block.
#[repr(C, align(64))]
pub(crate) struct Hot {
    /// Of the process's heap.
    pub(crate) reach: Reach,
    /// See [`Hot::table`].
    pub(super) table: AtomicPtr<Entry>,
    /// The class of each size up to [`TINY_MAX`].
    pub(super) tiny: [SizeClass; TINY_MAX + 1],
    /// The class of each size from there to [`SLAB_MAX`], by steps of 128 bytes, rounded up.
    pub(super) medium: [SizeClass; SLAB_MAX / 128 + 1],
}

// The classes once more, as the assembler counts: eight of each width. The test compares them.
core::arch::global_asm!(
    ".pushsection .data.thermalloc,\"aw\",@progbits",
    ".p2align 6",
    concat!(".globl ", symbol!()),
    concat!(".hidden ", symbol!()),
    concat!(".type ", symbol!(), ",@object"),
    concat!(".size ", symbol!(), ",{size}"),
    concat!(symbol!(), ":"),
    ".zero {table}",
    ".quad {no_table}",
    ".byte 1",
    ".set thermalloc_class, 1",
    ".irp width, 16, 16, 32, 64",
    ".rept 8",
    ".fill \\width, 1, thermalloc_class",
    ".set thermalloc_class, thermalloc_class + 1",
    ".endr",
    ".endr",
    ".fill 9, 1, thermalloc_class - 1",
    ".irp width, 1, 2, 4, 8, 16",
    ".rept 8",
    ".fill \\width, 1, thermalloc_class",
    ".set thermalloc_class, thermalloc_class + 1",
    ".endr",
    ".endr",
    ".zero {size} - {end}",
    ".popsection",
    size = const size_of::<Hot>(),
    table = const offset_of!(Hot, table),
    end = const offset_of!(Hot, medium) + SLAB_MAX / 128 + 1,
    no_table = sym NO_TABLE,
);

/// The process's block.
#[inline(always)]
pub(crate) fn hot() -> &'static Hot {
    let block: *const Hot;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: makes an address.
    unsafe {
        asm!(
            concat!("lea {block}, [rip + ", symbol!(), "]"),
            block = out(reg) block,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            concat!("adrp {block}, ", symbol!()),
            concat!("add {block}, {block}, :lo12:", symbol!()),
            block = out(reg) block,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    // SAFETY: defined above with the layout of `Hot`, initialised, for good; all that changes is atomic.
    unsafe { &*block }
}

/// The addresses that malloc and free read here.
pub(super) fn span() -> core::ops::Range<usize> {
    let start = core::ptr::from_ref(hot()).addr();
    start..start + offset_of!(Hot, medium)
}

impl Hot {
    /// What the sections address the regions by: an entry for every CPU index that there can be.
    #[inline(always)]
    pub(crate) fn table(&self) -> *const Entry {
        self.table.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::size_class::class_of;
    use super::*;

    #[test]
    fn the_classes_are_those_of_the_formula() {
        for size in 0..=SLAB_MAX {
            let of =
                if size <= TINY_MAX { &hot().tiny[size] } else { &hot().medium[(size + 127) >> 7] };
            assert_eq!(*of, class_of(size), "{size} bytes");
        }
    }
}
