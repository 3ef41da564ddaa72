//! Free pieces by address, searched for the lowest run that is long enough. A run is a stretch of
//! adjoining pieces, whatever their ages: of dirty pieces alone, or of dirty and clean ones. Each
//! node sums up its subtree (the runs at its two ends and the longest), so that a search goes down
//! one path. A treap balanced by a hash of the record's index, so that a piece that is cut or grows stays
//! where it is.
//!
//! Lowest first keeps a program's memory in few pages, and what it does not need any more at the
//! upper end, where it becomes cold together.
use core::ops::ControlFlow;

use super::cache::Run;
use super::tree::priority;
use super::{Extent, ExtentId, Extents, State};
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// What runs consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Dirty pieces alone.
    Dirty,
    /// Dirty and clean pieces.
    Free,
}

/// The runs of one kind in a stretch of pieces, pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Runs {
    /// The one that starts with the stretch.
    lead: u32,
    /// The one that ends with it.
    trail: u32,
    longest: u32,
}

impl Runs {
    fn of(pages: u32) -> Self {
        Self { lead: pages, trail: pages, longest: pages }
    }
}

/// A stretch of pieces from page `first` to the page before `end`; gaps may lie within. Pieces of
/// no length are the empty stretch, which fits anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    first: u32,
    end: u32,
    dirty: Runs,
    free: Runs,
}

impl Sum {
    fn of(e: &Extent) -> Self {
        let dirty = if e.state() == State::Dirty { e.pages() } else { 0 };
        Self { first: e.start(), end: e.end(), dirty: Runs::of(dirty), free: Runs::of(e.pages()) }
    }

    fn runs(&self, kind: Kind) -> Runs {
        match kind {
            Kind::Dirty => self.dirty,
            Kind::Free => self.free,
        }
    }

    /// This stretch and `next`, which lies above it.
    fn and(self, next: Self) -> Self {
        if self.first == self.end {
            return next;
        }
        if next.first == next.end {
            return self;
        }
        let join = |a: Runs, b: Runs| {
            let meet = if self.end == next.first { a.trail + b.lead } else { 0 };
            let whole = |runs: Runs, s: &Self| runs.lead == s.end - s.first;
            Runs {
                lead: if meet > 0 && whole(a, &self) { meet } else { a.lead },
                trail: if meet > 0 && whole(b, &next) { meet } else { b.trail },
                longest: a.longest.max(b.longest).max(meet),
            }
        };
        Self {
            first: self.first,
            end: next.end,
            dirty: join(self.dirty, next.dirty),
            free: join(self.free, next.free),
        }
    }
}

/// A piece's node. Atomics, since a table's entries are shared; all use is under the heap's lock.
#[repr(C)]
pub(crate) struct Node {
    left: AtomicU32,
    right: AtomicU32,
    /// A [`Sum`] of the subtree.
    sum: [AtomicU32; 8],
}

impl Node {
    fn sum(&self) -> Sum {
        let [first, end, d0, d1, d2, f0, f1, f2] =
            self.sum.each_ref().map(|word| word.load(Relaxed));
        Sum {
            first,
            end,
            dirty: Runs { lead: d0, trail: d1, longest: d2 },
            free: Runs { lead: f0, trail: f1, longest: f2 },
        }
    }

    fn set_sum(&self, s: Sum) {
        let (d, f) = (s.dirty, s.free);
        let words = [s.first, s.end, d.lead, d.trail, d.longest, f.lead, f.trail, f.longest];
        for (word, value) in self.sum.iter().zip(words) {
            word.store(value, Relaxed);
        }
    }
}

/// The tree.
pub(crate) struct FreeTree {
    root: ExtentId,
}

impl FreeTree {
    pub(crate) const fn new() -> Self {
        Self { root: 0 }
    }

    pub(crate) fn insert(&mut self, extents: &Extents, id: ExtentId) {
        self.root = insert(extents, self.root, id);
    }

    /// Takes `id` out; it must be in the tree.
    pub(crate) fn remove(&mut self, extents: &Extents, id: ExtentId) {
        self.root = remove(extents, self.root, id);
    }

    /// To be called when `id`, which is in the tree, was cut or has grown, but no piece passed another.
    pub(crate) fn resized(&self, extents: &Extents, id: ExtentId) {
        resized(extents, self.root, id);
    }

