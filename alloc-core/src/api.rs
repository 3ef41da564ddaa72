//! The entry points: allocate, resize, free.
//!
//! Every function may be called from any thread at any time, from the first instruction of the
//! process on. Sizes and alignments are bytes; alignments are powers of two. A null result means that
//! memory is out; then nothing has changed. Blocks have at least 16 bytes and that alignment.
use core::ptr::null_mut;

use crate::explicit;
use crate::extended;
use crate::extent::page_map::PAGE;
use crate::fatal::fatal;
use crate::front::size_class::{
    CACHED_MAX, CLASSES, HUGE_BYTES, HUGE_CLASS, LARGE, RECORDED, SLAB_MAX, SizeClass, TINY_MAX,
    class_at_once, class_bytes, class_of, class_of_aligned, is_extent, medium_class, tiny_class,
};
use crate::front::{self, apart};
use crate::process::{self, HEAP};
use crate::prof;

/// Largest block, bytes: pointers into one block must have a difference that fits `isize`.
pub(crate) const MOST_BYTES: usize = isize::MAX as usize;

/// A block of `size` bytes.
#[inline(always)]
#[must_use]
pub fn alloc(size: usize) -> *mut u8 {
    let p = if size <= TINY_MAX {
        front::alloc(tiny_class(size), size)
    } else if size <= SLAB_MAX {
        front::alloc(medium_class(size), size)
    } else {
        null_mut()
    };
    if p.is_null() { alloc_slow(size) } else { p }
}

/// The class of a block of `size` bytes that has one.
#[doc(hidden)]
#[inline(always)]
#[must_use]
pub fn small_class(size: usize) -> usize {
    usize::from(class_of(size))
}

/// The fast path of [`alloc`] for a size of a class that is known. Null: go on to [`alloc_own`].
#[doc(hidden)]
#[inline(always)]
#[must_use]
pub fn alloc_of_class(class: usize, size: usize) -> *mut u8 {
    front::alloc(class, size)
}

/// The rest of [`alloc`], where the fast path gave null.
#[cold]
#[inline(never)]
fn alloc_slow(size: usize) -> *mut u8 {
    let p = if size <= SLAB_MAX { alloc_own(small_class(size)) } else { null_mut() };
    if p.is_null() { alloc_shared(size) } else { p }
}

/// A block from the thread's own cache, where it has one; null: go on to [`alloc_shared`].
#[doc(hidden)]
#[inline(always)]
#[must_use]
pub fn alloc_own(class: usize) -> *mut u8 {
    front::alloc_own(class)
}

/// The rest of [`alloc`], past the thread's own cache.
#[doc(hidden)]
#[cold]
#[inline(never)]
#[must_use]
pub fn alloc_shared(size: usize) -> *mut u8 {
    if size == HUGE_BYTES {
        return front::alloc_extent(HUGE_CLASS, size);
    }
    if size > CACHED_MAX {
        return alloc_large(size, 1, false);
    }
    match class_of(size) {
        class if is_extent(class) => front::alloc_extent(class, size),
        class => cached_shared(class, size),
    }
}

/// A block of `size` zero bytes. Pages that are fresh from the kernel are not written.
#[inline]
#[must_use]
pub fn alloc_zeroed(size: usize) -> *mut u8 {
    if size > CACHED_MAX {
        return alloc_large(size, 1, true);
    }
    zeroed(alloc(size), size)
}

/// A block of `size` bytes whose address is a multiple of `align`.
#[inline]
#[must_use]
pub fn alloc_aligned(size: usize, align: usize) -> *mut u8 {
    match class_at_once(size, align, PAGE) {
        Some(class) => cached(class, size),
        None => alloc_aligned_slow(size, align),
    }
}

#[cold]
#[inline(never)]
fn alloc_aligned_slow(size: usize, align: usize) -> *mut u8 {
    match class_of_aligned(size, align, PAGE) {
        Some(class) if is_extent(class) => front::alloc_extent(class, size),
        Some(class) => cached(class, size),
        None if size == HUGE_BYTES && align <= HUGE_BYTES => front::alloc_extent(HUGE_CLASS, size),
        None => alloc_large(size, align, false),
    }
}

/// A block of `size` zero bytes whose address is a multiple of `align`.
#[inline]
#[must_use]
pub fn alloc_aligned_zeroed(size: usize, align: usize) -> *mut u8 {
    match class_of_aligned(size, align, PAGE) {
        Some(class) if is_extent(class) => zeroed(front::alloc_extent(class, size), size),
        Some(class) => zeroed(cached(class, size), size),
        None => alloc_large(size, align, true),
    }
}

