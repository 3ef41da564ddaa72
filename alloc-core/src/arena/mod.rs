//! Arenas: one for each possible CPU, each with its own lock, bins and slabs. A block is taken from
//! the arena of the CPU that asks, and goes back to the arena that its slab belongs to, without
//! that arena's lock (see `slab`). Whoever reports a slab then tries the arena's lock; who holds it
//! looks at the pending list once more after letting it go, so no report is left lying.
pub(crate) mod bin;
pub(crate) mod figures;
pub(crate) mod large;
mod recorded;
pub(crate) mod slab;
#[cfg(test)]
mod tests;
pub(crate) mod transfer;

use self::figures::Given;
use self::slab::{Bits, Pending, Slots};
use self::transfer::ClassTransfer;
use crate::extent::base::Table;
use crate::extent::heap::PageHeap;
use crate::extent::page_map::{LG_PAGE, PAGE, Spot};
use crate::extent::tree::Tree;
use crate::extent::{Extent, ExtentId, Extents, State};
use crate::fatal::fatal;
use crate::front::size_class::{
    HUGE_BYTES, HUGE_CLASS, SLAB_CLASSES, SizeClass, class_bytes, is_extent,
};
use crate::os::{Errno, Os};
use crate::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use crate::sync::lock::{Guard, Mutex, RawLock};
use crate::sync::passage::Passage;

/// Most blocks that one call takes or gives.
pub(crate) const BATCH: usize = 64;

/// The slabs of one class in one arena: the one that blocks are taken from, and those with free
/// slots, of which the lowest address is next.
struct Bin {
    current: ExtentId,
    partial: Tree,
    /// Blocks taken so far, the calls that took them, and slabs made.
    taken: u64,
    fills: u64,
    slabs: u64,
}

/// An arena's bins, by class.
pub(crate) struct Bins([Bin; SLAB_CLASSES + 1]);

/// One CPU's slabs.
pub(crate) struct Arena {
    bins: Mutex<Bins>,
    pending: Pending,
}

impl Arena {
    pub(crate) const fn new() -> Self {
        const BIN: Bin = Bin { current: 0, partial: Tree::new(), taken: 0, fills: 0, slabs: 0 };
        Self { bins: Mutex::new(Bins([BIN; SLAB_CLASSES + 1])), pending: Pending::new() }
    }
}

/// All memory of one kernel `O`: arenas over a page heap.
pub(crate) struct Heap<O> {
    pub(crate) pages: PageHeap<O>,
    /// Batches on their way between CPUs.
    transfer: AtomicPtr<ClassTransfer>,
    /// What works on slabs and batches without a lock is inside, so that a fork can wait for it.
    pub(crate) passage: Passage,
    arenas: Table<Arena>,
    arena_count: AtomicU32,
    spare_bits: Mutex<SpareBits>,
    /// Large blocks whose pages were moved by the kernel.
    moves: AtomicU32,
    /// Blocks with pages of their own that were given out.
    given: Given,
    /// Memory of the caches above.
    tables: Table<[u8; PAGE]>,
    table_pages: Mutex<usize>,
}

/// Bitmaps that no slab uses, linked through their first word.
struct SpareBits {
    first: u32,
    next_new: u32,
}

impl<O: Os> Heap<O> {
    pub(crate) const fn new(os: O) -> Self {
        Self {
            pages: PageHeap::new(os),
            transfer: AtomicPtr::new(core::ptr::null_mut()),
            passage: Passage::new(),
            arenas: Table::new(),
            arena_count: AtomicU32::new(0),
            spare_bits: Mutex::new(SpareBits { first: 0, next_new: 1 }),
            moves: AtomicU32::new(0),
            given: Given::new(),
            tables: Table::new(),
            table_pages: Mutex::new(0),
        }
    }

    /// Places everything; `arenas` is how many arenas to make. Called once.
    pub(crate) fn init(&self, random: u64, arenas: u32) -> Result<(), Errno> {
        self.pages.init(random)?;
        self.make_arenas(arenas)?;
        let transfer = self.map_table(size_of::<ClassTransfer>());
        if transfer.is_null() {
            return Err(Errno(libc::ENOMEM));
        }
        self.transfer.store(transfer.cast(), Ordering::Release);
        Ok(())
    }

