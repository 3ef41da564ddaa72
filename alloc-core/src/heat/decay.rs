//! How fast cold pages go back. A dirty page is cold when it is beyond what the window's peak asks
//! for and was freed at least `window_ms` ago. From then on its purge is spread over `decay_ms`, so
//! that a burst's memory leaves in small steps and all of it is gone by `window_ms + decay_ms`.

/// When pages count as cold, and how long their purge may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// A page used within this time is hot.
    pub(crate) window_ms: u64,
    /// Cold pages are gone this long after the window; `None`: never.
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
    /// Dirty pages freed at least `window_ms + decay_ms` ago.
    pub(crate) overdue: u64,
    /// When the oldest dirty page was freed, milliseconds.
    pub(crate) oldest_ms: u64,
    /// The time now, and at the last step.
    pub(crate) now_ms: u64,
    pub(crate) last_ms: u64,
}

/// Pages to purge now.
pub(crate) fn budget(times: Times, s: Sight) -> u64 {
    let Some(decay_ms) = times.decay_ms else { return 0 };
    let cold = s.aged.min(s.dirty.saturating_sub(s.warm));
    let overdue = s.overdue.min(cold);
    let deadline = s.oldest_ms + times.window_ms + decay_ms;
    let left_ms = deadline.saturating_sub(s.now_ms);
    if left_ms == 0 {
        return overdue.max(1).min(cold);
    }
    let step_ms = s.now_ms.saturating_sub(s.last_ms).min(left_ms);
    overdue.max((cold * step_ms).div_ceil(left_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Times = Times::new(5000, Some(2000));

    fn sight() -> Sight {
        Sight {
            dirty: 1000,
            warm: 0,
            aged: 1000,
            overdue: 0,
            oldest_ms: 0,
            now_ms: 5100,
            last_ms: 5000,
        }
    }

    #[test]
    fn warm_and_young_pages_stay() {
        assert_eq!(budget(TIMES, Sight { warm: 1000, ..sight() }), 0);
        assert_eq!(budget(TIMES, Sight { aged: 0, ..sight() }), 0);
        assert_eq!(
            budget(Times { decay_ms: None, ..TIMES }, Sight { overdue: 1000, ..sight() }),
            0
        );
    }

    #[test]
    fn a_burst_is_gone_by_its_deadline_in_steps() {
        let (mut dirty, mut last) = (1000, 5000);
        let mut largest = 0;
        for now in (5100..=7000).step_by(100) {
            let overdue = if now >= 7000 { dirty } else { 0 };
            let s = Sight { dirty, aged: dirty, overdue, now_ms: now, last_ms: last, ..sight() };
            let n = budget(TIMES, s);
            largest = largest.max(n);
            dirty -= n;
            last = now;
        }
        assert_eq!(dirty, 0);
        assert!(largest <= 60, "a step of {largest} of 1000 pages");
    }

    #[test]
    fn no_decay_purges_at_once() {
        let times = Times::new(0, Some(0));
        let s = Sight { overdue: 1000, now_ms: 1, last_ms: 0, ..sight() };
        assert_eq!(budget(times, s), 1000);
    }
}
