//! Threads that ask for more than the usual: an arena of their own, exact counters, no cache. Such a
//! thread has no CPU index, so each of its calls comes to the slow path by the test that is there
//! anyway, and is served from here. All others pay nothing for that.
//!
//! Invariant: `cpu_index` is 0 outside of the allocator's calls while a bit of `apart` is set.
use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::rseq::{self, Entry};
use super::size_class::{CLASSES, SizeClass, class_bytes};
use super::tls::{Tls, tls};
use super::{CPU_CACHES, tcaches, thread_allocated};
use crate::explicit::{self, Explicit};
use crate::os::{Errno, linux};
use crate::sync::lock::{Mutex, RawLock};

/// The thread's blocks are counted.
pub(crate) const COUNTED: u8 = 1;
/// It uses no cache.
pub(crate) const UNCACHED: u8 = 2;
/// It is bound to an explicit arena.
pub(crate) const BOUND: u8 = 4;

/// Sets a bit of the calling thread's, or takes it off.
pub(crate) fn set(bit: u8, on: bool) {
    let tls = tls();
    let bits = tls.apart.get();
    tls.apart.set(if on { bits | bit } else { bits & !bit });
    if on {
        take_index(tls);
    }
}

/// Takes the calling thread's CPU index away again, if it is apart.
pub(super) fn detach() {
    if tls().apart.get() != 0 {
        take_index(tls());
    }
}

fn take_index(tls: &Tls) {
    if tls.cpu_index.get() != 0 {
        tls.own_index.set(tls.cpu_index.get());
        tls.cpu_index.set(0);
    }
}

/// Whether the bit is set.
pub(crate) fn is_set(bit: u8) -> bool {
    tls().apart.get() & bit != 0
}

/// The explicit arena that serves the calling thread, if it is bound to one.
pub(crate) fn arena() -> Option<&'static Explicit> {
    arena_of(tls())
}

fn arena_of(tls: &Tls) -> Option<&'static Explicit> {
    if tls.apart.get() & BOUND == 0 {
        return None;
    }
    explicit::live(tls.bound.get().wrapping_sub(1))
}

/// Gives a thread that is apart only to be counted its CPU index for one section.
fn as_usual<T>(tls: &Tls, none: T, section: impl FnOnce(*const Entry) -> T) -> T {
    if tls.apart.get() != COUNTED || tls.own_index.get() == 0 || tls.vfork.get() != 0 {
        return none;
    }
    tls.cpu_index.set(tls.own_index.get());
    let result = section(CPU_CACHES.table());
    tls.cpu_index.set(0);
    result
}

/// A block of `class` for a thread that is apart: from its arena, or as usual if it is only to be counted.
/// `None`: it is served as others, off the fast path.
#[cold]
#[inline(never)]
pub(super) fn alloc(tls: &Tls, class: SizeClass) -> Option<*mut u8> {
    let block = match arena_of(tls) {
        Some(arena) => {
            let cached = own_cache(tls).and_then(|id| tcaches::alloc(id, Some(arena), class));
            cached.unwrap_or_else(|| arena.alloc(class))
        }
        None => {
            // SAFETY: the table has an entry for every CPU.
            let pop = |table| unsafe { rseq::pop(table, class.into()) };
            let block = as_usual(tls, null_mut(), pop);
            if block.is_null() {
                return None;
            }
            block
        }
    };
    allocated(tls, class, block);
    Some(block)
}

/// A thread that is apart got a block of `class`, or null.
#[cold]
#[inline(never)]
pub(super) fn allocated(tls: &Tls, class: SizeClass, block: *mut u8) {
    take_index(tls);
    if !block.is_null() {
        count(tls, class_bytes(class), 0);
    }
}

/// Frees a block of `class` as usual, for a thread that is apart only to be counted; false: it is not, or
/// there is no room.
///
/// # Safety
/// As for [`super::free`].
#[cold]
#[inline(never)]
pub(super) unsafe fn free(tls: &Tls, class: SizeClass, block: *mut u8) -> bool {
    // SAFETY: the table has an entry for every CPU; the caller owns the block.
    let done = as_usual(tls, false, |table| unsafe { rseq::push_code(table, class, block) });
    if done {
        count(tls, 0, class_bytes(class));
    }
    done
}

/// A thread that is apart freed a block of `class`.
#[cold]
#[inline(never)]
pub(super) fn freed(tls: &Tls, class: SizeClass) {
    take_index(tls);
    count(tls, 0, class_bytes(class));
}

/// Notes that the calling thread allocated and freed so many usable bytes past the caches.
pub(crate) fn note(allocated: usize, deallocated: usize) {
    count(tls(), allocated, deallocated);
}

fn count(tls: &Tls, allocated: usize, deallocated: usize) {
    if tls.apart.get() & COUNTED == 0 {
        return;
    }
    tls.allocated.set(tls.allocated.get().wrapping_add(allocated as u64));
    tls.deallocated.set(tls.deallocated.get().wrapping_add(deallocated as u64));
    let above = net(tls).wrapping_sub(tls.peak_base.get()).cast_signed();
    tls.peak.set(tls.peak.get().max(u64::try_from(above).unwrap_or(0)));
}

fn net(tls: &Tls) -> u64 {
    tls.allocated.get().wrapping_sub(tls.deallocated.get())
}

/// The calling thread's counters, exact from the first call on: allocated, deallocated, peak.
pub(crate) fn counters() -> (*mut u64, *mut u64, u64) {
    let tls = tls();
    if !is_set(COUNTED) {
        tls.allocated.set(thread_allocated());
        tls.deallocated.set(0);
        set(COUNTED, true);
        reset_peak();
    }
    (tls.allocated.as_ptr(), tls.deallocated.as_ptr(), tls.peak.get())
}