    /// As [`Heap::init`], at a place of the caller's, with one arena and no batches: such a heap is used by
    /// [`Heap::take_direct`] and [`Heap::put_back`]. May be called again where it failed.
    pub(crate) fn init_at(&self, spot: Spot) -> Result<(), Errno> {
        self.pages.init_at(spot)?;
        self.make_arenas(1)
    }

    fn make_arenas(&self, arenas: u32) -> Result<(), Errno> {
        let (side, bytes) = self.pages.space.window.side();
        self.arenas.place(side, bytes / 4);
        self.tables.place(side + bytes / 4, bytes / 4 * 3);
        self.arenas.ensure(&self.pages.space.os, arenas as usize)?;
        for i in 0..arenas as usize {
            // SAFETY: the entry is mapped, and nobody knows of it before the count is stored.
            unsafe { self.arenas.at(i).write(Arena::new()) };
        }
        self.arena_count.store(arenas, Ordering::Release);
        Ok(())
    }

    /// The batches on their way between CPUs.
    pub(crate) fn transfer(&self) -> &ClassTransfer {
        // SAFETY: `init` put it there; zero bytes, as a new table has, are its empty state.
        unsafe { &*self.transfer.load(Ordering::Acquire) }
    }

    /// `bytes` zero bytes for good, aligned to a page; null when memory is out.
    pub(crate) fn map_table(&self, bytes: usize) -> *mut u8 {
        let os = &self.pages.space.os;
        let unit = os.page_size().max(PAGE);
        let mut used = self.table_pages.lock();
        let at = *used;
        let pages = bytes.next_multiple_of(unit) / PAGE;
        if self.tables.ensure(os, at + pages).is_err() {
            return core::ptr::null_mut();
        }
        *used += pages;
        self.tables.at(at).cast()
    }

    /// Number of arenas.
    pub(crate) fn arena_count(&self) -> u32 {
        self.arena_count.load(Ordering::Relaxed)
    }

    fn arena(&self, index: u32) -> &Arena {
        debug_assert!(index < self.arena_count());
        // SAFETY: arenas below the count were written by `init` and stay.
        unsafe { &*self.arenas.at(index as usize) }
    }

    fn extents(&self) -> &Extents {
        &self.pages.space.extents
    }

    /// A view of a slab's shared words.
    fn slots<'a>(&'a self, e: &'a Extent) -> Slots<'a> {
        // SAFETY: the slab's bitmap was handed out to it and is never unmapped.
        let bits = unsafe { &*self.pages.space.bits.at(e.bits() as usize) };
        let slots = u32::from(e.slots());
        Slots { ctl: &e.ctl, bits: &bits[..(slots as usize).div_ceil(64)], slots }
    }

    /// Fetches blocks of `class` for the cache of `cpu`: a batch that another CPU left, else from its
    /// arena. Returns how many of `out` were filled; 0: out of memory.
    pub(crate) fn fetch(&self, cpu: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
        let _inside = self.passage.enter(cpu);
        if is_extent(class) {
            return self.take_extents(class, out);
        }
        match self.transfer().get(class, out) {
            #[allow(clippy::cast_possible_truncation, reason = "reduced to the number of arenas")]
            0 => self.take(cpu as u32, class, out),
            n => n,
        }
    }

    /// As [`Heap::fetch`], but never of another's batch: from the arena `index` alone, for what slabs hold.
    pub(crate) fn take_direct(&self, index: u32, class: SizeClass, out: &mut [*mut u8]) -> usize {
        let _inside = self.passage.enter(index as usize);
        self.take(index, class, out)
    }

    /// Passes blocks of `class`, which their user gave up, on to the next cache that asks, or puts
    /// them back.
    pub(crate) fn pass_on(&self, cpu: usize, class: SizeClass, blocks: &[*mut u8]) {
        let _inside = self.passage.enter(cpu);
        // What has pages of its own is as warm among the free pieces, where any size can use it.
        let in_slab = !is_extent(class);
        if !in_slab || !self.transfer().put(class, blocks) {
            self.given.count_flush(usize::from(class));
            // SAFETY: whoever frees a block answers for it, and the caches hold none twice.
            unsafe { self.give(class, blocks) };
        }
    }

    /// Puts blocks of `class`, which their user gave up, back into their slabs.
    pub(crate) fn put_back(&self, cpu: usize, class: SizeClass, blocks: &[*mut u8]) {
        let _inside = self.passage.enter(cpu);
        self.given.count_flush(usize::from(class));
        // SAFETY: as above.
        unsafe { self.give(class, blocks) };
    }

