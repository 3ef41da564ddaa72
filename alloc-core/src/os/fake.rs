//! A kernel and a clock for tests. Memory is real (so it exists, and reads as zero when it should);
//! the clock stands still until told, each call is counted, each purge recorded, any call made to
//! fail, and the page size chosen. A range that is not on that page size is a bug of the caller's.
use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::collections::BTreeMap;
use std::string::String;
use std::sync::Mutex;
use std::vec::Vec;

use super::linux::{Linux, unmap};
use super::{Errno, Os, Range};

/// A call of [`Os`] that can be counted and made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Map,
    Purge,
    PurgeLazily,
    Collapse,
    AdviseHuge,
    MapHuge,
    Resident,
    Move,
}

const CALLS: usize = 8;

/// Pages given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Purge {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) at_ms: u64,
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    Nth(u64, Errno),
    Always(Errno),
}

#[derive(Debug, Default)]
struct Log {
    counts: [u64; CALLS],
    failures: [Option<Failure>; CALLS],
    purges: Vec<Purge>,
    all_resident: bool,
    collapses: Vec<Range>,
    advice: Vec<(Range, bool)>,
    windows: Vec<(usize, usize)>,
    files: BTreeMap<String, String>,
}

#[derive(Debug)]
pub(crate) struct FakeKernel {
    page_size: usize,
    clock_ms: AtomicU64,
    log: Mutex<Log>,
}

/// An address range of `len` bytes that nothing uses or will use: apart from where the kernel puts
/// mappings, and handed out once.
pub(crate) fn free_window(len: usize) -> usize {
    const ALIGN: usize = 1 << 30;
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);
    NEXT.fetch_add(len.next_multiple_of(ALIGN) + ALIGN, Relaxed)
}

impl FakeKernel {
    /// A kernel with pages of 4, 16 or 64 KiB, at time 0.
    pub(crate) fn new(page_size: usize) -> Self {
        assert!(page_size.is_power_of_two() && page_size >= Linux.page_size());
        Self { page_size, clock_ms: AtomicU64::new(0), log: Mutex::default() }
    }

    /// An address range of `len` bytes to map in, unmapped when the kernel is dropped.
    pub(crate) fn window(&self, len: usize) -> usize {
        let start = free_window(len);
        self.log.lock().unwrap().windows.push((start, len));
        start
    }

    /// Puts a file there, or other contents into it.
    pub(crate) fn put_file(&self, path: &str, text: &str) {
        self.log.lock().unwrap().files.insert(path.into(), text.into());
    }

    /// From now on every page is said to be resident.
    pub(crate) fn assume_resident(&self) {
        self.log.lock().unwrap().all_resident = true;
    }

    /// Lets time pass.
    pub(crate) fn advance(&self, ms: u64) {
        self.clock_ms.fetch_add(ms, Relaxed);
    }

    /// Calls so far, those that failed among them.
    pub(crate) fn count(&self, call: Call) -> u64 {
        self.log.lock().unwrap().counts[call as usize]
    }

    /// Makes the `n`th call from now (1 = the next) fail, once, with `ENOMEM`.
    pub(crate) fn fail_nth(&self, call: Call, n: u64) {
        let mut log = self.log.lock().unwrap();
        let at = log.counts[call as usize] + n;
        log.failures[call as usize] = Some(Failure::Nth(at, Errno(libc::ENOMEM)));
    }

    /// Makes every such call fail with `errno`.
    pub(crate) fn fail_always(&self, call: Call, errno: i32) {
        self.log.lock().unwrap().failures[call as usize] = Some(Failure::Always(Errno(errno)));
    }

    /// Takes the failures of a call back.
    pub(crate) fn heal(&self, call: Call) {
        self.log.lock().unwrap().failures[call as usize] = None;
    }

    /// The purges since this was last asked.
    pub(crate) fn take_purges(&self) -> Vec<Purge> {
        core::mem::take(&mut self.log.lock().unwrap().purges)
    }

    /// The ranges collapsed since this was last asked.
    pub(crate) fn take_collapses(&self) -> Vec<Range> {
        core::mem::take(&mut self.log.lock().unwrap().collapses)
    }

