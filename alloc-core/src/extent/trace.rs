//! A record of what the page layer gives out and takes back, for replays: a ring of events that the
//! heap fills under its lock and that somebody else empties into a file. Off, it costs one relaxed
//! load.
//!
//! Invariants: one heap of a process records, so that its lock keeps writers of the ring apart; one
//! thread at a time empties it. What finds the ring full is counted as dropped, never waited for.
use crate::os::linux;
use crate::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// Events that fit: a second of a program that is very busy.
const EVENTS: usize = 1 << 16;

static ON: AtomicBool = AtomicBool::new(false);
static START_US: AtomicU64 = AtomicU64::new(0);
static RING: Ring<EVENTS> = Ring::new();

/// What happened to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Given out.
    Alloc,
    /// Taken back.
    Free,
    /// Grown or cut to a new length where it is.
    Resize,
}

/// One event; an extent is known by its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: Kind,
    /// Since the recording began.
    pub(crate) at_us: u64,
    pub(crate) page: u32,
    /// Its length; of no meaning for [`Kind::Free`].
    pub(crate) pages: u32,
}

impl Event {
    fn pack(self) -> [u64; 2] {
        [self.at_us << 2 | self.kind as u64, u64::from(self.page) << 32 | u64::from(self.pages)]
    }

    fn unpack([what, extent]: [u64; 2]) -> Self {
        let kind = match what & 3 {
            0 => Kind::Alloc,
            1 => Kind::Free,
            _ => Kind::Resize,
        };
        #[allow(clippy::cast_possible_truncation, reason = "the two halves of a word")]
        let [page, pages] = [(extent >> 32) as u32, extent as u32];
        Self { kind, at_us: what >> 2, page, pages }
    }
}

/// Events in the order in which they happened. Both counts only grow.
struct Ring<const N: usize> {
    slots: [[AtomicU64; 2]; N],
    written: AtomicUsize,
    read: AtomicUsize,
    dropped: AtomicU64,
}

impl<const N: usize> Ring<N> {
    const fn new() -> Self {
        Self {
            slots: [const { [const { AtomicU64::new(0) }; 2] }; N],
            written: AtomicUsize::new(0),
            read: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Callers exclude each other.
    fn put(&self, event: Event) {
        let written = self.written.load(Relaxed);
        if written - self.read.load(Acquire) == N {
            self.dropped.fetch_add(1, Relaxed);
            return;
        }
        for (slot, word) in self.slots[written % N].iter().zip(event.pack()) {
            slot.store(word, Relaxed);
        }
        self.written.store(written + 1, Release);
    }

    /// Callers exclude each other. Returns how many events were dropped since the last time.
    fn take(&self, mut each: impl FnMut(Event)) -> u64 {
        let (from, to) = (self.read.load(Relaxed), self.written.load(Acquire));
        for i in from..to {
            each(Event::unpack([0, 1].map(|word| self.slots[i % N][word].load(Relaxed))));
        }
        self.read.store(to, Release);
        self.dropped.swap(0, Relaxed)
    }

    fn is_empty(&self) -> bool {
        self.written.load(Relaxed) == self.read.load(Relaxed) && self.dropped.load(Relaxed) == 0
    }
}

/// Whether events are recorded.
#[inline(always)]
pub(crate) fn on() -> bool {
    ON.load(Relaxed)
}

/// Begins to record, with an empty ring.
pub(crate) fn start() {
    START_US.store(linux::now_us(), Relaxed);
    ON.store(true, Release);
}

/// Ends it for good; what is in the ring stays there.
pub(crate) fn stop() {
    ON.store(false, Relaxed);
}

/// Notes an event, under the heap's lock.
#[inline(always)]
pub(crate) fn record(kind: Kind, page: u32, pages: u32) {
    if on() {
        put(kind, page, pages);
    }
}

#[cold]
#[inline(never)]
fn put(kind: Kind, page: u32, pages: u32) {
    let at_us = linux::now_us().saturating_sub(START_US.load(Relaxed));
    RING.put(Event { kind, at_us, page, pages });
}

/// Whether [`take`] would find nothing.
pub(crate) fn is_empty() -> bool {
    RING.is_empty()
}

/// Empties the ring. Callers exclude each other. Returns how many events found no room.
pub(crate) fn take(each: impl FnMut(Event)) -> u64 {
    RING.take(each)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn event(n: u32) -> Event {
        let kind = [Kind::Alloc, Kind::Free, Kind::Resize][n as usize % 3];
        Event { kind, at_us: u64::from(n) << 20, page: u32::MAX - n, pages: n }
    }

    fn taken(ring: &Ring<4>) -> (Vec<Event>, u64) {
        let mut events = Vec::new();
        let dropped = ring.take(|event| events.push(event));
        (events, dropped)
    }

    #[test]
    fn events_come_out_as_they_went_in_and_what_finds_no_room_is_counted() {
        let ring = Ring::<4>::new();
        assert!(ring.is_empty());
        for round in 0..5 {
            let events: Vec<_> = (0..3).map(|i| event(round * 3 + i)).collect();
            events.iter().for_each(|&event| ring.put(event));
            assert_eq!(taken(&ring), (events, 0));
        }
        (0..7).for_each(|n| ring.put(event(n)));
        assert!(!ring.is_empty());
        assert_eq!(taken(&ring), ((0..4).map(event).collect(), 3));
        assert_eq!(taken(&ring), (Vec::new(), 0));
        assert!(ring.is_empty());
    }

    #[test]
    fn a_writer_and_a_reader_lose_nothing_but_what_is_counted() {
        let ring = Ring::<64>::new();
        const COUNT: u32 = 200_000;
        let (mut seen, mut dropped, mut last) = (0u64, 0, None);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (0..COUNT).for_each(|n| ring.put(event(n))));
            loop {
                let over = writer.is_finished();
                dropped += ring.take(|found| {
                    assert_eq!(found, event(found.pages), "torn");
                    assert!(last.is_none_or(|last| last < found.pages), "out of order");
                    last = Some(found.pages);
                    seen += 1;
                });
                if over {
                    break;
                }
            }
        });
        assert_eq!(seen + dropped, u64::from(COUNT));
    }
}
