//! Purging: cold pieces go to the kernel a little at a time, the oldest first, many to a call. A
//! piece is taken out of the free ones while the kernel has it, so that the heap need not be locked.
//!
//! Invariant: `purging` is held while an extent is in state `Purging`, so that a fork's child finds
//! none.
use super::cache::Space;
use super::heap::{Inner, PageHeap};
use super::page_map::LG_PAGE;
use super::{Age, ExtentId};
use crate::heat::decay::{Sight, Times};
use crate::os::{Os, Range};
use crate::policy::pressure::Pressure;

/// Most pages, and most pieces, that one call purges.
const PURGE_PAGES: u64 = 8192;
const PURGE_PIECES: usize = 64;

/// While the program works, purging begins when more than the first part of the peak is kept in
/// addition to it, and ends when no more than the second is.
const SLACK: (u64, u64) = (4, 16);

/// Extents that are purged together.
pub(super) struct Batch {
    ids: [ExtentId; PURGE_PIECES],
    ranges: [Range; PURGE_PIECES],
    len: usize,
    pages: u64,
    /// The kernel may take the pages later.
    lazily: bool,
    /// They go because they are cold, not because somebody wants them to.
    cold: bool,
}

impl Batch {
    fn new(lazily: bool, cold: bool) -> Self {
        Self {
            ids: [0; PURGE_PIECES],
            ranges: [Range { addr: 0, len: 0 }; PURGE_PIECES],
            len: 0,
            pages: 0,
            lazily,
            cold,
        }
    }

    /// Of one extent, which is in state `Purging`.
    pub(super) fn of<O: Os>(sp: &Space<O>, id: ExtentId) -> Self {
        let mut batch = Self::new(false, false);
        batch.add(sp, id);
        batch
    }

    fn is_full(&self) -> bool {
        self.len == PURGE_PIECES || self.pages >= PURGE_PAGES
    }

    fn add<O: Os>(&mut self, sp: &Space<O>, id: ExtentId) {
        let e = sp.extents.get(id);
        let len = (e.pages() as usize) << LG_PAGE;
        self.ids[self.len] = id;
        self.ranges[self.len] = Range { addr: sp.window.address(e.start()), len };
        self.len += 1;
        self.pages += u64::from(e.pages());
    }
}

/// What is to be purged.
#[derive(Clone, Copy)]
struct Order {
    age: Age,
    pages: u64,
    /// Nothing goes that is what it is since later than this.
    until_ms: u64,
    /// What is free of a huge page goes although the page is otherwise in use.
    split: bool,
    lazily: bool,
    cold: bool,
}

impl<O: Os> PageHeap<O> {
    /// Gives cold pages back. Returns how long nothing more will be due, milliseconds; `None` when
    /// there is nothing to give.
    pub(crate) fn step(&self) -> Option<u64> {
        let sp = &self.space;
        let _purging = self.purging.lock();
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        let orders = inner.due(sp, now);
        inner.last_step_ms = now;
        drop(inner);
        let stayed = orders.map(|order| order.pages.saturating_sub(self.carry_out(order)));
        let mut inner = self.inner.lock();
        inner.muzzy_decay.stayed(stayed[0]);
        inner.decay.stayed(stayed[1]);
        inner.rest_ms(sp, now)
    }

    /// Gives up, at once, what `pressure` asks for.
    pub(crate) fn relieve(&self, pressure: Pressure) {
        let _purging = self.purging.lock();
        let mut inner = self.inner.lock();
        let now = self.space.os.now_ms();
        let dirty = inner.cache.dirty.pages;
        let warm = inner.demand.peak(now) - inner.demand.in_use();
        let pages = match pressure {
            Pressure::None => 0,
            Pressure::Cold => dirty.saturating_sub(warm),
            Pressure::Warm => dirty,
        };
        let muzzy = if pressure == Pressure::None { 0 } else { inner.cache.muzzy.pages };
        inner.pressure = pressure;
        drop(inner);
        let purged = self.purge_at_once(Age::Muzzy, muzzy) + self.purge_at_once(Age::Dirty, pages);
        self.inner.lock().counts.pressure_purged += purged;
    }

