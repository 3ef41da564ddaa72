//! Looking at a heap: which block an address is of, what there is, whether the books are right.

use super::*;

impl Heap {
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
    pub(super) fn containing(&self, region: u32, addr: u64) -> BlockId {
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
