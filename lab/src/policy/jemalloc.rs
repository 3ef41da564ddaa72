//! jemalloc (5.3) with its defaults, from `src/decay.c`, `src/pac.c`, `src/extent.c`, `src/arena.c`
//! and the manual's `opt.dirty_decay_ms`, `opt.muzzy_decay_ms` (0), `opt.background_thread` and
//! `opt.oversize_threshold`.
//!
//! - Freed extents go to the dirty cache, joined with their neighbours, and are reused from there by
//!   best fit, but never split for a request of less than a 64th of them
//!   (`lg_extent_max_active_fit`); then come retained ones, and fresh ones.
//! - Dirty pages decay over 10 s: 200 steps of 50 ms (an epoch), each with its backlog, and a limit
//!   that is the sum of the backlogs weighted by smoothstep; what is above the limit is purged, the
//!   least recently freed extent first. A deadline has up to one epoch of jitter.
//! - Without the background thread the time is looked at once for each 1000 events
//!   (`ARENA_DECAY_NTICKS_PER_UPDATE`) on the thread that allocates or frees, and purging happens when
//!   an epoch is over. With it, by that thread, which sleeps until about 1024 pages are due.
//! - Blocks of 8 MiB (`oversize_threshold`) and more have an arena of their own, which purges at once
//!   (`arena_create_huge_arena`); so does a dirty extent that has become that large by joining
//!   (`extent_record`). Neither with the background thread.
//!
//! Left out: thread caches and slabs, more than one arena, the page in excess of `cache_oblivious`.

use std::sync::Arc;

use super::{Place, Policy};
use crate::PAGE;
use crate::machine::Machine;
use crate::spans::Spans;

const DECAY_US: u64 = 10_000_000;
const STEPS: usize = 200;
const EPOCH_US: u64 = DECAY_US / STEPS as u64;
const TICKS: u32 = 1000;
const OVERSIZE: usize = (8 << 20) / PAGE;
const LG_MAX_FIT: u32 = 6;
/// The background thread sleeps until about this much is due (`PAC_DECAY_PURGE_NPAGES_THRESHOLD`).
const WORTH_PAGES: u64 = 1024;

pub(super) struct Jemalloc {
    machine: Arc<Machine>,
    background: bool,
    common: Arena,
    /// Of blocks above the threshold.
    huge: Arena,
    end: usize,
    ticks: u32,
}

#[derive(Default)]
struct Arena {
    dirty: Spans,
    retained: Spans,
    decay: Decay,
}

impl Jemalloc {
    pub(super) fn new(machine: Arc<Machine>, background: bool) -> Self {
        let (common, huge) = (Arena::default(), Arena::default());
        Self { machine, background, common, huge, end: 0, ticks: 0 }
    }

    fn arena(&mut self, pages: usize) -> &mut Arena {
        if pages >= OVERSIZE { &mut self.huge } else { &mut self.common }
    }

    fn tick(&mut self) {
        self.ticks += 1;
        if self.ticks < TICKS {
            return;
        }
        self.ticks = 0;
        let now = self.machine.now_us();
        for arena in [&mut self.common, &mut self.huge] {
            let over = arena.decay.advance(now, arena.dirty.pages());
            if over && !self.background {
                arena.purge_to(arena.decay.limit, &self.machine);
            }
        }
    }
}

impl Arena {
    fn take(&mut self, pages: usize) -> Option<usize> {
        let fits = self.dirty.best_fit(pages).filter(|span| span.pages >> LG_MAX_FIT <= pages);
        if let Some(span) = fits {
            return Some(self.dirty.carve(span, pages));
        }
        let span = self.retained.best_fit(pages)?;
        Some(self.retained.carve(span, pages))
    }

    /// Purges the least recently freed extents until no more than `limit` dirty pages are left.
    fn purge_to(&mut self, limit: u64, machine: &Machine) {
        while self.dirty.pages() > limit {
            let Some(span) = self.dirty.oldest() else { return };
            self.dirty.remove(span);
            machine.purge(span.start, span.pages);
            machine.note_purge_call();
            self.retained.put_joined(span.start, span.pages);
        }
    }
}

impl Policy for Jemalloc {
    fn alloc(&mut self, pages: usize) -> Option<Place> {
        self.tick();
        let pages = size_class(pages);
        let page = self.arena(pages).take(pages).unwrap_or_else(|| {
            self.end += pages;
            self.end - pages
        });
        Some(Place { page, pages })
    }

    fn free(&mut self, place: Place) {
        let (machine, background) = (Arc::clone(&self.machine), self.background);
        let arena = self.arena(place.pages);
        let whole = arena.dirty.put_joined(place.page, place.pages);
        if whole.pages >= OVERSIZE && !background {
            arena.dirty.remove(whole);
            machine.purge(whole.start, whole.pages);
            machine.note_purge_call();
            arena.retained.put_joined(whole.start, whole.pages);
        }
        self.tick();
    }