    /// Gives every free page back at once, on request. Returns the bytes given back.
    pub(crate) fn trim(&self) -> usize {
        let _purging = self.purging.lock();
        let inner = self.inner.lock();
        let (dirty, muzzy) = (inner.cache.dirty.pages, inner.cache.muzzy.pages);
        drop(inner);
        let purged = self.purge_at_once(Age::Muzzy, muzzy) + self.purge_at_once(Age::Dirty, dirty);
        #[allow(clippy::cast_possible_truncation, reason = "pages of an address space")]
        let pages = purged as usize;
        pages << LG_PAGE
    }

    fn purge_at_once(&self, age: Age, pages: u64) -> u64 {
        self.carry_out(Order {
            age,
            pages,
            until_ms: u64::MAX,
            split: true,
            lazily: false,
            cold: false,
        })
    }

    /// Purges in the order of age, some pieces to a call and with the heap unlocked meanwhile. Returns
    /// how many pages went. The caller holds `purging`.
    fn carry_out(&self, order: Order) -> u64 {
        let sp = &self.space;
        let (mut left, mut purged) = (order.pages.next_multiple_of(unit_pages(sp)), 0);
        while left > 0 {
            let mut batch = Batch::new(order.lazily, order.cold);
            let mut cursor = 0;
            let mut inner = self.inner.lock();
            while left > 0 && !batch.is_full() && inner.cache.reserve_records(sp, 2).is_ok() {
                let room = left.min(PURGE_PAGES - batch.pages);
                #[allow(clippy::cast_possible_truncation, reason = "at most PURGE_PAGES")]
                let most = (room as u32, order.until_ms, order.split);
                let Some(id) = inner.cache.take_cold(sp, order.age, &mut cursor, most) else {
                    break;
                };
                batch.add(sp, id);
                left = left.saturating_sub(u64::from(sp.extents.get(id).pages()));
                if cursor == 0 {
                    break;
                }
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
    /// pages went.
    pub(super) fn purge(&self, batch: &Batch) -> u64 {
        let sp = &self.space;
        let (mut at, mut purged, mut lazily) = (0, 0, batch.lazily);
        while at < batch.len {
            let start = sp.os.now_us();
            let ranges = &batch.ranges[at..batch.len];
            let done = if lazily {
                // SAFETY: the extents are free, and in no tree, so nobody else refers to their pages.
                unsafe { sp.os.purge_lazily(ranges) }
            } else {
                // SAFETY: as above.
                unsafe { sp.os.purge_all(ranges) }
            };
            let mut inner = self.inner.lock();
            inner.counts.purge_calls += 1;
            inner.counts.purge_us += sp.os.now_us().saturating_sub(start);
            for &id in &batch.ids[at..at + done] {
                purged += inner.gone(sp, id, lazily, batch.cold);
            }
            at += done;
            if at < batch.len && lazily {
                // A kernel that does not know the offer: no stage for it, then.
                inner.refuses_lazily = true;
                lazily = false;
            } else if at < batch.len {
                inner.counts.purge_failures += 1;
                let now = sp.os.now_ms();
                let id = batch.ids[at];
                inner.purging_pages -= u64::from(sp.extents.get(id).pages());
                inner.cache.put_dirty(sp, id, now);
                at += 1;
            }
            self.hint(&inner);
        }
        purged
    }
}

impl Inner {
    /// Puts back an extent whose pages the kernel has, or may take. Returns how many they are.
    fn gone<O: Os>(&mut self, sp: &Space<O>, id: ExtentId, lazily: bool, cold: bool) -> u64 {
        let e = sp.extents.get(id);
        let pages = u64::from(e.pages());
        self.purging_pages -= pages;
        if lazily {
            self.cache.put_muzzy(sp, id, sp.os.now_ms());
            return pages;
        }
        // A muzzy piece was last used a window before it became that.
        let muzzy = e.age() == Age::Muzzy;
        let used_ms = e.stamp_ms().saturating_sub(if muzzy { self.times.window_ms } else { 0 });
        self.counts.purged += pages;
        if cold {
            self.regret.purged(used_ms, pages);
        }
        self.put_clean(sp, id);
        pages
    }

    /// What is to be purged now.
    fn due<O: Os>(&mut self, sp: &Space<O>, now: u64) -> [Order; 2] {
        self.regret.relax(now);
        self.follow_regret(now);
        let times = self.times;
        let peak = self.demand.peak(now);
        let quiet = self.regret.is_quiet(now);
        let warm = peak - self.demand.in_use();
        // A program at work finds its blocks' places anew in each round, and its peaks differ: somewhat
        // more pages than its peak go round.
        let excess = self.cache.dirty.pages.saturating_sub(warm);
        let most = if self.draining { peak / SLACK.1 } else { peak / SLACK.0 };
        self.draining = excess > most;
        let slack = match (quiet, self.draining) {
            (true, _) => 0,
            (false, true) => peak / SLACK.1,
            (false, false) => peak / SLACK.0,
        };
        let dirty = &self.cache.dirty;
        let sight = Sight {
            dirty: dirty.pages,
            warm: warm + slack,
            aged: dirty.pages_until(sp, now.checked_sub(times.window_ms)),
            oldest_ms: dirty.oldest_ms(sp).unwrap_or(now),
            unit: unit_pages(sp),
            now_ms: now,
            last_ms: self.last_step_ms,
        };
        let pages = self.decay.budget(times, sight);
        let lazily = times.muzzy_ms != Some(0) && !self.refuses_lazily;
        // A program at work uses its huge pages, too.
        let until_ms = now.saturating_sub(times.window_ms);
        let order = Order { age: Age::Dirty, pages, until_ms, split: quiet, lazily, cold: true };
        [self.muzzy_due(sp, now), order]
    }

    /// Muzzy pieces decay as dirty ones do, with nothing to be kept warm.
    fn muzzy_due<O: Os>(&mut self, sp: &Space<O>, now: u64) -> Order {
        let times = Times::new(0, self.times.muzzy_ms);
        let muzzy = &self.cache.muzzy;
        let sight = Sight {
            dirty: muzzy.pages,
            warm: 0,
            aged: muzzy.pages,
            oldest_ms: muzzy.oldest_ms(sp).unwrap_or(now),
            unit: unit_pages(sp),
            now_ms: now,
            last_ms: self.last_step_ms,
        };
        let pages = self.muzzy_decay.budget(times, sight);
        Order { age: Age::Muzzy, pages, until_ms: now, split: true, lazily: false, cold: true }
    }

    /// How long until something may be due, milliseconds.
    fn rest_ms<O>(&mut self, sp: &Space<O>, now: u64) -> Option<u64> {
        /// Steps while pages are leaving, and the longest rest while any are dirty.
        const STEP_MS: u64 = 50;
        const REST_MS: u64 = 1000;
        let leaving = self.cache.muzzy.pages > 0 && self.times.muzzy_ms.is_some();
        let muzzy = leaving.then_some(STEP_MS);
        let Some(oldest) = self.cache.dirty.oldest_ms(sp) else { return muzzy };
        let Some(decay) = self.times.decay_ms else { return muzzy.or(Some(REST_MS)) };
        let cold_at = oldest + self.times.window_ms;
        if cold_at > now {
            let rest = (cold_at - now).clamp(STEP_MS.min(decay.max(1)), REST_MS);
            return Some(muzzy.unwrap_or(rest));
        }
        let all_warm = self.cache.dirty.pages <= self.demand.peak(now) - self.demand.in_use();
        let rest =
            if all_warm { self.times.window_ms.clamp(STEP_MS, REST_MS) / 2 } else { STEP_MS };
        Some(muzzy.unwrap_or(rest))
    }

    /// Makes an extent in no tree, whose pages the kernel has, a clean piece.
    pub(super) fn put_clean<O: Os>(&mut self, sp: &Space<O>, id: ExtentId) {
        let (ended, split) = sp.frames.unbacked(sp.extents.get(id).run());
        self.looks.counts.whole -= ended;
        self.looks.counts.split += split;
        self.cache.put_clean(sp, id);
    }
}

/// Unit pages of one page of the kernel's.
fn unit_pages<O: Os>(sp: &Space<O>) -> u64 {
    (sp.os.page_size() >> LG_PAGE).max(1) as u64
}
