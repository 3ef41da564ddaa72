//! The page heap: one lock over the free pieces, the demand window and the accounts. It gives out
//! extents and takes them back; `purge` gives cold pages to the kernel, `hugepage` makes huge ones.
use super::base::Table;
use super::cache::{Cache, Run, Space};
use super::dense_sizes::DenseSizes;
use super::hugepage::{Frames, HugeCounts, Looks};
use super::page_map::{LG_PAGE, PAGE, Spot, Window};
use super::purge::Batch;
use super::trace::{self, Kind};
use super::{Age, ExtentId, Extents, State};
use crate::heat::decay::{Decay, Times};
use crate::heat::demand::Demand;
use crate::heat::regret::Regret;
use crate::os::{Errno, Os, Range};
use crate::policy::pressure::Pressure;
use crate::policy::thp::{Hugetlb, Thp};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::lock::{Guard, Mutex, RawLock};

/// Largest request, pages: 4 TiB.
pub(crate) const MOST_PAGES: usize = 1 << 30;
/// The window grows by an eighth of its size, within these bounds, bytes.
const CHUNK_BYTES: (usize, usize) = (2 << 20, 64 << 20);
/// The tail of a shrunk block goes back at once from this size on, pages.
const SHRINK_AT_ONCE_PAGES: u32 = 2048;
/// Memory of reserved huge pages and other memory lie this far apart, so that no extent has both.
const KINDS_APART_BYTES: usize = 2 << 20;

/// An extent that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) id: ExtentId,
    /// Every byte of it reads as zero.
    pub(crate) zero: bool,
}

/// What the heap's lock covers.
pub(super) struct Inner {
    pub(super) cache: Cache,
    pub(super) demand: Demand,
    pub(super) times: Times,
    pub(super) decay: Decay,
    pub(super) muzzy_decay: Decay,
    pub(super) regret: Regret,
    pub(super) pressure: Pressure,
    pub(super) looks: Looks,
    /// What the window grows by: advised, or of the kernel's reserved pools.
    thp: Thp,
    hugetlb: Hugetlb,
    /// The window last grew by reserved pages.
    grew_fixed: bool,
    /// Pages in state `Purging`: neither dirty nor clean yet.
    pub(super) purging_pages: u64,
    pub(super) last_step_ms: u64,
    /// More is dirty than a program at work needs.
    pub(super) draining: bool,
    /// The kernel knows no `MADV_FREE`.
    pub(super) refuses_lazily: bool,
    pub(super) counts: Counts,
}

/// The page layer's accounts, pages unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Pages in use.
    pub(crate) in_use: u64,
    /// Most pages in use within the demand window.
    pub(crate) peak: u64,
    pub(crate) dirty: u64,
    /// Pieces that these are in.
    pub(crate) dirty_pieces: u64,
    /// Free pages that the kernel may take.
    pub(crate) muzzy: u64,
    /// Pages of the kernel's reserved pools.
    pub(crate) fixed: u64,
    pub(crate) clean: u64,
    pub(crate) purged: u64,
    /// Calls that gave pages back, and the time they took, microseconds.
    pub(crate) purge_calls: u64,
    pub(crate) purge_us: u64,
    /// Calls that the kernel refused.
    pub(crate) purge_failures: u64,
    /// Pages asked for again soon after their purge.
    pub(crate) regretted: u64,
    /// Pages given back because of pressure, and how much there was at the last look (0 to 2).
    pub(crate) pressure_purged: u64,
    pub(crate) pressure: u64,
    /// The window in force, milliseconds.
    pub(crate) window_ms: u64,
    /// Pages grown by in all.
    pub(crate) mapped: u64,
    /// Bytes of maps and records.
    pub(crate) metadata_bytes: u64,
    pub(crate) huge: HugeCounts,
}

