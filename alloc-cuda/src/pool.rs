//! The pool of a device: which heap serves a request, and what is done when none can.
//!
//! Invariants: a heap's lock is never held across a call of the driver; of two heaps only one is
//! locked at a time; memory goes to another stream only when it is complete or ordered before that
//! stream's future work, and is unmapped only when it is complete.

use crate::block::State;
use crate::builder::{Clock, OnOutOfMemory, Options, PoolBuilder};
use crate::capture::Captures;
use crate::chunk_map::ChunkMap;
use crate::driver::{Driver, Error, Stream};
use crate::gpu::{Backing, Gpu, lock};
use crate::heap::{CHUNK, Source};
use crate::heat::Heat;
use crate::history::History;
use crate::ledger::Ledger;
use crate::oom::{AllocError, FreeError};
use crate::record::Recorder;
use crate::shard::{Shard, Shards, Streams};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// What happened in a pool.
#[derive(Debug, Default)]
pub(crate) struct PoolCounts {
    pub(crate) grown: AtomicU64,
    pub(crate) grown_bytes: AtomicU64,
    pub(crate) trimmed_bytes: AtomicU64,
    pub(crate) pressure: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) ready_steals: AtomicU64,
    pub(crate) ooms: AtomicU64,
    pub(crate) oom_waits: AtomicU64,
    pub(crate) captures: AtomicU64,
    pub(crate) aborted_captures: AtomicU64,
    pub(crate) bad_frees: AtomicU64,
}

/// A pool.
pub(crate) struct Inner {
    /// Tells threads whether the heaps that they remember are still those of their streams.
    pub(crate) number: AtomicU64,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) map: ChunkMap,
    pub(crate) streams: RwLock<Streams>,
    pub(crate) shards: RwLock<Shards>,
    pub(crate) limit_bytes: AtomicU64,
    pub(crate) wait_ms: AtomicU64,
    pub(crate) heat: Mutex<Heat>,
    pub(crate) clock: Clock,
    pub(crate) options: Options,
    pub(crate) callback: Option<Box<OnOutOfMemory>>,
    pub(crate) ledger: Option<&'static dyn Ledger>,
    pub(crate) recorder: Option<Recorder>,
    /// Whether anybody hears of allocations: history, ledger or record.
    pub(crate) watched: bool,
    /// Physical bytes.
    pub(crate) reserved: AtomicU64,
    pub(crate) reserved_peak: AtomicU64,
    /// Room beyond the peak, in parts of it.
    pub(crate) slack_parts: AtomicU64,
    /// Rearrangements since that is at its usual most.
    pub(crate) rearrangements: AtomicU64,
    /// Chunks that are mapped nowhere.
    pub(crate) idle_chunks: Mutex<Vec<u64>>,
    pub(crate) last_poll_ms: AtomicU64,
    pub(crate) polling: AtomicBool,
    pub(crate) captures: Captures,
    pub(crate) counts: PoolCounts,
    pub(crate) history: History,
    pub(crate) tags: RwLock<Vec<String>>,
}

thread_local! {
    pub(crate) static TAG: Cell<u32> = const { Cell::new(0) };
}

/// Sets the tag of this thread's allocations until it is dropped.
#[derive(Debug)]
pub struct TagGuard {
    before: u32,
}

impl Drop for TagGuard {
    fn drop(&mut self) {
        TAG.with(|tag| tag.set(self.before));
    }
}

/// A stream-ordered pool of one device's memory. Clones are the same pool.
#[derive(Clone)]
pub struct Pool {
    pub(crate) inner: Arc<Inner>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.inner.gpu.ordinal)
            .field("backing", &self.inner.gpu.backing)
            .finish_non_exhaustive()
    }
}

/// The pool as seen from one stream: the quickest way to allocate on it.
#[derive(Clone)]
pub struct OnStream {
    pub(crate) inner: Arc<Inner>,
    pub(crate) shard: Arc<Shard>,
}

impl fmt::Debug for OnStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnStream")
            .field("stream", &self.shard.stream.handle)
            .finish_non_exhaustive()
    }
}

