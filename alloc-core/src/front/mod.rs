//! The front end: a cache of free blocks for each CPU, or for each thread where restartable
//! sequences are refused.
//!
//! [`alloc`] and [`free`] are a few instructions without a lock, a call or an atomic operation.
//! Everything else is cold and decides first what serves the thread ([`Server`]). Only this layer
//! touches thread-local state: the functions for a background thread and for statistics don't.

pub(crate) mod apart;
mod cpu_cache;
mod entry;
pub mod fast;
pub(crate) mod hot;
mod registration;
mod room;
mod rseq;
pub(crate) mod size_class;
pub(crate) mod tcaches;
mod thread_cache;
mod tls;

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, compiler_fence};

use self::cpu_cache::CpuCaches;
use self::hot::hot;
use self::room::Backend;
use self::size_class::{CLASSES, SizeClass};
use self::thread_cache::{ThreadCache, ThreadCaches};
use self::tls::{Mode, Tls, tls};
use crate::background;
use crate::control::options;
use crate::os::linux;
use crate::process::{self, HEAP};
use crate::prof::{self, Period, Way};

static CPU_CACHES: CpuCaches = CpuCaches::new();
static THREAD_CACHES: ThreadCaches = ThreadCaches::new();

/// The layers below: batches from other CPUs, then the arenas.
struct Layers;

impl Backend for Layers {
    fn map(&self, bytes: usize) -> *mut u8 {
        process::map(bytes)
    }

    fn fetch(&self, arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
        HEAP.fetch(arena, class, out)
    }

    fn store(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]) {
        HEAP.pass_on(arena, class, blocks);
    }

    fn take_home(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]) {
        HEAP.put_back(arena, class, blocks);
    }
}

/// The arenas alone, for what is cold.
struct Arenas;

impl Backend for Arenas {
    fn map(&self, bytes: usize) -> *mut u8 {
        process::map(bytes)
    }

    fn fetch(&self, arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
        HEAP.fetch(arena, class, out)
    }

    fn store(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]) {
        HEAP.put_back(arena, class, blocks);
    }
}

/// Takes a block of `class` from the CPU's cache, and counts `bytes` as allocated by this thread.
/// Null: the caller goes on to [`alloc_slow`], from a cold function of its own.
#[inline(always)]
pub(crate) fn alloc(class: usize, bytes: usize) -> *mut u8 {
    if tls::count(bytes) {
        return null_mut();
    }
    // SAFETY: the table has an entry for every CPU.
    unsafe { rseq::pop(hot().table(), class) }
}

/// Takes a block of `class` from the thread's own cache, where it has one; null: go on to [`alloc_slow`].
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a class")]
pub(crate) fn alloc_own(class: usize) -> *mut u8 {
    own_cache(tls()).map_or(null_mut(), |(_busy, cache)| cache.pop(class as SizeClass))
}

/// Gives a block back to the thread's own cache. False, and nothing done: go on to [`free_slow`].
///
/// # Safety
/// As [`free_slow`].
#[inline(always)]
#[must_use]
pub(crate) unsafe fn free_own(code: u8, block: *mut u8) -> bool {
    is_class(code) && own_cache(tls()).is_some_and(|(_busy, cache)| cache.push(code, block))
}

fn is_class(code: u8) -> bool {
    (1..=CLASSES).contains(&usize::from(code))
}

/// Allocates a block of `class`, for a request of `size` bytes, where [`alloc`] gave none, but counted
/// it. Null: out of memory.
pub(crate) fn alloc_slow(class: SizeClass, size: usize) -> *mut u8 {
    if tls().bytes_until_event.get() < 0 {
        let block = alloc_at_event(class, size);
        if !block.is_null() {
            return block;
        }
    }
    refill(class)
}

/// As [`alloc_slow`], where an event is due; null where the caller has to go on.
#[cold]
#[inline(never)]
fn alloc_at_event(class: SizeClass, size: usize) -> *mut u8 {
    let due = event(size);
    let block = alloc_chosen(class, size, due);
    if !block.is_null() {
        return block;
    }
    // SAFETY: the table has an entry for every CPU.
    unsafe { rseq::pop(hot().table(), usize::from(class)) }
}

