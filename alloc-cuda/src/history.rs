//! The last events of a pool, for the snapshot. Off unless a length is chosen.

use crate::driver::Stream;
use crate::gpu::lock;
use crate::heap::Run;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Something that happened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// As PyTorch names it.
    pub(crate) action: &'static str,
    pub(crate) time_ms: u64,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: Stream,
    pub(crate) tag: u32,
}

/// The ring of the last events.
pub(crate) struct History {
    capacity: usize,
    ring: Mutex<VecDeque<Entry>>,
}

impl History {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::new(VecDeque::with_capacity(capacity.min(1 << 16))) }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    fn push(&self, entry: Entry) {
        let mut ring = lock(&self.ring);
        if ring.len() >= self.capacity {
            ring.pop_front();
        }
        ring.push_back(entry);
    }

    pub(crate) fn alloc(&self, time_ms: u64, addr: u64, bytes: u64, stream: Stream, tag: u32) {
        self.push(Entry { action: "alloc", time_ms, addr, bytes, stream, tag });
    }

    pub(crate) fn free(&self, time_ms: u64, addr: u64, bytes: u64, stream: Stream, tag: u32) {
        // A free is seen at once: what may still use the block is not waited for by its user.
        self.push(Entry { action: "free_requested", time_ms, addr, bytes, stream, tag });
        self.push(Entry { action: "free_completed", time_ms, addr, bytes, stream, tag });
    }

    pub(crate) fn memory(&self, time_ms: u64, action: &'static str, run: Run, stream: Stream) {
        if self.is_on() {
            self.push(Entry { action, time_ms, addr: run.addr, bytes: run.bytes, stream, tag: 0 });
        }
    }

    pub(crate) fn oom(&self, time_ms: u64, bytes: u64, stream: Stream) {
        if self.is_on() {
            self.push(Entry { action: "oom", time_ms, addr: 0, bytes, stream, tag: 0 });
        }
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        lock(&self.ring).iter().copied().collect()
    }
}
