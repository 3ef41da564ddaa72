//! Explicit caches (jemalloc's `tcache.create`): a program makes one and names it in its calls
//! (`MALLOCX_TCACHE`), one thread at a time. It holds blocks of one arena, the first that it served
//! since it was made or emptied; calls for others go past it.
//!
//! Invariant: a cache is used by whoever set its `busy`; who finds it set goes past the cache.
use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use super::room::Backend;
use super::size_class::SizeClass;
use super::thread_cache::{ThreadCache, ThreadCaches};
use super::{Arenas, Layers};
use crate::explicit::Explicit;
use crate::os::Errno;
use crate::process;
use crate::sync::lock::{Mutex, RawLock};

/// Caches that there can be at a time: what jemalloc's flags have room for.
const MOST: usize = 4093;

static CACHES: ThreadCaches = ThreadCaches::new();
/// By id. A record once made stays.
static RECORDS: [AtomicPtr<Record>; MOST] = [const { AtomicPtr::new(null_mut()) }; MOST];
/// Held while a cache comes or goes.
static CHANGE: Mutex<()> = Mutex::new(());

struct Record {
    cache: AtomicPtr<ThreadCache>,
    live: AtomicU32,
    busy: AtomicU32,
    /// The explicit arena whose blocks it holds; null: those of the automatic ones.
    arena: AtomicPtr<Explicit>,
    /// That arena's count of resets: blocks from before the last one are no more. [`UNUSED`]: it holds
    /// none, of any arena.
    life: AtomicU32,
}

const UNUSED: u32 = u32::MAX;

/// What an explicit arena's blocks come from.
struct Only(&'static Explicit);

impl Backend for Only {
    fn map(&self, bytes: usize) -> *mut u8 {
        process::map(bytes)
    }

    fn fetch(&self, _: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
        self.0.heap.take_direct(0, class, out)
    }

    fn store(&self, _: usize, class: SizeClass, blocks: &[*mut u8]) {
        self.0.heap.put_back(0, class, blocks);
    }
}

/// A cache in use, until dropped.
struct Use(&'static Record);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.busy.store(0, Release);
    }
}

impl Use {
    fn of(id: u32) -> Option<Self> {
        // SAFETY: null, or a record, which stays.
        let record = unsafe { RECORDS.get(id as usize)?.load(Acquire).as_ref() }?;
        if record.live.load(Acquire) == 0 || record.busy.swap(1, Acquire) != 0 {
            return None;
        }
        Some(Self(record))
    }

    fn cache(&self) -> *mut ThreadCache {
        self.0.cache.load(Relaxed)
    }

    /// Makes the cache one of `arena`'s, if it holds no blocks of another.
    fn serves(&self, arena: Option<&'static Explicit>) -> bool {
        let life = arena.map_or(0, Explicit::life);
        let wanted = arena.map_or(null_mut(), |a| core::ptr::from_ref(a).cast_mut());
        let held = self.0.life.load(Relaxed);
        if held != UNUSED && self.0.arena.load(Relaxed) != wanted {
            return false;
        }
        if held != UNUSED && held != life {
            // SAFETY: in use by this call only.
            unsafe { CACHES.forget(self.cache()) };
        }
        self.0.arena.store(wanted, Relaxed);
        self.0.life.store(life, Relaxed);
        true
    }

    fn flush(&self) {
        // SAFETY: null, or an arena, which stays.
        let arena = unsafe { self.0.arena.load(Relaxed).as_ref() };
        let alive = arena.map_or(0, Explicit::life) == self.0.life.load(Relaxed);
        match arena {
            // SAFETY: in use by this call only.
            Some(arena) if alive => drop(unsafe { CACHES.flush(&Only(arena), self.cache()) }),
            // SAFETY: as above.
            None if alive => drop(unsafe { CACHES.flush(&Arenas, self.cache()) }),
            // SAFETY: as above.
            _ => unsafe { CACHES.forget(self.cache()) },
        }
        self.0.life.store(UNUSED, Relaxed);
    }
}

