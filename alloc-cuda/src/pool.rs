//! The pool of a device: which heap serves a request, and what is done when none can.
//!
//! Invariants: a heap's lock is never held across a call of the driver; of two heaps only one is
//! locked at a time; memory goes to another stream only when it is complete or ordered before that
//! stream's future work, and is unmapped only when it is complete.

use crate::block::{BlockId, State};
use crate::capture::Captures;
use crate::chunk_map::ChunkMap;
use crate::driver::{Driver, Error, Stream};
use crate::fault::{self, planted};
use crate::gpu::{Backing, Gpu, lock};
use crate::heap::{CHUNK, Growth, Heap, Kind, Need, Run, Source, rounded};
use crate::heat::Heat;
use crate::history::History;
use crate::oom::{AllocError, FreeError, Holder, OutOfMemory, PendingOn};
use crate::stream::{StreamState, thread_number};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Frees of a heap between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// Allocations of a heap between two looks at its pending blocks.
const SETTLE_EVERY: u64 = 32;
/// An event is recorded for so many pending blocks together, or for so many bytes.
const CLOSE_BLOCKS: u32 = 16;
const CLOSE_BYTES: u64 = 16 << 20;
/// The least time between two looks for cold memory, milliseconds.
const POLL_MS: u64 = 250;
/// The largest request: more than any device has.
const BYTES_MAX: u64 = 1 << 44;

/// The pool's room beyond its peak: in these parts of the peak, at first and at most.
const SLACK_PARTS: u64 = 2048;
const SLACK_FIRST: u64 = 16;
const SLACK_MOST: u64 = 256;
/// Room that a pool of any size may have: streams with little memory keep their own.
const ROOM: u64 = 8 * CHUNK;

/// What to do when another stream has free memory that is not complete yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// Take more memory from the driver while the pool is within its usual size; wait beyond it.
    #[default]
    Grow,
    /// Insert a wait whenever that saves memory.
    Wait,
    /// Never make a stream wait.
    Complete,
}

/// Asked when memory has run out: frees what it can and says whether to try again.
pub type OnOutOfMemory = dyn Fn(u64) -> bool + Send + Sync;

/// The time of a pool, milliseconds.
#[derive(Clone, Debug)]
enum Clock {
    Real,
    Set(Arc<AtomicU64>),
}

impl Clock {
    fn now_ms(&self) -> u64 {
        match self {
            Self::Real => coarse_ms(),
            Self::Set(ms) => ms.load(Relaxed),
        }
    }
}

/// The system's monotonic time, as of its last tick: that costs no more than a load.
fn coarse_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// How a pool is made.
pub struct PoolBuilder {
    ordinal: i32,
    backing: Option<Backing>,
    pub(crate) options: Options,
    clock: Clock,
    callback: Option<Box<OnOutOfMemory>>,
    background: bool,
}

/// What can be chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) limit_percent: Option<u64>,
    pub(crate) hot_window_ms: u64,
    pub(crate) decay_ms: Option<u64>,
    pub(crate) wait_ms: Option<u64>,
    pub(crate) reuse: Reuse,
    pub(crate) pressure_percent: u64,
    pub(crate) history: usize,
}

impl fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl PoolBuilder {
    /// A pool for the device of this number.
    pub fn new(ordinal: i32) -> Self {
        Self {
            ordinal,
            backing: None,
            options: Options {
                limit_bytes: None,
                limit_percent: None,
                hot_window_ms: 5000,
                decay_ms: Some(2000),
                wait_ms: Some(5000),
                reuse: Reuse::Grow,
                pressure_percent: 2,
                history: 0,
            },
            clock: Clock::Real,
            callback: None,
            background: false,
        }
    }

    /// Takes this backing, or the next simpler one that the device has.
    #[must_use]
    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = Some(backing);
        self
    }

    /// The most that the pool may have.
    #[must_use]
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.options.limit_bytes = Some(bytes);
        self
    }

    /// The most that the pool may have, as a part of the device.
    #[must_use]
    pub fn limit_percent(mut self, percent: u64) -> Self {
        self.options.limit_percent = Some(percent);
        self
    }

    /// Memory in use at one time within this window is kept.
    #[must_use]
    pub fn hot_window_ms(mut self, ms: u64) -> Self {
        self.options.hot_window_ms = ms;
        self
    }

    /// Over how long cold memory goes back; `None`: never.
    #[must_use]
    pub fn decay_ms(mut self, ms: Option<u64>) -> Self {
        self.options.decay_ms = ms;
        self
    }

    /// How long an allocation that finds no memory waits for pending memory. `None` switches that
    /// off: such a wait can deadlock with collectives.
    #[must_use]
    pub fn wait_ms(mut self, ms: Option<u64>) -> Self {
        self.options.wait_ms = ms;
        self
    }

    /// What to do when another stream has free memory that is not complete yet.
    #[must_use]
    pub fn reuse(mut self, reuse: Reuse) -> Self {
        self.options.reuse = reuse;
        self
    }

    /// Gives free memory back at once while less than this part of the device is free.
    #[must_use]
    pub fn pressure_percent(mut self, percent: u64) -> Self {
        self.options.pressure_percent = percent;
        self
    }

    /// Keeps the last `entries` allocations and frees for the snapshot.
    #[must_use]
    pub fn history(mut self, entries: usize) -> Self {
        self.options.history = entries;
        self
    }

    /// Gives cold memory back from a thread of the pool. Else that happens at later calls and at
    /// [`Pool::poll`].
    #[must_use]
    pub fn background(mut self, yes: bool) -> Self {
        self.background = yes;
        self
    }

    /// Is asked when memory has run out, with the bytes asked for. It may free blocks of the pool.
    #[must_use]
    pub fn on_out_of_memory(
        mut self,
        callback: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.callback = Some(Box::new(callback));
        self
    }

    /// Takes the time from a counter of milliseconds, for tests.
    #[must_use]
    pub fn clock_ms(mut self, ms: Arc<AtomicU64>) -> Self {
        self.clock = Clock::Set(ms);
        self
    }

    /// The pool, on the system's driver.
    ///
    /// # Errors
    /// There is no driver, or not this device.
    pub fn build(self) -> Result<Pool, Error> {
        self.build_on(Arc::new(Driver::load()?))
    }

    /// The pool, on a driver that is loaded.
    ///
    /// # Errors
    /// There is no such device.
    pub fn build_on(self, driver: Arc<Driver>) -> Result<Pool, Error> {
        let gpu = Arc::new(Gpu::new(driver, self.ordinal, self.backing)?);
        let options = self.options;
        let percent = options.limit_percent.map(|percent| gpu.total_bytes / 100 * percent);
        let limit = match (options.limit_bytes, percent) {
            (Some(bytes), Some(other)) => Some(bytes.min(other)),
            (bytes, other) => bytes.or(other),
        };
        let inner = Arc::new(Inner {
            number: AtomicU64::new(next_number()),
            gpu,
            map: ChunkMap::new(),
            streams: RwLock::new(Streams::default()),
            shards: RwLock::new(Shards::default()),
            limit_bytes: AtomicU64::new(limit.unwrap_or(u64::MAX)),
            wait_ms: AtomicU64::new(options.wait_ms.unwrap_or(0)),
            heat: Mutex::new(Heat::new(options.hot_window_ms, options.decay_ms)),
            clock: self.clock,
            options,
            callback: self.callback,
            reserved: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            slack_parts: AtomicU64::new(SLACK_FIRST),
            idle_chunks: Mutex::new(Vec::new()),
            last_poll_ms: AtomicU64::new(0),
            polling: AtomicBool::new(false),
            captures: Captures::default(),
            counts: PoolCounts::default(),
            history: History::new(options.history),
            tags: RwLock::new(vec!["untagged".to_owned()]),
        });
        if self.background {
            crate::background::start(&inner);
        }
        Ok(Pool { inner })
    }
}

