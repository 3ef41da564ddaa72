//! The profiler's scopes and dumps for C; the contract of each function is in the header.

use core::ffi::CStr;

use libc::{EBUSY, ENOTSUP, c_char, c_int, c_void};
use thermalloc_core::prof::{self, DumpError};

#[unsafe(no_mangle)]
unsafe extern "C" fn thermalloc_scope_push(name: *const c_char) -> u32 {
    if name.is_null() {
        return prof::push_raw(b"");
    }
    // SAFETY: the caller gives a C string.
    prof::push_raw(unsafe { CStr::from_ptr(name) }.to_bytes())
}

#[unsafe(no_mangle)]
extern "C" fn thermalloc_scope_pop(token: u32) {
    prof::attach_raw(token);
}

#[unsafe(no_mangle)]
extern "C" fn thermalloc_scope_capture() -> u32 {
    prof::capture_raw()
}

#[unsafe(no_mangle)]
extern "C" fn thermalloc_scope_attach(token: u32) -> u32 {
    prof::attach_raw(token)
}

#[unsafe(no_mangle)]
extern "C" fn thermalloc_scope_step(number: u64) {
    prof::step(number);
}

#[unsafe(no_mangle)]
extern "C" fn thermalloc_scope_mark(p: *mut c_void, token: u32) -> c_int {
    c_int::from(prof::mark_raw(p.cast(), token))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn thermalloc_prof_dump(path: *const c_char) -> c_int {
    let result = if path.is_null() {
        prof::dump_to_prefix()
    } else {
        // SAFETY: the caller gives a C string.
        prof::dump(unsafe { CStr::from_ptr(path) })
    };
    match result {
        Ok(()) => 0,
        Err(DumpError::Off) => ENOTSUP,
        Err(DumpError::Busy) => EBUSY,
        Err(DumpError::System(errno)) => errno,
    }
}