    /// Puts the batches that nobody asked for since the last call back into their slabs, or all of
    /// them. Returns how many are left.
    pub(crate) fn drain_batches(&self, class: SizeClass, all: bool) -> usize {
        let _inside = self.passage.enter(0);
        let batches = if all { u32::MAX } else { self.transfer().idle_batches(class) };
        // SAFETY: as above.
        self.transfer().drain(class, batches, |blocks| unsafe { self.give(class, blocks) });
        self.transfer().batches(class) as usize
    }

    /// Takes blocks of `class`, for the CPU `cpu`, until `out` (at most [`BATCH`]) is full. Returns
    /// how many; 0 means that memory is out.
    pub(crate) fn take(&self, cpu: u32, class: SizeClass, out: &mut [*mut u8]) -> usize {
        if is_extent(class) {
            return self.take_extents(class, out);
        }
        let index = cpu % self.arena_count();
        let arena = self.arena(index);
        let mut bins = arena.bins.lock();
        self.answer_reports(arena, &mut bins);
        let mut taken = 0;
        while taken < out.len() {
            let Some(slab) = self.usable_slab(index, class, &mut bins) else { break };
            let n = self.take_slots(slab, &mut out[taken..]);
            if n == 0 {
                self.slots(self.extents().get(slab)).detach_broken();
                bins.0[usize::from(class)].current = 0;
            }
            taken += n;
        }
        let bin = &mut bins.0[usize::from(class)];
        bin.taken += taken as u64;
        bin.fills += 1;
        drop(bins);
        self.settle_reports(arena);
        taken
    }

    fn take_slots(&self, slab: ExtentId, out: &mut [*mut u8]) -> usize {
        let e = self.extents().get(slab);
        let start = self.pages.space.window.address(e.start());
        let size = class_bytes(e.code());
        let mut n = 0;
        #[allow(clippy::cast_possible_truncation, reason = "at most BATCH")]
        let most = out.len() as u32;
        let (_, word) = self.slots(e).take(usize::from(e.hint()), most, |slot| {
            out[n] = core::ptr::with_exposed_provenance_mut(start + slot as usize * size);
            n += 1;
        });
        #[allow(clippy::cast_possible_truncation, reason = "at most WORDS")]
        e.set_hint(word as u16);
        n
    }

    /// The slab to take blocks of `class` from: the current one while it has free slots, else the
    /// partly used one with the lowest address, else a new one.
    fn usable_slab(&self, arena: u32, class: SizeClass, bins: &mut Bins) -> Option<ExtentId> {
        let extents = self.extents();
        let bin = &mut bins.0[usize::from(class)];
        loop {
            if bin.current != 0 {
                let slots = self.slots(extents.get(bin.current));
                if slots.free_count() > 0 || !slots.detach() {
                    return Some(bin.current);
                }
                bin.current = 0;
            }
            let lowest = bin.partial.lowest(extents);
            if lowest == 0 {
                bin.current = self.new_slab(arena, class)?;
                bin.slabs += 1;
                return Some(bin.current);
            }
            bin.partial.remove(extents, lowest);
            bin.current = lowest;
        }
    }

