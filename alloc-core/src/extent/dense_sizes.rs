//! Sizes of large blocks that were dense. A freed block of such a size was looked at in a few places, and
//! all were resident, twice in a row. The next block of it that is new to the process is advised before
//! its first touch: then it costs one fault in 2 MiB.
use super::cache::Run;
use super::heap::PageHeap;
use super::hugepage::FRAME_PAGES;
use super::page_map::LG_PAGE;
use crate::os::{Os, Range};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

const SIZES: usize = 16;
/// Blocks from this size on are looked at when they are freed, pages.
const BLOCK_PAGES: u32 = 4 * FRAME_PAGES;
/// Pages of a freed block that are looked at, evenly apart.
const PROBES: u32 = 16;
/// So often a size has to be seen dense.
const SEEN: u64 = 2;

/// The sizes; one word each: pages, and how often a block of it was seen dense in a row.
pub(crate) struct DenseSizes {
    slots: [AtomicU64; SIZES],
    /// Whether the system has huge pages and the program is worth them.
    on: AtomicBool,
}

impl DenseSizes {
    pub(crate) const fn new() -> Self {
        Self { slots: [const { AtomicU64::new(0) }; SIZES], on: AtomicBool::new(false) }
    }

    /// Says that the system has huge pages and the program is worth them.
    pub(super) fn turn_on(&self) {
        self.on.store(true, Relaxed);
    }

    fn slot(&self, pages: u32) -> &AtomicU64 {
        &self.slots[(pages.wrapping_mul(0x9E37_79B1) >> 28) as usize]
    }

    /// How often in a row blocks of this size were dense.
    fn seen(&self, pages: u32) -> u64 {
        let word = self.slot(pages).load(Relaxed);
        if word >> 8 == u64::from(pages) { word & 0xff } else { 0 }
    }

    /// Whether a block of this size is to be looked at when it is freed.
    fn wants(&self, pages: u32) -> bool {
        pages >= BLOCK_PAGES && self.on.load(Relaxed) && self.seen(pages) < SEEN
    }

    fn note(&self, pages: u32, dense: bool) {
        let seen = if dense { self.seen(pages) + 1 } else { 0 };
        self.slot(pages).store(u64::from(pages) << 8 | seen, Relaxed);
    }
}

impl<O: Os> PageHeap<O> {
    /// Before a large block is freed: whether its size is one of dense blocks.
    pub(super) fn probe(&self, run: Run) {
        let sp = &self.space;
        if !self.dense_sizes.wants(run.pages) {
            return;
        }
        let resident = |i: u32| {
            let mut page = [0];
            let at = sp.window.address(run.start + run.pages / PROBES * i);
            sp.os.resident(at, 1 << LG_PAGE, &mut page).is_ok() && page[0] & 1 == 1
        };
        self.dense_sizes.note(run.pages, (0..PROBES).all(resident));
    }

    /// Asks for huge pages within a block, `clean` pages of which are touched for the first time, if blocks
    /// of its size were dense so far.
    pub(super) fn advise(&self, run: Run, clean: u32) {
        let sp = &self.space;
        let sizes = &self.dense_sizes;
        if run.pages < BLOCK_PAGES || clean < run.pages / 2 || sizes.seen(run.pages) < SEEN {
            return;
        }
        let start = run.start.next_multiple_of(FRAME_PAGES);
        let end = run.end() / FRAME_PAGES * FRAME_PAGES;
        let len = (end - start) as usize;
        let range = Range { addr: sp.window.address(start), len: len << LG_PAGE };
        // Refused, the block is touched page by page as any other.
        let _ = sp.os.advise_huge(range, true);
    }
}
