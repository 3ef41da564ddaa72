//! jemalloc's control by name, its report, and the variables that a program may define for it; each
//! plain and with the prefixes `je_` and `jemalloc_`.
//!
//! The contract is jemalloc's manual page; "the caller's" in a SAFETY comment is what it asks of them.

use core::ffi::CStr;
use core::ptr::null;

use libc::{EINVAL, c_char, c_int, c_void};
use thermalloc_core::control::mallctl::{self, Io};
use thermalloc_core::control::places::Message;
use thermalloc_core::control::stats_print;

fn code(result: Result<(), mallctl::Error>) -> c_int {
    result.map_or_else(mallctl::Error::code, |()| 0)
}

fn io(old: *mut c_void, old_len: *mut usize, new: *mut c_void, new_len: usize) -> Io {
    Io { old: old.cast(), old_len, new: new.cast(), new_len }
}

/// The bytes of a C string that may be null.
///
/// # Safety
/// It stays for `'a`.
unsafe fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: not null, so a C string, says the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mallctl(
    name: *const c_char,
    old: *mut c_void,
    old_len: *mut usize,
    new: *mut c_void,
    new_len: usize,
) -> c_int {
    // SAFETY: the caller's string.
    let Some(name) = (unsafe { bytes(name) }) else { return EINVAL };
    // SAFETY: the caller's pointers.
    code(unsafe { mallctl::by_name(name, io(old, old_len, new, new_len)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mallctlnametomib(
    name: *const c_char,
    mib: *mut usize,
    mib_len: *mut usize,
) -> c_int {
    // SAFETY: the caller's string.
    let Some(name) = (unsafe { bytes(name) }) else { return EINVAL };
    if mib.is_null() || mib_len.is_null() {
        return EINVAL;
    }
    // SAFETY: the caller's length.
    let room = unsafe { mib_len.read() }.min(mallctl::DEPTH_MAX);
    let mut found = [0; mallctl::DEPTH_MAX];
    match mallctl::name_to_mib(name, found.get_mut(..room).unwrap_or(&mut [])) {
        Ok(depth) => {
            // SAFETY: the caller has room for that many indices.
            unsafe { core::ptr::copy_nonoverlapping(found.as_ptr(), mib, depth) };
            // SAFETY: as above.
            unsafe { mib_len.write(depth) };
            0
        }
        Err(error) => error.code(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mallctlbymib(
    mib: *const usize,
    mib_len: usize,
    old: *mut c_void,
    old_len: *mut usize,
    new: *mut c_void,
    new_len: usize,
) -> c_int {
    if mib.is_null() {
        return EINVAL;
    }
    // SAFETY: the caller's indices; a name has no more than that many.
    let mib = unsafe { core::slice::from_raw_parts(mib, mib_len.min(mallctl::DEPTH_MAX)) };
    // SAFETY: the caller's pointers.
    code(unsafe { mallctl::by_mib(mib, io(old, old_len, new, new_len)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc_stats_print(
    write: Option<Message>,
    pointer: *mut c_void,
    letters: *const c_char,
) {
    // SAFETY: the caller's string.
    let letters = unsafe { bytes(letters) }.unwrap_or(b"");
    match write {
        Some(write) => stats_print::write(letters, &mut |piece| {
            // SAFETY: the caller's function, its own pointer and a C string.
            unsafe { write(pointer, piece.as_ptr()) }
        }),
        None => stats_print::write_message(letters),
    }
}

macro_rules! prefixed {
    ($($mallctl:ident $nametomib:ident $bymib:ident $stats_print:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $mallctl(
                name: *const c_char,
                old: *mut c_void,
                old_len: *mut usize,
                new: *mut c_void,
                new_len: usize,
            ) -> c_int {
                // SAFETY: the same contract.
                unsafe { mallctl(name, old, old_len, new, new_len) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $nametomib(
                name: *const c_char,
                mib: *mut usize,
                mib_len: *mut usize,
            ) -> c_int {
                // SAFETY: the same contract.
                unsafe { mallctlnametomib(name, mib, mib_len) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $bymib(
                mib: *const usize,
                mib_len: usize,
                old: *mut c_void,
                old_len: *mut usize,
                new: *mut c_void,
                new_len: usize,
            ) -> c_int {
                // SAFETY: the same contract.
                unsafe { mallctlbymib(mib, mib_len, old, old_len, new, new_len) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $stats_print(
                write: Option<Message>,
                pointer: *mut c_void,
                letters: *const c_char,
            ) {
                // SAFETY: the same contract.
                unsafe { malloc_stats_print(write, pointer, letters) }
            }
        )*
    };
}

prefixed! {
    je_mallctl je_mallctlnametomib je_mallctlbymib je_malloc_stats_print;
    jemalloc_mallctl jemalloc_mallctlnametomib jemalloc_mallctlbymib jemalloc_malloc_stats_print;
}

/// Variables that a program defines itself, or sets: here they are empty. The archive that is
/// installed has them weak, so that a program's own are the only ones.
macro_rules! variables {
    ($($conf:ident $harder:ident $message:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_upper_case_globals, reason = "the C name")]
            static mut $conf: *const c_char = null();
            #[unsafe(no_mangle)]
            #[allow(non_upper_case_globals, reason = "the C name")]
            static mut $harder: *const c_char = null();
            #[unsafe(no_mangle)]
            #[allow(non_upper_case_globals, reason = "the C name")]
            static mut $message: Option<Message> = None;
        )*
    };
}

variables! {
    malloc_conf malloc_conf_2_conf_harder malloc_message;
    je_malloc_conf je_malloc_conf_2_conf_harder je_malloc_message;
    jemalloc_malloc_conf jemalloc_malloc_conf_2_conf_harder jemalloc_malloc_message;
}

// Where the variables are that the loader chose: `control::places::Table`. In assembly, so that the
// addresses are those of the symbols and not of what is defined above.
core::arch::global_asm!(
    ".pushsection .data.rel.ro.thermalloc_places, \"aw\", %progbits",
    ".p2align 3",
    ".weak thermalloc_places",
    ".hidden thermalloc_places",
    ".type thermalloc_places, %object",
    "thermalloc_places:",
    ".quad malloc_conf, je_malloc_conf, jemalloc_malloc_conf",
    ".quad malloc_conf_2_conf_harder, je_malloc_conf_2_conf_harder, jemalloc_malloc_conf_2_conf_harder",
    ".quad malloc_message, je_malloc_message, jemalloc_malloc_message",
    ".size thermalloc_places, 72",
    ".popsection",
);
