//! The process's one heap: start-up, the glue between the caches and the arenas, and fork.
use crate::background;
use crate::arena::Heap;
use crate::control::{conf, options};
use crate::front;
use crate::front::size_class::SizeClass;
use crate::heat::decay::Times;
use crate::os::linux::Linux;
use crate::os::{linux, start};
use crate::sync::atomic::{AtomicU32, Ordering};

/// The heap.
pub(crate) static HEAP: Heap<Linux> = Heap::new(Linux);

const NEW: u32 = 0;
const STARTING: u32 = 1;
const READY: u32 = 2;
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
    loop {
        match STATE.compare_exchange(NEW, STARTING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let done = initialise();
                // Out of memory may pass: the next caller tries again.
                STATE.store(if done { READY } else { NEW }, Ordering::Release);
                return done;
            }
            Err(READY) => return true,
            Err(_) => linux::yield_now(),
        }
    }
}

fn initialise() -> bool {
    let facts = start::facts();
    conf::load(start::env, facts.secure, |line| {
        let _ = linux::write(2, line);
    });
    #[allow(clippy::cast_possible_truncation, reason = "a kernel has fewer CPUs")]
    let cpus = start::possible_cpus() as u32;
    let arenas = match options::narenas() {
        0 => cpus.min(MOST_ARENAS),
        n => n,
    };
    if HEAP.init(u64::from_ne_bytes(first(facts.random)), arenas).is_err() {
        return false;
    }
    HEAP.pages.set_times(times());
    front::init(cpus)
}

fn first(random: [u8; 16]) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = random;
    [a, b, c, d, e, f, g, h]
}

/// The window and the decay that the options ask for.
pub(crate) fn times() -> Times {
    let ms = |v: i64| u64::try_from(v).ok();
    Times { window_ms: ms(options::hot_window_ms()).unwrap_or(0), decay_ms: ms(options::dirty_decay_ms()) }
}

/// Takes blocks of `class` for `cpu`: how many of `out` were filled.
pub(crate) fn take(cpu: u32, class: SizeClass, out: &mut [*mut u8]) -> usize {
    HEAP.take(cpu, class, out)
}

/// Gives blocks of `class` back.
///
/// # Safety
/// As for [`Heap::give`].
pub(crate) unsafe fn give(class: SizeClass, blocks: &[*mut u8]) {
    // SAFETY: as the caller promises.
    unsafe { HEAP.give(class, blocks) };
    background::notice();
}

/// Says that pages may have become free.
pub(crate) fn freed_pages() {
    background::notice();
}

/// Gives everything that is free back to the kernel. Returns how many bytes that were.
pub(crate) fn trim() -> usize {
    if STATE.load(Ordering::Acquire) != READY {
        return 0;
    }
    front::drain_all();
    HEAP.release_unused();
    HEAP.pages.trim()
}