#[inline(always)]
fn cached(class: SizeClass, size: usize) -> *mut u8 {
    let p = front::alloc(usize::from(class), size);
    if p.is_null() { cached_slow(class, size) } else { p }
}

#[cold]
#[inline(never)]
fn cached_slow(class: SizeClass, size: usize) -> *mut u8 {
    let p = front::alloc_own(usize::from(class));
    if p.is_null() { cached_shared(class, size) } else { p }
}

#[cold]
#[inline(never)]
fn cached_shared(class: SizeClass, size: usize) -> *mut u8 {
    front::alloc_slow(class, size)
}

fn zeroed(p: *mut u8, size: usize) -> *mut u8 {
    if !p.is_null() {
        // SAFETY: the block has at least `size` bytes.
        unsafe { p.write_bytes(0, size) };
    }
    p
}

#[cold]
fn alloc_large(size: usize, align: usize, zero: bool) -> *mut u8 {
    if size > MOST_BYTES || !process::ready() {
        return null_mut();
    }
    let due = front::count_allocated(size);
    let p = match apart::arena() {
        Some(arena) => arena.alloc_large(size, align, zero, due),
        None => {
            let p = HEAP.alloc_large(size, align, zero);
            prof::note_large(&HEAP, p, size, due);
            p
        }
    };
    note_allocated(p);
    process::pages_changed();
    p
}

/// Counts a block that was allocated past the caches, for a thread that wants to know.
pub(crate) fn note_allocated(p: *mut u8) {
    if apart::is_set(apart::COUNTED) {
        // SAFETY: null or a live block.
        apart::note(unsafe { usable_size(p) }, 0);
    }
}

/// Counts a block that is about to be freed past the caches.
pub(crate) fn note_freed(p: *mut u8) {
    if apart::is_set(apart::COUNTED) {
        // SAFETY: null or a live block.
        apart::note(0, unsafe { usable_size(p) });
    }
}

/// Frees `p`, which may be null.
///
/// # Safety
/// `p` is null or a live block of this allocator, and is not used afterwards. A pointer that is not
/// ends the process where that can be seen.
#[inline(always)]
pub unsafe fn free(p: *mut u8) {
    // SAFETY: the caller gave the block up.
    if !unsafe { front::free(p) } {
        free_uncached(p);
    }
}

/// Frees `p`, a block that was asked for with `size` and `align`.
///
/// # Safety
/// As for [`free`]; `size` and `align` are those of the request.
#[inline(always)]
pub unsafe fn free_sized(p: *mut u8, size: usize, align: usize) {
    let _ = (size, align);
    // SAFETY: as the caller promises.
    unsafe { free(p) }
}

#[cold]
#[inline(never)]
fn free_uncached(p: *mut u8) {
    let code = HEAP.pages.space.window.code_of(p.addr());
    // SAFETY: the caller of `free` gave the block up.
    if !unsafe { front::free_own(code, p) } {
        free_shared(p, code);
    }
}

// Not inlined, so that the one above is a leaf.
#[cold]
#[inline(never)]
fn free_shared(p: *mut u8, code: u8) {
    // SAFETY: the caller of `free` gave the block up.
    if !unsafe { front::free_slow(code, p) } {
        free_pages(p, code);
    }
}

/// Frees a block with pages of its own.
#[cold]
#[inline(never)]
fn free_pages(p: *mut u8, code: u8) {
    if code == LARGE {
        note_freed(p);
        if prof::ever() {
            prof::freed(HEAP.record_at(p));
        }
        // SAFETY: the caller of `free` gave the block up.
        unsafe { HEAP.free_large(p) };
        process::pages_changed();
    } else if code == RECORDED {
        note_freed(p);
        prof::freed(HEAP.record_at(p));
        // SAFETY: as above.
        unsafe { HEAP.free_recorded(p) };
        process::pages_changed();
    } else if let Some(arena) = explicit::of(p.addr()) {
        note_freed(p);
        // SAFETY: as above.
        if !unsafe { apart::free_to_arena(arena, arena.code_of(p), p) } {
            // SAFETY: as above.
            unsafe { arena.free(p) };
        }
    } else if !p.is_null() {
        fatal("free of a pointer that is not a live block", p.addr());
    }
}

/// Resizes `p` to `new_size` bytes, in place where that is possible; the contents are kept up to
/// the smaller size. On failure `p` stays as it is.
///
/// # Safety
/// As for [`free`]; `p` is not null. On success only the result may be used.
pub unsafe fn realloc(p: *mut u8, new_size: usize) -> *mut u8 {
    // SAFETY: as the caller promises.
    unsafe { resize(p, new_size, 1) }
}

