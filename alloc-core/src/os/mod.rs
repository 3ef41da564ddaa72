//! The one place for system calls: the [`Os`] trait that the page layer is written against, the
//! Linux implementation, and the fake kernel and clock of the tests.
use core::ffi::CStr;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(not(loom))]
pub(crate) mod file;
pub(crate) mod fork;
#[cfg(not(loom))]
pub(crate) mod ids;
pub(crate) mod linux;
#[cfg(not(loom))]
pub(crate) mod page_scan;
#[cfg(not(loom))]
pub(crate) mod smaps;
pub(crate) mod start;
mod vdso;

/// A system call's error number (`ENOMEM` and so on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

/// A range of memory: the kernel's `struct iovec`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Range {
    pub(crate) addr: usize,
    pub(crate) len: usize,
}

/// What the page layer asks of a kernel. Addresses and lengths are multiples of the page size.
pub(crate) trait Os: Sync {
    /// Page size, bytes (4, 16 or 64 KiB).
    fn page_size(&self) -> usize;
    /// Maps `len` zero bytes, readable and writable, at exactly `addr`; `Err` where anything is mapped there.
    fn map_at(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// Gives the pages back to the kernel at once; they read as zero afterwards (`MADV_DONTNEED`).
    ///
    /// # Safety
    /// The range is ours and its contents are not needed any more.
    unsafe fn purge(&self, addr: usize, len: usize) -> Result<(), Errno>;
    /// As [`Os::purge`], for many ranges in as few calls as the kernel allows. Returns how many of
    /// the first ranges are done; the one after them was refused.
    ///
    /// # Safety
    /// As for [`Os::purge`], for each range.
    unsafe fn purge_all(&self, ranges: &[Range]) -> usize {
        // SAFETY: the caller's promise.
        ranges.iter().take_while(|r| unsafe { self.purge(r.addr, r.len) }.is_ok()).count()
    }
    /// Lets the kernel take the pages of many ranges when it wants to; until then they may be read and
    /// written as before (`MADV_FREE`). Returns as [`Os::purge_all`].
    ///
    /// # Safety
    /// As for [`Os::purge`], for each range.
    unsafe fn purge_lazily(&self, ranges: &[Range]) -> usize;
    /// Makes huge pages of the range, which lies on their borders, at once (`MADV_COLLAPSE`).
    fn collapse(&self, range: Range) -> Result<(), Errno>;
    /// Asks for huge pages where the range is touched (`MADV_HUGEPAGE`), or for none.
    fn advise_huge(&self, range: Range, wanted: bool) -> Result<(), Errno>;
    /// As [`Os::map_at`], of the kernel's reserved pages of `1 << lg_page` bytes.
    fn map_huge_at(&self, addr: usize, len: usize, lg_page: u32) -> Result<(), Errno>;
    /// Which pages are resident: bit 0 of one byte a page (`mincore`).
    fn resident(&self, addr: usize, len: usize, pages: &mut [u8]) -> Result<(), Errno>;
    /// Moves the pages of `[from, from + len)` to `to`, which is ours and mapped; `from` stays
    /// mapped and reads as zero afterwards (`mremap` with `MREMAP_DONTUNMAP`).
    ///
    /// # Safety
    /// Both ranges are ours; the contents of the target are not needed any more.
    unsafe fn move_pages(&self, from: usize, to: usize, len: usize) -> Result<(), Errno>;
    /// Reads a small file by open, read and close; the result is the number of bytes read, cut
    /// off where `buffer` is full.
    fn read_file(&self, path: &CStr, buffer: &mut [u8]) -> Result<usize, Errno>;
    /// Milliseconds of a monotonic clock.
    fn now_ms(&self) -> u64;
    /// Microseconds of the same clock.
    fn now_us(&self) -> u64;
}
