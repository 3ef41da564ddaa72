//! Allocation with particulars: what jemalloc's `mallocx` and its kin take as flags. A request that asks
//! for nothing special goes the way of [`crate::api`].
//!
//! What a request names and does not exist (an arena, a cache) is a null result, or no cache. A block
//! stays in its arena when it is resized, unless the request names another.
use core::ptr::null_mut;

use crate::api::{self, MOST_BYTES};
use crate::arena::Heap;
use crate::explicit::{self, Explicit};
use crate::extent::heap::MOST_PAGES;
use crate::extent::page_map::{LG_PAGE, PAGE};
use crate::front::size_class::{
    CACHED_MAX, CLASSES, LARGE, SLAB_CLASSES, SLAB_MAX, SizeClass, class_bytes, class_of_aligned,
};
use crate::front::{self, apart, tcaches};
use crate::os::linux::Linux;
use crate::process::{self, HEAP};
use crate::prof::{self, Period};

/// Which cache serves a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// The usual one; none where an arena is named.
    #[default]
    Automatic,
    /// None.
    Bypass,
    /// The explicit one of this id.
    Explicit(u32),
}

/// What a request asks for beside its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// A power of two that the address is a multiple of; 1 for none.
    pub align: usize,
    /// All bytes are to be zero; of a block that grows, those beyond its former usable size.
    pub zero: bool,
    /// The cache.
    pub cache: Cache,
    /// The arena of this index.
    pub arena: Option<u32>,
}

impl Default for Request {
    fn default() -> Self {
        Self { align: 1, zero: false, cache: Cache::Automatic, arena: None }
    }
}

/// Where a block comes from.
#[derive(Clone, Copy)]
enum Source {
    /// The automatic arena of this index.
    Automatic(u32),
    Explicit(&'static Explicit),
}

impl Source {
    /// The source that the request names, or the calling thread's; `None`: there is no such arena.
    fn of(request: &Request) -> Option<Self> {
        match request.arena {
            Some(index) if index >= explicit::auto_count() => {
                explicit::live(index).map(Source::Explicit)
            }
            Some(index) => Some(Source::Automatic(index)),
            None => Some(match apart::arena() {
                Some(arena) => Source::Explicit(arena),
                None => Source::Automatic(front::current_arena()),
            }),
        }
    }

    fn explicit(self) -> Option<&'static Explicit> {
        match self {
            Source::Explicit(arena) => Some(arena),
            Source::Automatic(_) => None,
        }
    }

    fn heap(self) -> &'static Heap<Linux> {
        self.explicit().map_or(&HEAP, |arena| &arena.heap)
    }

    fn alloc(self, class: SizeClass) -> *mut u8 {
        match self {
            Source::Explicit(arena) => arena.alloc(class),
            Source::Automatic(index) => {
                let mut block = [null_mut(); 1];
                HEAP.take_direct(index, class, &mut block);
                process::pages_changed();
                block[0]
            }
        }
    }

    fn alloc_large(self, size: usize, align: usize, zero: bool, due: Period) -> *mut u8 {
        match self {
            Source::Explicit(arena) => arena.alloc_large(size, align, zero, due),
            Source::Automatic(_) => {
                let block = HEAP.alloc_large(size, align, zero);
                prof::note_large(&HEAP, block, size, due);
                process::pages_changed();
                block
            }
        }
    }
}

/// A block of `size` bytes, or null.
#[must_use]
pub fn alloc(size: usize, request: &Request) -> *mut u8 {
    if request.arena.is_none() && request.cache == Cache::Automatic {
        return match (request.align <= 16, request.zero) {
            (true, false) => api::alloc(size),
            (true, true) => api::alloc_zeroed(size),
            (false, false) => api::alloc_aligned(size, request.align),
            (false, true) => api::alloc_aligned_zeroed(size, request.align),
        };
    }
    if size > MOST_BYTES || !process::ready() {
        return null_mut();
    }
    let Some(source) = Source::of(request) else { return null_mut() };
    alloc_from(source, size, request)
}