/// Allocates a block of `class`, which are extents of their own, for a request of `size` bytes that is not
/// counted yet. Null: out of memory.
///
/// Such a block is worth more than a sample of it, so the profiler is asked about each.
#[inline(never)]
pub(crate) fn alloc_extent(class: SizeClass, size: usize) -> *mut u8 {
    if tls::count(size) {
        event(size);
    }
    if prof::is_on() {
        let block = alloc_chosen(class, size, Period::OFF);
        if !block.is_null() {
            return block;
        }
    }
    // SAFETY: the table has an entry for every CPU.
    let block = unsafe { rseq::pop(hot().table(), usize::from(class)) };
    if !block.is_null() {
        return block;
    }
    let block = alloc_own(usize::from(class));
    if block.is_null() { refill(class) } else { block }
}

/// A block that the profiler records, if it chooses this one; null: it doesn't. `due`: as for
/// [`prof::choose`].
#[cold]
#[inline(never)]
fn alloc_chosen(class: SizeClass, size: usize, due: Period) -> *mut u8 {
    // What a thread that is bound to an arena gets is that arena's, so that its end takes all of it.
    let heap = apart::arena().map_or(&HEAP, |arena| &arena.heap);
    let block = prof::alloc_chosen(heap, class, size, due);
    if !block.is_null() {
        apart::note(size_class::class_bytes(class), 0);
    }
    block
}

/// Frees a block. False, and nothing done: the caller goes on to [`free_slow`], from a cold function of
/// its own, so that this one stays short.
///
/// # Safety
/// `block` is null or what was allocated, if it is in the window at all, and the caller gives it away.
#[inline(always)]
#[must_use]
pub(crate) unsafe fn free(block: *mut u8) -> bool {
    // SAFETY: the table has an entry for every CPU; the caller owns the block.
    unsafe { rseq::push_block(block) }
}

/// Counts `bytes` that are allocated past the caches, by this thread: `due` for [`prof::choose`].
#[inline]
pub(crate) fn count_allocated(bytes: usize) -> Period {
    if tls::count(bytes) { event(bytes) } else { Period::OFF }
}

#[allow(clippy::cast_possible_truncation, reason = "CLASSES is below 256")]
pub(crate) fn classes() -> impl Iterator<Item = SizeClass> {
    1..=CLASSES as SizeClass
}

/// The cache of a thread that has one of its own and may use it now, with nothing else to be done.
#[inline(always)]
fn own_cache(tls: &Tls) -> Option<(Busy<'_>, &ThreadCache)> {
    if !tls.has_own_cache_free() || tls.bytes_until_event.get() < 0 {
        return None;
    }
    // SAFETY: null, or a cache, which lives for good.
    let cache = unsafe { tls.thread_cache.get().as_ref() }?;
    Some((Busy::new(tls), cache))
}

/// What serves a thread now.
enum Server<'a> {
    /// The caches, from the CPU of this index.
    Cpu(usize),
    Thread(Busy<'a>, *mut ThreadCache),
    /// No cache: the arena of this index.
    Arena(usize),
}

/// The thread cache is in use as long as this lives.
struct Busy<'a>(&'a Tls);

impl<'a> Busy<'a> {
    fn new(tls: &'a Tls) -> Self {
        tls.busy.set(1);
        // A signal handler must see it before anything else happens.
        compiler_fence(core::sync::atomic::Ordering::SeqCst);
        Busy(tls)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        compiler_fence(core::sync::atomic::Ordering::SeqCst);
        self.0.busy.set(0);
    }
}

#[inline(always)]
fn server(tls: &Tls) -> Server<'_> {
    let arena = tls.arena.get() as usize;
    if tls.vfork.get() != 0 || (tls.mode.get() == Mode::Unset && !set_up(tls)) {
        return Server::Arena(arena);
    }
    if tls.apart.get() & apart::UNCACHED != 0 {
        return Server::Arena(arena);
    }
    if tls.mode.get() == Mode::Cpu {
        // After a vfork the thread has to be attached again, and for each call while it is apart.
        if registration::cpu().is_none() && !CPU_CACHES.attach_thread() {
            return Server::Arena(arena);
        }
        return registration::cpu().map_or(Server::Arena(arena), Server::Cpu);
    }
    if tls.busy.get() != 0 {
        return Server::Arena(arena);
    }
    let busy = Busy::new(tls);
    if tls.thread_cache.get().is_null() {
        tls.thread_cache.set(THREAD_CACHES.acquire(&Layers, arena));
    }
    match tls.thread_cache.get() {
        cache if cache.is_null() => Server::Arena(arena),
        cache => Server::Thread(busy, cache),
    }
}

