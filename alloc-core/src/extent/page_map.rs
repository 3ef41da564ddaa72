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
use crate::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// log2 of the unit page.
pub(crate) const LG_PAGE: usize = 12;
/// The unit page, bytes.
pub(crate) const PAGE: usize = 1 << LG_PAGE;

/// Room for the process's tables that don't scale with the window (per-CPU caches, batches), bytes.
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

/// Where a window with all its tables is to lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub(crate) origin: usize,
    /// Bytes of pages.
    pub(crate) bytes: usize,
    /// Bytes for the tables that don't scale with the window.
    pub(crate) side_bytes: usize,
}

/// What a free has to know of a window.
#[repr(C)]
pub(crate) struct Reach {
    /// Address of page 0.
    pub(crate) base: AtomicUsize,
    /// Bytes from there on that are grown.
    pub(crate) limit_bytes: AtomicUsize,
    /// The class map.
    pub(crate) codes: AtomicPtr<AtomicU8>,
}

/// The window and its two maps.
pub(crate) struct Window {
    base: AtomicUsize,
    limit_bytes: AtomicUsize,
    class_map: Table<AtomicU8>,
    owner_map: Table<AtomicU32>,
    max_bytes: AtomicUsize,
    side: AtomicUsize,
    side_bytes: AtomicUsize,
    mirror: AtomicPtr<Reach>,
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
            side_bytes: AtomicUsize::new(0),
            mirror: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Keeps `mirror` at what the window is, from now on. For who owns the window alone.
    pub(crate) fn set_mirror(&self, mirror: &'static Reach) {
        mirror.base.store(self.base.load(Ordering::Relaxed), Ordering::Relaxed);
        mirror.codes.store(self.class_map.at(0), Ordering::Relaxed);
        mirror.limit_bytes.store(self.limit_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        self.mirror.store(core::ptr::from_ref(mirror).cast_mut(), Ordering::Relaxed);
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
            let spot = Spot { origin, bytes, side_bytes: SIDE_BYTES };
            result = self.place_at(os, spot, &tables);
            if result.is_ok() {
                return Ok(());
            }
        }
        result
    }

    /// Puts the window at `spot`, if the start of its maps can be mapped there. `tables` as for
    /// [`Window::place`].
    pub(crate) fn place_at(
        &self,
        os: &impl Os,
        spot: Spot,
        tables: impl Fn(usize, usize, usize) -> usize,
    ) -> Result<(), Errno> {
        let class_bytes = spot.bytes >> LG_PAGE;
        let owner_bytes = class_bytes * 4;
        self.class_map.place(spot.origin, class_bytes);
        self.owner_map.place(spot.origin + class_bytes, owner_bytes);
        self.class_map.ensure(os, 1)?;
        self.owner_map.ensure(os, 1)?;
        let side = spot.origin + class_bytes + owner_bytes;
        self.side.store(side, Ordering::Relaxed);
        self.side_bytes.store(spot.side_bytes, Ordering::Relaxed);
        // One record and one bitmap for each 16 KiB, the smallest slab.
        let (records, bitmaps) = (owner_bytes * 4, owner_bytes * 8);
        let end = tables(side + spot.side_bytes, records, bitmaps);
        let base = end.next_multiple_of(1 << 30);
        self.max_bytes.store(spot.bytes - (1 << 30), Ordering::Relaxed);
        self.base.store(base, Ordering::Release);
        Ok(())
    }

    /// Where the tables of the front end go, and how many bytes there are for them.
    pub(crate) fn side(&self) -> (usize, usize) {
        (self.side.load(Ordering::Relaxed), self.side_bytes.load(Ordering::Relaxed))
    }

    /// The addresses in which the window may grow.
    pub(crate) fn reach(&self) -> core::ops::Range<usize> {
        let base = self.base.load(Ordering::Relaxed);
        base..base + self.max_bytes.load(Ordering::Relaxed)
    }

    /// All addresses of the window and of its tables.
    pub(crate) fn span(&self) -> core::ops::Range<usize> {
        self.class_map.start()..self.reach().end
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
        // SAFETY: the class map is mapped for every page below the limit.
        let code = |page| unsafe { &*self.class_map.at(page as usize) }.load(Ordering::Relaxed);
        self.page_of(address).map_or(0, code)
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
        // SAFETY: null, or a static.
        if let Some(mirror) = unsafe { self.mirror.load(Ordering::Relaxed).as_ref() } {
            mirror.limit_bytes.store(bytes, Ordering::Release);
        }
    }
}
