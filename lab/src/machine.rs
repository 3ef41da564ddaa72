//! The simulated machine: a clock, and which pages are resident. A page is one bit, so a trace of
//! tens of GiB costs a few MiB.
//!
//! Invariant: `resident` is the number of set bits; only `touch` sets and only `purge` clears one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the machine has counted, pages but for the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages resident now.
    pub resident: u64,
    /// The most that there were.
    pub peak: u64,
    /// Pages touched that were not resident.
    pub faults: u64,
    /// Resident pages that were given back.
    pub purged: u64,
    /// System calls that gave pages back.
    pub purge_calls: u64,
}

#[derive(Debug, Default)]
struct Memory {
    bits: Vec<u64>,
    counts: Counts,
}

/// A clock and a memory.
#[derive(Debug, Default)]
pub struct Machine {
    now_us: AtomicU64,
    memory: Mutex<Memory>,
}

impl Machine {
    /// The time, microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.now_us.load(Relaxed)
    }

    /// Sets the clock, which does not go back.
    pub fn set_now_us(&self, us: u64) {
        debug_assert!(us >= self.now_us());
        self.now_us.store(us, Relaxed);
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program touches pages.
    pub fn touch(&self, page: usize, pages: usize) {
        let mut memory = self.memory();
        let mut new = 0;
        memory.each_word(page, pages, |word, mask| {
            new += u64::from((mask & !*word).count_ones());
            *word |= mask;
        });
        let counts = &mut memory.counts;
        counts.faults += new;
        counts.resident += new;
        counts.peak = counts.peak.max(counts.resident);
    }

    /// Pages go back to the kernel. What was not resident costs nothing.
    pub fn purge(&self, page: usize, pages: usize) {
        let mut memory = self.memory();
        let mut gone = 0;
        memory.each_word(page, pages, |word, mask| {
            gone += u64::from((mask & *word).count_ones());
            *word &= !mask;
        });
        memory.counts.purged += gone;
        memory.counts.resident -= gone;
    }

    /// Notes a system call that gives pages back.
    pub fn note_purge_call(&self) {
        self.memory().counts.purge_calls += 1;
    }

    /// What was counted so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.memory().counts
    }
}

impl Memory {
    /// Calls `f` with each word of the pages' bits, and which of its bits are meant.
    fn each_word(&mut self, page: usize, pages: usize, mut f: impl FnMut(&mut u64, u64)) {
        let end = page + pages;
        if self.bits.len() * 64 < end {
            self.bits.resize(end.div_ceil(64), 0);
        }
        let mut at = page;
        while at < end {
            let stop = (at / 64 * 64 + 64).min(end);
            let mask = (!0 >> (64 - (stop - at))) << (at % 64);
            f(&mut self.bits[at / 64], mask);
            at = stop;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_fault_once_until_they_are_purged() {
        let machine = Machine::default();
        machine.touch(60, 200);
        machine.touch(100, 200);
        let counts = machine.counts();
        assert_eq!((counts.faults, counts.resident, counts.peak), (240, 240, 240));
        machine.purge(0, 64);
        machine.purge(0, 64);
        let counts = machine.counts();
        assert_eq!((counts.purged, counts.resident), (4, 236));
        machine.touch(63, 1);
        assert_eq!(machine.counts().faults, 241);
        machine.purge(0, 1 << 20);
        assert_eq!((machine.counts().resident, machine.counts().peak), (0, 240));
    }

    #[test]
    fn any_range_counts_as_a_set_of_pages_does() {
        let machine = Machine::default();
        let mut set = std::collections::BTreeSet::new();
        let mut x = 88_172_645_463_325_252u64;
        for _ in 0..5000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let (page, pages) = ((x % 500) as usize, (x >> 20) as usize % 200);
            if x >> 60 & 1 == 0 {
                machine.touch(page, pages);
                set.extend(page..page + pages);
            } else {
                machine.purge(page, pages);
                set.retain(|p| !(page..page + pages).contains(p));
            }
            assert_eq!(machine.counts().resident, set.len() as u64);
        }
    }
}
