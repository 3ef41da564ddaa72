//! A slab: one extent cut into slots of one size, with a bitmap of its free slots outside of it.
//!
//! Freeing needs no lock, from any thread: set the slot's bit, then add to the count in the control
//! word. Taking is done by one thread at a time, under the arena's lock: clear bits, then subtract.
//! So the count may lag behind the bits but a slab is only released when the count says that all
//! slots are free *and* it is seen under the lock. A thread whose free makes a detached slab usable,
//! or a slab wholly free, is told to put the slab on its arena's pending list; the flag that says
//! so is set in the same step, so a slab is on the list at most once and is never released while
//! somebody is about to put it there.
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::const_fn;

/// Most slots in a slab.
pub(crate) const MOST_SLOTS: usize = 1024;
/// Words of a bitmap.
pub(crate) const WORDS: usize = MOST_SLOTS / 64;
/// A slab's bitmap: bit i is set when slot i is free.
pub(crate) type Bits = [AtomicU64; WORDS];

/// Count of zero free slots: the count may lag, so it is kept off zero.
const ZERO: u32 = 4096;
const COUNT: u32 = 0xffff;
/// The slab has no free slots and is in no list of its arena.
const DETACHED: u32 = 1 << 16;
/// The slab is on the arena's pending list, or about to be.
const PENDING: u32 = 1 << 17;

/// Free slots of a slab with this control word, by a glance.
pub(crate) fn free_slots(ctl: u32) -> u32 {
    (ctl & COUNT).saturating_sub(ZERO)
}

/// A view of a slab's shared words.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    pub(crate) ctl: &'a AtomicU32,
    pub(crate) bits: &'a [AtomicU64],
    pub(crate) slots: u32,
}

impl Slots<'_> {
    /// Makes all slots free. The slab is not yet shared.
    pub(crate) fn init(&self) {
        let words = self.slots as usize / 64;
        for (i, word) in self.bits.iter().enumerate() {
            let bits = match i {
                i if i < words => u64::MAX,
                i if i == words => (1 << (self.slots % 64)) - 1,
                _ => 0,
            };
            word.store(bits, Ordering::Relaxed);
        }
        self.ctl.store(ZERO + self.slots, Ordering::Relaxed);
    }

    /// Frees slots `mask` of word `word`. `Err` holds the bits that were free already.
    pub(crate) fn free(&self, word: usize, mask: u64) -> Result<(), u64> {
        let before = self.bits[word].fetch_or(mask, Ordering::Release);
        if before & mask == 0 { Ok(()) } else { Err(before & mask) }
    }

    /// Counts `n` slots freed before. True: the caller must put the slab on the pending list.
    #[must_use]
    pub(crate) fn count_freed(&self, n: u32) -> bool {
        let mut ctl = self.ctl.load(Ordering::Relaxed);
        loop {
            let count = (ctl & COUNT) + n;
            let mut next = ctl + n;
            let usable = ctl & DETACHED != 0 && count > ZERO;
            let tell = ctl & PENDING == 0 && (usable || count == ZERO + self.slots);
            if tell {
                next |= PENDING;
            }
            match self.ctl.compare_exchange_weak(ctl, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return tell,
                Err(seen) => ctl = seen,
            }
        }
    }

    /// Takes up to `most` free slots from the word at or after `hint`; `give` gets each index. Returns
    /// how many, and the word of the last. Under the arena's lock.
    pub(crate) fn take(&self, hint: usize, most: u32, mut give: impl FnMut(u32)) -> (u32, usize) {
        let words = (self.slots as usize).div_ceil(64);
        let (mut taken, mut at) = (0, hint.min(words - 1));
        for step in 0..words {
            let word = (hint + step) % words;
            let mut free = self.bits[word].load(Ordering::Acquire);
            let mut mask = 0;
            while free != 0 && taken < most {
                let bit = free.trailing_zeros();
                free &= free - 1;
                mask |= 1 << bit;
                #[allow(clippy::cast_possible_truncation, reason = "at most WORDS")]
                give(word as u32 * 64 + bit);
                taken += 1;
            }
            if mask != 0 {
                self.bits[word].fetch_and(!mask, Ordering::AcqRel);
                at = word;
            }
            if taken == most {
                break;
            }
        }
        if taken > 0 {
            self.ctl.fetch_sub(taken, Ordering::AcqRel);
        }
        (taken, at)
    }

    /// Free slots, as far as they are counted.
    pub(crate) fn free_count(&self) -> u32 {
        (self.ctl.load(Ordering::Acquire) & COUNT).saturating_sub(ZERO)
    }

    /// Tries to detach a slab that had no free slot: from then on a free reports it. False when slots
    /// were freed meanwhile. Where a slot was taken before its free was counted, the count is below
    /// that of no free slots for a moment. Under the arena's lock.
    pub(crate) fn detach(&self) -> bool {
        let mut ctl = self.ctl.load(Ordering::Acquire);
        while ctl & COUNT <= ZERO {
            let next = ctl | DETACHED;
            match self.ctl.compare_exchange_weak(ctl, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(seen) => ctl = seen,
            }
        }
        false
    }

    /// Detaches a slab whose count is wrong: only a fork's child, whose copy of a free may not be
    /// whole, has such a one.
    pub(crate) fn detach_broken(&self) {
        self.ctl.fetch_or(DETACHED, Ordering::AcqRel);
    }

    /// Answers the slab's report, under the arena's lock: whether it had been detached.
    pub(crate) fn answer(&self) -> bool {
        self.ctl.fetch_and(!(PENDING | DETACHED), Ordering::AcqRel) & DETACHED != 0
    }

    /// Whether all slots are free and nobody is about to report the slab. Under the arena's lock.
    pub(crate) fn is_unused(&self) -> bool {
        self.ctl.load(Ordering::Acquire) == ZERO + self.slots
    }
}