/// A number that no pool had before.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

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

/// The heap of one stream.
pub(crate) struct Shard {
    /// 0 of memory that everyone uses; else the number of a private pool.
    pub(crate) pool: u64,
    pub(crate) stream: Arc<StreamState>,
    heap: Mutex<Heap>,
    /// Bytes active and pending.
    in_use: AtomicU64,
    pending: AtomicU64,
    mapped: AtomicU64,
}

/// A heap that this thread has locked.
pub(crate) struct HeapGuard<'a> {
    heap: std::sync::MutexGuard<'a, Heap>,
    _locked: fault::Locked,
}

impl std::ops::Deref for HeapGuard<'_> {
    type Target = Heap;

    #[inline(always)]
    fn deref(&self) -> &Heap {
        &self.heap
    }
}

impl std::ops::DerefMut for HeapGuard<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Heap {
        &mut self.heap
    }
}

impl Shard {
    #[inline]
    pub(crate) fn heap(&self) -> HeapGuard<'_> {
        HeapGuard { heap: lock(&self.heap), _locked: fault::Locked::new() }
    }

    /// Publishes the books of a locked heap.
    #[inline]
    fn publish(&self, heap: &Heap) {
        self.in_use.store(heap.books.active + heap.books.pending, Relaxed);
    }

    fn publish_all(&self, heap: &Heap) {
        self.publish(heap);
        self.pending.store(heap.books.pending, Relaxed);
        self.mapped.store(heap.books.mapped(), Relaxed);
    }
}

#[derive(Default)]
struct Streams {
    list: Vec<Arc<StreamState>>,
    by_key: HashMap<(usize, u64), u32>,
}

#[derive(Default)]
struct Shards {
    list: Vec<Arc<Shard>>,
    by_key: HashMap<(u64, u32), Arc<Shard>>,
}

/// A pool.
pub(crate) struct Inner {
    /// Tells threads whether the heaps that they remember are still those of their streams.
    number: AtomicU64,
    pub(crate) gpu: Arc<Gpu>,
    map: ChunkMap,
    streams: RwLock<Streams>,
    shards: RwLock<Shards>,
    pub(crate) limit_bytes: AtomicU64,
    pub(crate) wait_ms: AtomicU64,
    heat: Mutex<Heat>,
    clock: Clock,
    pub(crate) options: Options,
    callback: Option<Box<OnOutOfMemory>>,
    /// Physical bytes.
    pub(crate) reserved: AtomicU64,
    pub(crate) reserved_peak: AtomicU64,
    /// Room beyond the peak, in parts of it.
    slack_parts: AtomicU64,
    /// Chunks that are mapped nowhere.
    pub(crate) idle_chunks: Mutex<Vec<u64>>,
    last_poll_ms: AtomicU64,
    polling: AtomicBool,
    pub(crate) captures: Captures,
    pub(crate) counts: PoolCounts,
    pub(crate) history: History,
    tags: RwLock<Vec<String>>,
}

