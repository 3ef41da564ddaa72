//! Memory for graph capture. What a captured stream allocates comes from a private pool, since the
//! graph uses the same addresses at each launch: the memory stays until the graph is gone.
//!
//! Invariant: a private pool's memory serves nobody else and is not given back while somebody holds
//! the pool; once nobody does, it goes as its blocks are freed.

use crate::driver::Stream;
use crate::gpu::lock;
use crate::pool::{Inner, Pool};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// A private pool's name, as PyTorch passes it.
pub type PoolId = (u64, u64);

/// Says whether a stream's allocations belong to the capture.
pub type StreamFilter = dyn Fn(Stream) -> bool + Send + Sync;

#[derive(Default)]
struct Book {
    numbers: HashMap<PoolId, u64>,
    /// By number: who holds it.
    holders: HashMap<u64, usize>,
    active: Vec<(u64, Arc<StreamFilter>)>,
    next: u64,
}

/// The captures of a pool.
#[derive(Default)]
pub(crate) struct Captures {
    active: AtomicUsize,
    book: Mutex<Book>,
}

impl Captures {
    /// Whether any capture is in progress.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.active.load(Relaxed) > 0
    }

    /// The private pool that a stream's allocations come from now.
    pub(crate) fn pool_of(&self, stream: Stream) -> Option<u64> {
        let active: Vec<_> = lock(&self.book).active.clone();
        // The last that began is the innermost.
        active.iter().rev().find(|(_, filter)| filter(stream)).map(|&(pool, _)| pool)
    }

    /// Whether nobody holds a private pool any more.
    pub(crate) fn is_over(&self, pool: u64) -> bool {
        !lock(&self.book).holders.contains_key(&pool)
    }

    /// Private pools that somebody holds.
    pub(crate) fn held(&self) -> usize {
        lock(&self.book).holders.len()
    }

    fn begin(&self, id: PoolId, filter: Arc<StreamFilter>) -> u64 {
        let mut book = lock(&self.book);
        let number = match book.numbers.get(&id) {
            Some(&number) => number,
            None => {
                book.next += 1;
                let number = book.next;
                book.numbers.insert(id, number);
                number
            }
        };
        *book.holders.entry(number).or_default() += 1;
        book.active.push((number, filter));
        self.active.store(book.active.len(), Relaxed);
        number
    }

    fn end(&self, id: PoolId) -> Option<u64> {
        let mut book = lock(&self.book);
        let number = *book.numbers.get(&id)?;
        let at = book.active.iter().rposition(|&(pool, _)| pool == number)?;
        let ended = book.active.remove(at);
        self.active.store(book.active.len(), Relaxed);
        drop(book);
        drop(ended);
        Some(number)
    }

    /// Lets go of a pool; its number once nobody holds it.
    fn release(&self, id: PoolId) -> Option<u64> {
        let mut book = lock(&self.book);
        let number = *book.numbers.get(&id)?;
        let holders = book.holders.get_mut(&number)?;
        *holders -= 1;
        if *holders > 0 {
            return None;
        }
        book.holders.remove(&number);
        book.numbers.remove(&id);
        Some(number)
    }
}

impl Inner {
    /// Allocations of the streams that `filter` names come from the private pool `id` from now on.
    pub(crate) fn begin_to_pool(&self, id: PoolId, filter: Arc<StreamFilter>) {
        self.counts.captures.fetch_add(1, Relaxed);
        self.captures.begin(id, filter);
    }

    /// Ends that.
    pub(crate) fn end_to_pool(&self, id: PoolId) {
        let Some(number) = self.captures.end(id) else { return };
        for shard in self.all_shards().iter().filter(|shard| shard.pool == number) {
            shard.stream.capturing.store(false, Relaxed);
        }
    }

    /// Lets go of a private pool. What the graph may still do with it is waited for.
    pub(crate) fn release_pool(&self, id: PoolId) {
        if self.captures.release(id).is_none() || self.captures.any() {
            return;
        }
        // A graph may run on streams that this pool has never seen.
        let _ = self.gpu.synchronize();
        self.poll();
        self.give_back_private();
    }

    /// Bytes of private pools.
    pub(crate) fn private_bytes(&self) -> u64 {
        let private = self.all_shards().into_iter().filter(|shard| shard.pool != 0);
        private.map(|shard| shard.heap().books.mapped()).sum()
    }
}

/// A capture in progress. Dropped without [`Self::finish`] it counts as aborted, and its memory goes
/// back as soon as its blocks are freed.
pub struct Capture {
    pool: Pool,
    id: PoolId,
    streams: Arc<Mutex<Vec<Stream>>>,
    ended: bool,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The memory of a captured graph: to be kept for as long as the graph.
pub struct GraphMemory {
    pool: Pool,
    id: PoolId,
}

impl fmt::Debug for GraphMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphMemory").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Pool {
    /// Allocations of the streams that `filter` names come from the private pool `id` from now on.
    /// For frameworks that name their pools; a program of one's own has [`Self::begin_capture`].
    pub fn begin_to_pool(&self, id: PoolId, filter: Arc<StreamFilter>) {
        self.inner.begin_to_pool(id, filter);
    }

    /// Ends that.
    pub fn end_to_pool(&self, id: PoolId) {
        self.inner.end_to_pool(id);
    }

    /// Lets go of a private pool: once for each begin.
    pub fn release_pool(&self, id: PoolId) {
        self.inner.release_pool(id);
    }

    /// Allocations on `stream` come from a private pool from now on; to be called before the
    /// stream's capture begins.
    pub fn begin_capture(&self, stream: Stream) -> Capture {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let id = (u64::MAX, NEXT.fetch_add(1, Relaxed));
        self.capture_into(id, stream)
    }

    fn capture_into(&self, id: PoolId, stream: Stream) -> Capture {
        let streams = Arc::new(Mutex::new(vec![stream]));
        let named = Arc::clone(&streams);
        self.inner.begin_to_pool(id, Arc::new(move |stream| lock(&named).contains(&stream)));
        self.inner.shard_for_capture(id, stream);
        Capture { pool: self.clone(), id, streams, ended: false }
    }
}

impl Capture {
    /// Says that the capture has spread to another stream.
    pub fn also(&self, stream: Stream) {
        lock(&self.streams).push(stream);
        self.pool.inner.shard_for_capture(self.id, stream);
    }

    /// The capture has ended; the memory lives as long as the value returned.
    pub fn finish(mut self) -> GraphMemory {
        self.ended = true;
        self.pool.inner.end_to_pool(self.id);
        GraphMemory { pool: self.pool.clone(), id: self.id }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.ended {
            self.pool.inner.counts.aborted_captures.fetch_add(1, Relaxed);
            self.pool.inner.end_to_pool(self.id);
            self.pool.inner.release_pool(self.id);
        }
    }
}

impl GraphMemory {
    /// A further capture into the same memory: for graphs that never run at the same time.
    pub fn capture_again(&self, stream: Stream) -> Capture {
        self.pool.capture_into(self.id, stream)
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        self.pool.inner.release_pool(self.id);
    }
}

impl Inner {
    /// Marks the stream before its capture begins: no event is recorded or asked for on it then.
    fn shard_for_capture(&self, _id: PoolId, stream: Stream) {
        if let Some(pool) = self.captures.pool_of(stream) {
            self.shard(pool, stream).stream.capturing.store(true, Relaxed);
        }
    }

    /// Gives back what released private pools have.
    fn give_back_private(&self) {
        self.give_back_where(|shard| shard.pool != 0 && self.captures.is_over(shard.pool));
    }
}
