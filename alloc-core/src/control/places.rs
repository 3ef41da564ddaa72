//! jemalloc's variables that a program may define: `malloc_conf` and `malloc_message`, under any
//! prefix; and the other places of this process that options come from.
//!
//! libthermalloc defines the variables and, for this module, a table of their addresses. A Rust program
//! without it can define `_rjem_malloc_conf`.

use super::conf::Outside;
use crate::os::linux;
use crate::os::start::{self, weak};
use core::ffi::{CStr, c_char, c_void};

/// What writes a program's messages: its own pointer, and a C string.
pub type Message = unsafe extern "C" fn(*mut c_void, *const c_char);

/// Where the variables are; as libthermalloc has it.
#[repr(C)]
#[derive(Debug)]
pub struct Table {
    conf: [*const *const c_char; 3],
    harder: [*const *const c_char; 3],
    message: [*const Option<Message>; 3],
}

/// The lowest page holds nothing: a pointer there is one that the loader has not relocated yet.
const LEAST_ADDRESS: usize = 1 << 16;

fn table() -> Option<&'static Table> {
    let table = weak!("thermalloc_places").cast::<Table>();
    // SAFETY: null, or the table of libthermalloc, which stays.
    unsafe { table.as_ref() }
}

/// The text that a variable of this address points to.
fn text(variable: *const *const c_char) -> Option<&'static [u8]> {
    if variable.is_null() {
        return None;
    }
    // SAFETY: a variable of the program's, which nobody writes while the process starts.
    let text = unsafe { variable.read() };
    // SAFETY: it holds null or a C string that stays.
    (text.addr() >= LEAST_ADDRESS).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// The function that the program set to write messages, if any.
#[must_use]
pub fn message() -> Option<Message> {
    let places = table()?.message;
    places.iter().filter(|place| !place.is_null()).find_map(|place| {
        // SAFETY: a variable of the program's: null or a function of this type.
        unsafe { place.read_volatile() }
    })
}

/// This process.
pub(crate) struct ThisProcess {
    pub(crate) secure: bool,
}

impl Outside for ThisProcess {
    fn env(&self, name: &[u8]) -> Option<&'static [u8]> {
        start::env(name)
    }

    fn secure(&self) -> bool {
        self.secure
    }

    fn symbols(&self) -> [Option<&'static [u8]>; 4] {
        let [plain, je, jemalloc] = table().map_or([core::ptr::null(); 3], |table| table.conf);
        [text(plain), text(je), text(jemalloc), text(weak!("_rjem_malloc_conf").cast())]
    }

    fn harder(&self) -> Option<&'static [u8]> {
        table()?.harder.iter().find_map(|variable| text(*variable))
    }

    fn link(&self, path: &CStr, buffer: &mut [u8]) -> Option<usize> {
        linux::read_link(path, buffer).ok()
    }

    fn cpus(&self) -> usize {
        start::possible_cpus()
    }
}
