//! The process's arenas by index, as jemalloc numbers them: the automatic ones first (one for each CPU,
//! over one page layer), then the explicit ones, each a heap of its own.
//!
//! Invariant: an explicit arena's memory lies in a window of its own, outside the process's. So the
//! class map has no code for its blocks, `free` goes its slow path, and nothing on the fast path knows
//! of arenas. The page layer that the automatic arenas share is told as arena 0's.
use crate::front::size_class::CLASSES;
use crate::os::Errno;

/// Explicit arenas that there can be at a time.
pub(crate) const MOST: usize = 1024;
/// Bytes of a name, with the final NUL.
pub(crate) const NAME_BYTES: usize = 32;

/// Whose figures, or whose memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// The arena of this index.
    One(u32),
    /// All together.
    All,
    /// Those that were destroyed: totals only.
    Destroyed,
}

/// Figures of one size range of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SizeStats {
    /// Bytes of blocks that are live or in a cache of a CPU or thread.
    pub(crate) allocated: u64,
    /// Blocks that left the arena for a cache or a caller, and those that came back.
    pub(crate) nmalloc: u64,
    pub(crate) ndalloc: u64,
    /// Calls that fetched blocks, and calls that gave some back.
    pub(crate) nfills: u64,
    pub(crate) nflushes: u64,
}

/// Figures of one arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaStats {
    /// Threads that are bound to it.
    pub(crate) nthreads: u32,
    /// Nanoseconds since it was created.
    pub(crate) uptime_ns: u64,
    pub(crate) dirty_decay_ms: i64,
    pub(crate) muzzy_decay_ms: i64,
    /// Pages of 4 KiB.
    pub(crate) pactive: u64,
    pub(crate) pdirty: u64,
    pub(crate) pmuzzy: u64,
    /// Bytes.
    pub(crate) mapped: u64,
    pub(crate) retained: u64,
    pub(crate) resident: u64,
    pub(crate) metadata: u64,
    /// Purges (`nmadvise` calls, `purged` pages).
    pub(crate) dirty_nmadvise: u64,
    pub(crate) dirty_purged: u64,
    /// Classes up to `SLAB_MAX`, and all above.
    pub(crate) small: SizeStats,
    pub(crate) large: SizeStats,
}

/// Figures of one size class of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassStats {
    /// As in [`SizeStats`].
    pub(crate) nmalloc: u64,
    pub(crate) ndalloc: u64,
    pub(crate) nfills: u64,
    pub(crate) nflushes: u64,
    /// Blocks that are live or in a cache of a CPU or thread.
    pub(crate) curregs: u64,
    /// Slabs ever made, slabs now, and those of them that have free slots.
    pub(crate) nslabs: u64,
    pub(crate) curslabs: u64,
    pub(crate) nonfull_slabs: u64,
}

/// By class code; the last is for blocks above the largest class.
pub(crate) type Classes = [ClassStats; CLASSES + 2];

/// Number of automatic arenas: the indices below are theirs.
pub(crate) fn auto_count() -> u32 {
    0
}

/// `arenas.narenas`: one more than the highest index ever in use.
pub(crate) fn count() -> u32 {
    auto_count()
}

/// `arena.<i>.initialized`: whether the index is an arena's that was not destroyed.
pub(crate) fn is_live(index: u32) -> bool {
    index < count()
}

/// `arenas.create`: a new explicit arena's index. `EAGAIN`: there are too many, or no memory for it.
pub(crate) fn create() -> Result<u32, Errno> {
    Err(Errno(libc::EAGAIN))
}

/// `arena.<i>.reset`: frees all blocks of an explicit arena. `EFAULT` for an index that is none.
///
/// # Safety
/// Nobody uses a block of the arena any more, and none is in an explicit tcache.
pub(crate) unsafe fn reset(index: u32) -> Result<(), Errno> {
    let _ = index;
    Err(Errno(libc::EFAULT))
}

/// `arena.<i>.destroy`: as [`reset`], and gives all memory back; [`create`] may use the index again.
/// `EFAULT` also where a thread is bound to it.
///
/// # Safety
/// As for [`reset`].
pub(crate) unsafe fn destroy(index: u32) -> Result<(), Errno> {
    let _ = index;
    Err(Errno(libc::EFAULT))
}

/// `arena.<i>.purge`: gives every free page back. `EFAULT` for an index that is no live arena's. For an
/// automatic arena it is the page layer that all of these share.
pub(crate) fn purge(which: Which) -> Result<(), Errno> {
    let _ = which;
    Err(Errno(libc::EFAULT))
}

/// `arena.<i>.decay`: gives back what is due by the decay times. Errors as [`purge`].
pub(crate) fn decay(which: Which) -> Result<(), Errno> {
    let _ = which;
    Err(Errno(libc::EFAULT))
}

/// The decay times of an arena, milliseconds, -1 for never: dirty, muzzy. Those of automatic arenas are
/// the options' (in force now). `EFAULT` for no arena.
pub(crate) fn decay_ms(index: u32) -> Result<(i64, i64), Errno> {
    let _ = index;
    Err(Errno(libc::EFAULT))
}

/// Sets one or both of them; an automatic arena's sets the options. `EFAULT` for no arena or a value
/// below -1.
pub(crate) fn set_decay_ms(
    index: u32,
    dirty: Option<i64>,
    muzzy: Option<i64>,
) -> Result<(), Errno> {
    let _ = (index, dirty, muzzy);
    Err(Errno(libc::EFAULT))
}

/// An arena's name with its final NUL: at first "auto" or "manual_<index>".
pub(crate) fn name(index: u32) -> Result<[u8; NAME_BYTES], Errno> {
    let _ = index;
    Err(Errno(libc::EFAULT))
}

/// Gives an arena a name, which is cut off where it is too long.
pub(crate) fn set_name(index: u32, name: &[u8]) -> Result<(), Errno> {
    let _ = (index, name);
    Err(Errno(libc::EFAULT))
}

/// `arenas.lookup`: the arena that holds the live block at `address`; 0 where that is an automatic
/// arena's block with pages of its own. `None`: no block starts or lies there.
pub(crate) fn lookup(address: usize) -> Option<u32> {
    let _ = address;
    None
}

/// Figures; `None` where `One` names no arena (a destroyed one is none).
pub(crate) fn stats(which: Which) -> Option<ArenaStats> {
    let _ = which;
    None
}

/// Figures by class; false, and nothing written, where `One` names no arena.
pub(crate) fn class_stats(which: Which, out: &mut Classes) -> bool {
    let _ = (which, out);
    false
}
