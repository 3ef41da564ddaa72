//! The pool and the policies that it is compared with, behind one interface.

use crate::machine::Machine;
use std::collections::{BTreeMap, HashMap, VecDeque};
use thermalloc_cuda::driver::{Call, Event, Stream, constant};

const MIB: u64 = 1 << 20;

/// Serves a trace.
pub(crate) trait Policy {
    fn name(&self) -> &'static str;
    fn alloc(&mut self, m: &Machine, bytes: u64, stream: Stream) -> u64;
    fn free(&mut self, m: &Machine, ptr: u64, stream: Stream);
    fn record_use(&mut self, m: &Machine, ptr: u64, stream: Stream);
    /// Most know of no end but the free.
    fn end_use(&mut self, _: &Machine, _: u64, _: Stream) {}
    /// Memory that it has from the driver, where it is not what the driver counts.
    fn reserved(&self, m: &Machine) -> u64 {
        m.sim.used_bytes(0)
    }
}

fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// This project's pool.
pub(crate) struct Thermalloc(pub(crate) &'static str);

impl Policy for Thermalloc {
    fn name(&self) -> &'static str {
        self.0
    }

    fn alloc(&mut self, m: &Machine, bytes: u64, stream: Stream) -> u64 {
        ok(m.pool.alloc(bytes, stream))
    }

    fn free(&mut self, m: &Machine, ptr: u64, _: Stream) {
        // SAFETY: the trace uses no block after it freed it.
        ok(unsafe { m.pool.free(ptr) });
    }

    fn record_use(&mut self, m: &Machine, ptr: u64, stream: Stream) {
        ok(m.pool.record_use(ptr, stream));
    }

    fn end_use(&mut self, m: &Machine, ptr: u64, stream: Stream) {
        ok(m.pool.end_use(ptr, stream));
    }
}

/// Waits of streams before a block that they used goes to the driver.
fn join(m: &Machine, events: &mut Vec<Event>, users: &[Stream], stream: Stream) {
    for &user in users {
        let mut event = Event::NULL;
        if let Some(pooled) = events.pop() {
            event = pooled;
        } else {
            // SAFETY: a valid place to write to.
            ok(unsafe { m.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING) });
        }
        // SAFETY: live objects.
        ok(unsafe { m.driver.event_record(event, user) });
        // SAFETY: live objects.
        ok(unsafe { m.driver.stream_wait_event(stream, event, 0) });
        events.push(event);
    }
}

/// `cuMemAlloc` and `cuMemFree`, as they are.
#[derive(Default)]
pub(crate) struct Plain;

impl Policy for Plain {
    fn name(&self) -> &'static str {
        "plain driver"
    }

    fn alloc(&mut self, m: &Machine, bytes: u64, _: Stream) -> u64 {
        let mut ptr = 0;
        // SAFETY: a valid place to write to.
        ok(unsafe { m.driver.mem_alloc(&raw mut ptr, bytes as usize) });
        ptr
    }

    fn free(&mut self, m: &Machine, ptr: u64, _: Stream) {
        // SAFETY: a live block; the call waits for the device.
        ok(unsafe { m.driver.mem_free(ptr) });
    }

    fn record_use(&mut self, _: &Machine, _: u64, _: Stream) {}
}

/// `cuMemAllocAsync` from the default pool, which keeps all that it has.
#[derive(Default)]
pub(crate) struct DriverPool {
    users: HashMap<u64, Vec<Stream>>,
    events: Vec<Event>,
}

impl DriverPool {
    pub(crate) fn new(m: &Machine) -> Self {
        let (mut pool, mut most) = (Default::default(), u64::MAX);
        // SAFETY: a valid place to write to.
        ok(unsafe { m.driver.device_get_default_mem_pool(&raw mut pool, 0) });
        let attribute = constant::MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a u64.
        ok(unsafe { m.driver.mem_pool_set_attribute(pool, attribute, (&raw mut most).cast()) });
        Self::default()
    }
}

