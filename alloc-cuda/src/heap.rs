//! The memory of one stream: regions of addresses tiled by blocks, and the free ones by size. It
//! decides and keeps the books; it calls no driver.
//!
//! Invariants: the blocks of a region tile it; two free blocks never lie side by side; a byte is in
//! one of `active`, `pending`, `free` and `busy`, or has no memory; a chunk's epoch is that of its
//! last use in the order of the heap's stream.

use crate::bins::Bins;
use crate::block::{Block, BlockId, State};
use crate::driver::Stream;
use crate::fault::{self, planted};
use crate::ledger::{Entered, Ledger};
use std::collections::HashMap;

/// The unit of physical memory.
pub(crate) const CHUNK: u64 = 2 << 20;
/// The largest block that shares chunks with many others.
pub(crate) const SMALL_MAX: u64 = 1 << 20;
/// Sizes of small and of large blocks are multiples of these.
const LG_SMALL_UNIT: u32 = 9;
const LG_LARGE_UNIT: u32 = 15;
/// A segment for a request of at least this size is only used for blocks that take much of it.
pub(crate) const OVERSIZE: u64 = 64 << 20;
/// Stitched blocks that are kept for their next use.
const VIEWS_MAX: usize = 512;
/// Allocations between two looks at the events of pending blocks, where at least so many frees
/// were deferred, and where fewer were.
const LOOK_ALLOCS: u64 = 16;
const LOOK_DEFERRED: u64 = 5;
const LOOK_ALLOCS_MOST: u64 = 96;
/// The lists beside those of small and large memory: free parts of oversize segments.
const OVERSIZE_BIN: usize = 2;
/// An oversize segment serves requests of at least this part of it.
const OVERSIZE_PART: u64 = 8;

/// Which of a heap's two kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Small,
    Large,
}

impl Kind {
    pub(crate) fn of(bytes: u64) -> Self {
        if bytes <= SMALL_MAX { Self::Small } else { Self::Large }
    }

    pub(crate) fn lg_unit(self) -> u32 {
        match self {
            Self::Small => LG_SMALL_UNIT,
            Self::Large => LG_LARGE_UNIT,
        }
    }
}

/// The size of a block for a request: at most 3 % more above 1 MiB.
#[inline]
pub(crate) fn rounded(bytes: u64) -> u64 {
    let unit = 1 << Kind::of(bytes).lg_unit();
    bytes.max(1).next_multiple_of(unit)
}

/// What is known of a chunk of physical memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chunk {
    /// Its handle; 0 where nothing is mapped.
    pub(crate) handle: u64,
    stamp: u64,
    used_ms: u64,
    views: u32,
}

/// Where a region's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Addresses, to which chunks are mapped.
    Virtual,
    /// One allocation, which begins at `base`; only whole segments go back.
    Segment { base: u64, bytes: u64, oversize: bool },
    /// Addresses that show the chunks of others in another order.
    View,
}

/// A range of addresses.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    pub(crate) source: Source,
    pub(crate) first: BlockId,
    /// Which lists its free blocks are in.
    bin: usize,
    /// Number of the stitched block, of a view.
    view: u32,
    /// The block that starts at each unit.
    table: Vec<BlockId>,
    /// The units at which blocks start, a word for each chunk; of large regions.
    starts: Vec<u64>,
    chunks: Vec<Chunk>,
}

impl Region {
    #[inline]
    fn unit(&self, addr: u64) -> usize {
        ((addr - self.base) >> self.kind.lg_unit()) as usize
    }

    #[inline]
    fn chunk(&self, addr: u64) -> usize {
        ((addr - self.base) / CHUNK) as usize
    }
}

/// Memory at consecutive addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

impl Run {
    pub(crate) fn end(self) -> u64 {
        self.addr + self.bytes
    }
}

/// A stitched block, which stays mapped while it is not in use.
#[derive(Debug)]
struct View {
    region: u32,
    bytes: u64,
    runs: Vec<(u32, Run)>,
    lent: Vec<BlockId>,
    /// When it was last in use, by the heap's stream.
    stamp: u64,
    /// When that was: the time, and the number of allocations.
    used_ms: u64,
    used_at: u64,
}

/// An epoch of a stream that has to be complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) stream: u32,
    pub(crate) epoch: u64,
}

/// A block that waits for others.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) block: BlockId,
    pub(crate) needs: Vec<Need>,
}

/// The memory that a heap has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Books {
    pub(crate) active: u64,
    pub(crate) requested: u64,
    pub(crate) pending: u64,
    pub(crate) free: u64,
    pub(crate) busy: u64,
    /// Before the first chunk of segments that are not aligned.
    pub(crate) waste: u64,
}

impl Books {
    pub(crate) fn mapped(&self) -> u64 {
        self.active + self.pending + self.free + self.busy + self.waste
    }
}

/// Where a region has to grow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// The addresses to map.
    pub(crate) run: Run,
    pub(crate) block: BlockId,
    pub(crate) region: u32,
}

/// Chunks to stitch to one block.
#[derive(Debug)]
pub(crate) struct Stitch {
    pub(crate) bytes: u64,
    /// Where the block starts within the first chunk.
    pub(crate) offset: u64,
    pub(crate) handles: Vec<u64>,
    runs: Vec<(u32, Run)>,
    lent: Vec<BlockId>,
}

