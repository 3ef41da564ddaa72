//! The page heap: one lock over the free pieces, the demand window and the accounts. It gives out
//! extents and takes them back; `step` gives cold pages to the kernel, a little at a time.
use super::base::Table;
use super::cache::{Cache, Run, Space};
use super::page_map::{LG_PAGE, PAGE, Window};
use super::trace::{self, Kind};
use super::{ExtentId, Extents, State};
use crate::heat::decay::{self, Sight, Times};
use crate::heat::demand::Demand;
use crate::heat::regret::Regret;
use crate::os::{Errno, Os, Range};
use crate::policy::pressure::Pressure;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::lock::{Guard, Mutex, RawLock};

/// Largest request, pages: 4 TiB.
const MOST_PAGES: usize = 1 << 30;
/// The window grows by an eighth of its size, within these bounds, bytes.
const CHUNK_BYTES: (usize, usize) = (2 << 20, 64 << 20);
/// The tail of a shrunk block goes back at once from this size on, pages.
const SHRINK_AT_ONCE_PAGES: u32 = 2048;
/// Most pages, and most pieces, that one call purges.
const PURGE_PAGES: u64 = 8192;
const PURGE_PIECES: usize = 64;

/// An extent that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) id: ExtentId,
    /// Every byte of it reads as zero.
    pub(crate) zero: bool,
}

/// Extents that are purged together.
struct Batch {
    ids: [ExtentId; PURGE_PIECES],
    ranges: [Range; PURGE_PIECES],
    len: usize,
    pages: u64,
}

impl Batch {
    fn new() -> Self {
        Self {
            ids: [0; PURGE_PIECES],
            ranges: [Range { addr: 0, len: 0 }; PURGE_PIECES],
            len: 0,
            pages: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.len == PURGE_PIECES || self.pages >= PURGE_PAGES
    }

    fn add(&mut self, id: ExtentId, addr: usize, pages: u32) {
        self.ids[self.len] = id;
        self.ranges[self.len] = Range { addr, len: (pages as usize) << LG_PAGE };
        self.len += 1;
        self.pages += u64::from(pages);
    }
}

/// What the heap's lock covers.
struct Inner {
    cache: Cache,
    demand: Demand,
    times: Times,
    regret: Regret,
    pressure: Pressure,
    /// Pages in state `Purging`: neither dirty nor clean yet.
    purging_pages: u64,
    last_step_ms: u64,
    counts: Counts,
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
    pub(crate) clean: u64,
    pub(crate) purged: u64,
    /// Calls that gave pages back.
    pub(crate) purge_calls: u64,
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
}

/// The page heap of a kernel `O`.
pub(crate) struct PageHeap<O> {
    pub(crate) space: Space<O>,
    inner: Mutex<Inner>,
    /// Held while an extent is in state `Purging`, so that a fork's child finds none.
    purging: Mutex<()>,
    /// Dirty pages, for a look without the lock.
    dirty_hint: AtomicU64,
}

impl<O: Os> PageHeap<O> {
    pub(crate) const fn new(os: O) -> Self {
        Self {
            space: Space { os, window: Window::new(), extents: Extents::new(), bits: Table::new() },
            inner: Mutex::new(Inner {
                cache: Cache::new(),
                demand: Demand::new(5000),
                times: Times { window_ms: 5000, decay_ms: Some(2000) },
                regret: Regret::new(5000),
                pressure: Pressure::None,
                purging_pages: 0,
                last_step_ms: 0,
                counts: Counts {
                    in_use: 0,
                    peak: 0,
                    dirty: 0,
                    dirty_pieces: 0,
                    clean: 0,
                    purged: 0,
                    purge_calls: 0,
                    purge_failures: 0,
                    regretted: 0,
                    pressure_purged: 0,
                    pressure: 0,
                    window_ms: 0,
                    mapped: 0,
                    metadata_bytes: 0,
                },
            }),
            purging: Mutex::new(()),
            dirty_hint: AtomicU64::new(0),
        }
    }

