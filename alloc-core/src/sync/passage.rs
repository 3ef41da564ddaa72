//! A passage that is open but for forks: those who work on what no lock covers go through it, and a
//! fork closes it and waits until nobody is inside. A child's copy of memory is not of one moment,
//! so a free in full flight on another CPU could be there by half.
//!
//! Invariant: inside means counted in a stripe; who finds the passage closed after counting himself
//! leaves again before he touches anything. The forking thread itself always passes.
use super::atomic::{AtomicU32, Ordering, fence};
use super::lock::gate;
use super::{Futex, array, const_fn, spin_loop};

/// Counters, so that CPUs don't share a line.
const STRIPES: usize = if cfg!(loom) { 2 } else { 64 };
/// How long a fork waits: who is inside may be the very thread that forks, in a signal handler.
const PATIENCE: u32 = if cfg!(loom) { 3 } else { 100_000 };

#[repr(align(64))]
struct Stripe(AtomicU32);

/// The passage.
pub(crate) struct Passage {
    closed: Futex,
    stripes: [Stripe; STRIPES],
}

/// Being inside, until dropped.
pub(crate) struct Inside<'a>(Option<&'a AtomicU32>);

impl Passage {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Self { closed: Futex::new(0), stripes: array![Stripe(AtomicU32::new(0)); STRIPES] }
        }
    }

    /// Goes in, on the stripe of `cpu`; waits while a fork is under way.
    #[inline]
    pub(crate) fn enter(&self, cpu: usize) -> Inside<'_> {
        let count = &self.stripes[cpu % STRIPES].0;
        loop {
            count.fetch_add(1, Ordering::SeqCst);
            // loom takes the accesses for acquire and release only.
            #[cfg(loom)]
            fence(Ordering::SeqCst);
            if self.closed.word().load(Ordering::SeqCst) == 0 {
                return Inside(Some(count));
            }
            count.fetch_sub(1, Ordering::SeqCst);
            if gate().is_owner() {
                return Inside(None);
            }
            self.closed.wait(1, None);
        }
    }

    /// Closes the passage and waits until nobody is inside. False: somebody still is.
    pub(crate) fn close(&self) -> bool {
        self.closed.word().store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.stripes.iter().all(|stripe| {
            for turn in 0..PATIENCE {
                if stripe.0.load(Ordering::SeqCst) == 0 {
                    return true;
                }
                if turn < 100 { spin_loop() } else { super::yield_now() }
            }
            false
        })
    }

    /// Opens it again.
    pub(crate) fn open(&self) {
        self.closed.word().store(0, Ordering::SeqCst);
        self.closed.wake(u32::MAX >> 1);
    }

    /// Opens it in the child of a fork, where nobody else is.
    pub(crate) fn open_in_child(&self) {
        self.stripes.iter().for_each(|stripe| stripe.0.store(0, Ordering::Relaxed));
        self.closed.word().store(0, Ordering::SeqCst);
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(count) = self.0 {
            count.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Model {
        passage: Passage,
        words: UnsafeCell<[u32; 2]>,
    }

    // SAFETY: the passage keeps the two threads apart; that is what the model checks.
    unsafe impl Sync for Model {}
    // SAFETY: as above.
    unsafe impl Send for Model {}

    #[test]
    fn loom_a_fork_sees_nothing_by_half() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let model = Arc::new(Model { passage: Passage::new(), words: UnsafeCell::new([0; 2]) });
            let other = Arc::clone(&model);
            let worker = thread::spawn(move || {
                let _inside = other.passage.enter(0);
                other.words.with_mut(|words| {
                    // SAFETY: inside.
                    unsafe { *words = [7, 7] }
                });
            });
            gate().enter(core::iter::empty());
            if model.passage.close() {
                model.words.with(|words| {
                    // SAFETY: closed, and nobody inside.
                    let [a, b] = unsafe { *words };
                    assert_eq!(a, b);
                });
                drop(model.passage.enter(1));
            }
            model.passage.open();
            gate().leave(crate::sync::lock::Side::Parent, core::iter::empty());
            worker.join().unwrap();
        });
    }
}
