//! The memory of one stream: regions of addresses tiled by blocks, and the free ones by size. It
//! decides and keeps the books; it calls no driver.
//!
//! Invariants: the blocks of a region tile it; two free blocks never lie side by side; a byte is in
//! one of `active`, `pending`, `free` and `busy`, or has no memory; a chunk's epoch is that of its
//! last use in the order of the heap's stream.

mod grow;
mod look;
mod shrink;
mod stitch;
mod take;

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
}
