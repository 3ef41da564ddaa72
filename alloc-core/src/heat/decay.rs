//! How fast cold pages go back. A dirty page is cold when it is beyond what the window's peak asks
//! for and was freed at least `window_ms` ago. From then on its purge is spread evenly over
//! `decay_ms`, so that a burst's memory leaves in small steps and all of it is gone by then.
//!
//! Pages that become cold at about the same time are a batch. After a share of `decay_ms` that share
//! of a batch is to be gone; all batches together say how many cold pages may be left. Which pages go
//! is the caller's affair. Pages that were cold and are used again leave all batches alike.

/// Batches that are kept: enough that the oldest is over when a new one takes its place.
const BATCHES: usize = 34;

/// When pages count as cold, and how long their purge may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// A page used within this time is hot.
    pub(crate) window_ms: u64,
    /// Cold pages are gone this long after they became cold; `None`: never.
    pub(crate) decay_ms: Option<u64>,
    /// Before that the kernel may take them for this long; `None`: for good; 0: not at all.
    pub(crate) muzzy_ms: Option<u64>,
}

impl Times {
    /// Without a muzzy stage.
    pub(crate) const fn new(window_ms: u64, decay_ms: Option<u64>) -> Self {
        Self { window_ms, decay_ms, muzzy_ms: Some(0) }
    }
}

/// What the page layer knows when it asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Dirty pages in all.
    pub(crate) dirty: u64,
    /// Pages to keep because the window's peak asks for them.
    pub(crate) warm: u64,
    /// Dirty pages freed at least `window_ms` ago.
    pub(crate) aged: u64,
    /// When the oldest dirty page was freed, milliseconds.
    pub(crate) oldest_ms: u64,
    /// Pages that can only go together: one of the kernel's.
    pub(crate) unit: u64,
    /// The time now, and at the last step.
    pub(crate) now_ms: u64,
    pub(crate) last_ms: u64,
}

/// Pages that became cold at about the same time.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// When they did, on average.
    cold_ms: u64,
    /// How many they were, those that have gone since then among them.
    pages: u64,
}

/// The cold pages by when they became cold.
#[derive(Debug)]
pub(crate) struct Decay {
    batches: [Batch; BATCHES],
    newest: usize,
    /// Cold pages that the last step left.
    left: u64,
}

impl Decay {
    pub(crate) const fn new() -> Self {
        Self { batches: [Batch { cold_ms: 0, pages: 0 }; BATCHES], newest: 0, left: 0 }
    }

    /// Pages to purge now.
    pub(crate) fn budget(&mut self, times: Times, s: Sight) -> u64 {
        let Some(decay_ms) = times.decay_ms else { return 0 };
        let cold = s.aged.min(s.dirty.saturating_sub(s.warm));
        if cold < self.left {
            self.scale(cold, self.left);
        } else {
            // None of them was cold before the oldest was, nor at the last step.
            let since_ms = s.last_ms.max(s.oldest_ms + times.window_ms).min(s.now_ms);
            self.add(since_ms, cold - self.left, decay_ms);
        }
        let due = cold.saturating_sub(self.allowed(s.now_ms, decay_ms)) / s.unit * s.unit;
        self.left = cold - due;
        due
    }

    /// Says that so many of the pages to purge stayed; they are to be purged all the more.
    pub(crate) fn stayed(&mut self, pages: u64) {
        self.left += pages;
    }

    fn add(&mut self, cold_ms: u64, pages: u64, decay_ms: u64) {
        if pages == 0 {
            return;
        }
        let batch = &mut self.batches[self.newest];
        if cold_ms.saturating_sub(batch.cold_ms) > decay_ms / (BATCHES as u64 - 2) {
            self.newest = (self.newest + 1) % BATCHES;
            self.batches[self.newest] = Batch { cold_ms, pages };
            return;
        }
        batch.pages += pages;
        batch.cold_ms += cold_ms.saturating_sub(batch.cold_ms) * pages / batch.pages;
    }

    /// Takes all batches down to `numerator` of `denominator`.
    fn scale(&mut self, numerator: u64, denominator: u64) {
        for batch in &mut self.batches {
            batch.pages = (batch.pages * numerator).div_ceil(denominator);
        }
    }

