//! glibc's malloc, main arena, from `malloc/malloc.c` (2.39) and mallopt(3).
//!
//! - `_int_malloc`: the best fitting free chunk, then the top chunk; else `sysmalloc`, which maps a
//!   block of at least `mmap_threshold` (128 KiB at first) and grows the heap by brk for others,
//!   with `M_TOP_PAD` (128 KiB) in excess.
//! - `__libc_free` of a mapped block unmaps it, and where it is larger than `mmap_threshold` and at
//!   most `DEFAULT_MMAP_THRESHOLD_MAX` (32 MiB), its size becomes the threshold, and twice that
//!   `trim_threshold`.
//! - `_int_free` joins a chunk with its neighbours and the top chunk; where that made a chunk of
//!   64 KiB (`FASTBIN_CONSOLIDATION_THRESHOLD`) and the top chunk reaches `trim_threshold`, `systrim`
//!   gives all of the top chunk but the pad back.
//!
//! Left out: chunk headers, thread arenas, tcache and fast bins (blocks here are pages).

use std::sync::Arc;

use super::{Place, Policy};
use crate::PAGE;
use crate::machine::Machine;
use crate::spans::Spans;

const TOP_PAD: usize = (128 << 10) / PAGE;
const FIRST_THRESHOLD: usize = (128 << 10) / PAGE;
const MOST_THRESHOLD: usize = (32 << 20) / PAGE;
const CONSOLIDATION: usize = (64 << 10) / PAGE;
/// Where mapped blocks begin, pages: above any heap of brk's.
const MAPPED_FROM: usize = 1 << 26;

pub(super) struct Glibc {
    machine: Arc<Machine>,
    /// Free chunks, the top chunk not among them.
    free: Spans,
    top: usize,
    brk: usize,
    /// Address space that was unmapped.
    unmapped: Spans,
    mapped_end: usize,
    mmap_threshold: usize,
    trim_threshold: usize,
}

impl Glibc {
    pub(super) fn new(machine: Arc<Machine>) -> Self {
        Self {
            machine,
            free: Spans::default(),
            top: 0,
            brk: 0,
            unmapped: Spans::default(),
            mapped_end: MAPPED_FROM,
            mmap_threshold: FIRST_THRESHOLD,
            trim_threshold: FIRST_THRESHOLD,
        }
    }

    fn map(&mut self, pages: usize) -> usize {
        if let Some(span) = self.unmapped.best_fit(pages) {
            return self.unmapped.carve(span, pages);
        }
        self.mapped_end += pages;
        self.mapped_end - pages
    }

    fn unmap(&mut self, place: Place) {
        if place.pages > self.mmap_threshold && place.pages <= MOST_THRESHOLD {
            self.mmap_threshold = place.pages;
            self.trim_threshold = 2 * place.pages;
        }
        self.machine.purge(place.page, place.pages);
        self.machine.note_purge_call();
        self.unmapped.put_joined(place.page, place.pages);
    }

    fn trim_top(&mut self) {
        let extra = (self.brk - self.top).saturating_sub(TOP_PAD + 1);
        if extra > 0 {
            self.brk -= extra;
            self.machine.purge(self.brk, extra);
            self.machine.note_purge_call();
        }
    }
}

impl Policy for Glibc {
    fn alloc(&mut self, pages: usize) -> Option<Place> {
        if let Some(span) = self.free.best_fit(pages) {
            return Some(Place { page: self.free.carve(span, pages), pages });
        }
        if self.brk - self.top < pages {
            if pages >= self.mmap_threshold {
                return Some(Place { page: self.map(pages), pages });
            }
            self.brk = self.top + pages + TOP_PAD;
        }
        self.top += pages;
        Some(Place { page: self.top - pages, pages })
    }

    fn free(&mut self, place: Place) {
        if place.page >= MAPPED_FROM {
            return self.unmap(place);
        }
        let chunk = self.free.put_joined(place.page, place.pages);
        let mut size = chunk.pages;
        if chunk.end() == self.top {
            self.free.remove(chunk);
            self.top = chunk.start;
            size = self.brk - self.top;
        }
        if size >= CONSOLIDATION && self.brk - self.top >= self.trim_threshold {
            self.trim_top();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_follows_what_is_unmapped_up_to_32_mib() {
        let machine = Arc::new(Machine::default());
        let mut glibc = Glibc::new(Arc::clone(&machine));
        let mut round = |pages: usize| {
            let before = machine.counts().purge_calls;
            let place = glibc.alloc(pages).unwrap();
            machine.touch(place.page, pages);
            glibc.free(place);
            machine.counts().purge_calls - before
        };
        let mib = (1 << 20) / PAGE;
        assert_eq!(round(mib), 1, "mapped, and unmapped on free");
        assert_eq!(round(mib / 2), 0, "below the new threshold: from the heap");
        assert_eq!(round(33 * mib), 1);
        assert_eq!(round(33 * mib), 1, "too large to move the threshold");
        assert_eq!(round(32 * mib), 1);
        assert_eq!(round(31 * mib), 0, "kept, below the trim threshold");
    }
}
