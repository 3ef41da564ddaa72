//! The process's arenas by index, as jemalloc numbers them: the automatic ones first (one for each CPU,
//! over one page layer), then the explicit ones, each a heap of its own.
//!
//! Invariant: an explicit arena's memory lies in a window of its own, outside the process's. So the
//! class map has no code for its blocks, `free` goes its slow path, and nothing on the fast path knows
//! of arenas. The page layer that the automatic arenas share is told as arena 0's.
use core::ptr::null_mut;

use crate::arena::Heap;
pub(crate) use crate::arena::figures::{ClassStats, Classes};
use crate::background;
use crate::control::options;
use crate::extent::heap::Counts;
use crate::extent::page_map::{LG_PAGE, Spot};
use crate::fatal::fatal;
use crate::front;
use crate::front::size_class::{CLASSES, LARGE, RECORDED, SLAB_CLASSES, SizeClass, class_bytes};
use crate::heat::decay::Times;
use crate::os::Errno;
use crate::os::linux::{self, Linux};
use crate::process::{self, HEAP};
use crate::prof::{self, Period};
use crate::sync::atomic::{
    AtomicI64, AtomicPtr, AtomicU8, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use crate::sync::lock::{Mutex, RawLock};

/// Explicit arenas that there can be at a time.
pub(crate) const MOST: usize = 1024;
/// Bytes of a name, with the final NUL.
pub(crate) const NAME_BYTES: usize = 32;

/// Room for the arena's record and its table of batches, bytes.
const SIDE_BYTES: usize = 64 << 20;

/// Address space for explicit arenas: the first place, bytes of each, and how many. The last is for
/// address spaces of 39 bits.
const ZONES: [(usize, usize, usize); 4] = [
    (66 << 40, 1 << 40, 16),
    (6 << 40, 128 << 30, 64),
    (14 << 40, 16 << 30, 1024),
    (300 << 30, 8 << 30, 24),
];
const PLACES: usize = 16 + 64 + 1024 + 24;

/// By index above the automatic arenas', and by place. A record once made stays.
static BY_INDEX: [AtomicPtr<Explicit>; MOST] = [const { AtomicPtr::new(null_mut()) }; MOST];
static BY_PLACE: [AtomicPtr<Explicit>; PLACES] = [const { AtomicPtr::new(null_mut()) }; PLACES];
static MADE: AtomicU32 = AtomicU32::new(0);
/// Held while an arena comes or goes: what those that went have counted.
static GONE: Mutex<Gone> =
    Mutex::new(Gone { arenas: 0, purged: 0, purge_calls: 0, small: 0, large: 0 });

struct Gone {
    arenas: u64,
    purged: u64,
    purge_calls: u64,
    small: u64,
    large: u64,
}

const DEAD: u32 = 0;
const LIVE: u32 = 1;

/// One explicit arena.
pub(crate) struct Explicit {
    pub(crate) heap: Heap<Linux>,
    state: AtomicU32,
    /// How often all its blocks ended at once.
    life: AtomicU32,
    /// Its index above the automatic arenas'.
    number: AtomicU32,
    born_us: AtomicU64,
    dirty_decay_ms: AtomicI64,
    muzzy_decay_ms: AtomicI64,
    /// Pages purged, and calls for that, for arenas that had this record before.
    purged_before: AtomicU64,
    calls_before: AtomicU64,
    name: Name,
}

/// Whose figures, or whose memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// The arena of this index.
    One(u32),
    /// All together.
    All,
    /// Those that were destroyed: totals only.
    Destroyed,
}

/// Figures of one size range of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SizeStats {
    /// Bytes of blocks that are live or in a cache of a CPU or thread.
    pub(crate) allocated: u64,
    /// Blocks that left the arena for a cache or a caller, and those that came back.
    pub(crate) nmalloc: u64,
    pub(crate) ndalloc: u64,
    /// Calls that fetched blocks, and calls that gave some back.
    pub(crate) nfills: u64,
    pub(crate) nflushes: u64,
}

