//! Memory comes: regions of addresses, and the chunks to map to them.
//!
//! Invariant: addresses that are claimed are busy until the caller says what became of them.

use super::*;

impl Heap {
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
    pub(super) fn carve(
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

    pub(super) fn make_gap(&mut self, mut id: BlockId) {
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
}