impl OnStream {
    /// A block of at least `bytes`, aligned to 512 bytes, for work on this stream.
    ///
    /// # Errors
    /// There is no memory for it.
    #[inline]
    pub fn alloc(&self, bytes: u64) -> Result<u64, AllocError> {
        if self.inner.captures.any() {
            return self.inner.alloc(bytes, self.shard.stream.handle);
        }
        self.inner.alloc_in(&self.shard, bytes)
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
        self.shard.stream.handle
    }
}

impl Pool {
    /// How a pool for a device is made.
    pub fn builder(ordinal: i32) -> PoolBuilder {
        PoolBuilder::new(ordinal)
    }

    /// A block of at least `bytes`, aligned to 512 bytes, for work on `stream`.
    ///
    /// # Errors
    /// There is no memory for it.
    #[inline]
    pub fn alloc(&self, bytes: u64, stream: Stream) -> Result<u64, AllocError> {
        self.inner.alloc(bytes, stream)
    }

    /// Gives a block back in the order of its own stream: work submitted there before may still use
    /// it, and other streams whose use was recorded.
    ///
    /// # Errors
    /// No block of this pool starts at `ptr`, or it was freed before.
    ///
    /// # Safety
    /// No work submitted from now on uses the block.
    #[inline]
    pub unsafe fn free(&self, ptr: u64) -> Result<(), FreeError> {
        self.inner.free(ptr, None)
    }

    /// Gives a block back in the order of `stream`, which is past all its uses but the recorded ones.
    ///
    /// # Errors
    /// As [`Self::free`].
    ///
    /// # Safety
    /// As [`Self::free`]; and `stream` waits for what its own stream did with the block.
    pub unsafe fn free_on(&self, ptr: u64, stream: Stream) -> Result<(), FreeError> {
        self.inner.free(ptr, Some(stream))
    }

    /// Says that `stream` uses the block too, until it is freed.
    ///
    /// # Errors
    /// No block of this pool starts at `ptr`, or it is not in use.
    pub fn record_use(&self, ptr: u64, stream: Stream) -> Result<(), FreeError> {
        self.inner.record_use(ptr, stream, false)
    }

    /// Says that `stream`'s last use of the block has been submitted: its later work does not keep
    /// the block.
    ///
    /// # Errors
    /// As [`Self::record_use`].
    pub fn end_use(&self, ptr: u64, stream: Stream) -> Result<(), FreeError> {
        self.inner.record_use(ptr, stream, true)
    }

    /// The pool as seen from one stream.
    pub fn on(&self, stream: Stream) -> OnStream {
        let shard = self.inner.shard(0, stream);
        OnStream { inner: Arc::clone(&self.inner), shard }
    }

    /// Must be called before a stream is destroyed: another may get its handle. What it has is
    /// free for the others when all work submitted so far is complete.
    ///
    /// # Errors
    /// The driver failed.
    pub fn forget_stream(&self, stream: Stream) -> Result<(), Error> {
        self.inner.forget_stream(stream)
    }

    /// Where the memory comes from.
    pub fn backing(&self) -> Backing {
        self.inner.gpu.backing
    }

    /// The memory of the device.
    pub fn device_bytes(&self) -> u64 {
        self.inner.gpu.total_bytes
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.inner.gpu.ordinal
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.inner.gpu.driver
    }

    /// Gives back free memory until `keep_bytes` are left; the bytes given back. Waits for streams
    /// that still use some, as long as an allocation would.
    pub fn trim(&self, keep_bytes: u64) -> u64 {
        if self.inner.captures.any() {
            return 0;
        }
        self.inner.poll_streams();
        let wait_ms = self.inner.wait_ms.load(Relaxed);
        if wait_ms > 0 {
            self.inner.wait_for_pending(wait_ms);
        }
        self.inner.all_shards().iter().for_each(|shard| {
            self.inner.settle(shard);
        });
        let excess = self.inner.reserved.load(Relaxed).saturating_sub(keep_bytes);
        self.inner.give_back(excess, None)
    }

    /// Settles what is complete and gives back what is cold.
    pub fn poll(&self) {
        self.inner.poll();
    }

    /// Changes the most that the pool may have.
    pub fn set_limit_bytes(&self, limit: Option<u64>) {
        self.inner.limit_bytes.store(limit.unwrap_or(u64::MAX), Relaxed);
    }

    /// Changes how long an allocation that finds no memory waits; `None` switches that off.
    pub fn set_wait_ms(&self, ms: Option<u64>) {
        self.inner.wait_ms.store(ms.unwrap_or(0), Relaxed);
    }