/// Figures of one arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaStats {
    /// Threads that are bound to it.
    pub(crate) nthreads: u32,
    /// Nanoseconds since it was created.
    pub(crate) uptime_ns: u64,
    pub(crate) dirty_decay_ms: i64,
    pub(crate) muzzy_decay_ms: i64,
    /// Pages of 4 KiB.
    pub(crate) pactive: u64,
    pub(crate) pdirty: u64,
    pub(crate) pmuzzy: u64,
    /// Bytes.
    pub(crate) mapped: u64,
    pub(crate) retained: u64,
    pub(crate) resident: u64,
    pub(crate) metadata: u64,
    /// Purges: calls, and pages that went.
    pub(crate) dirty_nmadvise: u64,
    pub(crate) dirty_purged: u64,
    /// Classes up to `SLAB_MAX`, and all above.
    pub(crate) small: SizeStats,
    pub(crate) large: SizeStats,
}

/// What an index names.
enum Arena {
    Automatic(u32),
    Explicit(&'static Explicit),
}

fn find(index: u32) -> Result<Arena, Errno> {
    let auto = auto_count();
    if index < auto {
        return Ok(Arena::Automatic(index));
    }
    let arena = get(index - auto).filter(|a| a.is_live());
    arena.map(Arena::Explicit).ok_or(Errno(libc::EFAULT))
}

fn explicit(index: u32) -> Result<&'static Explicit, Errno> {
    match find(index)? {
        Arena::Explicit(arena) => Ok(arena),
        Arena::Automatic(_) => Err(Errno(libc::EFAULT)),
    }
}

/// The record of the explicit arena `n`, dead or alive.
fn get(n: u32) -> Option<&'static Explicit> {
    // SAFETY: null, or a record, which stays.
    unsafe { BY_INDEX.get(n as usize)?.load(Acquire).as_ref() }
}

/// All records, dead or alive.
fn records() -> impl Iterator<Item = &'static Explicit> {
    (0..MADE.load(Acquire)).filter_map(get)
}

/// The explicit heaps, also those of destroyed arenas, which hold nothing.
pub(crate) fn heaps() -> impl Iterator<Item = &'static Heap<Linux>> {
    records().map(|arena| &arena.heap)
}

/// The explicit arenas that were not destroyed.
pub(crate) fn live_arenas() -> impl Iterator<Item = &'static Explicit> {
    records().filter(|arena| arena.is_live())
}

/// Every heap: what the automatic arenas share, then the explicit ones.
pub(crate) fn all_heaps() -> impl Iterator<Item = &'static Heap<Linux>> {
    core::iter::once(&HEAP).chain(heaps())
}

/// Calls `visit` with every heap of the process and its times.
pub(crate) fn each_heap(mut visit: impl FnMut(&'static Heap<Linux>, Times)) {
    visit(&HEAP, process::times());
    records().for_each(|arena| visit(&arena.heap, arena.times()));
}

/// The locks of all heaps, in the order in which they are taken.
pub(crate) fn locks() -> impl Iterator<Item = &'static RawLock> {
    let first =
        [crate::control::mallctl::lock(), front::apart::lock(), front::tcaches::lock(), GONE.raw()];
    first.into_iter().chain(HEAP.locks()).chain(heaps().flat_map(Heap::locks))
}

/// The explicit arena in whose window `address` lies.
#[cold]
pub(crate) fn of(address: usize) -> Option<&'static Explicit> {
    let mut first = 0;
    for (low, bytes, count) in ZONES {
        let offset = address.wrapping_sub(low);
        if offset < bytes * count {
            // SAFETY: null, or a record, which stays.
            let arena = unsafe { BY_PLACE[first + offset / bytes].load(Acquire).as_ref() }?;
            return arena.heap.pages.space.window.page_of(address).map(|_| arena);
        }
        first += count;
    }
    None
}

/// The live explicit arena of this index.
pub(crate) fn live(index: u32) -> Option<&'static Explicit> {
    explicit(index).ok()
}

impl Explicit {
    fn is_live(&self) -> bool {
        self.state.load(Acquire) == LIVE
    }