/// A block of `class` from `arena` (none: the automatic ones) by way of the cache `id`. `None`: it has
/// to be had otherwise.
pub(crate) fn alloc(
    id: u32,
    arena: Option<&'static Explicit>,
    class: SizeClass,
) -> Option<*mut u8> {
    let used = Use::of(id).filter(|used| used.serves(arena))?;
    Some(match arena {
        // SAFETY: in use by this call only.
        Some(arena) => unsafe { CACHES.alloc(&Only(arena), used.cache(), class) },
        // SAFETY: as above.
        None => unsafe { CACHES.alloc(&Layers, used.cache(), class) },
    })
}

/// Takes a block of `class` of `arena`'s into the cache `id`; false: it has to go elsewhere.
///
/// # Safety
/// The block is live, of that class and arena, and its user gave it up.
pub(crate) unsafe fn free(
    id: u32,
    arena: Option<&'static Explicit>,
    class: SizeClass,
    block: *mut u8,
) -> bool {
    let Some(used) = Use::of(id).filter(|used| used.serves(arena)) else { return false };
    match arena {
        // SAFETY: in use by this call only; the caller gives the block away.
        Some(arena) => unsafe { CACHES.free(&Only(arena), used.cache(), class, block) },
        // SAFETY: as above.
        None => unsafe { CACHES.free(&Layers, used.cache(), class, block) },
    }
    true
}

/// `tcache.create`: a new cache's id. `EAGAIN`: there are too many, or no memory for it.
pub(crate) fn create() -> Result<u32, Errno> {
    let none = Errno(libc::EAGAIN);
    if !process::ready() {
        return Err(none);
    }
    let _change = CHANGE.lock();
    let id = RECORDS.iter().position(|record| {
        // SAFETY: null, or a record, which stays.
        unsafe { record.load(Acquire).as_ref() }.is_none_or(|r| r.live.load(Acquire) == 0)
    });
    let id = id.ok_or(none)?;
    if RECORDS[id].load(Acquire).is_null() {
        make(id).ok_or(none)?;
    }
    // SAFETY: a record, which stays.
    let record = unsafe { &*RECORDS[id].load(Acquire) };
    record.live.store(1, Release);
    u32::try_from(id).map_err(|_| none)
}

fn make(id: usize) -> Option<()> {
    let cache = CACHES.create_unowned(&Layers);
    let record = process::map(size_of::<Record>()).cast::<Record>();
    if cache.is_null() || record.is_null() {
        return None;
    }
    let new = Record {
        cache: AtomicPtr::new(cache),
        live: AtomicU32::new(0),
        busy: AtomicU32::new(0),
        arena: AtomicPtr::new(null_mut()),
        life: AtomicU32::new(UNUSED),
    };
    // SAFETY: as many bytes as a record has, aligned to a page, and nobody knows of them yet.
    unsafe { record.write(new) };
    RECORDS[id].store(record, Release);
    Some(())
}

/// `tcache.flush`: gives its blocks back. `EFAULT`: there is no such cache.
pub(crate) fn flush(id: u32) -> Result<(), Errno> {
    Use::of(id).ok_or(Errno(libc::EFAULT))?.flush();
    Ok(())
}

/// `tcache.destroy`: the same, and the id may be used anew.
pub(crate) fn destroy(id: u32) -> Result<(), Errno> {
    let used = Use::of(id).ok_or(Errno(libc::EFAULT))?;
    // Not under the lock: a fork holds that while nobody may pass blocks on.
    used.flush();
    let _change = CHANGE.lock();
    used.0.live.store(0, Release);
    Ok(())
}

/// Blocks of `class` in all of them, by a glance.
pub(super) fn cached_blocks(class: SizeClass) -> usize {
    CACHES.cached_blocks(class)
}

/// In the child of a fork: what other threads were doing to caches is not known, so that their blocks
/// are lost to it.
pub(super) fn fork_child() {
    CACHES.fork_child(null_mut());
    for record in &RECORDS {
        // SAFETY: null, or a record, which stays.
        if let Some(record) = unsafe { record.load(Acquire).as_ref() } {
            record.busy.store(0, Relaxed);
            record.life.store(UNUSED, Relaxed);
        }
    }
}

/// The lock under which caches come and go.
pub(crate) fn lock() -> &'static RawLock {
    CHANGE.raw()
}
