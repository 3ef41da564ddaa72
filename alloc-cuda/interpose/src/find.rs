//! The real functions. `dlsym` itself is interposed, so the C library's is found by its version.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The C library's `dlsym`; null where it is not found.
pub(crate) fn c_library_dlsym() -> *mut c_void {
    let mut found = DLSYM.load(Ordering::Acquire);
    if found.is_null() {
        // It moved from libdl to libc in 2.34; the old version's name stays.
        for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
            // SAFETY: two C strings.
            found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            if !found.is_null() {
                break;
            }
        }
        DLSYM.store(found, Ordering::Release);
    }
    found
}

/// Calls the C library's `dlsym`.
pub(crate) fn next_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: null, or the C library's function of this name.
    let dlsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(c_library_dlsym()) };
    match dlsym {
        // SAFETY: the caller of `dlsym` keeps its conditions.
        Some(dlsym) => unsafe { dlsym(handle, name) },
        None => std::ptr::null_mut(),
    }
}

/// Real functions by name: from the driver, or as a program's `dlsym` found them.
static KNOWN: Mutex<Vec<(Vec<u8>, usize)>> = Mutex::new(Vec::new());

fn known() -> std::sync::MutexGuard<'static, Vec<(Vec<u8>, usize)>> {
    KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Notes that a library has `theirs` under this name, and returns ours.
pub(crate) fn remember(name: &[u8], theirs: *mut c_void, ours: *mut c_void) -> *mut c_void {
    if theirs != ours {
        let mut known = known();
        if known.iter().all(|(other, _)| other != name) {
            known.push((name.to_vec(), theirs.expose_provenance()));
        }
    }
    ours
}

/// The driver's function of this name (with a final NUL); null if there is none.
pub(crate) fn real(name: &str) -> *mut c_void {
    let Ok(c_name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
        return std::ptr::null_mut();
    };
    let bytes = c_name.to_bytes();
    let found = known().iter().find(|(other, _)| other == bytes).map(|&(_, at)| at);
    if let Some(at) = found {
        return std::ptr::with_exposed_provenance_mut(at);
    }
    let mut theirs = next_dlsym(libc::RTLD_NEXT, c_name.as_ptr());
    if theirs.is_null() {
        // The program loaded the driver privately.
        for file in [c"libcuda.so.1", c"libcuda.so"] {
            // SAFETY: a C string; it is never closed.
            let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY) };
            if !handle.is_null() {
                theirs = next_dlsym(handle, c_name.as_ptr());
                break;
            }
        }
    }
    if !theirs.is_null() {
        known().push((bytes.to_vec(), theirs.expose_provenance()));
    }
    theirs
}
