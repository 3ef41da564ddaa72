//! Pinned host memory, kept for the next user. It is mapped by this pool itself in huge pages near
//! the device and then registered, so the host allocator never purges, trims, collapses or moves
//! it, and a child of fork does not have it.
//!
//! Invariant: a block is used again only when every stream whose use was recorded is past it.

use crate::driver::{Error, Stream, constant};
use crate::gpu::{Gpu, lock};
use crate::heap::Need;
use crate::ledger::{Entered, Entry, Space};
use crate::pool::{Inner, Pool};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// From here on sizes are exact.
const EXACT_FROM: usize = 64 << 20;
/// Smaller blocks share a registered segment.
const SHARED_MAX: usize = 1 << 20;
const SEGMENT: usize = 8 << 20;
const SMALLEST: usize = 512;

/// The size of a block: eight steps for each doubling, whole pages above 64 MiB.
fn class_bytes(bytes: usize) -> usize {
    if bytes <= SMALLEST {
        return SMALLEST;
    }
    if bytes > EXACT_FROM {
        return bytes.next_multiple_of(PAGE);
    }
    let step = 1usize << ((bytes - 1).ilog2() - 3).max(6);
    bytes.next_multiple_of(step)
}

/// Why there is no pinned memory.
#[derive(Clone, Debug)]
pub enum PinnedError {
    /// The kernel gave no memory.
    NoMemory {
        /// The bytes asked for.
        bytes: usize,
    },
    /// The driver did not pin it.
    NotPinned {
        /// The bytes asked for.
        bytes: usize,
        /// What the driver said.
        error: Error,
        /// The process's limit of locked memory; `None` where it has none.
        memlock_bytes: Option<u64>,
        /// What this pool has pinned.
        pinned_bytes: u64,
    },
}

impl fmt::Display for PinnedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory { bytes } => {
                write!(f, "thermalloc: pinned memory: the kernel gave no {bytes} bytes")
            }
            Self::NotPinned { bytes, error, memlock_bytes, pinned_bytes } => {
                write!(
                    f,
                    "thermalloc: pinned memory: {bytes} bytes: {error}; {pinned_bytes} are pinned"
                )?;
                match memlock_bytes {
                    Some(limit) => write!(
                        f,
                        "; RLIMIT_MEMLOCK is {limit} bytes: hint: raise it with ulimit -l, or LimitMEMLOCK of the service"
                    ),
                    None => f.write_str("; RLIMIT_MEMLOCK is unlimited"),
                }
            }
        }
    }
}

impl std::error::Error for PinnedError {}

/// A mapping that is registered as one.
#[derive(Debug)]
struct Segment {
    base: usize,
    bytes: usize,
    /// The driver allocated it, since it does not register.
    by_driver: bool,
    live: usize,
    idle_since_ms: u64,
    class: usize,
}

#[derive(Clone, Debug)]
struct Block {
    segment: usize,
    class: usize,
    requested: usize,
    uses: Vec<Need>,
    is_live: bool,
}

#[derive(Debug, Default)]
struct Books {
    segments: BTreeMap<usize, Segment>,
    blocks: HashMap<usize, Block>,
    /// By size, the addresses that are free.
    free: BTreeMap<usize, Vec<usize>>,
    pending: Vec<usize>,
    stats: PinnedStats,
    /// The blocks that a ledger has, by address.
    entered: Entered,
}

/// Figures of a pinned pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedStats {
    /// Memory that is pinned.
    pub pinned_bytes: u64,
    /// Blocks in use, with their rounding.
    pub active_bytes: u64,
    /// What was asked for in these.
    pub requested_bytes: u64,
    /// Blocks given back that a stream may still use.
    pub pending_bytes: u64,
    /// Allocations.
    pub allocs: u64,
    /// Allocations that pinned new memory.
    pub misses: u64,
}

/// A pool of pinned host memory.
pub struct PinnedPool {
    inner: Arc<Inner>,
    node: Option<u32>,
    books: Mutex<Books>,
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of pinned host memory near this device.
    pub fn pinned(&self) -> PinnedPool {
        let node = node_of(&self.inner.gpu);
        let entered = Entered::new(self.inner.ledger);
        let books = Mutex::new(Books { entered, ..Books::default() });
        PinnedPool { inner: Arc::clone(&self.inner), node, books }
    }
}

