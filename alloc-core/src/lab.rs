//! The page heap as shipped, over a kernel and a clock of the caller's: what the policy lab replays
//! traces on. Not an interface: it changes with the heap.
//!
//! The heap's own tables are mapped for real, as it reads them; the pages of its window are not, so
//! that a trace may be of any size. Which of them are resident is for the caller to say.
use core::ffi::CStr;

use crate::extent::heap::PageHeap;
use crate::extent::page_map::{LG_PAGE, PAGE};
use crate::extent::{ExtentId, State};
use crate::heat::decay::Times;
use crate::os::linux::{self, Linux};
use crate::os::{Errno, Os, Range};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::lock::Mutex;

/// The pages of the heap, bytes.
pub const PAGE_BYTES: usize = PAGE;

/// A kernel and a clock. Pages are counted from the window's start.
pub trait Kernel: Sync {
    /// Milliseconds of a clock that does not go back.
    fn now_ms(&self) -> u64;
    /// `pages` pages from `page` on go back: they are not resident any more.
    fn purge(&self, page: usize, pages: usize);
}

/// What the options would set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `hot_window_ms`.
    pub window_ms: u64,
    /// `dirty_decay_ms`; `None` for -1.
    pub decay_ms: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { window_ms: 5000, decay_ms: Some(2000) }
    }
}

/// An extent that was given out.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Its first page.
    pub page: usize,
    /// Its length, pages.
    pub pages: usize,
    id: ExtentId,
}

/// The heap's accounts, pages unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Given out.
    pub in_use: u64,
    /// Free, and counted as resident.
    pub dirty: u64,
    /// Given back so far.
    pub purged: u64,
    /// Calls that did so.
    pub purge_calls: u64,
    /// Asked for again soon after.
    pub regretted: u64,
    /// The window in force, milliseconds.
    pub window_ms: u64,
}

/// Ranges of the heap's tables that are mapped: each table grows upwards.
struct Mapped {
    ranges: [(usize, usize); 16],
    len: usize,
}

struct Simulated<K> {
    kernel: K,
    /// Where the window begins; nothing is mapped from there on.
    window: AtomicUsize,
    mapped: Mutex<Mapped>,
}

impl<K: Kernel> Os for Simulated<K> {
    fn page_size(&self) -> usize {
        PAGE
    }

    fn map_at(&self, addr: usize, len: usize) -> Result<(), Errno> {
        if addr >= self.window.load(Relaxed) {
            return Ok(());
        }
        let unit = Linux.page_size();
        // Where the machine's pages are larger than the heap's, a table's end may be mapped already.
        let (start, end) = (addr.next_multiple_of(unit), (addr + len).next_multiple_of(unit));
        if start < end {
            Linux.map_at(start, end - start)?;
        }
        let mut mapped = self.mapped.lock();
        let len = mapped.len;
        if let Some(range) = mapped.ranges[..len].iter_mut().find(|range| range.1 == start) {
            range.1 = end;
            return Ok(());
        }
        mapped.ranges[len] = (start, end);
        mapped.len += 1;
        Ok(())
    }

    unsafe fn purge(&self, addr: usize, len: usize) -> Result<(), Errno> {
        let offset = addr - self.window.load(Relaxed);
        self.kernel.purge(offset >> LG_PAGE, len >> LG_PAGE);
        Ok(())
    }

    unsafe fn purge_all(&self, ranges: &[Range]) -> usize {
        for range in ranges {
            // SAFETY: no memory is behind the window; the simulated kernel drops a mark.
            let _ = unsafe { self.purge(range.addr, range.len) };
        }
        ranges.len()
    }

    unsafe fn purge_lazily(&self, _: &[Range]) -> usize {
        0
    }

    fn collapse(&self, _: Range) -> Result<(), Errno> {
        Err(Errno(libc::ENOSYS))
    }

    fn advise_huge(&self, _: Range, _: bool) -> Result<(), Errno> {
        Err(Errno(libc::ENOSYS))
    }

    fn map_huge_at(&self, _: usize, _: usize, _: u32) -> Result<(), Errno> {
        Err(Errno(libc::ENOMEM))
    }

