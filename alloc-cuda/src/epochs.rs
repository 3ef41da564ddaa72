//! The epochs of a stream, and what a stream has seen of others. Threads read and close them without
//! a heap's lock; what the driver does comes in as a closure.
//!
//! Invariants: an epoch's number is taken before its event is recorded, so whatever was stamped with
//! it was submitted before the event; an epoch counts as seen only once the wait for it was
//! submitted. No lock is held across a call of the driver.

use crate::driver::Error;
use crate::fault::{self, planted};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, lock};
use std::collections::VecDeque;
use std::sync::Arc;

/// The epochs of one stream; `E` is an event that was recorded.
#[derive(Debug)]
pub(crate) struct Epochs<E> {
    /// The open epoch; the first is 1, so that 0 is complete.
    open: AtomicU64,
    done: AtomicU64,
    /// The last epoch that a block was stamped with.
    stamped: AtomicU64,
    /// The last epoch there will be: its event stands for all later stamps.
    last: AtomicU64,
    /// The events of closed epochs that are not known complete, oldest first.
    events: Mutex<VecDeque<(u64, Arc<E>)>>,
}

impl<E> Epochs<E> {
    pub(crate) fn new() -> Self {
        Self {
            open: AtomicU64::new(1),
            done: AtomicU64::new(0),
            stamped: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            events: Mutex::new(VecDeque::new()),
        }
    }

    /// The stamp of a free at this moment.
    #[inline]
    pub(crate) fn stamp(&self) -> u64 {
        let epoch = self.open.load(Ordering::Acquire);
        self.stamped.store(epoch, Ordering::Relaxed);
        if planted(fault::OLD_EPOCH) { epoch - 1 } else { epoch }
    }

    /// The last epoch that a block was stamped with.
    pub(crate) fn stamped(&self) -> u64 {
        self.stamped.load(Ordering::Relaxed)
    }

    /// The epoch that decides about a stamp: after the stream's end that is its last one.
    #[inline]
    fn decisive(&self, stamp: u64) -> u64 {
        stamp.min(self.last.load(Ordering::Acquire))
    }

    /// Whether a stamp is known to be complete; asks nobody.
    #[inline]
    pub(crate) fn is_done(&self, stamp: u64) -> bool {
        self.done.load(Ordering::Acquire) >= self.decisive(stamp)
    }

    /// Whether a stamp is complete, or has an event or will never have one.
    pub(crate) fn is_closed(&self, stamp: u64) -> bool {
        self.is_done(stamp)
            || self.last.load(Ordering::Acquire) != u64::MAX
            // An epoch whose event could not be recorded is covered by a later one.
            || (stamp < self.open.load(Ordering::Acquire) && self.event_for(stamp).is_some())
    }

    /// Closes the open epoch with an event.
    pub(crate) fn close(
        &self,
        record: impl FnOnce() -> Result<Arc<E>, Error>,
    ) -> Result<(), Error> {
        let epoch = self.open.fetch_add(1, Ordering::AcqRel);
        let event = record()?;
        let mut events = lock(&self.events);
        let at = events.partition_point(|&(other, _)| other < epoch);
        events.insert(at, (epoch, event));
        Ok(())
    }

    /// Closes the last epoch. Where that fails, what was stamped with it is never known complete.
    pub(crate) fn retire(
        &self,
        record: impl FnOnce() -> Result<Arc<E>, Error>,
    ) -> Result<(), Error> {
        let closed = self.close(record);
        self.last.store(self.open.load(Ordering::Acquire) - 1, Ordering::Release);
        closed
    }

    /// Ends without an event: what is open now is never known complete.
    pub(crate) fn abandon(&self) {
        let epoch = self.open.fetch_add(1, Ordering::AcqRel);
        self.last.store(epoch, Ordering::Release);
    }

    /// The event of the earliest closed epoch that covers a stamp.
    pub(crate) fn event_for(&self, stamp: u64) -> Option<(u64, Arc<E>)> {
        let stamp = self.decisive(stamp);
        let events = lock(&self.events);
        let at = events.partition_point(|&(epoch, _)| epoch < stamp);
        events.get(at).map(|(epoch, event)| (*epoch, Arc::clone(event)))
    }

    /// Notes that an epoch and all before it are complete.
    pub(crate) fn complete(&self, epoch: u64) {
        self.done.fetch_max(epoch, Ordering::AcqRel);
        let mut events = lock(&self.events);
        while events.front().is_some_and(|&(first, _)| first <= epoch) {
            let over = events.pop_front();
            drop(over);
        }
    }

    /// The middle one of the events of epochs below `end` that are not known complete.
    pub(crate) fn middle(&self, end: u64) -> Option<(u64, Arc<E>)> {
        let done = self.done.load(Ordering::Acquire);
        let events = lock(&self.events);
        let from = events.partition_point(|&(epoch, _)| epoch <= done);
        let to = events.partition_point(|&(epoch, _)| epoch < end);
        let (epoch, event) = events.range(from..to.max(from)).nth((to.max(from) - from) / 2)?;
        Some((*epoch, Arc::clone(event)))
    }

    pub(crate) fn has_events(&self) -> bool {
        !lock(&self.events).is_empty()
    }

    /// Lets go of all events.
    pub(crate) fn forget_events(&self) {
        lock(&self.events).clear();
    }
}

/// The epoch of each other stream that a stream's future work comes after.
#[derive(Debug)]
pub(crate) struct Seen(Mutex<Vec<u64>>);

