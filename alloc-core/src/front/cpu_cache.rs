//! The caches of all CPUs.
//!
//! A CPU's sections work on the region that its table entry is; `entry` says how an entry changes
//! and who owns a region. Here is what that means: where regions come from, and what leaves them.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use super::entry::{EMPTY_BYTES, Owner, Place, State};
use super::hot;
use super::registration;
use super::room::{Account, Array, BATCH_MAX, Backend, Layout, slots};
use super::rseq::{self, BEFORE, Entry, HEADER_BYTES, Header, Region};
use super::size_class::{CLASSES, SizeClass, class_bytes, is_extent};
use super::tls::{self, RseqArea};
use crate::extent::page_map::PAGE;
use crate::os::linux;

/// The slots of a region.
static LAYOUT: Layout = Layout::new(size_of::<Region>() / 8, slots(1024, 512, 2, 6 << 20));
/// Classes of extents have one in so many bytes of the budget, unless they come and go fast: what is
/// cached of them breaks up the free runs of pages, which costs a training loop faults and a higher peak.
const EXTENT_SHARE: usize = 4;

/// How long nobody asks for a region once there was no memory for one, microseconds.
const AGAIN_US: u64 = 10_000;

/// Bytes of a line of the processor's cache.
const LINE: usize = 64;

const _: () = assert!(size_of::<Region>() == EMPTY_BYTES);

/// The table before there is one: for the indices -2 and -1 of threads without a CPU cache.
pub(super) static NO_TABLE: [Entry; BEFORE] =
    [const { AtomicPtr::new(State::Absent.entry()) }; BEFORE];

/// One CPU, besides its region.
#[repr(C, align(64))]
struct Cpu {
    region: AtomicPtr<Region>,
    account: Account,
    /// A digest of the headers at the last look of [`CpuCaches::drain_idle`].
    digest: AtomicU32,
}

/// The caches of all CPUs of a process.
pub(crate) struct CpuCaches {
    table: AtomicPtr<Entry>,
    cpus: AtomicPtr<Cpu>,
    /// How many CPU indices there can be; 0 before [`CpuCaches::init`] is through.
    count: AtomicUsize,
    initialising: AtomicU32,
    budget: AtomicUsize,
    /// Where the CPU index is in the rseq area.
    index_field: AtomicIsize,
    can_drain: AtomicU32,
    /// See [`CpuCaches::quiet_start`]; one more than that, 0 before it was looked for.
    start: AtomicUsize,
    /// When there was no memory for a region, microseconds; 0: never.
    failed_us: AtomicU64,
    owner: Owner,
}

impl CpuCaches {
    pub(crate) const fn new() -> Self {
        CpuCaches {
            table: AtomicPtr::new((&raw const NO_TABLE).cast::<Entry>().cast_mut()),
            cpus: AtomicPtr::new(null_mut()),
            count: AtomicUsize::new(0),
            initialising: AtomicU32::new(0),
            budget: AtomicUsize::new(8 << 20),
            index_field: AtomicIsize::new(0),
            can_drain: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            failed_us: AtomicU64::new(0),
            owner: Owner::new(),
        }
    }

    /// What the sections address the regions by.
    #[inline(always)]
    pub(crate) fn table(&self) -> *const Entry {
        self.table.load(Relaxed)
    }

    /// Sets the bytes that the room of one CPU may amount to. Classes that are over it shrink as others grow.
    pub(crate) fn set_budget(&self, bytes: usize) {
        self.budget.store(bytes, Relaxed);
    }

    /// Bytes that the room of one CPU may amount to.
    pub(crate) fn budget(&self) -> usize {
        self.budget.load(Relaxed)
    }

