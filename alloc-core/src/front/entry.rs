//! What the table entry of a CPU can say, and who may change it.
//!
//! An entry is the region that the CPU's sections work on, or an empty one that stands for a state
//! of the CPU and sends every operation to the slow path. Every change is one atomic store to the
//! entry. Whoever makes it `Busy` and has fenced after that owns the region alone, until he stores
//! something else; only a holder of the [`Owner`] lock does so.

use core::ptr::null_mut;

use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicPtr, AtomicU32};
use crate::sync::{const_fn, yield_now};

/// Bytes that may be read of an empty region.
pub(crate) const EMPTY_BYTES: usize = 2048;

/// Zero words that serve as empty regions: each reads as "no blocks, no room" for every code, from
/// the word below it on.
static EMPTY: [u64; 8 + EMPTY_BYTES / 8 + 4] = [0; _];

/// States of a CPU that has no region in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum State {
    /// There is no region yet.
    Absent = 0,
    /// There is one, but nobody used it for a while. The next operation takes it up again.
    Parked = 1,
    /// Somebody owns the region.
    Busy = 2,
    /// The region is being made.
    Creating = 3,
}

impl State {
    pub(crate) const fn entry<R>(self) -> *mut R {
        const { assert!(size_of::<R>() <= EMPTY_BYTES) };
        (&raw const EMPTY).cast::<u64>().wrapping_add(8 + self as usize).cast_mut().cast()
    }

    /// The state that an entry stands for; `None`: it is a region.
    pub(crate) fn of<R>(entry: *mut R) -> Option<State> {
        [State::Absent, State::Parked, State::Busy, State::Creating]
            .into_iter()
            .find(|s| s.entry() == entry)
    }
}

/// The entry of a CPU, and where the region is kept while the entry is a state. A region lives for
/// good and is never replaced.
pub(crate) struct Place<'a, R> {
    pub(crate) entry: &'a AtomicPtr<R>,
    pub(crate) region: &'a AtomicPtr<R>,
}

impl<'a, R> Place<'a, R> {
    #[inline]
    pub(crate) fn region(&self) -> Option<&'a R> {
        // SAFETY: null, or a region that lives for good.
        unsafe { self.region.load(Acquire).as_ref() }
    }

    /// Moves the CPU from one entry to another; false if it had left the first.
    fn transition(&self, from: *mut R, to: *mut R) -> bool {
        self.entry.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }

    /// The region, in use: made by `make` or taken up again if it has to be. `None` where there is
    /// none to be had now. `make` returns null, or a region that is ready for use.
    #[inline]
    pub(crate) fn open(&self, make: impl FnOnce() -> *mut R) -> Option<&'a R> {
        let entry = self.entry.load(Acquire);
        match State::of(entry) {
            None => {}
            Some(State::Busy | State::Creating) => return None,
            Some(State::Absent) if self.region().is_none() => self.create(make)?,
            Some(State::Absent | State::Parked) => {
                self.transition(entry, self.region.load(Acquire)).then_some(())?;
            }
        }
        self.region()
    }

    fn create(&self, make: impl FnOnce() -> *mut R) -> Option<()> {
        self.transition(State::Absent.entry(), State::Creating.entry()).then_some(())?;
        let region = make();
        if !region.is_null() {
            // A fork may have taken the entry, and another thread may have made a region since.
            let _ = self.region.compare_exchange(null_mut(), region, AcqRel, Relaxed);
        }
        let made = self.region.load(Acquire);
        let entry = if made.is_null() { State::Absent.entry() } else { made };
        (self.transition(State::Creating.entry(), entry) && !made.is_null()).then_some(())
    }

    /// Lets `work` have the region alone, after a `fence` that waits for the sections of this CPU;
    /// the region is parked then. `None` where somebody else owns it or the fence fails.
    pub(crate) fn drain<T>(
        &self,
        owner: &Owner,
        fence: impl FnOnce() -> bool,
        work: impl FnOnce(&R) -> T,
    ) -> Option<T> {
        let _owner = owner.lock();
        let region = self.region()?;
        let before = self.entry.load(Acquire);
        match State::of(before) {
            Some(State::Busy | State::Creating | State::Absent) => return None,
            None | Some(State::Parked) => {}
        }
        if !self.transition(before, State::Busy.entry()) {
            return None;
        }
        if !fence() {
            self.entry.store(before, Release);
            return None;
        }
        let done = work(region);
        self.entry.store(State::Parked.entry(), Release);
        Some(done)
    }

    /// One look for an idle region: one that is `same` as it was is parked, which costs its next
    /// user one slow operation. True: it was parked at the last look and still is, so it is idle
    /// for sure, and there is something in it.
    pub(crate) fn is_idle(
        &self,
        same: impl FnOnce(&R) -> bool,
        used: impl FnOnce() -> bool,
    ) -> bool {
        let Some(region) = self.region() else {
            return false;
        };
        let entry = self.entry.load(Acquire);
        match State::of(entry) {
            Some(State::Parked) => return used(),
            Some(_) => {}
            None => {
                if same(region) {
                    self.transition(entry, State::Parked.entry());
                }
            }
        }
        false
    }

    /// Takes the region out of use, whatever the entry is. Only for a holder of the owner's lock,
    /// who has to fence before the region is his.
    pub(crate) fn seize(&self) {
        // A store would do; loom does not order one after another thread's exchange.
        self.entry.swap(State::Busy.entry(), AcqRel);
    }

    /// The end of what [`Place::seize`] began.
    pub(crate) fn put_back(&self) {
        let region = self.region.load(Acquire);
        let entry = if region.is_null() { State::Absent.entry() } else { region };
        self.entry.store(entry, Release);
    }
}