/// Decides about a thread at its first allocation; false if that isn't possible yet.
fn set_up(tls: &Tls) -> bool {
    static NEXT_ARENA: AtomicU32 = AtomicU32::new(0);
    if !process::ready() || !CPU_CACHES.init(&Layers, process::many_nodes()) {
        return false;
    }
    hot().table.store(CPU_CACHES.table().cast_mut(), Release);
    CPU_CACHES.set_budget(options::cpu_cache_bytes());
    tls.arena.set(NEXT_ARENA.fetch_add(1, Relaxed));
    let attached = options::rseq() && CPU_CACHES.attach_thread();
    tls.mode.set(if attached { Mode::Cpu } else { Mode::Thread });
    true
}

/// Allocates a block of `class` where the fast path found none.
#[cold]
#[inline(never)]
fn refill(class: SizeClass) -> *mut u8 {
    let tls = tls();
    if tls.apart.get() != 0
        && let Some(block) = apart::alloc(tls, class)
    {
        return block;
    }
    let block = match server(tls) {
        Server::Cpu(cpu) => match CPU_CACHES.open(&Layers, cpu) {
            Some(cache) => room::refill(&cache, &Layers, class),
            None => fetch_one(cpu, class),
        },
        // SAFETY: the cache is this thread's, and `busy` keeps others off.
        Server::Thread(_busy, cache) => unsafe { THREAD_CACHES.alloc(&Layers, cache, class) },
        Server::Arena(arena) => {
            let mut block = [null_mut(); 1];
            // Here also come those who can't be set up, because there is no heap yet.
            if process::ready() {
                HEAP.fetch(arena, class, &mut block);
            }
            block[0]
        }
    };
    if tls.apart.get() != 0 {
        apart::allocated(tls, class, block);
    }
    background::notice();
    block
}

/// A block past the caches; null also where there was no memory to start with.
fn fetch_one(arena: usize, class: SizeClass) -> *mut u8 {
    let mut block = [null_mut(); 1];
    if process::ready() {
        HEAP.fetch(arena, class, &mut block);
    }
    block[0]
}

/// Frees a block that [`free`] had no room for; false, and nothing done, if `code` is no class.
///
/// # Safety
/// As [`free`].
#[cold]
#[inline(never)]
#[must_use]
pub(crate) unsafe fn free_slow(code: u8, block: *mut u8) -> bool {
    if !is_class(code) {
        return false;
    }
    let tls = tls();
    // SAFETY: as the caller promises.
    if tls.apart.get() != 0 && unsafe { apart::free(tls, code, block) } {
        return true;
    }
    match server(tls) {
        Server::Cpu(cpu) => match CPU_CACHES.open(&Layers, cpu) {
            Some(cache) => room::overflow(&cache, &Layers, code, block),
            None => HEAP.put_back(cpu, code, &[block]),
        },
        // SAFETY: the cache is this thread's, and `busy` keeps others off.
        Server::Thread(_busy, cache) => unsafe { THREAD_CACHES.free(&Layers, cache, code, block) },
        Server::Arena(arena) => HEAP.put_back(arena, code, &[block]),
    }
    if tls.apart.get() != 0 {
        apart::freed(tls, code);
    }
    background::notice();
    true
}

/// Bytes between two events of a thread, at most.
const EVENT_BYTES: i64 = (2 << 20) - 1;