    /// CPU indices that there can be; 0 while the caches are not in use.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Acquire)
    }

    /// Whether [`CpuCaches::drain`] can work on this kernel.
    pub(crate) fn can_drain(&self) -> bool {
        self.can_drain.load(Relaxed) != 0
    }

    /// Makes the table, once; the first call decides about `many_nodes` (more than one NUMA node).
    /// False while that isn't done, so that the caller has to do without and come again.
    pub(crate) fn init(&self, backend: &impl Backend, many_nodes: bool) -> bool {
        if self.count() != 0 {
            return true;
        }
        if self.initialising.swap(1, Acquire) != 0 {
            return false;
        }
        let done = self.count() != 0 || self.make_table(backend, many_nodes);
        self.initialising.store(0, Release);
        done
    }

    // Not inlined: its frame would be every slow path's, on threads' small stacks.
    #[cold]
    #[inline(never)]
    fn make_table(&self, backend: &impl Backend, many_nodes: bool) -> bool {
        let count = most_cpus();
        let table_bytes =
            ((BEFORE + count) * size_of::<Entry>()).next_multiple_of(align_of::<Cpu>());
        let base = backend.map(table_bytes + count * size_of::<Cpu>());
        if base.is_null() {
            return false;
        }
        let table = base.cast::<Entry>();
        for i in 0..BEFORE + count {
            // SAFETY: inside the new mapping, aligned, and nobody else has it yet.
            unsafe { table.wrapping_add(i).write(AtomicPtr::new(State::Absent.entry())) };
        }
        self.index_field.store(registration::index_field(many_nodes), Relaxed);
        self.can_drain.store(u32::from(registration::register_fence()), Relaxed);
        // Zero bytes are a valid `Cpu`.
        self.cpus.store(base.wrapping_add(table_bytes).cast(), Relaxed);
        self.table.store(table, Release);
        self.count.store(count, Release);
        true
    }

    /// Lets the calling thread use the caches, after [`CpuCaches::init`]; false where the kernel or
    /// the C library did not register it.
    pub(crate) fn attach_thread(&self) -> bool {
        registration::attach(self.index_field.load(Relaxed))
    }

    fn cpu(&self, cpu: usize) -> &Cpu {
        assert!(cpu < self.count());
        // SAFETY: as many CPUs as entries, in zeroed memory, for good.
        unsafe { &*self.cpus.load(Relaxed).wrapping_add(cpu) }
    }

    fn place(&self, cpu: usize) -> Place<'_, Region> {
        let region = &self.cpu(cpu).region;
        // SAFETY: the table has an entry for each of the CPUs, and lives for good.
        let entry = unsafe { &*self.table().wrapping_add(BEFORE + cpu) };
        Place { entry, region }
    }

    fn region(&self, cpu: usize) -> Option<&Region> {
        self.place(cpu).region()
    }

    /// The cache of `cpu`, made or taken up again if it has to be; `None` where there is none to
    /// be had now.
    pub(crate) fn open(&self, backend: &impl Backend, cpu: usize) -> Option<OnCpu<'_>> {
        if cpu >= self.count() {
            return None;
        }
        let region = self.place(cpu).open(|| self.make_region(backend))?;
        Some(OnCpu { caches: self, cpu, region })
    }

    /// Null, or a new region without blocks and without room. Where there was no memory for one, nobody
    /// asks again for [`AGAIN_US`]: every call that comes here would.
    fn make_region(&self, backend: &impl Backend) -> *mut Region {
        let failed_us = self.failed_us.load(Relaxed);
        if failed_us != 0 && linux::now_us().wrapping_sub(failed_us) < AGAIN_US {
            return null_mut();
        }
        let start = self.quiet_start();
        let memory = backend.map(start + LAYOUT.bytes);
        if memory.is_null() {
            self.failed_us.store(linux::now_us().max(1), Relaxed);
            return null_mut();
        }
        let region = memory.wrapping_add(start).cast::<Region>();
        // SAFETY: zeroed memory of at least a region's size, aligned to a line, that nobody else has yet.
        empty_headers(unsafe { &*region });
        region
    }

    /// How far into its first page a region is to start: where no header has the place in a page that
    /// a word has which malloc or free reads. A load from the place of a store that is still under way
    /// may be held up by it, although it is another page's: 2 to 12 ns for each call, seen on Zen 4.
    fn quiet_start(&self) -> usize {
        if let Some(start) = self.start.load(Relaxed).checked_sub(1) {
            return start;
        }
        let words = self.words();
        let meets = |start: usize| words.clone().filter(|&word| is_header(word, start)).count();
        let start = (0..PAGE).step_by(LINE).min_by_key(|&start| meets(start)).unwrap_or(0);
        self.start.store(start + 1, Relaxed);
        start
    }

    /// The addresses of what the fast paths read beside a region, as far as they are always the same.
    fn words(&self) -> impl Iterator<Item = usize> + Clone {
        let entry = self.table().wrapping_add(BEFORE).addr();
        let thread = tls::tls().words();
        let words = [entry, thread, registration::area(), tls::offset_word().unwrap_or(thread)];
        words.into_iter().chain(hot::span().step_by(LINE))
    }

    /// Empties the cache of `cpu`: all its blocks go to the backend, its classes have no room
    /// left. `None` where somebody else owns it or the kernel can't fence; else the number of blocks.
    pub(crate) fn drain(&self, backend: &impl Backend, cpu: usize) -> Option<usize> {
        if !self.can_drain() {
            return None;
        }
        self.place(cpu).drain(
            &self.owner,
            || self.fence(Some(cpu)),
            |region| {
                // Not simply to 0: a thread may be about to release what it reserved and has no
                // use for.
                let account = &self.cpu(cpu).account;
                rooms(region).for_each(|(class, bytes)| account.release(class, bytes));
                take_out(region, backend, cpu)
            },
        )
    }

    /// Empties the caches of all CPUs; the number of blocks.
    pub(crate) fn drain_all(&self, backend: &impl Backend) -> usize {
        (0..self.count()).filter_map(|cpu| self.drain(backend, cpu)).sum()
    }

    /// Empties the caches of the CPUs on which nothing happened since the last two calls; the
    /// number of blocks. For the background thread, a few times a second or less.
    ///
    /// A cache whose headers look as they did is parked first, which costs its next user one slow
    /// operation. Only one that is still parked at the next call is idle for sure.
    pub(crate) fn drain_idle(&self, backend: &impl Backend) -> usize {
        let mut drained = 0;
        for cpu in 0..if self.can_drain() { self.count() } else { 0 } {
            let Cpu { account, digest: last, .. } = self.cpu(cpu);
            let same = |region: &Region| {
                let digest = digest(region);
                last.swap(digest, Relaxed) == digest
            };
            if self.place(cpu).is_idle(same, || account.used() > 0) {
                drained += self.drain(backend, cpu).unwrap_or(0);
            }
        }
        drained
    }

    /// Bytes of room and blocks in the caches of all CPUs, by a glance.
    pub(crate) fn used_bytes(&self) -> usize {
        (0..self.count()).map(|cpu| self.cpu(cpu).account.used()).sum()
    }

    /// Blocks of `class` in the caches of all CPUs, by a glance.
    pub(crate) fn cached_blocks(&self, class: SizeClass) -> usize {
        let blocks = |region: &Region| region.header(class).cur.saturating_sub(LAYOUT.first(class));
        (0..self.count()).filter_map(|cpu| self.region(cpu)).map(|r| usize::from(blocks(r))).sum()
    }

    /// Before a fork: takes every cache out of use, so that the child's copy of it is whole. Only
    /// [`CpuCaches::fork_parent`] or [`CpuCaches::fork_child`] puts them back.
    pub(crate) fn fork_prepare(&self) {
        self.owner.hold();
        while self.initialising.swap(1, Acquire) != 0 {
            linux::yield_now();
        }
        (0..self.count()).for_each(|cpu| self.place(cpu).seize());
        self.fence(None);
    }

    /// After a fork, in the parent.
    pub(crate) fn fork_parent(&self) {
        (0..self.count()).for_each(|cpu| self.place(cpu).put_back());
        self.initialising.store(0, Release);
        self.owner.release();
    }

    /// After a fork, in the child. Without a fence its copies may be torn: it forgets what is in
    /// them, and those blocks are lost to it.
    pub(crate) fn fork_child(&self) {
        for cpu in 0..self.count() {
            let Some(region) = self.region(cpu) else {
                continue;
            };
            if !self.can_drain() {
                empty_headers(region);
            }
            // Threads that the child does not have may have been about to change it.
            self.cpu(cpu).account.set(rooms(region));
        }
        self.fork_parent();
    }

    fn fence(&self, cpu: Option<usize>) -> bool {
        // An `mm_cid` does not say which CPU it is on.
        let names_cpu = self.index_field.load(Relaxed) == RseqArea::CPU_ID;
        registration::fence(cpu.filter(|_| names_cpu))
    }
}

