//! A futex lock of four bytes, and the gate that holds every lock across a fork.
//!
//! Invariants: a thread sleeps only on `HELD_WAITED` or `FORK`, and whoever leaves one of the two
//! wakes one sleeper, who then takes the lock as `HELD_WAITED`. `FORK` means that the thread which
//! owns [`gate`] holds the lock between critical sections, so that thread alone may enter again.
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

use super::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use super::{Futex, UnsafeCell, const_fn, spin_loop, thread_token};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep.
const HELD_WAITED: u32 = 2;
/// Held across a fork; somebody may sleep.
const FORK: u32 = 3;

/// A critical section is some tens of instructions: waiting longer than this is the scheduler's.
const SPINS: u32 = if cfg!(loom) { 1 } else { 60 };

/// A lock without data.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct RawLock(Futex);

/// How [`RawLock::acquire`] got in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// As the holder, who must release.
    Holder,
    /// As the forking thread, which holds the lock until the fork is over.
    Passed,
}

impl RawLock {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Self(Futex::new(FREE))
        }
    }

    #[inline(always)]
    fn acquire(&self) -> Entry {
        if self.0.word().compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok() {
            return Entry::Holder;
        }
        self.acquire_contended()
    }

    #[cold]
    fn acquire_contended(&self) -> Entry {
        let mut state = self.spin();
        // Who has slept may not be the only sleeper, so passes the duty to wake on.
        let mut mine = HELD;
        loop {
            let next = match state {
                FREE => mine,
                HELD => HELD_WAITED,
                FORK if gate().is_owner() => return Entry::Passed,
                _ => state,
            };
            if next != state
                && let Err(now) = self.0.word().compare_exchange(state, next, Acquire, Relaxed)
            {
                state = now;
                continue;
            }
            if state == FREE {
                return Entry::Holder;
            }
            self.0.wait(next, None);
            mine = HELD_WAITED;
            state = self.spin();
        }
    }

    fn spin(&self) -> u32 {
        for _ in 0..SPINS {
            let state = self.0.word().load(Relaxed);
            if state != HELD {
                return state;
            }
            spin_loop();
        }
        self.0.word().load(Relaxed)
    }

    fn try_acquire(&self) -> Option<Entry> {
        match self.0.word().compare_exchange(FREE, HELD, Acquire, Relaxed) {
            Ok(_) => Some(Entry::Holder),
            Err(FORK) if gate().is_owner() => Some(Entry::Passed),
            Err(_) => None,
        }
    }

    #[inline(always)]
    fn release(&self) {
        if self.0.word().swap(FREE, Release) == HELD_WAITED {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.0.wake(1);
    }

    fn acquire_for_fork(&self) {
        let entry = self.acquire();
        debug_assert_eq!(entry, Entry::Holder);
        // A store would do; loom does not order one after a waiter's exchange.
        self.0.word().swap(FORK, Relaxed);
    }

    /// A lock that came into the list after the fork began is left as it is.
    fn release_from_fork(&self, side: Side) {
        if self.0.word().compare_exchange(FORK, FREE, Release, Relaxed).is_ok()
            && side == Side::Parent
        {
            self.wake();
        }
    }
}

/// A lock around a `T`. The holder must not lock it again, except as the forking thread.
#[derive(Debug)]
pub(crate) struct Mutex<T> {
    raw: RawLock,
    data: UnsafeCell<T>,
}

// SAFETY: the lock lets one thread at a time reach the data.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T> Mutex<T> {
    const_fn! {
        pub(crate) const fn new(data: T) -> Self {
            Self { raw: RawLock::new(), data: UnsafeCell::new(data) }
        }
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        Guard { mutex: self, entry: self.raw.acquire(), not_send: PhantomData }
    }

    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let entry = self.raw.try_acquire()?;
        Some(Guard { mutex: self, entry, not_send: PhantomData })
    }

    /// The lock itself, for the list that [`ForkGate::enter`] takes.
    pub(crate) fn raw(&self) -> &RawLock {
        &self.raw
    }
}

/// The right to the data of a [`Mutex`], until dropped.
#[derive(Debug)]
#[must_use = "the lock is released where the guard is dropped"]
pub(crate) struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
    entry: Entry,
    not_send: PhantomData<*mut ()>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock, and the borrow of the guard forbids a `&mut`.
        self.mutex.data.with(|data| unsafe { &*data })
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and the guard is borrowed mutably.
        self.mutex.data.with_mut(|data| unsafe { &mut *data })
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.entry == Entry::Holder {
            self.mutex.raw.release();
        }
    }
}

/// Which process leaves the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Parent,
    /// The other threads, sleepers among them, do not exist here.
    Child,
}

/// Holds every lock across a fork, so that the child gets each lock free and its data whole. The
/// forking thread passes through those locks meanwhile: other fork handlers may call malloc
/// before, between and after ours, and may fork themselves.
#[derive(Debug)]
pub(crate) struct ForkGate {
    /// One fork at a time.
    serial: RawLock,
    /// Token of the forking thread; 0 = none. Only that thread can find its own token here.
    owner: AtomicUsize,
    /// Forks under way, one inside the other. Only the owner uses it.
    depth: AtomicUsize,
}

