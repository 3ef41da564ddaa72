//! libthermalloc_cuda_watch: preloaded, it sees every call for device, pool, pinned and managed memory
//! that a process makes, whoever makes it: by symbol, by `dlsym` or by `cuGetProcAddress`. It changes
//! nothing; it counts, by kind and by the library that called.
//!
//! Invariants: a call is passed on as it came, its result handed back as it is. Nothing here
//! allocates through the program's allocator while it holds the ledger's lock but the ledger itself,
//! and no call of the driver is made under it.
#![allow(clippy::missing_safety_doc, reason = "the driver's manual has the conditions")]
#![allow(clippy::cast_possible_truncation, reason = "usize has 64 bits where CUDA is")]

mod find;
mod host;
mod ledger;

use find::real;
use ledger::Kind;
use std::ffi::{CStr, c_char, c_int, c_void};

/// Defines functions of the driver that pass the call on and note what it did.
macro_rules! watched {
    ($($name:ident ($($arg:ident : $type:ty),*) $real:ident after |$caller:ident| $note:block)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the driver's name")]
            unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
                let found = real(concat!(stringify!($real), "\0"));
                if found.is_null() {
                    return NOT_FOUND;
                }
                let $caller = ledger::return_address();
                // SAFETY: the driver's function of this name has this signature.
                let call = unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(found)
                };
                // SAFETY: the caller keeps the function's conditions.
                let code = unsafe { call($($arg),*) };
                if code == 0 {
                    $note
                }
                code
            }
        )*

        /// The functions of ours by the driver's names for them.
        fn ours(name: &[u8]) -> Option<*mut c_void> {
            $(
                if name == stringify!($name).as_bytes() {
                    return Some($name as *mut c_void);
                }
            )*
            None
        }
    };
}

const NOT_FOUND: u32 = 500;

/// What a call wrote to the place that it was given.
unsafe fn written<T: Copy>(place: *const T) -> T {
    // SAFETY: the call succeeded, so it wrote there.
    unsafe { place.read_unaligned() }
}