    fn times(&self) -> Times {
        let ms = |v: i64| u64::try_from(v).ok();
        let dirty_ms = self.dirty_decay_ms.load(Relaxed);
        Times {
            window_ms: if dirty_ms == 0 { 0 } else { ms(options::hot_window_ms()).unwrap_or(0) },
            decay_ms: ms(dirty_ms),
            muzzy_ms: ms(self.muzzy_decay_ms.load(Relaxed)),
        }
    }

    /// A block of `class`; null when memory is out.
    pub(crate) fn alloc(&self, class: SizeClass) -> *mut u8 {
        let mut block = [null_mut(); 1];
        self.heap.take_direct(0, class, &mut block);
        background::notice();
        block[0]
    }

    /// A block of `size` bytes that has no class; null when memory is out. `due`: as for
    /// [`prof::choose`].
    pub(crate) fn alloc_large(
        &self,
        size: usize,
        align: usize,
        zero: bool,
        due: Period,
    ) -> *mut u8 {
        let block = self.heap.alloc_large(size, align, zero);
        prof::note_large(&self.heap, block, size, due);
        background::notice();
        block
    }

    /// The class-map code of a block of this arena.
    pub(crate) fn code_of(&self, p: *const u8) -> u8 {
        self.heap.pages.space.window.code_of(p.addr())
    }

    /// Usable bytes of a live block of this arena.
    pub(crate) fn usable_size(&self, p: *mut u8) -> usize {
        match self.code_of(p) {
            LARGE => self.heap.large_bytes(p),
            RECORDED => class_bytes(self.heap.recorded_class(p)),
            code if code != 0 && usize::from(code) <= CLASSES => class_bytes(code),
            _ => fatal("use of a pointer that is not a live block", p.addr()),
        }
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// `p` is a live block of this arena, and its user gave it up. What is not ends the process where
    /// that can be seen.
    pub(crate) unsafe fn free(&self, p: *mut u8) {
        let code = self.code_of(p);
        if code == LARGE {
            if prof::ever() {
                prof::freed(self.heap.record_at(p));
            }
            // SAFETY: as the caller promises.
            unsafe { self.heap.free_large(p) };
        } else if code == RECORDED {
            prof::freed(self.heap.record_at(p));
            // SAFETY: as the caller promises.
            unsafe { self.heap.free_recorded(p) };
        } else if code != 0 && usize::from(code) <= CLASSES {
            self.heap.put_back(0, code, &[p]);
        } else {
            fatal("free of a pointer that is not a live block", p.addr());
        }
        self.pages_changed();
    }

    /// Says that pages may have become free.
    pub(crate) fn pages_changed(&self) {
        if self.dirty_decay_ms.load(Relaxed) == 0 && self.heap.pages.dirty_hint() > 0 {
            self.heap.pages.trim();
        }
        background::notice();
    }

    /// Its name, zero bytes after it.
    pub(crate) fn name(&self) -> [u8; NAME_BYTES] {
        self.name.get()
    }

    /// Threads that are bound to it.
    pub(crate) fn threads(&self) -> u32 {
        front::apart::bound_to(self.index())
    }

    /// How often all its blocks ended at once.
    pub(crate) fn life(&self) -> u32 {
        self.life.load(Acquire)
    }

    pub(crate) fn index(&self) -> u32 {
        auto_count() + self.number.load(Relaxed)
    }

    /// # Safety
    /// As for [`reset`].
    unsafe fn reset(&self) {
        self.life.store((self.life.load(Relaxed) + 1) % u32::MAX, Release);
        if prof::ever() {
            self.heap.for_each_record(prof::freed);
        }
        // SAFETY: as the caller promises.
        unsafe { self.heap.reset() };
    }

    fn set_decay_ms(&self, dirty: Option<i64>, muzzy: Option<i64>) {
        if let Some(ms) = dirty {
            self.dirty_decay_ms.store(ms, Relaxed);
        }
        if let Some(ms) = muzzy {
            self.muzzy_decay_ms.store(ms, Relaxed);
        }
        self.heap.pages.set_times(self.times());
    }

    fn purge(&self) {
        self.heap.release_unused();
        self.heap.pages.trim();
    }

    fn decay(&self) {
        self.heap.release_unused();
        self.heap.pages.set_times(self.times());
        self.heap.pages.step();
    }
}

/// Number of automatic arenas: the indices below are theirs.
pub(crate) fn auto_count() -> u32 {
    if process::ready() { HEAP.arena_count() } else { 0 }
}

/// `arenas.narenas`: one more than the highest index ever in use.
pub(crate) fn count() -> u32 {
    auto_count() + MADE.load(Acquire)
}

/// `arena.<i>.initialized`: whether the index is an arena's that was not destroyed.
pub(crate) fn is_live(index: u32) -> bool {
    find(index).is_ok()
}

/// `arenas.create`: a new explicit arena's index. `EAGAIN`: there are too many, or no memory for it.
pub(crate) fn create() -> Result<u32, Errno> {
    let auto = auto_count();
    if auto == 0 {
        return Err(Errno(libc::EAGAIN));
    }
    let _gone = GONE.lock();
    let n = (0..).find(|&n| get(n).is_none_or(|arena| !arena.is_live())).unwrap_or(0);
    let arena = match get(n) {
        Some(arena) => arena,
        None => make(n).ok_or(Errno(libc::EAGAIN))?,
    };
    arena.name.set_manual(auto + n);
    arena.born_us.store(linux::now_us(), Relaxed);
    arena.set_decay_ms(Some(options::dirty_decay_ms()), Some(options::muzzy_decay_ms()));
    arena.state.store(LIVE, Release);
    Ok(auto + n)
}

/// Makes the record and the window of the explicit arena `n`, which has none.
fn make(n: u32) -> Option<&'static Explicit> {
    let slot = BY_INDEX.get(n as usize)?;
    let record = spare_record();
    // SAFETY: null, or a record, which stays.
    let arena = unsafe { record.as_ref() }?;
    let Some(place) = place(&arena.heap) else {
        SPARE.store(record, Relaxed);
        return None;
    };
    arena.number.store(n, Relaxed);
    arena.heap.pages.set_huge(options::thp(), options::hugetlb());
    BY_PLACE[place].store(record, Release);
    slot.store(record, Release);
    MADE.store(MADE.load(Relaxed).max(n + 1), Release);
    Some(arena)
}

