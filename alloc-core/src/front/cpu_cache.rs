//! The caches of all CPUs.
//!
//! A CPU's sections work on the region that its table entry is; `entry` says how an entry changes
//! and who owns a region. Here is what that means: where regions come from, and what leaves them.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use super::entry::{EMPTY_BYTES, Owner, Place, State};
use super::hot;
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
        self.index_field.store(rseq::index_field(many_nodes), Relaxed);
        self.can_drain.store(u32::from(rseq::register_fence()), Relaxed);
        // Zero bytes are a valid `Cpu`.
        self.cpus.store(base.wrapping_add(table_bytes).cast(), Relaxed);
        self.table.store(table, Release);
        self.count.store(count, Release);
        true
    }

    /// Lets the calling thread use the caches, after [`CpuCaches::init`]; false where the kernel or
    /// the C library did not register it.
    pub(crate) fn attach_thread(&self) -> bool {
        rseq::attach(self.index_field.load(Relaxed))
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
        let words = [entry, thread, rseq::area(), tls::offset_word().unwrap_or(thread)];
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
        rseq::fence(cpu.filter(|_| names_cpu))
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
mod tests {
    use super::super::room::testing::Tokens;
    use super::super::tls::tls;
    use super::*;
    use crate::front::room;
    use std::boxed::Box;
    use std::ptr;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::{Duration, Instant};
    use std::vec::Vec;

    const SMALL: [SizeClass; 3] = [2, 32, 72];

    /// The front end's slow path of an allocation.
    fn refill(caches: &CpuCaches, backend: &impl Backend, cpu: usize, class: SizeClass) -> *mut u8 {
        let mut block = [null_mut(); 1];
        match caches.open(backend, cpu) {
            Some(cache) => return room::refill(&cache, backend, class),
            None => backend.fetch(cpu, class, &mut block),
        };
        block[0]
    }

    /// The front end's slow path of a free.
    fn overflow(
        caches: &CpuCaches,
        backend: &impl Backend,
        cpu: usize,
        class: SizeClass,
        block: *mut u8,
    ) {
        match caches.open(backend, cpu) {
            Some(cache) => room::overflow(&cache, backend, class, block),
            None => backend.store(cpu, class, &[block]),
        }
    }

    #[test]
    fn headers_keep_out_of_the_places_of_what_the_fast_paths_read() {
        let tokens = Tokens::new(&[4], 10);
        let caches = caches(&tokens);
        let region = ptr::from_ref(caches.open(&tokens, 1).unwrap().region).addr();
        let met = caches.words().filter(|&word| is_header(word, region)).count();
        // The block and four words lie where they lie: two gaps between them may have to be one.
        assert!(met <= 2 && caches.words().count() == 21, "{met} of {}", caches.words().count());
    }

    fn caches(tokens: &Tokens) -> &'static CpuCaches {
        let caches = Box::leak(Box::new(CpuCaches::new()));
        assert!(caches.init(tokens, false));
        caches
    }

    /// What `front::alloc` does, on these caches.
    fn alloc(caches: &CpuCaches, tokens: &Tokens, class: SizeClass) -> *mut u8 {
        // SAFETY: the table has an entry for every CPU.
        match unsafe { rseq::pop(caches.table(), usize::from(class)) } {
            block if block.is_null() => refill(caches, tokens, rseq::cpu().unwrap(), class),
            block => block,
        }
    }

    fn free(caches: &CpuCaches, tokens: &Tokens, class: SizeClass, block: *mut u8) {
        // SAFETY: the table has an entry for every CPU.
        if !unsafe { rseq::push_code(caches.table(), class, block) } {
            overflow(caches, tokens, rseq::cpu().unwrap(), class, block);
        }
    }

    /// Whether this machine has restartable sequences at all; the rest of the test has no object if not.
    fn attached(caches: &CpuCaches) -> bool {
        caches.attach_thread()
    }

    #[test]
    fn a_thread_that_is_not_attached_finds_nothing_and_has_no_room() {
        let tokens = Tokens::new(&[1], 1);
        let caches = caches(&tokens);
        tls().cpu_index.set(0);
        assert_eq!(rseq::cpu(), None);
        for code in 0..=255 {
            // SAFETY: the table has an entry for every CPU.
            assert!(!unsafe {
                rseq::push_code(caches.table(), code, ptr::without_provenance_mut(1))
            });
        }
        let mut out = [null_mut(); 4];
        for class in classes() {
            // SAFETY: as above.
            assert!(unsafe { rseq::pop(caches.table(), usize::from(class)) }.is_null());
            // SAFETY: as above.
            let n = unsafe { rseq::pop_batch(caches.table(), class, &mut out) };
            assert_eq!(n, 0);
        }
    }

    #[test]
    fn nothing_but_a_class_is_ever_pushed() {
        let tokens = Tokens::new(&[1], 1);
        let caches = caches(&tokens);
        if !attached(caches) {
            return;
        }
        caches.open(&tokens, rseq::cpu().unwrap()).unwrap();
        for code in (CLASSES + 1..256).chain([0]) {
            let code = u8::try_from(code).unwrap();
            // SAFETY: the table has an entry for every CPU.
            assert!(!unsafe {
                rseq::push_code(caches.table(), code, ptr::without_provenance_mut(1))
            });
        }
    }

    #[test]
    fn a_batch_pops_in_its_own_order() {
        let tokens = Tokens::new(&[8], 100);
        let caches = caches(&tokens);
        if !attached(caches) {
            return;
        }
        // One CPU for the whole test.
        pin(&[0]);
        let first = alloc(caches, &tokens, 8);
        let blocks: Vec<*mut u8> = (0..20).map(|_| alloc(caches, &tokens, 8)).collect();
        let array = caches.open(&tokens, rseq::cpu().unwrap()).unwrap();
        while array.pop_batch(8, &mut [null_mut(); 32]) > 0 {}
        assert_eq!(array.push_batch(8, &blocks), 20);
        assert_eq!(alloc(caches, &tokens, 8), blocks[0]);
        let mut out = [null_mut(); 32];
        assert_eq!(array.pop_batch(8, &mut out), 19);
        assert_eq!(out[..19], blocks[1..]);
        // A batch that does not fit goes in as far as there is room.
        let many: Vec<*mut u8> = (1..2000).map(ptr::without_provenance_mut).collect();
        let room = array.header(8).end - array.header(8).cur;
        assert_eq!(array.push_batch(8, &many), usize::from(room));
        assert_eq!(array.push_batch(8, &[first]), 0);
        assert_eq!(array.push_batch(8, &[]), 0);
        pin(&[0, 1]);
    }

    #[test]
    fn only_the_header_that_was_read_is_replaced() {
        let tokens = Tokens::new(&[8], 100);
        let caches = caches(&tokens);
        if !attached(caches) {
            return;
        }
        pin(&[0]);
        let array = caches.open(&tokens, rseq::cpu().unwrap()).unwrap();
        let old = array.header(8);
        let new = Header { end: old.end + 5, ..old };
        assert!(!array.replace(8, new, old));
        assert!(array.replace(8, old, new));
        assert_eq!(array.header(8), new);
        caches.fork_prepare();
        assert!(!array.replace(8, new, old), "the region is not in the table");
        caches.fork_parent();
        assert!(array.replace(8, new, old));
        pin(&[0, 1]);
    }

    #[test]
    fn a_drained_cache_is_empty_and_comes_back() {
        let tokens = Tokens::new(&SMALL, 1000);
        let caches = caches(&tokens);
        if !attached(caches) || !caches.can_drain() {
            return;
        }
        for _ in 0..2 {
            let blocks: Vec<_> = (0..100).map(|_| alloc(caches, &tokens, 2)).collect();
            blocks.iter().for_each(|&b| free(caches, &tokens, 2, b));
            assert!(caches.cached_blocks(2) >= 32 && caches.used_bytes() >= 1024);
            assert!(caches.drain_all(&tokens) >= 32);
            assert_eq!((caches.cached_blocks(2), caches.used_bytes()), (0, 0));
            assert_eq!(tokens.missing(), 0);
        }
    }

    #[test]
    fn an_idle_cache_is_drained_and_a_busy_one_is_not() {
        let tokens = Tokens::new(&SMALL, 1000);
        let caches = caches(&tokens);
        if !attached(caches) || !caches.can_drain() {
            return;
        }
        let _alone = ALONE.lock();
        pin(&[0]);
        let kept = [alloc(caches, &tokens, 2), alloc(caches, &tokens, 2)];
        for _ in 0..10 {
            // The headers look the same each time, and still there was something going on.
            let block = alloc(caches, &tokens, 2);
            free(caches, &tokens, 2, block);
            assert_eq!(caches.drain_idle(&tokens), 0);
        }
        let drained: Vec<_> = (0..5).map(|_| caches.drain_idle(&tokens)).collect();
        assert_eq!(drained.iter().filter(|&&n| n > 0).count(), 1, "{drained:?}");
        assert_eq!(caches.used_bytes(), 0);
        // The first goes home, the second has room.
        kept.iter().for_each(|&block| free(caches, &tokens, 2, block));
        assert!(caches.cached_blocks(2) > 0);
        pin(&[0, 1]);
    }

    #[test]
    fn a_forked_child_has_whole_caches_and_one_without_a_fence_has_empty_ones() {
        let tokens = Tokens::new(&SMALL, 1000);
        let caches = caches(&tokens);
        if !attached(caches) {
            return;
        }
        let block = alloc(caches, &tokens, 2);
        free(caches, &tokens, 2, block);
        let cached = caches.cached_blocks(2);
        caches.fork_prepare();
        // In between every operation goes past the caches.
        let fetches = tokens.fetches.load(Relaxed);
        let between = alloc(caches, &tokens, 2);
        assert_eq!(tokens.fetches.load(Relaxed), fetches + 1);
        free(caches, &tokens, 2, between);
        caches.fork_child();
        assert_eq!(caches.cached_blocks(2), cached);
        caches.can_drain.store(0, Relaxed);
        caches.fork_prepare();
        caches.fork_child();
        assert_eq!(caches.cached_blocks(2), 0);
        assert!(!alloc(caches, &tokens, 2).is_null());
    }

    #[test]
    fn there_is_no_cache_without_memory_for_one() {
        struct Poor<'a>(&'a Tokens, usize);
        impl Backend for Poor<'_> {
            fn map(&self, bytes: usize) -> *mut u8 {
                if bytes > self.1 { null_mut() } else { self.0.map(bytes) }
            }
            fn fetch(&self, arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
                self.0.fetch(arena, class, out)
            }
            fn store(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]) {
                self.0.store(arena, class, blocks);
            }
        }
        let tokens = Tokens::new(&[2], 1);
        let caches = CpuCaches::new();
        assert!(!caches.init(&Poor(&tokens, 0), false) && caches.count() == 0);
        let poor = Poor(&tokens, LAYOUT.bytes - 1);
        assert!(caches.init(&poor, false));
        if !attached(&caches) {
            return;
        }
        let cpu = rseq::cpu().unwrap();
        let block = refill(&caches, &poor, cpu, 2);
        assert!(!block.is_null() && refill(&caches, &poor, cpu, 2).is_null());
        overflow(&caches, &poor, cpu, 2, block);
        assert_eq!(tokens.missing(), 0);
        // Not at each call: asking costs a system call.
        caches.failed_us.store(linux::now_us(), Relaxed);
        assert!(caches.open(&tokens, cpu).is_none());
        // When there is memory again, there is a cache.
        std::thread::sleep(Duration::from_micros(AGAIN_US));
        assert!(caches.open(&tokens, cpu).is_some());
    }

    fn pin(cpus: &[usize]) {
        // SAFETY: zero is an empty set.
        let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
        for &cpu in cpus {
            // SAFETY: the set is ours.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: the set is ours. Fails where a CPU does not exist, and then nothing changes.
        unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    }

    /// Held by tests that look at the whole machine's timing.
    static ALONE: Mutex<()> = Mutex::new(());

    /// What a signal handler works on.
    static HANDLED: AtomicPtr<Torture> = AtomicPtr::new(null_mut());

    struct Torture {
        tokens: Tokens,
        caches: &'static CpuCaches,
        stop: AtomicBool,
        /// Whether to pop without a section, as a check that the test would notice.
        broken: bool,
        signals: AtomicUsize,
        /// Tokens that a handler could not push: it must not call the backend.
        stranded: [AtomicPtr<u8>; 64],
    }

    extern "C" fn on_signal(_: libc::c_int) {
        let torture = HANDLED.load(SeqCst);
        // SAFETY: null, or a torture that outlives its timers.
        let Some(torture) = (unsafe { torture.as_ref() }) else {
            return;
        };
        torture.signals.fetch_add(1, Relaxed);
        // SAFETY: the table has an entry for every CPU.
        let block = unsafe { rseq::pop(torture.caches.table(), 2) };
        if block.is_null() {
            return;
        }
        torture.tokens.got(block);
        torture.tokens.gives(block);
        // SAFETY: as above.
        if !unsafe { rseq::push_code(torture.caches.table(), 2, block) } {
            let free = |slot: &&AtomicPtr<u8>| {
                slot.compare_exchange(null_mut(), block, SeqCst, SeqCst).is_ok()
            };
            assert!(torture.stranded.iter().any(|slot| free(&slot)));
        }
    }

    /// Signals the calling thread every 150 us until it is dropped.
    struct Timer(libc::timer_t);

    impl Timer {
        fn start() -> Self {
            let signal = libc::SIGRTMIN() + 5;
            // SAFETY: zero is a valid value of these plain structures.
            let (mut action, mut event): (libc::sigaction, libc::sigevent) =
                unsafe { core::mem::zeroed() };
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: the handler is async-signal-safe.
            let r = unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
            assert_eq!(r, 0);
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            // SAFETY: no memory is passed.
            event.sigev_notify_thread_id = unsafe { libc::gettid() };
            let mut timer = null_mut();
            // SAFETY: both are ours.
            let r = unsafe {
                libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer)
            };
            assert_eq!(r, 0);
            let every = libc::timespec { tv_sec: 0, tv_nsec: 150_000 };
            let times = libc::itimerspec { it_interval: every, it_value: every };
            // SAFETY: the timer was made above.
            let r = unsafe { libc::timer_settime(timer, 0, &raw const times, null_mut()) };
            assert_eq!(r, 0);
            Timer(timer)
        }
    }

    impl Drop for Timer {
        fn drop(&mut self) {
            // SAFETY: made by `start`, and deleted once.
            unsafe { libc::timer_delete(self.0) };
        }
    }

    /// A pop as one would write it without restartable sequences.
    fn broken_pop(caches: &CpuCaches, class: SizeClass) -> *mut u8 {
        let Some(cpu) = rseq::cpu() else {
            return null_mut();
        };
        let entry = caches.place(cpu).entry.load(Acquire);
        if State::of(entry).is_some() {
            return null_mut();
        }
        // SAFETY: a region.
        let region = unsafe { &*entry };
        let header = region.header(class);
        if header.cur <= LAYOUT.first(class) {
            return null_mut();
        }
        // SAFETY: a slot of the class.
        let block = unsafe { region.slot(header.cur - 1).read_volatile() };
        if header.cur.is_multiple_of(7) {
            std::thread::yield_now();
        }
        region.set_header(class, Header { cur: header.cur - 1, ..header });
        block
    }

    impl Torture {
        fn pop(&self, class: SizeClass) -> *mut u8 {
            if self.broken {
                let block = broken_pop(self.caches, class);
                if !block.is_null() {
                    return block;
                }
            }
            alloc(self.caches, &self.tokens, class)
        }

        fn worker(&self, seed: u64) {
            assert!(self.caches.attach_thread());
            let _timer = Timer::start();
            let mut held: Vec<(SizeClass, *mut u8)> = Vec::with_capacity(400);
            let mut random = seed;
            while !self.stop.load(Relaxed) {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let bits = (random >> 33) as usize;
                if bits.is_multiple_of(4096) {
                    pin([&[0][..], &[1], &[0, 1]][bits / 4096 % 3]);
                }
                if held.len() < 400 && (held.is_empty() || (bits / 8).is_multiple_of(2)) {
                    let class = SMALL[bits / 64 % SMALL.len()];
                    let block = self.pop(class);
                    if !block.is_null() {
                        self.tokens.got(block);
                        held.push((class, block));
                    }
                } else if let Some((class, block)) = held.pop() {
                    self.tokens.gives(block);
                    free(self.caches, &self.tokens, class, block);
                }
            }
            for (class, block) in held {
                self.tokens.gives(block);
                self.tokens.store(0, class, &[block]);
            }
        }

        /// What other threads do to the caches.
        fn meddle(&self, until: Instant) {
            let mut round = 0;
            while Instant::now() < until && !(self.broken && self.tokens.doubled.load(Relaxed) > 0)
            {
                round += 1;
                match round % 8 {
                    0 => {
                        self.caches.fork_prepare();
                        self.caches.fork_parent();
                    }
                    1 => drop(self.caches.drain_all(&self.tokens)),
                    2 | 4 => drop(self.caches.drain(&self.tokens, round % 2)),
                    3 => self.caches.set_budget([64 << 10, 2 << 20][round / 8 % 2]),
                    _ => drop(self.caches.drain_idle(&self.tokens)),
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            self.stop.store(true, SeqCst);
        }
    }

    /// Sixteen threads on two CPUs, moved about and signalled, while their caches are drained. How
    /// many tokens were seen twice and how many are gone; `None` where there is no rseq.
    fn torture(broken: bool, ms: u64) -> Option<(usize, usize)> {
        let _alone = ALONE.lock();
        let tokens = Tokens::new(&SMALL, 3000);
        let caches = caches(&tokens);
        attached(caches).then_some(())?;
        caches.set_budget(2 << 20);
        let torture = Torture {
            tokens,
            caches,
            stop: AtomicBool::new(false),
            broken,
            signals: AtomicUsize::new(0),
            stranded: [const { AtomicPtr::new(null_mut()) }; 64],
        };
        HANDLED.store(ptr::from_ref(&torture).cast_mut(), SeqCst);
        let aborts = rseq::aborts();
        std::thread::scope(|scope| {
            let torture = &torture;
            (0..16).for_each(|i| drop(scope.spawn(move || torture.worker(i))));
            torture.meddle(Instant::now() + Duration::from_millis(ms));
        });
        HANDLED.store(null_mut(), SeqCst);
        // A broken one is found out before much happens.
        assert!(broken || rseq::aborts() > aborts, "nothing was interrupted");
        assert!(broken || torture.signals.load(Relaxed) > 100);
        for slot in &torture.stranded {
            let block = slot.load(SeqCst);
            if !block.is_null() {
                torture.tokens.store(0, 2, &[block]);
            }
        }
        let used: usize =
            (0..caches.count()).filter_map(|c| caches.region(c)).flat_map(rooms).map(|r| r.1).sum();
        assert!(broken || used == caches.used_bytes(), "the account of the room is exact");
        caches.fork_prepare();
        caches.fork_parent();
        for cpu in 0..caches.count() {
            if let Some(region) = caches.region(cpu) {
                take_out(region, &torture.tokens, cpu);
            }
        }
        Some((torture.tokens.doubled.load(SeqCst), torture.tokens.missing()))
    }

    #[test]
    fn no_block_is_lost_or_doubled() {
        if let Some(result) = torture(false, 3000) {
            assert_eq!(result, (0, 0));
        }
    }

    #[test]
    fn the_test_above_notices_a_lost_or_doubled_block() {
        if let Some((doubled, missing)) = torture(true, 3000) {
            assert!(doubled > 0 || missing > 0);
        }
    }
}
