//! What operator new does when memory is out ([new.delete.single]): call the new_handler again and
//! again, and throw `std::bad_alloc`, or return null, when there is none.
//!
//! Code that an exception passes through is assembly here, because it must not pass through Rust:
//! it needs unwind tables and no more. The C++ runtime is looked up when it is needed.

use core::arch::naked_asm;
use core::mem::transmute;

use libc::{c_int, c_void};
use thermalloc_core::api;

use crate::hooks::fatal;
use crate::weak::cxx_runtime;

type Handler = unsafe extern "C" fn();

/// An aligned operator new's request: a wrong alignment fails.
#[inline(always)]
pub(crate) extern "C" fn aligned(size: usize, align: usize) -> *mut u8 {
    if align.is_power_of_two() { api::alloc_aligned(size, align) } else { core::ptr::null_mut() }
}

/// `std::get_new_handler()`; none without a C++ runtime.
#[cold]
extern "C" fn current_handler() -> Option<Handler> {
    let get = cxx_runtime!("_ZSt15get_new_handlerv");
    if get.is_null() {
        return None;
    }
    // SAFETY: the symbol of this name has this type.
    let get = unsafe { transmute::<*mut c_void, unsafe extern "C" fn() -> Option<Handler>>(get) };
    // SAFETY: it may be called at any time and does not throw.
    unsafe { get() }
}

/// `std::__throw_bad_alloc`, which both C++ runtimes export.
#[cold]
extern "C" fn thrower() -> *mut c_void {
    let throw = cxx_runtime!("_ZSt17__throw_bad_allocv");
    if throw.is_null() {
        fatal(
            "operator new: out of memory and no C++ runtime to throw bad_alloc: link or preload libstdc++.so.6",
        );
    }
    throw
}

/// Retries until a block comes back; throws what the handler throws, or `std::bad_alloc`.
#[cold]
#[unsafe(naked)]
pub(crate) extern "C" fn new_failed(size: usize, align: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "push rbx",
        ".cfi_offset rbx, -24",
        "push r12",
        ".cfi_offset r12, -32",
        "mov rbx, rdi",
        "mov r12, rsi",
        "2:",
        "call {current_handler}",
        "test rax, rax",
        "jnz 3f",
        "call {thrower}",
        "call rax",
        "ud2",
        "3:",
        "call rax",
        "mov rdi, rbx",
        "mov rsi, r12",
        "call {retry}",
        "test rax, rax",
        "jz 2b",
        "pop r12",
        "pop rbx",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
        current_handler = sym current_handler,
        thrower = sym thrower,
        retry = sym aligned,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        ".cfi_offset x29, -32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        "stp x19, x20, [sp, #16]",
        ".cfi_offset x19, -16",
        ".cfi_offset x20, -8",
        "mov x19, x0",
        "mov x20, x1",
        "2:",
        "bl {current_handler}",
        "cbnz x0, 3f",
        "bl {thrower}",
        "blr x0",
        "brk #1",
        "3:",
        "blr x0",
        "mov x0, x19",
        "mov x1, x20",
        "bl {retry}",
        "cbz x0, 2b",
        "ldp x19, x20, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_def_cfa_offset 0",
        "ret",
        ".cfi_endproc",
        current_handler = sym current_handler,
        thrower = sym thrower,
        retry = sym aligned,
    );
}

/// The same for the nothrow forms: null also when the handler throws.
#[cold]
#[inline(never)]
pub(crate) extern "C" fn new_failed_nothrow(size: usize, align: usize) -> *mut u8 {
    loop {
        let Some(handler) = current_handler() else {
            return core::ptr::null_mut();
        };
        if call_catching(handler) == 0 {
            return core::ptr::null_mut();
        }
        let p = aligned(size, align);
        if !p.is_null() {
            return p;
        }
    }
}

/// Calls the handler: 1 when it returned, 0 when it threw.
#[unsafe(naked)]
extern "C" fn call_catching(handler: Handler) -> c_int {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        ".cfi_personality 0x1b, {personality}",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "call rdi",
        "mov eax, 1",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
        personality = sym personality,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        ".cfi_personality 0x1b, {personality}",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        "blr x0",
        "mov w0, #1",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        "ret",
        ".cfi_endproc",
        personality = sym personality,
    );
}

/// Where the unwinder resumes [`call_catching`] after an exception: same frame, the exception
/// object in the first return register.
#[unsafe(naked)]
extern "C" fn landing_pad() {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        ".cfi_def_cfa rbp, 16",
        ".cfi_offset rbp, -16",
        "mov rdi, rax",
        "call {swallow}",
        "xor eax, eax",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
        swallow = sym swallow,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "bl {swallow}",
        "mov w0, #0",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        "ret",
        ".cfi_endproc",
        swallow = sym swallow,
    );
}

/// Ends the exception as an empty `catch (...)` does.
extern "C" fn swallow(exception: *mut c_void) {
    type Catch = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    let begin = cxx_runtime!("__cxa_begin_catch");
    let end = cxx_runtime!("__cxa_end_catch");
    if begin.is_null() || end.is_null() {
        fatal(
            "operator new: the new_handler threw and no C++ runtime is there to catch: link or preload libstdc++.so.6",
        );
    }
    // SAFETY: the symbol of this name has this type.
    let begin = unsafe { transmute::<*mut c_void, Catch>(begin) };
    // SAFETY: the symbol of this name has this type.
    let end = unsafe { transmute::<*mut c_void, unsafe extern "C" fn()>(end) };
    // SAFETY: the unwinder handed us this exception, once.
    unsafe { begin(exception) };
    // SAFETY: pairs with the call before.
    unsafe { end() };
}

const UA_SEARCH_PHASE: c_int = 1;
const UA_HANDLER_FRAME: c_int = 4;
const UA_FORCE_UNWIND: c_int = 8;
const URC_HANDLER_FOUND: c_int = 6;
const URC_INSTALL_CONTEXT: c_int = 7;
const URC_CONTINUE_UNWIND: c_int = 8;

/// The personality of [`call_catching`]: catches every exception, but not a thread's cancellation.
/// The runtime's own would need a reference that is bound when this library is loaded.
extern "C" fn personality(
    _version: c_int,
    actions: c_int,
    _class: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    if actions & UA_FORCE_UNWIND != 0 {
        return URC_CONTINUE_UNWIND;
    }
    let set_gr = cxx_runtime!("_Unwind_SetGR");
    let set_ip = cxx_runtime!("_Unwind_SetIP");
    if set_gr.is_null() || set_ip.is_null() {
        return URC_CONTINUE_UNWIND;
    }
    if actions & UA_SEARCH_PHASE != 0 {
        return URC_HANDLER_FOUND;
    }
    if actions & UA_HANDLER_FRAME == 0 {
        return URC_CONTINUE_UNWIND;
    }
    // SAFETY: the symbol of this name has this type.
    let set_gr = unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, c_int, usize)>(set_gr)
    };
    // SAFETY: the symbol of this name has this type.
    let set_ip =
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, usize)>(set_ip) };
    // SAFETY: the context is the unwinder's for our frame; register 0 carries the exception on both architectures.
    unsafe { set_gr(context, 0, exception.addr()) };
    // SAFETY: the landing pad continues exactly this frame.
    unsafe { set_ip(context, landing_pad as *const () as usize) };
    URC_INSTALL_CONTEXT
}
