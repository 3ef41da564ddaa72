//! Memory for a request that the heap's free memory does not serve: what is free elsewhere, what
//! can be stitched, what streams can wait for, and growth.
//!
//! Invariant: memory goes to another stream only when it is complete or ordered before that stream's
//! future work.

use crate::builder::Reuse;
use crate::driver::Error;
use crate::fault::{self, planted};
use crate::gpu::{Backing, lock};
use crate::heap::{CHUNK, Growth, Heap, Kind, OVERSIZE, Run, Source};
use crate::oom::AllocError;
use crate::pool::Inner;
use crate::shard::Shard;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Allocations of a heap between two looks at its pending blocks.
pub(crate) const SETTLE_EVERY: u64 = 32;
/// The pool's room beyond its peak: in these parts of the peak, at first and at most. Segments
/// cannot be rearranged as chunks can, and need more.
const SLACK_PARTS: u64 = 2048;
pub(crate) const SLACK_FIRST: u64 = 16;
const SLACK_MOST: u64 = 64;
const SLACK_MOST_SEGMENTS: u64 = 240;
/// A program that was rearranged so often since never settles: it gets a part more for so many
/// rearrangements, up to so many parts.
const SETTLING: u64 = 2048;
const UNSETTLED: u64 = 16;
const SLACK_UNSETTLED: u64 = 512;
/// What the driver's pool takes from the device at least.
const DRIVER_PIECE: u64 = 32 << 20;
/// Room that a pool of any size may have: streams with little memory keep their own.
pub(crate) const ROOM: u64 = 8 * CHUNK;

/// A request.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) shard: &'a Arc<Shard>,
    pub(crate) size: u64,
    pub(crate) bytes: u64,
    pub(crate) tag: u32,
}

/// Why no memory came.
pub(crate) enum Failure {
    NoMemory,
    Driver(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if error.is_out_of_memory() { Self::NoMemory } else { Self::Driver(error) }
    }
}

