//! Blocks above `CACHED_MAX`, and blocks of any size with an alignment that no class has: one extent
//! each. Only a size that is an exact multiple of 2 MiB, or such an alignment, gets a huge page's
//! alignment; all else is packed.
use super::Heap;
use crate::extent::page_map::{LG_PAGE, PAGE};
use crate::extent::{ExtentId, State};
use crate::front::size_class::{HUGE_BYTES, LARGE};
use crate::os::Os;
use crate::sync::atomic::Ordering::Relaxed;

/// From here on zeroing looks first which pages are there at all.
const LOOK_BYTES: usize = 1 << 20;
/// Pages that one look covers.
const LOOK_PAGES: usize = 1024;
/// A growing block is moved by the kernel, page by page, from this size on; below it is copied.
const MOVE_BYTES: usize = 1 << 20;
/// Blocks that may be moved so in all: each costs mappings.
const MOST_MOVES: u32 = 400;

impl<O: Os> Heap<O> {
    /// A block of `size` bytes at `align` (a power of two); null when memory is out.
    pub(crate) fn alloc_large(&self, size: usize, align: usize, zero: bool) -> *mut u8 {
        let block = self.alloc_extent(size, align);
        let Some(taken) = block else { return core::ptr::null_mut() };
        let start = self.pages.space.extents.get(taken.id).start();
        let p: *mut u8 =
            core::ptr::with_exposed_provenance_mut(self.pages.space.window.address(start));
        if zero && !taken.zero {
            self.zero(p, size);
        }
        p
    }

    fn alloc_extent(&self, size: usize, align: usize) -> Option<crate::extent::heap::Taken> {
        let pages = self.pages.pages_for(size)?;
        let align = if size != 0 && size.is_multiple_of(HUGE_BYTES) {
            align.max(HUGE_BYTES)
        } else {
            align
        };
        let taken = self.pages.alloc(pages, align, State::Large, LARGE)?;
        let e = self.pages.space.extents.get(taken.id);
        e.set_bits(0);
        self.pages.space.window.set_code(e.start(), 1, LARGE);
        Some(taken)
    }

    /// Takes a large block back.
    ///
    /// # Safety
    /// As for [`Heap::give`].
    pub(crate) unsafe fn free_large(&self, block: *mut u8) {
        let id = self.extent_of(block, State::Large);
        let e = self.pages.space.extents.get(id);
        e.set_state(State::Unused);
        self.pages.space.window.set_code(e.start(), 1, 0);
        self.pages.free(id);
    }

    /// Usable bytes of a large block.
    pub(crate) fn large_bytes(&self, block: *mut u8) -> usize {
        let id = self.extent_of(block, State::Large);
        (self.pages.space.extents.get(id).pages() as usize) << LG_PAGE
    }

    /// Resizes a large block to `size` bytes, which stays large, where it is or by moving its pages.
    /// `None`: neither is possible, the caller copies.
    pub(crate) fn resize_large(
        &self,
        block: *mut u8,
        size: usize,
        align: usize,
    ) -> Option<*mut u8> {
        let id = self.extent_of(block, State::Large);
        let old = self.pages.space.extents.get(id).pages();
        let new = self.pages.pages_for(size)?;
        if new <= old {
            if new < old {
                self.pages.shrink(id, new);
            }
            return Some(block);
        }
        if self.pages.extend(id, new) {
            return Some(block);
        }
        self.move_large(block, id, size, align)
    }

    /// Moves a block's pages to a new extent: nothing is copied. Only into clean pages, since those
    /// that the target has would be lost.
    fn move_large(
        &self,
        block: *mut u8,
        id: ExtentId,
        size: usize,
        align: usize,
    ) -> Option<*mut u8> {
        let old_bytes = (self.pages.space.extents.get(id).pages() as usize) << LG_PAGE;
        if old_bytes < MOVE_BYTES || self.moves.load(Relaxed) >= MOST_MOVES {
            return None;
        }
        let taken = self.alloc_extent(size, align)?;
        let to_page = self.pages.space.extents.get(taken.id).start();
        let to: *mut u8 =
            core::ptr::with_exposed_provenance_mut(self.pages.space.window.address(to_page));
        // SAFETY: both extents are ours alone, and the target's contents are not needed.
        let moved = taken.zero
            && unsafe { self.pages.space.os.move_pages(block.addr(), to.addr(), old_bytes) }
                .is_ok();
        if !moved {
            // SAFETY: both are whole blocks of at least `old_bytes` bytes.
            unsafe { core::ptr::copy_nonoverlapping(block, to, old_bytes) };
            // SAFETY: the caller gave the block up.
            unsafe { self.free_large(block) };
            return Some(to);
        }
        self.moves.fetch_add(1, Relaxed);
        let start = self.pages.space.extents.get(id).start();
        self.pages.space.window.set_code(start, 1, 0);
        self.pages.free_clean(id);
        Some(to)
    }

    /// Zeroes `[p, p + size)` of a block that was in use before. What is not resident is not touched:
    /// it is given to the kernel once more, and reads as zero.
    fn zero(&self, p: *mut u8, size: usize) {
        if size < LOOK_BYTES {
            // SAFETY: the block has `size` bytes.
            unsafe { p.write_bytes(0, size) };
            return;
        }
        let unit = self.pages.space.os.page_size().max(PAGE);
        let mut done = 0;
        while done < size {
            let len = (LOOK_PAGES * unit).min(size - done);
            // SAFETY: the part lies in the block.
            self.zero_part(unsafe { p.add(done) }, len, unit);
            done += len;
        }
    }

    // Not inlined: its frame would be that of every large allocation.
    #[inline(never)]
    fn zero_part(&self, p: *mut u8, len: usize, unit: usize) {
        let mut resident = [0u8; LOOK_PAGES];
        let pages = len.div_ceil(unit);
        let os = &self.pages.space.os;
        if os.resident(p.addr(), pages * unit, &mut resident[..pages]).is_err() {
            resident[..pages].fill(1);
        }
        let mut i = 0;
        while i < pages {
            let here = resident[i] & 1;
            let run = resident[i..pages].iter().take_while(|&&r| r & 1 == here).count();
            let (from, bytes) = (i * unit, run * unit);
            // SAFETY: the pages lie in the block, and its old contents are not needed.
            let gone = here == 0 && unsafe { os.purge(p.addr() + from, bytes) }.is_ok();
            if !gone {
                // SAFETY: the bytes lie in the block.
                unsafe { p.wrapping_add(from).write_bytes(0, bytes.min(len - from)) };
            }
            i += run;
        }
    }
}