    /// The advice for or against huge pages since this was last asked.
    pub(crate) fn take_advice(&self) -> Vec<(Range, bool)> {
        core::mem::take(&mut self.log.lock().unwrap().advice)
    }

    /// Resident bytes of a range, whole pages of this kernel.
    pub(crate) fn resident_bytes(&self, addr: usize, len: usize) -> usize {
        let mut pages = std::vec![0; len / self.page_size];
        self.fold_resident(addr, &mut pages).unwrap();
        pages.iter().filter(|&&page| page & 1 == 1).count() * self.page_size
    }

    fn enter(&self, call: Call, ranges: &[usize]) -> Result<(), Errno> {
        for value in ranges {
            assert!(
                value.is_multiple_of(self.page_size),
                "{call:?} of {value:#x}, which is on no page"
            );
        }
        let mut log = self.log.lock().unwrap();
        log.counts[call as usize] += 1;
        match log.failures[call as usize] {
            Some(Failure::Always(errno)) => Err(errno),
            Some(Failure::Nth(n, errno)) if log.counts[call as usize] == n => Err(errno),
            _ => Ok(()),
        }
    }

    fn fold_resident(&self, addr: usize, pages: &mut [u8]) -> Result<(), Errno> {
        let small = self.page_size / Linux.page_size();
        let mut parts = std::vec![0; small];
        for (i, page) in pages.iter_mut().enumerate() {
            Linux.resident(addr + i * self.page_size, self.page_size, &mut parts)?;
            *page = u8::from(parts.iter().any(|part| part & 1 == 1));
        }
        Ok(())
    }
}

impl Os for FakeKernel {
    fn page_size(&self) -> usize {
        self.page_size
    }

    fn map_at(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.enter(Call::Map, &[addr, len])?;
        Linux.map_at(addr, len)?;
        self.log.lock().unwrap().windows.push((addr, len));
        Ok(())
    }

    unsafe fn purge(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.enter(Call::Purge, &[addr, len])?;
        // SAFETY: the caller's promise.
        unsafe { Linux.purge(addr, len) }?;
        let at_ms = self.now_ms();
        self.log.lock().unwrap().purges.push(Purge { addr, len, at_ms });
        Ok(())
    }

    unsafe fn purge_lazily(&self, ranges: &[Range]) -> usize {
        let done = |r: &&Range| self.enter(Call::PurgeLazily, &[r.addr, r.len]).is_ok();
        ranges.iter().take_while(done).count()
    }

    fn collapse(&self, range: Range) -> Result<(), Errno> {
        self.enter(Call::Collapse, &[range.addr, range.len])?;
        assert!(range.addr.is_multiple_of(2 << 20) && range.len.is_multiple_of(2 << 20));
        self.log.lock().unwrap().collapses.push(range);
        Ok(())
    }

    fn advise_huge(&self, range: Range, wanted: bool) -> Result<(), Errno> {
        self.enter(Call::AdviseHuge, &[range.addr, range.len])?;
        self.log.lock().unwrap().advice.push((range, wanted));
        Ok(())
    }

    /// Ordinary memory stands for reserved pages.
    fn map_huge_at(&self, addr: usize, len: usize, lg_page: u32) -> Result<(), Errno> {
        self.enter(Call::MapHuge, &[addr, len])?;
        let page = 1usize << lg_page;
        assert!(addr.is_multiple_of(page) && len.is_multiple_of(page));
        Linux.map_at(addr, len)?;
        self.log.lock().unwrap().windows.push((addr, len));
        Ok(())
    }

    fn resident(&self, addr: usize, len: usize, pages: &mut [u8]) -> Result<(), Errno> {
        self.enter(Call::Resident, &[addr, len])?;
        if self.log.lock().unwrap().all_resident {
            pages[..len / self.page_size].fill(1);
            return Ok(());
        }
        self.fold_resident(addr, &mut pages[..len / self.page_size])
    }

    unsafe fn move_pages(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        self.enter(Call::Move, &[from, to, len])?;
        // SAFETY: the caller's promise.
        unsafe { Linux.move_pages(from, to, len) }
    }

    fn read_file(&self, path: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
        let log = self.log.lock().unwrap();
        let text = log.files.get(path.to_str().unwrap()).ok_or(Errno(libc::ENOENT))?;
        let len = text.len().min(buffer.len());
        buffer[..len].copy_from_slice(&text.as_bytes()[..len]);
        Ok(len)
    }

