//! Nothing is ever given back: best fit among all free runs, joined with their neighbours. The floor
//! of faults for a simple placement, and the ceiling of memory.

use super::{Place, Policy};
use crate::spans::Spans;

#[derive(Debug, Default)]
pub(super) struct Never {
    free: Spans,
    end: usize,
}

impl Policy for Never {
    fn alloc(&mut self, pages: usize) -> Option<Place> {
        if let Some(span) = self.free.best_fit(pages) {
            return Some(Place { page: self.free.carve(span, pages), pages });
        }
        // The last run and what is missing after it.
        let last = self.free.ending_at(self.end);
        let page = last.map_or(self.end, |last| last.start);
        if let Some(last) = last {
            self.free.remove(last);
        }
        self.end = page + pages;
        Some(Place { page, pages })
    }

    fn free(&mut self, place: Place) {
        self.free.put_joined(place.page, place.pages);
    }
}