impl Inner {
    #[cold]
    pub(crate) fn alloc_slow(
        &self,
        shard: &Arc<Shard>,
        size: u64,
        bytes: u64,
        tag: u32,
    ) -> Result<u64, AllocError> {
        let _current = self.gpu.enter()?;
        let _relaxed = self.captures.any().then(|| self.gpu.relax());
        let ask = Ask { shard, size, bytes, tag };
        if let Some(ptr) = self.own_memory(&ask) {
            return Ok(ptr);
        }
        self.look_for_cold();
        let growth = self.growth_bytes(shard, size);
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

    /// How much memory the growth for a request takes.
    fn growth_bytes(&self, shard: &Shard, size: u64) -> u64 {
        if self.gpu.backing != Backing::Virtual {
            return self.segment_bytes(size, 8).0;
        }
        shard.heap().growth_bytes(size).unwrap_or(size.next_multiple_of(CHUNK))
    }

    /// The ways that cost less than growth beyond the pool's usual size, the cheapest first.
    pub(crate) fn without_growth(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
        if let Some(ptr) = self.others_memory(ask, self.options.reuse == Reuse::Wait)? {
            return Ok(Some(ptr));
        }
        if let Some(ptr) = self.stitch(ask)? {
            return Ok(Some(ptr));
        }
        if self.options.reuse == Reuse::Complete {
            return Ok(None);
        }
        if let Some(ptr) = self.pending_memory(ask)? {
            return Ok(Some(ptr));
        }
        self.others_memory(ask, true)
    }

    /// Whether the pool stays within its usual size when it grows: then that is better than to
    /// make streams wait, or to stitch.
    pub(crate) fn is_cheap(&self, growth: u64, size: u64) -> bool {
        let in_use = self.in_use() + size;
        let peak = lock(&self.heat).note(self.now_ms(), in_use);
        let idle = lock(&self.idle_chunks).len() as u64 * CHUNK;
        let reserved = self.reserved.load(Relaxed) - idle;
        reserved + growth <= peak + self.slack(peak) + ROOM
    }

    /// How much more than the peak of its use the pool may have.
    pub(crate) fn slack(&self, peak: u64) -> u64 {
        peak / SLACK_PARTS * self.slack_parts.load(Relaxed)
    }

    /// Notes that memory was rearranged, or a stream made to wait. A program that asks for the same sizes again is served
    /// without, after its first rounds; one that does not is better off with more room.
    pub(crate) fn rearranged(&self, parts: u64) {
        let is_virtual = self.gpu.backing == Backing::Virtual;
        let most = if is_virtual { SLACK_MOST } else { SLACK_MOST_SEGMENTS };
        let more = |now: u64| {
            if now < most {
                return Some((now + parts).min(most));
            }
            let count = self.rearrangements.fetch_add(1, Relaxed) + 1;
            let never_settles = count > SETTLING && count.is_multiple_of(UNSETTLED);
            (never_settles && now < SLACK_UNSETTLED).then_some(now + 1)
        };
        // At its most it stays.
        let _ = self.slack_parts.fetch_update(Relaxed, Relaxed, more);
    }

    /// From the heap's own memory: what waits for other streams and is over, what is ordered
    /// anyway, and what was stitched before.
    pub(crate) fn own_memory(&self, ask: &Ask<'_>) -> Option<u64> {
        let Ask { shard, size, bytes, tag } = *ask;
        if shard.pending.load(Relaxed) > 0 {
            let look = shard.heap().look_is_due();
            if look && !shard.stream.is_capturing() {
                self.poll_needed(shard);
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
    pub(crate) fn settle(&self, shard: &Shard) -> u64 {
        let mut heap = shard.heap();
        // After the heap: what it names is in the list then.
        let streams = self.all_streams();
        let settled = heap.settle_pending(shard.stream.index, |need| {
            planted(fault::EARLY_REUSE) || streams[need.stream as usize].is_done(need.epoch)
        });
        shard.publish_all(&heap);
        settled
    }

    /// A pending block of `home` that is complete, or ordered before the asking stream's work.
    pub(crate) fn retake(&self, home: &Arc<Shard>, ask: &Ask<'_>) -> Option<u64> {
        let user = &ask.shard.stream;
        let mut heap = home.heap();
        let streams = self.all_streams();
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
    pub(crate) fn pending_memory(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
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
                self.rearranged(1);
                return Ok(Some(ptr));
            }
        }
        Ok(None)
    }

    /// From the free memory of other streams: what is complete or ordered before anyway, and with
    /// `wait` also what is not.
    pub(crate) fn others_memory(
        &self,
        ask: &Ask<'_>,
        wait: bool,
    ) -> Result<Option<u64>, AllocError> {
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
            if (user.is_after(&home.stream, stamp) || planted(fault::NO_EPOCH))
                && let Some(ptr) = self.take_from(home, ask, stamp)
            {
                return Ok(Some(ptr));
            }
        }
        for &(_, stamp, home) in &found {
            if wait && self.options.reuse != Reuse::Complete {
                home.stream.close(&self.gpu, stamp)?;
                if user.wait_for(&self.gpu, &home.stream, stamp)?
                    && let Some(ptr) = self.take_from(home, ask, stamp)
                {
                    self.counts.waits.fetch_add(1, Relaxed);
                    self.rearranged(1);
                    self.rearranged(1);
                    return Ok(Some(ptr));
                }
            } else if home.stream.close_and_query(&self.gpu, stamp)?
                && let Some(ptr) = self.take_from(home, ask, stamp)
            {
                self.counts.ready_steals.fetch_add(1, Relaxed);
                return Ok(Some(ptr));
            }
        }
        Ok(None)
    }

    /// Takes the best block of another heap, if its epoch is still `stamp` or before.
    pub(crate) fn take_from(&self, home: &Arc<Shard>, ask: &Ask<'_>, stamp: u64) -> Option<u64> {
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

    /// Counts more physical memory, unless that is beyond the limit.
    pub(crate) fn charge(&self, bytes: u64) -> bool {
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

    pub(crate) fn discharge(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn grow(&self, ask: &Ask<'_>) -> Result<u64, Failure> {
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
    pub(crate) fn grow_by(
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

    pub(crate) fn reserve_region(&self, shard: &Arc<Shard>, bytes: u64) -> Result<(), Failure> {
        let kind = Kind::of(bytes);
        let shards = self.all_shards().len() as u64;
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

    /// The size of the segment to take for a request: the least one, and one that several blocks of
    /// its size fill, up to a part of what there is.
    fn segment_bytes(&self, size: u64, part: u64) -> (u64, u64) {
        let reserved = self.reserved.load(Relaxed);
        match Kind::of(size) {
            Kind::Small => (CHUNK, CHUNK),
            Kind::Large if self.gpu.backing == Backing::DriverPool && size < DRIVER_PIECE => {
                let most = (reserved / part).clamp(DRIVER_PIECE, 5 * DRIVER_PIECE);
                let spans = (DRIVER_PIECE..=most).step_by(DRIVER_PIECE as usize);
                // In percent: a little less waste is not worth a larger segment.
                let usual = spans.min_by_key(|span| span % size * 100 / span);
                (DRIVER_PIECE, usual.unwrap_or(DRIVER_PIECE))
            }
            Kind::Large => {
                let share = (reserved / 32).clamp(4 * CHUNK, 16 * CHUNK);
                let usual = if size >= share / 2 { size } else { share / size * size };
                (size.next_multiple_of(CHUNK), usual.next_multiple_of(CHUNK))
            }
        }
    }

    pub(crate) fn grow_segment(&self, ask: &Ask<'_>) -> Result<u64, Failure> {
        let Ask { shard, size, bytes, tag } = *ask;
        let (least, usual) = self.segment_bytes(size, 8);
        let mut span = if usual == least || self.is_cheap(usual, size) { usual } else { least };
        if std::mem::replace(&mut shard.heap().grown_for, size) == size {
            // What asks for one size again and again fills a large segment.
            span = self.segment_bytes(size, 1).1;
        }
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
        let source = Source::Segment { base, bytes: whole, oversize: size >= OVERSIZE };
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
    pub(crate) fn stitch(&self, ask: &Ask<'_>) -> Result<Option<u64>, AllocError> {
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
        self.rearranged(4);
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
    pub(crate) fn collect(&self, ask: &Ask<'_>, growth: u64) {
        if self.gpu.backing == Backing::Virtual {
            let idle = lock(&self.idle_chunks).len() as u64 * CHUNK;
            if idle < growth && ask.shard.pool == 0 {
                self.poll_idle_streams();
                let collected = self.unmap_chunks(growth - idle, true, |shard| {
                    let stream = Arc::clone(&shard.stream);
                    Box::new(move |stamp, _| stream.is_done(stamp))
                });
                if collected > 0 {
                    self.rearranged(4);
                }
            }
        } else if ask.shard.pool == 0 && !self.captures.any() {
            self.poll_streams();
            if self.wait_ms.load(Relaxed) > 0 {
                // Freeing a segment would wait for the device anyway, and growth stays for good.
                let _ = self.gpu.synchronize();
                self.poll_streams();
            }
            let freed = self.free_segments(growth, |shard| {
                let stream = Arc::clone(&shard.stream);
                Box::new(move |stamp, _| stream.is_done(stamp))
            });
            if freed > 0 {
                if self.gpu.backing == Backing::DriverPool && self.wait_ms.load(Relaxed) > 0 {
                    // Its frees are over in the streams' order only.
                    let _ = self.gpu.synchronize();
                }
                self.gpu.trim_pool();
                // Segments cost more than chunks: fewer times are enough.
                self.rearranged(16);
            }
        }
    }
}