/// The peak counts from now on.
pub(crate) fn reset_peak() {
    let tls = tls();
    tls.peak_base.set(net(tls));
    tls.peak.set(0);
}

/// Threads that can be bound to explicit arenas at a time.
const MOST_BOUND: usize = 4096;

/// A place for a thread that is bound. The cache goes with the place.
struct Binding {
    /// The thread's id, and the arena's index and one more; 0: nobody's. A thread that ended is found by its
    /// id, which names none any more.
    thread: AtomicU64,
    /// The id of the explicit cache that serves it, and one more; 0: none yet.
    cache: AtomicU32,
}

static BINDINGS: [Binding; MOST_BOUND] =
    [const { Binding { thread: AtomicU64::new(0), cache: AtomicU32::new(0) } }; MOST_BOUND];
static LOCK: Mutex<()> = Mutex::new(());

impl Binding {
    fn is_alive(&self) -> bool {
        let thread = self.thread.load(Acquire);
        #[allow(clippy::cast_possible_truncation, reason = "takes the word apart")]
        let id = ((thread >> 32) as u32).cast_signed();
        thread != 0 && linux::tgkill(linux::getpid(), id, 0) != Err(Errno(libc::ESRCH))
    }

    fn set(&self, thread: u32, index: u32) {
        self.thread.store(u64::from(thread) << 32 | u64::from(index + 1), Release);
    }

    fn cache(&self) -> Option<u32> {
        self.cache.load(Relaxed).checked_sub(1)
    }

    fn flush(&self) {
        if let Some(id) = self.cache() {
            // Where it is in use by a signal's interrupted call, it stays.
            let _ = tcaches::flush(id);
        }
    }
}

fn binding(tls: &Tls) -> Option<&'static Binding> {
    BINDINGS.get((tls.binding.get() as usize).wrapping_sub(1))
}

/// The cache of a thread that is bound.
fn own_cache(tls: &Tls) -> Option<u32> {
    if tls.apart.get() & (BOUND | UNCACHED) != BOUND {
        return None;
    }
    binding(tls)?.cache()
}

/// Takes a block of `arena` into the cache of the calling thread, if that is bound to the arena; false: it
/// has to go elsewhere.
///
/// # Safety
/// The block is live, of that class and arena, and its user gave it up.
pub(crate) unsafe fn free_to_arena(arena: &'static Explicit, class: u8, block: *mut u8) -> bool {
    let tls = tls();
    let is_class = class != 0 && usize::from(class) <= CLASSES;
    let own = is_class && arena_of(tls).is_some_and(|own| core::ptr::eq(own, arena));
    // SAFETY: as the caller promises.
    own && own_cache(tls).is_some_and(|id| unsafe { tcaches::free(id, Some(arena), class, block) })
}

/// Gives back what is in the cache that the calling thread has because it is bound.
pub(super) fn flush() {
    if let Some(binding) = binding(tls()) {
        binding.flush();
    }
}

/// Gives back what is in the caches of threads that were bound and have ended. For the background thread.
pub(super) fn reap() {
    for binding in &BINDINGS {
        if binding.thread.load(Relaxed) != 0 && !binding.is_alive() {
            binding.flush();
        }
    }
}

/// Threads that are bound to an arena.
pub(crate) fn bound_to(index: u32) -> u32 {
    let bound =
        |b: &&Binding| b.thread.load(Acquire) & 0xffff_ffff == u64::from(index + 1) && b.is_alive();
    u32::try_from(BINDINGS.iter().filter(bound).count()).unwrap_or(u32::MAX)
}

/// The index that the calling thread was bound to; `None`: it never was.
pub(crate) fn bound() -> Option<u32> {
    tls().bound.get().checked_sub(1)
}

/// Binds the calling thread to the arena `index`, which is an explicit one or not. `EAGAIN`: too many
/// are bound.
pub(crate) fn bind(index: u32, explicit: bool) -> Result<(), Errno> {
    let tls = tls();
    flush();
    if explicit {
        let thread = linux::gettid().cast_unsigned();
        let binding = match binding(tls) {
            Some(binding) => binding,
            None => take_binding(tls, thread)?,
        };
        binding.flush();
        if binding.cache().is_none()
            && let Ok(id) = tcaches::create()
        {
            binding.cache.store(id + 1, Relaxed);
        }
        binding.set(thread, index);
    } else if let Some(binding) = binding(tls) {
        tls.binding.set(0);
        binding.thread.store(0, Release);
    }
    tls.bound.set(index + 1);
    set(BOUND, explicit);
    Ok(())
}

/// A place for the calling thread: nobody's, or a dead thread's.
fn take_binding(tls: &Tls, thread: u32) -> Result<&'static Binding, Errno> {
    let _lock = LOCK.lock();
    let at = BINDINGS.iter().position(|b| !b.is_alive()).ok_or(Errno(libc::EAGAIN))?;
    // No arena yet.
    BINDINGS[at].thread.store(u64::from(thread) << 32, Release);
    tls.binding.set(u32::try_from(at + 1).unwrap_or(0));
    Ok(&BINDINGS[at])
}

/// In the child of a fork: its one thread has a new id, and the others are not there.
pub(super) fn fork_child() {
    BINDINGS
        .iter()
        .filter(|b| b.thread.load(Relaxed) != 0)
        .for_each(|b| b.thread.store(0, Relaxed));
    if let (Some(binding), Some(index)) = (binding(tls()), bound()) {
        binding.set(linux::gettid().cast_unsigned(), index);
    }
}

/// The lock under which threads get their places.
pub(crate) fn lock() -> &'static RawLock {
    LOCK.raw()
}