/// The NUMA node next to a device, as the driver or the kernel says it.
fn node_of(gpu: &Gpu) -> Option<u32> {
    let asked = gpu.driver.attribute(gpu.device, constant::DEVICE_ATTRIBUTE_HOST_NUMA_ID);
    if let Ok(node) = asked
        && node > 0
    {
        return u32::try_from(node).ok();
    }
    let mut id = [0; 32];
    // SAFETY: a valid place for that many bytes.
    unsafe { gpu.driver.device_get_pci_bus_id(id.as_mut_ptr(), 31, gpu.device) }.ok()?;
    let id: Vec<u8> = id.iter().take_while(|&&c| c != 0).map(|&c| c.cast_unsigned()).collect();
    let id = String::from_utf8(id).ok()?.to_lowercase();
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{id}/numa_node")).ok()?;
    text.trim().parse().ok()
}

/// Maps memory of whole huge pages, near `node`, that a child of fork does not get.
fn map(bytes: usize, node: Option<u32>) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let whole = bytes + HUGE;
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let found =
        unsafe { libc::mmap(null, whole, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if found == libc::MAP_FAILED {
        return None;
    }
    let start = found.addr();
    let base = start.next_multiple_of(HUGE);
    unmap(start, base - start);
    unmap(base + bytes, start + whole - base - bytes);
    let at = std::ptr::without_provenance_mut::<c_void>(base);
    // SAFETY: our own mapping. Advice may be refused; the memory is as good without.
    let _ = unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
    // SAFETY: as above.
    let _ = unsafe { libc::madvise(at, bytes, libc::MADV_DONTFORK) };
    if let Some(node) = node.filter(|&node| node < 64) {
        let (mask, preferred) = (1u64 << node, 1);
        // SAFETY: our own mapping, and a mask of 64 bits that outlives the call.
        let _ = unsafe {
            libc::syscall(libc::SYS_mbind, at, bytes, preferred, &raw const mask, 65usize, 0)
        };
    }
    Some(base)
}

fn unmap(base: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: a mapping of ours that nobody uses.
        unsafe { libc::munmap(std::ptr::without_provenance_mut(base), bytes) };
    }
}

