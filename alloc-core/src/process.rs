//! The process's one heap: start-up, the glue between the caches and the arenas, and fork.
use crate::arena::Heap;
use crate::background;
use crate::control::places::ThisProcess;
use crate::control::{conf, options};
use crate::explicit;
use crate::extent::page_map::LG_PAGE;
use crate::front;
use crate::front::hot::hot;
use crate::front::size_class::class_bytes;
use crate::heat::decay::Times;
use crate::os::linux::Linux;
use crate::os::{fork, linux, start};
use crate::policy::pressure::{self, Limits, Pressure};
use crate::prof;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::lock::{Side, gate};
use crate::trace_file;

/// The heap.
pub(crate) static HEAP: Heap<Linux> = Heap::new(Linux);

const NEW: u32 = 0;
const READY: u32 = 1;
/// [`NEW`], [`READY`], or one more than the id of the process that is starting: a fork's child may find
/// another thread's start half done.
static STATE: AtomicU32 = AtomicU32::new(NEW);

/// More arenas than this would be more locks than threads that want them.
const MOST_ARENAS: u32 = 4095;

/// Starts the allocator if that has not been done. False: there is no memory to start with.
#[inline]
pub(crate) fn ready() -> bool {
    STATE.load(Ordering::Acquire) == READY || start_up()
}

