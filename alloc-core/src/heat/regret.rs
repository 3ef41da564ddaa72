//! Regret: pages asked for again soon after they were purged. Had they been kept, they would not have
//! had to be faulted in; so the window grows until it spans the time between their last use and their
//! next. A program whose period is longer than the window is learned in that way. One that was quiet
//! in between has to come back twice after about the same time: bursts that come when they like would
//! hold their memory for nothing.
//!
//! The purges of the last minute are kept as (when the pages were last used, how many). A request
//! that finds no dirty pages is set against the newest of them: demand that comes back comes back
//! for what was used last.
//!
//! The window falls back once demand was quiet for as long as the options' window; where regret shows
//! that a quiet spell belongs to the period, for a quarter longer than that spell. Demand is what the
//! page layer is asked for, in proportion to what is in use: a thread that only polls is quiet.

/// The window is never wider than this, milliseconds, nor is a purge regretted later.
const MOST_MS: u64 = 60_000;
/// Purges that are remembered, merged where they are of about the same time.
const ENTRIES: usize = 32;
/// How much of the pages in use has to be regretted before the window follows: one in this many.
const WORTH: u64 = 64;

/// Pages purged that were last used at about the same time.
#[derive(Clone, Copy, Debug, Default)]
struct Purged {
    used_ms: u64,
    pages: u64,
}

/// What was purged lately, and the window that follows from it.
#[derive(Debug)]
pub(crate) struct Regret {
    log: [Purged; ENTRIES],
    newest: usize,
    /// The window that the options ask for, and the one in force.
    base_ms: u64,
    window_ms: u64,
    /// When there last was demand, and what was asked for since, pages.
    active_ms: u64,
    asked_pages: u64,
    /// How long the last quiet spell was, and when it ended.
    spell_ms: u64,
    woke_ms: u64,
    /// A quiet spell of this length ends the program's work.
    quiet_ms: u64,
    /// Pages regretted since they last were enough to count.
    recent: u64,
    /// When that last was, after what time, and after what time the time before.
    regret_ms: u64,
    gap_ms: u64,
    gap_before_ms: u64,
    /// Pages regretted in all.
    pub(crate) pages: u64,
}

impl Regret {
    pub(crate) const fn new(base_ms: u64) -> Self {
        Self {
            log: [Purged { used_ms: 0, pages: 0 }; ENTRIES],
            newest: 0,
            base_ms,
            window_ms: base_ms,
            active_ms: 0,
            asked_pages: 0,
            spell_ms: 0,
            woke_ms: 0,
            quiet_ms: base_ms,
            recent: 0,
            regret_ms: 0,
            gap_ms: 0,
            gap_before_ms: 0,
            pages: 0,
        }
    }

    /// Sets the window that the options ask for.
    pub(crate) fn set_base_ms(&mut self, base_ms: u64) {
        if self.base_ms != base_ms {
            self.base_ms = base_ms;
            self.window_ms = base_ms;
            self.quiet_ms = base_ms;
        }
    }

    /// The window in force.
    pub(crate) fn window_ms(&self) -> u64 {
        self.window_ms
    }

    /// Notes that `pages` pages were asked for, of `in_use` in all.
    pub(crate) fn active(&mut self, now_ms: u64, pages: u64, in_use: u64) {
        self.asked_pages += pages;
        if self.asked_pages * WORTH < in_use {
            return;
        }
        self.asked_pages = 0;
        let spell_ms = now_ms.saturating_sub(self.active_ms);
        if spell_ms > self.base_ms {
            (self.spell_ms, self.woke_ms) = (spell_ms, now_ms);
        }
        self.active_ms = now_ms;
    }