/// The memory of one stream.
pub(crate) struct Heap {
    pub(crate) blocks: Vec<Block>,
    unused: BlockId,
    bins: [Bins; 3],
    pub(crate) regions: Vec<Option<Region>>,
    gaps: Vec<BlockId>,
    pub(crate) pending: Vec<Pending>,
    views: Vec<Option<View>>,
    views_by_bytes: HashMap<u64, Vec<u32>>,
    live_views: usize,
    /// Chunks that stitched blocks show.
    view_chunks: usize,
    /// Uses on further streams; an epoch of 0 is not known yet.
    pub(crate) uses: HashMap<BlockId, Vec<Need>>,
    pub(crate) books: Books,
    pub(crate) peaks: Books,
    /// The most in use since the last look.
    pub(crate) recent_peak: u64,
    pub(crate) now_ms: u64,
    /// The size of the block that a segment was last taken for.
    pub(crate) grown_for: u64,
    /// Pending since an event was last recorded for them.
    pub(crate) unclosed_blocks: u32,
    pub(crate) unclosed_bytes: u64,
    /// The number of allocations when pending blocks were last looked at.
    settled_at: u64,
    /// The number of deferred frees then.
    settled_deferred: u64,
    pub(crate) counts: Counts,
    /// The blocks that a ledger has, by number.
    pub(crate) entered: Entered,
}

/// What happened in a heap.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) allocs: u64,
    pub(crate) frees: u64,
    pub(crate) hits: u64,
    pub(crate) stitched: u64,
    pub(crate) stitch_hits: u64,
    pub(crate) cross_stream: u64,
    pub(crate) deferred: u64,
}

impl Heap {
    pub(crate) fn new(ledger: Option<&'static dyn Ledger>) -> Self {
        Self {
            blocks: vec![Block::default()],
            unused: 0,
            bins: [
                Bins::new(LG_SMALL_UNIT, false),
                Bins::new(LG_LARGE_UNIT, true),
                Bins::new(LG_LARGE_UNIT, true),
            ],
            regions: Vec::new(),
            gaps: Vec::new(),
            pending: Vec::new(),
            views: Vec::new(),
            views_by_bytes: HashMap::new(),
            live_views: 0,
            view_chunks: 0,
            uses: HashMap::new(),
            books: Books::default(),
            peaks: Books::default(),
            recent_peak: 0,
            now_ms: 0,
            grown_for: 0,
            unclosed_blocks: 0,
            unclosed_bytes: 0,
            settled_at: 0,
            settled_deferred: 0,
            counts: Counts::default(),
            entered: Entered::new(ledger),
        }
    }

    #[inline]
    fn region(&self, id: BlockId) -> &Region {
        match &self.regions[self.blocks[id as usize].region as usize] {
            Some(region) => region,
            None => unreachable!("a block's region lives as long as the block"),
        }
    }

    #[inline]
    fn region_mut(&mut self, index: u32) -> &mut Region {
        match &mut self.regions[index as usize] {
            Some(region) => region,
            None => unreachable!("a block's region lives as long as the block"),
        }
    }