fn alloc_from(source: Source, size: usize, request: &Request) -> *mut u8 {
    let due = front::count_allocated(size);
    let p = match class_of_aligned(size, request.align, PAGE) {
        None => source.alloc_large(size, request.align, request.zero, due),
        Some(class) => {
            // Before the cache, which knows nothing of samples.
            let recorded = prof::alloc_chosen(source.heap(), class, size, due);
            let cached = match request.cache {
                _ if !recorded.is_null() => Some(recorded),
                Cache::Explicit(id) => tcaches::alloc(id, source.explicit(), class),
                _ => None,
            };
            let p = cached.unwrap_or_else(|| source.alloc(class));
            if request.zero && !p.is_null() {
                // SAFETY: a new block of that many bytes.
                unsafe { p.write_bytes(0, class_bytes(class)) };
            }
            p
        }
    };
    api::note_allocated(p);
    p
}

/// Frees `p`, which is not null, as the request says: its cache, nothing else, matters.
///
/// # Safety
/// As for [`api::free`].
pub unsafe fn free(p: *mut u8, request: &Request) {
    if request.cache == Cache::Automatic {
        // SAFETY: as the caller promises.
        return unsafe { api::free(p) };
    }
    let (arena, code) = whose(p);
    if code == 0 || usize::from(code) > CLASSES {
        // Such blocks are in no cache.
        // SAFETY: as the caller promises.
        return unsafe { api::free(p) };
    }
    api::note_freed(p);
    if let Cache::Explicit(id) = request.cache
        // SAFETY: as the caller promises; the code is the block's class.
        && unsafe { tcaches::free(id, arena, code, p) }
    {
        return;
    }
    match arena {
        // SAFETY: as the caller promises.
        Some(arena) => unsafe { arena.free(p) },
        None => {
            HEAP.put_back(front::current_arena() as usize, code, &[p]);
            process::pages_changed();
        }
    }
}

/// The explicit arena that a block is of, if it is one's, and the block's code.
fn whose(p: *mut u8) -> (Option<&'static Explicit>, u8) {
    let code = HEAP.pages.space.window.code_of(p.addr());
    if code != 0 {
        return (None, code);
    }
    let arena = explicit::of(p.addr());
    (arena, arena.map_or(0, |arena| arena.code_of(p)))
}

/// Resizes `p`; null, and `p` stays, where that can't be.
///
/// # Safety
/// As for [`api::realloc`].
pub unsafe fn realloc(p: *mut u8, size: usize, request: &Request) -> *mut u8 {
    let (arena, _) = whose(p);
    // SAFETY: a live block.
    let old = unsafe { api::usable_size(p) };
    let elsewhere = match request.arena {
        Some(index) => explicit::lookup(p.addr()) != Some(index),
        None => false,
    };
    let q = if request.arena.is_none() && request.cache == Cache::Automatic {
        if request.align == 1 {
            // SAFETY: as the caller promises.
            unsafe { api::realloc(p, size) }
        } else {
            // SAFETY: as above.
            unsafe { api::realloc_aligned(p, size, request.align) }
        }
    } else if !elsewhere && stays(p, old, size, request) {
        p
    } else {
        let source = match arena.filter(|_| request.arena.is_none()) {
            Some(arena) => Some(Source::Explicit(arena)),
            None => Source::of(request),
        };
        let Some(source) = source.filter(|_| size <= MOST_BYTES) else { return null_mut() };
        let q = alloc_from(source, size, &Request { zero: false, ..*request });
        // SAFETY: both are live, and the caller gave the old one up.
        unsafe { replace(p, old, q, size, request) };
        q
    };
    if request.zero && !q.is_null() {
        // SAFETY: a live block of the caller's.
        let new = unsafe { api::usable_size(q) };
        if new > old {
            // SAFETY: within the block, beyond what it had.
            unsafe { q.wrapping_add(old).write_bytes(0, new - old) };
        }
    }
    q
}

/// Moves what `p` holds to `q`, unless that is null.
///
/// # Safety
/// `p` is a live block of `old` usable bytes that its user gave up, `q` null or one of at least `size`.
unsafe fn replace(p: *mut u8, old: usize, q: *mut u8, size: usize, request: &Request) {
    if !q.is_null() {
        // SAFETY: both blocks are live, distinct and at least that long.
        unsafe { core::ptr::copy_nonoverlapping(p, q, old.min(size)) };
        // SAFETY: the caller gave it up.
        unsafe { free(p, request) };
    }
}

