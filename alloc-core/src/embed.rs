//! What a package that puts the allocator into a process (libthermalloc) needs beside [`crate::api`]
//! and [`crate::control`]. Not for others.
use crate::control::conf;
use crate::{fatal, front, os};

pub use crate::control::jemalloc::ZeroRealloc;
pub use crate::fast_alloc;
pub use crate::front::fast;

/// What `realloc` of a block to 0 bytes is to do, now that a program has called it so.
#[must_use]
pub fn zero_realloc() -> ZeroRealloc {
    conf::zero_realloc()
}

/// The calling thread is about to `vfork`: until [`vfork_end`] it, and the child that shares its
/// memory, allocate without caches. Nests.
pub fn vfork_begin() {
    front::vfork_begin();
}

/// The parent of a `vfork` is back.
pub fn vfork_end() {
    front::vfork_end();
}

/// The kernel's page size, bytes.
#[must_use]
pub fn page_size() -> usize {
    os::start::page_size()
}

/// Prints `thermalloc: {what}` as one line on stderr and aborts.
pub fn fatal(what: &[u8]) -> ! {
    fatal::end_with(what)
}

/// Writes to stderr, whatever comes of it; `errno` is left alone.
pub fn write_stderr(text: &[u8]) {
    let _ = os::linux::write(2, text);
}