    /// Places the window and its tables. Called once, before anything else.
    pub(crate) fn init(&self, random: u64) -> Result<(), Errno> {
        let sp = &self.space;
        sp.window.place(&sp.os, random, |start, records, bitmaps| {
            sp.extents.place(start, records);
            sp.bits.place(start + 2 * records, bitmaps);
        })
    }

    /// Sets the window and the decay; takes effect with the next operation.
    pub(crate) fn set_times(&self, times: Times) {
        let mut inner = self.inner.lock();
        inner.regret.set_base_ms(times.window_ms);
        inner.times.decay_ms = times.decay_ms;
        inner.follow_regret();
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
        inner.asked(sp.os.now_ms(), pages, clean);
        trace::record(Kind::Alloc, e.start(), pages);
        self.hint(&inner);
        Some(Taken { id, zero: clean == pages })
    }

    /// Takes an extent back; its pages are dirty from now on.
    pub(crate) fn free(&self, id: ExtentId) {
        self.free_all(&[id]);
    }

    /// Takes extents back under one lock.
    pub(crate) fn free_all(&self, ids: &[ExtentId]) {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        for &id in ids {
            trace::record(Kind::Free, sp.extents.get(id).start(), 0);
            inner.free(sp, id, now);
        }
        self.hint(&inner);
    }

    /// Takes back an extent whose pages were moved away: it reads as zero.
    pub(crate) fn free_clean(&self, id: ExtentId) {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        inner.demand.sub(now, u64::from(sp.extents.get(id).pages()));
        trace::record(Kind::Free, sp.extents.get(id).start(), 0);
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
        inner.asked(sp.os.now_ms(), extra, clean);
        trace::record(Kind::Resize, e.start(), pages);
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
        trace::record(Kind::Resize, sp.extents.get(id).start(), pages);
        let now = sp.os.now_ms();
        if purging.is_none() || sp.extents.get(tail).pages() < SHRINK_AT_ONCE_PAGES {
            inner.free(sp, tail, now);
            self.hint(&inner);
            return;
        }
        inner.demand.sub(now, u64::from(sp.extents.get(tail).pages()));
        sp.extents.get(tail).set_state(State::Purging);
        let e = sp.extents.get(tail);
        e.set_stamp_ms(now);
        let mut batch = Batch::new();
        batch.add(tail, sp.window.address(e.start()), e.pages());
        inner.purging_pages += batch.pages;
        drop(inner);
        self.purge(&batch);
        drop(purging);
    }

    /// Gives cold pages back. Returns how long nothing more will be due, milliseconds; `None` when
    /// there is nothing dirty.
    pub(crate) fn step(&self) -> Option<u64> {
        let sp = &self.space;
        let _purging = self.purging.lock();
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        let due = inner.due(sp, now);
        inner.last_step_ms = now;
        drop(inner);
        self.purge_oldest(due);
        self.inner.lock().rest_ms(sp, now)
    }

    /// Gives up, at once, what `pressure` asks for.
    pub(crate) fn relieve(&self, pressure: Pressure) {
        let _purging = self.purging.lock();
        let mut inner = self.inner.lock();
        let now = self.space.os.now_ms();
        let dirty = inner.cache.dirty_pages;
        let warm = inner.demand.peak(now) - inner.demand.in_use();
        let pages = match pressure {
            Pressure::None => 0,
            Pressure::Cold => dirty.saturating_sub(warm),
            Pressure::Warm => dirty,
        };
        inner.pressure = pressure;
        drop(inner);
        let purged = self.purge_oldest(pages);
        self.inner.lock().counts.pressure_purged += purged;
    }

    /// Gives every dirty page back at once, on request. Returns the bytes given back.
    pub(crate) fn trim(&self) -> usize {
        let _purging = self.purging.lock();
        let dirty = self.inner.lock().cache.dirty_pages;
        #[allow(clippy::cast_possible_truncation, reason = "pages of an address space")]
        let purged = self.purge_oldest(dirty) as usize;
        purged << LG_PAGE
    }

