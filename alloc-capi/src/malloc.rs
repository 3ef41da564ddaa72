//! malloc's family, as glibc has it: same results for zero sizes, same error codes.
//!
//! The contract of each function is its manual page; "our block" in a SAFETY comment means that
//! the caller owes us a live block that this library returned (or null, where that is checked).
//! Sizes above `PTRDIFF_MAX` are the core's to refuse.

use core::ptr::null_mut;

use libc::{EINVAL, ENOMEM, c_int, c_void};
use thermalloc_core::api;
use thermalloc_core::embed::{self, ZeroRealloc, fast_alloc};

use crate::hooks::{fatal, page_size, set_errno};

/// Every block has this alignment: `alignof(max_align_t)`.
pub(crate) const MALLOC_ALIGN: usize = 16;

#[cold]
#[inline(never)]
extern "C" fn failed(errno: c_int) -> *mut c_void {
    if errno == ENOMEM {
        thermalloc_core::prof::failed();
    }
    set_errno(errno);
    null_mut()
}

/// The C result of a core allocation: null sets `errno`, in a tail call off the hot path.
#[inline(always)]
fn or_enomem(p: *mut u8) -> *mut c_void {
    if p.is_null() {
        return failed(ENOMEM);
    }
    p.cast()
}

#[inline(always)]
fn aligned(size: usize, align: usize) -> *mut c_void {
    or_enomem(api::alloc_aligned(size, align))
}

#[inline(always)]
fn zeroed(count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        Some(bytes) => or_enomem(api::alloc_zeroed(bytes)),
        None => failed(ENOMEM),
    }
}

/// # Safety
/// `p` is null or our block.
#[inline(always)]
unsafe fn resize(p: *mut c_void, size: usize) -> *mut c_void {
    if p.is_null() {
        return or_enomem(api::alloc(size));
    }
    if size == 0 {
        // SAFETY: our block.
        return unsafe { resize_to_nothing(p) };
    }
    // SAFETY: our block.
    or_enomem(unsafe { api::realloc(p.cast(), size) })
}

/// glibc frees the block; the option `zero_realloc` may ask for another thing.
///
/// # Safety
/// `p` is our block.
#[cold]
#[inline(never)]
unsafe fn resize_to_nothing(p: *mut c_void) -> *mut c_void {
    match embed::zero_realloc() {
        ZeroRealloc::Free => {
            // SAFETY: our block.
            unsafe { api::free(p.cast()) };
            null_mut()
        }
        // SAFETY: our block.
        ZeroRealloc::Allocate => or_enomem(unsafe { api::realloc(p.cast(), 1) }),
        ZeroRealloc::Abort => fatal("realloc of a block to 0 bytes, and zero_realloc:abort is set"),
    }
}

/// glibc rounds a wrong alignment up.
fn round_up_aligned(align: usize, size: usize) -> *mut c_void {
    match align.checked_next_power_of_two() {
        Some(align) => aligned(size, align),
        None => failed(EINVAL),
    }
}

fn whole_pages(size: usize) -> *mut c_void {
    match size.max(1).checked_next_multiple_of(page_size()) {
        Some(bytes) => aligned(bytes, page_size()),
        None => failed(ENOMEM),
    }
}

#[inline(always)]
fn allocate_aligned(out: &mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return EINVAL;
    }
    let p = api::alloc_aligned(size, align);
    if p.is_null() {
        return ENOMEM;
    }
    *out = p.cast();
    0
}

fast_alloc! {
    #[unsafe(no_mangle)]
    pub(crate) fn malloc(malloc_large, malloc_slow) -> *mut c_void
}

#[inline(never)]
extern "C" fn malloc_large(size: usize) -> *mut c_void {
    or_enomem(api::alloc(size))
}

#[cold]
#[inline(never)]
extern "C" fn malloc_slow(size: usize, class: usize) -> *mut c_void {
    let p = api::alloc_own(class);
    if p.is_null() { malloc_shared(size) } else { p.cast() }
}

