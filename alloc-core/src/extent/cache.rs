//! Free pieces: the dirty ones, which are reused first because they are warm, and the clean ones.
//! A dirty piece has one age; pieces of different ages are not merged, so that a young neighbour
//! does not keep a cold piece from being purged. A request takes the lowest run of dirty pieces that
//! fits, whatever their ages, else the lowest run of free ones and in it the place with the most dirty
//! pages.
use core::cell::Cell;

use super::free_tree::{FreeTree, Kind};
use super::hugepage::Frames;
use super::{Age, Extent, ExtentId, Extents, State};
use crate::arena::slab::Bits;
use crate::extent::base::Table;
use crate::extent::page_map::Window;
use crate::os::{Errno, Os};

/// How many runs an aligned request looks at before it asks for one that fits however it lies.
const LOOKS: usize = 24;
/// The smallest slab, pages.
const LEAST_SLAB_PAGES: usize = 4;
/// How many pieces of a run are looked at for its dirtiest place.
const RUN_PIECES: usize = 64;

/// The parts of a heap that its lock does not cover.
pub(crate) struct Space<O> {
    pub(crate) os: O,
    pub(crate) window: Window,
    pub(crate) extents: Extents,
    pub(crate) frames: Frames,
    /// Bitmaps of slabs; which are in use is the arenas' affair.
    pub(crate) bits: Table<Bits>,
}

impl<O: Os> Space<O> {
    /// Sees to it that what describes `pages` pages, however they are cut, is mapped before they are:
    /// when address space is short, memory must not be there and its description not.
    pub(crate) fn ensure_records(&self, pages: usize) -> Result<(), Errno> {
        let records = pages / LEAST_SLAB_PAGES;
        self.extents.ensure(&self.os, u32::try_from(records).unwrap_or(u32::MAX))?;
        self.frames.ensure(&self.os, pages)?;
        self.bits.ensure(&self.os, records)
    }
}

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u32,
    pub(crate) pages: u32,
}

impl Run {
    pub(crate) fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// Pieces by when they became what they are.
#[derive(Clone, Copy)]
pub(crate) struct List {
    oldest: ExtentId,
    youngest: ExtentId,
    pub(crate) pages: u64,
    pub(crate) pieces: u64,
}

impl List {
    const fn new() -> Self {
        Self { oldest: 0, youngest: 0, pages: 0, pieces: 0 }
    }

    /// Since when the oldest piece is what it is.
    pub(crate) fn oldest_ms<O>(&self, sp: &Space<O>) -> Option<u64> {
        (self.oldest != 0).then(|| sp.extents.get(self.oldest).stamp_ms())
    }

    /// Pages that are what they are since `until_ms` or before.
    pub(crate) fn pages_until<O>(&self, sp: &Space<O>, until_ms: Option<u64>) -> u64 {
        let Some(until_ms) = until_ms else { return 0 };
        let mut pages = 0;
        let mut id = self.oldest;
        while id != 0 {
            let e = sp.extents.get(id);
            if e.stamp_ms() > until_ms {
                break;
            }
            pages += u64::from(e.pages());
            id = e.next();
        }
        pages
    }
}

/// The free pieces of a heap, and the records of its extents.
pub(crate) struct Cache {
    free: FreeTree,
    pub(crate) dirty: List,
    pub(crate) muzzy: List,
    /// Free pages of the kernel's reserved pools.
    pub(crate) fixed_pages: u64,
    pub(crate) clean_pages: u64,
    spare_records: ExtentId,
    spare_count: u32,
    next_record: ExtentId,
    /// Pieces freed within this many milliseconds of each other are merged.
    pub(crate) merge_ms: u64,
}

impl Cache {
    pub(crate) const fn new() -> Self {
        Self {
            free: FreeTree::new(),
            dirty: List::new(),
            muzzy: List::new(),
            fixed_pages: 0,
            clean_pages: 0,
            spare_records: 0,
            spare_count: 0,
            next_record: 1,
            merge_ms: 300,
        }
    }

    // Records.

    /// Sees to it that `n` records can be taken without failing.
    pub(crate) fn reserve_records<O: Os>(&mut self, sp: &Space<O>, n: u32) -> Result<(), Errno> {
        while self.spare_count < n {
            sp.extents.ensure(&sp.os, self.next_record + 1)?;
            let id = self.next_record;
            self.next_record += 1;
            self.drop_record(sp, id);
        }
        Ok(())
    }