    fn wants_to_wake(&self) -> bool {
        self.background && self.common.dirty.pages() + self.huge.dirty.pages() > 0
    }

    fn wake(&mut self) -> Option<u64> {
        let now = self.machine.now_us();
        let mut rest = STEPS;
        for arena in [&mut self.common, &mut self.huge] {
            // What became dirty since the last epoch is in no backlog yet.
            if arena.decay.advance(now, arena.dirty.pages()) {
                arena.purge_to(arena.decay.limit, &self.machine);
                rest = rest.min(arena.decay.epochs_until(WORTH_PAGES));
            } else if !arena.dirty.is_empty() {
                rest = 2;
            }
        }
        self.wants_to_wake().then_some(rest as u64 * EPOCH_US)
    }
}

/// The size class that holds so many pages: four to each doubling, from 16 KiB on.
fn size_class(pages: usize) -> usize {
    if pages <= 4 {
        return pages;
    }
    let step = pages.next_power_of_two() / 8;
    pages.next_multiple_of(step.max(1))
}

/// The decay's clock and its backlog.
struct Decay {
    epoch_us: u64,
    deadline_us: u64,
    /// Pages that became dirty in each of the last epochs, the newest at the end.
    backlog: [u64; STEPS],
    unpurged: u64,
    limit: u64,
    jitter: u64,
}

impl Default for Decay {
    fn default() -> Self {
        Self {
            epoch_us: 0,
            deadline_us: EPOCH_US,
            backlog: [0; STEPS],
            unpurged: 0,
            limit: 0,
            jitter: 1,
        }
    }
}

impl Decay {
    /// Returns whether an epoch is over, with a new limit then.
    fn advance(&mut self, now_us: u64, dirty: u64) -> bool {
        if now_us < self.deadline_us {
            return false;
        }
        let over = (now_us - self.epoch_us) / EPOCH_US;
        self.epoch_us += over * EPOCH_US;
        self.jitter = self.jitter.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.deadline_us = self.epoch_us + EPOCH_US + (self.jitter >> 33) % EPOCH_US;
        let over = usize::try_from(over).unwrap_or(STEPS).min(STEPS);
        self.backlog.copy_within(over.., 0);
        self.backlog[STEPS - over..].fill(0);
        self.backlog[STEPS - 1] = dirty.saturating_sub(self.unpurged);
        self.limit = self.weighted();
        self.unpurged = self.limit.max(dirty);
        true
    }

    /// Epochs until more than `pages` are due (`decay_ns_until_purge`): two at least, so that one is
    /// over by then.
    #[allow(clippy::cast_precision_loss)]
    fn epochs_until(&self, pages: u64) -> usize {
        let due = |epochs: usize| -> f64 {
            let fallen = |(i, &n): (usize, &u64)| {
                n as f64 * (step(i + 1) - step((i + 1).saturating_sub(epochs)))
            };
            self.backlog.iter().enumerate().map(fallen).sum()
        };
        (2..STEPS).find(|&epochs| due(epochs) > pages as f64).unwrap_or(STEPS)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
    fn weighted(&self) -> u64 {
        let sum: f64 = self.backlog.iter().zip(1..).map(|(&pages, i)| pages as f64 * step(i)).sum();
        sum as u64
    }
}

/// smootherstep of the `i`th of the steps.
#[allow(clippy::cast_precision_loss)]
fn step(i: usize) -> f64 {
    let x = i as f64 / STEPS as f64;
    x * x * x * (x * (x * 6.0 - 15.0) + 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_four_to_a_doubling() {
        assert_eq!(
            [1, 4, 5, 8, 9, 17, 20, 21, 2049].map(size_class),
            [1, 4, 5, 8, 10, 20, 20, 24, 2560]
        );
    }

    #[test]
    fn a_burst_decays_over_ten_seconds_along_a_smooth_curve() {
        let mut decay = Decay::default();
        let (mut dirty, mut left) = (1000, Vec::new());
        for ms in (0..=10_300).step_by(10) {
            if decay.advance(ms * 1000, dirty) {
                dirty = dirty.min(decay.limit);
            }
            if ms % 1000 == 0 {
                left.push(dirty);
            }
        }
        assert!(left.is_sorted_by(|a, b| a >= b), "{left:?}");
        assert!(left[1] > 980 && (450..560).contains(&left[5]) && left[9] < 20, "{left:?}");
        assert_eq!(dirty, 0);
    }

    #[test]
    fn eight_mib_go_back_on_free_and_less_does_not() {
        let machine = Arc::new(Machine::default());
        for (background, calls) in [(false, 1), (true, 0)] {
            let mut jemalloc = Jemalloc::new(Arc::clone(&machine), background);
            let before = machine.counts().purge_calls;
            for pages in [OVERSIZE, OVERSIZE / 2] {
                let place = jemalloc.alloc(pages).unwrap();
                machine.touch(place.page, pages);
                jemalloc.free(place);
            }
            assert_eq!(machine.counts().purge_calls - before, calls);
        }
    }
}