impl ForkGate {
    const_fn! {
        const fn new() -> Self {
            Self { serial: RawLock::new(), owner: AtomicUsize::new(0), depth: AtomicUsize::new(0) }
        }
    }

    /// Whether the calling thread is the one that forks.
    pub(crate) fn is_owner(&self) -> bool {
        // The token is asked for only while there is an owner: before libc's start there may be
        // no thread pointer to read.
        let owner = self.owner.load(Relaxed);
        owner != 0 && owner == thread_token()
    }

    /// Takes the locks, in the order in which the allocator nests them. Call before the fork,
    /// holding none of them.
    pub(crate) fn enter<'a>(&self, locks: impl Iterator<Item = &'a RawLock>) {
        if self.is_owner() {
            self.depth.store(self.depth.load(Relaxed) + 1, Relaxed);
            return;
        }
        let _ = self.serial.acquire();
        locks.for_each(RawLock::acquire_for_fork);
        self.depth.store(1, Relaxed);
        self.owner.store(thread_token(), Relaxed);
    }

    /// Releases the locks of `enter`; does nothing where the fork began without it.
    pub(crate) fn leave<'a>(&self, side: Side, locks: impl Iterator<Item = &'a RawLock>) {
        if !self.is_owner() {
            return;
        }
        let depth = self.depth.load(Relaxed) - 1;
        self.depth.store(depth, Relaxed);
        if depth > 0 {
            return;
        }
        self.owner.store(0, Relaxed);
        locks.for_each(|lock| lock.release_from_fork(side));
        self.serial.release();
    }
}

/// The process's gate.
#[cfg(not(loom))]
pub(crate) fn gate() -> &'static ForkGate {
    static GATE: ForkGate = ForkGate::new();
    &GATE
}

