//! What is hot on a device: the peak of the memory in use over a window is kept warm. Only chunks
//! that are beyond that peak and unused for as long as the window go, spread over the decay.

/// Slots of a ring; the window's resolution.
const SLOTS: u64 = 8;

/// The peak of a figure over a window.
#[derive(Debug, Default)]
struct Ring {
    slots: [u64; SLOTS as usize],
    newest: u64,
}

impl Ring {
    /// Notes the most since the last look and the figure now, at the time of slot `at`; returns the
    /// peak of the window.
    fn note(&mut self, at: u64, most: u64, now: u64) -> u64 {
        // What was the peak since the last look may have been in any slot since.
        let steps = at.saturating_sub(self.newest).min(SLOTS);
        for step in 0..steps {
            self.slots[((at - step) % SLOTS) as usize] = now;
        }
        if steps < SLOTS {
            let slot = &mut self.slots[(at.max(self.newest) % SLOTS) as usize];
            *slot = (*slot).max(most);
        }
        self.newest = self.newest.max(at);
        self.slots.iter().copied().fold(now, u64::max)
    }
}

/// The demand for memory over a window.
#[derive(Debug)]
pub(crate) struct Heat {
    /// The sum of what each heap had in use at its own peak: never too little to keep.
    kept: Ring,
    /// What all had in use at one moment, as far as anybody looked: what growth is measured by.
    at_once: Ring,
    pub(crate) window_ms: u64,
    /// `None`: nothing ever goes by itself.
    pub(crate) decay_ms: Option<u64>,
    last_ms: u64,
}

impl Heat {
    pub(crate) fn new(window_ms: u64, decay_ms: Option<u64>) -> Self {
        let (kept, at_once) = (Ring::default(), Ring::default());
        Self { kept, at_once, window_ms, decay_ms, last_ms: 0 }
    }

    fn slot_ms(&self) -> u64 {
        self.window_ms.div_ceil(SLOTS - 1).max(1)
    }

    /// Notes the bytes in use now; returns their peak over the window.
    pub(crate) fn note(&mut self, now_ms: u64, in_use: u64) -> u64 {
        self.at_once.note(now_ms / self.slot_ms(), in_use, in_use)
    }

    /// Notes the sum of the heaps' peaks since the last such look, and the bytes in use now; returns
    /// the peak of the window.
    pub(crate) fn note_kept(&mut self, now_ms: u64, most: u64, in_use: u64) -> u64 {
        self.note(now_ms, in_use);
        self.kept.note(now_ms / self.slot_ms(), most, in_use)
    }

    /// How much of `cold` bytes goes now, when those unused for window and decay are `overdue`.
    pub(crate) fn budget(&mut self, now_ms: u64, cold: u64, overdue: u64) -> u64 {
        let Some(decay_ms) = self.decay_ms else { return 0 };
        let step_ms = now_ms.saturating_sub(std::mem::replace(&mut self.last_ms, now_ms));
        let share = cold.saturating_mul(step_ms.min(decay_ms)).checked_div(decay_ms);
        share.unwrap_or(cold).max(overdue).min(cold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_for_the_window_and_then_goes() {
        let mut heat = Heat::new(7000, Some(2000));
        assert_eq!(heat.note_kept(10_000, 100, 100), 100);
        for now in (10_100..=17_000).step_by(100) {
            assert_eq!(heat.note_kept(now, 10, 10), 100, "at {now}");
        }
        assert_eq!(heat.note_kept(18_100, 10, 10), 10);
    }

    #[test]
    fn cold_memory_goes_evenly_and_what_is_overdue_at_once() {
        let mut heat = Heat::new(5000, Some(2000));
        heat.budget(1000, 0, 0);
        assert_eq!(heat.budget(1500, 1000, 0), 250);
        assert_eq!(heat.budget(1500, 1000, 400), 400);
        assert_eq!(heat.budget(9000, 1000, 0), 1000);
        let mut never = Heat::new(5000, None);
        assert_eq!(never.budget(9000, 1000, 1000), 0);
        let mut at_once = Heat::new(0, Some(0));
        assert_eq!(at_once.budget(1, 1000, 0), 1000);
    }
}
