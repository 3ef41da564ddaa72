//! gperftools' tcmalloc (2.10 to 2.16) with its defaults, from `src/page_heap.cc` and
//! `src/page_heap.h`.
//!
//! - `SearchFreeAndLargeLists`: the shortest span that fits of below `kMaxPages` (1 MiB), of each
//!   length a normal one before a returned one; above it `AllocLarge`, best fit over both kinds.
//! - `Delete` joins a span with neighbours of its kind: normal and returned spans stay apart. Then
//!   `IncrementalScavenge`: with `tcmalloc_release_rate` 1, one span goes back after each 1000 pages
//!   freed for each page that the last one had, at most 2^20 pages, and 2^18 where there was none.
//! - `ReleaseAtLeastNPages` goes round the lists by length, the span freed longest ago of each; of the
//!   large ones the shortest.
//! - `New` returns everything, once for each 128 MiB of growth, where a quarter of the heap is free.
//!
//! Its page is 8 KiB. Left out: central lists and thread caches (blocks here are pages).

use std::sync::Arc;

use super::{Place, Policy};
use crate::PAGE;
use crate::machine::Machine;
use crate::spans::{Span, Spans};

/// Machine pages in one of tcmalloc's.
const UNIT: usize = 8192 / PAGE;
/// tcmalloc pages from which on a span is large, and the least that the heap grows by.
const MAX_PAGES: usize = 128;
const MAX_RELEASE_DELAY: i64 = 1 << 20;
const DEFAULT_RELEASE_DELAY: i64 = 1 << 18;
const RELEASE_RATE: i64 = 1;
const FORCED_COALESCE_PAGES: usize = (128 << 20) / PAGE;

/// Lengths and addresses of spans are machine pages, multiples of [`UNIT`].
pub(super) struct Tcmalloc {
    machine: Arc<Machine>,
    normal: Spans,
    returned: Spans,
    end: usize,
    scavenge_counter: i64,
    release_index: usize,
}

impl Tcmalloc {
    pub(super) fn new(machine: Arc<Machine>) -> Self {
        Self {
            machine,
            normal: Spans::default(),
            returned: Spans::default(),
            end: 0,
            scavenge_counter: 0,
            release_index: MAX_PAGES,
        }
    }

    fn search(&mut self, pages: usize) -> Option<usize> {
        for length in (pages..MAX_PAGES * UNIT).step_by(UNIT) {
            if let Some(span) = self.normal.of_length(length).max_by_key(|span| span.age) {
                return Some(self.normal.carve(span, pages));
            }
            if let Some(span) = self.returned.of_length(length).max_by_key(|span| span.age) {
                return Some(self.returned.carve(span, pages));
            }
        }
        let least = pages.max(MAX_PAGES * UNIT);
        let key = |span: &Span| (span.pages, span.start);
        match (self.normal.best_fit(least), self.returned.best_fit(least)) {
            (Some(normal), Some(returned)) if key(&returned) < key(&normal) => {
                Some(self.returned.carve(returned, pages))
            }
            (Some(normal), _) => Some(self.normal.carve(normal, pages)),
            (None, Some(returned)) => Some(self.returned.carve(returned, pages)),
            (None, None) => None,
        }
    }

    fn delete(&mut self, start: usize, pages: usize) {
        self.normal.put_joined(start, pages);
        self.incremental_scavenge(pages / UNIT);
    }

    #[allow(clippy::cast_possible_wrap)] // pages of an address space
    fn incremental_scavenge(&mut self, pages: usize) {
        self.scavenge_counter -= pages as i64;
        if self.scavenge_counter >= 0 {
            return;
        }
        let released = self.release_at_least(1) as i64;
        self.scavenge_counter = if released == 0 {
            DEFAULT_RELEASE_DELAY
        } else {
            (1000 / RELEASE_RATE * released).min(MAX_RELEASE_DELAY)
        };
    }

    /// Returns how many of tcmalloc's pages went back.
    fn release_at_least(&mut self, pages: usize) -> usize {
        let mut released = 0;
        while released < pages && !self.normal.is_empty() {
            let span = if self.release_index >= MAX_PAGES {
                self.normal.best_fit(MAX_PAGES * UNIT)
            } else {
                self.normal.of_length(self.release_index * UNIT).min_by_key(|span| span.age)
            };
            self.release_index = (self.release_index + 1) % (MAX_PAGES + 1);
            if let Some(span) = span {
                self.normal.remove(span);
                self.machine.purge(span.start, span.pages);
                self.machine.note_purge_call();
                self.returned.put_joined(span.start, span.pages);
                released += span.pages / UNIT;
            }
        }
        released
    }

    #[allow(clippy::cast_possible_truncation)] // pages of an address space
    fn should_coalesce(&self, pages: usize) -> bool {
        let free = (self.normal.pages() + self.returned.pages()) as usize;
        !self.normal.is_empty()
            && !self.returned.is_empty()
            && free >= self.end / 4
            && self.end / FORCED_COALESCE_PAGES != (self.end + pages) / FORCED_COALESCE_PAGES
    }
}

impl Policy for Tcmalloc {
    fn alloc(&mut self, pages: usize) -> Option<Place> {
        let pages = pages.next_multiple_of(UNIT);
        let mut found = self.search(pages);
        if found.is_none() && self.should_coalesce(pages) {
            self.release_at_least(usize::MAX);
            found = self.search(pages);
        }
        if found.is_none() {
            let ask = pages.max(MAX_PAGES * UNIT);
            self.end += ask;
            self.delete(self.end - ask, ask);
            found = self.search(pages);
        }
        found.map(|page| Place { page, pages })
    }

    fn free(&mut self, place: Place) {
        self.delete(place.page, place.pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_span_goes_back_for_a_thousand_times_its_pages_freed() {
        let machine = Arc::new(Machine::default());
        let mut tcmalloc = Tcmalloc::new(Arc::clone(&machine));
        let mut round = || {
            let place = tcmalloc.alloc(16 * UNIT).unwrap();
            machine.touch(place.page, place.pages);
            tcmalloc.free(place);
        };
        (0..100_000).for_each(|_| round());
        let calls = machine.counts().purge_calls;
        assert!((80..=101).contains(&calls), "{calls} spans of 16 pages of 1.6 million freed");
    }
}