    /// Purges `pages` dirty pages, the oldest first, some pieces to a call and with the heap unlocked
    /// meanwhile. Returns how many pages were given back. The caller holds `purging`.
    fn purge_oldest(&self, pages: u64) -> u64 {
        let sp = &self.space;
        let unit = (sp.os.page_size() >> LG_PAGE).max(1) as u64;
        let (mut left, mut purged) = (pages.next_multiple_of(unit), 0);
        while left > 0 {
            let mut batch = Batch::new();
            let mut inner = self.inner.lock();
            while left > 0 && !batch.is_full() && inner.cache.reserve_records(sp, 2).is_ok() {
                let room = left.min(PURGE_PAGES - batch.pages);
                #[allow(clippy::cast_possible_truncation, reason = "at most PURGE_PAGES")]
                let Some(id) = inner.cache.take_oldest(sp, room as u32) else { break };
                let e = sp.extents.get(id);
                left = left.saturating_sub(u64::from(e.pages()));
                batch.add(id, sp.window.address(e.start()), e.pages());
            }
            inner.purging_pages += batch.pages;
            self.hint(&inner);
            drop(inner);
            if batch.len == 0 {
                break;
            }
            purged += self.purge(&batch);
        }
        purged
    }

    /// Purges extents in state `Purging`, with the heap unlocked, and puts them back. Returns how many
    /// pages were given back.
    fn purge(&self, batch: &Batch) -> u64 {
        let sp = &self.space;
        let (mut at, mut purged) = (0, 0);
        while at < batch.len {
            // SAFETY: the extents are free, and in no tree, so nobody else refers to their pages.
            let done = unsafe { sp.os.purge_all(&batch.ranges[at..batch.len]) };
            let mut inner = self.inner.lock();
            inner.counts.purge_calls += 1;
            for &id in &batch.ids[at..at + done] {
                let e = sp.extents.get(id);
                let pages = u64::from(e.pages());
                purged += pages;
                inner.purging_pages -= pages;
                inner.counts.purged += pages;
                inner.regret.purged(e.stamp_ms(), pages);
                inner.cache.put_clean(sp, id);
            }
            at += done;
            if at < batch.len {
                inner.counts.purge_failures += 1;
                let now = sp.os.now_ms();
                inner.purging_pages -= u64::from(sp.extents.get(batch.ids[at]).pages());
                inner.cache.put_dirty(sp, batch.ids[at], now);
                at += 1;
            }
            self.hint(&inner);
        }
        purged
    }

    /// Dirty pages at about this time, read without the lock.
    pub(crate) fn dirty_hint(&self) -> u64 {
        self.dirty_hint.load(Relaxed)
    }

    fn hint(&self, inner: &Guard<'_, Inner>) {
        self.dirty_hint.store(inner.cache.dirty_pages, Relaxed);
    }

    /// The accounts.
    pub(crate) fn counts(&self) -> Counts {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        Counts {
            in_use: inner.demand.in_use(),
            peak: inner.demand.peak(now),
            dirty: inner.cache.dirty_pages + inner.purging_pages,
            dirty_pieces: inner.cache.dirty_pieces,
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
            if matches!(e.state(), State::Slab | State::Block | State::Large) {
                visit(e);
            }
        }
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
            self.follow_regret();
        }
    }

    /// Puts the window in force where it counts.
    fn follow_regret(&mut self) {
        let window_ms = self.regret.window_ms();
        self.times.window_ms = window_ms;
        self.demand.set_window_ms(window_ms);
        self.cache.merge_ms = window_ms / 16;
    }

