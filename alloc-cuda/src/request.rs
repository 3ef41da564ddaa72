//! A request: an allocation from its stream's heap, a free, a use on another stream.
//!
//! Invariant: a block is handed out once until it is free, and is free once all that uses it is
//! complete or ordered before what its heap's stream does next.

use crate::block::{Block, BlockId, State};
use crate::driver::Stream;
use crate::fault::{self, planted};
use crate::heap::{Heap, Need, rounded};
use crate::ledger::{Entry, Space};
use crate::oom::{AllocError, FreeError};
use crate::pool::{Inner, TAG};
use crate::shard::Shard;
use crate::supply::SETTLE_EVERY;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Frees of a heap between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// An event is recorded for so many pending blocks together, or for so many bytes.
const CLOSE_BLOCKS: u32 = 16;
const CLOSE_BYTES: u64 = 16 << 20;
/// The largest request: more than any device has.
const BYTES_MAX: u64 = 1 << 44;

/// A heap that a thread used: the pool's number, the stream, the heap.
type Remembered = (u64, usize, Option<Arc<Shard>>);

thread_local! {
    /// The heaps that this thread used last.
    static LAST: RefCell<[Remembered; 4]> =
        const { RefCell::new([(0, 0, None), (0, 0, None), (0, 0, None), (0, 0, None)]) };
}

impl Inner {
    #[inline]
    pub(crate) fn alloc(&self, bytes: u64, stream: Stream) -> Result<u64, AllocError> {
        if self.captures.any()
            && let Some(pool) = self.captures.pool_of(stream)
        {
            let shard = self.shard(pool, stream);
            shard.stream.capturing.store(true, Relaxed);
            return self.alloc_in(&shard, bytes);
        }
        let number = self.number.load(Relaxed);
        let remembered = LAST.try_with(|last| {
            let mut last = last.try_borrow_mut().ok()?;
            // Streams are pointers to structures of some hundred bytes.
            let slot = &mut last[(stream.0 ^ stream.0 >> 8) & 3];
            if slot.0 != number || slot.1 != stream.0 || slot.2.is_none() {
                *slot = (number, stream.0, Some(self.shard(0, stream)));
            }
            slot.2.as_ref().map(|shard| self.alloc_in(shard, bytes))
        });
        match remembered {
            Ok(Some(result)) => result,
            // The thread ends, or a callback allocates.
            _ => self.alloc_in(&self.shard(0, stream), bytes),
        }
    }

    #[inline]
    pub(crate) fn alloc_in(&self, shard: &Arc<Shard>, bytes: u64) -> Result<u64, AllocError> {
        if bytes > BYTES_MAX {
            return Err(AllocError::TooLarge { bytes });
        }
        let size = rounded(bytes);
        let tag = TAG.with(Cell::get);
        {
            let mut heap = shard.heap();
            heap.counts.allocs += 1;
            let look = heap.counts.allocs.is_multiple_of(SETTLE_EVERY) && !heap.pending.is_empty();
            if !look && let Some(id) = heap.take(size, bytes, shard.stream.index) {
                heap.counts.hits += 1;
                return Ok(self.finish(shard, &mut heap, id, tag));
            }
        }
        self.alloc_slow(shard, size, bytes, tag)
    }

    #[inline]
    pub(crate) fn finish(&self, shard: &Shard, heap: &mut Heap, id: BlockId, tag: u32) -> u64 {
        heap.blocks[id as usize].tag = tag;
        shard.publish(heap);
        if self.watched {
            self.tell_alloc(shard, heap, id);
        }
        heap.block(id).addr
    }

    /// Writes out what the record has buffered.
    pub(crate) fn flush_record(&self) {
        if let Some(recorder) = &self.recorder {
            recorder.flush();
        }
    }

    #[cold]
    fn tell_alloc(&self, shard: &Shard, heap: &mut Heap, id: BlockId) {
        let block = *heap.block(id);
        if self.history.is_on() {
            let (now_ms, stream) = (self.now_ms(), shard.stream.handle);
            self.history.alloc(now_ms, block.addr, block.requested, stream, block.tag);
        }
        if let Some(recorder) = &self.recorder {
            recorder.alloc(block.addr, block.requested, block.user);
        }
        if heap.entered.is_on() {
            self.enter(heap, id);
        }
    }

    #[cold]
    fn tell_free(&self, shard: &Shard, block: &Block) {
        if self.history.is_on() {
            let (now_ms, stream) = (self.now_ms(), shard.stream.handle);
            self.history.free(now_ms, block.addr, block.requested, stream, block.tag);
        }
        if let Some(recorder) = &self.recorder {
            recorder.free(block.addr);
        }
    }

    /// Enters a block into the ledger.
    fn enter(&self, heap: &mut Heap, id: BlockId) {
        let block = *heap.block(id);
        let tag = if block.tag == 0 { String::new() } else { self.tag_name(block.tag) };
        let entry = Entry {
            space: Space::Device,
            device: self.gpu.ordinal,
            addr: block.addr,
            bytes: block.requested,
            usable_bytes: block.bytes,
            stream: self.stream_at(block.user).handle,
            tag: &tag,
        };
        heap.entered.enter(u64::from(id), &entry);
    }

