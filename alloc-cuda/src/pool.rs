//! The pool of a device: which heap serves a request, and what is done when none can.
//!
//! Invariants: a heap's lock is never held across a call of the driver; of two heaps only one is
//! locked at a time; memory goes to another stream only when it is complete or ordered before that
//! stream's future work, and is unmapped only when it is complete.

use crate::block::{Block, BlockId, State};
use crate::capture::Captures;
use crate::chunk_map::ChunkMap;
use crate::driver::{Driver, Error, Stream};
use crate::fault::{self, planted};
use crate::gpu::{Backing, Gpu, lock};
use crate::heap::{CHUNK, Heap, Need, Source, rounded};
use crate::heat::Heat;
use crate::history::History;
use crate::ledger::{Entry, Ledger, Space};
use crate::oom::{AllocError, FreeError};
use crate::recent::coarse_ms;
use crate::record::Recorder;
use crate::stream::{StreamState, thread_number};
use crate::supply::{SETTLE_EVERY, SLACK_FIRST};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Frees of a heap between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// An event is recorded for so many pending blocks together, or for so many bytes.
const CLOSE_BLOCKS: u32 = 16;
const CLOSE_BYTES: u64 = 16 << 20;
/// The largest request: more than any device has.
const BYTES_MAX: u64 = 1 << 44;

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

/// How a pool is made.
pub struct PoolBuilder {
    ordinal: i32,
    backing: Option<Backing>,
    pub(crate) options: Options,
    clock: Clock,
    callback: Option<Box<OnOutOfMemory>>,
    ledger: Option<&'static dyn Ledger>,
    record: Option<File>,
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
            ledger: None,
            record: None,
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

    /// Enters what is in use into a ledger.
    #[must_use]
    pub fn ledger(mut self, ledger: &'static dyn Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Writes what is asked for to a file, from which the project's bench replays it.
    #[must_use]
    pub fn record(mut self, file: File) -> Self {
        self.record = Some(file);
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
            watched: self.ledger.is_some() || self.record.is_some() || options.history > 0,
            ledger: self.ledger,
            recorder: self.record.map(Recorder::new),
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
    pub(crate) heap: Mutex<Heap>,
    /// Bytes active and pending.
    pub(crate) in_use: AtomicU64,
    pub(crate) pending: AtomicU64,
    pub(crate) mapped: AtomicU64,
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
    pub(crate) fn publish(&self, heap: &Heap) {
        self.in_use.store(heap.books.active + heap.books.pending, Relaxed);
    }

    pub(crate) fn publish_all(&self, heap: &Heap) {
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
    pub(crate) number: AtomicU64,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) map: ChunkMap,
    streams: RwLock<Streams>,
    shards: RwLock<Shards>,
    pub(crate) limit_bytes: AtomicU64,
    pub(crate) wait_ms: AtomicU64,
    pub(crate) heat: Mutex<Heat>,
    clock: Clock,
    pub(crate) options: Options,
    pub(crate) callback: Option<Box<OnOutOfMemory>>,
    pub(crate) ledger: Option<&'static dyn Ledger>,
    recorder: Option<Recorder>,
    /// Whether anybody hears of allocations: history, ledger or record.
    watched: bool,
    /// Physical bytes.
    pub(crate) reserved: AtomicU64,
    pub(crate) reserved_peak: AtomicU64,
    /// Room beyond the peak, in parts of it.
    pub(crate) slack_parts: AtomicU64,
    /// Chunks that are mapped nowhere.
    pub(crate) idle_chunks: Mutex<Vec<u64>>,
    pub(crate) last_poll_ms: AtomicU64,
    pub(crate) polling: AtomicBool,
    pub(crate) captures: Captures,
    pub(crate) counts: PoolCounts,
    pub(crate) history: History,
    pub(crate) tags: RwLock<Vec<String>>,
}

/// A heap that a thread used: the pool's number, the stream, the heap.
type Remembered = (u64, usize, Option<Arc<Shard>>);

thread_local! {
    static TAG: Cell<u32> = const { Cell::new(0) };
    /// The heaps that this thread used last.
    static LAST: RefCell<[Remembered; 4]> =
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
                heap: Mutex::new(Heap::new(self.ledger)),
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
        if self.watched {
            self.tell_free(shard, &block);
        }
        heap.counts.frees += 1;
        let look = heap.counts.frees.is_multiple_of(LOOK_EVERY);
        heap.now_ms = self.now_ms();
        if block.user == shard.stream.index && !block.shared && stream.is_none() {
            heap.entered.leave(u64::from(id), shard.stream.handle, false);
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