    fn free<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, now: u64) {
        self.demand.sub(now, u64::from(sp.extents.get(id).pages()));
        self.cache.put_dirty(sp, id, now);
    }

    /// Whether only free pieces lie between page `end` and the window's end.
    fn reaches_end<O: Os>(&self, sp: &Space<O>, end: u32) -> bool {
        let limit = sp.window.pages();
        limit - end <= self.cache.trail(sp, limit)
    }

    /// Grows the window so that `pages` pages at `align` fit at its end.
    fn grow<O: Os>(&mut self, sp: &Space<O>, pages: u32, align: u32) -> Result<(), Errno> {
        let end = sp.window.pages();
        let start = end - self.cache.trail(sp, end);
        let room = u64::from(pages) + u64::from(align) - 1;
        let need = (u64::from(start) + room).saturating_sub(u64::from(end));
        #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
        let need = ((need as usize) << LG_PAGE).next_multiple_of(sp.os.page_size());
        let grown = (end as usize) << LG_PAGE;
        let chunk = (grown / 8).clamp(CHUNK_BYTES.0, CHUNK_BYTES.1).next_multiple_of(CHUNK_BYTES.0);
        let roomy = need.next_multiple_of(chunk);
        let (run, skipped) = map_above(sp, roomy).or_else(|_| map_above(sp, need))?;
        self.cache.add_fresh(sp, run, skipped);
        Ok(())
    }

    /// Pages to purge now.
    fn due<O: Os>(&mut self, sp: &Space<O>, now: u64) -> u64 {
        self.regret.relax(now);
        self.follow_regret();
        let Some(oldest_ms) = self.cache.oldest_stamp_ms(sp) else { return 0 };
        let Some(decay_ms) = self.times.decay_ms else { return 0 };
        let peak = self.demand.peak(now);
        let dirty = self.cache.dirty_pages;
        let aged = match now.checked_sub(self.times.window_ms) {
            Some(until) => self.cache.pages_until(sp, until, dirty),
            None => 0,
        };
        let overdue = match now.checked_sub(self.times.window_ms + decay_ms) {
            Some(until) => self.cache.pages_until(sp, until, dirty),
            None => 0,
        };
        let sight = Sight {
            dirty,
            warm: peak - self.demand.in_use(),
            aged,
            overdue,
            oldest_ms,
            now_ms: now,
            last_ms: self.last_step_ms,
        };
        decay::budget(self.times, sight)
    }

    /// How long until something may be due, milliseconds.
    fn rest_ms<O>(&mut self, sp: &Space<O>, now: u64) -> Option<u64> {
        /// Steps while pages are leaving, and the longest rest while any are dirty.
        const STEP_MS: u64 = 50;
        const REST_MS: u64 = 1000;
        let oldest = self.cache.oldest_stamp_ms(sp)?;
        let Some(decay) = self.times.decay_ms else { return Some(REST_MS) };
        let cold_at = oldest + self.times.window_ms;
        if cold_at > now {
            return Some((cold_at - now).clamp(STEP_MS.min(decay.max(1)), REST_MS));
        }
        let all_warm = self.cache.dirty_pages <= self.demand.peak(now) - self.demand.in_use();
        Some(if all_warm { self.times.window_ms.clamp(STEP_MS, REST_MS) / 2 } else { STEP_MS })
    }
}

/// Maps `bytes` (a multiple of the kernel's page) above the window's limit. Returns the new pages, and
/// how many were passed over because something else is mapped there.
fn map_above<O: Os>(sp: &Space<O>, bytes: usize) -> Result<(Run, u32), Errno> {
    let (limit, most) = sp.window.bounds();
    let (mut skip, mut step) = (0, sp.os.page_size().max(1 << 20));
    loop {
        let start = limit + skip;
        let end = start + bytes;
        if end > most {
            return Err(Errno(libc::ENOMEM));
        }
        sp.ensure_records(end >> LG_PAGE)?;
        sp.window.ensure_maps(&sp.os, end)?;
        match sp.os.map_at(sp.window.address(0) + start, bytes) {
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
