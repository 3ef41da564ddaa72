//! A ledger of memory in use that somebody else keeps: libthermalloc's profiler, where the process
//! has it.
//!
//! Invariant: what was entered leaves once, before its memory is handed out again.

use crate::driver::Stream;
use std::collections::HashMap;
use std::fmt;

/// What memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// Of a device.
    Device,
    /// Pinned host memory.
    Pinned,
    /// Managed memory.
    Managed,
}

/// A block that is handed out.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// What memory.
    pub space: Space,
    /// The device's number.
    pub device: i32,
    /// Where it lies.
    pub addr: u64,
    /// What was asked for.
    pub bytes: u64,
    /// What was given.
    pub usable_bytes: u64,
    /// The stream in whose order it is used.
    pub stream: Stream,
    /// Its tag; empty where it has none.
    pub tag: &'a str,
}

/// Somebody who keeps a ledger. Called with a lock of the pool held: it must not call the pool.
pub trait Ledger: Send + Sync {
    /// Enters a block; what to give to [`Self::leave`], 0 where it is not recorded.
    fn enter(&self, entry: &Entry<'_>) -> u64;

    /// Takes a block off; `pending`: streams still use it, and a second call follows.
    fn leave(&self, handle: u64, stream: Stream, pending: bool);
}

/// The blocks of a heap that a ledger has.
#[derive(Default)]
pub(crate) struct Entered {
    ledger: Option<&'static dyn Ledger>,
    handles: HashMap<u64, u64>,
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered").field("blocks", &self.handles.len()).finish_non_exhaustive()
    }
}

impl Entered {
    pub(crate) fn new(ledger: Option<&'static dyn Ledger>) -> Self {
        Self { ledger, handles: HashMap::new() }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.ledger.is_some()
    }

    /// Enters the block that is known here as `key`.
    #[cold]
    pub(crate) fn enter(&mut self, key: u64, entry: &Entry<'_>) {
        let handle = self.ledger.map_or(0, |ledger| ledger.enter(entry));
        if handle != 0 {
            self.handles.insert(key, handle);
        }
    }

    /// Takes it off, if it is there.
    #[inline]
    pub(crate) fn leave(&mut self, key: u64, stream: Stream, pending: bool) {
        if !self.handles.is_empty() {
            self.leave_entered(key, stream, pending);
        }
    }

    #[cold]
    fn leave_entered(&mut self, key: u64, stream: Stream, pending: bool) {
        let Some(&handle) = self.handles.get(&key) else { return };
        if !pending {
            self.handles.remove(&key);
        }
        if let Some(ledger) = self.ledger {
            ledger.leave(handle, stream, pending);
        }
    }

    /// Takes all off: the pool ends.
    pub(crate) fn leave_all(&mut self) {
        for (_, handle) in std::mem::take(&mut self.handles) {
            if let Some(ledger) = self.ledger {
                ledger.leave(handle, Stream::NULL, false);
            }
        }
    }
}
