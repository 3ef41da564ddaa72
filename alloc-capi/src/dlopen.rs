//! `dlopen` without `RTLD_DEEPBIND`.
//!
//! A library loaded with that flag binds `free` to libc's while libc's `getline` or `strdup` still
//! allocate from us (oneTBB loads hwloc so): the first such free aborts. The real `dlopen` is
//! reached by a jump, so it sees its caller's return address and finds the caller's RUNPATH.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{RTLD_DEEPBIND, c_char, c_int, c_void};
use thermalloc_core::control::options;
use thermalloc_core::prof;

use crate::weak::dlsym;

/// The next `dlopen` in the search order, null where there is no loader.
pub(crate) fn real() -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let known = REAL.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    let found = dlsym(libc::RTLD_NEXT, c"dlopen");
    REAL.store(found, Relaxed);
    found
}

/// Where to jump and with which mode: two words, so both come back in registers.
#[repr(C)]
struct Target {
    real: *mut c_void,
    mode: usize,
}

extern "C" fn target(mode: c_int) -> Target {
    prof::modules_changed();
    let drop = if options::strip_deepbind() { RTLD_DEEPBIND } else { 0 };
    Target { real: real(), mode: (mode & !drop) as u32 as usize }
}

#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "push rdi",
        ".cfi_def_cfa_offset 16",
        "mov edi, esi",
        "call {target}",
        "pop rdi",
        ".cfi_def_cfa_offset 8",
        "mov esi, edx",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2:",
        "ret",
        ".cfi_endproc",
        target = sym target,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        ".cfi_offset x29, -32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        "str x0, [sp, #16]",
        "mov w0, w1",
        "bl {target}",
        "mov x16, x0",
        "ldr x0, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "cbz x16, 2f",
        "br x16",
        "2:",
        "mov x0, #0",
        "ret",
        ".cfi_endproc",
        target = sym target,
    );
}