/// What happens each time a thread has allocated [`EVENT_BYTES`] more or comes to a sample, and at its
/// first allocation. `size`: the block at hand. The period by which it is the sample; `OFF`: it isn't one.
#[cold]
#[inline(never)]
fn event(size: usize) -> Period {
    let tls = tls();
    let allocated = thread_allocated();
    let passed = tls.event_interval.get() - tls.bytes_until_event.get();
    let mut way = way(tls);
    // The options are read when the heap starts.
    let period = if process::ready() { prof::period() } else { Period::OFF };
    let chosen = way.advance(period, passed, size);
    keep(tls, way);
    let interval = way.next(EVENT_BYTES);
    tls.event_interval.set(interval);
    tls.allocated_at_event.set(allocated.wrapping_add_signed(interval));
    tls.bytes_until_event.set(interval);
    prof::passed(passed);
    // Who only allocates frees no pages, and may have grown.
    background::notice();
    if tls.vfork.get() == 0 { chosen } else { Period::OFF }
}

/// The thread's way to its next sample.
fn way(tls: &Tls) -> Way {
    if tls.random.get() == 0 {
        tls.random.set(seed(tls));
    }
    Way {
        left: tls.sample_left.get(),
        period: Period(tls.sample_period.get()),
        random: tls.random.get(),
    }
}

fn keep(tls: &Tls, way: Way) {
    tls.sample_left.set(way.left);
    tls.sample_period.set(way.period.0);
    tls.random.set(way.random);
}

fn seed(tls: &Tls) -> u64 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let nth = u64::from(NEXT.fetch_add(1, Relaxed)) << 32;
    match options::prof_seed() {
        // The kernel puts threads and clocks where nobody plans them.
        0 => nth ^ linux::now_ns(libc::CLOCK_MONOTONIC) ^ core::ptr::from_ref(tls).addr() as u64,
        seed => nth | u64::from(seed),
    }
}

/// Whether the profiler, at `period`, chooses a block of `size` bytes, whatever this thread allocated before.
pub(crate) fn toss(period: Period, size: usize) -> bool {
    let tls = tls();
    let mut way = way(tls);
    let chosen = way.toss(period, size);
    tls.random.set(way.random);
    chosen && tls.vfork.get() == 0
}

/// Whether the calling thread's blocks are among those that may be recorded.
pub(crate) fn is_profiled() -> bool {
    tls().unprofiled.get() == 0
}

pub(crate) fn set_profiled(on: bool) {
    tls().unprofiled.set(u8::from(!on));
}

/// The thread begins to record a block; false: it is at it already.
pub(crate) fn begin_recording() -> bool {
    let begins = tls().recording.replace(1) == 0;
    compiler_fence(core::sync::atomic::Ordering::SeqCst);
    begins
}

/// The end of [`begin_recording`], if that was true.
pub(crate) fn end_recording() {
    compiler_fence(core::sync::atomic::Ordering::SeqCst);
    tls().recording.set(0);
}

/// The tag of the scope that the thread is in.
pub(crate) fn scope() -> u32 {
    tls().scope.get()
}

pub(crate) fn set_scope(tag: u32) {
    tls().scope.set(tag);
}

/// The number that the profiler knows the thread by; 0: none yet.
pub(crate) fn thread_number() -> u32 {
    tls().thread.get()
}

pub(crate) fn set_thread_number(number: u32) {
    tls().thread.set(number);
}

/// The part of the thread's own stack that is known to be readable; the kernel took it from no other.
pub(crate) fn known_stack() -> (usize, usize) {
    (tls().stack_low.get(), tls().stack_high.get())
}

pub(crate) fn set_known_stack(low: usize, high: usize) {
    tls().stack_low.set(low);
    tls().stack_high.set(high);
}

/// Bytes that this thread has allocated so far.
pub(crate) fn thread_allocated() -> u64 {
    let tls = tls();
    tls.allocated_at_event.get().wrapping_sub(tls.bytes_until_event.get().cast_unsigned())
}

/// The arena that the calling thread's next request is for, reduced by whoever knows how many there are.
#[allow(clippy::cast_possible_truncation, reason = "a kernel has fewer CPUs")]
pub(crate) fn current_arena() -> u32 {
    registration::cpu().map_or_else(|| tls().arena.get(), |cpu| cpu as u32)
}

