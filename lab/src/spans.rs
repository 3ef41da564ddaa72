//! Free runs of pages, by address, by size and by age: what the models have instead of an allocator's
//! own lists and trees.
//!
//! Invariant: the three maps hold the same spans, and no two spans overlap.

use std::collections::{BTreeMap, BTreeSet};

/// A free run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) pages: usize,
    /// When it was put in: a count, not a time.
    pub(crate) age: u64,
}

impl Span {
    pub(crate) fn end(self) -> usize {
        self.start + self.pages
    }
}

#[derive(Debug, Default)]
pub(crate) struct Spans {
    by_start: BTreeMap<usize, Span>,
    by_size: BTreeSet<(usize, usize)>,
    by_age: BTreeMap<u64, usize>,
    pages: u64,
    next_age: u64,
}

impl Spans {
    /// Pages in all.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// Puts a run in as it is, the youngest.
    pub(crate) fn put(&mut self, start: usize, pages: usize) {
        if pages == 0 {
            return;
        }
        let span = Span { start, pages, age: self.next_age };
        self.next_age += 1;
        self.by_start.insert(start, span);
        self.by_size.insert((pages, start));
        self.by_age.insert(span.age, start);
        self.pages += pages as u64;
    }

    /// Puts a run in joined with its neighbours. Returns the whole.
    pub(crate) fn put_joined(&mut self, mut start: usize, mut pages: usize) -> Span {
        if let Some(left) = self.ending_at(start) {
            self.remove(left);
            start = left.start;
            pages += left.pages;
        }
        if let Some(right) = self.starting_at(start + pages) {
            self.remove(right);
            pages += right.pages;
        }
        self.put(start, pages);
        self.by_start[&start]
    }

    pub(crate) fn remove(&mut self, span: Span) {
        self.by_start.remove(&span.start);
        self.by_size.remove(&(span.pages, span.start));
        self.by_age.remove(&span.age);
        self.pages -= span.pages as u64;
    }

    pub(crate) fn starting_at(&self, start: usize) -> Option<Span> {
        self.by_start.get(&start).copied()
    }

    pub(crate) fn ending_at(&self, end: usize) -> Option<Span> {
        self.by_start.range(..end).next_back().map(|(_, span)| *span).filter(|s| s.end() == end)
    }

    /// The smallest that has `pages` pages, of those the first by address.
    pub(crate) fn best_fit(&self, pages: usize) -> Option<Span> {
        self.by_size.range((pages, 0)..).next().map(|&(_, start)| self.by_start[&start])
    }

    /// Those of exactly this length.
    pub(crate) fn of_length(&self, pages: usize) -> impl Iterator<Item = Span> + '_ {
        self.by_size.range((pages, 0)..=(pages, usize::MAX)).map(|(_, start)| self.by_start[start])
    }

    pub(crate) fn oldest(&self) -> Option<Span> {
        self.by_age.first_key_value().map(|(_, start)| self.by_start[start])
    }

    /// Takes the first `pages` pages of `span`; the rest stays, as the youngest.
    pub(crate) fn carve(&mut self, span: Span, pages: usize) -> usize {
        self.remove(span);
        self.put(span.start + pages, span.pages - pages);
        span.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_split_and_keep_their_order() {
        let mut spans = Spans::default();
        spans.put_joined(0, 10);
        spans.put_joined(20, 5);
        spans.put_joined(40, 7);
        assert_eq!(spans.best_fit(6).unwrap().start, 40);
        assert_eq!(spans.oldest().unwrap().start, 0);
        let whole = spans.put_joined(10, 10);
        assert_eq!((whole.start, whole.pages), (0, 25));
        assert_eq!(spans.oldest().unwrap().start, 40, "what is joined is young");
        assert_eq!(spans.carve(whole, 5), 0);
        assert_eq!(spans.starting_at(5).unwrap().pages, 20);
        assert_eq!(spans.ending_at(25).unwrap().start, 5);
        assert_eq!(spans.ending_at(24), None);
        assert_eq!((spans.pages(), spans.of_length(20).count()), (27, 1));
        let last = spans.best_fit(20).unwrap();
        spans.carve(last, 20);
        assert_eq!(spans.pages(), 7);
        assert!(!spans.is_empty() && spans.best_fit(8).is_none());
    }
}