    pub(crate) fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id as usize]
    }

    // ---- blocks -----------------------------------------------------------------------------

    #[inline]
    fn new_block(&mut self, block: Block) -> BlockId {
        let id = self.unused;
        if id != 0 {
            self.unused = self.blocks[id as usize].next;
            self.blocks[id as usize] = block;
            return id;
        }
        self.blocks.push(block);
        (self.blocks.len() - 1) as BlockId
    }

    #[inline]
    fn drop_block(&mut self, id: BlockId) {
        self.blocks[id as usize] = Block { next: self.unused, ..Block::default() };
        self.unused = id;
    }

    #[inline]
    fn set_start(&mut self, id: BlockId, starts: bool) {
        let Block { addr, region, .. } = self.blocks[id as usize];
        let region = self.region_mut(region);
        let unit = region.unit(addr);
        region.table[unit] = if starts { id } else { 0 };
        if let Some(word) = region.starts.get_mut(unit / 64) {
            let bit = 1 << (unit % 64);
            if starts { *word |= bit } else { *word &= !bit }
        }
    }

    /// Cuts a block after `bytes`; the rest is a block of the same state, in no list.
    #[inline]
    fn split(&mut self, id: BlockId, bytes: u64) -> BlockId {
        let head = self.blocks[id as usize];
        debug_assert!(bytes > 0 && bytes < head.bytes);
        let overlap = if planted(fault::OVERLAP) && bytes > CHUNK { CHUNK / 2 } else { 0 };
        let rest = self.new_block(Block {
            addr: head.addr + bytes - overlap,
            bytes: head.bytes - bytes + overlap,
            requested: 0,
            prev: id,
            bin_prev: 0,
            bin_next: 0,
            ..head
        });
        self.blocks[id as usize].bytes = bytes;
        self.blocks[id as usize].next = rest;
        if head.next != 0 {
            self.blocks[head.next as usize].prev = rest;
        }
        self.set_start(rest, true);
        rest
    }

    /// Joins a block with its neighbour above, which vanishes.
    #[inline]
    fn join(&mut self, id: BlockId, next: BlockId) {
        self.set_start(next, false);
        let above = self.blocks[next as usize];
        let block = &mut self.blocks[id as usize];
        block.bytes += above.bytes;
        block.stamp = block.stamp.max(above.stamp);
        block.next = above.next;
        if above.next != 0 {
            self.blocks[above.next as usize].prev = id;
        }
        self.drop_block(next);
    }

    fn bins_of(&self, id: BlockId) -> usize {
        self.region(id).bin
    }

    /// Puts a block that is in no list among the free ones and joins it with its neighbours.
    #[inline]
    fn insert_free(&mut self, mut id: BlockId, bin: usize) -> BlockId {
        self.blocks[id as usize].state = State::Free;
        self.books.free += self.blocks[id as usize].bytes;
        let Block { prev, next, .. } = self.blocks[id as usize];
        if next != 0 && self.blocks[next as usize].state == State::Free {
            self.bins[bin].remove(&mut self.blocks, next);
            self.join(id, next);
        }
        if prev != 0 && self.blocks[prev as usize].state == State::Free {
            self.bins[bin].remove(&mut self.blocks, prev);
            self.join(prev, id);
            id = prev;
        }
        self.bins[bin].insert(&mut self.blocks, id);
        id
    }

    fn remove_free(&mut self, id: BlockId) {
        let kind = self.bins_of(id);
        self.bins[kind].remove(&mut self.blocks, id);
        self.books.free -= self.blocks[id as usize].bytes;
    }

    /// Notes the last use of the chunks of a block.
    #[inline]
    fn touch(&mut self, id: BlockId, stamp: u64) {
        let now_ms = self.now_ms;
        let Block { addr, bytes, region, .. } = self.blocks[id as usize];
        let region = self.region_mut(region);
        let (first, last) = (region.chunk(addr), region.chunk(addr + bytes - 1));
        for chunk in &mut region.chunks[first..=last] {
            chunk.stamp = chunk.stamp.max(stamp);
            chunk.used_ms = now_ms;
        }
    }

    #[inline]
    fn note_peaks(&mut self) {
        let (books, peaks) = (&self.books, &mut self.peaks);
        peaks.active = peaks.active.max(books.active);
        self.recent_peak = self.recent_peak.max(books.active + books.pending);
    }

    // ---- taking and giving --------------------------------------------------------------------

    /// A block of `bytes`, a rounded size, from the free memory.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64, requested: u64, user: u32) -> Option<BlockId> {
        let (id, bin) = self.find(bytes)?;
        self.take_block(id, bin, bytes);
        self.activate(id, requested, user);
        Some(id)
    }

    /// The best free block for a request, and its lists. An oversize segment is not split to
    /// pieces: it stays for what takes a good part of it.
    #[inline]
    fn find(&self, bytes: u64) -> Option<(BlockId, usize)> {
        let bin = Kind::of(bytes) as usize;
        let id = self.bins[bin].find(&self.blocks, bytes);
        if bytes >= OVERSIZE / OVERSIZE_PART {
            return self.find_oversize(bytes, id);
        }
        (id != 0).then_some((id, bin))
    }

    fn find_oversize(&self, bytes: u64, other: BlockId) -> Option<(BlockId, usize)> {
        let id = self.bins[OVERSIZE_BIN].find(&self.blocks, bytes);
        let size = |id: BlockId| self.blocks[id as usize].bytes;
        let fits = id != 0 && bytes >= self.region(id).bytes / OVERSIZE_PART;
        if fits && (other == 0 || size(id) < size(other)) {
            return Some((id, OVERSIZE_BIN));
        }
        (other != 0).then_some((other, Kind::Large as usize))
    }

    /// A free block that would serve a request of another stream: its number and epoch.
    pub(crate) fn best_free(&self, bytes: u64) -> Option<(BlockId, u64)> {
        let (id, _) = self.find(bytes)?;
        Some((id, self.blocks[id as usize].stamp))
    }

    #[inline]
    fn take_block(&mut self, id: BlockId, bin: usize, bytes: u64) {
        self.bins[bin].remove(&mut self.blocks, id);
        self.books.free -= bytes;
        if self.blocks[id as usize].bytes > bytes {
            let rest = self.split(id, bytes);
            self.bins[bin].insert(&mut self.blocks, rest);
        }
    }

    #[inline]
    fn activate(&mut self, id: BlockId, requested: u64, user: u32) {
        let block = &mut self.blocks[id as usize];
        block.state = State::Active;
        block.requested = requested;
        block.user = user;
        block.shared = false;
        self.books.active += block.bytes;
        self.books.requested += requested;
        self.note_peaks();
    }

    /// Makes a block free that was active in the order of the heap's own stream.
    #[inline]
    pub(crate) fn free(&mut self, id: BlockId, stamp: u64) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.state == State::Active || planted(fault::DOUBLE_FREE));
        block.stamp = stamp;
        if planted(fault::LOST_BYTES) && block.bytes == 4096 {
            self.books.free -= 512;
        }
        let (bytes, requested) = (block.bytes, block.requested);
        self.books.active = self.books.active.wrapping_sub(bytes);
        self.books.requested = self.books.requested.wrapping_sub(requested);
        self.settle(id, stamp);
    }

    /// Makes a block pending.
    pub(crate) fn defer(&mut self, id: BlockId, needs: Vec<Need>) {
        let block = &mut self.blocks[id as usize];
        block.state = State::Pending;
        self.books.active -= block.bytes;
        self.books.requested -= block.requested;
        self.books.pending += block.bytes;
        self.peaks.pending = self.peaks.pending.max(self.books.pending);
        self.pending.push(Pending { block: id, needs });
    }

    /// Frees the pending blocks whose needs are met; `is_done` says which are. Returns their bytes.
    pub(crate) fn settle_pending(
        &mut self,
        home: u32,
        mut is_done: impl FnMut(&Need) -> bool,
    ) -> u64 {
        let (mut settled, mut i) = (0, 0);
        while i < self.pending.len() {
            let entry = &mut self.pending[i];
            entry.needs.retain(|need| !is_done(need));
            if entry.needs.iter().any(|need| need.stream != home) {
                i += 1;
                continue;
            }
            let entry = self.pending.swap_remove(i);
            self.entered.leave(u64::from(entry.block), Stream::NULL, false);
            let stamp = entry.needs.iter().map(|need| need.epoch).max().unwrap_or(0);
            settled += self.blocks[entry.block as usize].bytes;
            self.books.pending -= self.blocks[entry.block as usize].bytes;
            self.blocks[entry.block as usize].stamp = stamp;
            self.settle(entry.block, stamp);
        }
        settled
    }

    /// Whether it is time to ask which pending blocks are complete: events cost time, so they are
    /// asked for some blocks together, and seldom where few are freed.
    pub(crate) fn look_is_due(&mut self) -> bool {
        let allocs = self.counts.allocs - self.settled_at;
        let deferred = self.counts.deferred - self.settled_deferred;
        let due =
            allocs >= LOOK_ALLOCS && (deferred >= LOOK_DEFERRED || allocs >= LOOK_ALLOCS_MOST);
        if due {
            self.settled_at = self.counts.allocs;
            self.settled_deferred = self.counts.deferred;
        }
        due
    }

    /// Takes a pending block out of the waiting line for a user that is ordered after all its needs.
    pub(crate) fn retake(
        &mut self,
        at: usize,
        bytes: u64,
        requested: u64,
        user: u32,
    ) -> Option<BlockId> {
        let Pending { block: id, needs } = self.pending.swap_remove(at);
        self.entered.leave(u64::from(id), Stream::NULL, false);
        self.books.pending -= self.blocks[id as usize].bytes;
        let whole = self.blocks[id as usize].bytes;
        if whole > bytes && self.region(id).source != Source::View {
            let rest = self.split(id, bytes);
            self.books.pending += self.blocks[rest as usize].bytes;
            self.pending.push(Pending { block: rest, needs });
        }
        self.activate(id, requested, user);
        Some(id)
    }

    /// Puts memory that nobody uses among the free blocks; of a stitched block, that of its parts.
    #[inline]
    fn settle(&mut self, id: BlockId, stamp: u64) {
        let region = self.region(id);
        if region.source == Source::View {
            return self.settle_view(id, stamp);
        }
        let bin = region.bin;
        self.touch(id, stamp);
        self.insert_free(id, bin);
    }

    fn settle_view(&mut self, id: BlockId, stamp: u64) {
        let slot = self.region(id).view as usize;
        self.blocks[id as usize].state = State::Busy;
        let now_ms = self.now_ms;
        let Some(view) = &mut self.views[slot] else { return };
        view.stamp = view.stamp.max(stamp);
        view.used_ms = now_ms;
        view.used_at = self.counts.allocs;
        for part in std::mem::take(&mut view.lent) {
            self.blocks[part as usize].stamp = stamp;
            self.touch(part, stamp);
            self.insert_free(part, Kind::Large as usize);
        }
    }

    /// Takes the free block of a region that was just added.
    pub(crate) fn take_exactly(
        &mut self,
        id: BlockId,
        bytes: u64,
        requested: u64,
        user: u32,
    ) -> BlockId {
        let bin = self.bins_of(id);
        self.take_block(id, bin, bytes);
        self.activate(id, requested, user);
        id
    }

    /// Frees a free block, as a fault.
    pub(crate) fn free_again(&mut self, id: BlockId) {
        self.books.active = self.books.active.wrapping_add(self.blocks[id as usize].bytes);
        let stamp = self.blocks[id as usize].stamp;
        self.free(id, stamp);
    }

    /// Undoes a `take` that nobody saw.
    pub(crate) fn untake(&mut self, id: BlockId) {
        let stamp = self.blocks[id as usize].stamp;
        self.free(id, stamp);
    }

    // ---- looking up ---------------------------------------------------------------------------

    /// The block that starts at an address.
    #[inline]
    pub(crate) fn at(&self, region: u32, addr: u64) -> BlockId {
        let Some(Some(region)) = self.regions.get(region as usize) else { return 0 };
        let id = if region.source == Source::View {
            region.first
        } else if addr < region.base || addr >= region.base + region.bytes {
            0
        } else {
            region.table[region.unit(addr)]
        };
        if self.blocks[id as usize].addr == addr { id } else { 0 }
    }

    /// The block of a large region that contains an address.
    fn containing(&self, region: u32, addr: u64) -> BlockId {
        let Some(Some(region)) = self.regions.get(region as usize) else { return 0 };
        let unit = region.unit(addr);
        let mut word = unit / 64;
        let mut bits = region.starts[word] & (!0 >> (63 - unit % 64));
        while bits == 0 {
            if word == 0 {
                return 0;
            }
            word -= 1;
            bits = region.starts[word];
        }
        region.table[word * 64 + 63 - bits.leading_zeros() as usize]
    }

    // ---- memory comes ---------------------------------------------------------------------------

    /// Adds a region; its one block is a gap, or free where it is a segment.
    pub(crate) fn add_region(
        &mut self,
        base: u64,
        bytes: u64,
        kind: Kind,
        source: Source,
        stamp: u64,
    ) -> (u32, BlockId) {
        let slot = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        let units = (bytes >> kind.lg_unit()) as usize;
        let chunks = bytes.div_ceil(CHUNK) as usize;
        let view = source == Source::View;
        let region = Region {
            base,
            bytes,
            kind,
            source,
            first: 0,
            bin: match source {
                Source::Segment { oversize: true, .. } => OVERSIZE_BIN,
                _ => kind as usize,
            },
            view: 0,
            table: if view { Vec::new() } else { vec![0; units] },
            starts: if view || kind == Kind::Small { Vec::new() } else { vec![0; chunks] },
            chunks: if view { Vec::new() } else { vec![Chunk::default(); chunks] },
        };
        if slot == self.regions.len() {
            self.regions.push(Some(region));
        } else {
            self.regions[slot] = Some(region);
        }
        let index = slot as u32;
        let block = Block {
            addr: base,
            bytes,
            region: index,
            stamp,
            state: State::Busy,
            ..Block::default()
        };
        let id = self.new_block(block);
        self.region_mut(index).first = id;
        if view {
            return (index, id);
        }
        self.set_start(id, true);
        match source {
            Source::Virtual => {
                self.blocks[id as usize].state = State::Gap;
                self.gaps.push(id);
            }
            _ => {
                self.touch(id, stamp);
                let bin = self.region_mut(index).bin;
                self.insert_free(id, bin);
            }
        }
        (index, id)
    }

    /// The fewest chunks to map so that one block of `bytes` comes about, at the lowest place.
    fn growth(&self, kind: Kind, bytes: u64) -> Option<(BlockId, Run)> {
        let free = |id: BlockId| {
            let block = &self.blocks[id as usize];
            if id != 0 && block.state == State::Free { block.bytes } else { 0 }
        };
        let mut best: Option<(BlockId, Run)> = None;
        for &gap in &self.gaps {
            if self.region(gap).kind != kind {
                continue;
            }
            let block = &self.blocks[gap as usize];
            let (below, above) = (free(block.prev), free(block.next));
            let need = bytes.saturating_sub(below).next_multiple_of(CHUNK).max(CHUNK);
            let need_top = bytes.saturating_sub(above).next_multiple_of(CHUNK).max(CHUNK);
            let run = if need <= block.bytes && (above == 0 || need <= need_top) {
                Run { addr: block.addr, bytes: need }
            } else if need_top <= block.bytes {
                Run { addr: block.addr + block.bytes - need_top, bytes: need_top }
            } else if below + block.bytes + above >= bytes {
                Run { addr: block.addr, bytes: block.bytes }
            } else {
                continue;
            };
            if best.is_none_or(|(_, b)| (run.bytes, run.addr) < (b.bytes, b.addr)) {
                best = Some((gap, run));
            }
        }
        best
    }

    /// Claims addresses for `bytes` of chunks, wherever they lie.
    pub(crate) fn claim_chunks(&mut self, bytes: u64) -> Option<Growth> {
        let large = |id: BlockId| self.region(id).kind == Kind::Large;
        let enough = |id: BlockId| self.blocks[id as usize].bytes >= bytes;
        let gap = self.gaps.iter().copied().find(|&id| large(id) && enough(id))?;
        let run = Run { addr: self.blocks[gap as usize].addr, bytes };
        Some(self.claim_gap(gap, run))
    }

    fn claim_gap(&mut self, gap: BlockId, run: Run) -> Growth {
        self.gaps.retain(|&id| id != gap);
        let block = self.carve(gap, run, |heap, rest| heap.gaps.push(rest));
        self.blocks[block as usize].state = State::Busy;
        self.blocks[block as usize].stamp = 0;
        Growth { run, block, region: self.blocks[block as usize].region }
    }

    /// How many bytes `claim_growth` would map.
    pub(crate) fn growth_bytes(&self, bytes: u64) -> Option<u64> {
        self.growth(Kind::of(bytes), bytes).map(|(_, run)| run.bytes)
    }

    /// Claims the addresses to map for a block of `bytes`.
    pub(crate) fn claim_growth(&mut self, bytes: u64) -> Option<Growth> {
        let (gap, run) = self.growth(Kind::of(bytes), bytes)?;
        Some(self.claim_gap(gap, run))
    }

    /// Cuts `run` out of a block that is in no list; `rest` gets what is left at either side.
    fn carve(
        &mut self,
        id: BlockId,
        run: Run,
        mut rest: impl FnMut(&mut Self, BlockId),
    ) -> BlockId {
        let mut id = id;
        let Block { addr, bytes, .. } = self.blocks[id as usize];
        debug_assert!(addr <= run.addr && run.end() <= addr + bytes);
        if addr < run.addr {
            let upper = self.split(id, run.addr - addr);
            rest(self, id);
            id = upper;
        }
        if self.blocks[id as usize].bytes > run.bytes {
            let upper = self.split(id, run.bytes);
            rest(self, upper);
        }
        id
    }

    /// The claimed addresses have memory now, one handle to a chunk.
    pub(crate) fn grown(&mut self, growth: Growth, handles: &[u64]) {
        let now_ms = self.now_ms;
        let region = self.region_mut(growth.region);
        let first = region.chunk(growth.run.addr);
        for (chunk, &handle) in region.chunks[first..].iter_mut().zip(handles) {
            *chunk = Chunk { handle, stamp: 0, used_ms: now_ms, views: 0 };
        }
        let kind = region.kind;
        self.insert_free(growth.block, kind as usize);
    }

    /// The claimed addresses got no memory.
    pub(crate) fn not_grown(&mut self, growth: Growth) {
        self.make_gap(growth.block);
    }

    fn make_gap(&mut self, mut id: BlockId) {
        self.blocks[id as usize].state = State::Gap;
        let Block { prev, next, .. } = self.blocks[id as usize];
        if next != 0 && self.blocks[next as usize].state == State::Gap {
            self.gaps.retain(|&gap| gap != next);
            self.join(id, next);
        }
        if prev != 0 && self.blocks[prev as usize].state == State::Gap {
            self.gaps.retain(|&gap| gap != prev);
            self.join(prev, id);
            id = prev;
        }
        self.gaps.push(id);
    }

    // ---- stitching ------------------------------------------------------------------------------

    /// A stitched block that was made before and whose parts are all free.
    pub(crate) fn take_view(&mut self, bytes: u64, requested: u64, user: u32) -> Option<BlockId> {
        let candidates = self.views_by_bytes.get(&bytes)?;
        let found = candidates.iter().copied().find(|&v| {
            let Some(view) = &self.views[v as usize] else { return false };
            view.lent.is_empty()
                && view.runs.iter().all(|&(region, run)| {
                    let block = &self.blocks[self.containing(region, run.addr) as usize];
                    block.state == State::Free && run.end() <= block.addr + block.bytes
                        || planted(fault::STALE_VIEW)
                })
        })?;
        let Some(view) = &self.views[found as usize] else { return None };
        let (runs, region) = (view.runs.clone(), view.region);
        let lent = self.lend(&runs);
        if let Some(view) = &mut self.views[found as usize] {
            view.lent = lent;
        }
        let block = self.region_mut(region).first;
        self.activate(block, requested, user);
        self.counts.stitch_hits += 1;
        Some(block)
    }

    fn lend(&mut self, runs: &[(u32, Run)]) -> Vec<BlockId> {
        let mut lent = Vec::with_capacity(runs.len());
        for &(region, run) in runs {
            let id = self.containing(region, run.addr);
            if self.blocks[id as usize].state != State::Free {
                continue;
            }
            self.remove_free(id);
            let part = self.carve(id, run, |heap, rest| {
                heap.books.free += heap.blocks[rest as usize].bytes;
                heap.bins[Kind::Large as usize].insert(&mut heap.blocks, rest);
            });
            self.blocks[part as usize].state = State::Lent;
            lent.push(part);
        }
        lent
    }

    /// Free bytes that could become one stitched block.
    pub(crate) fn stitchable(&self) -> u64 {
        let blocks = self.bins[Kind::Large as usize].largest_first(&self.blocks);
        blocks.filter(|&id| self.region(id).source == Source::Virtual).fold(0, |sum, id| {
            let run = self.whole_chunks(id, sum == 0);
            sum + run.bytes
        })
    }

    /// The part of a block that is whole chunks; the first part of a stitched block may begin
    /// within one.
    fn whole_chunks(&self, id: BlockId, is_first: bool) -> Run {
        let block = &self.blocks[id as usize];
        let start = if is_first { block.addr } else { block.addr.next_multiple_of(CHUNK) };
        let end = (block.addr + block.bytes) / CHUNK * CHUNK;
        Run { addr: start, bytes: end.saturating_sub(start) }
    }

    /// Claims free memory for a stitched block of `bytes`; nothing where there is too little.
    pub(crate) fn claim_stitch(&mut self, bytes: u64) -> Option<Stitch> {
        let (mut left, mut runs) = (bytes, Vec::new());
        for id in self.bins[Kind::Large as usize].largest_first(&self.blocks) {
            if self.region(id).source != Source::Virtual {
                continue;
            }
            let block = &self.blocks[id as usize];
            let mut run = self.whole_chunks(id, runs.is_empty());
            // The last part may end within a chunk.
            if left <= block.addr + block.bytes - run.addr.min(block.addr + block.bytes) {
                run.bytes = left;
            }
            run.bytes = run.bytes.min(left);
            if run.bytes == 0 {
                continue;
            }
            left -= run.bytes;
            runs.push((block.region, run));
            if left == 0 {
                break;
            }
        }
        if left > 0 {
            return None;
        }
        let mut handles = Vec::new();
        for &(region, run) in &runs {
            let region = self.region_mut(region);
            let (first, last) = (region.chunk(run.addr), region.chunk(run.end() - 1));
            for chunk in &mut region.chunks[first..=last] {
                chunk.views += 1;
                handles.push(chunk.handle);
            }
        }
        let offset = runs[0].1.addr % CHUNK;
        let lent = self.lend(&runs);
        self.books.busy += bytes;
        Some(Stitch { bytes, offset, handles, runs, lent })
    }

    /// The claimed chunks are mapped side by side from `base` on.
    pub(crate) fn stitched(
        &mut self,
        stitch: Stitch,
        base: u64,
        requested: u64,
        user: u32,
    ) -> BlockId {
        let span = stitch.handles.len() as u64 * CHUNK;
        let (region, block) = self.add_region(base, span, Kind::Large, Source::View, 0);
        self.blocks[block as usize].addr = base + stitch.offset;
        self.blocks[block as usize].bytes = stitch.bytes;
        self.books.busy -= stitch.bytes;
        let slot = self.views.iter().position(Option::is_none).unwrap_or(self.views.len());
        let view = View {
            region,
            bytes: stitch.bytes,
            runs: stitch.runs,
            lent: stitch.lent,
            stamp: 0,
            used_ms: self.now_ms,
            used_at: self.counts.allocs,
        };
        if slot == self.views.len() {
            self.views.push(Some(view));
        } else {
            self.views[slot] = Some(view);
        }
        self.region_mut(region).view = slot as u32;
        self.views_by_bytes.entry(stitch.bytes).or_default().push(slot as u32);
        self.live_views += 1;
        self.view_chunks += (span / CHUNK) as usize;
        self.counts.stitched += 1;
        self.activate(block, requested, user);
        block
    }

    /// The claimed chunks could not be mapped.
    pub(crate) fn not_stitched(&mut self, stitch: Stitch) {
        self.books.busy -= stitch.bytes;
        self.count_views(&stitch.runs, false);
        for part in stitch.lent {
            self.insert_free(part, Kind::Large as usize);
        }
    }

    fn count_views(&mut self, runs: &[(u32, Run)], more: bool) {
        for &(region, run) in runs {
            let region = self.region_mut(region);
            let (first, last) = (region.chunk(run.addr), region.chunk(run.end() - 1));
            for chunk in &mut region.chunks[first..=last] {
                chunk.views = if more { chunk.views + 1 } else { chunk.views - 1 };
            }
        }
    }

    /// Takes apart the older half of the stitched blocks, if they are too many.
    pub(crate) fn unstitch_old(&mut self, is_done: impl Fn(u64) -> bool) -> Vec<Run> {
        let chunks = (self.books.mapped() / CHUNK) as usize;
        if self.live_views < VIEWS_MAX && self.view_chunks < 2 * chunks + VIEWS_MAX {
            return Vec::new();
        }
        let mut used: Vec<u64> = self.views.iter().flatten().map(|view| view.used_at).collect();
        used.sort_unstable();
        let middle = used[used.len() / 2];
        self.unstitch_where(|view| view.used_at < middle, is_done)
    }

    /// Takes apart the stitched blocks that nobody uses, that were last used before `used_ms` and
    /// whose use `is_done` knows complete. Returns what is to be unmapped.
    pub(crate) fn unstitch(&mut self, used_ms: u64, is_done: impl Fn(u64) -> bool) -> Vec<Run> {
        self.unstitch_where(|view| view.used_ms < used_ms, is_done)
    }

    fn unstitch_where(
        &mut self,
        which: impl Fn(&View) -> bool,
        is_done: impl Fn(u64) -> bool,
    ) -> Vec<Run> {
        let mut unmapped = Vec::new();
        for slot in 0..self.views.len() {
            let idle = self.views[slot].as_ref().is_some_and(|view| {
                view.lent.is_empty()
                    && which(view)
                    && (is_done(view.stamp) || planted(fault::EARLY_UNMAP))
            });
            if !idle {
                continue;
            }
            let Some(view) = self.views[slot].take() else { continue };
            if let Some(list) = self.views_by_bytes.get_mut(&view.bytes) {
                list.retain(|&v| v as usize != slot);
                if list.is_empty() {
                    self.views_by_bytes.remove(&view.bytes);
                }
            }
            self.live_views -= 1;
            self.count_views(&view.runs, false);
            if let Some(region) = self.regions[view.region as usize].take() {
                self.drop_block(region.first);
                self.view_chunks -= (region.bytes / CHUNK) as usize;
                unmapped.push(Run { addr: region.base, bytes: region.bytes });
            }
        }
        unmapped
    }

    pub(crate) fn live_views(&self) -> usize {
        self.live_views
    }

    // ---- memory goes ------------------------------------------------------------------------------

    /// Claims up to `bytes` of whole free chunks, longest unused first, that `may_go` (epoch, last
    /// used) lets go. Each run is to be unmapped, then [`Self::unmapped`].
    pub(crate) fn claim_cold(
        &mut self,
        bytes: u64,
        may_go: impl Fn(u64, u64) -> bool,
    ) -> Vec<Growth> {
        let mut cold: Vec<(u64, u32, usize, BlockId)> = Vec::new();
        for kind in [Kind::Small, Kind::Large] {
            for id in self.bins[kind as usize].largest_first(&self.blocks) {
                let block = &self.blocks[id as usize];
                let region = self.region(id);
                if region.source != Source::Virtual {
                    continue;
                }
                let run = self.whole_chunks(id, false);
                if run.bytes == 0 || run.addr >= run.end() {
                    continue;
                }
                for at in region.chunk(run.addr)..region.chunk(run.end()) {
                    let chunk = &region.chunks[at];
                    if chunk.views == 0 && may_go(chunk.stamp, chunk.used_ms) {
                        cold.push((chunk.used_ms, block.region, at, id));
                    }
                }
            }
        }
        // Of equally cold ones those at the upper end.
        cold.sort_unstable_by_key(|&(used, region, at, _)| (used, region, usize::MAX - at));
        cold.truncate((bytes / CHUNK) as usize);
        cold.sort_unstable_by_key(|&(_, region, at, _)| (region, at));
        let mut claimed = Vec::new();
        // From the upper end: what is left below a run keeps the block's number.
        while let Some((_, region, last, id)) = cold.pop() {
            let mut first = last;
            while cold.last().is_some_and(|&(.., at, other)| other == id && at + 1 == first) {
                cold.pop();
                first -= 1;
            }
            claimed.push(self.claim_run(region, first, last + 1 - first, id));
        }
        claimed
    }

    fn claim_run(&mut self, region: u32, first: usize, chunks: usize, id: BlockId) -> Growth {
        let addr = self.region_mut(region).base + first as u64 * CHUNK;
        let run = Run { addr, bytes: chunks as u64 * CHUNK };
        let kind = self.region_mut(region).kind;
        self.remove_free(id);
        let block = self.carve(id, run, |heap, rest| {
            heap.books.free += heap.blocks[rest as usize].bytes;
            heap.bins[kind as usize].insert(&mut heap.blocks, rest);
        });
        self.blocks[block as usize].state = State::Busy;
        self.books.busy += run.bytes;
        Growth { run, block, region }
    }

    /// The handles of claimed chunks.
    pub(crate) fn handles(&self, growth: &Growth) -> Vec<u64> {
        let Some(Some(region)) = self.regions.get(growth.region as usize) else {
            return Vec::new();
        };
        let first = region.chunk(growth.run.addr);
        let count = (growth.run.bytes / CHUNK) as usize;
        region.chunks[first..first + count].iter().map(|chunk| chunk.handle).collect()
    }

    /// Claimed chunks are unmapped.
    pub(crate) fn unmapped(&mut self, growth: Growth) {
        self.books.busy -= growth.run.bytes;
        let region = self.region_mut(growth.region);
        let first = region.chunk(growth.run.addr);
        let count = (growth.run.bytes / CHUNK) as usize;
        for chunk in &mut region.chunks[first..first + count] {
            *chunk = Chunk::default();
        }
        self.make_gap(growth.block);
    }

    /// Takes out up to `bytes` of segments that are free as a whole, longest unused first, that
    /// `may_go` lets go: (where the allocation begins, the bytes that it has).
    pub(crate) fn claim_segments(
        &mut self,
        bytes: u64,
        may_go: impl Fn(u64, u64) -> bool,
    ) -> Vec<Run> {
        let mut cold: Vec<(u64, usize)> = Vec::new();
        for (index, region) in self.regions.iter().enumerate() {
            let Some(region) = region else { continue };
            let Source::Segment { .. } = region.source else { continue };
            let block = &self.blocks[region.first as usize];
            if block.state != State::Free || block.bytes != region.bytes {
                continue;
            }
            let stamp = region.chunks.iter().map(|chunk| chunk.stamp).max().unwrap_or(0);
            let used_ms = region.chunks.iter().map(|chunk| chunk.used_ms).max().unwrap_or(0);
            if may_go(stamp, used_ms) {
                cold.push((used_ms, index));
            }
        }
        cold.sort_unstable();
        let (mut taken, mut runs) = (0, Vec::new());
        for (_, index) in cold {
            if taken >= bytes {
                break;
            }
            let Some(region) = &self.regions[index] else { continue };
            let (first, source, whole) = (region.first, region.source, region.bytes);
            self.remove_free(first);
            self.regions[index] = None;
            self.drop_block(first);
            if let Source::Segment { base, bytes, .. } = source {
                taken += bytes;
                self.books.waste -= bytes - whole;
                runs.push(Run { addr: base, bytes });
            }
        }
        runs
    }

    /// All memory of a heap that nobody uses any more, for its end: (addresses, handles).
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().flatten()
    }

    /// The blocks of a region from its start.
    pub(crate) fn blocks_of<'a>(
        &'a self,
        region: &'a Region,
    ) -> impl Iterator<Item = (BlockId, &'a Block)> + 'a {
        let mut at = region.first;
        std::iter::from_fn(move || {
            let id = at;
            (id != 0).then(|| {
                at = self.blocks[id as usize].next;
                (id, &self.blocks[id as usize])
            })
        })
    }

    pub(crate) fn region_chunks<'a>(
        &self,
        region: &'a Region,
    ) -> impl Iterator<Item = (u64, u64)> + 'a {
        region
            .chunks
            .iter()
            .enumerate()
            .filter(|(_, chunk)| chunk.handle != 0)
            .map(|(i, chunk)| (region.base + i as u64 * CHUNK, chunk.handle))
    }

    /// The handles of the chunks under a block, and where it begins within the first.
    pub(crate) fn handles_of(&self, region: u32, addr: u64, bytes: u64) -> (Vec<u64>, u64) {
        let Some(Some(found)) = self.regions.get(region as usize) else { return (Vec::new(), 0) };
        let mut handles = Vec::new();
        let mut add = |region: &Region, run: Run| {
            let chunks = &region.chunks[region.chunk(run.addr)..=region.chunk(run.end() - 1)];
            handles.extend(chunks.iter().map(|chunk| chunk.handle));
        };
        if found.source == Source::View {
            if let Some(view) = &self.views[found.view as usize] {
                for &(index, run) in &view.runs {
                    if let Some(part) = &self.regions[index as usize] {
                        add(part, run);
                    }
                }
            }
        } else {
            add(found, Run { addr, bytes });
        }
        (handles, (addr - found.base) % CHUNK)
    }

    /// Where the allocation of a segment begins.
    pub(crate) fn segment_base(&self, region: u32) -> Option<u64> {
        match self.regions.get(region as usize)?.as_ref()?.source {
            Source::Segment { base, .. } => Some(base),
            _ => None,
        }
    }

    /// Whether a block is of the kind and size for a request; a stitched one is not cut.
    pub(crate) fn serves(&self, id: BlockId, bytes: u64) -> bool {
        let region = self.region(id);
        let has = self.blocks[id as usize].bytes;
        let cut = region.source != Source::View || has.saturating_sub(bytes) <= bytes / 16;
        region.kind == Kind::of(bytes) && has >= bytes && cut
    }

    /// Takes out a region that was just added and that nobody uses.
    pub(crate) fn remove_region(&mut self, index: u32) {
        let Some(region) = self.regions[index as usize].take() else { return };
        if region.source == Source::Virtual {
            self.gaps.retain(|&id| id != region.first);
        } else {
            self.bins[region.bin].remove(&mut self.blocks, region.first);
            self.books.free -= region.bytes;
        }
        self.drop_block(region.first);
    }

    /// The largest free block.
    pub(crate) fn largest_free(&self) -> u64 {
        let largest = |bins: &Bins| {
            let first = bins.largest_first(&self.blocks).take(64);
            first.map(|id| self.blocks[id as usize].bytes).max().unwrap_or(0)
        };
        self.bins.iter().map(largest).max().unwrap_or(0)
    }

    /// Checks the invariants.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut books = Books::default();
        for region in self.regions() {
            if region.source == Source::View {
                let block = &self.blocks[region.first as usize];
                match block.state {
                    State::Active => {
                        books.active += block.bytes;
                        books.requested += block.requested;
                    }
                    State::Pending => books.pending += block.bytes,
                    _ => {}
                }
                continue;
            }
            let (mut at, mut before) = (region.base, State::Unused);
            for (id, block) in self.blocks_of(region) {
                if block.addr != at {
                    return Err(format!("block {id} at {:#x} and not at {at:#x}", block.addr));
                }
                at += block.bytes;
                if region.table[region.unit(block.addr)] != id {
                    return Err(format!("the table does not know block {id}"));
                }
                if before == State::Free && block.state == State::Free {
                    return Err(format!("block {id} was not joined with the one before"));
                }
                before = block.state;
                match block.state {
                    State::Active => {
                        books.active += block.bytes;
                        books.requested += block.requested;
                    }
                    State::Pending => books.pending += block.bytes,
                    State::Free => books.free += block.bytes,
                    State::Busy | State::Lent | State::Gap => {}
                    State::Unused => return Err(format!("block {id} is unused")),
                }
            }
            if at != region.base + region.bytes {
                return Err(format!("the blocks end at {at:#x}"));
            }
        }
        books.busy = self.books.busy;
        books.waste = self.books.waste;
        if books == self.books {
            Ok(())
        } else {
            Err(format!("counted {books:?}, booked {:?}", self.books))
        }
    }
}