    /// Cold pages that may be there now.
    fn allowed(&self, now_ms: u64, decay_ms: u64) -> u64 {
        let shares = self.batches.iter().map(|batch| {
            batch.pages * decay_ms.saturating_sub(now_ms.saturating_sub(batch.cold_ms))
        });
        shares.sum::<u64>().div_ceil(decay_ms.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const TIMES: Times = Times::new(5000, Some(2000));

    fn sight() -> Sight {
        Sight {
            dirty: 1000,
            warm: 0,
            aged: 1000,
            oldest_ms: 0,
            unit: 1,
            now_ms: 5100,
            last_ms: 5000,
        }
    }

    #[test]
    fn warm_and_young_pages_stay() {
        let mut d = Decay::new();
        assert_eq!(d.budget(TIMES, Sight { warm: 1000, ..sight() }), 0);
        assert_eq!(d.budget(TIMES, Sight { aged: 0, ..sight() }), 0);
        let late = Sight { now_ms: 100_000, ..sight() };
        assert_eq!(d.budget(Times { decay_ms: None, ..TIMES }, late), 0);
    }

    /// Runs steps of 100 ms until `end_ms`; `change` says how many dirty pages come or go before one.
    fn run(end_ms: u64, mut change: impl FnMut(u64) -> i64) -> Vec<u64> {
        let (mut d, mut dirty, mut steps) = (Decay::new(), 1000u64, Vec::new());
        for now_ms in (5100..=end_ms).step_by(100) {
            dirty = dirty.strict_add_signed(change(now_ms));
            let due = d.budget(
                TIMES,
                Sight { dirty, aged: dirty, now_ms, last_ms: now_ms - 100, ..sight() },
            );
            dirty -= due;
            steps.push(due);
        }
        assert_eq!(dirty, 0);
        steps
    }

    #[test]
    fn a_burst_is_gone_by_its_deadline_in_even_steps() {
        let steps = run(7000, |_| 0);
        assert!(steps.iter().all(|step| (49..=51).contains(step)), "{steps:?}");
    }

    #[test]
    fn pages_that_become_cold_later_go_later() {
        let steps = run(8000, |now| if now == 6000 { 10_000 } else { 0 });
        assert!(steps[..9].iter().all(|step| (49..=51).contains(step)), "{steps:?}");
        assert!(steps[9..].iter().all(|&step| step <= 560), "{steps:?}");
    }

    #[test]
    fn pages_long_unused_that_were_warm_until_now_go_in_steps_too() {
        let late = Sight { oldest_ms: 0, now_ms: 90_100, last_ms: 90_000, ..sight() };
        assert_eq!(Decay::new().budget(TIMES, late), 50);
    }

    #[test]
    fn pages_used_again_do_not_quicken_the_rest() {
        let steps = run(9000, |now| match now {
            5200 | 5400 | 5600 => -800,
            5300 | 5500 | 5700 => 800,
            _ => 0,
        });
        assert!(steps.iter().all(|&step| step <= 100), "{steps:?}");
    }

    #[test]
    fn pages_that_stayed_are_still_due() {
        let (mut d, mut due) = (Decay::new(), 0);
        for now_ms in (5100..=6000).step_by(100) {
            due = d.budget(TIMES, Sight { now_ms, last_ms: now_ms - 100, ..sight() });
            d.stayed(due);
        }
        assert_eq!(due, 500);
    }

    #[test]
    fn a_unit_goes_whole_or_not_at_all() {
        let mut d = Decay::new();
        let mut at = |dirty, now_ms| {
            d.budget(TIMES, Sight { dirty, aged: dirty, unit: 16, now_ms, ..sight() })
        };
        assert_eq!([at(96, 5100), at(96, 5400), at(80, 5999), at(64, 7000)], [0, 16, 16, 64]);
    }

    #[test]
    fn no_decay_purges_at_once() {
        let times = Times::new(0, Some(0));
        assert_eq!(Decay::new().budget(times, Sight { now_ms: 1, last_ms: 0, ..sight() }), 1000);
    }
}