    fn take_record<O>(&mut self, sp: &Space<O>) -> ExtentId {
        let id = self.spare_records;
        debug_assert!(id != 0, "records are reserved before they are needed");
        self.spare_records = sp.extents.get(id).next();
        self.spare_count -= 1;
        sp.extents.get(id).set_next(0);
        id
    }

    fn drop_record<O>(&mut self, sp: &Space<O>, id: ExtentId) {
        let e = sp.extents.get(id);
        e.set_state(State::Unused);
        e.set_next(self.spare_records);
        self.spare_records = id;
        self.spare_count += 1;
    }

    /// The ids that were ever handed out are below this.
    pub(crate) fn record_end(&self) -> ExtentId {
        self.next_record
    }

    /// Bytes of the records that were ever handed out.
    pub(crate) fn record_bytes(&self) -> usize {
        self.next_record as usize * size_of::<Extent>()
    }

    /// A record for `run`, entered in the owner map. Records were reserved.
    fn describe<O>(&mut self, sp: &Space<O>, run: Run, state: State, stamp_ms: u64) -> ExtentId {
        let id = self.take_record(sp);
        let e = sp.extents.get(id);
        e.set_state(state);
        e.set_stamp_ms(stamp_ms);
        e.set_code(0);
        set_run(sp, id, run);
        id
    }

    /// Enters pages that the window has just grown by, coalesced with a clean piece before them.
    pub(crate) fn add_fresh<O: Os>(&mut self, sp: &Space<O>, run: Run, skipped: u32) {
        if skipped > 0 {
            self.describe(
                sp,
                Run { start: run.start - skipped, pages: skipped },
                State::Foreign,
                0,
            );
        }
        let id = self.describe(sp, run, State::Clean, 0);
        self.put_clean(sp, id);
    }

    // Putting pieces in.

    /// Makes `id`, which is in no tree, a clean piece, coalesced with clean neighbours.
    pub(crate) fn put_clean<O: Os>(&mut self, sp: &Space<O>, id: ExtentId) {
        sp.extents.get(id).set_state(State::Clean);
        let id = self.absorb(sp, id, |e| e.state() == State::Clean);
        self.clean_pages += u64::from(sp.extents.get(id).pages());
    }

    /// Makes `id` a dirty piece freed at `now_ms`, coalesced with neighbours of about that age.
    pub(crate) fn put_dirty<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now_ms: u64) {
        let fixed = sp.frames.is_fixed(sp.extents.get(id).start());
        self.put_aged(sp, id, if fixed { Age::Fixed } else { Age::Dirty }, now_ms);
    }

