//! C++'s operators new and delete, every form, by their mangled names (Itanium ABI, 64-bit
//! `size_t`).
//!
//! A throwing form ends in a tail call of [`new_failed`]: no frame of this crate lies between the
//! exception and operator new's caller, and a frame-pointer walk from below meets that caller.

use thermalloc_core::api;
use thermalloc_core::embed::fast_alloc;

use crate::malloc::{MALLOC_ALIGN, release_sized};
use crate::new_failed::{aligned, new_failed, new_failed_nothrow};

/// `std::nothrow_t const &`.
type NoThrow = *const u8;

/// What the fast path did not do. A function of its own, so that the operators are leaves.
#[cold]
#[inline(never)]
extern "C" fn new_slow(size: usize, class: usize) -> *mut u8 {
    let p = api::alloc_own(class);
    if p.is_null() { new_shared(size) } else { p }
}

#[cold]
#[inline(never)]
extern "C" fn new_shared(size: usize) -> *mut u8 {
    let p = api::alloc_shared(size);
    if p.is_null() { new_failed(size, MALLOC_ALIGN) } else { p }
}

#[inline(never)]
extern "C" fn new_large(size: usize) -> *mut u8 {
    let p = api::alloc(size);
    if p.is_null() { new_failed(size, MALLOC_ALIGN) } else { p }
}

macro_rules! operators_new {
    ($new:ident $new_symbol:literal, $nothrow:ident $nothrow_symbol:literal,
     $aligned:ident $aligned_symbol:literal, $aligned_nothrow:ident $aligned_nothrow_symbol:literal) => {
        fast_alloc! {
            #[unsafe(export_name = $new_symbol)]
            fn $new(new_large, new_slow) -> *mut u8
        }

        #[unsafe(export_name = $nothrow_symbol)]
        extern "C" fn $nothrow(size: usize, _: NoThrow) -> *mut u8 {
            let p = api::alloc(size);
            if p.is_null() {
                return new_failed_nothrow(size, MALLOC_ALIGN);
            }
            p
        }

        #[unsafe(export_name = $aligned_symbol)]
        extern "C" fn $aligned(size: usize, align: usize) -> *mut u8 {
            let p = aligned(size, align);
            if p.is_null() {
                return new_failed(size, align);
            }
            p
        }

        #[unsafe(export_name = $aligned_nothrow_symbol)]
        extern "C" fn $aligned_nothrow(size: usize, align: usize, _: NoThrow) -> *mut u8 {
            let p = aligned(size, align);
            if p.is_null() {
                return new_failed_nothrow(size, align);
            }
            p
        }
    };
}

macro_rules! operators_delete {
    ($delete:ident $delete_symbol:literal, $nothrow:ident $nothrow_symbol:literal,
     $sized:ident $sized_symbol:literal, $aligned:ident $aligned_symbol:literal,
     $aligned_nothrow:ident $aligned_nothrow_symbol:literal, $sized_aligned:ident $sized_aligned_symbol:literal) => {
        #[unsafe(export_name = $delete_symbol)]
        unsafe extern "C" fn $delete(p: *mut u8) {
            // SAFETY: null or our block.
            unsafe { api::free(p) }
        }

        #[unsafe(export_name = $nothrow_symbol)]
        unsafe extern "C" fn $nothrow(p: *mut u8, _: NoThrow) {
            // SAFETY: null or our block.
            unsafe { api::free(p) }
        }

        #[unsafe(export_name = $sized_symbol)]
        unsafe extern "C" fn $sized(p: *mut u8, size: usize) {
            // SAFETY: null or our block of this size.
            unsafe { release_sized(p, size, MALLOC_ALIGN) }
        }

        #[unsafe(export_name = $aligned_symbol)]
        unsafe extern "C" fn $aligned(p: *mut u8, _align: usize) {
            // SAFETY: null or our block.
            unsafe { api::free(p) }
        }

        #[unsafe(export_name = $aligned_nothrow_symbol)]
        unsafe extern "C" fn $aligned_nothrow(p: *mut u8, _align: usize, _: NoThrow) {
            // SAFETY: null or our block.
            unsafe { api::free(p) }
        }

        #[unsafe(export_name = $sized_aligned_symbol)]
        unsafe extern "C" fn $sized_aligned(p: *mut u8, size: usize, align: usize) {
            // SAFETY: null or our block of this size and alignment.
            unsafe { release_sized(p, size, align) }
        }
    };
}

operators_new!(
    new "_Znwm", new_nothrow "_ZnwmRKSt9nothrow_t",
    new_aligned "_ZnwmSt11align_val_t", new_aligned_nothrow "_ZnwmSt11align_val_tRKSt9nothrow_t"
);
operators_new!(
    new_array "_Znam", new_array_nothrow "_ZnamRKSt9nothrow_t",
    new_array_aligned "_ZnamSt11align_val_t", new_array_aligned_nothrow "_ZnamSt11align_val_tRKSt9nothrow_t"
);
operators_delete!(
    delete "_ZdlPv", delete_nothrow "_ZdlPvRKSt9nothrow_t", delete_sized "_ZdlPvm",
    delete_aligned "_ZdlPvSt11align_val_t", delete_aligned_nothrow "_ZdlPvSt11align_val_tRKSt9nothrow_t",
    delete_sized_aligned "_ZdlPvmSt11align_val_t"
);
operators_delete!(
    delete_array "_ZdaPv", delete_array_nothrow "_ZdaPvRKSt9nothrow_t", delete_array_sized "_ZdaPvm",
    delete_array_aligned "_ZdaPvSt11align_val_t", delete_array_aligned_nothrow "_ZdaPvSt11align_val_tRKSt9nothrow_t",
    delete_array_sized_aligned "_ZdaPvmSt11align_val_t"
);