impl Counts {
    const fn new() -> Self {
        Self {
            in_use: 0,
            peak: 0,
            dirty: 0,
            dirty_pieces: 0,
            muzzy: 0,
            fixed: 0,
            clean: 0,
            purged: 0,
            purge_calls: 0,
            purge_us: 0,
            purge_failures: 0,
            regretted: 0,
            pressure_purged: 0,
            pressure: 0,
            window_ms: 0,
            mapped: 0,
            metadata_bytes: 0,
            huge: HugeCounts { whole: 0, split: 0, collapsed: 0, refused: 0, spent_us: 0 },
        }
    }
}

impl Counts {
    /// Adds the accounts of another heap; the window and the pressure stay.
    pub(crate) fn add(&mut self, other: &Counts) {
        self.in_use += other.in_use;
        self.peak += other.peak;
        self.dirty += other.dirty;
        self.dirty_pieces += other.dirty_pieces;
        self.muzzy += other.muzzy;
        self.fixed += other.fixed;
        self.clean += other.clean;
        self.purged += other.purged;
        self.purge_calls += other.purge_calls;
        self.purge_us += other.purge_us;
        self.purge_failures += other.purge_failures;
        self.regretted += other.regretted;
        self.pressure_purged += other.pressure_purged;
        self.mapped += other.mapped;
        self.metadata_bytes += other.metadata_bytes;
        self.huge.whole += other.huge.whole;
        self.huge.split += other.huge.split;
        self.huge.collapsed += other.huge.collapsed;
        self.huge.refused += other.huge.refused;
        self.huge.spent_us += other.huge.spent_us;
    }
}

/// The page heap of a kernel `O`.
pub(crate) struct PageHeap<O> {
    pub(crate) space: Space<O>,
    pub(super) inner: Mutex<Inner>,
    /// Held while an extent is in state `Purging`, so that a fork's child finds none, and while frames
    /// are collapsed.
    pub(super) purging: Mutex<()>,
    /// Dirty pages, for a look without the lock.
    dirty_hint: AtomicU64,
    pub(super) dense_sizes: DenseSizes,
    untraced: AtomicBool,
}

impl<O: Os> PageHeap<O> {
    pub(crate) const fn new(os: O) -> Self {
        Self {
            space: Space {
                os,
                window: Window::new(),
                extents: Extents::new(),
                frames: Frames::new(),
                bits: Table::new(),
            },
            inner: Mutex::new(Inner {
                cache: Cache::new(),
                demand: Demand::new(5000),
                times: Times::new(5000, Some(2000)),
                decay: Decay::new(),
                muzzy_decay: Decay::new(),
                regret: Regret::new(5000),
                pressure: Pressure::None,
                looks: Looks::new(),
                thp: Thp::Evidence,
                hugetlb: Hugetlb::Off,
                grew_fixed: false,
                purging_pages: 0,
                last_step_ms: 0,
                draining: false,
                refuses_lazily: false,
                counts: Counts::new(),
            }),
            purging: Mutex::new(()),
            dirty_hint: AtomicU64::new(0),
            dense_sizes: DenseSizes::new(),
            untraced: AtomicBool::new(false),
        }
    }

    /// Places the window and its tables. Called once, before anything else.
    pub(crate) fn init(&self, random: u64) -> Result<(), Errno> {
        self.space.window.place(&self.space.os, random, |start, records, bitmaps| {
            self.place_tables(start, records, bitmaps)
        })
    }

    /// As [`PageHeap::init`], at a place of the caller's. Such a heap is not in the trace.
    pub(crate) fn init_at(&self, spot: Spot) -> Result<(), Errno> {
        self.untraced.store(true, Relaxed);
        self.space.window.place_at(&self.space.os, spot, |start, records, bitmaps| {
            self.place_tables(start, records, bitmaps)
        })
    }

    fn place_tables(&self, start: usize, records: usize, bitmaps: usize) -> usize {
        let sp = &self.space;
        sp.extents.place(start, records);
        sp.bits.place(start + 2 * records, bitmaps);
        let frames = start + 2 * records + bitmaps;
        // Records are a 256th of the window.
        let bytes = Frames::table_bytes(records * 256);
        sp.frames.place(frames, bytes);
        frames + bytes
    }