    /// Makes `id` a muzzy piece, coalesced with neighbours of about that age.
    pub(crate) fn put_muzzy<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now_ms: u64) {
        self.put_aged(sp, id, Age::Muzzy, now_ms);
    }

    fn put_aged<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, age: Age, now_ms: u64) {
        sp.extents.get(id).set_state(State::Dirty);
        let merge_ms = self.merge_ms;
        // All that was ever joined counts: a small block that comes and goes beside a large piece must
        // not keep it young.
        let spread_ms = Cell::new(0);
        let id = self.absorb(sp, id, |n| {
            let since_ms = now_ms.saturating_sub(n.stamp_ms()) + n.spread_ms();
            let fits = n.state() == State::Dirty && n.age() == age && since_ms <= merge_ms;
            if fits {
                spread_ms.set(spread_ms.get().max(since_ms));
            }
            fits
        });
        let e = sp.extents.get(id);
        e.set_age(age);
        e.set_stamp_ms(now_ms);
        e.set_spread_ms(spread_ms.get());
        let youngest = self.list(age).map_or(0, |list| list.youngest);
        self.enlist(sp, id, youngest);
    }

    fn list(&mut self, age: Age) -> Option<&mut List> {
        match age {
            Age::Dirty => Some(&mut self.dirty),
            Age::Muzzy => Some(&mut self.muzzy),
            Age::Fixed => None,
        }
    }

    /// Puts a dirty piece in its list, after `after`.
    fn enlist<O>(&mut self, sp: &Space<O>, id: ExtentId, after: ExtentId) {
        let e = sp.extents.get(id);
        let pages = u64::from(e.pages());
        let Some(list) = self.list(e.age()) else {
            self.fixed_pages += pages;
            return;
        };
        let before = if after == 0 { list.oldest } else { sp.extents.get(after).next() };
        e.set_prev(after);
        e.set_next(before);
        if after == 0 {
            list.oldest = id
        } else {
            sp.extents.get(after).set_next(id)
        }
        if before == 0 {
            list.youngest = id
        } else {
            sp.extents.get(before).set_prev(id)
        }
        list.pages += pages;
        list.pieces += 1;
    }

    /// Puts `id` in the tree, or its pages into a neighbour where `fits` says so. Returns the piece that
    /// has them now, which is in no list.
    fn absorb<O>(
        &mut self,
        sp: &Space<O>,
        id: ExtentId,
        fits: impl Fn(&Extent) -> bool,
    ) -> ExtentId {
        let mut run = sp.extents.get(id).run();
        let fitting = |id: ExtentId| if id != 0 && fits(sp.extents.get(id)) { id } else { 0 };
        let (left, right) = (fitting(left_of(sp, run.start)), fitting(right_of(sp, run.end())));
        if left == 0 && right == 0 {
            self.free.insert(&sp.extents, id);
            return id;
        }
        self.drop_record(sp, id);
        if right != 0 {
            run.pages += sp.extents.get(right).pages();
            self.unlist(sp, right);
        }
        if left != 0 {
            let pages = sp.extents.get(left).pages();
            run = Run { start: run.start - pages, pages: run.pages + pages };
            self.unlist(sp, left);
            if right != 0 {
                self.free.remove(&sp.extents, right);
                self.drop_record(sp, right);
            }
        }
        let whole = if left == 0 { right } else { left };
        set_run(sp, whole, run);
        self.free.resized(&sp.extents, whole);
        whole
    }

    /// Counts `pages` pages of a piece no longer as free.
    fn lessen(&mut self, e: &Extent, pages: u32) {
        let pages = u64::from(pages);
        if e.state() == State::Clean {
            self.clean_pages -= pages;
            return;
        }
        match self.list(e.age()) {
            Some(list) => list.pages -= pages,
            None => self.fixed_pages -= pages,
        }
    }

    /// Takes a free piece out of its list.
    fn unlist<O>(&mut self, sp: &Space<O>, id: ExtentId) {
        let e = sp.extents.get(id);
        self.lessen(e, e.pages());
        if e.state() == State::Clean {
            return;
        }
        let Some(list) = self.list(e.age()) else { return };
        list.pieces -= 1;
        let (prev, next) = (e.prev(), e.next());
        if prev == 0 {
            list.oldest = next
        } else {
            sp.extents.get(prev).set_next(next)
        }
        if next == 0 {
            list.youngest = prev
        } else {
            sp.extents.get(next).set_prev(prev)
        }
        e.set_prev(0);
        e.set_next(0);
    }

    // Taking pieces out.

    /// Takes `pages` pages whose start is a multiple of `align` pages from the free pieces. Two
    /// records are reserved. Returns the extent and how many of its pages were clean.
    pub(crate) fn take<O: Os>(
        &mut self,
        sp: &Space<O>,
        pages: u32,
        align: u32,
    ) -> Option<(ExtentId, u32)> {
        let (first, start) = match self.fit(sp, Kind::Dirty, pages, align) {
            Some(found) => found,
            None => {
                let (first, start) = self.fit(sp, Kind::Free, pages, align)?;
                (first, dirtiest(sp, first, Run { start, pages }, align))
            }
        };
        Some(self.cut(sp, piece_holding(sp, first, start), Run { start, pages }))
    }

    /// As [`Self::take`], of dirty pages alone.
    pub(crate) fn take_dirty<O: Os>(
        &mut self,
        sp: &Space<O>,
        pages: u32,
        align: u32,
    ) -> Option<ExtentId> {
        let (first, start) = self.fit(sp, Kind::Dirty, pages, align)?;
        Some(self.cut(sp, piece_holding(sp, first, start), Run { start, pages }).0)
    }

    /// The lowest run of `kind` that holds `pages` pages at `align`: its first piece, and the page
    /// where they start.
    fn fit<O>(&self, sp: &Space<O>, kind: Kind, pages: u32, align: u32) -> Option<(ExtentId, u32)> {
        let mut from = 0;
        for look in 0..=LOOKS {
            let sure = if look < LOOKS { pages } else { pages.checked_add(align - 1)? };
            let run = self.free.lowest(&sp.extents, kind, sure, from)?;
            let start = align_up(sp, run.start, align)?;
            from = run_end(sp, kind, run, start + pages);
            if start + pages <= from {
                return Some((sp.window.owner(run.start), start));
            }
        }
        None
    }

    /// Length of the run of free pieces that ends at page `end`, pages.
    pub(crate) fn trail<O>(&self, sp: &Space<O>, end: u32) -> u32 {
        self.free.trail(&sp.extents, end)
    }

    /// Cuts `run` out of the free pieces that cover it, the first of which is `first`. Two records
    /// are reserved. Returns the extent, with the age of the first piece, and how many of its pages
    /// were clean.
    fn cut<O: Os>(&mut self, sp: &Space<O>, first: ExtentId, run: Run) -> (ExtentId, u32) {
        let e = sp.extents.get(first);
        let (age, stamp_ms, spread_ms) = (e.age(), e.stamp_ms(), e.spread_ms());
        let (mut clean, mut id) = (0, first);
        loop {
            let e = sp.extents.get(id);
            let (start, end) = (e.start().max(run.start), e.end());
            let part = Run { start, pages: end.min(run.end()) - start };
            if e.state() == State::Clean {
                clean += part.pages;
                sp.frames.backed(part);
            }
            self.carve(sp, id, part);
            if end >= run.end() {
                break;
            }
            id = sp.window.owner(end);
        }
        let taken = self.describe(sp, run, State::Unused, stamp_ms);
        sp.extents.get(taken).set_age(age);
        sp.extents.get(taken).set_spread_ms(spread_ms);
        (taken, clean)
    }

    /// Takes `part` out of piece `id`. What is left stays where it is in the tree and in the list; a
    /// second rest comes after the first.
    fn carve<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, part: Run) {
        let e = sp.extents.get(id);
        let piece = e.run();
        if part == piece {
            self.unlist(sp, id);
            self.free.remove(&sp.extents, id);
            self.drop_record(sp, id);
            return;
        }
        let head = Run { start: piece.start, pages: part.start - piece.start };
        let tail = Run { start: part.end(), pages: piece.end() - part.end() };
        let rest = if head.pages > 0 { head } else { tail };
        self.lessen(e, piece.pages - rest.pages);
        set_run(sp, id, rest);
        self.free.resized(&sp.extents, id);
        if head.pages == 0 || tail.pages == 0 {
            return;
        }
        let second = self.describe(sp, tail, e.state(), e.stamp_ms());
        self.free.insert(&sp.extents, second);
        if e.state() == State::Clean {
            self.clean_pages += u64::from(tail.pages);
            return;
        }
        sp.extents.get(second).set_age(e.age());
        sp.extents.get(second).set_spread_ms(e.spread_ms());
        self.enlist(sp, second, id);
    }

    /// Grows `id` by `extra` pages into the free pieces after it, if they suffice. Two records are
    /// reserved.
    /// Returns how many of the new pages were clean; `None` where they don't suffice.
    pub(crate) fn extend<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, extra: u32) -> Option<u32> {
        let e = sp.extents.get(id);
        let start = e.end();
        let mut end = start;
        for _ in 0..RUN_PIECES {
            if end - start >= extra {
                break;
            }
            let next = right_of(sp, end);
            if next == 0 || !sp.extents.get(next).is_free() {
                return None;
            }
            end = sp.extents.get(next).end();
        }
        if end - start < extra {
            return None;
        }
        let first = right_of(sp, start);
        let (more, clean) = self.cut(sp, first, Run { start, pages: extra });
        self.drop_record(sp, more);
        set_run(sp, id, Run { start: e.start(), pages: e.pages() + extra });
        Some(clean)
    }

    /// Cuts `id` down to `keep` pages; the rest becomes an extent of its own. One record is reserved.
    pub(crate) fn split_tail<O>(&mut self, sp: &Space<O>, id: ExtentId, keep: u32) -> ExtentId {
        let e = sp.extents.get(id);
        let tail = Run { start: e.start() + keep, pages: e.pages() - keep };
        set_run(sp, id, Run { start: e.start(), pages: keep });
        self.describe(sp, tail, State::Large, 0)
    }

    /// Makes extents in use that adjoin, in the order of their addresses, one: the first.
    pub(crate) fn join<O>(&mut self, sp: &Space<O>, ids: &[ExtentId]) {
        let [first, .., last] = *ids else { return };
        let start = sp.extents.get(first).start();
        set_run(sp, first, Run { start, pages: sp.extents.get(last).end() - start });
        ids[1..].iter().for_each(|&id| self.drop_record(sp, id));
    }

    // Purging.

    /// Takes the next part of `age`'s pieces to be purged, in the order of their ages: at most `pages`
    /// of it, from `cursor` on, which moves on (0 at first), and none that is younger than `until_ms`.
    /// Parts that a huge page is kept for are passed over unless it may be `split`. Two records are
    /// reserved.
    pub(crate) fn take_cold<O: Os>(
        &mut self,
        sp: &Space<O>,
        age: Age,
        cursor: &mut ExtentId,
        (pages, until_ms, split): (u32, u64, bool),
    ) -> Option<ExtentId> {
        let mut id = match *cursor {
            0 => self.list(age)?.oldest,
            id => id,
        };
        while id != 0 {
            let e = sp.extents.get(id);
            if e.stamp_ms() > until_ms {
                break;
            }
            let all = e.run();
            let part = if split {
                Some(Run { start: all.start, pages: all.pages.min(pages) })
            } else {
                sp.frames.cold_part(all, pages)
            };
            let (prev, next) = (e.prev(), e.next());
            if part.is_some_and(|run| run.pages == 0) {
                // It goes when more is due: whole huge pages first.
                break;
            }
            if let Some(run) = part {
                let (taken, _) = self.cut(sp, id, run);
                sp.extents.get(taken).set_state(State::Purging);
                // What is left of the piece comes next.
                let rest =
                    if prev == 0 { self.list(age)?.oldest } else { sp.extents.get(prev).next() };
                *cursor = if run.start > all.start { next } else { rest };
                return Some(taken);
            }
            id = next;
        }
        None
    }
}