/// The lock of those who make an entry `Busy`: one drains or forks at a time.
pub(crate) struct Owner(AtomicU32);

impl Owner {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Owner(AtomicU32::new(0))
        }
    }

    fn lock(&self) -> OwnerLock<'_> {
        self.hold();
        OwnerLock(self)
    }

    /// Takes the lock over a fork.
    pub(crate) fn hold(&self) {
        while self.0.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            yield_now();
        }
    }

    /// Releases what [`Owner::hold`] took.
    pub(crate) fn release(&self) {
        self.0.store(0, Release);
    }
}

struct OwnerLock<'a>(&'a Owner);

impl Drop for OwnerLock<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Sections as they are guaranteed to be: one at a time on a CPU, and a fence waits until none that
/// read an older entry can commit any more (the kernel sends such a section back to its start).
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::UnsafeCell;
    use core::sync::atomic::AtomicUsize as Plain;
    use loom::sync::{Arc, Mutex};
    use loom::thread;
    use std::boxed::Box;
    use std::vec::Vec;

    type Blocks = Vec<u8>;
    type Region = UnsafeCell<Blocks>;

    struct Model {
        /// Held by the section that runs on the CPU.
        cpu: Mutex<()>,
        entry: AtomicPtr<Region>,
        region: AtomicPtr<Region>,
        owner: Owner,
        fences: bool,
        made: std::sync::Mutex<Vec<Box<Region>>>,
    }

    // SAFETY: the protocol keeps those who touch a region apart; that is what the models check.
    unsafe impl Sync for Model {}
    // SAFETY: as above.
    unsafe impl Send for Model {}

    fn has(region: &Region) -> &mut Blocks {
        // SAFETY: loom sees the access; the models pass the blocks to nobody.
        region.with_mut(|blocks| unsafe { &mut *blocks })
    }

    impl Model {
        fn new(fences: bool) -> Self {
            Model {
                cpu: Mutex::new(()),
                entry: AtomicPtr::new(State::Absent.entry()),
                region: AtomicPtr::new(null_mut()),
                owner: Owner::new(),
                fences,
                made: std::sync::Mutex::default(),
            }
        }

        /// One whose region holds these blocks.
        fn with(blocks: &[u8]) -> Arc<Self> {
            let model = Model::new(true);
            has(model.open().unwrap()).extend(blocks);
            Arc::new(model)
        }

        fn place(&self) -> Place<'_, Region> {
            Place { entry: &self.entry, region: &self.region }
        }

        fn open(&self) -> Option<&Region> {
            self.place().open(|| {
                let region = Box::into_raw(Box::new(Region::new(Vec::new())));
                // SAFETY: just made; nobody drops it before the model.
                self.made.lock().unwrap().push(unsafe { Box::from_raw(region) });
                region
            })
        }

        fn section<T>(&self, commit: impl FnOnce(&mut Blocks) -> Option<T>) -> Option<T> {
            let _runs = self.cpu.lock().unwrap();
            // A section's accesses depend on the address that it read, which orders them.
            let entry = self.entry.load(Acquire);
            if State::of(entry).is_some() {
                return None;
            }
            // SAFETY: a region.
            commit(has(unsafe { &*entry }))
        }

        fn fence(&self) -> bool {
            if self.fences {
                drop(self.cpu.lock().unwrap());
            }
            true
        }

        /// An allocation; the backend has nothing.
        fn pop(&self) -> Option<u8> {
            self.section(Vec::pop).or_else(|| self.open().and_then(|_| self.section(Vec::pop)))
        }

        /// A free; false: the block is for the backend.
        fn push(&self, block: u8) -> bool {
            let push = || {
                self.section(|blocks| {
                    blocks.push(block);
                    Some(())
                })
            };
            push().or_else(|| self.open().and_then(|_| push())).is_some()
        }

        /// A thread that allocates, then frees that and a block of its own; the blocks it is left with.
        fn use_it(&self, own: u8) -> Blocks {
            let mine = self.pop().into_iter().chain([own]).collect::<Blocks>();
            mine.into_iter().filter(|&block| !self.push(block)).collect()
        }

        fn drain(&self) -> Option<Blocks> {
            self.place().drain(&self.owner, || self.fence(), |region| core::mem::take(has(region)))
        }

        /// What a look for idle caches drains, where nothing ever seems to have changed.
        fn drain_idle(&self) -> Blocks {
            let idle = self.place().is_idle(|_| true, || true);
            idle.then(|| self.drain()).flatten().unwrap_or_default()
        }

        /// What a fork's child has.
        fn fork(&self) -> Blocks {
            self.owner.hold();
            self.place().seize();
            self.fence();
            let copy = self.place().region().map(|region| has(region).clone());
            self.place().put_back();
            self.owner.release();
            copy.unwrap_or_default()
        }

        /// When all others are gone: there is a region, which can be used and drained, and each of
        /// `expected` is there once or in `elsewhere`.
        fn check(&self, elsewhere: impl IntoIterator<Item = u8>, expected: &[u8]) {
            assert!(self.open().is_some() && self.push(0));
            let mut all: Blocks = self.drain().unwrap();
            all.retain(|&block| block != 0);
            all.extend(elsewhere);
            all.sort_unstable();
            assert_eq!(all, expected);
        }
    }

    fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// Counts how often something came about, over all interleavings.
    fn note(count: &Plain, happened: bool) {
        count.fetch_add(usize::from(happened), core::sync::atomic::Ordering::Relaxed);
    }

    fn assert_noted(counts: &[&Plain]) {
        for count in counts {
            assert!(count.load(core::sync::atomic::Ordering::Relaxed) > 0);
        }
    }

    #[test]
    fn loom_a_drain_owns_the_region_alone() {
        static DRAINED_BEFORE: Plain = Plain::new(0);
        static DRAINED_AFTER: Plain = Plain::new(0);
        static PAST_THE_CACHE: Plain = Plain::new(0);
        check(|| {
            let model = Model::with(&[1]);
            let other = Arc::clone(&model);
            let user = thread::spawn(move || other.use_it(2));
            let drained = model.drain().unwrap();
            let left = user.join().unwrap();
            note(&DRAINED_BEFORE, drained == [1]);
            note(&DRAINED_AFTER, drained == [1, 2]);
            note(&PAST_THE_CACHE, !left.is_empty());
            model.check(drained.into_iter().chain(left), &[1, 2]);
        });
        assert_noted(&[&DRAINED_BEFORE, &DRAINED_AFTER, &PAST_THE_CACHE]);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn loom_a_drain_without_a_fence_is_noticed() {
        check(|| {
            let model = Arc::new(Model::new(false));
            has(model.open().unwrap()).push(1);
            let other = Arc::clone(&model);
            let user = thread::spawn(move || other.pop());
            drop(model.drain());
            drop(user.join());
        });
    }

    #[test]
    fn loom_a_parked_region_is_taken_up_or_drained() {
        static DRAINED: Plain = Plain::new(0);
        static IN_USE: Plain = Plain::new(0);
        check(|| {
            let model = Model::with(&[1]);
            let other = Arc::clone(&model);
            let user = thread::spawn(move || other.use_it(2));
            let drained: Blocks = (0..3).flat_map(|_| model.drain_idle()).collect();
            let left = user.join().unwrap();
            note(&DRAINED, !drained.is_empty());
            note(&IN_USE, drained.is_empty());
            model.check(drained.into_iter().chain(left), &[1, 2]);
        });
        assert_noted(&[&DRAINED, &IN_USE]);
    }

    #[test]
    fn loom_a_fork_copies_a_whole_region_beside_a_section_and_a_drain() {
        static FORKED_FULL: Plain = Plain::new(0);
        static FORKED_EMPTY: Plain = Plain::new(0);
        static DRAINED: Plain = Plain::new(0);
        check(|| {
            let model = Model::with(&[1]);
            let (one, two) = (Arc::clone(&model), Arc::clone(&model));
            let user = thread::spawn(move || one.use_it(2));
            let drainer =
                thread::spawn(move || [two.drain_idle(), two.drain().unwrap_or_default()].concat());
            let copy = model.fork();
            let left = user.join().unwrap();
            let drained = drainer.join().unwrap();
            note(&FORKED_FULL, copy == [1, 2]);
            note(&FORKED_EMPTY, copy.is_empty());
            note(&DRAINED, drained == [1, 2]);
            model.check(drained.into_iter().chain(left), &[1, 2]);
        });
        assert_noted(&[&FORKED_FULL, &FORKED_EMPTY, &DRAINED]);
    }

    /// Two threads make the region while a fork takes the entry from them.
    #[test]
    fn loom_a_fork_in_the_middle_of_a_creation() {
        static TWO_MADE: Plain = Plain::new(0);
        static PAST_THE_CACHE: Plain = Plain::new(0);
        check(|| {
            let model = Arc::new(Model::new(true));
            let (one, two) = (Arc::clone(&model), Arc::clone(&model));
            let users = [
                thread::spawn(move || (!one.push(1)).then_some(1)),
                thread::spawn(move || (!two.push(2)).then_some(2)),
            ];
            drop(model.fork());
            let left = users.map(|user| user.join().unwrap());
            note(&TWO_MADE, model.made.lock().unwrap().len() == 2);
            note(&PAST_THE_CACHE, left.iter().any(Option::is_some));
            model.check(left.into_iter().flatten(), &[1, 2]);
        });
        assert_noted(&[&TWO_MADE, &PAST_THE_CACHE]);
    }
}