/// A list that many threads put slabs on and the arena takes whole.
pub(crate) struct Pending(AtomicU32);

impl Pending {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Self(AtomicU32::new(0))
        }
    }

    /// Puts `id` on the list; `link` is its link.
    pub(crate) fn put(&self, id: u32, link: &AtomicU32) {
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            link.store(head, Ordering::Relaxed);
            match self.0.compare_exchange_weak(head, id, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return,
                Err(seen) => head = seen,
            }
        }
    }

    /// Takes the whole list: its first id, or 0.
    pub(crate) fn take(&self) -> u32 {
        if self.is_empty() { 0 } else { self.0.swap(0, Ordering::AcqRel) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Sees to it that no report is left lying: `answer` tries the arena's lock and answers what is on
    /// the list, or says that somebody else holds the lock. That thread comes here after letting it
    /// go, and then either it sees the report, or the reporter has seen the lock free.
    pub(crate) fn settle(&self, mut answer: impl FnMut() -> bool) {
        loop {
            fence(Ordering::SeqCst);
            if self.is_empty() || !answer() {
                return;
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::lock::Mutex;
    use loom::sync::Arc;
    use loom::thread;
    use std::vec::Vec;

    /// One slab of an arena: what the arena's lock covers is how often the slab was released.
    struct Model {
        ctl: AtomicU32,
        bits: [AtomicU64; 1],
        link: AtomicU32,
        pending: Pending,
        arena: Mutex<(bool, u32)>,
    }

    const SLOTS: u32 = 2;

    fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    impl Model {
        /// All slots are out, and the slab is detached.
        fn new() -> Self {
            let model = Self {
                ctl: AtomicU32::new(0),
                bits: [AtomicU64::new(0)],
                link: AtomicU32::new(0),
                pending: Pending::new(),
                arena: Mutex::new((false, 0)),
            };
            model.slots().init();
            assert_eq!(model.slots().take(0, SLOTS, |_| ()).0, SLOTS);
            assert!(model.slots().detach());
            model
        }

        fn slots(&self) -> Slots<'_> {
            Slots { ctl: &self.ctl, bits: &self.bits, slots: SLOTS }
        }

        fn free(&self, slot: u32) {
            self.slots().free(0, 1 << slot).unwrap();
            if self.slots().count_freed(1) {
                self.pending.put(1, &self.link);
            }
            self.settle();
        }

        fn settle(&self) {
            self.pending.settle(|| {
                let Some(mut arena) = self.arena.try_lock() else { return false };
                self.answer(&mut arena);
                true
            });
        }

        /// `arena`: whether the slab is attached, and its releases.
        fn answer(&self, arena: &mut (bool, u32)) {
            if self.pending.take() == 0 {
                return;
            }
            arena.0 |= self.slots().answer();
            if self.slots().is_unused() {
                arena.1 += 1;
            }
        }
    }

    #[test]
    fn loom_freed_slots_are_reported_and_the_slab_released_once() {
        check(|| {
            let model = Arc::new(Model::new());
            let threads: Vec<_> = (0..SLOTS)
                .map(|slot| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || model.free(slot))
                })
                .collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
            let arena = model.arena.lock();
            assert!(model.pending.is_empty(), "no report is left lying");
            assert_eq!(*arena, (true, 1));
        });
    }

    #[test]
    fn loom_the_owner_takes_while_another_frees() {
        check(|| {
            let model = Arc::new(Model::new());
            let other = Arc::clone(&model);
            let freeing = thread::spawn(move || {
                other.slots().free(0, 1).unwrap();
                other.slots().free(0, 2).unwrap();
                if other.slots().count_freed(2) {
                    other.pending.put(1, &other.link);
                }
                other.settle();
            });
            let mut arena = model.arena.lock();
            model.answer(&mut arena);
            let mut taken = 0;
            while arena.0 && arena.1 == 0 {
                if model.slots().free_count() == 0 && model.slots().detach() {
                    arena.0 = false;
                } else {
                    let n = model.slots().take(0, SLOTS, |_| ()).0;
                    assert!(n > 0, "what is counted is there");
                    taken += n;
                }
            }
            drop(arena);
            model.settle();
            freeing.join().unwrap();
            let arena = model.arena.lock();
            assert!(model.pending.is_empty());
            assert!(arena.0 || taken == SLOTS, "a slab with free slots is in a list of its arena");
            assert_eq!(model.slots().free_count() + taken, SLOTS);
            assert_eq!(arena.1, u32::from(taken == 0));
        });
    }
}
