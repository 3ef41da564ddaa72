//! Memory goes: whole free chunks, and segments that are free as a whole, longest unused first.

use super::*;

impl Heap {
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
}