impl Policy for DriverPool {
    fn name(&self) -> &'static str {
        "driver pool"
    }

    fn alloc(&mut self, m: &Machine, bytes: u64, stream: Stream) -> u64 {
        let mut ptr = 0;
        // SAFETY: a valid place to write to, and a live stream.
        ok(unsafe { m.driver.mem_alloc_async(&raw mut ptr, bytes as usize, stream) });
        ptr
    }

    fn free(&mut self, m: &Machine, ptr: u64, stream: Stream) {
        let users = self.users.remove(&ptr).unwrap_or_default();
        join(m, &mut self.events, &users, stream);
        // SAFETY: a live block, whose users the stream waits for.
        ok(unsafe { m.driver.mem_free_async(ptr, stream) });
    }

    fn record_use(&mut self, _: &Machine, ptr: u64, stream: Stream) {
        self.users.entry(ptr).or_default().push(stream);
    }
}

/// Caches whole allocations by size, in bins of eight to a doubling (`cub`, and others).
#[derive(Default)]
pub(crate) struct SizeBins {
    free: HashMap<(u64, Stream), Vec<u64>>,
    sizes: HashMap<u64, u64>,
    users: HashMap<u64, Vec<Stream>>,
    events: Vec<Event>,
}

impl Policy for SizeBins {
    fn name(&self) -> &'static str {
        "caching by size bins"
    }

    fn alloc(&mut self, m: &Machine, bytes: u64, stream: Stream) -> u64 {
        let step = 1u64 << (bytes.max(4096).ilog2() - 3);
        let class = bytes.next_multiple_of(step);
        if let Some(ptr) = self.free.get_mut(&(class, stream)).and_then(Vec::pop) {
            return ptr;
        }
        let ptr = Plain.alloc(m, class, stream);
        self.sizes.insert(ptr, class);
        ptr
    }

    fn free(&mut self, m: &Machine, ptr: u64, stream: Stream) {
        let users = self.users.remove(&ptr).unwrap_or_default();
        join(m, &mut self.events, &users, stream);
        self.free.entry((self.sizes[&ptr], stream)).or_default().push(ptr);
    }

    fn record_use(&mut self, _: &Machine, ptr: u64, stream: Stream) {
        self.users.entry(ptr).or_default().push(stream);
    }
}

struct Piece {
    bytes: u64,
    segment: u64,
    is_free: bool,
}

/// Best fit in segments as PyTorch's allocator has them: 2 MiB for up to 1 MiB, 20 MiB for up to
/// 10 MiB, else rounded to 2 MiB. No stitching. An event for each use on another stream.
#[derive(Default)]
pub(crate) struct BestFit {
    /// (stream, is small, bytes, address) of free pieces.
    free: std::collections::BTreeSet<(usize, bool, u64, u64)>,
    pieces: BTreeMap<u64, Piece>,
    users: HashMap<u64, Vec<Stream>>,
    waiting: VecDeque<(Vec<Event>, u64, Stream)>,
    events: Vec<Event>,
}

impl BestFit {
    fn give(&mut self, ptr: u64, stream: Stream) {
        let Some(piece) = self.pieces.remove(&ptr) else { return };
        let (mut at, mut bytes, segment) = (ptr, piece.bytes, piece.segment);
        let small = segment & 1 == 1;
        let before = self.pieces.range(..ptr).next_back();
        if let Some((&addr, other)) = before
            && other.is_free
            && other.segment == segment
            && addr + other.bytes == ptr
        {
            at = addr;
            bytes += other.bytes;
            self.free.remove(&(stream.0, small, other.bytes, addr));
            self.pieces.remove(&addr);
        }
        if let Some(other) = self.pieces.get(&(ptr + piece.bytes))
            && other.is_free
            && other.segment == segment
        {
            let (addr, more) = (ptr + piece.bytes, other.bytes);
            self.free.remove(&(stream.0, small, more, addr));
            self.pieces.remove(&addr);
            bytes += more;
        }
        self.pieces.insert(at, Piece { bytes, segment, is_free: true });
        self.free.insert((stream.0, small, bytes, at));
    }

