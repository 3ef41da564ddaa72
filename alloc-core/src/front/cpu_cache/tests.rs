use super::*;
use crate::front::room;
use crate::front::room::testing::Tokens;
use crate::front::tls::tls;
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
        block if block.is_null() => refill(caches, tokens, registration::cpu().unwrap(), class),
        block => block,
    }
}

fn free(caches: &CpuCaches, tokens: &Tokens, class: SizeClass, block: *mut u8) {
    // SAFETY: the table has an entry for every CPU.
    if !unsafe { rseq::push_code(caches.table(), class, block) } {
        overflow(caches, tokens, registration::cpu().unwrap(), class, block);
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
    assert_eq!(registration::cpu(), None);
    for code in 0..=255 {
        // SAFETY: the table has an entry for every CPU.
        assert!(!unsafe { rseq::push_code(caches.table(), code, ptr::without_provenance_mut(1)) });
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
    caches.open(&tokens, registration::cpu().unwrap()).unwrap();
    for code in (CLASSES + 1..256).chain([0]) {
        let code = u8::try_from(code).unwrap();
        // SAFETY: the table has an entry for every CPU.
        assert!(!unsafe { rseq::push_code(caches.table(), code, ptr::without_provenance_mut(1)) });
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
    let array = caches.open(&tokens, registration::cpu().unwrap()).unwrap();
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
    let array = caches.open(&tokens, registration::cpu().unwrap()).unwrap();
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
    let cpu = registration::cpu().unwrap();
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
        let r =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
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
    let Some(cpu) = registration::cpu() else {
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
        while Instant::now() < until && !(self.broken && self.tokens.doubled.load(Relaxed) > 0) {
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
