//! What this package needs beside `thermalloc_core::api` and the tables of `control`.

use libc::c_int;

/// The calling thread is about to share its memory with a `vfork` child, which the kernel gives no
/// rseq area: until [`vfork_leave`] this thread allocates without per-CPU caches. Nests.
pub(crate) extern "C" fn vfork_enter() {}

/// The parent is back (the child has exec'd, exited or never was).
pub(crate) extern "C" fn vfork_leave() {}

/// The page size, bytes.
pub(crate) fn page_size() -> usize {
    // SAFETY: reads the process's auxiliary vector.
    usize::try_from(unsafe { libc::getauxval(libc::AT_PAGESZ) }).unwrap_or(4096)
}

/// Prints `thermalloc: {what}` as one line and aborts.
#[cold]
pub(crate) fn fatal(what: &str) -> ! {
    write_stderr(
        crate::Text::<512>::format(format_args!("thermalloc: {what}\n"))
            .as_str()
            .as_bytes(),
    );
    // SAFETY: ends the process.
    unsafe { libc::abort() }
}

/// Writes to descriptor 2, whatever comes of it.
pub(crate) fn write_stderr(text: &[u8]) {
    // SAFETY: the buffer is `text`'s own.
    let _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Sets the thread's `errno`.
#[cold]
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: no condition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: it points to the calling thread's errno.
    unsafe { *errno = value };
}