    fn settle(&mut self, m: &Machine) {
        while let Some((events, ..)) = self.waiting.front() {
            // SAFETY: live events.
            let ready = events.iter().all(|&event| unsafe { m.driver.event_query(event) }.is_ok());
            if !ready {
                return;
            }
            let Some((events, ptr, stream)) = self.waiting.pop_front() else { return };
            self.events.extend(events);
            self.give(ptr, stream);
        }
    }
}

impl Policy for BestFit {
    fn name(&self) -> &'static str {
        "best fit, no stitching"
    }

    fn alloc(&mut self, m: &Machine, bytes: u64, stream: Stream) -> u64 {
        self.settle(m);
        let size = bytes.next_multiple_of(512);
        let small = size <= MIB;
        let from = (stream.0, small, size, 0);
        let found = self.free.range(from..(stream.0, small, u64::MAX, 0)).next().copied();
        let (whole, at) = match found {
            Some((.., whole, at)) => {
                self.free.remove(&(stream.0, small, whole, at));
                (whole, at)
            }
            None => {
                let whole = match size {
                    _ if small => 2 * MIB,
                    _ if size < 10 * MIB => 20 * MIB,
                    _ => size.next_multiple_of(2 * MIB),
                };
                let at = Plain.alloc(m, whole, stream);
                (whole, at)
            }
        };
        let segment = self.pieces.get(&at).map_or(at | u64::from(small), |piece| piece.segment);
        let rest = whole - size;
        let splits = if small { rest >= 512 } else { rest > MIB };
        let taken = if splits { size } else { whole };
        self.pieces.insert(at, Piece { bytes: taken, segment, is_free: false });
        if splits {
            self.pieces.insert(at + size, Piece { bytes: rest, segment, is_free: true });
            self.free.insert((stream.0, small, rest, at + size));
        }
        at
    }

    fn free(&mut self, m: &Machine, ptr: u64, stream: Stream) {
        let users = self.users.remove(&ptr).unwrap_or_default();
        if users.is_empty() {
            return self.give(ptr, stream);
        }
        let mut recorded = Vec::new();
        for user in users {
            let mut event = Event::NULL;
            if let Some(pooled) = self.events.pop() {
                event = pooled;
            } else {
                // SAFETY: a valid place to write to.
                ok(unsafe {
                    m.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING)
                });
            }
            // SAFETY: live objects.
            ok(unsafe { m.driver.event_record(event, user) });
            recorded.push(event);
        }
        self.waiting.push_back((recorded, ptr, stream));
    }

    fn record_use(&mut self, _: &Machine, ptr: u64, stream: Stream) {
        self.users.entry(ptr).or_default().push(stream);
    }
}

/// Calls that take, map or give back memory.
pub(crate) fn memory_calls(m: &Machine) -> u64 {
    [
        Call::cuMemAlloc_v2,
        Call::cuMemFree_v2,
        Call::cuMemAllocAsync,
        Call::cuMemAllocFromPoolAsync,
        Call::cuMemFreeAsync,
        Call::cuMemAddressReserve,
        Call::cuMemAddressFree,
        Call::cuMemCreate,
        Call::cuMemRelease,
        Call::cuMemMap,
        Call::cuMemUnmap,
        Call::cuMemSetAccess,
    ]
    .iter()
    .map(|&call| m.driver.calls(call))
    .sum()
}

/// Calls of events: records, queries, waits.
pub(crate) fn event_calls(m: &Machine) -> u64 {
    [Call::cuEventRecord, Call::cuEventQuery, Call::cuStreamWaitEvent]
        .iter()
        .map(|&call| m.driver.calls(call))
        .sum()
}
