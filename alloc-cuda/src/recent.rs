//! The last calls of the driver, in a ring: what led to an error, and what a pool is doing now.
//!
//! Invariant: an entry is one word, so it is whole; entries that are written meanwhile may be missing.

use crate::driver::{Call, code};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const ENTRIES: usize = 256;
/// An entry: the time in 40 bits, the code in 16, the call in 8. A time of 0 is no entry.
const LG_CODE: u32 = 8;
const LG_TIME: u32 = 24;

/// The system's monotonic time, as of its last tick: that costs no more than a load.
pub(crate) fn coarse_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// One call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecentCall {
    /// When it returned: milliseconds of the system's monotonic clock.
    pub time_ms: u64,
    /// The function.
    pub call: Call,
    /// What it returned.
    pub code: u32,
}

impl fmt::Display for RecentCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms {}", self.time_ms, self.call.symbol())?;
        if self.code == code::SUCCESS {
            return Ok(());
        }
        write!(f, " {} ({})", code::name(self.code), self.code)
    }
}

/// The ring.
pub(crate) struct Recent {
    words: [AtomicU64; ENTRIES],
    next: AtomicU64,
}

impl Recent {
    pub(crate) fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; ENTRIES], next: AtomicU64::new(0) }
    }

    pub(crate) fn note(&self, call: Call, code: u32, time_ms: u64) {
        let at = self.next.fetch_add(1, Relaxed) as usize % ENTRIES;
        let time = time_ms.max(1) << LG_TIME;
        let word = time | u64::from(code.min(0xFFFF)) << LG_CODE | call as u64;
        self.words[at].store(word, Relaxed);
    }

    /// The calls, oldest first.
    pub(crate) fn calls(&self) -> Vec<RecentCall> {
        let next = self.next.load(Relaxed) as usize;
        let words = (next..next + ENTRIES).map(|at| self.words[at % ENTRIES].load(Relaxed));
        let call = |word: u64| {
            let call = *Call::ALL.get((word & 0xFF) as usize)?;
            let code = (word >> LG_CODE & 0xFFFF) as u32;
            Some(RecentCall { time_ms: word >> LG_TIME, call, code })
        };
        words.filter(|&word| word != 0).filter_map(call).collect()
    }
}

const _: () = assert!(Call::ALL.len() <= 256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_calls_are_there_oldest_first() {
        let recent = Recent::new();
        assert!(recent.calls().is_empty());
        for i in 0..300 {
            recent.note(Call::cuEventQuery, if i % 2 == 0 { 0 } else { 600 }, i);
        }
        let calls = recent.calls();
        assert_eq!(calls.len(), ENTRIES);
        let times: Vec<u64> = calls.iter().map(|call| call.time_ms).collect();
        assert_eq!(times, (44..300).collect::<Vec<_>>());
        assert_eq!(calls[255].to_string(), "299 ms cuEventQuery CUDA_ERROR_NOT_READY (600)");
        assert_eq!(calls[254].to_string(), "298 ms cuEventQuery");
    }
}