    /// The heap of an address.
    pub(crate) fn owner(&self, ptr: u64) -> Option<(&Shard, u32)> {
        let (owner, region) = self.map.get(ptr);
        if owner == 0 {
            return None;
        }
        // SAFETY: the map holds addresses of heaps in `shards`, which live as long as the pool.
        Some((unsafe { &*(owner as *const Shard) }, region))
    }

    #[inline]
    pub(crate) fn free(&self, ptr: u64, stream: Option<Stream>) -> Result<(), FreeError> {
        let Some((shard, region)) = self.owner(ptr) else {
            return Err(self.bad_free(FreeError::NotOurs));
        };
        let mut heap = shard.heap();
        let id = heap.at(region, ptr);
        if id == 0 {
            return Err(self.bad_free(FreeError::NotABlock));
        }
        let block = *heap.block(id);
        if block.state != State::Active {
            if planted(fault::DOUBLE_FREE) && block.state == State::Free {
                heap.free_again(id);
                return Ok(());
            }
            return Err(self.bad_free(FreeError::DoubleFree));
        }
        if self.watched {
            self.tell_free(shard, &block);
        }
        heap.counts.frees += 1;
        let look = heap.counts.frees.is_multiple_of(LOOK_EVERY);
        heap.now_ms = self.now_ms();
        if block.user == shard.stream.index && !block.shared && stream.is_none() {
            if self.watched {
                heap.entered.leave(u64::from(id), shard.stream.handle, false);
            }
            heap.free(id, shard.stream.stamp());
            shard.publish(&heap);
        } else if let Some(needs) = self.defer(shard, &mut heap, id, stream) {
            drop(heap);
            self.close_all(&needs);
            return Ok(());
        }
        if look {
            drop(heap);
            self.look_for_cold();
        }
        Ok(())
    }

    #[cold]
    fn bad_free(&self, error: FreeError) -> FreeError {
        self.counts.bad_frees.fetch_add(1, Relaxed);
        error
    }

    /// Lets a block wait for its own stream, or the one that freed it, and for the others in use.
    /// Returns the epochs to close, once that is worth an event.
    fn defer(
        &self,
        shard: &Shard,
        heap: &mut Heap,
        id: BlockId,
        stream: Option<Stream>,
    ) -> Option<Vec<Need>> {
        let user = match stream {
            Some(stream) => self.stream(stream),
            None => self.stream_at(heap.block(id).user),
        };
        let mut needs = heap.uses.remove(&id).unwrap_or_default();
        for need in &mut needs {
            if need.epoch == 0 {
                need.epoch = self.stream_at(need.stream).stamp();
            }
        }
        needs.push(Need { stream: user.index, epoch: user.stamp() });
        if needs.iter().all(|need| need.stream == shard.stream.index) {
            let stamp = needs.iter().map(|need| need.epoch).max().unwrap_or(0);
            heap.entered.leave(u64::from(id), user.handle, false);
            heap.free(id, stamp);
            shard.publish_all(heap);
            return None;
        }
        heap.unclosed_blocks += 1;
        heap.unclosed_bytes += heap.block(id).bytes;
        let enough = CLOSE_BYTES.max((heap.books.active + heap.books.pending) / 32);
        let worth = heap.unclosed_blocks >= CLOSE_BLOCKS || heap.unclosed_bytes >= enough;
        // The heap's own stream is past its own uses whenever it allocates.
        let others = |need: &&Need| need.stream != shard.stream.index;
        let to_close = (worth && !self.captures.any())
            .then(|| needs.iter().filter(others).copied().collect::<Vec<_>>());
        if worth {
            (heap.unclosed_blocks, heap.unclosed_bytes) = (0, 0);
        }
        heap.counts.deferred += 1;
        heap.entered.leave(u64::from(id), user.handle, true);
        heap.defer(id, needs);
        shard.publish_all(heap);
        to_close
    }

    /// Records the events that some epochs need.
    pub(crate) fn close_all(&self, needs: &[Need]) {
        for need in needs {
            // What could not be recorded now is covered by a later event.
            let _ = self.stream_at(need.stream).close(&self.gpu, need.epoch);
        }
    }

    pub(crate) fn record_use(
        &self,
        ptr: u64,
        stream: Stream,
        is_over: bool,
    ) -> Result<(), FreeError> {
        let (shard, region) = self.owner(ptr).ok_or(FreeError::NotOurs)?;
        let user = self.stream(stream);
        let mut heap = shard.heap();
        let id = heap.at(region, ptr);
        if id == 0 {
            return Err(FreeError::NotABlock);
        }
        let block = *heap.block(id);
        if block.state != State::Active {
            return Err(FreeError::DoubleFree);
        }
        if block.user == user.index || planted(fault::LOST_USE) {
            return Ok(());
        }
        heap.blocks[id as usize].shared = true;
        if let Some(recorder) = &self.recorder {
            recorder.used(ptr, user.index, is_over);
        }
        let epoch = if is_over { user.stamp() } else { 0 };
        let uses = heap.uses.entry(id).or_default();
        match uses.iter_mut().find(|need| need.stream == user.index) {
            Some(need) => need.epoch = epoch,
            None => uses.push(Need { stream: user.index, epoch }),
        }
        drop(heap);
        if is_over {
            // An event of its own: what the stream does next is not waited for.
            let _ = user.close(&self.gpu, epoch);
        }
        Ok(())
    }
}
