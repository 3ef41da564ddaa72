//! Free pieces: the dirty ones, which are reused first because they are warm, and the clean ones.
//! A dirty piece has one age; pieces of different ages are not merged, so that a young neighbour
//! does not keep a cold piece from being purged. Contiguity isn't lost by that: where no single
//! piece fits, a run of adjoining free pieces is taken together.
use super::tree::Tree;
use super::{Extent, ExtentId, Extents, State};
use crate::arena::slab::Bits;
use crate::extent::base::Table;
use crate::extent::page_map::Window;
use crate::os::{Errno, Os};

/// How many candidates an aligned or assembled request looks at before it takes the simple way.
const LOOKS: usize = 24;
/// The smallest slab, pages.
const LEAST_SLAB_PAGES: usize = 4;
/// Longest run of adjoining pieces that one request takes together.
const RUN_PIECES: usize = 64;

/// The parts of a heap that its lock does not cover.
pub(crate) struct Space<O> {
    pub(crate) os: O,
    pub(crate) window: Window,
    pub(crate) extents: Extents,
    /// Bitmaps of slabs; which are in use is the arenas' affair.
    pub(crate) bits: Table<Bits>,
}

impl<O: Os> Space<O> {
    /// Sees to it that what describes `pages` pages, however they are cut, is mapped before they are:
    /// when address space is short, memory must not be there and its description not.
    pub(crate) fn ensure_records(&self, pages: usize) -> Result<(), Errno> {
        let records = pages / LEAST_SLAB_PAGES;
        self.extents.ensure(&self.os, u32::try_from(records).unwrap_or(u32::MAX))?;
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
    fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// The free pieces of a heap, and the records of its extents.
pub(crate) struct Cache {
    /// Dirty pieces freed a moment ago, and the others. The young are taken first, so that a program
    /// that needs less than it did goes round in few pages, and the others become cold.
    young: Tree,
    old: Tree,
    clean: Tree,
    oldest: ExtentId,
    youngest: ExtentId,
    pub(crate) dirty_pages: u64,
    pub(crate) dirty_pieces: u64,
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
            young: Tree::by_size(),
            old: Tree::by_size(),
            clean: Tree::by_size(),
            oldest: 0,
            youngest: 0,
            dirty_pages: 0,
            dirty_pieces: 0,
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

    /// Makes `id` a clean piece, coalesced with clean neighbours.
    pub(crate) fn put_clean<O: Os>(&mut self, sp: &Space<O>, id: ExtentId) {
        sp.extents.get(id).set_state(State::Clean);
        self.absorb(sp, id, |e| e.state() == State::Clean);
        self.clean_pages += u64::from(sp.extents.get(id).pages());
        self.clean.insert(&sp.extents, id);
    }

    /// Makes `id` a dirty piece freed at `now_ms`, coalesced with neighbours of about that age.
    pub(crate) fn put_dirty<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now_ms: u64) {
        let e = sp.extents.get(id);
        e.set_state(State::Dirty);
        e.set_stamp_ms(now_ms);
        e.set_old(false);
        let merge_ms = self.merge_ms;
        self.absorb(sp, id, |n| {
            n.state() == State::Dirty && now_ms.saturating_sub(n.stamp_ms()) <= merge_ms
        });
        self.link_dirty(sp, id, self.youngest);
    }

    /// Puts a dirty piece in the tree, and in the list after `after`.
    fn link_dirty<O>(&mut self, sp: &Space<O>, id: ExtentId, after: ExtentId) {
        let e = sp.extents.get(id);
        let before = if after == 0 { self.oldest } else { sp.extents.get(after).next() };
        e.set_prev(after);
        e.set_next(before);
        if after == 0 {
            self.oldest = id
        } else {
            sp.extents.get(after).set_next(id)
        }
        if before == 0 {
            self.youngest = id
        } else {
            sp.extents.get(before).set_prev(id)
        }
        self.dirty_pages += u64::from(e.pages());
        self.dirty_pieces += 1;
        self.tree_of(e).insert(&sp.extents, id);
    }

    /// The tree that a dirty piece is in, or is to be put in.
    fn tree_of(&mut self, e: &Extent) -> &mut Tree {
        if e.is_old() { &mut self.old } else { &mut self.young }
    }

    /// Moves the pieces freed at or before `until_ms` from the young to the old.
    pub(crate) fn age<O>(&mut self, sp: &Space<O>, until_ms: u64) {
        let mut id = self.oldest;
        while id != 0 {
            let e = sp.extents.get(id);
            if e.stamp_ms() > until_ms {
                break;
            }
            if !e.is_old() {
                self.young.remove(&sp.extents, id);
                e.set_old(true);
                self.old.insert(&sp.extents, id);
            }
            id = e.next();
        }
    }

    /// Merges `id`, which is in no tree, with its neighbours where `fits` says so.
    fn absorb<O>(&mut self, sp: &Space<O>, id: ExtentId, fits: impl Fn(&Extent) -> bool) {
        let e = sp.extents.get(id);
        let mut run = Run { start: e.start(), pages: e.pages() };
        let left = left_of(sp, run.start);
        if left != 0 && fits(sp.extents.get(left)) {
            self.unlink(sp, left);
            run = Run {
                start: sp.extents.get(left).start(),
                pages: run.pages + sp.extents.get(left).pages(),
            };
            self.drop_record(sp, left);
        }
        let right = right_of(sp, run.end());
        if right != 0 && fits(sp.extents.get(right)) {
            self.unlink(sp, right);
            run.pages += sp.extents.get(right).pages();
            self.drop_record(sp, right);
        }
        set_run(sp, id, run);
    }

    /// Takes a free piece out of its tree and list. Its record stays, with its state.
    fn unlink<O>(&mut self, sp: &Space<O>, id: ExtentId) {
        let e = sp.extents.get(id);
        let pages = u64::from(e.pages());
        if e.state() == State::Clean {
            self.clean.remove(&sp.extents, id);
            self.clean_pages -= pages;
            return;
        }
        self.tree_of(e).remove(&sp.extents, id);
        self.dirty_pages -= pages;
        self.dirty_pieces -= 1;
        let (prev, next) = (e.prev(), e.next());
        if prev == 0 {
            self.oldest = next
        } else {
            sp.extents.get(prev).set_next(next)
        }
        if next == 0 {
            self.youngest = prev
        } else {
            sp.extents.get(next).set_prev(prev)
        }
        e.set_prev(0);
        e.set_next(0);
    }

    // Taking pieces out.

    /// Takes `pages` pages whose start is a multiple of `align` pages from the free pieces: the best
    /// fitting dirty piece, else a run that is at least partly dirty, else the best clean piece.
    /// Two records are reserved. Returns the extent and how many of its pages were clean.
    pub(crate) fn take<O: Os>(
        &mut self,
        sp: &Space<O>,
        pages: u32,
        align: u32,
    ) -> Option<(ExtentId, u32)> {
        let found = fit(sp, &self.young, pages, align)
            .or_else(|| fit(sp, &self.old, pages, align))
            .or_else(|| self.partly_dirty(sp, pages, align))
            .or_else(|| fit(sp, &self.clean, pages, align));
        found.map(|(first, run)| self.cut(sp, first, run))
    }

    /// The run with the most dirty pages among those around the largest dirty pieces.
    fn partly_dirty<O: Os>(
        &self,
        sp: &Space<O>,
        pages: u32,
        align: u32,
    ) -> Option<(ExtentId, Run)> {
        let mut best: Option<(ExtentId, Run)> = None;
        let mut most = 0;
        let mut keys = [u64::MAX; 2];
        for _ in 0..LOOKS {
            let Some(id) = self.next_largest(sp, &mut keys) else { break };
            let piece = sp.extents.get(id);
            if piece.pages() < pages / 8 || most == pages {
                break;
            }
            let around = run_around(sp, piece, Extent::is_free);
            let warm = run_around(sp, piece, |e| e.state() == State::Dirty);
            for start in places_in(sp, around, warm, pages, align).into_iter().flatten() {
                let run = Run { start, pages };
                let first = piece_holding(sp, id, start);
                let dirty = dirty_in(sp, first, run);
                if dirty > most {
                    most = dirty;
                    best = Some((first, run));
                }
            }
        }
        best
    }

    /// The largest dirty piece below both `keys`, of the young and of the old, which go down with it.
    fn next_largest<O>(&self, sp: &Space<O>, keys: &mut [u64; 2]) -> Option<ExtentId> {
        let ids = [(&self.young, keys[0]), (&self.old, keys[1])]
            .map(|(tree, key)| tree.below(&sp.extents, key));
        let sizes = ids.map(|id| if id == 0 { 0 } else { sp.extents.get(id).pages() });
        let (which, tree) = if sizes[0] >= sizes[1] { (0, &self.young) } else { (1, &self.old) };
        if ids[which] == 0 {
            return None;
        }
        keys[which] = tree.key_of(&sp.extents, ids[which]);
        Some(ids[which])
    }

    /// Cuts `run` out of the free pieces that cover it, the first of which is `first`. Two records
    /// are reserved. Returns the extent and how many of its pages were clean.
    fn cut<O: Os>(&mut self, sp: &Space<O>, first: ExtentId, run: Run) -> (ExtentId, u32) {
        let mut clean = 0;
        let mut taken = 0;
        let mut at = run.start;
        let mut id = first;
        while at < run.end() {
            let e = sp.extents.get(id);
            let (state, stamp, mut after) = (e.state(), e.stamp_ms(), e.prev());
            let old = e.is_old();
            let piece = Run { start: e.start(), pages: e.pages() };
            if state == State::Clean {
                clean += piece.end().min(run.end()) - piece.start.max(run.start);
            }
            self.unlink(sp, id);
            if piece.start < run.start {
                let head = Run { start: piece.start, pages: run.start - piece.start };
                after = self.put_rest(sp, head, (state, stamp, old), after);
            }
            if piece.end() > run.end() {
                let tail = Run { start: run.end(), pages: piece.end() - run.end() };
                self.put_rest(sp, tail, (state, stamp, old), after);
            }
            if taken == 0 {
                taken = id
            } else {
                self.drop_record(sp, id)
            }
            at = piece.end();
            if at < run.end() {
                id = sp.window.owner(at);
            }
        }
        set_run(sp, taken, run);
        (taken, clean)
    }

    /// Puts back what is left of a piece that was cut, with its state and age. Returns the piece to put the
    /// next one of the same age after.
    fn put_rest<O: Os>(
        &mut self,
        sp: &Space<O>,
        run: Run,
        (state, stamp, old): (State, u64, bool),
        after: ExtentId,
    ) -> ExtentId {
        let id = self.describe(sp, run, state, stamp);
        sp.extents.get(id).set_old(old);
        if state == State::Clean {
            self.clean_pages += u64::from(run.pages);
            self.clean.insert(&sp.extents, id);
            return after;
        }
        self.link_dirty(sp, id, after);
        id
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

    // Purging.

    /// The oldest dirty piece: when it was freed.
    pub(crate) fn oldest_stamp_ms<O>(&self, sp: &Space<O>) -> Option<u64> {
        (self.oldest != 0).then(|| sp.extents.get(self.oldest).stamp_ms())
    }

    /// Dirty pages freed at or before `until_ms`, counted up to `enough`.
    pub(crate) fn pages_until<O>(&self, sp: &Space<O>, until_ms: u64, enough: u64) -> u64 {
        let mut pages = 0;
        let mut id = self.oldest;
        while id != 0 && pages < enough {
            let e = sp.extents.get(id);
            if e.stamp_ms() > until_ms {
                break;
            }
            pages += u64::from(e.pages());
            id = e.next();
        }
        pages
    }

    /// Takes the oldest dirty piece, at most `pages` of it, to be purged. One record is reserved.
    pub(crate) fn take_oldest<O: Os>(&mut self, sp: &Space<O>, pages: u32) -> Option<ExtentId> {
        let id = self.oldest;
        if id == 0 {
            return None;
        }
        let e = sp.extents.get(id);
        let run = Run { start: e.start(), pages: e.pages().min(pages) };
        let (id, _) = self.cut(sp, id, run);
        sp.extents.get(id).set_state(State::Purging);
        Some(id)
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

/// The piece among `from` and the free pieces adjoining it that holds `page`.
fn piece_holding<O>(sp: &Space<O>, from: ExtentId, page: u32) -> ExtentId {
    let mut id = from;
    while sp.extents.get(id).start() > page {
        id = left_of(sp, sp.extents.get(id).start());
    }
    while sp.extents.get(id).end() <= page {
        id = right_of(sp, sp.extents.get(id).end());
    }
    id
}

/// The best fitting piece of `tree`, and the run to take from it.
fn fit<O: Os>(sp: &Space<O>, tree: &Tree, pages: u32, align: u32) -> Option<(ExtentId, Run)> {
    let mut id = tree.at_least(&sp.extents, u64::from(pages) << 32);
    for _ in 0..LOOKS {
        if id == 0 {
            return None;
        }
        let e = sp.extents.get(id);
        if let Some(start) = align_up(sp, e.start(), align)
            && start + pages <= e.end()
        {
            return Some((id, Run { start, pages }));
        }
        id = tree.at_least(&sp.extents, tree.key_after(&sp.extents, id));
    }
    let sure = u64::from(pages) + u64::from(align) - 1;
    let id = tree.at_least(&sp.extents, sure << 32);
    if id == 0 {
        return None;
    }
    let start = align_up(sp, sp.extents.get(id).start(), align)?;
    Some((id, Run { start, pages }))
}

/// The first page at or after `page` whose address is a multiple of `align` pages.
fn align_up<O>(sp: &Space<O>, page: u32, align: u32) -> Option<u32> {
    let base = sp.window.address(0) >> crate::extent::page_map::LG_PAGE;
    let aligned = (base + page as usize).next_multiple_of(align as usize) - base;
    u32::try_from(aligned).ok()
}

/// The run of pieces that `piece` is part of and that all are as `fits` says.
fn run_around<O>(sp: &Space<O>, piece: &Extent, fits: impl Fn(&Extent) -> bool) -> Run {
    let (mut start, mut end) = (piece.start(), piece.end());
    for _ in 0..RUN_PIECES / 2 {
        let left = left_of(sp, start);
        if left == 0 || !fits(sp.extents.get(left)) {
            break;
        }
        start = sp.extents.get(left).start();
    }
    for _ in 0..RUN_PIECES / 2 {
        let right = right_of(sp, end);
        if right == 0 || !fits(sp.extents.get(right)) {
            break;
        }
        end = sp.extents.get(right).end();
    }
    Run { start, pages: end - start }
}

/// Where in the free run `around` to put `pages` pages so that they hold as much of its dirty part
/// `warm` as possible: from its start on, or up to its end.
fn places_in<O>(sp: &Space<O>, around: Run, warm: Run, pages: u32, align: u32) -> [Option<u32>; 2] {
    if around.pages < pages {
        return [None; 2];
    }
    let latest = around.end() - pages;
    [warm.start, warm.end().saturating_sub(pages)].map(|wanted| {
        let wanted = wanted.min(latest).max(around.start);
        let start = align_up(sp, wanted, align).filter(|&s| s <= latest);
        start.or_else(|| align_up(sp, around.start, align).filter(|&s| s <= latest))
    })
}

/// Dirty pages of `run`, which free pieces cover, `first` being the first.
fn dirty_in<O>(sp: &Space<O>, first: ExtentId, run: Run) -> u32 {
    let mut dirty = 0;
    let mut id = first;
    while id != 0 {
        let e = sp.extents.get(id);
        if e.start() >= run.end() {
            break;
        }
        if e.state() == State::Dirty {
            dirty += e.end().min(run.end()) - e.start().max(run.start);
        }
        id = right_of(sp, e.end());
    }
    dirty
}
