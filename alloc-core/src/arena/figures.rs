//! What a heap's arenas hold, by size class, and the end of all of it at once.
//!
//! Invariant: figures are read by a walk over the extents while the program runs, so each is right of
//! its moment; of blocks in use, those in a cache above count too.
use super::Heap;
use crate::extent::page_map::LG_PAGE;
use crate::extent::tree::Tree;
use crate::extent::{Extent, ExtentId, State};
use crate::front::size_class::{CLASSES, class_bytes};
use crate::os::Os;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Index of the figures of blocks above the largest class.
pub(crate) const ABOVE: usize = CLASSES + 1;

/// Figures of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassStats {
    /// Blocks that left the arena for a cache or a caller, and those that came back.
    pub(crate) nmalloc: u64,
    pub(crate) ndalloc: u64,
    /// Calls that took blocks, and calls that gave some back.
    pub(crate) nfills: u64,
    pub(crate) nflushes: u64,
    /// Blocks that are live or in a cache of a CPU or thread, and their bytes.
    pub(crate) curregs: u64,
    pub(crate) bytes: u64,
    /// Slabs ever made, slabs now, and those of them that have free slots.
    pub(crate) nslabs: u64,
    pub(crate) curslabs: u64,
    pub(crate) nonfull_slabs: u64,
    /// Pages of 4 KiB that they are in.
    pub(crate) pages: u64,
}

/// By class code; [`ABOVE`] is for blocks above the largest class.
pub(crate) type Classes = [ClassStats; CLASSES + 2];

/// Counts of a heap by class, where no arena's lock covers them.
pub(super) struct Given {
    /// Blocks with pages of their own that were given out or became of the class, and calls for that.
    blocks: [AtomicU64; CLASSES + 2],
    calls: [AtomicU64; CLASSES + 2],
    /// Calls that gave blocks back.
    flushes: [AtomicU64; CLASSES + 2],
}

impl Given {
    pub(super) const fn new() -> Self {
        Self {
            blocks: [const { AtomicU64::new(0) }; CLASSES + 2],
            calls: [const { AtomicU64::new(0) }; CLASSES + 2],
            flushes: [const { AtomicU64::new(0) }; CLASSES + 2],
        }
    }

    pub(super) fn count(&self, class: usize, blocks: usize) {
        self.blocks[class].fetch_add(blocks as u64, Relaxed);
        self.calls[class].fetch_add(1, Relaxed);
    }

    pub(super) fn count_flush(&self, class: usize) {
        self.flushes[class].fetch_add(1, Relaxed);
    }
}

impl<O: Os> Heap<O> {
    /// Adds the figures of the arena `only`, or of all, to `out`. Blocks with pages of their own, and all
    /// that was given back, are arena 0's.
    pub(crate) fn add_class_stats(&self, only: Option<u32>, out: &mut Classes) {
        let wanted = |index: u32| only.is_none_or(|o| o == index);
        self.pages.for_each_in_use(|e| {
            let index = if e.state() == State::Slab { u32::from(e.arena()) } else { 0 };
            if wanted(index) {
                self.add_extent(e, out);
            }
        });
        for index in (0..self.arena_count()).filter(|&index| wanted(index)) {
            let bins = self.arena(index).bins.lock();
            for (stats, bin) in out.iter_mut().zip(&bins.0) {
                stats.nmalloc += bin.taken;
                stats.nfills += bin.fills;
                stats.nslabs += bin.slabs;
            }
        }
        if wanted(0) {
            for (i, stats) in out.iter_mut().enumerate() {
                stats.nmalloc += self.given.blocks[i].load(Relaxed);
                stats.nfills += self.given.calls[i].load(Relaxed);
                stats.nflushes += self.given.flushes[i].load(Relaxed);
            }
        }
        for stats in out {
            // A block that was taken during the walk may not be counted yet.
            stats.nmalloc = stats.nmalloc.max(stats.curregs);
            stats.ndalloc = stats.nmalloc - stats.curregs;
        }
    }

    fn add_extent(&self, e: &Extent, out: &mut Classes) {
        let code = usize::from(e.code());
        let pages = u64::from(e.pages());
        match e.state() {
            State::Slab => {
                let slots = u32::from(e.slots());
                let free = self.slots(e).free_count().min(slots);
                let stats = &mut out[code];
                stats.curslabs += 1;
                stats.nonfull_slabs += u64::from(free > 0);
                stats.curregs += u64::from(slots - free);
                stats.bytes += u64::from(slots - free) * class_bytes(e.code()) as u64;
                stats.pages += pages;
            }
            state => {
                let block = matches!(state, State::Block | State::Recorded) && code <= CLASSES;
                let stats = &mut out[if block { code } else { ABOVE }];
                stats.curregs += 1;
                stats.bytes += if block { class_bytes(e.code()) as u64 } else { pages << LG_PAGE };
                stats.pages += pages;
            }
        }
    }

    /// The arena whose block holds `address`: 0 for a block with pages of its own, which is found by its
    /// first page.
    pub(crate) fn arena_of(&self, address: usize) -> Option<u32> {
        let window = &self.pages.space.window;
        if window.code_of(address) == 0 {
            return None;
        }
        let page = window.page_of(address)?;
        let e = self.extents().get(window.owner(page));
        Some(if e.state() == State::Slab { u32::from(e.arena()) } else { 0 })
    }

    /// Takes back every block that is out.
    ///
    /// # Safety
    /// Nobody uses one of them any more, nor calls for this heap meanwhile, and no batch of them is on its
    /// way. The caller is in the passage.
    pub(crate) unsafe fn reset(&self) {
        for index in 0..self.arena_count() {
            let arena = self.arena(index);
            let mut bins = arena.bins.lock();
            // What is on the list is among the slabs that go now.
            arena.pending.take();
            for bin in &mut bins.0 {
                bin.current = 0;
                bin.partial = Tree::new();
            }
            self.for_all(|id, e| {
                if e.state() == State::Slab && u32::from(e.arena()) == index {
                    self.release_slab(id);
                }
            });
        }
        self.for_all(|id, e| {
            if e.state() != State::Slab {
                e.set_state(State::Unused);
                self.pages.space.window.set_code(e.start(), 1, 0);
                self.pages.free(id);
            }
        });
    }

    /// Begins all totals anew.
    pub(crate) fn clear_counts(&self) {
        for index in 0..self.arena_count() {
            for bin in &mut self.arena(index).bins.lock().0 {
                (bin.taken, bin.fills, bin.slabs) = (0, 0, 0);
            }
        }
        let given = &self.given;
        for count in given.blocks.iter().chain(&given.calls).chain(&given.flushes) {
            count.store(0, Relaxed);
        }
    }

    /// Calls `visit`, which may free it, with every extent in use.
    pub(super) fn for_all(&self, mut visit: impl FnMut(ExtentId, &Extent)) {
        let mut ids = [0; 64];
        let mut from = 1;
        while from != 0 {
            let (n, next) = self.pages.in_use_from(from, &mut ids);
            for &id in &ids[..n] {
                visit(id, self.extents().get(id));
            }
            from = next;
        }
    }

    /// Bytes of this heap's own tables.
    pub(crate) fn table_bytes(&self) -> usize {
        self.spare_bits.lock().next_new as usize * size_of::<super::Bits>()
            + self.arenas.mapped_bytes()
            + *self.table_pages.lock() * crate::extent::page_map::PAGE
    }
}
