//! glibc's reports, from the statistics table: mallinfo, malloc_stats, malloc_info.

use libc::{EINVAL, FILE, c_int};
use thermalloc_core::control::report::{self, Format};
use thermalloc_core::control::stats;

use crate::hooks::write_stderr;

/// glibc's `struct mallinfo2`, and with `c_int` its `struct mallinfo`.
#[repr(C)]
#[derive(Default)]
struct Mallinfo<T> {
    /// Bytes mapped for blocks.
    arena: T,
    ordblks: T,
    smblks: T,
    /// Number of live blocks with pages of their own.
    hblks: T,
    /// Bytes in them.
    hblkhd: T,
    usmblks: T,
    fsmblks: T,
    /// Bytes in live blocks.
    uordblks: T,
    /// Bytes of memory that no live block holds.
    fordblks: T,
    /// Bytes that `malloc_trim` could give back.
    keepcost: T,
}

fn mallinfo_of<T: Default>(int: impl Fn(u64) -> T) -> Mallinfo<T> {
    let s = stats::snapshot();
    let free = s.active_bytes.saturating_sub(s.allocated_bytes).saturating_add(s.dirty_bytes);
    Mallinfo {
        arena: int(s.mapped_bytes),
        hblks: int(s.large_live_blocks),
        hblkhd: int(s.large_live_bytes),
        uordblks: int(s.allocated_bytes),
        fordblks: int(free),
        keepcost: int(s.dirty_bytes),
        ..Mallinfo::default()
    }
}

#[unsafe(no_mangle)]
extern "C" fn mallinfo2() -> Mallinfo<u64> {
    mallinfo_of(|figure| figure)
}

/// What does not fit an `int` reads as its maximum: better than a wrapped figure.
#[unsafe(no_mangle)]
extern "C" fn mallinfo() -> Mallinfo<c_int> {
    mallinfo_of(|figure| c_int::try_from(figure).unwrap_or(c_int::MAX))
}

#[unsafe(no_mangle)]
extern "C" fn malloc_stats() {
    report::write(Format::Text, &mut |line| write_stderr(line));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc_info(options: c_int, stream: *mut FILE) -> c_int {
    if options != 0 {
        return EINVAL;
    }
    let mut result = 0;
    report::write(Format::MallocInfo, &mut |line| {
        // SAFETY: the bytes are `line`'s own and the caller gives an open stream.
        if unsafe { libc::fwrite(line.as_ptr().cast(), 1, line.len(), stream) } != line.len() {
            result = -1;
        }
    });
    result
}
