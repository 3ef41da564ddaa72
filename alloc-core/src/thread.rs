//! What the calling thread may ask of the allocator for itself: an arena, its own counters, no cache.
//! A thread that does leaves the fast path (`front::apart`); others pay nothing.
use crate::explicit;
use crate::front::{self, apart};
use crate::os::Errno;

/// `thread.arena`: the arena that the thread is bound to, else that of its CPU.
pub(crate) fn arena() -> u32 {
    let auto = explicit::auto_count().max(1);
    apart::bound().unwrap_or_else(|| front::current_arena() % auto)
}

/// Binds the thread to an arena. An explicit one serves all its requests from now on; an automatic one
/// means the usual way. `EFAULT`: there is no such arena; `EAGAIN`: too many threads are bound.
pub(crate) fn bind(index: u32) -> Result<(), Errno> {
    if !explicit::is_live(index) {
        return Err(Errno(libc::EFAULT));
    }
    apart::bind(index, index >= explicit::auto_count())
}

/// `thread.allocated`: bytes of all blocks that the thread allocated, each of its usable size. Before
/// the thread first asked for any of its counters, of the sizes asked for.
pub(crate) fn allocated() -> u64 {
    // SAFETY: the thread's own counter.
    unsafe { allocated_place().read() }
}

/// `thread.deallocated`: bytes of all blocks that it freed since it first asked for a counter.
pub(crate) fn deallocated() -> u64 {
    // SAFETY: as above.
    unsafe { deallocated_place().read() }
}

/// `thread.allocatedp`: where that figure is kept, for as long as the thread lives.
pub(crate) fn allocated_place() -> *mut u64 {
    apart::counters().0
}

/// `thread.deallocatedp`.
pub(crate) fn deallocated_place() -> *mut u64 {
    apart::counters().1
}

/// `thread.tcache.enabled`: whether its requests are served from caches.
pub(crate) fn cache_enabled() -> bool {
    !apart::is_set(apart::UNCACHED)
}

/// Turns that on or off.
pub(crate) fn set_cache_enabled(enabled: bool) {
    if !enabled {
        flush_cache();
    }
    apart::set(apart::UNCACHED, !enabled);
}

/// `thread.tcache.flush`: gives the blocks in the thread's own cache back, where it has one. What is in
/// the caches of CPUs is nobody's, and stays.
pub(crate) fn flush_cache() {
    front::flush_current();
}

/// `thread.prof.active`: whether the profiler may record its blocks.
pub(crate) fn is_profiled() -> bool {
    front::is_profiled()
}

/// Turns that on or off.
pub(crate) fn set_profiled(on: bool) {
    front::set_profiled(on);
}

/// `thread.idle`: the thread is about to be idle.
pub(crate) fn idle() {
    flush_cache();
}

/// `thread.peak.read`: the most bytes, allocated less freed, above what it was at the last reset, or
/// when the thread first asked for a counter.
pub(crate) fn peak() -> u64 {
    apart::counters().2
}

/// `thread.peak.reset`.
pub(crate) fn reset_peak() {
    apart::counters();
    apart::reset_peak();
}
