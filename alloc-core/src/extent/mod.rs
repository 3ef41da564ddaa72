//! The page layer: extents (runs of pages) tile the window without a gap. An extent is in use (a
//! slab, a block with an extent of its own) or a free piece: dirty (its pages may be resident) or
//! clean (its pages read as zero and cost nothing). Records live outside the pages they describe.
//!
//! Invariants, under the heap's lock: every page below the window's limit belongs to exactly one
//! extent; the owner map names it on its first and last page; free pieces, and they alone, are in
//! the trees of `cache`.
pub(crate) mod base;
pub(crate) mod cache;
pub(crate) mod dense_sizes;
pub(crate) mod free_tree;
pub(crate) mod heap;
pub(crate) mod hugepage;
#[cfg(test)]
mod invariants;
pub(crate) mod page_map;
pub(crate) mod purge;
#[cfg(test)]
mod tests;
pub(crate) mod trace;
pub(crate) mod tree;

use crate::extent::base::Table;
use crate::extent::cache::Run;
use crate::extent::free_tree::Node;
use crate::os::{Errno, Os};
use crate::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Index of an extent's record; 0 is none.
pub(crate) type ExtentId = u32;

/// What an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// The record is not in use.
    Unused,
    /// A slab of an arena.
    Slab,
    /// A live (or cached) block of a class above `SLAB_MAX`.
    Block,
    /// A live block above `CACHED_MAX`.
    Large,
    /// Free; pages may be resident and hold old bytes.
    Dirty,
    /// Free; pages read as zero.
    Clean,
    /// Free, and being given back to the kernel just now.
    Purging,
    /// Not ours: something else was mapped here when the window grew past it.
    Foreign,
    /// A live block that the profiler recorded, whatever its class.
    Recorded,
}

impl State {
    fn from_u8(raw: u8) -> Self {
        match raw {
            1 => Self::Slab,
            2 => Self::Block,
            3 => Self::Large,
            4 => Self::Dirty,
            5 => Self::Clean,
            6 => Self::Purging,
            7 => Self::Foreign,
            8 => Self::Recorded,
            _ => Self::Unused,
        }
    }
}

/// What becomes of a dirty piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Age {
    /// It is given back, or made muzzy, when it is cold.
    Dirty,
    /// The kernel may take its pages when it wants to (`MADV_FREE`); it is given back later.
    Muzzy,
    /// It is of the kernel's reserved pools, and stays.
    Fixed,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $get:ident, $set:ident: $ty:ty;)*) => {
        $($(#[$doc])*
        #[inline(always)]
        pub(crate) fn $get(&self) -> $ty {
            self.$get.load(Relaxed)
        }
        #[inline(always)]
        pub(crate) fn $set(&self, value: $ty) {
            self.$get.store(value, Relaxed);
        })*
    };
}

/// An extent's record. Fields are atomics because a freeing thread reads a slab's without a lock;
/// they are written under the heap's lock, or by the slab's arena under its own.
#[repr(C, align(64))]
pub(crate) struct Extent {
    start: AtomicU32,
    pages: AtomicU32,
    state: AtomicU8,
    code: AtomicU8,
    arena: AtomicU16,
    left: AtomicU32,
    right: AtomicU32,
    prev: AtomicU32,
    next: AtomicU32,
    magic: AtomicU32,
    stamp_ms: AtomicU64,
    /// Slab: see `arena::slab`.
    pub(crate) ctl: AtomicU32,
    /// Slab: link in the arena's pending list.
    pub(crate) pending_next: AtomicU32,
    bits: AtomicU32,
    slots: AtomicU16,
    hint: AtomicU16,
}

impl Extent {
    fields! {
        /// First page.
        start, set_start: u32;
        /// Length, pages.
        pages, set_pages: u32;
        /// Slab: size class. Block: size class.
        code, set_code: u8;
        /// Slab: index of its arena.
        arena, set_arena: u16;
        /// Tree link.
        left, set_left: ExtentId;
        /// Tree link.
        right, set_right: ExtentId;
        /// List link: towards the older piece.
        prev, set_prev: ExtentId;
        /// List link: towards the younger piece.
        next, set_next: ExtentId;
        /// Slab: see `arena::bin::Shape`; makes a slot's index a multiplication.
        magic, set_magic: u32;
        /// Free piece: when its youngest page was freed, milliseconds of the heap's clock.
        stamp_ms, set_stamp_ms: u64;
        /// Slab: index of its bitmap. Large, recorded: the profiler's entry, or 0.
        bits, set_bits: u32;
        /// Slab: number of slots.
        slots, set_slots: u16;
        /// Slab: word of the bitmap where the last free slot was found.
        hint, set_hint: u16;
    }

    /// What it is.
    #[inline(always)]
    pub(crate) fn state(&self) -> State {
        State::from_u8(self.state.load(Relaxed))
    }

    #[inline(always)]
    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u8, Relaxed);
    }

    /// Its pages.
    pub(crate) fn run(&self) -> Run {
        Run { start: self.start(), pages: self.pages() }
    }

    /// The page after its last.
    pub(crate) fn end(&self) -> u32 {
        self.start() + self.pages()
    }

    /// Dirty piece: how much longer ago its pages may have been freed than its stamp says, milliseconds.
    /// (It has no use for a slab's divisor.)
    pub(crate) fn spread_ms(&self) -> u64 {
        u64::from(self.magic())
    }

    pub(crate) fn set_spread_ms(&self, ms: u64) {
        self.set_magic(u32::try_from(ms).unwrap_or(u32::MAX));
    }

    /// Dirty piece: which list it is in. (It has no use for a slab's hint.)
    pub(crate) fn age(&self) -> Age {
        match self.hint() {
            0 => Age::Dirty,
            1 => Age::Muzzy,
            _ => Age::Fixed,
        }
    }

    pub(crate) fn set_age(&self, age: Age) {
        self.set_hint(age as u16);
    }

    pub(crate) fn is_free(&self) -> bool {
        matches!(self.state(), State::Dirty | State::Clean)
    }
}

/// All records, and the nodes that free pieces have in their tree, under the same index.
pub(crate) struct Extents {
    records: Table<Extent>,
    nodes: Table<Node>,
}

impl Extents {
    pub(crate) const fn new() -> Self {
        Self { records: Table::new(), nodes: Table::new() }
    }

    /// Gives both tables their place: `bytes` each, one after the other.
    pub(crate) fn place(&self, start: usize, bytes: usize) {
        self.records.place(start, bytes);
        self.nodes.place(start + bytes, bytes);
    }

    pub(crate) fn ensure(&self, os: &impl Os, len: u32) -> Result<(), Errno> {
        self.records.ensure(os, len as usize)?;
        self.nodes.ensure(os, len as usize)
    }

    /// The record of `id`, which was handed out.
    #[inline(always)]
    pub(crate) fn get(&self, id: ExtentId) -> &Extent {
        // SAFETY: ids are handed out after `ensure` for them, records are zero-initialised memory
        // that is never unmapped, and every field is an atomic.
        unsafe { &*self.records.at(id as usize) }
    }

    /// The node of `id`, which was handed out.
    #[inline(always)]
    fn node(&self, id: ExtentId) -> &Node {
        // SAFETY: as above.
        unsafe { &*self.nodes.at(id as usize) }
    }
}
