//! libthermalloc_threads: preloaded beside libthermalloc, it hands the profiler's scope on to the threads
//! that are created within it, by standing before `pthread_create`.
//!
//! A library of its own and not a part of libthermalloc, since not every program wants it: a pool of threads
//! that happens to be made within a scope works for others later on. And in a static program, where
//! libthermalloc.a would stand before it too, nobody could reach the C library's `pthread_create` behind it.
//! C11's `thrd_create` calls the C library's own, and hands nothing on.
//!
//! Invariant: outside of a scope, and where libthermalloc isn't, the call is passed on as it came.

use std::arch::naked_asm;
use std::ffi::CStr;
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{c_int, c_void, pthread_attr_t, pthread_t};

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create =
    unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, Routine, *mut c_void) -> c_int;

/// What a thread begins with.
#[repr(C)]
struct Start {
    routine: Routine,
    argument: *mut c_void,
    scope: u32,
}

/// A function of another library, looked up once.
struct Symbol {
    handle: *mut c_void,
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}
// SAFETY: the handle is a pseudo-handle, a number.
unsafe impl Sync for Symbol {}

impl Symbol {
    const fn new(handle: *mut c_void, name: &'static CStr) -> Self {
        Self { handle, name, found: AtomicPtr::new(null_mut()) }
    }

    /// Null where there is none.
    fn address(&self) -> *mut c_void {
        let known = self.found.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a pseudo-handle and a C string.
        let found = unsafe { libc::dlsym(self.handle, self.name.as_ptr()) };
        self.found.store(found, Relaxed);
        found
    }
}

static CREATE: Symbol = Symbol::new(libc::RTLD_NEXT, c"pthread_create");
static CAPTURE: Symbol = Symbol::new(libc::RTLD_DEFAULT, c"thermalloc_scope_capture");
static ATTACH: Symbol = Symbol::new(libc::RTLD_DEFAULT, c"thermalloc_scope_attach");

/// The scope that the calling thread is in; 0: none.
fn scope() -> u32 {
    let address = CAPTURE.address();
    if address.is_null() || ATTACH.address().is_null() {
        return 0;
    }
    // SAFETY: libthermalloc's function of this name has this type.
    let capture = unsafe { transmute::<*mut c_void, extern "C" fn() -> u32>(address) };
    capture()
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    let address = CREATE.address();
    if address.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of this name has this type.
    let create = unsafe { transmute::<*mut c_void, Create>(address) };
    let scope = scope();
    let start: *mut Start = if scope == 0 {
        null_mut()
    } else {
        // SAFETY: no conditions.
        unsafe { libc::malloc(size_of::<Start>()) }.cast()
    };
    if start.is_null() {
        // SAFETY: as the caller promises.
        return unsafe { create(thread, attributes, routine, argument) };
    }
    // SAFETY: a new block of that size.
    unsafe { start.write(Start { routine, argument, scope }) };
    // SAFETY: as the caller promises; the thread frees the block.
    let result = unsafe { create(thread, attributes, entry, start.cast()) };
    if result != 0 {
        // SAFETY: no thread has it.
        unsafe { libc::free(start.cast()) };
    }
    result
}

/// Two words, so that both come back in registers.
#[repr(C)]
struct Call {
    routine: Routine,
    argument: *mut c_void,
}

/// Enters the scope, in the new thread.
///
/// # Safety
/// `start` was made for this thread, which owns it.
unsafe extern "C" fn begin(start: *mut Start) -> Call {
    // SAFETY: as the caller promises.
    let Start { routine, argument, scope } = unsafe { start.read() };
    // SAFETY: nobody uses it any more.
    unsafe { libc::free(start.cast()) };
    // SAFETY: libthermalloc's function of this name has this type; it was there when the scope was captured.
    let attach = unsafe { transmute::<*mut c_void, extern "C" fn(u32) -> u32>(ATTACH.address()) };
    attach(scope);
    Call { routine, argument }
}

/// What the thread begins with: goes on to its routine by a jump, so that no stack has a frame of ours.
#[unsafe(naked)]
extern "C" fn entry(start: *mut c_void) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        "call {begin}",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "mov rdi, rdx",
        "jmp rax",
        ".cfi_endproc",
        begin = sym begin,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        "bl {begin}",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "mov x16, x0",
        "mov x0, x1",
        "br x16",
        ".cfi_endproc",
        begin = sym begin,
    );
}