thread_local! {
    static TAG: Cell<u32> = const { Cell::new(0) };
    /// The heaps that this thread used last: pool, stream, heap.
    static LAST: RefCell<[(u64, usize, Option<Arc<Shard>>); 4]> =
        const { RefCell::new([(0, 0, None), (0, 0, None), (0, 0, None), (0, 0, None)]) };
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
        self.inner.poll_streams(true);
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

    // ---- streams and heaps --------------------------------------------------------------------

    /// The key of a stream: the legacy default stream has two names, and each thread its own
    /// default stream.
    fn key(stream: Stream) -> (usize, u64) {
        match stream {
            Stream::NULL => (Stream::LEGACY.0, 0),
            Stream::PER_THREAD => (stream.0, thread_number()),
            other => (other.0, 0),
        }
    }

    pub(crate) fn stream(&self, handle: Stream) -> Arc<StreamState> {
        let key = Self::key(handle);
        {
            let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(&index) = streams.by_key.get(&key) {
                return Arc::clone(&streams.list[index as usize]);
            }
        }
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&index) = streams.by_key.get(&key) {
            return Arc::clone(&streams.list[index as usize]);
        }
        let index = streams.list.len() as u32;
        let state = Arc::new(StreamState::new(index, handle, key.1));
        streams.list.push(Arc::clone(&state));
        streams.by_key.insert(key, index);
        state
    }

    pub(crate) fn all_streams(&self) -> Vec<Arc<StreamState>> {
        self.streams.read().unwrap_or_else(PoisonError::into_inner).list.clone()
    }

    pub(crate) fn stream_at(&self, index: u32) -> Arc<StreamState> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&streams.list[index as usize])
    }

    pub(crate) fn shard(&self, pool: u64, stream: Stream) -> Arc<Shard> {
        let state = self.stream(stream);
        let key = (pool, state.index);
        {
            let shards = self.shards.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(shard) = shards.by_key.get(&key) {
                return Arc::clone(shard);
            }
        }
        let mut shards = self.shards.write().unwrap_or_else(PoisonError::into_inner);
        let shards = &mut *shards;
        let shard = shards.by_key.entry(key).or_insert_with(|| {
            let shard = Arc::new(Shard {
                pool,
                stream: state,
                heap: Mutex::new(Heap::new()),
                in_use: AtomicU64::new(0),
                pending: AtomicU64::new(0),
                mapped: AtomicU64::new(0),
            });
            shards.list.push(Arc::clone(&shard));
            shard
        });
        Arc::clone(shard)
    }

    pub(crate) fn all_shards(&self) -> Vec<Arc<Shard>> {
        self.shards.read().unwrap_or_else(PoisonError::into_inner).list.clone()
    }

    /// Bytes active and pending, of all heaps.
    pub(crate) fn in_use(&self) -> u64 {
        let shards = self.shards.read().unwrap_or_else(PoisonError::into_inner);
        shards.list.iter().map(|shard| shard.in_use.load(Relaxed)).sum()
    }

    fn forget_stream(&self, stream: Stream) -> Result<(), Error> {
        let state = self.stream(stream);
        // Its last epoch is closed while its handle is still its own.
        state.retire(&self.gpu)?;
        self.number.store(next_number(), Relaxed);
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.by_key.remove(&Self::key(stream));
        Ok(())
    }

    // ---- allocation ---------------------------------------------------------------------------

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
    fn finish(&self, shard: &Shard, heap: &mut Heap, id: BlockId, tag: u32) -> u64 {
        heap.blocks[id as usize].tag = tag;
        shard.publish(heap);
        let block = heap.block(id);
        if self.history.is_on() {
            self.history.alloc(
                self.now_ms(),
                block.addr,
                block.requested,
                shard.stream.handle,
                tag,
            );
        }
        block.addr
    }

    #[cold]
    fn alloc_slow(
        &self,
        shard: &Arc<Shard>,
        size: u64,
        bytes: u64,
        tag: u32,
    ) -> Result<u64, AllocError> {
        let _current = self.gpu.enter()?;
        let _relaxed = self.captures.any().then(|| self.gpu.relax());
        let ask = Ask { shard, size, bytes, tag };
        if let Some(ptr) = self.from_own(&ask) {
            return Ok(ptr);
        }
        self.look_for_cold();
        let growth = shard.heap().growth_bytes(size).unwrap_or(size.next_multiple_of(CHUNK));
        if !self.is_cheap(growth, size) {
            if let Some(ptr) = self.without_growth(&ask)? {
                return Ok(ptr);
            }
            self.collect(&ask, growth);
        }
        match self.grow(&ask) {
            Ok(ptr) => return Ok(ptr),
            Err(Failure::Driver(error)) => return Err(AllocError::Driver(error)),
            Err(Failure::NoMemory) => {}
        }
        self.out_of_memory(&ask)
    }

    /// The ways that cost less than growth beyond the pool's usual size, the cheapest first.
    fn without_growth(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
        if let Some(ptr) = self.from_others(ask, self.options.reuse == Reuse::Wait)? {
            return Ok(Some(ptr));
        }
        if let Some(ptr) = self.stitch(ask)? {
            return Ok(Some(ptr));
        }
        if self.options.reuse == Reuse::Complete {
            return Ok(None);
        }
        if let Some(ptr) = self.from_pending(ask)? {
            return Ok(Some(ptr));
        }
        self.from_others(ask, true)
    }

    /// Whether the pool stays within its usual size when it grows: then that is better than to
    /// make streams wait, or to stitch.
    fn is_cheap(&self, growth: u64, size: u64) -> bool {
        let in_use = self.in_use() + size;
        let peak = lock(&self.heat).peak(in_use);
        let idle = lock(&self.idle_chunks).len() as u64 * CHUNK;
        let reserved = self.reserved.load(Relaxed) - idle;
        reserved + growth <= peak + self.slack(peak) + ROOM
    }

    /// How much more than the peak of its use the pool may have.
    fn slack(&self, peak: u64) -> u64 {
        peak / SLACK_PARTS * self.slack_parts.load(Relaxed)
    }

    /// Notes that memory was rearranged. A program that asks for the same sizes again is served
    /// without, after its first rounds; one that does not is better off with more room.
    fn rearranged(&self) {
        let more = |parts: u64| (parts < SLACK_MOST).then_some(parts + 1);
        // At its most it stays.
        let _ = self.slack_parts.fetch_update(Relaxed, Relaxed, more);
    }

    /// From the heap's own memory: what waits for other streams and is over, what is ordered
    /// anyway, and what was stitched before.
    fn from_own(&self, ask: &Ask<'_>) -> Option<u64> {
        let Ask { shard, size, bytes, tag } = *ask;
        if shard.pending.load(Relaxed) > 0 {
            // Events cost time: often enough to find what is over, no more.
            let look = {
                let mut heap = shard.heap();
                let due = heap.counts.allocs - heap.settled_at >= SETTLE_EVERY / 2;
                if due {
                    heap.settled_at = heap.counts.allocs;
                }
                due
            };
            if look && !shard.stream.is_capturing() {
                self.poll_streams(false);
            }
            self.settle(shard);
            let mut heap = shard.heap();
            if let Some(id) = heap.take(size, bytes, shard.stream.index) {
                return Some(self.finish(shard, &mut heap, id, tag));
            }
            drop(heap);
            if let Some(ptr) = self.retake(shard, ask) {
                return Some(ptr);
            }
        }
        let mut heap = shard.heap();
        let id = heap.take_view(size, bytes, shard.stream.index)?;
        Some(self.finish(shard, &mut heap, id, tag))
    }

    /// Frees the pending blocks of a heap that are complete.
    fn settle(&self, shard: &Shard) -> u64 {
        let streams = self.all_streams();
        let mut heap = shard.heap();
        let settled = heap.settle_pending(shard.stream.index, |need| {
            planted(fault::EARLY_REUSE) || streams[need.stream as usize].is_done(need.epoch)
        });
        shard.publish_all(&heap);
        settled
    }

    /// A pending block of `home` that is complete, or ordered before the asking stream's work.
    fn retake(&self, home: &Arc<Shard>, ask: &Ask<'_>) -> Option<u64> {
        let streams = self.all_streams();
        let user = &ask.shard.stream;
        let mut heap = home.heap();
        let at = {
            let heap = &*heap;
            let ready = heap.pending.iter().enumerate().filter(|(_, entry)| {
                heap.serves(entry.block, ask.size)
                    && entry
                        .needs
                        .iter()
                        .all(|need| user.is_after(&streams[need.stream as usize], need.epoch))
            });
            ready.min_by_key(|(_, entry)| heap.block(entry.block).bytes).map(|(at, _)| at)
        }?;
        let id = heap.retake(at, ask.size, ask.bytes, user.index)?;
        if user.index != home.stream.index {
            heap.counts.cross_stream += 1;
        }
        home.publish_all(&heap);
        Some(self.finish(home, &mut heap, id, ask.tag))
    }

    /// From pending blocks of any heap: the stream waits for those that still use one.
    fn from_pending(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
        let user = &ask.shard.stream;
        if user.is_capturing() {
            return Ok(None);
        }
        let mut homes = self.all_shards();
        homes.retain(|home| home.pool == ask.shard.pool && home.pending.load(Relaxed) > 0);
        homes.sort_by_key(|home| !Arc::ptr_eq(home, ask.shard));
        for home in &homes {
            let needs = {
                let heap = home.heap();
                let fits = heap.pending.iter().filter(|entry| heap.serves(entry.block, ask.size));
                let best = fits.min_by_key(|entry| heap.block(entry.block).bytes);
                best.map(|entry| entry.needs.clone())
            };
            let Some(needs) = needs else { continue };
            self.close_all(&needs);
            let mut ordered = true;
            for need in &needs {
                ordered &= user.wait_for(&self.gpu, &self.stream_at(need.stream), need.epoch)?;
            }
            if ordered && let Some(ptr) = self.retake(home, ask) {
                self.counts.waits.fetch_add(1, Relaxed);
                return Ok(Some(ptr));
            }
        }
        Ok(None)
    }

    /// From the free memory of other streams: what is complete or ordered before anyway, and with
    /// `wait` also what is not.
    fn from_others(&self, ask: &Ask<'_>, wait: bool) -> Result<Option<u64>, AllocError> {
        let user = &ask.shard.stream;
        if ask.shard.pool != 0 || user.is_capturing() {
            return Ok(None);
        }
        let others: Vec<_> = {
            let all = self.all_shards();
            all.into_iter().filter(|s| s.pool == 0 && !Arc::ptr_eq(s, ask.shard)).collect()
        };
        // What was freed in this stream's order comes first: it costs nothing.
        for home in &others {
            if home.pending.load(Relaxed) > 0
                && let Some(ptr) = self.retake(home, ask)
            {
                return Ok(Some(ptr));
            }
        }
        let mut found: Vec<(u64, u64, &Arc<Shard>)> = Vec::new();
        for home in &others {
            if home.mapped.load(Relaxed) < ask.size {
                continue;
            }
            let heap = home.heap();
            if let Some((id, stamp)) = heap.best_free(ask.size) {
                found.push((heap.block(id).bytes, stamp, home));
            }
        }
        found.sort_unstable_by_key(|&(bytes, ..)| bytes);
        for &(_, stamp, home) in &found {
            if user.is_after(&home.stream, stamp) || planted(fault::NO_EPOCH) {
                if let Some(ptr) = self.take_from(home, ask, stamp) {
                    return Ok(Some(ptr));
                }
            }
        }
        for &(_, stamp, home) in &found {
            home.stream.close(&self.gpu, stamp)?;
            if wait && self.options.reuse != Reuse::Complete {
                if user.wait_for(&self.gpu, &home.stream, stamp)?
                    && let Some(ptr) = self.take_from(home, ask, stamp)
                {
                    self.counts.waits.fetch_add(1, Relaxed);
                    return Ok(Some(ptr));
                }
            } else if home.stream.query(&self.gpu, stamp)?
                && let Some(ptr) = self.take_from(home, ask, stamp)
            {
                self.counts.ready_steals.fetch_add(1, Relaxed);
                return Ok(Some(ptr));
            }
        }
        Ok(None)
    }

    /// Takes the best block of another heap, if its epoch is still `stamp` or before.
    fn take_from(&self, home: &Arc<Shard>, ask: &Ask<'_>, stamp: u64) -> Option<u64> {
        let user = &ask.shard.stream;
        let mut heap = home.heap();
        let (_, now) = heap.best_free(ask.size)?;
        if now > stamp && !user.is_after(&home.stream, now) && !planted(fault::NO_EPOCH) {
            return None;
        }
        let id = heap.take(ask.size, ask.bytes, user.index)?;
        heap.counts.cross_stream += 1;
        home.publish_all(&heap);
        Some(self.finish(home, &mut heap, id, ask.tag))
    }

    // ---- growing ------------------------------------------------------------------------------

    /// Counts more physical memory, unless that is beyond the limit.
    fn charge(&self, bytes: u64) -> bool {
        let limit = self.limit_bytes.load(Relaxed);
        let add = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= limit);
        match self.reserved.fetch_update(Relaxed, Relaxed, add) {
            Ok(before) => {
                self.reserved_peak.fetch_max(before + bytes, Relaxed);
                true
            }
            Err(_) => false,
        }
    }

    fn discharge(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Relaxed);
    }

    fn grow(&self, ask: &Ask<'_>) -> Result<u64, Failure> {
        if self.gpu.backing != Backing::Virtual {
            return self.grow_segment(ask);
        }
        // Another thread may take what came; so it is tried again.
        for _ in 0..16 {
            if ask.shard.heap().growth_bytes(ask.size).is_none() {
                self.reserve_region(ask.shard, ask.size)?;
            }
            self.grow_by(ask.shard, |heap| heap.claim_growth(ask.size))?;
            let mut heap = ask.shard.heap();
            if let Some(id) = heap.take(ask.size, ask.bytes, ask.shard.stream.index) {
                ask.shard.publish_all(&heap);
                return Ok(self.finish(ask.shard, &mut heap, id, ask.tag));
            }
        }
        Err(Failure::NoMemory)
    }

    /// Maps memory to the addresses that `claim` chooses.
    fn grow_by(
        &self,
        shard: &Arc<Shard>,
        claim: impl Fn(&mut Heap) -> Option<Growth>,
    ) -> Result<(), Failure> {
        let growth = claim(&mut shard.heap()).ok_or(Failure::NoMemory)?;
        let chunks = (growth.run.bytes / CHUNK) as usize;
        let undo = |handles: Vec<u64>, charged: usize, failure| {
            // What came stays for a smaller request, or goes back in the next look.
            let spare = charged - handles.len();
            self.discharge(spare as u64 * CHUNK);
            lock(&self.idle_chunks).extend(handles);
            shard.heap().not_grown(growth);
            Err(failure)
        };
        let mut handles = {
            let mut idle = lock(&self.idle_chunks);
            let from = idle.len() - idle.len().min(chunks);
            idle.split_off(from)
        };
        let fresh = chunks - handles.len();
        if !self.charge(fresh as u64 * CHUNK) {
            let none = handles.len();
            return undo(handles, none, Failure::NoMemory);
        }
        while handles.len() < chunks {
            match self.gpu.create() {
                Ok(handle) => handles.push(handle),
                Err(error) => return undo(handles, chunks, error.into()),
            }
        }
        if let Err(error) = self.gpu.map(growth.run.addr, &handles) {
            return undo(handles, chunks, error.into());
        }
        self.counts.grown.fetch_add(1, Relaxed);
        self.counts.grown_bytes.fetch_add(growth.run.bytes, Relaxed);
        self.history.memory(self.now_ms(), "segment_map", growth.run, shard.stream.handle);
        let mut heap = shard.heap();
        heap.now_ms = self.now_ms();
        heap.grown(growth, &handles);
        shard.publish_all(&heap);
        Ok(())
    }

    fn reserve_region(&self, shard: &Arc<Shard>, bytes: u64) -> Result<(), Failure> {
        let kind = Kind::of(bytes);
        let shards = self.shards.read().unwrap_or_else(PoisonError::into_inner).list.len() as u64;
        let total = self.gpu.total_bytes;
        let usual = match kind {
            Kind::Small => total / 16,
            Kind::Large if shards <= 32 => total,
            Kind::Large => total / 8,
        };
        let span = usual.max(bytes).max(CHUNK).next_multiple_of(CHUNK);
        let base = self.gpu.reserve(span)?;
        let mut heap = shard.heap();
        let (region, _) = heap.add_region(base, span, kind, Source::Virtual, 0);
        if self.map.set(base, span, Arc::as_ptr(shard) as usize, region) {
            return Ok(());
        }
        // Addresses that the map cannot hold are as good as none.
        heap.remove_region(region);
        drop(heap);
        self.gpu.unreserve(base, span);
        Err(Failure::NoMemory)
    }

    fn grow_segment(&self, ask: &Ask<'_>) -> Result<u64, Failure> {
        let Ask { shard, size, bytes, tag } = *ask;
        let usual = match Kind::of(size) {
            Kind::Small => CHUNK,
            // The driver's pool has pieces of 32 MiB itself.
            Kind::Large if self.gpu.backing == Backing::DriverPool => {
                size.next_multiple_of(16 * CHUNK)
            }
            Kind::Large if size >= 16 << 20 => size,
            Kind::Large => {
                let share = self.reserved.load(Relaxed) / 32;
                size.max(share.clamp(4 * CHUNK, 16 * CHUNK))
            }
        };
        let mut span = usual.next_multiple_of(CHUNK);
        if !self.charge(span) {
            // A smaller segment may still be within the limit.
            span = size.next_multiple_of(CHUNK);
            if !self.charge(span) {
                return Err(Failure::NoMemory);
            }
        }
        let stream = &shard.stream;
        let base = match self.gpu.alloc_segment(span, stream.handle) {
            Ok(base) => base,
            Err(error) => {
                self.discharge(span);
                return Err(error.into());
            }
        };
        let (mut base, mut first, mut whole) = (base, base, span);
        if base % CHUNK != 0 {
            // The map of addresses goes by chunks: room to align.
            self.gpu.free_segment(base, stream.handle);
            if !self.charge(CHUNK) {
                self.discharge(span);
                return Err(Failure::NoMemory);
            }
            whole = span + CHUNK;
            base = match self.gpu.alloc_segment(whole, stream.handle) {
                Ok(base) => base,
                Err(error) => {
                    self.discharge(whole);
                    return Err(error.into());
                }
            };
            first = base.next_multiple_of(CHUNK);
        }
        self.counts.grown.fetch_add(1, Relaxed);
        self.counts.grown_bytes.fetch_add(whole, Relaxed);
        let run = Run { addr: first, bytes: span };
        self.history.memory(self.now_ms(), "segment_alloc", run, stream.handle);
        // A block of the driver's pool is there in the order of the stream only.
        let stamp = if self.gpu.backing == Backing::DriverPool { stream.stamp() } else { 0 };
        let mut heap = shard.heap();
        heap.now_ms = self.now_ms();
        let source = Source::Segment { base, bytes: whole };
        let (region, block) = heap.add_region(first, span, Kind::of(size), source, stamp);
        if !self.map.set(first, span, Arc::as_ptr(shard) as usize, region) {
            heap.remove_region(region);
            drop(heap);
            self.gpu.free_segment(base, stream.handle);
            self.discharge(whole);
            return Err(Failure::NoMemory);
        }
        heap.books.waste += whole - span;
        let id = heap.take_exactly(block, size, bytes, stream.index);
        shard.publish_all(&heap);
        Ok(self.finish(shard, &mut heap, id, tag))
    }

    /// Joins free chunks at other addresses to one block; grows by what they lack.
    fn stitch(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
        let Ask { shard, size, bytes, tag } = *ask;
        if self.gpu.backing != Backing::Virtual || Kind::of(size) == Kind::Small {
            return Ok(None);
        }
        let (there, whole_growth) = {
            let heap = shard.heap();
            (heap.stitchable(), heap.growth_bytes(size).unwrap_or(u64::MAX))
        };
        if there < size {
            // The last part may end within a chunk, the first begin within one.
            let lacks = (size - there).next_multiple_of(CHUNK) + CHUNK;
            let small_gain = lacks + 2 * CHUNK > whole_growth;
            if small_gain || !self.is_cheap(lacks, size) {
                return Ok(None);
            }
            if self.grow_by(shard, |heap| heap.claim_chunks(lacks)).is_err() {
                return Ok(None);
            }
        }
        let mut heap = shard.heap();
        if let Some(id) = heap.take(size, bytes, shard.stream.index) {
            return Ok(Some(self.finish(shard, &mut heap, id, tag)));
        }
        let old = heap.unstitch_old(|stamp| shard.stream.is_done(stamp));
        let stitch = heap.claim_stitch(size);
        drop(heap);
        self.rearranged();
        self.unmap_views(&old);
        let Some(stitch) = stitch else { return Ok(None) };
        let span = stitch.handles.len() as u64 * CHUNK;
        let made = self.gpu.reserve(span).and_then(|base| {
            self.gpu
                .map(base, &stitch.handles)
                .map(|()| base)
                .inspect_err(|_| self.gpu.unreserve(base, span))
        });
        let mut heap = shard.heap();
        let base = match made {
            Ok(base) => base,
            Err(error) => {
                heap.not_stitched(stitch);
                // Without room for it the ladder goes on.
                return if error.is_out_of_memory() { Ok(None) } else { Err(error.into()) };
            }
        };
        let id = heap.stitched(stitch, base, bytes, shard.stream.index);
        let region = heap.block(id).region;
        if !self.map.set(base, span, Arc::as_ptr(shard) as usize, region) {
            heap.untake(id);
            return Ok(None);
        }
        shard.publish_all(&heap);
        Ok(Some(self.finish(shard, &mut heap, id, tag)))
    }

    /// Collects chunks that others do not need, for the growth of one heap.
    fn collect(&self, ask: &Ask<'_>, growth: u64) {
        if self.gpu.backing == Backing::Virtual {
            let idle = lock(&self.idle_chunks).len() as u64 * CHUNK;
            if idle < growth && ask.shard.pool == 0 {
                self.poll_streams(true);
                let collected = self.unmap_chunks(growth - idle, true, |shard| {
                    let stream = Arc::clone(&shard.stream);
                    Box::new(move |stamp, _| stream.is_done(stamp))
                });
                if collected > 0 {
                    self.rearranged();
                }
            }
        } else if ask.shard.pool == 0 {
            self.poll_streams(true);
            self.free_segments(growth, |shard| {
                let stream = Arc::clone(&shard.stream);
                Box::new(move |stamp, _| stream.is_done(stamp))
            });
        }
    }

    // ---- giving back --------------------------------------------------------------------------

    /// Unmaps up to `bytes` of free chunks; they stay with the pool or go to the driver.
    fn unmap_chunks(
        &self,
        bytes: u64,
        keep: bool,
        rule: impl Fn(&Shard) -> Box<dyn Fn(u64, u64) -> bool>,
    ) -> u64 {
        let mut gone = 0;
        for shard in self.all_shards() {
            if gone >= bytes {
                break;
            }
            if shard.pool != 0 && !self.captures.is_over(shard.pool) {
                continue;
            }
            let may_go = rule(&shard);
            let runs = shard.heap().claim_cold(bytes - gone, |stamp, used| {
                may_go(stamp, used) || planted(fault::EARLY_UNMAP)
            });
            for growth in runs {
                let handles = shard.heap().handles(&growth);
                self.gpu.unmap(growth.run.addr, handles.len() as u64);
                self.history.memory(
                    self.now_ms(),
                    "segment_unmap",
                    growth.run,
                    shard.stream.handle,
                );
                gone += growth.run.bytes;
                if keep {
                    lock(&self.idle_chunks).extend(handles);
                } else {
                    handles.into_iter().for_each(|handle| self.gpu.release(handle));
                    self.discharge(growth.run.bytes);
                    self.counts.trimmed_bytes.fetch_add(growth.run.bytes, Relaxed);
                }
                let mut heap = shard.heap();
                heap.unmapped(growth);
                shard.publish_all(&heap);
            }
        }
        gone
    }

    fn free_segments(
        &self,
        bytes: u64,
        rule: impl Fn(&Shard) -> Box<dyn Fn(u64, u64) -> bool>,
    ) -> u64 {
        let mut gone = 0;
        for shard in self.all_shards() {
            if gone >= bytes {
                break;
            }
            if shard.pool != 0 && !self.captures.is_over(shard.pool) {
                continue;
            }
            let may_go = rule(&shard);
            let runs = {
                let mut heap = shard.heap();
                let runs = heap.claim_segments(bytes - gone, |stamp, used| {
                    may_go(stamp, used) || planted(fault::EARLY_UNMAP)
                });
                for run in &runs {
                    let first = run.addr.next_multiple_of(CHUNK);
                    self.map.set(first, run.end() / CHUNK * CHUNK - first, 0, 0);
                }
                shard.publish_all(&heap);
                runs
            };
            for run in runs {
                self.gpu.free_segment(run.addr, shard.stream.handle);
                self.history.memory(self.now_ms(), "segment_free", run, shard.stream.handle);
                self.discharge(run.bytes);
                self.counts.trimmed_bytes.fetch_add(run.bytes, Relaxed);
                gone += run.bytes;
            }
        }
        gone
    }

    /// Takes stitched blocks apart that were not used since `used_ms`.
    fn unstitch(&self, used_ms: u64) {
        for shard in self.all_shards() {
            if shard.heap().live_views() == 0 {
                continue;
            }
            let stream = Arc::clone(&shard.stream);
            let gone = shard.heap().unstitch(used_ms, |stamp| stream.is_done(stamp));
            self.unmap_views(&gone);
        }
    }

    /// Gives the addresses of stitched blocks back that were taken apart.
    fn unmap_views(&self, views: &[Run]) {
        for run in views {
            self.map.set(run.addr, run.bytes, 0, 0);
            self.gpu.unmap(run.addr, run.bytes / CHUNK);
            self.gpu.unreserve(run.addr, run.bytes);
        }
    }

    /// Gives up to `bytes` of complete free memory to the driver: only what was last used before
    /// `used_ms`, where that is given. Returns the bytes that went.
    pub(crate) fn give_back(&self, bytes: u64, used_ms: Option<u64>) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let Ok(_current) = self.gpu.enter() else { return 0 };
        let _relaxed = self.captures.any().then(|| self.gpu.relax());
        let before_ms = used_ms.unwrap_or(u64::MAX);
        let idle: Vec<u64> = std::mem::take(&mut *lock(&self.idle_chunks));
        let mut gone = idle.len() as u64 * CHUNK;
        idle.into_iter().for_each(|handle| self.gpu.release(handle));
        self.discharge(gone);
        let rule = |shard: &Shard| -> Box<dyn Fn(u64, u64) -> bool> {
            let stream = Arc::clone(&shard.stream);
            Box::new(move |stamp, used| used < before_ms && stream.is_done(stamp))
        };
        if self.gpu.backing == Backing::Virtual {
            self.unstitch(before_ms);
            // Whole chunks go, so somewhat more than asked for.
            gone += self.unmap_chunks(bytes.next_multiple_of(CHUNK), false, rule);
        } else {
            gone += self.free_segments(bytes, rule);
            self.gpu.trim_pool();
        }
        gone
    }

    /// Gives all complete free memory of some heaps to the driver.
    pub(crate) fn give_back_where(&self, which: impl Fn(&Shard) -> bool) {
        let Ok(_current) = self.gpu.enter() else { return };
        let rule = |shard: &Shard| -> Box<dyn Fn(u64, u64) -> bool> {
            let stream = Arc::clone(&shard.stream);
            let yes = which(shard);
            Box::new(move |stamp, _| yes && stream.is_done(stamp))
        };
        if self.gpu.backing == Backing::Virtual {
            self.unstitch(u64::MAX);
            self.unmap_chunks(u64::MAX >> 1, false, rule);
        } else {
            self.free_segments(u64::MAX >> 1, rule);
        }
    }

    /// Closes epochs where blocks wait for that, with `close`, and asks which are complete.
    pub(crate) fn poll_streams(&self, close: bool) {
        if self.captures.any() {
            return;
        }
        for stream in self.all_streams() {
            // A stream that fails says so to its own user; its memory stays where it is.
            let _ = stream.poll(&self.gpu);
            if close {
                let _ = stream.close_stamped(&self.gpu);
                let _ = stream.poll(&self.gpu);
            }
        }
        if !close {
            self.close_needed();
        }
    }

    /// Closes the epochs that pending blocks wait for.
    fn close_needed(&self) {
        let mut needed: Vec<u64> = Vec::new();
        for shard in self.all_shards() {
            let own = shard.stream.index;
            let heap = shard.heap();
            let needs = heap.pending.iter().flat_map(|entry| &entry.needs);
            for need in needs.filter(|need| need.stream != own) {
                let index = need.stream as usize;
                if needed.len() <= index {
                    needed.resize(index + 1, 0);
                }
                needed[index] = needed[index].max(need.epoch);
            }
        }
        for (stream, stamp) in self.all_streams().iter().zip(needed) {
            if stamp > 0 && !stream.is_done(stamp) {
                let _ = stream.close(&self.gpu, stamp);
            }
        }
    }

    fn look_for_cold(&self) {
        let now_ms = self.now_ms();
        if now_ms.saturating_sub(self.last_poll_ms.load(Relaxed)) >= POLL_MS {
            self.poll();
        }
    }

    /// Settles what is complete and gives back what is cold.
    pub(crate) fn poll(&self) {
        if self.captures.any() || self.polling.swap(true, Relaxed) {
            return;
        }
        let now_ms = self.now_ms();
        self.last_poll_ms.store(now_ms, Relaxed);
        if let Ok(_current) = self.gpu.enter() {
            self.poll_streams(true);
            self.cool(now_ms);
        }
        self.polling.store(false, Relaxed);
    }

    fn cool(&self, now_ms: u64) {
        let (mut most, mut in_use) = (0, 0);
        for shard in self.all_shards() {
            self.settle(&shard);
            let mut heap = shard.heap();
            heap.now_ms = now_ms;
            let used = heap.books.active + heap.books.pending;
            most += heap.recent_peak.max(used);
            in_use += used;
            heap.recent_peak = used;
        }
        let reserved = self.reserved.load(Relaxed);
        let (window_ms, decay_ms, peak) = {
            let mut heat = lock(&self.heat);
            let peak = heat.note(now_ms, most, in_use);
            (heat.window_ms, heat.decay_ms, peak)
        };
        if let Ok((free, total)) = self.gpu.mem_info() {
            let wanted = total / 100 * self.options.pressure_percent;
            if free < wanted && reserved > in_use {
                self.counts.pressure.fetch_add(1, Relaxed);
                self.give_back((wanted - free).min(reserved - in_use), None);
                return;
            }
        }
        let cold = reserved.saturating_sub(peak);
        // Its own slack is no reason to map and unmap all the time.
        if cold <= self.slack(peak) + ROOM && in_use > 0 {
            return;
        }
        let long_ago = window_ms + decay_ms.unwrap_or(0);
        let overdue = if in_use == 0 && now_ms >= long_ago { cold } else { 0 };
        let bytes = lock(&self.heat).budget(now_ms, cold, overdue);
        if bytes > 0
            && let Some(before_ms) = (now_ms + 1).checked_sub(window_ms)
        {
            self.give_back(bytes, Some(before_ms));
        }
    }

    // ---- out of memory ------------------------------------------------------------------------

    /// The ladder: what is complete, what is cold, what is pending, stitching, the callback.
    fn out_of_memory(&self, ask: &Ask<'_>) -> Result<u64, AllocError> {
        let capturing = ask.shard.stream.is_capturing();
        let mut waited = false;
        loop {
            if !capturing {
                self.poll_streams(true);
                self.all_shards().iter().for_each(|shard| {
                    self.settle(shard);
                });
            }
            if let Some(ptr) = self.once_more(ask, !capturing)? {
                return Ok(ptr);
            }
            self.give_back(u64::MAX >> 1, None);
            if let Some(ptr) = self.once_more(ask, !capturing)? {
                return Ok(ptr);
            }
            let wait_ms = self.wait_ms.load(Relaxed);
            if !waited && !capturing && wait_ms > 0 && self.wait_for_pending(wait_ms) {
                waited = true;
                continue;
            }
            let again = self.callback.as_ref().is_some_and(|callback| callback(ask.bytes));
            if !again {
                break;
            }
            if let Some(ptr) = self.once_more(ask, !capturing)? {
                return Ok(ptr);
            }
            waited = false;
        }
        self.counts.ooms.fetch_add(1, Relaxed);
        self.history.oom(self.now_ms(), ask.bytes, ask.shard.stream.handle);
        Err(AllocError::OutOfMemory(Box::new(self.report(ask))))
    }

    fn once_more(&self, ask: &Ask<'_>, others: bool) -> Result<Option<u64>, AllocError> {
        {
            let mut heap = ask.shard.heap();
            if let Some(id) = heap.take(ask.size, ask.bytes, ask.shard.stream.index) {
                return Ok(Some(self.finish(ask.shard, &mut heap, id, ask.tag)));
            }
        }
        if let Some(ptr) = self.from_own(ask) {
            return Ok(Some(ptr));
        }
        if others {
            let wait = self.options.reuse != Reuse::Complete;
            if let Some(ptr) = self.from_others(ask, wait)? {
                return Ok(Some(ptr));
            }
        }
        match self.grow(ask) {
            Ok(ptr) => Ok(Some(ptr)),
            Err(Failure::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Failure::NoMemory) => self.stitch(ask),
        }
    }

    /// Waits until a further epoch of any stream is complete; `false` if none is awaited or time is
    /// up.
    fn wait_for_pending(&self, wait_ms: u64) -> bool {
        let streams = self.all_streams();
        let awaited: Vec<_> =
            streams.iter().filter(|stream| stream.last_event().is_some()).collect();
        if awaited.is_empty() {
            return false;
        }
        self.counts.oom_waits.fetch_add(1, Relaxed);
        let end = Instant::now() + Duration::from_millis(wait_ms);
        let mut pause = Duration::from_micros(20);
        loop {
            let mut all = true;
            for stream in &awaited {
                if stream.poll(&self.gpu).is_err() {
                    return false;
                }
                all &= stream.last_event().is_none();
            }
            if all {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }

    fn report(&self, ask: &Ask<'_>) -> OutOfMemory {
        let (mut largest, mut free, mut active) = (0, 0, 0);
        let mut pending: HashMap<u32, u64> = HashMap::new();
        let mut holders: HashMap<(u32, u32), (u64, u64)> = HashMap::new();
        for shard in self.all_shards() {
            let heap = shard.heap();
            largest = largest.max(heap.largest_free());
            free += heap.books.free;
            active += heap.books.active;
            for entry in &heap.pending {
                let bytes = heap.block(entry.block).bytes;
                for need in &entry.needs {
                    *pending.entry(need.stream).or_default() += bytes;
                }
            }
            for block in heap.blocks.iter().filter(|block| block.state == State::Active) {
                let holder = holders.entry((block.tag, block.user)).or_default();
                holder.0 += block.bytes;
                holder.1 += 1;
            }
        }
        let (device_free, device_total) = self.gpu.mem_info().unwrap_or((0, 0));
        let reserved = self.reserved.load(Relaxed);
        let limit = self.limit_bytes.load(Relaxed);
        let streams = self.all_streams();
        let mut holders: Vec<Holder> = holders
            .into_iter()
            .map(|((tag, stream), (bytes, blocks))| Holder {
                name: self.tag_name(tag),
                stream: streams[stream as usize].handle,
                bytes,
                blocks,
            })
            .collect();
        holders.sort_unstable_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders.truncate(3);
        let mut pending: Vec<PendingOn> = pending
            .into_iter()
            .map(|(stream, bytes)| PendingOn { stream: streams[stream as usize].handle, bytes })
            .collect();
        pending.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.bytes));
        let unusable = free.saturating_sub(largest);
        let mut report = OutOfMemory {
            device: self.gpu.ordinal,
            asked_bytes: ask.bytes,
            stream: ask.shard.stream.handle,
            largest_free_bytes: largest,
            free_bytes: free,
            active_bytes: active,
            reserved_bytes: reserved,
            pending,
            limit_bytes: (limit != u64::MAX).then_some(limit),
            device_free_bytes: device_free,
            device_total_bytes: device_total,
            others_bytes: device_total.saturating_sub(device_free).saturating_sub(reserved),
            fragmentation_percent: (unusable * 100).checked_div(free).unwrap_or(0),
            holders,
            backing: self.gpu.backing,
            may_wait: self.wait_ms.load(Relaxed) > 0,
            hints: Vec::new(),
        };
        report.give_hints();
        report
    }

    // ---- freeing ------------------------------------------------------------------------------

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
        if self.history.is_on() {
            self.history.free(self.now_ms(), ptr, block.requested, shard.stream.handle, block.tag);
        }
        heap.counts.frees += 1;
        let look = heap.counts.frees.is_multiple_of(LOOK_EVERY);
        heap.now_ms = self.now_ms();
        if block.user == shard.stream.index && !block.shared && stream.is_none() {
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
        heap.defer(id, needs);
        shard.publish_all(heap);
        to_close
    }

    /// Records the events that some epochs need.
    fn close_all(&self, needs: &[Need]) {
        for need in needs {
            // What could not be recorded now is covered by a later event.
            let _ = self.stream_at(need.stream).close(&self.gpu, need.epoch);
        }
    }

    fn record_use(&self, ptr: u64, stream: Stream, is_over: bool) -> Result<(), FreeError> {
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

/// A request.
#[derive(Clone, Copy)]
struct Ask<'a> {
    shard: &'a Arc<Shard>,
    size: u64,
    bytes: u64,
    tag: u32,
}

/// Why no memory came.
enum Failure {
    NoMemory,
    Driver(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if error.is_out_of_memory() { Self::NoMemory } else { Self::Driver(error) }
    }
}

impl Drop for Inner {
    /// Gives all memory back once the device is past it.
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // A device that failed has nothing left to wait for.
        let _ = self.gpu.synchronize();
        for shard in self.all_shards() {
            let heap = shard.heap();
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
