//! Memory for metadata: tables that grow in place. A table's address range is fixed when the
//! window is placed and nothing in it is reserved; pages are mapped as the table grows, and are
//! never given back. Entries are addressed by index, so a 4-byte link stands for a pointer.
use core::marker::PhantomData;

use crate::os::{Errno, Os};
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Smallest step by which a table grows, bytes.
const STEP_BYTES: usize = 64 << 10;

/// A table of `T`s, zeroed when new. Entry 0 is never handed out: index 0 means "none".
pub(crate) struct Table<T> {
    start: AtomicUsize,
    max_bytes: AtomicUsize,
    mapped_bytes: AtomicUsize,
    entry: PhantomData<fn() -> T>,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self {
            start: AtomicUsize::new(0),
            max_bytes: AtomicUsize::new(0),
            mapped_bytes: AtomicUsize::new(0),
            entry: PhantomData,
        }
    }

    /// Gives the table its address range, where nothing of it is mapped yet. Called before any other use,
    /// and again where that range was not to be had.
    pub(crate) fn place(&self, start: usize, max_bytes: usize) {
        self.mapped_bytes.store(0, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
    }

    /// Sees to it that entries below `len` are mapped. Callers exclude each other.
    pub(crate) fn ensure(&self, os: &impl Os, len: usize) -> Result<(), Errno> {
        let mapped = self.mapped_bytes.load(Ordering::Relaxed);
        let want = len * size_of::<T>();
        if want <= mapped {
            return Ok(());
        }
        let max = self.max_bytes.load(Ordering::Relaxed);
        if want > max {
            return Err(Errno(libc::ENOMEM));
        }
        let page = os.page_size();
        let least = (want - mapped).next_multiple_of(page);
        let step = least.max(STEP_BYTES).max((mapped / 8).next_multiple_of(page)).min(max - mapped);
        let at = self.start.load(Ordering::Relaxed) + mapped;
        let got = match os.map_at(at, step) {
            Ok(()) => step,
            Err(_) => os.map_at(at, least).map(|()| least)?,
        };
        self.mapped_bytes.store(mapped + got, Ordering::Release);
        Ok(())
    }

    /// The address of entry `index`, which lies below an ensured length.
    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> *mut T {
        debug_assert!((index + 1) * size_of::<T>() <= self.mapped_bytes.load(Ordering::Relaxed));
        let address = self.start.load(Ordering::Relaxed) + index * size_of::<T>();
        core::ptr::with_exposed_provenance_mut(address)
    }

    /// The table's first address.
    pub(crate) fn start(&self) -> usize {
        self.start.load(Ordering::Relaxed)
    }

    /// Bytes mapped so far.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.mapped_bytes.load(Ordering::Relaxed)
    }
}
