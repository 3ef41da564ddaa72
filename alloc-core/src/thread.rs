//! What the calling thread may ask of the allocator for itself: an arena, its own counters, no cache.
//!
//! A thread that asks for such a thing leaves the fast path for good: it has no CPU index any more, so
//! that each of its calls comes to the slow path by the test that is there anyway. Others pay nothing.
use crate::os::Errno;

/// `thread.arena`: the arena that the thread is bound to, else that of its CPU.
pub(crate) fn arena() -> u32 {
    0
}

/// Binds the thread to an arena. An explicit one serves all its requests from now on; an automatic one
/// means the usual way. `EFAULT`: there is no such arena.
pub(crate) fn bind(index: u32) -> Result<(), Errno> {
    let _ = index;
    Err(Errno(libc::EFAULT))
}

/// `thread.allocated`: bytes of all blocks that the thread allocated, each of its usable size. Before
/// the thread first asked for any of its counters, of the sizes asked for.
pub(crate) fn allocated() -> u64 {
    crate::front::thread_allocated()
}

/// `thread.deallocated`: bytes of all blocks that it freed since it first asked for a counter.
pub(crate) fn deallocated() -> u64 {
    0
}

/// `thread.allocatedp`: where that figure is kept, for as long as the thread lives.
pub(crate) fn allocated_place() -> *mut u64 {
    core::ptr::null_mut()
}

/// `thread.deallocatedp`.
pub(crate) fn deallocated_place() -> *mut u64 {
    core::ptr::null_mut()
}

/// `thread.tcache.enabled`: whether its requests are served from caches.
pub(crate) fn cache_enabled() -> bool {
    true
}

/// Turns that on or off.
pub(crate) fn set_cache_enabled(enabled: bool) {
    let _ = enabled;
}

/// `thread.tcache.flush`: gives the blocks in the thread's own cache back, where it has one. What is in
/// the caches of CPUs is nobody's, and stays.
pub(crate) fn flush_cache() {
    crate::front::flush_current();
}

/// `thread.idle`: the thread is about to be idle.
pub(crate) fn idle() {
    flush_cache();
}

/// `thread.peak.read`: the most bytes, allocated less freed, since the last reset.
pub(crate) fn peak() -> u64 {
    0
}

/// `thread.peak.reset`.
pub(crate) fn reset_peak() {}
