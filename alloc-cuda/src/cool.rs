//! Memory goes back to the driver: what is cold, what another process needs, what is asked for.
//!
//! Invariant: memory is unmapped only when the last use that anybody made of it is complete.

use crate::fault::{self, planted};
use crate::gpu::{Backing, lock};
use crate::heap::{CHUNK, Run};
use crate::pool::Inner;
use crate::shard::Shard;
use crate::supply::ROOM;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The least time between two looks for cold memory, milliseconds.
const POLL_MS: u64 = 250;

impl Inner {
    /// The heaps whose free memory may go: not those of a capture that goes on.
    fn trimmable_shards(&self) -> impl Iterator<Item = Arc<Shard>> {
        let all = self.all_shards().into_iter();
        all.filter(|shard| shard.pool == 0 || self.captures.is_over(shard.pool))
    }

    /// Unmaps up to `bytes` of free chunks; they stay with the pool or go to the driver.
    pub(crate) fn unmap_chunks(
        &self,
        bytes: u64,
        keep: bool,
        rule: impl Fn(&Shard) -> Box<dyn Fn(u64, u64) -> bool>,
    ) -> u64 {
        let mut gone = 0;
        for shard in self.trimmable_shards() {
            if gone >= bytes {
                break;
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

    pub(crate) fn free_segments(
        &self,
        bytes: u64,
        rule: impl Fn(&Shard) -> Box<dyn Fn(u64, u64) -> bool>,
    ) -> u64 {
        let mut gone = 0;
        for shard in self.trimmable_shards() {
            if gone >= bytes {
                break;
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
    pub(crate) fn unstitch(&self, used_ms: u64) {
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
    pub(crate) fn unmap_views(&self, views: &[Run]) {
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

    /// Closes the epochs that blocks were stamped with, and asks which are complete.
    pub(crate) fn poll_streams(&self) {
        if self.captures.any() {
            return;
        }
        for stream in self.all_streams() {
            // A stream that fails says so to its own user; its memory stays where it is.
            let _ = stream.close_stamped(&self.gpu);
            let _ = stream.poll(&self.gpu);
        }
    }

    /// The same, but a stream gets no event while an earlier one is outstanding: that would not be
    /// complete either.
    pub(crate) fn poll_idle_streams(&self) {
        if self.captures.any() {
            return;
        }
        for stream in self.all_streams() {
            // As above.
            let _ = stream.poll_or_close(&self.gpu);
        }
    }

    /// Asks which epochs are complete that the pending blocks of a heap wait for, and closes those
    /// that are open.
    pub(crate) fn poll_needed(&self, shard: &Shard) {
        if self.captures.any() {
            return;
        }
        let mut needed: Vec<u64> = Vec::new();
        {
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
                // A stream that fails says so to its own user; its memory stays where it is.
                let _ = stream.poll(&self.gpu);
                let _ = stream.close(&self.gpu, stamp);
            }
        }
    }

    pub(crate) fn look_for_cold(&self) {
        let now_ms = self.now_ms();
        if now_ms.saturating_sub(self.last_poll_ms.load(Relaxed)) >= POLL_MS {
            self.poll();
        }
    }

    /// Settles what is complete and gives back what is cold.
    pub(crate) fn poll(&self) {
        self.flush_record();
        if self.captures.any() || self.polling.swap(true, Relaxed) {
            return;
        }
        let now_ms = self.now_ms();
        self.last_poll_ms.store(now_ms, Relaxed);
        if let Ok(_current) = self.gpu.enter() {
            self.poll_streams();
            self.cool(now_ms);
        }
        self.polling.store(false, Relaxed);
    }

    pub(crate) fn cool(&self, now_ms: u64) {
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
            let peak = heat.note_kept(now_ms, most, in_use);
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
}