/// A record that has no window yet, if one could not be had.
static SPARE: AtomicPtr<Explicit> = AtomicPtr::new(null_mut());

/// A new record; null where there is no memory for it.
fn spare_record() -> *mut Explicit {
    let spare = SPARE.swap(null_mut(), Relaxed);
    if !spare.is_null() {
        return spare;
    }
    let record = HEAP.map_table(size_of::<Explicit>()).cast::<Explicit>();
    if !record.is_null() {
        // SAFETY: as many bytes as a record has, aligned to a page, and nobody knows of them yet.
        unsafe { record.write(Explicit::NEW) };
    }
    record
}

/// Gives a new heap its window, in the first place that is free.
fn place(heap: &Heap<Linux>) -> Option<usize> {
    let taken = HEAP.pages.space.window.reach();
    let mut first = 0;
    for (low, bytes, count) in ZONES {
        for i in 0..count {
            let start = low + i * bytes;
            let is_taken = start < taken.end && taken.start < start + bytes;
            if is_taken || !BY_PLACE[first + i].load(Relaxed).is_null() {
                continue;
            }
            // Somewhat moved about, so that addresses are hard to guess.
            #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
            let random = (linux::now_us() as usize).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 13;
            let origin = start + (random % (bytes / 32)).next_multiple_of(2 << 20);
            let spot = Spot { origin, bytes: bytes / 4 * 3, side_bytes: SIDE_BYTES };
            if heap.init_at(spot).is_ok() {
                return Some(first + i);
            }
        }
        first += count;
    }
    None
}

impl Explicit {
    #[allow(clippy::declare_interior_mutable_const, reason = "copied into new memory")]
    const NEW: Self = Self {
        heap: Heap::new(Linux),
        state: AtomicU32::new(DEAD),
        life: AtomicU32::new(0),
        number: AtomicU32::new(0),
        born_us: AtomicU64::new(0),
        dirty_decay_ms: AtomicI64::new(0),
        muzzy_decay_ms: AtomicI64::new(0),
        purged_before: AtomicU64::new(0),
        calls_before: AtomicU64::new(0),
        name: Name::new(),
    };
}