    /// The lowest run of at least `pages` pages that starts at or after page `from`, which lies
    /// within no run, and how long it is at least.
    pub(crate) fn lowest(
        &self,
        extents: &Extents,
        kind: Kind,
        pages: u32,
        from: u32,
    ) -> Option<Run> {
        match search(extents, self.root, (kind, pages, from), Run { start: from, pages: 0 }) {
            ControlFlow::Break(run) => Some(run),
            ControlFlow::Continue(_) => None,
        }
    }

    /// Length of the run of free pieces that ends at page `end`, pages.
    pub(crate) fn trail(&self, extents: &Extents, end: u32) -> u32 {
        if self.root == 0 {
            return 0;
        }
        let s = extents.node(self.root).sum();
        if s.end == end { s.free.trail } else { 0 }
    }
}

fn sum(extents: &Extents, id: ExtentId) -> Sum {
    if id == 0 { Sum::default() } else { extents.node(id).sum() }
}

/// Sums `id`'s subtree up again from its children.
fn pull(extents: &Extents, id: ExtentId) {
    let node = extents.node(id);
    let left = sum(extents, node.left.load(Relaxed));
    let right = sum(extents, node.right.load(Relaxed));
    node.set_sum(left.and(Sum::of(extents.get(id))).and(right));
}

fn set_children(extents: &Extents, id: ExtentId, left: ExtentId, right: ExtentId) {
    let node = extents.node(id);
    node.left.store(left, Relaxed);
    node.right.store(right, Relaxed);
    pull(extents, id);
}

fn children(extents: &Extents, id: ExtentId) -> (ExtentId, ExtentId) {
    let node = extents.node(id);
    (node.left.load(Relaxed), node.right.load(Relaxed))
}

fn resized(extents: &Extents, at: ExtentId, id: ExtentId) {
    debug_assert!(at != 0, "extent {id} is not in the tree");
    if at == 0 {
        return;
    }
    if at != id {
        let (left, right) = children(extents, at);
        let below = extents.get(id).start() < extents.get(at).start();
        resized(extents, if below { left } else { right }, id);
    }
    pull(extents, at);
}

fn insert(extents: &Extents, at: ExtentId, id: ExtentId) -> ExtentId {
    if at == 0 || priority(id) > priority(at) {
        let (left, right) = split(extents, at, extents.get(id).start());
        set_children(extents, id, left, right);
        return id;
    }
    let (left, right) = children(extents, at);
    if extents.get(id).start() < extents.get(at).start() {
        set_children(extents, at, insert(extents, left, id), right);
    } else {
        set_children(extents, at, left, insert(extents, right, id));
    }
    at
}

fn remove(extents: &Extents, at: ExtentId, id: ExtentId) -> ExtentId {
    debug_assert!(at != 0, "extent {id} is not in the tree");
    if at == 0 {
        return 0;
    }
    let (left, right) = children(extents, at);
    if at == id {
        return join(extents, left, right);
    }
    if extents.get(id).start() < extents.get(at).start() {
        set_children(extents, at, remove(extents, left, id), right);
    } else {
        set_children(extents, at, left, remove(extents, right, id));
    }
    at
}

/// Splits the subtree at `at` into the pieces below page `start` and those above.
fn split(extents: &Extents, at: ExtentId, start: u32) -> (ExtentId, ExtentId) {
    if at == 0 {
        return (0, 0);
    }
    let (left, right) = children(extents, at);
    if extents.get(at).start() < start {
        let (below, above) = split(extents, right, start);
        set_children(extents, at, left, below);
        (at, above)
    } else {
        let (below, above) = split(extents, left, start);
        set_children(extents, at, above, right);
        (below, at)
    }
}

/// Joins two subtrees, all pieces of `left` below those of `right`.
fn join(extents: &Extents, left: ExtentId, right: ExtentId) -> ExtentId {
    if left == 0 || right == 0 {
        return left | right;
    }
    if priority(left) > priority(right) {
        let (outer, inner) = children(extents, left);
        set_children(extents, left, outer, join(extents, inner, right));
        left
    } else {
        let (inner, outer) = children(extents, right);
        set_children(extents, right, join(extents, left, inner), outer);
        right
    }
}

