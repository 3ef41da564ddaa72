//! What this package needs beside `thermalloc_core::api` and the tables of `control`.

use libc::c_int;
use thermalloc_core::embed;
pub(crate) use thermalloc_core::embed::{page_size, write_stderr};

/// The calling thread is about to share its memory with a `vfork` child, which the kernel gives no
/// rseq area: until [`vfork_leave`] this thread allocates without per-CPU caches. Nests.
pub(crate) extern "C" fn vfork_enter() {
    embed::vfork_begin();
}

/// The parent is back (the child has exec'd, exited or never was).
pub(crate) extern "C" fn vfork_leave() {
    embed::vfork_end();
}

/// Prints `thermalloc: {what}` as one line and aborts.
#[cold]
pub(crate) fn fatal(what: &str) -> ! {
    embed::fatal(what.as_bytes())
}

/// Sets the thread's `errno`.
#[cold]
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: no condition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: it points to the calling thread's errno.
    unsafe { *errno = value };
}