#[cold]
#[inline(never)]
extern "C" fn malloc_shared(size: usize) -> *mut c_void {
    or_enomem(api::alloc_shared(size))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free(p: *mut c_void) {
    // SAFETY: null or our block.
    unsafe { api::free(p.cast()) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    zeroed(count, size)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn realloc(p: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: null or our block.
    unsafe { resize(p, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(p: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: null or our block.
        Some(bytes) => unsafe { resize(p, bytes) },
        None => failed(ENOMEM),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    align: usize,
    size: usize,
) -> c_int {
    // SAFETY: the caller gives a place for the result.
    allocate_aligned(unsafe { &mut *out }, align, size)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        return failed(EINVAL);
    }
    aligned(size, align)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    round_up_aligned(align, size)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn valloc(size: usize) -> *mut c_void {
    aligned(size, page_size())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn pvalloc(size: usize) -> *mut c_void {
    whole_pages(size)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cfree(p: *mut c_void) {
    // SAFETY: null or our block.
    unsafe { api::free(p.cast()) }
}

/// C23.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free_sized(p: *mut c_void, size: usize) {
    // SAFETY: null or our block of this size.
    unsafe { release_sized(p.cast(), size, MALLOC_ALIGN) }
}

/// C23.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free_aligned_sized(p: *mut c_void, align: usize, size: usize) {
    // SAFETY: null or our block of this size and alignment.
    unsafe { release_sized(p.cast(), size, align) }
}

/// The sized free of C and C++.
///
/// # Safety
/// `p` is null or our block, allocated with this size and alignment.
#[inline(always)]
pub(crate) unsafe fn release_sized(p: *mut u8, size: usize, align: usize) {
    // SAFETY: as the caller's; null is let be.
    unsafe { api::free_sized(p, size, align) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_usable_size(p: *mut c_void) -> usize {
    if p.is_null() {
        return 0;
    }
    // SAFETY: our block.
    unsafe { api::usable_size(p.cast()) }
}

/// The padding that glibc keeps at the top of its heap has no counterpart here.
#[unsafe(no_mangle)]
extern "C" fn malloc_trim(_pad: usize) -> c_int {
    c_int::from(api::trim() > 0)
}

/// glibc's parameters are accepted and change nothing: the option table has ours.
#[unsafe(no_mangle)]
extern "C" fn mallopt(param: c_int, _value: c_int) -> c_int {
    // M_MXFAST, M_NLBLKS, M_GRAIN, M_KEEP; M_TRIM_THRESHOLD down to M_ARENA_MAX.
    c_int::from(matches!(param, 1..=4 | -8..=-1))
}

// Old names of glibc's own functions: programs reach them to bypass a wrapper of their own, and
// free what they get by either name.

#[unsafe(no_mangle)]
extern "C" fn __libc_malloc(size: usize) -> *mut c_void {
    malloc(size)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __libc_free(p: *mut c_void) {
    // SAFETY: null or our block.
    unsafe { api::free(p.cast()) }
}

#[unsafe(no_mangle)]
extern "C" fn __libc_calloc(count: usize, size: usize) -> *mut c_void {
    zeroed(count, size)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __libc_realloc(p: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: null or our block.
    unsafe { resize(p, size) }
}

#[unsafe(no_mangle)]
extern "C" fn __libc_memalign(align: usize, size: usize) -> *mut c_void {
    round_up_aligned(align, size)
}

#[unsafe(no_mangle)]
extern "C" fn __libc_valloc(size: usize) -> *mut c_void {
    aligned(size, page_size())
}

#[unsafe(no_mangle)]
extern "C" fn __libc_pvalloc(size: usize) -> *mut c_void {
    whole_pages(size)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    // SAFETY: the caller gives a place for the result.
    allocate_aligned(unsafe { &mut *out }, align, size)
}