/// As [`realloc`], and the result has alignment `align`.
///
/// # Safety
/// As for [`realloc`].
pub unsafe fn realloc_aligned(p: *mut u8, new_size: usize, align: usize) -> *mut u8 {
    // SAFETY: as the caller promises.
    unsafe { resize(p, new_size, align) }
}

/// # Safety
/// As for [`realloc`].
#[inline(always)]
unsafe fn resize(p: *mut u8, new_size: usize, align: usize) -> *mut u8 {
    let code = HEAP.pages.space.window.code_of(p.addr());
    if !(1..=CLASSES).contains(&usize::from(code)) {
        // SAFETY: as the caller promises.
        return unsafe { resize_apart(code, p, new_size, align) };
    }
    let old_size = class_bytes(code);
    if does(p, old_size, new_size, align) {
        return p;
    }
    // SAFETY: as the caller promises.
    unsafe { move_to_new(p, old_size, new_size, align) }
}

/// Whether a block of a class of `old_size` bytes does for the new size.
#[inline(always)]
fn does(p: *mut u8, old_size: usize, new_size: usize, align: usize) -> bool {
    p.addr() & (align - 1) == 0
        && new_size <= old_size
        && (new_size * 2 > old_size || class_bytes(class_of(new_size)) * 2 > old_size)
}

/// Resizes a block whose code in the class map is no class.
///
/// # Safety
/// As for [`realloc`].
#[inline(never)]
unsafe fn resize_apart(code: u8, p: *mut u8, new_size: usize, align: usize) -> *mut u8 {
    if code == 0
        && let Some(arena) = explicit::of(p.addr())
    {
        // SAFETY: as the caller promises.
        return unsafe { extended::move_or_fit(p, new_size, align, arena) };
    }
    let old_size = block_bytes(code, p);
    if code == RECORDED && does(p, old_size, new_size, align) {
        prof::resized(HEAP.record_at(p), p, new_size, old_size);
        return p;
    }
    if code == LARGE && (new_size > CACHED_MAX || new_size < old_size) {
        if new_size > MOST_BYTES {
            return null_mut();
        }
        let aligned = p.addr() & (align - 1) == 0;
        // A small remainder moves to a slab, but the tail goes back as that of a large one.
        let resize = || HEAP.resize_large(p, new_size, align);
        if aligned && let Some(q) = prof::follow(&HEAP, p, new_size, resize) {
            process::pages_changed();
            if apart::is_set(apart::COUNTED) {
                apart::note(HEAP.large_bytes(q), old_size);
            }
            if new_size >= SLAB_MAX {
                return q;
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { move_to_new(p, old_size, new_size, align) }
}

/// Moves a block of `old_size` bytes to a new one.
///
/// # Safety
/// As for [`realloc`].
#[inline(always)]
unsafe fn move_to_new(p: *mut u8, old_size: usize, new_size: usize, align: usize) -> *mut u8 {
    let q = if align <= 16 { alloc(new_size) } else { alloc_aligned(new_size, align) };
    if !q.is_null() {
        // SAFETY: both blocks are live, distinct and at least that long.
        unsafe { core::ptr::copy_nonoverlapping(p, q, old_size.min(new_size)) };
        // SAFETY: the caller gave the old block up.
        unsafe { free(p) };
    } else if new_size <= old_size && p.addr() & (align - 1) == 0 {
        // No memory for a smaller block: this one does.
        return p;
    }
    q
}

/// The bytes of `p` that may be used, at least what was asked for; 0 for null.
///
/// # Safety
/// `p` is null or a live block.
#[must_use]
pub unsafe fn usable_size(p: *const u8) -> usize {
    if p.is_null() {
        return 0;
    }
    block_bytes(HEAP.pages.space.window.code_of(p.addr()), p.cast_mut())
}

fn block_bytes(code: u8, p: *mut u8) -> usize {
    match code {
        LARGE => HEAP.large_bytes(p),
        RECORDED => class_bytes(HEAP.recorded_class(p)),
        _ if (1..=CLASSES).contains(&usize::from(code)) => class_bytes(code),
        _ => match explicit::of(p.addr()) {
            Some(arena) => arena.usable_size(p),
            None => fatal("use of a pointer that is not a live block", p.addr()),
        },
    }
}

/// Gives all free memory back to the kernel, also what is hot. Returns how many bytes that were.
pub fn trim() -> usize {
    process::trim()
}
