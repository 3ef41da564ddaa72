//! The demand window: the peak of the pages in use over the last `window_ms`, kept as one peak for
//! each slot of a ring. What was in use within the window will be asked for again, so that much is
//! kept warm.

/// Slots of the ring; the window's resolution is an eighth of it.
const SLOTS: usize = 8;

/// Peak of the pages in use, over a sliding window.
pub(crate) struct Demand {
    slots: [u64; SLOTS],
    /// Number of the newest slot: `now / slot length`.
    newest: u64,
    in_use: u64,
    /// When that last changed.
    changed_ms: u64,
    window_ms: u64,
}

impl Demand {
    pub(crate) const fn new(window_ms: u64) -> Self {
        Self { slots: [0; SLOTS], newest: 0, in_use: 0, changed_ms: 0, window_ms }
    }

    /// Changes the window's length. The new one starts with the peak of the one before.
    pub(crate) fn set_window_ms(&mut self, now_ms: u64, window_ms: u64) {
        if self.window_ms == window_ms {
            return;
        }
        let peak = self.peak(now_ms);
        self.window_ms = window_ms;
        self.newest = now_ms / self.slot_ms();
        self.slots = [self.in_use; SLOTS];
        self.slots[index(self.newest)] = peak;
    }

    /// Pages in use now.
    pub(crate) fn in_use(&self) -> u64 {
        self.in_use
    }

    /// Notes `pages` more in use.
    pub(crate) fn add(&mut self, now_ms: u64, pages: u64) {
        self.roll(now_ms);
        self.changed_ms = now_ms;
        self.in_use += pages;
        let slot = &mut self.slots[index(self.newest)];
        *slot = (*slot).max(self.in_use);
    }

    /// Notes `pages` fewer in use.
    pub(crate) fn sub(&mut self, now_ms: u64, pages: u64) {
        self.roll(now_ms);
        self.changed_ms = now_ms;
        debug_assert!(self.in_use >= pages);
        self.in_use = self.in_use.saturating_sub(pages);
    }

    /// Most pages in use at one time within the window that ends now.
    pub(crate) fn peak(&mut self, now_ms: u64) -> u64 {
        self.roll(now_ms);
        // Exact, where the slots know it to the length of one only.
        if now_ms.saturating_sub(self.changed_ms) > self.window_ms {
            return self.in_use;
        }
        self.slots.iter().copied().fold(self.in_use, u64::max)
    }

    /// Starts new slots up to now; each begins with what is in use at its start. A slot leaves the
    /// ring when all of it is older than the window, so that all but the newest must span that much.
    fn roll(&mut self, now_ms: u64) {
        let now = now_ms / self.slot_ms();
        let steps = now.saturating_sub(self.newest).min(SLOTS as u64);
        if steps == 0 {
            return;
        }
        for step in 0..steps {
            self.slots[index(now - step)] = self.in_use;
        }
        self.newest = now;
    }

    fn slot_ms(&self) -> u64 {
        self.window_ms.div_ceil(SLOTS as u64 - 1).max(1)
    }
}

fn index(slot: u64) -> usize {
    #[allow(clippy::cast_possible_truncation, reason = "below SLOTS")]
    let i = (slot % SLOTS as u64) as usize;
    i
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_for_the_window_and_then_goes() {
        let mut d = Demand::new(7000);
        d.add(10_000, 100);
        d.sub(10_100, 90);
        for now in (10_100..=17_000).step_by(100) {
            assert_eq!(d.peak(now), 100, "at {now}");
        }
        assert_eq!(d.peak(17_101), 10);
    }

    #[test]
    fn while_demand_changes_the_peak_may_stay_for_one_slot_more() {
        let mut d = Demand::new(7000);
        d.add(10_000, 100);
        d.sub(10_100, 90);
        d.sub(15_000, 1);
        assert_eq!((d.peak(17_100), d.peak(18_100)), (100, 10));
    }

    #[test]
    fn another_window_keeps_the_peak() {
        for other_ms in [7000, 500] {
            let mut d = Demand::new(1000);
            d.add(10_000, 100);
            d.sub(10_100, 90);
            d.set_window_ms(10_200, other_ms);
            assert_eq!((d.peak(10_200), d.peak(10_101 + other_ms)), (100, 10));
            d.add(10_101 + other_ms, 1);
            assert_eq!(d.peak(10_200 + other_ms), 100);
        }
    }

    #[test]
    fn a_zero_window_keeps_nothing() {
        let mut d = Demand::new(0);
        d.add(5, 50);
        d.sub(5, 50);
        assert_eq!(d.peak(20), 0);
    }

    /// The most that was in use from `from` on, by a log of changes.
    fn most(log: &[(u64, u64)], from: u64) -> u64 {
        let first = log.iter().rposition(|&(t, _)| t < from).unwrap_or(0);
        log[first..].iter().map(|&(_, in_use)| in_use).max().unwrap()
    }

    #[test]
    fn the_peak_is_that_of_the_window_or_of_one_slot_more() {
        // No multiple of the slots.
        let (window, slot) = (1000, 143);
        let mut d = Demand::new(window);
        let mut log = std::vec![(0u64, 0u64)];
        let mut x = 12345u64;
        let mut now = 0;
        for _ in 0..20_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            now += x % 40;
            let n = (x >> 20) % 100;
            if x & 1 << 50 == 0 {
                d.add(now, n)
            } else {
                d.sub(now, n.min(d.in_use()))
            }
            log.push((now, d.in_use()));
            let least = most(&log, now.saturating_sub(window));
            let upper = most(&log, now.saturating_sub(window + slot));
            let peak = d.peak(now);
            assert!((least..=upper).contains(&peak), "{peak} is not in {least} to {upper}");
            if log.len() > 1000 {
                log.drain(..500);
            }
        }
    }
}