    /// Changes the window and the decay, as in [`PoolBuilder`].
    pub fn set_heat(&self, hot_window_ms: u64, decay_ms: Option<u64>) {
        let mut heat = lock(&self.inner.heat);
        heat.window_ms = hot_window_ms;
        heat.decay_ms = decay_ms;
    }

    /// The window and the decay.
    pub fn heat(&self) -> (u64, Option<u64>) {
        let heat = lock(&self.inner.heat);
        (heat.window_ms, heat.decay_ms)
    }

    /// Names this thread's allocations until the guard is dropped.
    pub fn tag(&self, name: &str) -> TagGuard {
        let number = self.inner.tag_number(name);
        TagGuard { before: TAG.with(|tag| tag.replace(number)) }
    }

    /// Lets another device use this pool's memory.
    ///
    /// # Errors
    /// The devices cannot reach each other.
    pub fn allow_peer(&self, peer: i32) -> Result<(), Error> {
        let mut ranges = Vec::new();
        for shard in self.inner.all_shards() {
            let heap = shard.heap();
            for region in heap.regions() {
                ranges.extend(heap.region_chunks(region).map(|(addr, _)| (addr, CHUNK)));
                if region.source == Source::View {
                    ranges.push((region.base, region.bytes));
                }
            }
        }
        self.inner.gpu.allow_peer(peer, ranges.into_iter())
    }

    /// The block that contains an address: its start, its size and what was asked for.
    pub fn block_at(&self, ptr: u64) -> Option<(u64, u64, u64)> {
        let (shard, region) = self.inner.owner(ptr)?;
        let heap = shard.heap();
        let id = heap.at(region, ptr);
        let block = heap.block(id);
        (id != 0 && block.state == State::Active).then_some((
            block.addr,
            block.bytes,
            block.requested,
        ))
    }

    /// Checks the books against the blocks, for tests.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        let mut mapped = 0;
        for shard in self.inner.all_shards() {
            let heap = shard.heap();
            heap.check()?;
            mapped += heap.books.mapped();
        }
        let idle = lock(&self.inner.idle_chunks).len() as u64 * CHUNK;
        let reserved = self.inner.reserved.load(Relaxed);
        if mapped + idle == reserved {
            Ok(())
        } else {
            Err(format!("mapped {mapped} and idle {idle}, but reserved {reserved}"))
        }
    }
}

impl Inner {
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    pub(crate) fn tag_number(&self, name: &str) -> u32 {
        let mut tags = self.tags.write().unwrap_or_else(PoisonError::into_inner);
        let at = tags.iter().position(|tag| tag == name);
        at.unwrap_or_else(|| {
            tags.push(name.to_owned());
            tags.len() - 1
        }) as u32
    }

    pub(crate) fn tag_name(&self, number: u32) -> String {
        let tags = self.tags.read().unwrap_or_else(PoisonError::into_inner);
        tags.get(number as usize).cloned().unwrap_or_default()
    }
}

impl Drop for Inner {
    /// Gives all memory back once the device is past it.
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // A device that failed has nothing left to wait for.
        let _ = self.gpu.synchronize();
        for shard in self.all_shards() {
            let mut heap = shard.heap();
            heap.entered.leave_all();
            for region in heap.regions() {
                match region.source {
                    Source::View => {
                        self.gpu.unmap(region.base, region.bytes / CHUNK);
                        self.gpu.unreserve(region.base, region.bytes);
                    }
                    Source::Segment { base, .. } => {
                        self.gpu.free_segment(base, shard.stream.handle);
                    }
                    Source::Virtual => {}
                }
            }
            for region in heap.regions().filter(|region| region.source == Source::Virtual) {
                for (addr, handle) in heap.region_chunks(region) {
                    self.gpu.unmap(addr, 1);
                    self.gpu.release(handle);
                }
                self.gpu.unreserve(region.base, region.bytes);
            }
        }
        for handle in lock(&self.idle_chunks).drain(..) {
            self.gpu.release(handle);
        }
        if self.gpu.backing == Backing::DriverPool {
            // Frees of the driver's pool are over at a synchronisation.
            let _ = self.gpu.synchronize();
        }
        // Threads remember heaps; those must not keep the device.
        self.all_streams().iter().for_each(|stream| stream.forget_events());
    }
}