impl Seen {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub(crate) fn covers(&self, stream: u32, stamp: u64) -> bool {
        lock(&self.0).get(stream as usize).is_some_and(|&epoch| epoch >= stamp)
    }

    /// Submits a wait for an epoch of a stream, then notes it.
    pub(crate) fn wait(
        &self,
        stream: u32,
        epoch: u64,
        submit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        submit()?;
        let mut seen = lock(&self.0);
        let index = stream as usize;
        if seen.len() <= index {
            seen.resize(index + 1, 0);
        }
        let epoch = if planted(fault::WRONG_SEEN) { epoch + 3 } else { epoch };
        seen[index] = seen[index].max(epoch);
        Ok(())
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc as Shared;
    use loom::thread;

    /// A device with one stream of work that writes the same memory. Its driver's calls are ordered
    /// by a lock of the driver, as real ones are.
    struct Device {
        submitted: Mutex<u64>,
        executed: AtomicU64,
        memory: UnsafeCell<u64>,
        epochs: Epochs<u64>,
        /// What a heap's lock guards: the stamp of a free block.
        freed: Mutex<Option<u64>>,
    }

    impl Device {
        fn new() -> Shared<Self> {
            Shared::new(Self {
                submitted: Mutex::new(0),
                executed: AtomicU64::new(0),
                memory: UnsafeCell::new(0),
                epochs: Epochs::new(),
                freed: Mutex::new(None),
            })
        }

        fn submit(&self) {
            *lock(&self.submitted) += 1;
        }

        /// Executes one piece of work if there is one.
        fn execute(&self) {
            let done = self.executed.load(Ordering::Relaxed);
            if *lock(&self.submitted) > done {
                // SAFETY: loom sees to it that nobody else has the memory.
                self.memory.with_mut(|memory| unsafe { *memory += 1 });
                self.executed.store(done + 1, Ordering::Release);
            }
        }

        /// An event is how much was submitted when it was recorded.
        #[allow(clippy::unnecessary_wraps, reason = "as the driver's record")]
        fn record(&self) -> Result<Arc<u64>, Error> {
            Ok(Arc::new(*lock(&self.submitted)))
        }

        fn close(&self, stamp: u64) {
            if !self.epochs.is_closed(stamp) {
                self.epochs.close(|| self.record()).unwrap();
            }
        }

        fn query(&self, stamp: u64) {
            if let Some((epoch, event)) = self.epochs.event_for(stamp)
                && self.executed.load(Ordering::Acquire) >= *event
            {
                self.epochs.complete(epoch);
            }
        }

        fn free(&self) {
            *lock(&self.freed) = Some(self.epochs.stamp());
        }

        /// Uses the memory of the free block if that is known complete: the work is over then.
        fn reuse(&self) {
            let Some(stamp) = *lock(&self.freed) else { return };
            if self.epochs.is_done(stamp) {
                // SAFETY: loom sees to it that the device is not at it.
                assert_eq!(self.memory.with(|memory| unsafe { *memory }), 1);
            }
        }
    }

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    #[test]
    fn loom_a_stamp_is_done_only_after_its_work() {
        model(|| {
            let device = Device::new();
            let run = |f: fn(&Device)| {
                let device = Shared::clone(&device);
                thread::spawn(move || f(&device))
            };
            let threads = [
                run(Device::execute),
                // One thread learns what is complete, another acts on it.
                run(|device| {
                    let stamp = device.epochs.stamped().max(1);
                    device.close(stamp);
                    device.query(stamp);
                }),
                run(Device::reuse),
            ];
            device.submit();
            device.free();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn loom_a_stream_ends_while_its_blocks_are_freed() {
        model(|| {
            let device = Device::new();
            device.submit();
            let run = |f: fn(&Device)| {
                let device = Shared::clone(&device);
                thread::spawn(move || f(&device))
            };
            let threads = [
                run(Device::execute),
                run(|device| {
                    device.epochs.retire(|| device.record()).unwrap();
                    device.query(u64::MAX);
                }),
            ];
            device.free();
            device.reuse();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            device.reuse();
            // Whenever it was stamped: the last event tells.
            let stamp = lock(&device.freed).unwrap();
            device.query(stamp);
            assert!(device.epochs.is_done(stamp));
        });
    }

    #[test]
    fn loom_events_of_two_threads_are_found_by_epoch() {
        model(|| {
            let device = Device::new();
            device.submit();
            device.free();
            let closer = {
                let device = Shared::clone(&device);
                thread::spawn(move || device.close(1))
            };
            device.close(1);
            let (epoch, event) = device.epochs.event_for(1).unwrap();
            assert!(epoch >= 1 && *event == 1);
            device.execute();
            device.query(1);
            assert!(device.epochs.is_done(1));
            closer.join().unwrap();
            device.query(2);
            assert!(device.epochs.middle(u64::MAX).is_none() && device.epochs.is_done(1));
        });
    }

    #[test]
    fn loom_an_epoch_is_seen_only_after_the_wait() {
        model(|| {
            let seen = Shared::new(Seen::new());
            let waits = Shared::new(Mutex::new(0));
            let other = {
                let (seen, waits) = (Shared::clone(&seen), Shared::clone(&waits));
                thread::spawn(move || {
                    let submit = || {
                        *lock(&waits) += 1;
                        Ok(())
                    };
                    seen.wait(1, 5, submit).unwrap();
                })
            };
            if seen.covers(1, 5) {
                assert_eq!(*lock(&waits), 1, "work submitted now comes after the wait");
            }
            other.join().unwrap();
            assert!(seen.covers(1, 4) && !seen.covers(1, 6) && !seen.covers(0, 1));
        });
    }
}
