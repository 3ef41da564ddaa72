//! Hands batches of blocks from one thread to another.
//!
//! Batches are recycled, so the pipe itself never allocates after it was made. A side that has to wait is
//! woken only when half of the batches are ready for it: the cost of waking is shared by thousands of blocks.
//! Where all threads of both sides wait, none holds a batch, so one side has half of them: nobody waits for ever.

use crate::Block;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

/// A bounded queue of batches, for any number of producers and consumers.
pub struct Pipe<T = Block> {
    state: Mutex<State<T>>,
    ready: Condvar,
    batches: usize,
}

struct State<T> {
    full: VecDeque<Vec<T>>,
    empty: Vec<Vec<T>>,
    producers: usize,
}

impl<T> Pipe<T> {
    /// A pipe of `batches` batches with room for `batch` blocks each, for one producer.
    pub fn new(batches: usize, batch: usize) -> Self {
        Self::shared(batches, batch, 1)
    }

    /// The same for `producers` producers, each of which has to call [`Pipe::close`].
    pub fn shared(batches: usize, batch: usize, producers: usize) -> Self {
        let empty = (0..batches).map(|_| Vec::with_capacity(batch)).collect();
        let state = State { full: VecDeque::with_capacity(batches), empty, producers };
        Self { state: Mutex::new(state), ready: Condvar::new(), batches }
    }

    /// An empty batch for the producer; waits while the consumer has them all.
    pub fn batch(&self) -> Vec<T> {
        let mut state = self.lock();
        if state.empty.is_empty() {
            let enough = self.batches.div_ceil(2);
            state = self.ready.wait_while(state, |s| s.empty.len() < enough).expect("no panics");
        }
        state.empty.pop().expect("one is there")
    }

    /// Hands a batch to the consumer.
    pub fn send(&self, batch: Vec<T>) {
        let mut state = self.lock();
        state.full.push_back(batch);
        if state.full.len() == self.batches.div_ceil(2) {
            self.ready.notify_all();
        }
    }

    /// A full batch for the consumer, or `None` once the pipe is closed and drained.
    pub fn receive(&self) -> Option<Vec<T>> {
        let mut state = self.lock();
        if state.full.is_empty() {
            let enough = self.batches.div_ceil(2);
            state = self
                .ready
                .wait_while(state, |s| s.full.len() < enough && s.producers > 0)
                .expect("no panics");
        }
        state.full.pop_front()
    }

    /// Gives a batch back to the producer.
    pub fn recycle(&self, mut batch: Vec<T>) {
        batch.clear();
        let mut state = self.lock();
        state.empty.push(batch);
        if state.empty.len() == self.batches.div_ceil(2) {
            self.ready.notify_all();
        }
    }

    /// No more batches will come from this producer.
    pub fn close(&self) {
        self.lock().producers -= 1;
        self.ready.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("no panics")
    }
}
