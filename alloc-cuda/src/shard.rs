//! The streams that a pool has seen and their heaps, one to a stream and private pool.
//!
//! Invariant: streams and heaps are added and never removed while the pool lives.

use crate::driver::{Error, Stream};
use crate::fault;
use crate::gpu::lock;
use crate::heap::Heap;
use crate::pool::Inner;
use crate::stream::{StreamState, thread_number};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// A number that no pool had before.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
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
pub(crate) struct Streams {
    list: Vec<Arc<StreamState>>,
    by_key: HashMap<(usize, u64), u32>,
}

#[derive(Default)]
pub(crate) struct Shards {
    list: Vec<Arc<Shard>>,
    by_key: HashMap<(u64, u32), Arc<Shard>>,
}

impl Inner {
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

    pub(crate) fn forget_stream(&self, stream: Stream) -> Result<(), Error> {
        let state = self.stream(stream);
        // Its last epoch is closed while its handle is still its own.
        state.retire(&self.gpu)?;
        self.number.store(next_number(), Relaxed);
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.by_key.remove(&Self::key(stream));
        Ok(())
    }
}