/// Makes `run` the pages of `id`, in the record and in the owner map.
fn set_run<O>(sp: &Space<O>, id: ExtentId, run: Run) {
    let e = sp.extents.get(id);
    e.set_start(run.start);
    e.set_pages(run.pages);
    sp.window.set_owner(run.start, id);
    sp.window.set_owner(run.end() - 1, id);
}

/// The extent before page `start`, or 0.
fn left_of<O>(sp: &Space<O>, start: u32) -> ExtentId {
    if start == 0 { 0 } else { sp.window.owner(start - 1) }
}

/// The extent that starts at page `end`, or 0.
fn right_of<O>(sp: &Space<O>, end: u32) -> ExtentId {
    if end >= sp.window.pages() { 0 } else { sp.window.owner(end) }
}

/// The piece that holds `page`, among `id` and those above it, which adjoin.
fn piece_holding<O>(sp: &Space<O>, mut id: ExtentId, page: u32) -> ExtentId {
    while sp.extents.get(id).end() <= page {
        id = right_of(sp, sp.extents.get(id).end());
    }
    id
}

/// The first page at or after `page` whose address is a multiple of `align` pages.
fn align_up<O>(sp: &Space<O>, page: u32, align: u32) -> Option<u32> {
    let base = sp.window.address(0) >> crate::extent::page_map::LG_PAGE;
    let aligned = (base + page as usize).next_multiple_of(align as usize) - base;
    u32::try_from(aligned).ok()
}

