//! The window: one range of address space in which all of the allocator's memory lies, and the
//! maps from a page of it to what the page is. Nothing is reserved: the window grows upwards by
//! mapping the next chunk at a fixed address, so that address-space limits, `VIRT` and tools such as
//! valgrind see what is really used. Pages are counted in units of 4 KiB from the window's base,
//! whatever the kernel's page size.
//!
//! The class map has one byte a page: 0, no block starts here; a class code on every page of a slab
//! and on the first page of a block with an extent of its own; other codes send `free` to its slow
//! path. The owner map has the extent's index on the first and the last page of every extent, and on
//! every page of a slab.
use crate::extent::base::Table;
use crate::os::{Errno, Os};
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// log2 of the unit page.
pub(crate) const LG_PAGE: usize = 12;
/// The unit page, bytes.
pub(crate) const PAGE: usize = 1 << LG_PAGE;

/// Room for the tables that don't scale with the window (per-CPU caches, batches), bytes.
const SIDE_BYTES: usize = 4 << 30;

/// Where a window may lie: (lowest base, span of bases to choose from, bytes of pages).
const PLACES: [(usize, usize, usize); 4] = [
    (32 << 40, 16 << 40, 16 << 40),
    // Below 8 TiB, for tools that give a program no more.
    (1 << 40, 2 << 40, 2 << 40),
    // 39-bit address spaces.
    (64 << 30, 64 << 30, 128 << 30),
    (32 << 30, 8 << 30, 16 << 30),
];

/// The window and its two maps.
pub(crate) struct Window {
    base: AtomicUsize,
    limit_bytes: AtomicUsize,
    class_map: Table<AtomicU8>,
    owner_map: Table<AtomicU32>,
    max_bytes: AtomicUsize,
    side: AtomicUsize,
}

impl Window {
    pub(crate) const fn new() -> Self {
        Self {
            base: AtomicUsize::new(0),
            limit_bytes: AtomicUsize::new(0),
            class_map: Table::new(),
            owner_map: Table::new(),
            max_bytes: AtomicUsize::new(0),
            side: AtomicUsize::new(0),
        }
    }

    /// Chooses the window's place, which `random` moves about, and maps the start of its maps.
    /// `tables` places the page layer's other tables from an address on, which need so many bytes for
    /// records and for bitmaps, and says where they end.
    pub(crate) fn place(
        &self,
        os: &impl Os,
        random: u64,
        tables: impl Fn(usize, usize, usize) -> usize,
    ) -> Result<(), Errno> {
        let mut result = Err(Errno(libc::ENOMEM));
        for attempt in 0..PLACES.len() * 4 {
            let (low, span, bytes) = PLACES[attempt / 4];
            let spots = (span >> 30) as u64;
            let turn = random.wrapping_add((attempt as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
            let origin = low + ((turn % spots) as usize) * (1 << 30);
            let class_bytes = bytes >> LG_PAGE;
            let owner_bytes = class_bytes * 4;
            self.class_map.place(origin, class_bytes);
            self.owner_map.place(origin + class_bytes, owner_bytes);
            let side = origin + class_bytes + owner_bytes;
            result = self.class_map.ensure(os, 1).and_then(|()| self.owner_map.ensure(os, 1));
            if result.is_ok() {
                self.side.store(side, Ordering::Relaxed);
                // One record and one bitmap for each 16 KiB, the smallest slab.
                let (records, bitmaps) = (owner_bytes * 4, owner_bytes * 8);
                let start = side + SIDE_BYTES;
                let end = tables(start, records, bitmaps);
                let base = end.next_multiple_of(1 << 30);
                self.max_bytes.store(bytes - (1 << 30), Ordering::Relaxed);
                self.base.store(base, Ordering::Release);
                return Ok(());
            }
        }
        result
    }

    /// Start of the [`SIDE_BYTES`] for tables of the front end.
    pub(crate) fn side(&self) -> (usize, usize) {
        (self.side.load(Ordering::Relaxed), SIDE_BYTES)
    }

    /// Address of page `page`.
    #[inline(always)]
    pub(crate) fn address(&self, page: u32) -> usize {
        self.base.load(Ordering::Relaxed) + ((page as usize) << LG_PAGE)
    }

    /// The page that holds `address`, if it lies in the window.
    #[inline(always)]
    pub(crate) fn page_of(&self, address: usize) -> Option<u32> {
        let offset = address.wrapping_sub(self.base.load(Ordering::Relaxed));
        if offset >= self.limit_bytes.load(Ordering::Relaxed) {
            return None;
        }
        #[allow(clippy::cast_possible_truncation, reason = "a window has at most 2^32 pages")]
        Some((offset >> LG_PAGE) as u32)
    }

    /// The class map's code for `address`; 0 outside the window.
    #[inline(always)]
    pub(crate) fn code_of(&self, address: usize) -> u8 {
        let offset = address.wrapping_sub(self.base.load(Ordering::Relaxed));
        if offset >= self.limit_bytes.load(Ordering::Relaxed) {
            return 0;
        }
        // SAFETY: the class map is mapped for every page below the limit.
        unsafe { &*self.class_map.at(offset >> LG_PAGE) }.load(Ordering::Relaxed)
    }

    /// Whether `address` lies in the tables, which lie before the pages.
    pub(crate) fn in_tables(&self, address: usize) -> bool {
        (self.class_map.at(0).addr()..self.base.load(Ordering::Relaxed)).contains(&address)
    }

    /// Pages grown so far.
    pub(crate) fn pages(&self) -> u32 {
        #[allow(clippy::cast_possible_truncation, reason = "a window has at most 2^32 pages")]
        let pages = (self.limit_bytes.load(Ordering::Relaxed) >> LG_PAGE) as u32;
        pages
    }

    /// Bytes of both maps, as far as pages were grown.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.pages() as usize * (size_of::<AtomicU8>() + size_of::<AtomicU32>())
    }

    /// Sets the code of `pages` pages from `page` on.
    pub(crate) fn set_code(&self, page: u32, pages: u32, code: u8) {
        for i in page..page + pages {
            // SAFETY: the class map is mapped for every page below the limit.
            unsafe { &*self.class_map.at(i as usize) }.store(code, Ordering::Relaxed);
        }
    }

    /// The owner map's entry for `page`: an extent's index, or 0.
    #[inline(always)]
    pub(crate) fn owner(&self, page: u32) -> u32 {
        // SAFETY: the owner map is mapped for every page below the limit.
        unsafe { &*self.owner_map.at(page as usize) }.load(Ordering::Relaxed)
    }

    /// Enters `extent` for `page`.
    #[inline(always)]
    pub(crate) fn set_owner(&self, page: u32, extent: u32) {
        // SAFETY: the owner map is mapped for every page below the limit.
        unsafe { &*self.owner_map.at(page as usize) }.store(extent, Ordering::Relaxed);
    }

    /// Bytes grown so far, and the most that there may be.
    pub(crate) fn bounds(&self) -> (usize, usize) {
        (self.limit_bytes.load(Ordering::Relaxed), self.max_bytes.load(Ordering::Relaxed))
    }

    /// Sees to it that the maps cover `bytes` of the window.
    pub(crate) fn ensure_maps(&self, os: &impl Os, bytes: usize) -> Result<(), Errno> {
        self.class_map.ensure(os, bytes >> LG_PAGE)?;
        self.owner_map.ensure(os, bytes >> LG_PAGE)
    }

    /// Says that the window's first `bytes`, which the maps cover, are grown.
    pub(crate) fn set_limit(&self, bytes: usize) {
        self.limit_bytes.store(bytes, Ordering::Release);
    }
}