    fn record(&self, kind: Kind, start: u32, pages: u32) {
        if !self.untraced.load(Relaxed) {
            trace::record(kind, start, pages);
        }
    }

    /// Sets the window and the decay; takes effect with the next operation.
    pub(crate) fn set_times(&self, times: Times) {
        let mut inner = self.inner.lock();
        inner.regret.set_base_ms(times.window_ms);
        inner.times = Times { window_ms: inner.times.window_ms, ..times };
        inner.follow_regret(self.space.os.now_ms());
    }

    /// Sets what the window grows by. Called once, before anything is given out.
    pub(crate) fn set_huge(&self, thp: Thp, hugetlb: Hugetlb) {
        let mut inner = self.inner.lock();
        (inner.thp, inner.hugetlb) = (thp, hugetlb);
    }

    /// The number of unit pages that `bytes` need, a multiple of the kernel's page.
    pub(crate) fn pages_for(&self, bytes: usize) -> Option<u32> {
        let unit = self.space.os.page_size().max(PAGE);
        let pages = bytes.max(1).checked_next_multiple_of(unit)? >> LG_PAGE;
        if pages > MOST_PAGES {
            return None;
        }
        u32::try_from(pages).ok()
    }

    /// Gives out an extent of `pages` pages (a result of [`Self::pages_for`]) whose address is a
    /// multiple of `align` bytes (a power of two). `None` when memory is out.
    pub(crate) fn alloc(&self, pages: u32, align: usize, state: State, code: u8) -> Option<Taken> {
        let align = align.max(self.space.os.page_size()) >> LG_PAGE;
        let align = u32::try_from(align).ok().filter(|&a| a as usize <= MOST_PAGES)?;
        let sp = &self.space;
        let mut inner = self.inner.lock();
        inner.cache.reserve_records(sp, 4).ok()?;
        let (id, clean) = match inner.cache.take(sp, pages, align) {
            Some(found) => found,
            None => {
                inner.grow(sp, pages, align).ok()?;
                inner.cache.reserve_records(sp, 4).ok()?;
                inner.cache.take(sp, pages, align)?
            }
        };
        let e = sp.extents.get(id);
        e.set_state(state);
        e.set_code(code);
        sp.frames.used(e.run());
        inner.asked(sp.os.now_ms(), pages, clean);
        self.record(Kind::Alloc, e.start(), pages);
        self.hint(&inner);
        drop(inner);
        self.advise(e.run(), clean);
        Some(Taken { id, zero: clean == pages })
    }

    /// Gives out blocks as [`Self::alloc`] does, for class `code`: all of `out`, or
    /// a half or a quarter of it and so on, from one run of dirty pages if their alignment is a page and
    /// there is one, else one. Returns how many; 0: memory is out.
    #[allow(clippy::cast_possible_truncation, reason = "a batch; pages of at most 64 KiB")]
    pub(crate) fn alloc_some(
        &self,
        pages: u32,
        align: usize,
        code: u8,
        out: &mut [ExtentId],
    ) -> usize {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let mut count = out.len() as u32;
        if count < 2 || align > PAGE || inner.cache.reserve_records(sp, count + 4).is_err() {
            drop(inner);
            return self.alloc_one(pages, align, code, out);
        }
        let unit = (sp.os.page_size() >> LG_PAGE) as u32;
        let first = loop {
            match inner.cache.take_dirty(sp, pages * count, unit) {
                Some(first) => break first,
                None if count > 3 => count /= 2,
                None => {
                    drop(inner);
                    return self.alloc_one(pages, align, code, out);
                }
            }
        };
        sp.frames.used(sp.extents.get(first).run());
        inner.asked(sp.os.now_ms(), pages * count, 0);
        for (n, slot) in out[..count as usize].iter_mut().enumerate().rev() {
            *slot = match n as u32 {
                0 => first,
                n => inner.cache.split_tail(sp, first, n * pages),
            };
            let e = sp.extents.get(*slot);
            e.set_state(State::Block);
            e.set_code(code);
            self.record(Kind::Alloc, e.start(), pages);
        }
        self.hint(&inner);
        count as usize
    }