#[cfg(loom)]
pub(crate) fn gate() -> &'static ForkGate {
    loom::lazy_static! { static ref GATE: ForkGate = ForkGate::new(); }
    &GATE
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn is_four_bytes() {
        assert_eq!(size_of::<RawLock>(), 4);
        assert_eq!(size_of::<Mutex<u32>>(), 8);
    }

    #[test]
    fn threads_exclude_each_other() {
        static COUNT: Mutex<u64> = Mutex::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for i in 0..20_000 {
                        let mut count = COUNT.lock();
                        let seen = *count;
                        // Now and then the holder loses its CPU: that is what makes others sleep.
                        if i % 512 == 0 {
                            std::thread::yield_now();
                        }
                        *count = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*COUNT.lock(), 80_000);
    }

    #[test]
    fn try_lock_fails_while_held() {
        let mutex = Mutex::new(1);
        let guard = mutex.lock();
        assert!(mutex.try_lock().is_none());
        drop(guard);
        assert_eq!(*mutex.try_lock().unwrap(), 1);
        assert_eq!(*mutex.lock(), 1);
    }

    #[test]
    fn leaves_errno_alone() {
        static MUTEX: Mutex<()> = Mutex::new(());
        std::thread::scope(|scope| {
            let guard = MUTEX.lock();
            let waiter = scope.spawn(|| {
                // SAFETY: a thread has one.
                let errno = unsafe { libc::__errno_location() };
                // SAFETY: it is this thread's.
                unsafe { errno.write(77) };
                drop(MUTEX.lock());
                // SAFETY: as above.
                unsafe { errno.read() }
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(guard);
            assert_eq!(waiter.join().unwrap(), 77);
        });
    }

    /// Both locks are taken in order, and guard two halves of one fact.
    static LEFT: Mutex<u64> = Mutex::new(0);
    static RIGHT: Mutex<u64> = Mutex::new(0);

    fn both() -> impl Iterator<Item = &'static RawLock> {
        [LEFT.raw(), RIGHT.raw()].into_iter()
    }

    fn step() {
        let mut left = LEFT.lock();
        let mut right = RIGHT.lock();
        assert_eq!(*left, *right);
        *left += 1;
        std::hint::black_box(&mut left);
        *right += 1;
    }

    fn fork_once() -> i32 {
        gate().enter(both());
        step();
        // A handler of somebody else forks too.
        gate().enter(both());
        gate().leave(Side::Parent, both());
        step();
        // SAFETY: the child calls nothing that needs the locks of another library.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            step();
            gate().leave(Side::Child, both());
            step();
            let clean = LEFT.raw.0.word().load(Relaxed) == FREE
                && gate().serial.0.word().load(Relaxed) == FREE;
            // SAFETY: leaves the child without running the test's handlers.
            unsafe { libc::_exit(if clean { 0 } else { 1 }) };
        }
        gate().leave(Side::Parent, both());
        pid
    }

    #[test]
    fn forks_among_working_threads() {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        step();
                    }
                });
            }
            let forkers: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| (0..20).map(|_| fork_once()).collect::<Vec<_>>()))
                .collect();
            let pids: Vec<_> = forkers.into_iter().map(|forker| forker.join().unwrap()).collect();
            stop.store(true, Relaxed);
            for pid in pids.into_iter().flatten() {
                assert!(pid > 0);
                let mut status = -1;
                // SAFETY: `status` outlives the call.
                let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert_eq!((waited, status), (pid, 0));
            }
        });
        step();
    }

    #[test]
    fn a_lock_made_during_the_fork_is_not_released_by_it() {
        let (old, new) = (Mutex::new(0), Mutex::new(0));
        gate().enter([old.raw()].into_iter());
        let guard = new.lock();
        gate().leave(Side::Parent, [old.raw(), new.raw()].into_iter());
        assert!(new.try_lock().is_none());
        drop(guard);
        assert!(old.try_lock().is_some());
        // A fork that began before the gate was known.
        let guard = old.lock();
        gate().leave(Side::Parent, [old.raw()].into_iter());
        assert!(old.try_lock().is_none());
        drop(guard);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(model);
    }

    fn add(mutex: &Mutex<u32>) {
        let mut guard = mutex.lock();
        *guard += 1;
    }

    #[test]
    fn loom_two_threads_exclude_each_other() {
        check(5, || {
            let mutex = Arc::new(Mutex::new(0));
            let other = Arc::clone(&mutex);
            let thread = thread::spawn(move || {
                add(&other);
                add(&other);
            });
            add(&mutex);
            add(&mutex);
            thread.join().unwrap();
            assert_eq!(*mutex.lock(), 4);
        });
    }

    #[test]
    fn loom_no_wakeup_is_lost() {
        check(4, || {
            let mutex = Arc::new(Mutex::new(0));
            let threads = [(); 2].map(|()| {
                let mutex = Arc::clone(&mutex);
                thread::spawn(move || add(&mutex))
            });
            add(&mutex);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(*mutex.lock(), 3);
        });
    }

    struct Pair {
        left: Mutex<u32>,
        right: Mutex<u32>,
    }

    impl Pair {
        fn new(value: u32) -> Self {
            Self { left: Mutex::new(value), right: Mutex::new(value) }
        }

        fn step(&self) -> u32 {
            let mut left = self.left.lock();
            let mut right = self.right.lock();
            assert_eq!(*left, *right);
            *left += 1;
            *right += 1;
            *left
        }

        fn locks(&self) -> impl Iterator<Item = &RawLock> {
            [self.left.raw(), self.right.raw()].into_iter()
        }
    }

    #[test]
    fn loom_the_parent_passes_through_and_releases() {
        check(5, || {
            let pair = Arc::new(Pair::new(0));
            let other = Arc::clone(&pair);
            let worker = thread::spawn(move || {
                other.step();
                drop(other.right.lock());
            });
            gate().enter(pair.locks());
            let seen = pair.step();
            gate().enter(pair.locks());
            assert_eq!(pair.step(), seen + 1, "somebody came in between");
            gate().leave(Side::Parent, pair.locks());
            assert_eq!(pair.step(), seen + 2, "released by the inner fork");
            gate().leave(Side::Parent, pair.locks());
            worker.join().unwrap();
            assert_eq!(pair.step(), 5);
        });
    }

    #[test]
    fn loom_the_child_gets_free_locks_and_whole_data() {
        check(5, || {
            let pair = Arc::new(Pair::new(0));
            let other = Arc::clone(&pair);
            let worker = thread::spawn(move || {
                other.step();
            });
            gate().enter(pair.locks());
            // The child's memory is a copy, in which the worker does not exist.
            let child = Pair::new(*pair.left.lock());
            assert_eq!(*child.right.lock(), *pair.right.lock());
            child.locks().for_each(|lock| lock.0.word().store(FORK, Relaxed));
            child.step();
            gate().leave(Side::Child, child.locks());
            assert!(!gate().is_owner());
            child.step();
            assert!(child.left.try_lock().is_some());
            // The parent goes its own way, and here the gate that it would leave is gone.
            pair.locks().for_each(|lock| lock.release_from_fork(Side::Parent));
            worker.join().unwrap();
        });
    }

    #[test]
    fn loom_two_threads_fork() {
        check(5, || {
            let pair = Arc::new(Pair::new(0));
            let other = Arc::clone(&pair);
            let fork = |pair: &Pair| {
                gate().enter(pair.locks());
                let seen = pair.step();
                assert_eq!(pair.step(), seen + 1);
                gate().leave(Side::Parent, pair.locks());
            };
            let thread = thread::spawn(move || fork(&other));
            fork(&pair);
            thread.join().unwrap();
            assert_eq!(pair.step(), 5);
        });
    }

    #[test]
    fn loom_forks_with_different_locks_take_turns() {
        check(5, || {
            let pair = Arc::new(Pair::new(0));
            let other = Arc::clone(&pair);
            let fork = |mutex: &Mutex<u32>| {
                gate().enter(core::iter::once(mutex.raw()));
                add(mutex);
                add(mutex);
                gate().leave(Side::Parent, core::iter::once(mutex.raw()));
                assert_eq!(*mutex.try_lock().unwrap(), 2);
            };
            let thread = thread::spawn(move || fork(&other.left));
            fork(&pair.right);
            thread.join().unwrap();
        });
    }
}