/// `arena.<i>.reset`: frees all blocks of an explicit arena. `EFAULT` for an index that is none.
///
/// # Safety
/// Nobody uses a block of the arena any more, and none is in an explicit tcache.
pub(crate) unsafe fn reset(index: u32) -> Result<(), Errno> {
    let arena = explicit(index)?;
    // Before the lock, which a fork holds while it keeps the passage closed.
    let _inside = arena.heap.passage.enter(0);
    let _gone = GONE.lock();
    // SAFETY: as the caller promises, from inside.
    unsafe { arena.reset() };
    arena.pages_changed();
    Ok(())
}

/// `arena.<i>.destroy`: as [`reset`], and gives all memory back; [`create`] may use the index again.
/// `EFAULT` also where a thread is bound to it.
///
/// # Safety
/// As for [`reset`].
pub(crate) unsafe fn destroy(index: u32) -> Result<(), Errno> {
    let arena = explicit(index)?;
    // Before the lock, as above.
    let _inside = arena.heap.passage.enter(0);
    let mut gone = GONE.lock();
    let dead = arena.state.compare_exchange(LIVE, DEAD, AcqRel, Relaxed).is_ok();
    if !dead || front::apart::bound_to(index) > 0 {
        if dead {
            arena.state.store(LIVE, Release);
        }
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: as the caller promises, from inside.
    unsafe { arena.reset() };
    arena.heap.pages.trim();
    let mut classes = [ClassStats::default(); CLASSES + 2];
    arena.heap.add_class_stats(None, &mut classes);
    arena.heap.clear_counts();
    let sum = |range: &[ClassStats]| range.iter().map(|c| c.nmalloc).sum::<u64>();
    gone.arenas += 1;
    gone.small += sum(&classes[..=SLAB_CLASSES]);
    gone.large += sum(&classes[SLAB_CLASSES + 1..]);
    let counts = arena.heap.pages.counts();
    gone.purged += counts.purged - arena.purged_before.swap(counts.purged, Relaxed);
    gone.purge_calls += counts.purge_calls - arena.calls_before.swap(counts.purge_calls, Relaxed);
    Ok(())
}

/// `arena.<i>.purge`: gives every free page back. `EFAULT` for an index that is no live arena's. For an
/// automatic arena it is the page layer that all of these share.
pub(crate) fn purge(which: Which) -> Result<(), Errno> {
    match which {
        Which::All => drop(process::trim()),
        Which::Destroyed => return Err(Errno(libc::EFAULT)),
        Which::One(index) => match find(index)? {
            Arena::Automatic(_) => drop(process::trim_automatic()),
            Arena::Explicit(arena) => arena.purge(),
        },
    }
    Ok(())
}

/// `arena.<i>.decay`: gives back what is due by the decay times. Errors as [`purge`].
pub(crate) fn decay(which: Which) -> Result<(), Errno> {
    let automatic = || {
        if process::ready() {
            HEAP.pages.set_times(process::times());
            HEAP.pages.step();
        }
    };
    match which {
        Which::All => {
            automatic();
            records().for_each(Explicit::decay);
        }
        Which::Destroyed => return Err(Errno(libc::EFAULT)),
        Which::One(index) => match find(index)? {
            Arena::Automatic(_) => automatic(),
            Arena::Explicit(arena) => arena.decay(),
        },
    }
    Ok(())
}

/// The decay times of an arena, milliseconds, -1 for never: dirty, muzzy. Those of automatic arenas are
/// the options' (in force now). `EFAULT` for no arena.
pub(crate) fn decay_ms(index: u32) -> Result<(i64, i64), Errno> {
    Ok(match find(index)? {
        Arena::Automatic(_) => (options::dirty_decay_ms(), options::muzzy_decay_ms()),
        Arena::Explicit(arena) => {
            (arena.dirty_decay_ms.load(Relaxed), arena.muzzy_decay_ms.load(Relaxed))
        }
    })
}

/// Sets one or both of them; an automatic arena's sets the options. `EFAULT` for no arena or a value
/// that the option does not allow.
pub(crate) fn set_decay_ms(
    index: u32,
    dirty: Option<i64>,
    muzzy: Option<i64>,
) -> Result<(), Errno> {
    let rows = [("dirty_decay_ms", dirty), ("muzzy_decay_ms", muzzy)];
    let arena = find(index)?;
    for (name, ms) in rows.iter().filter_map(|&(name, ms)| Some((name, ms?))) {
        let row = options::find(name).ok_or(Errno(libc::EFAULT))?;
        if !(row.min..=row.max).contains(&ms) {
            return Err(Errno(libc::EFAULT));
        }
        if let Arena::Automatic(_) = arena {
            row.set(ms).map_err(|_| Errno(libc::EFAULT))?;
        }
    }
    match arena {
        Arena::Automatic(_) => HEAP.pages.set_times(process::times()),
        Arena::Explicit(arena) => arena.set_decay_ms(dirty, muzzy),
    }
    background::notice();
    Ok(())
}

/// A name, readable while it is written.
struct Name([AtomicU8; NAME_BYTES]);

impl Name {
    const fn new() -> Self {
        Self([const { AtomicU8::new(0) }; NAME_BYTES])
    }

    fn set(&self, name: &[u8]) {
        for (i, to) in self.0[..NAME_BYTES - 1].iter().enumerate() {
            to.store(name.get(i).copied().unwrap_or(0), Relaxed);
        }
    }

    fn set_manual(&self, index: u32) {
        let mut line = crate::control::text::Line::<NAME_BYTES>::new();
        line.str("manual_").signed(i64::from(index));
        self.set(line.as_bytes());
    }

    fn get(&self) -> [u8; NAME_BYTES] {
        let mut name = [0; NAME_BYTES];
        for (to, from) in name.iter_mut().zip(&self.0) {
            *to = from.load(Relaxed);
        }
        name
    }
}

/// The name of the automatic arenas.
static AUTO: Name = Name::new();

/// An arena's name with its final NUL: at first "auto" or "manual_<index>". The automatic arenas share
/// theirs.
pub(crate) fn name(index: u32) -> Result<[u8; NAME_BYTES], Errno> {
    Ok(match find(index)? {
        Arena::Explicit(arena) => arena.name.get(),
        Arena::Automatic(_) => {
            let name = AUTO.get();
            if name[0] == 0 {
                AUTO.set(b"auto");
            }
            AUTO.get()
        }
    })
}

/// Gives an arena a name, which is cut off where it is too long.
pub(crate) fn set_name(index: u32, name: &[u8]) -> Result<(), Errno> {
    match find(index)? {
        Arena::Explicit(arena) => arena.name.set(name),
        Arena::Automatic(_) => AUTO.set(name),
    }
    Ok(())
}

/// `arenas.lookup`: the arena that holds the live block at `address`; 0 where that is an automatic
/// arena's block with pages of its own. `None`: no block starts or lies there.
pub(crate) fn lookup(address: usize) -> Option<u32> {
    if auto_count() == 0 {
        return None;
    }
    if let Some(arena) = of(address) {
        arena.heap.arena_of(address)?;
        return Some(arena.index());
    }
    HEAP.arena_of(address)
}

/// Figures; `None` where `One` names no arena (a destroyed one is none).
pub(crate) fn stats(which: Which) -> Option<ArenaStats> {
    let mut classes = [ClassStats::default(); CLASSES + 2];
    if which != Which::Destroyed && !class_stats(which, &mut classes) {
        return None;
    }
    let mut stats = ArenaStats {
        small: sizes(&classes[..=SLAB_CLASSES]),
        large: sizes(&classes[SLAB_CLASSES + 1..]),
        dirty_decay_ms: options::dirty_decay_ms(),
        muzzy_decay_ms: options::muzzy_decay_ms(),
        uptime_ns: process::uptime_us() * 1000,
        ..ArenaStats::default()
    };
    match which {
        Which::Destroyed => {
            let gone = GONE.lock();
            if gone.arenas == 0 {
                return None;
            }
            stats.small.nmalloc = gone.small;
            stats.small.ndalloc = gone.small;
            stats.large.nmalloc = gone.large;
            stats.large.ndalloc = gone.large;
            stats.dirty_purged = gone.purged;
            stats.dirty_nmadvise = gone.purge_calls;
        }
        Which::All => {
            add_pages(&mut stats, &HEAP);
            for arena in records() {
                stats.nthreads += front::apart::bound_to(arena.index());
                add_pages(&mut stats, &arena.heap);
            }
        }
        Which::One(index) => match find(index).ok()? {
            Arena::Automatic(0) => {
                add_pages(&mut stats, &HEAP);
                // The other automatic arenas' slabs are told there.
                let mut all = [ClassStats::default(); CLASSES + 2];
                HEAP.add_class_stats(None, &mut all);
                let pages = |classes: &Classes| classes.iter().map(|c| c.pages).sum::<u64>();
                let others = pages(&all).saturating_sub(pages(&classes));
                stats.pactive = stats.pactive.saturating_sub(others);
                stats.mapped = stats.mapped.saturating_sub(others << LG_PAGE);
                stats.resident = stats.resident.saturating_sub(others << LG_PAGE);
            }
            Arena::Automatic(_) => {
                stats.pactive = classes.iter().map(|c| c.pages).sum();
                stats.mapped = stats.pactive << LG_PAGE;
                stats.resident = stats.mapped;
            }
            Arena::Explicit(arena) => {
                add_pages(&mut stats, &arena.heap);
                stats.dirty_purged -= arena.purged_before.load(Relaxed);
                stats.dirty_nmadvise -= arena.calls_before.load(Relaxed);
                stats.nthreads = front::apart::bound_to(index);
                stats.dirty_decay_ms = arena.dirty_decay_ms.load(Relaxed);
                stats.muzzy_decay_ms = arena.muzzy_decay_ms.load(Relaxed);
                let age_us = linux::now_us().saturating_sub(arena.born_us.load(Relaxed));
                stats.uptime_ns = age_us * 1000;
            }
        },
    }
    Some(stats)
}

fn add_pages(stats: &mut ArenaStats, heap: &Heap<Linux>) {
    let counts: Counts = heap.pages.counts();
    let metadata = counts.metadata_bytes + heap.table_bytes() as u64;
    stats.pactive += counts.in_use;
    stats.pdirty += counts.dirty;
    stats.pmuzzy += counts.muzzy;
    stats.mapped += (counts.mapped - counts.clean) << LG_PAGE;
    stats.retained += counts.clean << LG_PAGE;
    stats.metadata += metadata;
    stats.resident += ((counts.in_use + counts.dirty + counts.muzzy) << LG_PAGE) + metadata;
    stats.dirty_purged += counts.purged;
    stats.dirty_nmadvise += counts.purge_calls;
}

fn sizes(classes: &[ClassStats]) -> SizeStats {
    let mut sum = SizeStats::default();
    for class in classes {
        sum.allocated += class.bytes;
        sum.nmalloc += class.nmalloc;
        sum.ndalloc += class.ndalloc;
        sum.nfills += class.nfills;
        sum.nflushes += class.nflushes;
    }
    sum
}

/// Figures by class; false, and nothing written, where `which` names no arena.
pub(crate) fn class_stats(which: Which, out: &mut Classes) -> bool {
    let none = [ClassStats::default(); CLASSES + 2];
    match which {
        Which::Destroyed => *out = none,
        Which::All if auto_count() == 0 => return false,
        Which::All => {
            *out = none;
            each_heap(|heap, _| heap.add_class_stats(None, out));
        }
        Which::One(index) => {
            let Ok(arena) = find(index) else { return false };
            *out = none;
            match arena {
                Arena::Automatic(index) => HEAP.add_class_stats(Some(index), out),
                Arena::Explicit(arena) => arena.heap.add_class_stats(None, out),
            }
        }
    }
    true
}

#[cfg(test)]
mod tests;
