//! The driver's own memory pools: stream-ordered blocks, reuse policies, a release threshold.
//!
//! A free block remembers the operations that freed it. Another stream may have it when it is ordered
//! after those (follow), when they happen to have run (opportunistic), or by a dependency that the
//! driver inserts (internal).

use std::collections::BTreeMap;

use thermalloc_cuda::driver::{DevicePtr, code, constant};

use crate::clock::{Clock, Epoch, Epochs};
use crate::memory::{Kind, Place, Region};
use crate::shadow::Known;
use crate::state::{Mistake, R, State};
use crate::stream::Work;

struct FreeBlock {
    len: u64,
    freed: Vec<(Epoch, Clock)>,
}

struct Segment {
    len: u64,
    phys: u64,
}

pub(crate) struct Pool {
    pub(crate) device: u32,
    max_bytes: u64,
    threshold: u64,
    /// By attribute number: follow, opportunistic, internal.
    reuse: [bool; 3],
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    free: BTreeMap<u64, FreeBlock>,
    segments: BTreeMap<u64, Segment>,
    pub(crate) handle_types: u32,
    /// Where its bytes are: a file of its own where another process may open it.
    pub(crate) fd: i32,
    /// Of another process: nothing is allocated from it here.
    pub(crate) imported: bool,
    pub(crate) access: Vec<(u32, u32)>,
    destroyed: bool,
}

const SEGMENT_BYTES: u64 = 32 << 20;
const GRANULE: u64 = 512;
const POOL_TAG: usize = 0x5000_0000_0000;

impl State {
    pub(crate) fn new_pool(&mut self, device: u32, handle_types: u32, fd: i32) -> usize {
        let handle = POOL_TAG | self.unique() << 4;
        self.pools.insert(
            handle,
            Pool {
                device,
                max_bytes: 0,
                threshold: 0,
                reuse: [true; 3],
                reserved: 0,
                reserved_high: 0,
                used: 0,
                used_high: 0,
                free: BTreeMap::new(),
                segments: BTreeMap::new(),
                handle_types,
                fd,
                imported: false,
                access: Vec::new(),
                destroyed: false,
            },
        );
        handle
    }

    pub(crate) fn pool_mut(&mut self, handle: usize) -> R<&mut Pool> {
        if self.pools.get(&handle).is_none_or(|pool| pool.destroyed) {
            self.violate(Mistake::BadHandle, format!("memory pool {handle:#x} does not exist"));
        }
        self.pools.get_mut(&handle).filter(|pool| !pool.destroyed).ok_or(code::ERROR_INVALID_VALUE)
    }

    pub(crate) fn pool_limit(&mut self, handle: usize, max_bytes: u64) -> R {
        self.pool_mut(handle)?.max_bytes = max_bytes;
        Ok(())
    }

    /// The cheapest free block for a stream: in order, then run already, then by a dependency; of
    /// those the smallest.
    fn pool_find(&self, pool: &Pool, slot: u32, bytes: u64) -> Option<u64> {
        let clock = &self.streams[slot as usize].clock;
        let cost = |block: &FreeBlock| -> Option<u8> {
            let mut worst = 0;
            for (epoch, _) in &block.freed {
                let ordered = clock.covers(*epoch) || self.host.covers(*epoch);
                let same = epoch.slot == slot;
                let cost = match () {
                    () if same || (ordered && pool.reuse[0]) => 0,
                    () if pool.reuse[1] && self.streams[epoch.slot as usize].done >= epoch.seq => 1,
                    () if pool.reuse[2] => 2,
                    () => return None,
                };
                worst = worst.max(cost);
            }
            Some(worst)
        };
        let fits = pool.free.iter().filter(|(_, block)| block.len >= bytes);
        let best = fits.filter_map(|(&at, block)| Some((cost(block)?, block.len, at))).min()?;
        Some(best.2)
    }

