//! Blocks are taken and given back: in the order of the heap's own stream at once, else once the
//! streams that use them are past them.

use super::*;

impl Heap {
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
    pub(super) fn find(&self, bytes: u64) -> Option<(BlockId, usize)> {
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
    pub(super) fn take_block(&mut self, id: BlockId, bin: usize, bytes: u64) {
        self.bins[bin].remove(&mut self.blocks, id);
        self.books.free -= bytes;
        if self.blocks[id as usize].bytes > bytes {
            let rest = self.split(id, bytes);
            self.bins[bin].insert(&mut self.blocks, rest);
        }
    }

    #[inline]
    pub(super) fn activate(&mut self, id: BlockId, requested: u64, user: u32) {
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
    pub(super) fn settle(&mut self, id: BlockId, stamp: u64) {
        let region = self.region(id);
        if region.source == Source::View {
            return self.settle_view(id, stamp);
        }
        let bin = region.bin;
        self.touch(id, stamp);
        self.insert_free(id, bin);
    }

    pub(super) fn settle_view(&mut self, id: BlockId, stamp: u64) {
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
}
