//! Streams and their epochs. A stream's epoch ends when an event is recorded on it, so that one
//! event stands for all frees since the last: a free costs no event, it is stamped with the open
//! epoch. A stamp is complete once an event of its epoch, or of a later one, is.
//!
//! Invariant: an epoch's number is taken before its event is recorded. So whatever was stamped with
//! it was submitted before the event. No lock is held across a call of the driver.

use crate::driver::{Error, Stream};
use crate::fault::{self, planted};
use crate::gpu::{Gpu, Recorded, lock};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A number of this thread that no other has.
pub(crate) fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|&number| number)
}

/// What is known of a stream.
#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) index: u32,
    pub(crate) handle: Stream,
    /// The thread whose default stream it is; 0 of a stream that all threads share.
    thread: u64,
    /// The open epoch; the first is 1, so that 0 is complete.
    epoch: AtomicU64,
    done: AtomicU64,
    /// The last epoch that a block was stamped with.
    stamped: AtomicU64,
    /// The events of closed epochs that are not known complete, oldest first.
    events: Mutex<VecDeque<(u64, Arc<Recorded>)>>,
    /// The epoch of each other stream that this one's future work comes after.
    seen: Mutex<Vec<u64>>,
    pub(crate) capturing: AtomicBool,
    /// The stream was destroyed; its last event stands for all of it.
    retired: AtomicBool,
    pub(crate) records: AtomicU64,
    pub(crate) queries: AtomicU64,
    pub(crate) waits: AtomicU64,
}

impl StreamState {
    pub(crate) fn new(index: u32, handle: Stream, thread: u64) -> Self {
        Self {
            index,
            handle,
            thread,
            epoch: AtomicU64::new(1),
            done: AtomicU64::new(0),
            stamped: AtomicU64::new(0),
            events: Mutex::new(VecDeque::new()),
            seen: Mutex::new(Vec::new()),
            capturing: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            records: AtomicU64::new(0),
            queries: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// The stamp of a free at this moment.
    #[inline]
    pub(crate) fn stamp(&self) -> u64 {
        let mut epoch = self.epoch.load(Ordering::Acquire);
        if self.retired.load(Ordering::Acquire) {
            epoch -= 1;
        }
        self.stamped.store(epoch, Ordering::Relaxed);
        if planted(fault::OLD_EPOCH) { epoch - 1 } else { epoch }
    }

    /// Whether an epoch is known to be complete; asks nobody.
    #[inline]
    pub(crate) fn is_done(&self, epoch: u64) -> bool {
        self.done.load(Ordering::Acquire) >= epoch
    }

    /// Whether this thread means this stream by its handle.
    fn is_mine(&self) -> bool {
        self.thread == 0 || self.thread == thread_number()
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    /// Closes the epoch `stamp` if it is open.
    pub(crate) fn close(&self, gpu: &Arc<Gpu>, stamp: u64) -> Result<(), Error> {
        let closed = self.is_done(stamp) || self.retired.load(Ordering::Acquire);
        if closed || self.is_capturing() || !self.is_mine() {
            return Ok(());
        }
        // An epoch whose event could not be recorded is covered by a later one.
        if stamp < self.epoch.load(Ordering::Acquire) && self.event_for(stamp).is_some() {
            return Ok(());
        }
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel);
        let event = gpu.record(self.handle)?;
        self.records.fetch_add(1, Ordering::Relaxed);
        let mut events = lock(&self.events);
        let at = events.partition_point(|&(other, _)| other < epoch);
        events.insert(at, (epoch, event));
        Ok(())
    }

    /// Closes the last epoch: the stream is about to be destroyed.
    pub(crate) fn retire(&self, gpu: &Arc<Gpu>) -> Result<(), Error> {
        let closed = self.close(gpu, self.epoch.load(Ordering::Acquire));
        self.retired.store(true, Ordering::Release);
        closed
    }

    /// Closes the open epoch if a block was stamped with it.
    pub(crate) fn close_stamped(&self, gpu: &Arc<Gpu>) -> Result<(), Error> {
        self.close(gpu, self.stamped.load(Ordering::Relaxed))
    }

    /// The event of the earliest closed epoch that covers a stamp.
    pub(crate) fn event_for(&self, stamp: u64) -> Option<(u64, Arc<Recorded>)> {
        let events = lock(&self.events);
        let at = events.partition_point(|&(epoch, _)| epoch < stamp);
        events.get(at).map(|(epoch, event)| (*epoch, Arc::clone(event)))
    }

    /// Asks the driver whether a stamp is complete.
    pub(crate) fn query(&self, gpu: &Gpu, stamp: u64) -> Result<bool, Error> {
        if self.is_done(stamp) {
            return Ok(true);
        }
        if self.is_capturing() {
            return Ok(false);
        }
        let Some((epoch, event)) = self.event_for(stamp) else { return Ok(false) };
        self.queries.fetch_add(1, Ordering::Relaxed);
        event.recycle_early();
        if !gpu.is_complete(&event)? {
            return Ok(false);
        }
        self.complete(epoch);
        Ok(true)
    }

    /// Notes that an epoch and all before it are complete.
    fn complete(&self, epoch: u64) {
        self.done.fetch_max(epoch, Ordering::AcqRel);
        let mut events = lock(&self.events);
        while events.front().is_some_and(|&(first, _)| first <= epoch) {
            let over = events.pop_front();
            drop(over);
        }
    }

    /// Lets go of all events.
    pub(crate) fn forget_events(&self) {
        lock(&self.events).clear();
    }

    /// Asks after the newest closed epochs first, as far as they go on being incomplete.
    pub(crate) fn poll(&self, gpu: &Gpu) -> Result<(), Error> {
        loop {
            let first = lock(&self.events).front().map(|&(epoch, _)| epoch);
            let Some(epoch) = first else { return Ok(()) };
            if self.is_done(epoch) {
                // It was recorded by one thread while another saw a later one complete.
                self.complete(epoch);
            } else if !self.query(gpu, epoch)? {
                return Ok(());
            }
        }
    }

    /// Whether this stream's future work comes after an epoch of another.
    pub(crate) fn is_after(&self, other: &Self, stamp: u64) -> bool {
        if other.index == self.index || other.is_done(stamp) {
            return true;
        }
        let seen = lock(&self.seen);
        seen.get(other.index as usize).is_some_and(|&epoch| epoch >= stamp)
    }

    /// Makes this stream's future work come after a closed epoch of another.
    pub(crate) fn wait_for(&self, gpu: &Gpu, other: &Self, stamp: u64) -> Result<bool, Error> {
        if self.is_after(other, stamp) {
            return Ok(true);
        }
        let Some((epoch, event)) = other.event_for(stamp) else {
            // It was found complete meanwhile, or its event could not be recorded.
            return Ok(other.is_done(stamp));
        };
        gpu.wait(self.handle, &event)?;
        self.waits.fetch_add(1, Ordering::Relaxed);
        let mut seen = lock(&self.seen);
        let index = other.index as usize;
        if seen.len() <= index {
            seen.resize(index + 1, 0);
        }
        let epoch = if planted(fault::WRONG_SEEN) { epoch + 3 } else { epoch };
        seen[index] = seen[index].max(epoch);
        Ok(true)
    }

    /// The events that are not known complete, to wait for.
    pub(crate) fn last_event(&self) -> Option<(u64, Arc<Recorded>)> {
        lock(&self.events).back().map(|(epoch, event)| (*epoch, Arc::clone(event)))
    }
}