    fn pool_grow(&mut self, handle: usize, bytes: u64) -> R<u64> {
        let pool = self.pools.get(&handle).ok_or(code::ERROR_INVALID_VALUE)?;
        let (device, max, reserved) = (pool.device, pool.max_bytes, pool.reserved);
        let exact = bytes.next_multiple_of(2 << 20);
        let usual = exact.max(SEGMENT_BYTES);
        let mut len = usual;
        if self.charge(device, usual).is_err() {
            self.pool_release(handle, 0);
            if self.charge(device, usual).is_err() {
                self.charge(device, exact)?;
                len = exact;
            }
        }
        if max != 0 && reserved + len > max {
            self.discharge(device, len);
            return Err(code::ERROR_OUT_OF_MEMORY);
        }
        let Some(at) = self.arena.alloc(len, 2 << 20) else {
            self.discharge(device, len);
            return Err(code::ERROR_OUT_OF_MEMORY);
        };
        self.now_ns += self.config.latency.alloc_ns;
        let phys = self.fresh_phys(len);
        let pool = self.pools.get_mut(&handle).ok_or(code::ERROR_INVALID_VALUE)?;
        pool.segments.insert(at, Segment { len, phys });
        pool.free.insert(at, FreeBlock { len, freed: Vec::new() });
        pool.reserved += len;
        pool.reserved_high = pool.reserved_high.max(pool.reserved);
        Ok(at)
    }

    pub(crate) fn pool_alloc(&mut self, handle: usize, bytes: u64, slot: u32) -> R<DevicePtr> {
        if bytes == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let bytes = bytes.next_multiple_of(GRANULE);
        if self.pool_mut(handle)?.imported {
            return Err(code::ERROR_NOT_PERMITTED);
        }
        let pool = &self.pools[&handle];
        let at = match self.pool_find(pool, slot, bytes) {
            Some(at) => at,
            None => self.pool_grow(handle, bytes)?,
        };
        let pool = self.pools.get_mut(&handle).ok_or(code::ERROR_INVALID_VALUE)?;
        let block = pool.free.remove(&at).ok_or(code::ERROR_UNKNOWN)?;
        if block.len > bytes {
            pool.free.insert(
                at + bytes,
                FreeBlock { len: block.len - bytes, freed: block.freed.clone() },
            );
        }
        let (&start, segment) =
            pool.segments.range(..=at).next_back().ok_or(code::ERROR_UNKNOWN)?;
        let phys = segment.phys + (at - start);
        pool.used += bytes;
        pool.used_high = pool.used_high.max(pool.used);
        let (device, fd) = (pool.device, pool.fd);
        let others = pool.access.clone();
        for (epoch, clock) in &block.freed {
            if !self.streams[slot as usize].clock.covers(*epoch) {
                self.depend(slot, *epoch, clock);
            }
        }
        let epoch = self.begin(slot);
        self.push(epoch, Work::Nothing, 0);
        let (mut readable, mut writable) = (1 << device, 1 << device);
        for (other, flags) in others {
            readable |= u32::from(flags & 1 != 0) << other;
            writable |= u32::from(flags & 2 != 0) << other;
        }
        let place = Place::File { fd, offset: phys };
        let kind = Kind::PoolBlock(handle);
        let uses = Epochs::default();
        self.insert_region(
            at,
            Region { len: bytes, kind, place, phys, device, readable, writable, uses, id: 0 },
        );
        // Whoever uses the block must be ordered after its allocation.
        let Self { shadow, streams, host, .. } = self;
        shadow.write(
            phys..phys + bytes,
            epoch,
            &Known { stream: &streams[slot as usize].clock, host },
        );
        Ok(at)
    }

    /// Frees a block in the order of a stream; `None` frees it for everyone at once.
    pub(crate) fn pool_free(&mut self, at: u64, slot: Option<u32>) -> R {
        let found = self.regions.get(&at).map(|region| (region.len, region.kind));
        let (len, handle) = match found {
            Some((len, Kind::PoolBlock(handle))) => (len, handle),
            // The exporter's block stays; this process only forgets it.
            Some((_, Kind::Imported)) => return self.mem_free(at),
            _ => return Err(self.bad_free("cuMemFreeAsync", at)),
        };
        let mut freed = Vec::new();
        if let Some(slot) = slot {
            let epoch = self.begin(slot);
            let _pieces = self.touch(epoch, at, len, false, true);
            self.push(epoch, Work::Nothing, 0);
            freed.push((epoch, self.streams[slot as usize].clock.clone()));
        }
        self.bury(at);
        let Some(pool) = self.pools.get_mut(&handle) else {
            return Ok(());
        };
        pool.used -= len;
        pool.put_free(at, FreeBlock { len, freed });
        if slot.is_none() || (pool.destroyed && pool.used == 0) {
            self.at_sync_point();
        }
        Ok(())
    }

    /// Gives back what is beyond the thresholds: the host has just waited for something.
    pub(crate) fn at_sync_point(&mut self) {
        let over =
            |(&handle, pool): (&usize, &Pool)| (pool.reserved > pool.threshold).then_some(handle);
        let pools: Vec<usize> = self.pools.iter().filter_map(over).collect();
        for handle in pools {
            let threshold = self.pools[&handle].threshold;
            self.pool_release(handle, threshold);
        }
    }