watched! {
    cuMemAlloc_v2(ptr: *mut u64, bytes: usize) cuMemAlloc_v2 after |caller| {
        // SAFETY: the call succeeded.
        ledger::add(Kind::Device, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemAllocPitch_v2(ptr: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) cuMemAllocPitch_v2 after |caller| {
        // SAFETY: the call succeeded.
        let at = unsafe { written(ptr) };
        // SAFETY: as above.
        let row = unsafe { written(pitch) };
        let _ = (width, element);
        ledger::add(Kind::Device, at, row.saturating_mul(height), caller);
    }
    cuMemFree_v2(ptr: u64) cuMemFree_v2 after |caller| {
        let _ = caller;
        ledger::remove(&[Kind::Device, Kind::Managed, Kind::Pool], ptr);
    }
    cuMemAllocAsync(ptr: *mut u64, bytes: usize, stream: usize) cuMemAllocAsync after |caller| {
        let _ = stream;
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pool, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemAllocAsync_ptsz(ptr: *mut u64, bytes: usize, stream: usize) cuMemAllocAsync_ptsz after |caller| {
        let _ = stream;
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pool, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemAllocFromPoolAsync(ptr: *mut u64, bytes: usize, pool: usize, stream: usize) cuMemAllocFromPoolAsync after |caller| {
        let _ = (pool, stream);
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pool, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemAllocFromPoolAsync_ptsz(ptr: *mut u64, bytes: usize, pool: usize, stream: usize) cuMemAllocFromPoolAsync_ptsz after |caller| {
        let _ = (pool, stream);
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pool, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemFreeAsync(ptr: u64, stream: usize) cuMemFreeAsync after |caller| {
        let _ = (caller, stream);
        ledger::remove(&[Kind::Pool, Kind::Device], ptr);
    }
    cuMemFreeAsync_ptsz(ptr: u64, stream: usize) cuMemFreeAsync_ptsz after |caller| {
        let _ = (caller, stream);
        ledger::remove(&[Kind::Pool, Kind::Device], ptr);
    }
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const c_void, flags: u64) cuMemCreate after |caller| {
        let _ = (prop, flags);
        // SAFETY: the call succeeded.
        ledger::add(Kind::Physical, unsafe { written(handle) }, bytes, caller);
    }
    cuMemRelease(handle: u64) cuMemRelease after |caller| {
        let _ = caller;
        ledger::remove(&[Kind::Physical], handle);
    }
    cuMemAllocManaged(ptr: *mut u64, bytes: usize, flags: u32) cuMemAllocManaged after |caller| {
        let _ = flags;
        // SAFETY: the call succeeded.
        ledger::add(Kind::Managed, unsafe { written(ptr) }, bytes, caller);
    }
    cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: u32) cuMemHostAlloc after |caller| {
        let _ = flags;
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pinned, unsafe { written(ptr) }.addr() as u64, bytes, caller);
    }
    cuMemAllocHost_v2(ptr: *mut *mut c_void, bytes: usize) cuMemAllocHost_v2 after |caller| {
        // SAFETY: the call succeeded.
        ledger::add(Kind::Pinned, unsafe { written(ptr) }.addr() as u64, bytes, caller);
    }
    cuMemFreeHost(ptr: *mut c_void) cuMemFreeHost after |caller| {
        let _ = caller;
        ledger::remove(&[Kind::Pinned], ptr.addr() as u64);
    }
    cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: u32) cuMemHostRegister_v2 after |caller| {
        let _ = flags;
        ledger::add(Kind::Pinned, ptr.addr() as u64, bytes, caller);
    }
    cuMemHostUnregister(ptr: *mut c_void) cuMemHostUnregister after |caller| {
        let _ = caller;
        ledger::remove(&[Kind::Pinned], ptr.addr() as u64);
    }
}

/// Our function in place of one of the driver's, by the name that `cuGetProcAddress` is asked for:
/// without the suffix of a version.
fn ours_by_base_name(name: &[u8], per_thread: bool) -> Option<*mut c_void> {
    let with = |suffix: &str| {
        let mut full = name.to_vec();
        full.extend(suffix.as_bytes());
        ours(&full)
    };
    if per_thread && let Some(found) = with("_ptsz") {
        return Some(found);
    }
    ours(name).or_else(|| with("_v2"))
}

const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// Puts our function in the place of what the driver found.
unsafe fn replace(symbol: *const c_char, function: *mut *mut c_void, flags: u64) {
    if symbol.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the driver took it for a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    // SAFETY: the call succeeded, so it wrote there.
    let found = unsafe { *function };
    if found.is_null() {
        return;
    }
    let replaced = match name {
        b"cuGetProcAddress" => Some(cuGetProcAddress_v2 as *mut c_void),
        _ => ours_by_base_name(name, flags & PER_THREAD_DEFAULT_STREAM != 0),
    };
    if let Some(ours) = replaced {
        // SAFETY: as above.
        unsafe { *function = ours };
    }
}

/// `cuGetProcAddress` since CUDA 12.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the driver's name")]
unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> u32 {
    type Call =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> u32;
    let found = real("cuGetProcAddress_v2\0");
    if found.is_null() {
        return NOT_FOUND;
    }
    // SAFETY: the driver's function of this name.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(found) };
    // SAFETY: the caller keeps the conditions.
    let code = unsafe { call(symbol, function, version, flags, status) };
    if code == 0 {
        // SAFETY: the call succeeded.
        unsafe { replace(symbol, function, flags) };
    }
    code
}

/// `cuGetProcAddress` of CUDA 11.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the driver's name")]
unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> u32 {
    type Call = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> u32;
    let found = real("cuGetProcAddress\0");
    if found.is_null() {
        return NOT_FOUND;
    }
    // SAFETY: the driver's function of this name.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(found) };
    // SAFETY: the caller keeps the conditions.
    let code = unsafe { call(symbol, function, version, flags) };
    if code == 0 {
        // SAFETY: the call succeeded.
        unsafe { replace(symbol, function, flags) };
    }
    code
}

/// What `dlsym` does: returns `found`, or where `pass_on` is not null goes on there.
#[repr(C)]
struct Route {
    found: *mut c_void,
    pass_on: *mut c_void,
}

/// What a program looks up in the driver's library is ours where we have it.
unsafe extern "C" fn route(handle: *mut c_void, name: *const c_char) -> Route {
    let passed_on = Route { found: std::ptr::null_mut(), pass_on: find::c_library_dlsym() };
    if name.is_null() {
        return passed_on;
    }
    // SAFETY: the caller passes a C string.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    if !text.starts_with(b"cu") {
        return passed_on;
    }
    let special = match text {
        b"cuGetProcAddress_v2" => Some(cuGetProcAddress_v2 as *mut c_void),
        b"cuGetProcAddress" => Some(cuGetProcAddress as *mut c_void),
        _ => ours(text),
    };
    let Some(ours) = special else { return passed_on };
    // Only where the library that was asked has it.
    let theirs = find::next_dlsym(handle, name);
    let found = if theirs.is_null() { theirs } else { find::remember(text, theirs, ours) };
    Route { found, pass_on: std::ptr::null_mut() }
}

/// `dlsym`. It jumps to the C library's, which then sees who called: `RTLD_NEXT` means the libraries
/// after the caller's, another preloaded allocator's, say.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jnz 2f",
        "ret",
        "2:",
        "jmp rdx",
        route = sym route,
    )
}

/// The same.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {route}",
        "mov x16, x1",
        "cbnz x16, 2f",
        "ldp x29, x30, [sp], #32",
        "ret",
        "2:",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        route = sym route,
    )
}

/// Writes the ledger as text; how many bytes there are, of which at most `room` were written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_watch_report(out: *mut c_void, room: usize) -> usize {
    let text = ledger::report();
    if !out.is_null() {
        // SAFETY: the caller has that much room.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len().min(room));
        }
    }
    text.len()
}

/// Bytes in use of a kind: 0 device, 1 pool, 2 physical, 3 managed, 4 pinned.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_watch_bytes(kind: u32) -> u64 {
    ledger::bytes(kind as usize)
}
