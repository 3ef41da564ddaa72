//! Streams and their epochs. A stream's epoch ends when an event is recorded on it, so that one
//! event stands for all frees since the last: a free costs no event, it is stamped with the open
//! epoch. A stamp is complete once an event of its epoch, or of a later one, is.

use crate::driver::{Error, Stream};
use crate::epochs::{Epochs, Seen};
use crate::gpu::{Gpu, Recorded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    epochs: Epochs<Recorded>,
    seen: Seen,
    pub(crate) capturing: AtomicBool,
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
            epochs: Epochs::new(),
            seen: Seen::new(),
            capturing: AtomicBool::new(false),
            records: AtomicU64::new(0),
            queries: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// The stamp of a free at this moment.
    #[inline]
    pub(crate) fn stamp(&self) -> u64 {
        self.epochs.stamp()
    }

    /// Whether an epoch is known to be complete; asks nobody.
    #[inline]
    pub(crate) fn is_done(&self, epoch: u64) -> bool {
        self.epochs.is_done(epoch)
    }

    /// Whether this thread means this stream by its handle.
    fn is_mine(&self) -> bool {
        self.thread == 0 || self.thread == thread_number()
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    fn record(&self, gpu: &Arc<Gpu>) -> Result<Arc<Recorded>, Error> {
        let event = gpu.record(self.handle)?;
        self.records.fetch_add(1, Ordering::Relaxed);
        Ok(event)
    }

    /// Whether an event can be recorded here and now.
    fn can_record(&self) -> bool {
        !self.is_capturing() && self.is_mine()
    }

    /// Closes the epoch `stamp` if it is open.
    pub(crate) fn close(&self, gpu: &Arc<Gpu>, stamp: u64) -> Result<(), Error> {
        if !self.can_record() || self.epochs.is_closed(stamp) {
            return Ok(());
        }
        self.epochs.close(|| self.record(gpu))
    }

    /// Closes the last epoch: the stream is about to be destroyed.
    pub(crate) fn retire(&self, gpu: &Arc<Gpu>) -> Result<(), Error> {
        if !self.can_record() {
            self.epochs.abandon();
            return Ok(());
        }
        self.epochs.retire(|| self.record(gpu))
    }

    /// Closes the open epoch if a block was stamped with it.
    pub(crate) fn close_stamped(&self, gpu: &Arc<Gpu>) -> Result<(), Error> {
        self.close(gpu, self.epochs.stamped())
    }

    /// Asks the driver whether a stamp is complete.
    pub(crate) fn query(&self, gpu: &Gpu, stamp: u64) -> Result<bool, Error> {
        if self.is_done(stamp) {
            return Ok(true);
        }
        if self.is_capturing() {
            return Ok(false);
        }
        let Some((epoch, event)) = self.epochs.event_for(stamp) else { return Ok(false) };
        self.ask(gpu, epoch, &event)
    }

    /// Closes the epoch `stamp` and asks whether it is complete; records nothing while an epoch
    /// before it is not.
    pub(crate) fn close_and_query(&self, gpu: &Arc<Gpu>, stamp: u64) -> Result<bool, Error> {
        if !self.epochs.is_closed(stamp) {
            self.poll(gpu)?;
            if self.epochs.has_events() {
                return Ok(false);
            }
            self.close(gpu, stamp)?;
        }
        self.query(gpu, stamp)
    }

    /// Asks which epochs are complete, and closes and asks the one that blocks were stamped with
    /// once all before it are.
    pub(crate) fn poll_or_close(&self, gpu: &Arc<Gpu>) -> Result<(), Error> {
        self.poll(gpu)?;
        if self.is_awaited() {
            return Ok(());
        }
        self.close_stamped(gpu)?;
        self.poll(gpu)
    }

    fn ask(&self, gpu: &Gpu, epoch: u64, event: &Recorded) -> Result<bool, Error> {
        self.queries.fetch_add(1, Ordering::Relaxed);
        event.recycle_early();
        let done = gpu.is_complete(event)?;
        if done {
            self.epochs.complete(epoch);
        }
        Ok(done)
    }

    /// Lets go of all events.
    pub(crate) fn forget_events(&self) {
        self.epochs.forget_events();
    }

    /// Finds the newest closed epoch that is complete, by halves: each answer stands for all
    /// epochs before, or for all after.
    pub(crate) fn poll(&self, gpu: &Gpu) -> Result<(), Error> {
        if self.is_capturing() {
            return Ok(());
        }
        let mut end = u64::MAX;
        while let Some((epoch, event)) = self.epochs.middle(end) {
            if !self.ask(gpu, epoch, &event)? {
                end = epoch;
            }
        }
        Ok(())
    }

    /// Whether this stream's future work comes after an epoch of another.
    pub(crate) fn is_after(&self, other: &Self, stamp: u64) -> bool {
        other.index == self.index || other.is_done(stamp) || self.seen.covers(other.index, stamp)
    }

    /// Makes this stream's future work come after a closed epoch of another.
    pub(crate) fn wait_for(&self, gpu: &Gpu, other: &Self, stamp: u64) -> Result<bool, Error> {
        if self.is_after(other, stamp) {
            return Ok(true);
        }
        let Some((epoch, event)) = other.epochs.event_for(stamp) else {
            // It was found complete meanwhile, or its event could not be recorded.
            return Ok(other.is_done(stamp));
        };
        self.seen.wait(other.index, epoch, || gpu.wait(self.handle, &event))?;
        self.waits.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// Whether there are events that are not known complete, to wait for.
    pub(crate) fn is_awaited(&self) -> bool {
        self.epochs.has_events()
    }
}
