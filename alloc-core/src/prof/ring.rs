//! Events on their way to the log: a ring that any thread fills without a lock and one empties.
//!
//! Invariant: a slot's turn says who may use it: the writer of the n-th event while it is n, the reader
//! when it is n + 1; the reader makes it n + SLOTS. Nobody waits here: what to do with an event that finds the
//! ring full is the writer's business.
use core::ptr::null_mut;

use super::map;
use crate::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// Events that fit: what comes while a dump is written.
pub(super) const SLOTS: u64 = 1 << 14;
/// Words of an event.
pub(super) const WORDS: usize = 11;

#[derive(Debug)]
struct Slot {
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The ring.
#[derive(Debug)]
pub(super) struct Ring {
    slots: AtomicPtr<Slot>,
    written: AtomicU64,
    read: AtomicU64,
    dropped: AtomicU64,
}

impl Ring {
    pub(super) const fn new() -> Self {
        Self {
            slots: AtomicPtr::new(null_mut()),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Makes it ready for use, and empty. Nobody may use it meanwhile.
    pub(super) fn start(&self) -> bool {
        let mut slots = self.slots.load(Acquire);
        if slots.is_null() {
            #[allow(clippy::cast_possible_truncation, reason = "a constant")]
            let bytes = SLOTS as usize * size_of::<Slot>();
            slots = map(bytes).cast();
            if slots.is_null() {
                return false;
            }
            let _ = self.slots.compare_exchange(null_mut(), slots, AcqRel, Acquire);
        }
        for turn in 0..SLOTS {
            if let Some(slot) = self.slot(turn) {
                slot.turn.store(turn, Relaxed);
            }
        }
        self.written.store(0, Relaxed);
        self.read.store(0, Relaxed);
        self.dropped.store(0, Release);
        true
    }

    fn slot(&self, at: u64) -> Option<&'static Slot> {
        let slots = self.slots.load(Acquire);
        if slots.is_null() {
            return None;
        }
        #[allow(clippy::cast_possible_truncation, reason = "below SLOTS")]
        let slot = slots.wrapping_add((at % SLOTS) as usize);
        // SAFETY: one of the slots, which are atomics and stay.
        Some(unsafe { &*slot })
    }

    /// Puts an event; how many are waiting. Nothing: there was no room.
    pub(super) fn put(&self, words: [u64; WORDS]) -> Option<u64> {
        let mut at = self.written.load(Relaxed);
        loop {
            let slot = self.slot(at)?;
            let turn = slot.turn.load(Acquire);
            if turn == at {
                match self.written.compare_exchange(at, at + 1, Relaxed, Relaxed) {
                    Ok(_) => {
                        slot.words.iter().zip(words).for_each(|(to, word)| to.store(word, Relaxed));
                        slot.turn.store(at + 1, Release);
                        return Some(at + 1 - self.read.load(Relaxed).min(at));
                    }
                    Err(now) => at = now,
                }
            } else if turn < at {
                return None;
            } else {
                at = self.written.load(Relaxed);
            }
        }
    }

    /// The next event that is complete. Callers exclude each other.
    pub(super) fn take(&self) -> Option<[u64; WORDS]> {
        let at = self.read.load(Relaxed);
        let slot = self.slot(at)?;
        if slot.turn.load(Acquire) != at + 1 {
            return None;
        }
        let words = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(|i| slot.words[i].load(Relaxed));
        slot.turn.store(at + SLOTS, Release);
        self.read.store(at + 1, Relaxed);
        Some(words)
    }

    /// Counts an event that found no room and is given up.
    pub(super) fn drop_one(&self) {
        self.dropped.fetch_add(1, Relaxed);
    }

    /// Events that were given up since the last call.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.swap(0, Relaxed)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use crate::sync::atomic::AtomicU32;

    #[test]
    fn many_writers_and_a_reader_lose_nothing_but_what_is_counted() {
        static RING: Ring = Ring::new();
        static OVER: AtomicU32 = AtomicU32::new(0);
        const EACH: u64 = 50_000;
        assert_eq!(RING.put([0; WORDS]), None, "before it is ready");
        assert!(RING.start());
        let mut last = [0; 4];
        let (mut seen, mut dropped) = (0, 0);
        std::thread::scope(|scope| {
            for thread in 1..=3u64 {
                scope.spawn(move || {
                    for n in 1..=EACH {
                        if RING.put([thread, n, n, n, n, n, n, n, n, n, n]).is_none() {
                            RING.drop_one();
                        }
                    }
                    OVER.fetch_add(1, Release);
                });
            }
            loop {
                let over = OVER.load(Acquire) == 3;
                while let Some([thread, n, rest @ ..]) = RING.take() {
                    assert_eq!(rest, [n; WORDS - 2], "torn");
                    assert!(last[thread as usize] < n, "out of order");
                    last[thread as usize] = n;
                    seen += 1;
                }
                dropped += RING.dropped();
                if over {
                    break;
                }
            }
        });
        assert_eq!(seen + dropped, 3 * EACH);
        assert!(RING.start());
        let room = (0..=SLOTS).filter(|&n| RING.put([n; WORDS]).is_some()).count() as u64;
        assert_eq!((room, RING.dropped()), (SLOTS, 0));
        RING.drop_one();
        assert_eq!((RING.dropped(), RING.dropped()), (1, 0));
    }
}