    fn alloc_one(&self, pages: u32, align: usize, code: u8, out: &mut [ExtentId]) -> usize {
        let taken = self.alloc(pages, align, State::Block, code);
        taken.map_or(0, |taken| {
            out[0] = taken.id;
            1
        })
    }

    /// Takes an extent back; its pages are dirty from now on.
    pub(crate) fn free(&self, id: ExtentId) {
        self.probe(self.space.extents.get(id).run());
        self.free_all(&mut [id]);
    }

    /// Takes extents back under one lock. The order of `ids` changes.
    pub(crate) fn free_all(&self, ids: &mut [ExtentId]) {
        let sp = &self.space;
        ids.sort_unstable_by_key(|&id| sp.extents.get(id).start());
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        ids.iter().for_each(|&id| self.record(Kind::Free, sp.extents.get(id).start(), 0));
        // What was cut from one run comes back as one.
        for run in ids.chunk_by(|&a, &b| sp.extents.get(a).end() == sp.extents.get(b).start()) {
            inner.cache.join(sp, run);
            inner.free(sp, run[0], now);
        }
        self.hint(&inner);
    }

    /// Takes back an extent whose pages were moved away: it reads as zero.
    pub(crate) fn free_clean(&self, id: ExtentId) {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        inner.demand.sub(now, u64::from(sp.extents.get(id).pages()));
        self.record(Kind::Free, sp.extents.get(id).start(), 0);
        inner.cache.put_clean(sp, id);
    }

    /// Grows `id` in place to `pages` pages, if the pages after it are free or not yet grown into.
    pub(crate) fn extend(&self, id: ExtentId, pages: u32) -> bool {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let e = sp.extents.get(id);
        let extra = pages - e.pages();
        if inner.cache.reserve_records(sp, 4).is_err() {
            return false;
        }
        let mut clean = inner.cache.extend(sp, id, extra);
        if clean.is_none() {
            if !inner.reaches_end(sp, e.end()) || inner.grow(sp, extra, 1).is_err() {
                return false;
            }
            if inner.cache.reserve_records(sp, 4).is_err() {
                return false;
            }
            clean = inner.cache.extend(sp, id, extra);
        }
        let Some(clean) = clean else { return false };
        sp.frames.used(Run { start: e.end() - extra, pages: extra });
        inner.asked(sp.os.now_ms(), extra, clean);
        self.record(Kind::Resize, e.start(), pages);
        self.hint(&inner);
        true
    }

    /// Cuts `id` down to `pages` pages. Its tail is dirty from now on, and goes back at once when it
    /// is large.
    pub(crate) fn shrink(&self, id: ExtentId, pages: u32) {
        let sp = &self.space;
        let purging = self.purging.try_lock();
        let mut inner = self.inner.lock();
        if inner.cache.reserve_records(sp, 1).is_err() {
            return;
        }
        let tail = inner.cache.split_tail(sp, id, pages);
        self.record(Kind::Resize, sp.extents.get(id).start(), pages);
        let now = sp.os.now_ms();
        let fixed = sp.frames.is_fixed(sp.extents.get(tail).start());
        if purging.is_none() || fixed || sp.extents.get(tail).pages() < SHRINK_AT_ONCE_PAGES {
            inner.free(sp, tail, now);
            self.hint(&inner);
            return;
        }
        inner.leave(sp, tail, now);
        sp.extents.get(tail).set_state(State::Purging);
        sp.extents.get(tail).set_stamp_ms(now);
        sp.extents.get(tail).set_age(Age::Dirty);
        inner.purging_pages += u64::from(sp.extents.get(tail).pages());
        drop(inner);
        self.purge(&Batch::of(sp, tail));
    }

    /// Dirty pages at about this time, read without the lock.
    pub(crate) fn dirty_hint(&self) -> u64 {
        self.dirty_hint.load(Relaxed)
    }

    pub(super) fn hint(&self, inner: &Guard<'_, Inner>) {
        self.dirty_hint.store(inner.cache.dirty.pages + inner.cache.muzzy.pages, Relaxed);
    }