/// Whether a block of `old` usable bytes does for `size`, or was made to, where it is.
fn stays(p: *mut u8, old: usize, size: usize, request: &Request) -> bool {
    if !p.addr().is_multiple_of(request.align) {
        return false;
    }
    if good_size(size, request.align) == Some(old) {
        note_size(p, size, old);
        return true;
    }
    if old <= SLAB_MAX || size <= SLAB_MAX {
        return false;
    }
    // SAFETY: the caller's block, which may be resized.
    let now = unsafe { resize_in_place(p, size, 0, &Request { zero: false, ..*request }) };
    now >= size && now - size <= size / 4
}

/// A block that stays where it is is now one of `size` bytes, of which `usable` may be used.
fn note_size(p: *mut u8, size: usize, usable: usize) {
    if prof::ever() {
        let heap = explicit::of(p.addr()).map_or(&HEAP, |arena| &arena.heap);
        prof::resized(heap.record_at(p), p, size, usable);
    }
}

/// Resizes a block of an explicit arena, within it.
///
/// # Safety
/// As for [`api::realloc`]; `p` is of `arena`.
pub(crate) unsafe fn move_or_fit(
    p: *mut u8,
    size: usize,
    align: usize,
    arena: &'static Explicit,
) -> *mut u8 {
    let request = Request { align, ..Request::default() };
    let old = arena.usable_size(p);
    if size > MOST_BYTES {
        return null_mut();
    }
    if stays(p, old, size, &request) {
        return p;
    }
    let is_aligned = p.addr().is_multiple_of(align);
    // A long one's pages are moved, and nothing is copied.
    if is_aligned
        && size > CACHED_MAX
        && arena.code_of(p) == LARGE
        && let Some(q) =
            prof::follow(&arena.heap, p, size, || arena.heap.resize_large(p, size, align))
    {
        if apart::is_set(apart::COUNTED) {
            apart::note(arena.usable_size(q), old);
        }
        return q;
    }
    let q = alloc_from(Source::Explicit(arena), size, &request);
    if q.is_null() && is_aligned && size <= old {
        // No memory for a smaller block: this one does.
        return p;
    }
    // SAFETY: both are live, and the caller gave the old one up.
    unsafe { replace(p, old, q, size, &request) };
    q
}

/// Resizes `p` where it is: to `size + extra` usable bytes, or at least `size`, as far as that can be.
/// Returns its usable bytes afterwards.
///
/// # Safety
/// As for [`api::realloc`].
pub unsafe fn resize_in_place(p: *mut u8, size: usize, extra: usize, request: &Request) -> usize {
    // SAFETY: a live block.
    let old = unsafe { api::usable_size(p) };
    let (arena, code) = whose(p);
    let most = size.saturating_add(extra).min(MOST_BYTES);
    if usize::from(code) <= SLAB_CLASSES
        || !p.addr().is_multiple_of(request.align)
        || size > MOST_BYTES
    {
        return old;
    }
    let heap = arena.map_or(&HEAP, |arena| &arena.heap);
    let new = heap.resize_in_place(p, size, most);
    note_size(p, size.min(new), new);
    if new != old {
        if apart::is_set(apart::COUNTED) {
            apart::note(new, old);
        }
        process::pages_changed();
    }
    if request.zero && new > old {
        // SAFETY: within the block, beyond what it had.
        unsafe { p.wrapping_add(old).write_bytes(0, new - old) };
    }
    new
}

/// The usable bytes of a block that is asked for with `size` and `align`; `None`: there is no such
/// block.
#[must_use]
pub fn good_size(size: usize, align: usize) -> Option<usize> {
    if size > MOST_BYTES || align >> LG_PAGE > MOST_PAGES || !process::ready() {
        return None;
    }
    match class_of_aligned(size, align, PAGE) {
        Some(class) => Some(class_bytes(class)),
        None => Some((HEAP.pages.pages_for(size)? as usize) << LG_PAGE),
    }
}