/// Gives the blocks in the caches of idle CPUs and of dead threads, and the batches that nobody asked
/// for, to the arenas. Returns the bytes that the caches still have room for. For the background
/// thread, which need not have thread-local state.
pub(crate) fn tend() -> usize {
    TENDING.fetch_add(1, AcqRel);
    CPU_CACHES.set_budget(options::cpu_cache_bytes());
    let mut batches = 0;
    for class in classes() {
        batches += HEAP.drain_batches(class, false);
    }
    CPU_CACHES.drain_idle(&Arenas);
    THREAD_CACHES.reap(&Arenas);
    apart::reap();
    TENDING.fetch_add(1, AcqRel);
    cache_room_bytes() + batches
}

/// Counts up when [`tend`] begins and when it ends: odd while blocks are on their way.
static TENDING: AtomicU32 = AtomicU32::new(0);

/// What `look` sees while [`tend`] moves nothing, as long as it can be had in some tries.
pub(crate) fn at_rest<T>(mut look: impl FnMut() -> T) -> T {
    for _ in 0..200 {
        let before = TENDING.load(Acquire);
        if before.is_multiple_of(2) {
            let seen = look();
            if TENDING.load(Acquire) == before {
                return seen;
            }
        }
        linux::yield_now();
    }
    look()
}

/// Gives the blocks in all CPU caches and in the caches of dead threads to the arenas; how many.
/// Live threads keep what they have in caches of their own.
pub(crate) fn drain_all() -> usize {
    for class in classes() {
        HEAP.drain_batches(class, true);
    }
    CPU_CACHES.drain_all(&Arenas) + THREAD_CACHES.reap(&Arenas)
}

/// Gives the blocks in the calling thread's own cache, if it has one, to the arenas; how many.
pub(crate) fn flush_current() -> usize {
    apart::flush();
    match server(tls()) {
        // SAFETY: the cache is this thread's, and `busy` keeps others off.
        Server::Thread(_busy, cache) => unsafe { THREAD_CACHES.flush(&Arenas, cache) },
        Server::Cpu(_) | Server::Arena(_) => {
            apart::detach();
            0
        }
    }
}

/// Blocks of `class` in all caches, by a glance.
pub(crate) fn cached_blocks(class: SizeClass) -> usize {
    CPU_CACHES.cached_blocks(class)
        + THREAD_CACHES.cached_blocks(class)
        + tcaches::cached_blocks(class)
}

/// Bytes that all caches have room for, by a glance: a bound of what is in them.
pub(crate) fn cache_room_bytes() -> usize {
    CPU_CACHES.used_bytes() + THREAD_CACHES.used_bytes()
}

/// How often a CPU-cache operation had to start again because the thread was interrupted.
pub(crate) fn rseq_aborts() -> u64 {
    rseq::aborts()
}

/// Before a fork, before the locks of the layers below are taken.
pub(crate) fn fork_prepare() {
    CPU_CACHES.fork_prepare();
}

/// After a fork, in the parent, after those locks were released.
pub(crate) fn fork_parent() {
    CPU_CACHES.fork_parent();
}

/// After a fork, in the child, after those locks were released.
pub(crate) fn fork_child() {
    TENDING.store(0, Release);
    THREAD_CACHES.fork_child(tls().thread_cache.get());
    tcaches::fork_child();
    apart::fork_child();
    CPU_CACHES.fork_child();
}

/// Before a vfork, by the thread that makes it: parent and child share the thread's state, but the
/// kernel keeps the child's CPU nowhere. Both go past the caches until [`vfork_end`] in the parent.
pub(crate) fn vfork_begin() {
    let tls = tls();
    tls.vfork.set(tls.vfork.get().saturating_add(1));
    tls.cpu_index.set(0);
}