    /// The accounts.
    pub(crate) fn counts(&self) -> Counts {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        Counts {
            in_use: inner.demand.in_use(),
            peak: inner.demand.peak(now),
            dirty: inner.cache.dirty.pages + inner.purging_pages,
            dirty_pieces: inner.cache.dirty.pieces,
            muzzy: inner.cache.muzzy.pages,
            huge: inner.looks.counts,
            clean: inner.cache.clean_pages,
            mapped: u64::from(sp.window.pages()),
            metadata_bytes: (sp.window.metadata_bytes() + inner.cache.record_bytes()) as u64,
            regretted: inner.regret.pages,
            window_ms: inner.regret.window_ms(),
            pressure: inner.pressure as u64,
            ..inner.counts
        }
    }

    /// Calls `visit` with every extent in use, under the heap's lock.
    pub(crate) fn for_each_in_use(&self, mut visit: impl FnMut(&super::Extent)) {
        let inner = self.inner.lock();
        for id in 1..inner.cache.record_end() {
            let e = self.space.extents.get(id);
            if matches!(e.state(), State::Slab | State::Block | State::Large | State::Recorded) {
                visit(e);
            }
        }
    }

    /// Calls `visit` with every free piece, under the heap's lock.
    pub(crate) fn for_each_free(&self, mut visit: impl FnMut(&super::Extent)) {
        let inner = self.inner.lock();
        for id in 1..inner.cache.record_end() {
            let e = self.space.extents.get(id);
            if e.is_free() {
                visit(e);
            }
        }
    }

    /// Fills `out` with extents in use, from the record `from` on. Returns how many, and the record to go on
    /// from; 0: that was all.
    pub(crate) fn in_use_from(&self, from: ExtentId, out: &mut [ExtentId]) -> (usize, ExtentId) {
        let inner = self.inner.lock();
        let mut n = 0;
        for id in from.max(1)..inner.cache.record_end() {
            if n == out.len() {
                return (n, id);
            }
            let state = self.space.extents.get(id).state();
            if matches!(state, State::Slab | State::Block | State::Large | State::Recorded) {
                out[n] = id;
                n += 1;
            }
        }
        (n, 0)
    }

    /// Calls `visit` with every extent, while they change.
    pub(crate) fn glance(&self, mut visit: impl FnMut(&super::Extent)) {
        let end = self.inner.lock().cache.record_end();
        (1..end).for_each(|id| visit(self.space.extents.get(id)));
    }

    /// The locks, in the order in which they are taken.
    pub(crate) fn locks(&self) -> [&RawLock; 2] {
        [self.purging.raw(), self.inner.raw()]
    }
}

impl Inner {
    /// Notes that `pages` pages were given out, `clean` of which have to be faulted in.
    fn asked(&mut self, now: u64, pages: u32, clean: u32) {
        self.demand.add(now, u64::from(pages));
        self.regret.active(now, u64::from(pages), self.demand.in_use());
        if clean > 0 && self.regret.asked(now, u64::from(clean), self.demand.in_use()) > 0 {
            self.follow_regret(now);
        }
    }

    /// Puts the window in force where it counts.
    pub(super) fn follow_regret(&mut self, now: u64) {
        let window_ms = self.regret.window_ms();
        self.times.window_ms = window_ms;
        self.demand.set_window_ms(now, window_ms);
        self.cache.merge_ms = window_ms / 16;
    }

