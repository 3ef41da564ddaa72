//! Whole free chunks at other addresses become one block, which shows them side by side. It stays
//! mapped while nobody uses it, for the next request of its size.
//!
//! Invariant: what a stitched block in use shows is lent, so that nobody else gets it; a chunk that any
//! stitched block shows is not unmapped.

use super::*;

impl Heap {
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

    pub(super) fn lend(&mut self, runs: &[(u32, Run)]) -> Vec<BlockId> {
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
    pub(super) fn whole_chunks(&self, id: BlockId, is_first: bool) -> Run {
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
}