/// The cache of the CPU that the thread was on a moment ago.
pub(crate) struct OnCpu<'a> {
    caches: &'a CpuCaches,
    cpu: usize,
    region: &'a Region,
}

impl OnCpu<'_> {
    /// `most`, or what the other part of the classes leaves of the whole budget.
    fn most_beside(&self, class: SizeClass, most: usize) -> usize {
        most.min(self.caches.budget().saturating_sub(self.account().used_beside(class)))
    }
}

impl Array for OnCpu<'_> {
    fn layout(&self) -> &'static Layout {
        &LAYOUT
    }

    fn account(&self) -> &Account {
        &self.caches.cpu(self.cpu).account
    }

    fn budget(&self, class: SizeClass) -> usize {
        let all = self.caches.budget();
        let extents = all / EXTENT_SHARE;
        if is_extent(class) { extents } else { self.most_beside(class, all - extents) }
    }

    fn budget_when_fast(&self, class: SizeClass) -> usize {
        let all = self.caches.budget();
        self.most_beside(class, all - all / EXTENT_SHARE)
    }

    fn arena(&self) -> usize {
        self.cpu
    }

    fn header(&self, class: SizeClass) -> Header {
        self.region.header(class)
    }

    fn replace(&self, class: SizeClass, old: Header, new: Header) -> bool {
        // SAFETY: the table has an entry for every CPU that can be; `room` keeps to the layout.
        unsafe { rseq::replace(self.caches.table(), self.region, class, old, new) }
    }

    fn pop_batch(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
        // SAFETY: as above.
        unsafe { rseq::pop_batch(self.caches.table(), class, out) }
    }

    fn push_batch(&self, class: SizeClass, blocks: &[*mut u8]) -> usize {
        // SAFETY: as above; the blocks are the caller's.
        unsafe { rseq::push_batch(self.caches.table(), class, blocks) }
    }
}