    fn now_ms(&self) -> u64 {
        self.clock_ms.load(Relaxed)
    }

    fn now_us(&self) -> u64 {
        self.now_ms() * 1000
    }
}

impl Drop for FakeKernel {
    fn drop(&mut self) {
        for &(start, len) in &self.log.get_mut().unwrap().windows {
            // SAFETY: the window was this kernel's alone, and the test is over.
            let _ = unsafe { unmap(start, len.next_multiple_of(self.page_size)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(addr: usize, len: usize, byte: u8) {
        // SAFETY: the test has mapped the range.
        unsafe {
            core::ptr::write_bytes(core::ptr::with_exposed_provenance_mut::<u8>(addr), byte, len)
        };
    }

    fn byte(addr: usize) -> u8 {
        // SAFETY: the test has mapped the address.
        unsafe { core::ptr::with_exposed_provenance::<u8>(addr).read() }
    }

    #[test]
    fn memory_is_real_at_every_page_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let kernel = FakeKernel::new(page);
            let at = kernel.window(8 * page);
            kernel.map_at(at, 4 * page).unwrap();
            kernel.map_at(at + 4 * page, 4 * page).unwrap();
            assert_eq!(kernel.map_at(at + page, page), Err(Errno(libc::EEXIST)));
            assert_eq!(kernel.resident_bytes(at, 8 * page), 0);
            fill(at + page - 1, 2, 9);
            assert_eq!(kernel.resident_bytes(at, 8 * page), 2 * page);
            // SAFETY: the ranges are the test's.
            unsafe { kernel.move_pages(at, at + 4 * page, 2 * page) }.unwrap();
            assert_eq!((byte(at + page), byte(at + 5 * page)), (0, 9));
            kernel.advance(30);
            kernel.advance(12);
            // SAFETY: as above.
            unsafe { kernel.purge(at + 5 * page, page) }.unwrap();
            assert_eq!(byte(at + 5 * page), 0);
            assert_eq!(kernel.take_purges(), [Purge { addr: at + 5 * page, len: page, at_ms: 42 }]);
            assert_eq!(kernel.take_purges(), []);
            // SAFETY: as above.
            unsafe { unmap(at, page) }.unwrap();
            kernel.map_at(at, page).unwrap();
            let counts = [Call::Map, Call::Purge, Call::Move].map(|call| kernel.count(call));
            assert_eq!(counts, [4, 1, 1]);
        }
    }

    #[test]
    fn calls_fail_when_told() {
        let kernel = FakeKernel::new(4 << 10);
        let at = kernel.window(1 << 20);
        kernel.map_at(at, 4096).unwrap();
        kernel.fail_nth(Call::Map, 2);
        kernel.map_at(at + 4096, 4096).unwrap();
        assert_eq!(kernel.map_at(at + 8192, 4096), Err(Errno(libc::ENOMEM)));
        kernel.map_at(at + 8192, 4096).unwrap();
        kernel.fail_always(Call::Purge, libc::EPERM);
        fill(at, 1, 1);
        for _ in 0..2 {
            // SAFETY: the range is the test's.
            assert_eq!(unsafe { kernel.purge(at, 4096) }, Err(Errno(libc::EPERM)));
        }
        assert_eq!((byte(at), kernel.take_purges().len()), (1, 0));
        kernel.heal(Call::Purge);
        // SAFETY: as above.
        unsafe { kernel.purge(at, 4096) }.unwrap();
        assert_eq!(byte(at), 0);
    }

    #[test]
    fn a_dropped_kernel_leaves_nothing_mapped() {
        let kernel = FakeKernel::new(64 << 10);
        let at = kernel.window(1 << 20);
        kernel.map_at(at, 1 << 20).unwrap();
        drop(kernel);
        Linux.map_at(at, 1 << 20).unwrap();
        // SAFETY: the range is the test's.
        unsafe { unmap(at, 1 << 20) }.unwrap();
    }

    #[test]
    #[should_panic(expected = "which is on no page")]
    fn ranges_lie_on_pages() {
        let kernel = FakeKernel::new(16 << 10);
        let _ = kernel.map_at(kernel.window(1 << 20), 4 << 10);
    }
}