    fn new_slab(&self, arena: u32, class: SizeClass) -> Option<ExtentId> {
        let shape = bin::shape(class, self.pages.space.os.page_size());
        let bits = self.take_bits()?;
        let pages = self.pages.pages_for(shape.bytes)?;
        let Some(taken) = self.pages.alloc(pages, PAGE, State::Slab, class) else {
            self.drop_bits(bits);
            return None;
        };
        let e = self.extents().get(taken.id);
        #[allow(
            clippy::cast_possible_truncation,
            reason = "slots are at most MOST_SLOTS, arenas 65536"
        )]
        {
            e.set_arena(arena as u16);
            e.set_slots(shape.slots as u16);
        }
        e.set_magic(shape.magic);
        e.set_bits(bits);
        e.set_hint(0);
        self.slots(e).init();
        let window = &self.pages.space.window;
        for page in e.start()..e.end() {
            window.set_owner(page, taken.id);
        }
        window.set_code(e.start(), pages, class);
        Some(taken.id)
    }

    fn release_slab(&self, slab: ExtentId) {
        let e = self.extents().get(slab);
        self.pages.space.window.set_code(e.start(), e.pages(), 0);
        self.drop_bits(e.bits());
        self.pages.free(slab);
    }

    fn take_bits(&self) -> Option<u32> {
        let mut spare = self.spare_bits.lock();
        if spare.first != 0 {
            let bits = spare.first;
            #[allow(clippy::cast_possible_truncation, reason = "a link is an index")]
            let next = self.bits_link(bits).load(Ordering::Relaxed) as u32;
            spare.first = next;
            return Some(bits);
        }
        self.pages.space.bits.ensure(&self.pages.space.os, spare.next_new as usize + 1).ok()?;
        spare.next_new += 1;
        Some(spare.next_new - 1)
    }

    fn drop_bits(&self, bits: u32) {
        let mut spare = self.spare_bits.lock();
        self.bits_link(bits).store(u64::from(spare.first), Ordering::Relaxed);
        spare.first = bits;
    }

    fn bits_link(&self, bits: u32) -> &crate::sync::atomic::AtomicU64 {
        // SAFETY: the entry was ensured when the bitmap was first handed out.
        unsafe { &(*self.pages.space.bits.at(bits as usize))[0] }
    }

    /// Takes extents of a class above `SLAB_MAX`.
    fn take_extents(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
        let Some(pages) = self.pages.pages_for(class_bytes(class)) else { return 0 };
        let mut ids = [0; BATCH];
        let most = out.len().min(BATCH);
        let align = if class == HUGE_CLASS { HUGE_BYTES } else { PAGE };
        let taken = self.pages.alloc_some(pages, align, class, &mut ids[..most]);
        self.given.count(usize::from(class), taken);
        for (slot, &id) in out.iter_mut().zip(&ids[..taken]) {
            let start = self.extents().get(id).start();
            self.pages.space.window.set_code(start, 1, class);
            *slot = core::ptr::with_exposed_provenance_mut(self.pages.space.window.address(start));
        }
        taken
    }

    /// Gives blocks of `class` back (at most [`BATCH`]), whatever arenas they are from.
    ///
    /// # Safety
    /// The blocks were taken and nobody uses them. What breaks that in a way that can be seen (a
    /// pointer into the middle of a block, a block that is free already) ends the process.
    pub(crate) unsafe fn give(&self, class: SizeClass, blocks: &[*mut u8]) {
        if is_extent(class) {
            self.give_extents(class, blocks);
            return;
        }
        let mut i = 0;
        while i < blocks.len() {
            let id = self.slab_of(class, blocks[i]);
            let e = self.extents().get(id);
            let slots = self.slots(e);
            let (start, end) = (
                self.pages.space.window.address(e.start()),
                self.pages.space.window.address(e.end()),
            );
            let mut freed = 0;
            while i < blocks.len() && (start..end).contains(&blocks[i].addr()) {
                self.free_slot(e, &slots, start, blocks[i]);
                freed += 1;
                i += 1;
            }
            if slots.count_freed(freed) {
                let arena = self.arena(u32::from(e.arena()));
                arena.pending.put(id, &e.pending_next);
                self.settle_reports(arena);
            }
        }
    }

    fn slab_of(&self, class: SizeClass, block: *mut u8) -> ExtentId {
        let window = &self.pages.space.window;
        if let Some(page) = window.page_of(block.addr()) {
            let id = window.owner(page);
            let e = self.extents().get(id);
            if id != 0
                && e.state() == State::Slab
                && e.code() == class
                && (e.start()..e.end()).contains(&page)
            {
                return id;
            }
        }
        fatal("free of a pointer that is not a block", block.addr())
    }

    fn free_slot(&self, e: &Extent, slots: &Slots<'_>, start: usize, block: *mut u8) {
        let offset = block.addr() - start;
        let slot = bin::slot_of(offset, e.magic());
        if slot * class_bytes(e.code()) != offset || slot >= slots.slots as usize {
            fatal("free of a pointer into the middle of a block", block.addr());
        }
        if slots.free(slot / 64, 1 << (slot % 64)).is_err() {
            fatal("double free", block.addr());
        }
    }

    fn give_extents(&self, class: SizeClass, blocks: &[*mut u8]) {
        let mut ids = [0; BATCH];
        for (n, &block) in blocks.iter().enumerate() {
            ids[n] = self.extent_of(block, State::Block);
            let e = self.extents().get(ids[n]);
            if e.code() != class {
                fatal("free of a pointer that is not a block", block.addr());
            }
            // The state tells a second free of the same block in this batch.
            e.set_state(State::Unused);
            self.pages.space.window.set_code(e.start(), 1, 0);
        }
        self.pages.free_all(&mut ids[..blocks.len()]);
    }

    /// The extent that starts at `block` and is in state `state`; anything else ends the process.
    pub(crate) fn extent_of(&self, block: *mut u8, state: State) -> ExtentId {
        let window = &self.pages.space.window;
        if let Some(page) = window.page_of(block.addr()) {
            let id = window.owner(page);
            let e = self.extents().get(id);
            if id != 0 && e.start() == page && e.state() == state {
                if block.addr() & (PAGE - 1) != 0 {
                    fatal("free of a pointer into the middle of a block", block.addr());
                }
                return id;
            }
        }
        fatal("double free, or free of a pointer that is not a block", block.addr())
    }

    /// Looks at the slabs that were reported: puts those with free slots in their bins, and releases
    /// those that are unused.
    fn answer_reports(&self, arena: &Arena, bins: &mut Guard<'_, Bins>) {
        let extents = self.extents();
        let mut id = arena.pending.take();
        while id != 0 {
            let e = extents.get(id);
            let next = e.pending_next.load(Ordering::Relaxed);
            let slots = self.slots(e);
            let detached = slots.answer();
            let bin = &mut bins.0[usize::from(e.code())];
            if bin.current != id {
                if slots.is_unused() {
                    if !detached {
                        bin.partial.remove(extents, id);
                    }
                    self.release_slab(id);
                } else if detached {
                    bin.partial.insert(extents, id);
                }
            }
            id = next;
        }
    }

    /// Answers the arena's reports if nobody holds its lock; whoever does will look after it.
    fn settle_reports(&self, arena: &Arena) {
        arena.pending.settle(|| {
            let Some(mut bins) = arena.bins.try_lock() else { return false };
            self.answer_reports(arena, &mut bins);
            true
        });
    }

    /// Releases the current slabs that are unused, of all arenas: for when nothing is going on.
    pub(crate) fn release_unused(&self) {
        for index in 0..self.arena_count() {
            let arena = self.arena(index);
            let Some(mut bins) = arena.bins.try_lock() else { continue };
            self.answer_reports(arena, &mut bins);
            for bin in &mut bins.0 {
                if bin.current != 0 && self.slots(self.extents().get(bin.current)).is_unused() {
                    self.release_slab(bin.current);
                    bin.current = 0;
                }
            }
            drop(bins);
            self.settle_reports(arena);
        }
    }

    /// Bytes that are out (live, or in a cache above), and the slabs, blocks and large blocks that
    /// hold them.
    pub(crate) fn usage(&self) -> Usage {
        let mut u = Usage { metadata_bytes: self.table_bytes(), ..Usage::default() };
        self.pages.for_each_in_use(|e| match e.state() {
            State::Slab => {
                let used =
                    u32::from(e.slots()) - self.slots(e).free_count().min(u32::from(e.slots()));
                u.slabs += 1;
                u.slab_bytes += (e.pages() as usize) << LG_PAGE;
                u.out_bytes += used as usize * class_bytes(e.code());
            }
            State::Block | State::Recorded => u.out_bytes += class_bytes(e.code()),
            _ => {
                u.large += 1;
                u.large_bytes += (e.pages() as usize) << LG_PAGE;
                u.out_bytes += (e.pages() as usize) << LG_PAGE;
            }
        });
        u
    }

    /// Every lock, in the order in which they are taken.
    pub(crate) fn locks(&self) -> impl Iterator<Item = &RawLock> {
        let arenas = (0..self.arena_count()).map(|index| self.arena(index).bins.raw());
        let [purging, pages] = self.pages.locks();
        core::iter::once(purging).chain(arenas).chain([
            self.table_pages.raw(),
            self.spare_bits.raw(),
            pages,
        ])
    }
}

/// What the arenas hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Bytes of blocks that are live or in a cache.
    pub(crate) out_bytes: usize,
    pub(crate) slabs: usize,
    pub(crate) slab_bytes: usize,
    pub(crate) large: usize,
    pub(crate) large_bytes: usize,
    pub(crate) metadata_bytes: usize,
}

impl Usage {
    /// Adds what another heap's arenas hold.
    pub(crate) fn add(&mut self, other: &Usage) {
        self.out_bytes += other.out_bytes;
        self.slabs += other.slabs;
        self.slab_bytes += other.slab_bytes;
        self.large += other.large;
        self.large_bytes += other.large_bytes;
        self.metadata_bytes += other.metadata_bytes;
    }
}