/// Whether `word` has the place in its page that a header of a region at `start` has in another.
fn is_header(word: usize, start: usize) -> bool {
    word.wrapping_sub(start) % PAGE < (CLASSES + 1) * HEADER_BYTES
}

#[allow(clippy::cast_possible_truncation, reason = "CLASSES is below 256")]
fn classes() -> impl Iterator<Item = SizeClass> {
    1..=CLASSES as SizeClass
}

fn empty_headers(region: &Region) {
    for class in classes() {
        region.set_header(class, LAYOUT.empty(class));
    }
}

/// Gives all blocks of a region that the caller owns to the backend; how many.
fn take_out(region: &Region, backend: &impl Backend, cpu: usize) -> usize {
    let mut taken = 0;
    for class in classes() {
        let first = LAYOUT.first(class);
        let count = usize::from(region.header(class).cur.saturating_sub(first));
        // SAFETY: this many slots of the class hold blocks; the region is the caller's alone.
        let blocks = unsafe { core::slice::from_raw_parts(region.slot(first).cast_const(), count) };
        for batch in blocks.chunks(BATCH_MAX) {
            backend.store(cpu, class, batch);
        }
        taken += count;
        region.set_header(class, LAYOUT.empty(class));
    }
    taken
}

fn digest(region: &Region) -> u32 {
    classes().fold(1, |sum: u32, class| {
        let Header { cur, end } = region.header(class);
        (sum ^ u32::from(cur) ^ u32::from(end) << 16).wrapping_mul(0x9e37_79b1).rotate_left(5)
    })
}

/// What the room of a region amounts to.
/// Bytes of room, by class.
fn rooms(region: &Region) -> impl Iterator<Item = (SizeClass, usize)> {
    let room = |class| region.header(class).end.saturating_sub(LAYOUT.first(class));
    classes().map(move |class| (class, usize::from(room(class)) * class_bytes(class)))
}

/// A bound of the CPU indices: what the kernel's own CPU masks hold. No list of CPUs is as sure.
#[inline(never)]
fn most_cpus() -> usize {
    linux::sched_getaffinity(&mut [0; 1024]).map_or(8192, |bytes| bytes * 8)
}

#[cfg(test)]
mod tests;