#[cold]
fn start_up() -> bool {
    let starting = linux::getpid().cast_unsigned() + 1;
    loop {
        match STATE.compare_exchange(NEW, starting, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let done = initialise();
                // Out of memory may pass: the next caller tries again.
                STATE.store(if done { READY } else { NEW }, Ordering::Release);
                return done;
            }
            Err(READY) => return true,
            Err(state) if state == starting => linux::yield_now(),
            // Nobody goes on with it in this process.
            Err(state) => {
                let _ = STATE.compare_exchange(state, NEW, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

fn initialise() -> bool {
    let facts = start::facts();
    let outcome = conf::load(&ThisProcess { secure: facts.secure }, |line| {
        let _ = linux::write(2, line);
    });
    if outcome == conf::Outcome::Abort {
        crate::fatal::end_with(b"abort_conf: an option is wrong: see the line above");
    }
    #[allow(clippy::cast_possible_truncation, reason = "a kernel has fewer CPUs")]
    let cpus = start::possible_cpus() as u32;
    let arenas = match options::narenas() {
        0 => cpus.min(MOST_ARENAS),
        n => n,
    };
    // The tests' own heaps lie below this place.
    let place = if cfg!(test) { 12_000 } else { u64::from_ne_bytes(first(facts.random)) };
    if HEAP.init(place, arenas).is_err() {
        return false;
    }
    HEAP.pages.space.window.set_mirror(&hot().reach);
    trace_file::start(|line| {
        let _ = linux::write(2, line);
    });
    prof::start(|line| {
        let _ = linux::write(2, line);
    });
    HEAP.pages.set_times(times());
    HEAP.pages.set_huge(options::thp(), options::hugetlb());
    MANY_NODES.store(start::numa_nodes() > 1, Ordering::Relaxed);
    fork::register(&FORK);
    BORN_US.store(linux::now_us(), Ordering::Relaxed);
    true
}

static BORN_US: AtomicU64 = AtomicU64::new(0);

/// Microseconds since the allocator started.
pub(crate) fn uptime_us() -> u64 {
    linux::now_us().saturating_sub(BORN_US.load(Ordering::Relaxed))
}

static MANY_NODES: AtomicBool = AtomicBool::new(false);

/// Whether there is more than one NUMA node.
pub(crate) fn many_nodes() -> bool {
    MANY_NODES.load(Ordering::Relaxed)
}

fn first(random: [u8; 16]) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = random;
    [a, b, c, d, e, f, g, h]
}

/// The window and the decays that the options ask for.
pub(crate) fn times() -> Times {
    let ms = |v: i64| u64::try_from(v).ok();
    Times {
        window_ms: ms(options::hot_window_ms()).unwrap_or(0),
        decay_ms: ms(options::dirty_decay_ms()),
        muzzy_ms: ms(options::muzzy_decay_ms()),
    }
}

/// The pressure that the process is under now.
pub(crate) fn pressure() -> Pressure {
    let mut resident = 0;
    explicit::each_heap(|heap, _| {
        let counts = heap.pages.counts();
        resident += ((counts.in_use + counts.dirty) << LG_PAGE) + counts.metadata_bytes;
    });
    let limits = Limits {
        own_bytes: options::limit_bytes() as u64,
        group_percent: u64::from(options::limit_percent()),
    };
    pressure::look(&Linux, limits, resident)
}

/// Whether the cgroup has so much of its limit, or the process all of its own.
pub(crate) fn near_limit(group_percent: u64) -> bool {
    let counts = HEAP.pages.counts();
    let resident = ((counts.in_use + counts.dirty) << LG_PAGE) + counts.metadata_bytes;
    let limits = Limits { own_bytes: options::limit_bytes() as u64, group_percent };
    pressure::look(&Linux, limits, resident) == Pressure::Warm
}

/// What the caches hold.
pub(crate) struct Caches {
    /// Bytes of blocks in the caches of CPUs and threads, and in batches between them.
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) rseq_aborts: u64,
}

/// What the caches hold at about this moment.
pub(crate) fn caches() -> Caches {
    let mut caches = Caches { bytes: 0, blocks: 0, rseq_aborts: front::rseq_aborts() };
    for class in front::classes() {
        let blocks = front::cached_blocks(class) + HEAP.transfer().blocks(class);
        caches.blocks += blocks as u64;
        caches.bytes += (blocks * class_bytes(class)) as u64;
    }
    caches
}

/// `bytes` zero bytes for the tables of the caches, for good; null when memory is out.
pub(crate) fn map(bytes: usize) -> *mut u8 {
    if ready() { HEAP.map_table(bytes) } else { core::ptr::null_mut() }
}

/// Says that pages may have become free, or that the program has grown.
pub(crate) fn pages_changed() {
    background::notice();
}

/// Gives everything that is free back to the kernel. Returns how many bytes that were.
pub(crate) fn trim() -> usize {
    let explicit = explicit::heaps().map(|heap| {
        heap.release_unused();
        heap.pages.trim()
    });
    explicit.sum::<usize>() + trim_automatic()
}

/// The same for the automatic arenas alone.
pub(crate) fn trim_automatic() -> usize {
    if STATE.load(Ordering::Acquire) != READY {
        return 0;
    }
    // Nobody else can empty a cache of the caller's own.
    front::flush_current();
    front::drain_all();
    HEAP.release_unused();
    HEAP.pages.trim()
}

static FORK: fork::Handlers =
    fork::Handlers { prepare: before_fork, parent: after_fork, child: in_child };

/// Whether everybody was out of the passage when the fork began.
static QUIET: AtomicBool = AtomicBool::new(true);

/// Whether this is a child that has not opened yet.
static NEW_CHILD: AtomicBool = AtomicBool::new(false);

/// Makes memory consistent for a moment: the caches of all CPUs are taken out of use, nobody is
/// half way through a free, and every lock is held. A handler of somebody else may fork in between:
/// that fork finds all of this done, and leaves it so.
fn before_fork() {
    if !gate().is_owner() {
        front::fork_prepare();
        QUIET.store(HEAP.passage.close(), Ordering::Relaxed);
        for heap in explicit::heaps() {
            // They have no batches on their way that would have to be forgotten.
            let _ = heap.passage.close();
        }
    }
    gate().enter(explicit::locks());
}

fn after_fork() {
    // Where the allocator started during the fork, nothing was closed.
    if gate().is_owner() {
        gate().leave(Side::Parent, explicit::locks());
        open();
    }
}

fn in_child() {
    NEW_CHILD.store(true, Ordering::Relaxed);
    background::forget();
    trace_file::forget();
    prof::forget();
    if !QUIET.load(Ordering::Relaxed) {
        HEAP.transfer().forget();
    }
    gate().leave(Side::Child, explicit::locks());
    open();
}

/// Lets everybody in again, unless this was a fork within another.
fn open() {
    if gate().is_owner() {
        return;
    }
    if NEW_CHILD.swap(false, Ordering::Relaxed) {
        HEAP.passage.open_in_child();
        explicit::heaps().for_each(|heap| heap.passage.open_in_child());
        front::fork_child();
    } else {
        HEAP.passage.open();
        explicit::heaps().for_each(|heap| heap.passage.open());
        front::fork_parent();
    }
}
