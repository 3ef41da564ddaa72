//! Symbols that may be absent: of the C++ runtime (never a dependency of this library, and perhaps
//! loaded later or with `RTLD_LOCAL`) and of the loader (a static program has none).

use core::ffi::CStr;
use core::ptr::null_mut;

use libc::{c_char, c_int, c_void};

/// The address of a weakly referenced symbol, null where no library in scope at start-up has it.
macro_rules! weak {
    ($name:literal) => {{
        let address: *mut libc::c_void;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads our own global offset table.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {0}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) address,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: reads our own global offset table.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("adrp {0}, :got:", $name),
                concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"),
                out(reg) address,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        address
    }};
}
pub(crate) use weak;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// `dlsym(3)`, null without a loader. It allocates where it finds nothing: cold paths only.
pub(crate) fn dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let loader = weak!("dlsym");
    if loader.is_null() {
        return null_mut();
    }
    // SAFETY: the symbol of this name has this type.
    let loader = unsafe { core::mem::transmute::<*mut c_void, Dlsym>(loader) };
    // SAFETY: the handle is a pseudo-handle or came from dlopen.
    unsafe { loader(handle, name.as_ptr()) }
}

/// A function of the C++ runtime by name: in the global scope, or in a runtime that some library
/// brought in with `RTLD_LOCAL`.
#[cold]
pub(crate) fn find_in_cxx_runtime(name: &CStr) -> *mut c_void {
    let found = dlsym(libc::RTLD_DEFAULT, name);
    if !found.is_null() {
        return found;
    }
    let dlopen = crate::dlopen::real();
    if dlopen.is_null() {
        return null_mut();
    }
    // SAFETY: the symbol of this name has this type.
    let dlopen = unsafe { core::mem::transmute::<*mut c_void, Dlopen>(dlopen) };
    for runtime in [c"libstdc++.so.6", c"libc++abi.so.1", c"libc++.so.1"] {
        // SAFETY: RTLD_NOLOAD runs no code of the library. The handle stays: the runtime must not go away.
        let handle = unsafe { dlopen(runtime.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            continue;
        }
        let found = dlsym(handle, name);
        if !found.is_null() {
            return found;
        }
    }
    null_mut()
}

/// A function of the C++ runtime: by weak reference, else by search.
macro_rules! cxx_runtime {
    ($name:literal) => {{
        let address = $crate::weak::weak!($name);
        if !address.is_null() {
            address
        } else {
            // The name is a literal without a zero byte.
            const NAME: &core::ffi::CStr =
                match core::ffi::CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("symbol name"),
                };
            $crate::weak::find_in_cxx_runtime(NAME)
        }
    }};
}
pub(crate) use cxx_runtime;