    /// Gives back segments that are free and that nothing will touch, down to a size.
    pub(crate) fn pool_release(&mut self, handle: usize, keep: u64) {
        let Some(pool) = self.pools.get(&handle) else {
            return;
        };
        let streams = &self.streams;
        let ran = |block: &FreeBlock| {
            block.freed.iter().all(|(epoch, _)| streams[epoch.slot as usize].done >= epoch.seq)
        };
        let idle = |(at, segment): (&u64, &Segment)| {
            pool.free
                .get(at)
                .is_some_and(|block| block.len == segment.len && ran(block))
                .then_some(*at)
        };
        let idle: Vec<u64> = pool.segments.iter().filter_map(idle).collect();
        for at in idle {
            let Some(pool) = self.pools.get_mut(&handle).filter(|pool| pool.reserved > keep) else {
                break;
            };
            pool.free.remove(&at);
            let Some(segment) = pool.segments.remove(&at) else {
                continue;
            };
            pool.reserved -= segment.len;
            let device = pool.device;
            self.discharge(device, segment.len);
            self.arena.free(at, segment.len);
            self.shadow.forget(segment.phys..segment.phys + segment.len);
        }
        if self.pools.get(&handle).is_some_and(|pool| pool.destroyed && pool.segments.is_empty()) {
            self.pools.remove(&handle);
        }
    }

    pub(crate) fn pool_destroy(&mut self, handle: usize) -> R {
        let pool = self.pool_mut(handle)?;
        pool.destroyed = true;
        pool.threshold = 0;
        for device in &mut self.devices {
            if device.current_pool == handle {
                device.current_pool = device.default_pool;
            }
        }
        self.pool_release(handle, 0);
        Ok(())
    }

    pub(crate) fn pool_attribute(&mut self, handle: usize, attribute: u32) -> R<u64> {
        let pool = self.pool_mut(handle)?;
        Ok(match attribute {
            constant::MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
                ..=constant::MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                u64::from(pool.reuse[attribute as usize - 1])
            }
            constant::MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold,
            constant::MEMPOOL_ATTR_RESERVED_MEM_CURRENT => pool.reserved,
            constant::MEMPOOL_ATTR_RESERVED_MEM_HIGH => pool.reserved_high,
            constant::MEMPOOL_ATTR_USED_MEM_CURRENT => pool.used,
            constant::MEMPOOL_ATTR_USED_MEM_HIGH => pool.used_high,
            _ => return Err(code::ERROR_INVALID_VALUE),
        })
    }

    pub(crate) fn pool_set_attribute(&mut self, handle: usize, attribute: u32, value: u64) -> R {
        let pool = self.pool_mut(handle)?;
        match attribute {
            constant::MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
                ..=constant::MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                pool.reuse[attribute as usize - 1] = value != 0;
            }
            constant::MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold = value,
            constant::MEMPOOL_ATTR_RESERVED_MEM_HIGH if value == 0 => {
                pool.reserved_high = pool.reserved
            }
            constant::MEMPOOL_ATTR_USED_MEM_HIGH if value == 0 => pool.used_high = pool.used,
            _ => return Err(code::ERROR_INVALID_VALUE),
        }
        Ok(())
    }
}

impl Pool {
    fn put_free(&mut self, mut at: u64, mut block: FreeBlock) {
        if let Some((&before, left)) = self.free.range_mut(..at).next_back()
            && before + left.len == at
            && !self.segments.contains_key(&at)
        {
            let left = std::mem::replace(left, FreeBlock { len: 0, freed: Vec::new() });
            self.free.remove(&before);
            at = before;
            block.take(left);
        }
        let end = at + block.len;
        if !self.segments.contains_key(&end)
            && let Some(right) = self.free.remove(&end)
        {
            block.take(right);
        }
        self.free.insert(at, block);
    }
}

impl FreeBlock {
    fn take(&mut self, other: Self) {
        self.len += other.len;
        for (epoch, clock) in other.freed {
            match self.freed.iter_mut().find(|(mine, _)| mine.slot == epoch.slot) {
                Some((mine, _)) if mine.seq >= epoch.seq => {}
                Some(mine) => *mine = (epoch, clock),
                None => self.freed.push((epoch, clock)),
            }
        }
    }
}