    fn resident(&self, _: usize, _: usize, _: &mut [u8]) -> Result<(), Errno> {
        Err(Errno(libc::ENOSYS))
    }

    unsafe fn move_pages(&self, _: usize, _: usize, _: usize) -> Result<(), Errno> {
        Err(Errno(libc::ENOSYS))
    }

    fn read_file(&self, _: &CStr, _: &mut [u8]) -> Result<usize, Errno> {
        Err(Errno(libc::ENOENT))
    }

    fn now_ms(&self) -> u64 {
        self.kernel.now_ms()
    }

    fn now_us(&self) -> u64 {
        self.now_ms() * 1000
    }
}

impl<K> Drop for Simulated<K> {
    fn drop(&mut self) {
        let mapped = self.mapped.lock();
        for &(start, end) in &mapped.ranges[..mapped.len] {
            // SAFETY: the heap that used them is gone.
            let _ = unsafe { linux::unmap(start, end - start) };
        }
    }
}

/// A page heap over the kernel `K`.
pub struct Heap<K: Kernel>(PageHeap<Simulated<K>>);

impl<K: Kernel> Heap<K> {
    /// An empty heap. `None` where its tables can't be mapped.
    pub fn new(kernel: K, settings: Settings) -> Option<Self> {
        // Heaps that live at the same time lie apart by more than the tables of one.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let os = Simulated {
            kernel,
            window: AtomicUsize::new(usize::MAX),
            mapped: Mutex::new(Mapped { ranges: [(0, 0); 16], len: 0 }),
        };
        let heap = Self(PageHeap::new(os));
        let sp = &heap.0.space;
        heap.0.init(NEXT.fetch_add(400, Relaxed) % 8000).ok()?;
        sp.os.window.store(sp.window.address(0), Relaxed);
        heap.0.set_times(Times::new(settings.window_ms, settings.decay_ms));
        Some(heap)
    }

    /// The caller's kernel.
    pub fn kernel(&self) -> &K {
        &self.0.space.os.kernel
    }

    /// An extent of `pages` pages. `None` where the window is full.
    pub fn alloc(&self, pages: usize) -> Option<Block> {
        let pages = self.0.pages_for(pages.checked_mul(PAGE)?)?;
        let taken = self.0.alloc(pages, PAGE, State::Large, 0)?;
        Some(self.block(taken.id))
    }

    fn block(&self, id: ExtentId) -> Block {
        let e = self.0.space.extents.get(id);
        Block { page: e.start() as usize, pages: e.pages() as usize, id }
    }

    /// Takes a block back.
    pub fn free(&self, block: Block) {
        self.0.free(block.id);
    }

    /// Makes `block` `pages` pages long where it is. `None`: it is as it was.
    pub fn resize(&self, block: Block, pages: usize) -> Option<Block> {
        let pages = self.0.pages_for(pages.checked_mul(PAGE)?)?;
        if (pages as usize) < block.pages {
            self.0.shrink(block.id, pages);
        } else if pages as usize > block.pages && !self.0.extend(block.id, pages) {
            return None;
        }
        Some(self.block(block.id))
    }

    /// What the background thread does when it wakes. Returns how long it may sleep, milliseconds;
    /// `None`: until something is freed.
    pub fn step(&self) -> Option<u64> {
        self.0.step()
    }

    /// Gives everything free back at once. Returns how many bytes that were.
    pub fn trim(&self) -> usize {
        self.0.trim()
    }

    /// Free pages that are counted as resident.
    pub fn dirty(&self) -> u64 {
        self.0.dirty_hint()
    }

    /// The accounts.
    pub fn counts(&self) -> Counts {
        let counts = self.0.counts();
        Counts {
            in_use: counts.in_use,
            dirty: counts.dirty,
            purged: counts.purged,
            purge_calls: counts.purge_calls,
            regretted: counts.regretted,
            window_ms: counts.window_ms,
        }
    }
}

impl<K: Kernel> core::fmt::Debug for Heap<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Heap").field(&self.counts()).finish()
    }
}