/// Where `run`, which may go on, ends; no more than `enough` has to be known.
fn run_end<O>(sp: &Space<O>, kind: Kind, run: Run, enough: u32) -> u32 {
    let mut end = run.end();
    while end < enough {
        let next = right_of(sp, end);
        let goes_on = next != 0
            && match sp.extents.get(next).state() {
                State::Dirty => true,
                State::Clean => kind == Kind::Free,
                _ => false,
            };
        if !goes_on {
            break;
        }
        end = sp.extents.get(next).end();
    }
    end
}

/// The start that gives `lowest`, the lowest place in the run of free pieces from `first` on, the most
/// dirty pages.
fn dirtiest<O>(sp: &Space<O>, first: ExtentId, lowest: Run, align: u32) -> u32 {
    let mut dirty = [Run { start: 0, pages: 0 }; RUN_PIECES];
    let (mut len, mut end, mut id) = (0, 0, first);
    while len < RUN_PIECES && id != 0 && sp.extents.get(id).is_free() {
        let e = sp.extents.get(id);
        end = e.end();
        if e.state() == State::Dirty {
            dirty[len] = Run { start: e.start(), pages: e.pages() };
            len += 1;
        }
        id = right_of(sp, end);
    }
    let dirty = &dirty[..len];
    let pages_in = |start: u32| -> u32 {
        let overlap =
            |d: &Run| d.end().min(start + lowest.pages).saturating_sub(d.start.max(start));
        dirty.iter().map(overlap).sum()
    };
    let Some(latest) = end.checked_sub(lowest.pages) else { return lowest.start };
    let (mut best, mut most) = (lowest.start, pages_in(lowest.start));
    for wanted in dirty.iter().flat_map(|d| [d.start, d.end().saturating_sub(lowest.pages)]) {
        let wanted = align_up(sp, wanted.min(latest), align);
        if let Some(start) = wanted.filter(|&start| start >= lowest.start && start <= latest)
            && pages_in(start) > most
        {
            (best, most) = (start, pages_in(start));
        }
    }
    best
}