    fn free<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now: u64) {
        self.leave(sp, id, now);
        self.cache.put_dirty(sp, id, now);
    }

    /// Notes that an extent is not in use any more.
    fn leave<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now: u64) {
        let run = sp.extents.get(id).run();
        self.demand.sub(now, u64::from(run.pages));
        sp.frames.unused(run);
    }

    /// Whether only free pieces lie between page `end` and the window's end.
    fn reaches_end<O: Os>(&self, sp: &Space<O>, end: u32) -> bool {
        let limit = sp.window.pages();
        limit - end <= self.cache.trail(sp, limit)
    }

    /// Grows the window so that `pages` pages at `align` fit at its end.
    fn grow<O: Os>(&mut self, sp: &Space<O>, pages: u32, align: u32) -> Result<(), Errno> {
        let end = sp.window.pages();
        let room = u64::from(pages) + u64::from(align) - 1;
        if let Some(lg_page) = self.hugetlb.lg_page()
            && self.grow_fixed(sp, room, lg_page)
        {
            return Ok(());
        }
        let (trail, apart) = match self.grew_fixed {
            true => (0, KINDS_APART_BYTES),
            false => (self.cache.trail(sp, end), 0),
        };
        let need = room.saturating_sub(u64::from(trail));
        #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
        let need = ((need as usize) << LG_PAGE).next_multiple_of(sp.os.page_size());
        let grown = (end as usize) << LG_PAGE;
        let chunk = (grown / 8).clamp(CHUNK_BYTES.0, CHUNK_BYTES.1).next_multiple_of(CHUNK_BYTES.0);
        let map = |at: usize, bytes: usize| sp.os.map_at(at, bytes);
        let (run, skipped) = map_above(sp, need.next_multiple_of(chunk), apart, map)
            .or_else(|_| map_above(sp, need, apart, map))?;
        self.cache.add_fresh(sp, run, skipped);
        self.grew_fixed = false;
        if self.thp != Thp::Evidence {
            let range =
                Range { addr: sp.window.address(run.start), len: (run.pages as usize) << LG_PAGE };
            // A kernel without huge pages refuses; nothing is lost by that.
            let _ = sp.os.advise_huge(range, self.thp == Thp::Always);
        }
        Ok(())
    }

    /// Grows the window by reserved huge pages, if the kernel has enough of them.
    fn grow_fixed<O: Os>(&mut self, sp: &Space<O>, room: u64, lg_page: u32) -> bool {
        let huge = 1usize << lg_page;
        let (limit, _) = sp.window.bounds();
        let apart = if self.grew_fixed || limit == 0 { 0 } else { KINDS_APART_BYTES };
        let apart = (limit + apart).next_multiple_of(huge) - limit;
        #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
        let bytes = ((room as usize) << LG_PAGE).next_multiple_of(huge);
        let map = |at: usize, bytes: usize| {
            if !at.is_multiple_of(huge) {
                return Err(Errno(libc::EINVAL));
            }
            sp.os.map_huge_at(at, bytes, lg_page)
        };
        let Ok((run, skipped)) = map_above(sp, bytes, apart, map) else { return false };
        sp.frames.fix(run);
        self.cache.add_fresh(sp, run, skipped);
        self.counts.fixed += u64::from(run.pages);
        self.grew_fixed = true;
        true
    }
}

/// Maps `bytes` (a multiple of the kernel's page) above the window's limit, `apart` bytes away from it. Returns the new pages, and
/// how many were passed over because something else is mapped there.
fn map_above<O: Os>(
    sp: &Space<O>,
    bytes: usize,
    apart: usize,
    map: impl Fn(usize, usize) -> Result<(), Errno>,
) -> Result<(Run, u32), Errno> {
    let (limit, most) = sp.window.bounds();
    let (mut skip, mut step) = (apart, sp.os.page_size().max(1 << 20));
    loop {
        let start = limit + skip;
        let end = start + bytes;
        if end > most {
            return Err(Errno(libc::ENOMEM));
        }
        sp.ensure_records(end >> LG_PAGE)?;
        sp.window.ensure_maps(&sp.os, end)?;
        match map(sp.window.address(0) + start, bytes) {
            Ok(()) => {
                sp.window.set_limit(end);
                let [start, pages, skipped] = [start, bytes, skip].map(|bytes| {
                    #[allow(clippy::cast_possible_truncation, reason = "at most 2^32 pages")]
                    let pages = (bytes >> LG_PAGE) as u32;
                    pages
                });
                return Ok((Run { start, pages }, skipped));
            }
            Err(Errno(libc::EEXIST)) if step < 64 << 30 => {
                skip += step;
                step *= 2;
            }
            Err(error) => return Err(error),
        }
    }
}
