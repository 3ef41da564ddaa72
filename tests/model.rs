//! What any allocator promises, as a model: live blocks overlap nowhere, are aligned, and keep what
//! was written to them. Shared by the tests and the fuzz targets; knows nothing of thermalloc.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The addresses of all live blocks, of all threads.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<BTreeMap<usize, usize>>);

impl Ledger {
    /// No blocks.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Enters `[start, start + bytes)`.
    ///
    /// # Panics
    /// When a live block has any of it.
    pub fn enter(&self, start: usize, bytes: usize) {
        // A block of no bytes has an address of its own all the same.
        let end = start + bytes.max(1);
        let mut live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = live.range(..end).next_back().map(|(&at, &until)| (at, until));
        live.insert(start, end);
        drop(live);
        if let Some((at, until)) = before {
            assert!(until <= start, "{start:#x}..{end:#x} overlaps {at:#x}..{until:#x}");
        }
    }

    /// Takes out the block at `start`. To be called before the block is freed: after that another
    /// thread may get it at once.
    ///
    /// # Panics
    /// When there is none.
    pub fn leave(&self, start: usize) {
        let gone = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&start);
        assert!(gone.is_some(), "{start:#x} was not live");
    }

    /// Bytes of all live blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        live.iter().map(|(start, end)| end - start).sum()
    }

    /// Number of live blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A live block with something written to it.
#[derive(Debug)]
pub struct Block {
    start: *mut u8,
    layout: Layout,
    /// Bytes that may be used: at least the layout's.
    usable: usize,
    seed: u64,
}

// SAFETY: the block is this value's alone.
unsafe impl Send for Block {}

/// Up to this many bytes are written and checked one and all, of longer blocks both ends and some of
/// the middle.
const WHOLE: usize = 4096;
const ENDS: usize = 256;

impl Block {
    /// A block that was just allocated as `layout`, of which `usable` bytes may be used; enters it
    /// into the ledger and fills it.
    ///
    /// # Safety
    /// `start` is null or the start of `usable` bytes that are the caller's.
    ///
    /// # Panics
    /// When it is null, not aligned, too short or overlaps another block.
    #[must_use]
    pub unsafe fn new(
        ledger: &Ledger,
        start: *mut u8,
        layout: Layout,
        usable: usize,
        seed: u64,
    ) -> Self {
        assert!(!start.is_null(), "out of memory for {layout:?}");
        assert!(start.addr().is_multiple_of(layout.align()), "{start:p} for {layout:?}");
        assert!(usable >= layout.size(), "{usable} usable bytes for {layout:?}");
        ledger.enter(start.addr(), usable);
        let block = Self { start, layout, usable, seed };
        block.fill();
        block
    }

    /// The block's start.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The layout it was asked for with.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes that may be used.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.usable
    }

    /// Checks what is in it, and gives it up: for the caller to free.
    ///
    /// # Panics
    /// When it isn't what was written.
    #[must_use]
    pub fn give_up(self, ledger: &Ledger) -> (*mut u8, Layout) {
        self.check();
        ledger.leave(self.start.addr());
        (self.start, self.layout)
    }

    /// Checks and resizes it by `resize`, which gets the start, the layout and the new size, and says
    /// where the block is now and how much of it may be used.
    ///
    /// # Safety
    /// `resize` gives its caller what it says.
    ///
    /// # Panics
    /// When what is in it was changed, also by `resize`.
    #[must_use]
    pub unsafe fn resized(
        self,
        ledger: &Ledger,
        size: usize,
        resize: impl FnOnce(*mut u8, Layout, usize) -> (*mut u8, usize),
    ) -> Self {
        let (old, seed) = (self.usable, self.seed);
        let (start, before) = self.give_up(ledger);
        let layout = Layout::from_size_align(size, before.align()).expect("a valid layout");
        let (start, usable) = resize(start, before, size);
        assert!(!start.is_null(), "out of memory for {layout:?}");
        let moved = Self { start, layout, usable, seed };
        moved.check_of(old, old.min(size));
        // SAFETY: as the caller promises.
        unsafe { Self::new(ledger, start, layout, usable, seed.wrapping_add(1)) }
    }

    /// Checks that the first `layout.size()` bytes of a fresh block are zero.
    ///
    /// # Safety
    /// `start` has that many bytes, which are the caller's.
    ///
    /// # Panics
    /// When one isn't.
    pub unsafe fn check_zero(start: *const u8, layout: Layout) {
        static ZERO: [u8; 4096] = [0; 4096];
        // SAFETY: as the caller promises.
        let bytes = unsafe { core::slice::from_raw_parts(start, layout.size()) };
        for (i, part) in bytes.chunks(ZERO.len()).enumerate() {
            assert!(
                part == &ZERO[..part.len()],
                "not zero near {:#x} of {layout:?} at {start:p}",
                i * ZERO.len()
            );
        }
    }

    fn byte(&self, offset: usize) -> u8 {
        let mixed = (self.seed ^ offset as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed.to_be_bytes()[0]
    }

    fn fill(&self) {
        for at in places(self.usable) {
            // SAFETY: within the block.
            unsafe { self.start.wrapping_add(at).write(self.byte(at)) };
        }
    }

    /// Checks what is in it.
    ///
    /// # Panics
    /// When it isn't what was written.
    pub fn check(&self) {
        self.check_of(self.usable, self.usable);
    }

    /// Checks what was written when it had `old` bytes, below `kept`.
    fn check_of(&self, old: usize, kept: usize) {
        for at in places(old).take_while(|&at| at < kept) {
            // SAFETY: within the block.
            let found = unsafe { self.start.wrapping_add(at).read() };
            let expected = self.byte(at);
            assert!(found == expected, "byte {at:#x} of {self:?}: {found} is not {expected}");
        }
    }
}

/// The offsets that are written in a block of `bytes` bytes, in order.
fn places(bytes: usize) -> impl Iterator<Item = usize> {
    let ends = if bytes <= WHOLE { bytes } else { ENDS };
    let tail = if bytes <= WHOLE { bytes } else { bytes - ENDS };
    let stride = if bytes <= 1 << 20 { 509 } else { 65_521 };
    (0..ends).chain((ends..tail).step_by(stride)).chain(tail..bytes)
}