    /// Whether there was no demand for as long as the options' window.
    pub(crate) fn is_quiet(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.active_ms) > self.base_ms
    }

    /// Lets the window fall back once the program was quiet for long enough.
    pub(crate) fn relax(&mut self, now_ms: u64) {
        if now_ms.saturating_sub(self.active_ms) > self.quiet_ms {
            self.window_ms = self.base_ms;
            self.quiet_ms = self.base_ms;
        }
    }

    /// Notes a purge of `pages` that were last used at `used_ms`.
    pub(crate) fn purged(&mut self, used_ms: u64, pages: u64) {
        let merge_ms = self.window_ms / 8;
        let entry = &mut self.log[self.newest];
        if entry.pages > 0 && used_ms.abs_diff(entry.used_ms) <= merge_ms {
            entry.used_ms = entry.used_ms.max(used_ms);
            entry.pages += pages;
            return;
        }
        self.newest = (self.newest + 1) % ENTRIES;
        self.log[self.newest] = Purged { used_ms, pages };
    }

    /// Notes that `pages` clean pages were asked for, of `in_use` in all. Returns how many of them
    /// were purged too soon.
    pub(crate) fn asked(&mut self, now_ms: u64, pages: u64, in_use: u64) -> u64 {
        let (mut left, mut gap_ms) = (pages, 0);
        for back in 0..ENTRIES {
            let entry = &mut self.log[(self.newest + ENTRIES - back) % ENTRIES];
            if left == 0 || now_ms.saturating_sub(entry.used_ms) > MOST_MS {
                break;
            }
            let found = entry.pages.min(left);
            if found > 0 {
                gap_ms = gap_ms.max(now_ms.saturating_sub(entry.used_ms));
            }
            entry.pages -= found;
            left -= found;
        }
        let regretted = pages - left;
        self.pages += regretted;
        self.recent += regretted;
        if regretted > 0 && self.recent * WORTH >= in_use && self.base_ms > 0 {
            self.recent = 0;
            self.learn(now_ms, gap_ms);
        }
        regretted
    }

    /// Widens the window to a gap of `gap_ms`; after a quiet spell only if the gap is about as long as the
    /// one before.
    fn learn(&mut self, now_ms: u64, gap_ms: u64) {
        // What comes back after one gap comes back in many pieces.
        if now_ms.saturating_sub(self.regret_ms) < gap_ms / 2 {
            self.gap_ms = self.gap_ms.max(gap_ms);
        } else {
            (self.gap_before_ms, self.gap_ms) = (self.gap_ms, gap_ms);
        }
        self.regret_ms = now_ms;
        let (least, most) =
            (self.gap_ms.min(self.gap_before_ms), self.gap_ms.max(self.gap_before_ms));
        let again = most - least <= least / 4;
        let woke = now_ms.saturating_sub(self.woke_ms) <= self.base_ms;
        if woke && !again {
            return;
        }
        let with_room = |ms: u64| (ms + ms / 4).min(MOST_MS);
        self.window_ms = self.window_ms.max(with_room(if again { most } else { self.gap_ms }));
        if woke {
            self.quiet_ms = self.quiet_ms.max(with_room(self.spell_ms));
        }
    }

    /// How long it has to be quiet until the window falls back.
    #[cfg(test)]
    pub(crate) fn quiet_ms(&self) -> u64 {
        self.quiet_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twice in a row `pages` pages are purged that were used at `from_ms` and `gap_ms` after, and asked
    /// for again a gap later.
    fn regretted_twice(r: &mut Regret, from_ms: u64, gap_ms: u64, pages: u64) {
        for used_ms in [from_ms, from_ms + gap_ms] {
            r.purged(used_ms, pages);
            r.active(used_ms + gap_ms, pages, pages);
            assert_eq!(r.asked(used_ms + gap_ms, pages, pages), pages);
        }
    }

    #[test]
    fn pages_that_were_never_purged_are_not_regretted() {
        let mut r = Regret::new(5000);
        assert_eq!(r.asked(1000, 500, 500), 0);
        assert_eq!(r.window_ms(), 5000);
    }

    #[test]
    fn the_window_grows_to_the_period_and_no_further_than_a_minute() {
        let mut r = Regret::new(5000);
        r.purged(10_000, 1000);
        assert_eq!(r.asked(22_500, 400, 1000), 400);
        assert_eq!(r.asked(22_500, 900, 1000), 600, "no page is regretted twice");
        assert_eq!(r.window_ms(), 12_500 + 3125);
        let mut r = Regret::new(5000);
        regretted_twice(&mut r, 10_000, 58_000, 1000);
        assert_eq!(r.window_ms(), MOST_MS);
        r.purged(200_000, 1000);
        assert_eq!(r.asked(270_000, 1000, 1000), 0, "what is longer ago is forgotten");
    }

    #[test]
    fn bursts_after_quiet_spells_of_different_lengths_are_no_period() {
        let mut r = Regret::new(5000);
        let mut now = 10_000;
        for gap in [8000, 20_000, 11_000, 50_000, 15_000] {
            r.active(now, 1000, 1000);
            r.purged(now, 1000);
            now += gap;
            r.active(now, 1000, 1000);
            assert_eq!(r.asked(now, 1000, 1000), 1000);
        }
        assert_eq!(r.window_ms(), 5000);
    }

    #[test]
    fn a_quiet_program_gets_its_window_back() {
        let mut r = Regret::new(5000);
        // It was busy all the time.
        (0..=20_000).step_by(100).for_each(|now| r.active(now, 1000, 1000));
        for used_ms in [4000, 12_000] {
            r.purged(used_ms, 1000);
            r.asked(used_ms + 8000, 1000, 1000);
        }
        r.relax(24_000);
        assert!(r.window_ms() > 5000);
        // A little now and then is quiet too.
        (20_100..25_000).step_by(1000).for_each(|now| r.active(now, 1, 1000));
        r.relax(25_001);
        assert_eq!(r.window_ms(), 5000);
    }

    #[test]
    fn a_quiet_spell_that_is_part_of_the_period_is_learned() {
        let mut r = Regret::new(5000);
        r.active(10_000, 1000, 1000);
        regretted_twice(&mut r, 10_000, 12_000, 1000);
        let window = r.window_ms();
        assert_eq!((window, r.quiet_ms()), (15_000, 15_000));
        r.relax(46_000);
        assert_eq!(r.window_ms(), window, "as long as the last spell");
        r.relax(49_001);
        assert_eq!((r.window_ms(), r.quiet_ms()), (5000, 5000), "and then it is forgotten");
    }

    #[test]
    fn a_little_regret_does_not_move_the_window() {
        let mut r = Regret::new(5000);
        for now in [20_000, 30_000, 40_000] {
            r.purged(now - 10_000, 1000);
            r.asked(now, 10, 10_000);
        }
        assert_eq!(r.window_ms(), 5000);
    }

    #[test]
    fn without_a_window_there_is_nothing_to_learn() {
        let mut r = Regret::new(0);
        regretted_twice(&mut r, 10_000, 100, 1000);
        assert_eq!(r.window_ms(), 0);
    }
}
