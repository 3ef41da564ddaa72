//! jemalloc's non-standard API (`mallocx` and so on), and its whole allocation API once more under two
//! prefixes: `je_`, that of bundled builds, and `jemalloc_`, that of TensorFlow's.
//!
//! One library has all names. A second one for the prefixed names would be a second allocator in the
//! process, with caches and a ledger of its own, unless it called the first, and then it adds nothing. Who
//! has a real jemalloc with these names in a program keeps it, since a program's own names come first; a
//! library that was built against prefixed names gets all of them from here, and so never a mixture.

use libc::{c_int, c_void};
use thermalloc_core::api;
use thermalloc_core::extended::{self, Cache, Request};

use crate::malloc::release_sized;

const ZERO: c_int = 0x40;

/// The particulars that `MALLOCX_` flags ask for: six bits of alignment, one for zeroing, twelve for the
/// cache (0 automatic, 1 none, else an id and 2), twelve for the arena (0 automatic, else its index and
/// 1).
fn request(flags: c_int) -> Request {
    let bits = flags.cast_unsigned();
    Request {
        align: align(flags),
        zero: flags & ZERO != 0,
        cache: match bits >> 8 & 0xfff {
            0 => Cache::Automatic,
            1 => Cache::Bypass,
            id => Cache::Explicit(id - 2),
        },
        arena: (bits >> 20).checked_sub(1),
    }
}

#[inline(always)]
fn align(flags: c_int) -> usize {
    1 << (flags & 63)
}

/// Flags that a request without particulars may have: its alignment and [`ZERO`].
#[inline(always)]
fn is_plain(flags: c_int) -> bool {
    flags & !0x7f == 0
}

#[inline(always)]
fn mallocx(size: usize, flags: c_int) -> *mut c_void {
    if flags == 0 {
        return api::alloc(size).cast();
    }
    extended::alloc(size, &request(flags)).cast()
}

/// # Safety
/// `p` is our block.
#[inline(always)]
unsafe fn rallocx(p: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { extended::realloc(p.cast(), size, &request(flags)) }.cast()
}

/// # Safety
/// `p` is our block.
#[inline(always)]
unsafe fn xallocx(p: *mut c_void, size: usize, extra: usize, flags: c_int) -> usize {
    // SAFETY: as the caller promises.
    unsafe { extended::resize_in_place(p.cast(), size, extra, &request(flags)) }
}

/// # Safety
/// `p` is null or our block.
#[inline(always)]
unsafe fn dallocx(p: *mut c_void, flags: c_int) {
    if is_plain(flags) || p.is_null() {
        // SAFETY: as the caller promises.
        return unsafe { api::free(p.cast()) };
    }
    // SAFETY: as the caller promises.
    unsafe { extended::free(p.cast(), &request(flags)) }
}

/// # Safety
/// `p` is null or our block of this size and alignment.
#[inline(always)]
unsafe fn sdallocx(p: *mut c_void, size: usize, flags: c_int) {
    if is_plain(flags) {
        // SAFETY: as the caller promises.
        return unsafe { release_sized(p.cast(), size, align(flags)) };
    }
    // SAFETY: as the caller promises.
    unsafe { dallocx(p, flags) }
}

/// # Safety
/// `p` is null or our block.
#[inline(always)]
unsafe fn sallocx(p: *const c_void) -> usize {
    // SAFETY: as the caller promises.
    unsafe { api::usable_size(p.cast()) }
}

#[inline(always)]
fn nallocx(size: usize, flags: c_int) -> usize {
    extended::good_size(size, align(flags)).unwrap_or(0)
}

/// Exports `function` of `$from` as `$prefix` and its name.
macro_rules! export {
    ($prefix:literal, $from:path:
     $($name:ident($($arg:ident: $ty:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[unsafe(export_name = concat!($prefix, stringify!($name)))]
            unsafe extern "C" fn $name($($arg: $ty),*) $(-> $result)? {
                use $from as from;
                // SAFETY: the caller keeps to the function's manual page.
                #[allow(unused_unsafe, reason = "some are safe")]
                unsafe { from::$name($($arg),*) }
            }
        )*
    };
}

/// The non-standard API under a prefix.
macro_rules! extended {
    ($module:ident, $prefix:literal) => {
        mod $module {
            use libc::{c_int, c_void};

            export! { $prefix, super:
                mallocx(size: usize, flags: c_int) -> *mut c_void;
                rallocx(p: *mut c_void, size: usize, flags: c_int) -> *mut c_void;
                xallocx(p: *mut c_void, size: usize, extra: usize, flags: c_int) -> usize;
                dallocx(p: *mut c_void, flags: c_int);
                sdallocx(p: *mut c_void, size: usize, flags: c_int);
                nallocx(size: usize, flags: c_int) -> usize;
            }

            #[unsafe(export_name = concat!($prefix, "sallocx"))]
            unsafe extern "C" fn sallocx(p: *const c_void, _flags: c_int) -> usize {
                // SAFETY: null or our block.
                unsafe { super::sallocx(p) }
            }
        }
    };
}

/// The standard API under a prefix.
macro_rules! standard {
    ($module:ident, $prefix:literal) => {
        mod $module {
            use libc::{c_int, c_void};

            export! { $prefix, crate::malloc:
                malloc(size: usize) -> *mut c_void;
                calloc(count: usize, size: usize) -> *mut c_void;
                realloc(p: *mut c_void, size: usize) -> *mut c_void;
                free(p: *mut c_void);
                posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int;
                aligned_alloc(align: usize, size: usize) -> *mut c_void;
                memalign(align: usize, size: usize) -> *mut c_void;
                valloc(size: usize) -> *mut c_void;
                pvalloc(size: usize) -> *mut c_void;
                malloc_usable_size(p: *mut c_void) -> usize;
                free_sized(p: *mut c_void, size: usize);
                free_aligned_sized(p: *mut c_void, align: usize, size: usize);
            }
        }
    };
}

extended!(plain, "");
extended!(je, "je_");
extended!(jemalloc, "jemalloc_");
standard!(je_standard, "je_");
standard!(jemalloc_standard, "jemalloc_");
