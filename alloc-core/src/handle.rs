//! Explicit arenas for Rust programs.
use core::alloc::{GlobalAlloc, Layout};

use crate::api;
use crate::explicit::{self, Which};
use crate::extended::{self, Request};
use crate::os::Errno;

/// Why something could not be done with an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArenaError {
    /// There are as many as there can be, or there is no memory for one more.
    TooMany,
    /// Threads are bound to it.
    InUse,
    /// A value that is not allowed.
    Invalid,
}

impl core::fmt::Display for ArenaError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            ArenaError::TooMany => "no room for another arena",
            ArenaError::InUse => "threads are bound to the arena",
            ArenaError::Invalid => "not a value for an arena",
        })
    }
}

impl core::error::Error for ArenaError {}

/// A handle of an explicit arena: memory apart from all other, which can be given back as a whole.
///
/// Its pages hold no other arena's blocks. A block is freed as any other, by whoever holds it. The handle
/// is only a name: the arena lives until [`Arena::destroy`].
///
/// ```
/// use core::alloc::{GlobalAlloc, Layout};
/// let arena = thermalloc::Arena::new()?;
/// let layout = Layout::new::<[u64; 100]>();
/// // SAFETY: the layout has bytes.
/// let p = unsafe { arena.alloc(layout) };
/// assert!(arena.holds(p) && arena.allocated_bytes() >= 800);
/// // SAFETY: nobody uses a block of the arena any more.
/// unsafe { arena.reset() };
/// assert_eq!(arena.allocated_bytes(), 0);
/// // SAFETY: as above.
/// unsafe { arena.destroy() }?;
/// # Ok::<(), thermalloc::ArenaError>(())
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Arena {
    index: u32,
}

impl Arena {
    /// A new arena.
    ///
    /// # Errors
    /// Where there are too many already, or memory is out.
    pub fn new() -> Result<Self, ArenaError> {
        explicit::create().map(|index| Self { index }).map_err(|_| ArenaError::TooMany)
    }

    /// Its index, as in `MALLOCX_ARENA` and `arena.<i>.purge`.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether `p` points to a live block of this arena.
    #[must_use]
    pub fn holds(&self, p: *const u8) -> bool {
        explicit::lookup(p.addr()) == Some(self.index)
    }

    /// Bytes of its live blocks, each rounded up to its size class.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        let stats = explicit::stats(Which::One(self.index)).unwrap_or_default();
        stats.small.allocated + stats.large.allocated
    }

    /// Memory in use by it, free pages with memory behind them included.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        explicit::stats(Which::One(self.index)).unwrap_or_default().resident
    }

    /// Gives its free pages back to the kernel, also what is hot.
    pub fn purge(&self) {
        // The index is a live arena's.
        let _ = explicit::purge(Which::One(self.index));
    }

    /// How long its cold pages take to go back, milliseconds; -1: they stay, 0: at once.
    ///
    /// # Errors
    /// Where the value is none that the option `dirty_decay_ms` allows.
    pub fn set_dirty_decay_ms(&self, ms: i64) -> Result<(), ArenaError> {
        explicit::set_decay_ms(self.index, Some(ms), None).map_err(|_| ArenaError::Invalid)
    }

    /// Frees all its blocks.
    ///
    /// # Safety
    /// Nobody uses any of them afterwards, and nobody calls for the arena meanwhile.
    pub unsafe fn reset(&self) {
        // SAFETY: as the caller promises; the index is a live arena's.
        let _ = unsafe { explicit::reset(self.index) };
    }

    /// The same, and gives back all its memory and its index.
    ///
    /// # Safety
    /// As for [`Arena::reset`].
    ///
    /// # Errors
    /// Where threads are bound to it; then it stays.
    pub unsafe fn destroy(self) -> Result<(), ArenaError> {
        // SAFETY: as the caller promises.
        unsafe { explicit::destroy(self.index) }.map_err(|Errno(_)| ArenaError::InUse)
    }

    fn request(&self, layout: Layout, zero: bool) -> Request {
        Request { align: layout.align(), zero, arena: Some(self.index), ..Request::default() }
    }
}

// SAFETY: `extended` returns null or a block of at least `layout.size()` bytes with the alignment
// asked for, that overlaps no other live block, and keeps the contents on realloc.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        extended::alloc(layout.size(), &self.request(layout, false))
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller passes a live block of ours with its layout.
        unsafe { api::free_sized(ptr, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        extended::alloc(layout.size(), &self.request(layout, true))
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller passes a live block of ours with its layout.
        unsafe { extended::realloc(ptr, new_size, &self.request(layout, false)) }
    }
}