/// After a vfork, in the parent.
pub(crate) fn vfork_end() {
    let tls = tls();
    tls.vfork.set(tls.vfork.get().saturating_sub(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::vec::Vec;

    fn take(class: SizeClass, bytes: usize) -> *mut u8 {
        let block = alloc(usize::from(class), bytes);
        if block.is_null() { alloc_slow(class, bytes) } else { block }
    }

    fn free_all(class: SizeClass, blocks: Vec<*mut u8>) {
        for block in blocks {
            assert!(free_one(class, block));
        }
    }

    fn free_one(code: u8, block: *mut u8) -> bool {
        // SAFETY: the tests' own blocks; one whose code is no class is left alone.
        let done = unsafe { rseq::push_code(CPU_CACHES.table(), code, block) };
        // SAFETY: as above.
        done || unsafe { free_slow(code, block) }
    }

    /// Allocates, fills, checks and frees blocks of some classes.
    fn exercise() {
        for class in [1, 8, 40, 72, 90] {
            let bytes = size_class::class_bytes(class);
            for n in [1, 10, 200] {
                let blocks: Vec<_> = (0..n).map(|_| take(class, bytes)).collect();
                for (i, block) in blocks.iter().enumerate() {
                    // SAFETY: a live block of that many bytes.
                    unsafe { block.cast::<usize>().write(i) };
                }
                for (i, block) in blocks.iter().enumerate() {
                    // SAFETY: as above.
                    assert_eq!(unsafe { block.cast::<usize>().read() }, i);
                }
                free_all(class, blocks);
            }
        }
    }

    #[test]
    fn blocks_come_and_go_on_many_threads() {
        std::thread::scope(|s| (0..8).for_each(|_| drop(s.spawn(exercise))));
        exercise();
        assert_ne!(tls().mode.get(), Mode::Unset);
        assert!(CPU_CACHES.count() > 0 && cache_room_bytes() > 0);
    }

    #[test]
    fn a_code_that_is_no_class_is_refused() {
        exercise();
        for code in [0, 114, size_class::LARGE, 255] {
            assert!(!free_one(code, core::ptr::dangling_mut()));
        }
    }

    #[test]
    fn what_a_thread_allocates_is_counted_to_the_byte() {
        std::thread::spawn(|| {
            assert_eq!(thread_allocated(), 0);
            let mut sum = 0;
            // Across several events, of which the first is at once.
            for i in 0..50_000u64 {
                let class = 1 + SizeClass::try_from(i % 60).unwrap();
                let bytes = size_class::class_bytes(class);
                free_all(class, std::vec![take(class, bytes)]);
                sum += bytes as u64;
                assert_eq!(thread_allocated(), sum);
                let left = tls().bytes_until_event.get();
                assert!((0..=EVENT_BYTES).contains(&left));
            }
            count_allocated(1 << 40);
            assert_eq!(thread_allocated(), sum + (1 << 40));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_vfork_child_goes_past_the_caches() {
        std::thread::spawn(|| {
            let block = take(3, 48);
            let kept = registration::cpu();
            vfork_begin();
            assert_eq!(registration::cpu(), None);
            assert!(matches!(server(tls()), Server::Arena(_)));
            exercise();
            assert!(matches!(server(tls()), Server::Arena(_)));
            vfork_end();
            free_all(3, std::vec![block]);
            assert_eq!(registration::cpu().is_some(), kept.is_some());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_forked_child_can_use_its_caches() {
        exercise();
        // SAFETY: the child only runs what follows, and leaves without the C library's help.
        let child = unsafe { libc::fork() };
        if child == 0 {
            for class in [1, 8, 40, 72, 90] {
                let block = take(class, 16);
                if block.is_null() || !free_one(class, block) {
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(1) };
                }
            }
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        // SAFETY: the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        exercise();
    }

    const CHILD: &str = "THERMALLOC_TEST_WITHOUT_RSEQ";

    #[test]
    fn without_rseq_there_are_thread_caches() {
        if std::env::var_os(CHILD).is_some() {
            exercise();
            assert_eq!((tls().mode.get(), registration::cpu()), (Mode::Thread, None));
            assert!(!tls().thread_cache.get().is_null());
            free_all(40, (0..20).map(|_| take(40, 2048)).collect());
            assert!(cached_blocks(40) > 0 && cache_room_bytes() <= 512 << 10);
            std::thread::scope(|s| (0..8).for_each(|_| drop(s.spawn(exercise))));
            // The C library keeps its hands off, so that we can see our own registration work.
            assert_eq!(registration::register_for_test(), 6);
            return;
        }
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program)
            .args([
                "--exact",
                "front::tests::without_rseq_there_are_thread_caches",
                "--test-threads=1",
            ])
            .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = std::string::String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }
}
