//! What is done when no memory comes: a ladder, from what costs nothing to the error that tells.

use crate::block::State;
use crate::builder::Reuse;
use crate::oom::{AllocError, Holder, OutOfMemory, PendingOn};
use crate::pool::Inner;
use crate::supply::{Ask, Failure};
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

impl Inner {
    /// The ladder: what is complete, what is cold, what is pending, stitching, the callback.
    pub(crate) fn out_of_memory(&self, ask: &Ask<'_>) -> Result<u64, AllocError> {
        let capturing = ask.shard.stream.is_capturing();
        let mut waited = false;
        loop {
            if !capturing {
                self.poll_streams();
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

    pub(crate) fn once_more(&self, ask: &Ask<'_>, others: bool) -> Result<Option<u64>, AllocError> {
        {
            let mut heap = ask.shard.heap();
            if let Some(id) = heap.take(ask.size, ask.bytes, ask.shard.stream.index) {
                return Ok(Some(self.finish(ask.shard, &mut heap, id, ask.tag)));
            }
        }
        if let Some(ptr) = self.own_memory(ask) {
            return Ok(Some(ptr));
        }
        if others {
            let wait = self.options.reuse != Reuse::Complete;
            if let Some(ptr) = self.others_memory(ask, wait)? {
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
    pub(crate) fn wait_for_pending(&self, wait_ms: u64) -> bool {
        let streams = self.all_streams();
        let awaited: Vec<_> = streams.iter().filter(|stream| stream.is_awaited()).collect();
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
                all &= !stream.is_awaited();
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

    pub(crate) fn report(&self, ask: &Ask<'_>) -> OutOfMemory {
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
}