fn memlock_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid place to write to.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (got == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

impl PinnedPool {
    /// A block of at least `bytes` that the device reaches by direct memory access.
    ///
    /// # Errors
    /// There is no memory, or the driver does not pin it.
    pub fn alloc(&self, bytes: usize) -> Result<NonNull<u8>, PinnedError> {
        let class = class_bytes(bytes);
        self.settle();
        let mut books = lock(&self.books);
        books.stats.allocs += 1;
        if let Some(ptr) = books.take(class, bytes) {
            return Ok(self.enter(&mut books, ptr, bytes));
        }
        books.stats.misses += 1;
        let pinned_bytes = books.stats.pinned_bytes;
        drop(books);
        let segment = self.pin(class, bytes, pinned_bytes)?;
        let mut books = lock(&self.books);
        books.add(segment);
        let ptr = books.take(class, bytes).ok_or(PinnedError::NoMemory { bytes })?;
        Ok(self.enter(&mut books, ptr, bytes))
    }

    /// Enters a block into the ledger.
    fn enter(&self, books: &mut Books, ptr: NonNull<u8>, bytes: usize) -> NonNull<u8> {
        let addr = ptr.addr().get();
        if books.entered.is_on() {
            let entry = Entry {
                space: Space::Pinned,
                device: self.inner.gpu.ordinal,
                addr: addr as u64,
                bytes: bytes as u64,
                usable_bytes: books.blocks[&addr].class as u64,
                stream: Stream::NULL,
                tag: "",
            };
            books.entered.enter(addr as u64, &entry);
        }
        ptr
    }

    fn pin(&self, class: usize, bytes: usize, pinned_bytes: u64) -> Result<Segment, PinnedError> {
        let span = if class <= SHARED_MAX { SEGMENT } else { class.next_multiple_of(PAGE) };
        let idle_since_ms = self.inner.now_ms();
        let not_pinned = |error| PinnedError::NotPinned {
            bytes,
            error,
            memlock_bytes: memlock_bytes(),
            pinned_bytes,
        };
        let gpu = &self.inner.gpu;
        let _current = gpu.enter().map_err(not_pinned)?;
        let whole = span.next_multiple_of(PAGE);
        let base = map(whole, self.node).ok_or(PinnedError::NoMemory { bytes })?;
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(base);
        let flags = constant::MEMHOSTREGISTER_PORTABLE;
        // SAFETY: a mapping of ours of that size, which is unregistered before it is unmapped.
        let registered = unsafe { gpu.driver.mem_host_register(at, whole, flags) };
        match registered {
            Ok(()) => {
                Ok(Segment { base, bytes: whole, by_driver: false, live: 0, idle_since_ms, class })
            }
            Err(first) => {
                unmap(base, whole);
                let mut ptr = std::ptr::null_mut();
                // Some virtual devices do not register foreign memory.
                // SAFETY: a valid place to write to.
                let made = unsafe {
                    gpu.driver.mem_host_alloc(&raw mut ptr, whole, constant::MEMHOSTALLOC_PORTABLE)
                };
                made.map_err(|_| not_pinned(first))?;
                let base = ptr.expose_provenance();
                Ok(Segment { base, bytes: whole, by_driver: true, live: 0, idle_since_ms, class })
            }
        }
    }

    /// Says that `stream` uses the block until it is freed.
    pub fn record_use(&self, ptr: NonNull<u8>, stream: Stream) {
        let user = self.inner.stream(stream);
        if let Some(block) = lock(&self.books).blocks.get_mut(&ptr.addr().get())
            && block.uses.iter().all(|need| need.stream != user.index)
        {
            block.uses.push(Need { stream: user.index, epoch: 0 });
        }
    }

    /// Gives a block back; it is used again when the recorded streams are past it. `false` if no
    /// block in use starts there.
    ///
    /// # Safety
    /// Nobody uses the block any more but work submitted to the recorded streams.
    pub unsafe fn free(&self, ptr: NonNull<u8>) -> bool {
        let addr = ptr.addr().get();
        let mut books = lock(&self.books);
        let Some(block) = books.blocks.get_mut(&addr) else { return false };
        if !std::mem::replace(&mut block.is_live, false) {
            return false;
        }
        for need in &mut block.uses {
            need.epoch = self.inner.stream_at(need.stream).stamp();
        }
        let (class, requested, waits) = (block.class, block.requested, !block.uses.is_empty());
        books.stats.active_bytes -= class as u64;
        books.stats.requested_bytes -= requested as u64;
        books.entered.leave(addr as u64, Stream::NULL, waits);
        if waits {
            books.stats.pending_bytes += class as u64;
            books.pending.push(addr);
        } else {
            books.give(addr, self.inner.now_ms());
        }
        true
    }

    /// Frees the blocks whose streams are past them.
    fn settle(&self) {
        let mut needs: Vec<Need> = Vec::new();
        {
            let books = lock(&self.books);
            for addr in &books.pending {
                needs.extend(books.blocks[addr].uses.iter().copied());
            }
        }
        if needs.is_empty() || self.inner.captures.any() {
            return;
        }
        let mut newest: HashMap<u32, u64> = HashMap::new();
        for need in needs {
            let epoch = newest.entry(need.stream).or_default();
            *epoch = need.epoch.max(*epoch);
        }
        for (&stream, &epoch) in &newest {
            let stream = self.inner.stream_at(stream);
            // A stream that fails says so to its own user; its memory stays where it is.
            let _ = stream.close(&self.inner.gpu, epoch);
            let _ = stream.poll(&self.inner.gpu);
        }
        let now_ms = self.inner.now_ms();
        let mut books = lock(&self.books);
        for addr in std::mem::take(&mut books.pending) {
            let done = books.blocks[&addr]
                .uses
                .iter()
                .all(|need| self.inner.stream_at(need.stream).is_done(need.epoch));
            if done {
                let class = books.blocks[&addr].class;
                books.stats.pending_bytes -= class as u64;
                books.entered.leave(addr as u64, Stream::NULL, false);
                books.give(addr, now_ms);
            } else {
                books.pending.push(addr);
            }
        }
    }

    /// Unpins segments that were idle for `idle_ms`; the bytes that went.
    pub fn trim(&self, idle_ms: u64) -> u64 {
        self.settle();
        let now_ms = self.inner.now_ms();
        let gone = lock(&self.books).drop_idle(|since| now_ms.saturating_sub(since) >= idle_ms);
        gone.iter().for_each(|segment| self.unpin(segment));
        gone.iter().map(|segment| segment.bytes as u64).sum()
    }

    fn unpin(&self, segment: &Segment) {
        let Ok(_current) = self.inner.gpu.enter() else { return };
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(segment.base);
        let driver = &self.inner.gpu.driver;
        if segment.by_driver {
            // SAFETY: it was allocated there and nobody uses it.
            let _ = unsafe { driver.mem_free_host(at) };
        } else {
            // SAFETY: it was registered as one and nobody uses it.
            let _ = unsafe { driver.mem_host_unregister(at) };
            unmap(segment.base, segment.bytes);
        }
    }

    /// The figures of this moment.
    pub fn stats(&self) -> PinnedStats {
        lock(&self.books).stats
    }

    /// The NUMA node that the memory is on, where that is known.
    pub fn node(&self) -> Option<u32> {
        self.node
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        // What streams still copy from must not be unmapped.
        let _ = self.inner.gpu.synchronize();
        let segments = {
            let mut books = lock(&self.books);
            books.entered.leave_all();
            std::mem::take(&mut books.segments)
        };
        segments.values().for_each(|segment| self.unpin(segment));
    }
}

impl Books {
    fn take(&mut self, class: usize, requested: usize) -> Option<NonNull<u8>> {
        // Above 64 MiB sizes are exact: the next larger one may serve, if it wastes little.
        let most = if class > EXACT_FROM { class + class / 8 } else { class };
        let (&found, _) = self.free.range(class..=most).find(|(_, list)| !list.is_empty())?;
        let addr = self.free.get_mut(&found)?.pop()?;
        let block = self.blocks.get_mut(&addr)?;
        block.requested = requested;
        block.is_live = true;
        block.uses.clear();
        let segment = block.segment;
        self.segments.get_mut(&segment)?.live += 1;
        self.stats.active_bytes += found as u64;
        self.stats.requested_bytes += requested as u64;
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr))
    }

    fn add(&mut self, segment: Segment) {
        let (base, class) = (segment.base, segment.class);
        self.stats.pinned_bytes += segment.bytes as u64;
        let count = if class <= SHARED_MAX { segment.bytes / class } else { 1 };
        for i in (0..count).rev() {
            let addr = base + i * class;
            let block =
                Block { segment: base, class, requested: 0, uses: Vec::new(), is_live: false };
            self.blocks.insert(addr, block);
            self.free.entry(class).or_default().push(addr);
        }
        self.segments.insert(base, segment);
    }

    fn give(&mut self, addr: usize, now_ms: u64) {
        let block = &self.blocks[&addr];
        let (class, base) = (block.class, block.segment);
        self.free.entry(class).or_default().push(addr);
        if let Some(segment) = self.segments.get_mut(&base) {
            segment.live -= 1;
            segment.idle_since_ms = now_ms;
        }
    }

    fn drop_idle(&mut self, is_old: impl Fn(u64) -> bool) -> Vec<Segment> {
        let idle: Vec<usize> = self
            .segments
            .values()
            .filter(|segment| segment.live == 0 && is_old(segment.idle_since_ms))
            .map(|segment| segment.base)
            .collect();
        let mut gone = Vec::new();
        for base in idle {
            let Some(segment) = self.segments.remove(&base) else { continue };
            let range = base..base + segment.bytes;
            self.blocks.retain(|addr, _| !range.contains(addr));
            for list in self.free.values_mut() {
                list.retain(|addr| !range.contains(addr));
            }
            self.stats.pinned_bytes -= segment.bytes as u64;
            gone.push(segment);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_an_eighth_and_nothing_above_64_mib() {
        for bytes in (1..200_000).chain((20..38).map(|lg| (1 << lg) + 1)) {
            let class = class_bytes(bytes);
            assert!(class >= bytes);
            if bytes > EXACT_FROM {
                assert!(class - bytes < PAGE, "{bytes}");
            } else if bytes > SMALLEST {
                assert!(class - bytes <= bytes / 8, "{bytes} {class}");
            }
        }
        // The request of the complaint: 20.4 GiB pinned 32.
        let bytes = 20_400 << 20;
        assert!(class_bytes(bytes) - bytes < PAGE);
    }
}