/// Searches the subtree at `at` for (kind, pages, from). `open` is the run that may go on in it;
/// the result is the run found, or the one that may go on above.
fn search(
    extents: &Extents,
    at: ExtentId,
    want: (Kind, u32, u32),
    open: Run,
) -> ControlFlow<Run, Run> {
    let (kind, pages, from) = want;
    let s = sum(extents, at);
    if at == 0 || s.end <= from {
        return ControlFlow::Continue(open);
    }
    if s.first >= from && s.runs(kind).longest < pages {
        return extend(s, want, open);
    }
    let (left, right) = children(extents, at);
    let open = search(extents, left, want, open)?;
    let e = extents.get(at);
    let open = if e.start() >= from { extend(Sum::of(e), want, open)? } else { open };
    search(extents, right, want, open)
}

/// Adds a stretch, none of whose own runs but the first may be long enough, to the open run.
fn extend(s: Sum, (kind, pages, _): (Kind, u32, u32), open: Run) -> ControlFlow<Run, Run> {
    let runs = s.runs(kind);
    let open = if open.end() == s.first { open } else { Run { start: s.first, pages: 0 } };
    let first = Run { start: open.start, pages: open.pages + runs.lead };
    if first.pages >= pages {
        return ControlFlow::Break(first);
    }
    if runs.lead == s.end - s.first {
        return ControlFlow::Continue(first);
    }
    ControlFlow::Continue(Run { start: s.end - runs.trail, pages: runs.trail })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::fake::FakeKernel;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    /// The runs by looking at every piece.
    fn runs(pieces: &BTreeMap<u32, (u32, State)>, kind: Kind) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (&start, &(pages, state)) in pieces {
            if kind == Kind::Dirty && state != State::Dirty {
                continue;
            }
            match runs.last_mut().filter(|run| run.end() == start) {
                Some(run) => run.pages += pages,
                None => runs.push(Run { start, pages }),
            }
        }
        runs
    }

    #[test]
    fn the_lowest_run_is_found_among_pieces_that_come_and_go() {
        let os = FakeKernel::new(4096);
        let extents = Extents::new();
        let bytes = 1 << 20;
        extents.place(os.window(2 * bytes), bytes);
        extents.ensure(&os, 1000).unwrap();
        let (mut tree, mut pieces) = (FreeTree::new(), BTreeMap::new());
        let mut x = 9u32;
        let mut random = |below: u32| {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x % below
        };
        // A piece's place is a multiple of ten pages, so that some adjoin and some do not.
        for _ in 0..20_000 {
            let slot = random(300);
            let (id, start) = (slot + 1, slot * 10);
            if let Some(&(pages, state)) = pieces.get(&start)
                && pages > 1
                && random(2) == 0
            {
                let pages = 1 + random(pages - 1);
                extents.get(id).set_pages(pages);
                tree.resized(&extents, id);
                pieces.insert(start, (pages, state));
            } else if pieces.remove(&start).is_some() {
                tree.remove(&extents, id);
            } else {
                let pages = if random(3) == 0 { 1 + random(9) } else { 10 };
                let state = if random(2) == 0 { State::Dirty } else { State::Clean };
                let e = extents.get(id);
                e.set_start(start);
                e.set_pages(pages);
                e.set_state(state);
                tree.insert(&extents, id);
                pieces.insert(start, (pages, state));
            }
            for kind in [Kind::Dirty, Kind::Free] {
                let all = runs(&pieces, kind);
                let skipped = random(4) as usize;
                let from =
                    if skipped == 0 { 0 } else { all.get(skipped - 1).map_or(0, |r| r.end()) };
                let pages = 1 + random(60);
                let expected = all.iter().find(|r| r.start >= from && r.pages >= pages);
                let found = tree.lowest(&extents, kind, pages, from);
                assert_eq!(found.map(|r| r.start), expected.map(|r| r.start));
                if let Some((found, run)) = found.zip(expected) {
                    assert!((pages..=run.pages).contains(&found.pages));
                }
                let last = all.last().copied().unwrap_or(Run { start: 0, pages: 0 });
                if kind == Kind::Free {
                    assert_eq!(tree.trail(&extents, last.end()), last.pages);
                    assert_eq!(tree.trail(&extents, last.end() + 1), 0);
                }
            }
        }
    }
}
