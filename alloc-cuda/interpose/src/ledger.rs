//! Who has how much of what.

use crate::host;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::fmt::Write;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// What memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// A pool of the driver.
    Pool,
    /// `cuMemCreate`.
    Physical,
    Managed,
    /// Host memory, allocated or registered.
    Pinned,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::Device, "device"),
    (Kind::Pool, "driver pool"),
    (Kind::Physical, "physical"),
    (Kind::Managed, "managed"),
    (Kind::Pinned, "pinned"),
];

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    peak_bytes: u64,
    blocks: u64,
    allocs: u64,
    frees: u64,
}

#[derive(Default)]
struct Book {
    /// By kind and address: bytes, number of the library, number in libthermalloc's ledger.
    live: HashMap<(usize, u64), (u64, usize, u64)>,
    sums: [Sum; KINDS.len()],
    /// Files that called, and what each has of each kind.
    callers: Vec<(String, [Sum; KINDS.len()])>,
}

static BOOK: LazyLock<Mutex<Book>> = LazyLock::new(Mutex::default);

fn book() -> MutexGuard<'static, Book> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.blocks += 1;
        self.allocs += 1;
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.blocks = self.blocks.saturating_sub(1);
        self.frees += 1;
    }
}

/// An address within the code that asked for memory: the first frame outside this library and the
/// CUDA runtime, which only passes the call on.
pub(crate) fn return_address() -> *mut c_void {
    let mut frames = [std::ptr::null_mut(); 8];
    // SAFETY: room for so many frames.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), 8) };
    let own = file_of(return_address as *mut c_void);
    let passes_on = |frame: *mut c_void| {
        let file = file_of(frame);
        file == own || file.is_some_and(|file| file.starts_with("libcudart"))
    };
    let frames = &frames[..usize::try_from(count).unwrap_or(0)];
    frames.iter().copied().find(|&frame| !passes_on(frame)).unwrap_or(std::ptr::null_mut())
}

/// The file that an address belongs to.
fn file_of(address: *mut c_void) -> Option<String> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid place to write to.
    if address.is_null() || unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it was written.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string of the loader's.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
    Some(path.rsplit('/').next().unwrap_or(&path).to_owned())
}

/// Notes memory.
pub(crate) fn add(kind: Kind, address: u64, bytes: usize, caller: *mut c_void) {
    let name = file_of(caller).unwrap_or_else(|| "unknown".to_owned());
    let bytes = bytes as u64;
    let entered = host::enter(kind, address, bytes, &name);
    let kind = kind as usize;
    let mut book = book();
    let at = book.callers.iter().position(|(other, _)| *other == name);
    let at = at.unwrap_or_else(|| {
        book.callers.push((name, Default::default()));
        book.callers.len() - 1
    });
    book.sums[kind].add(bytes);
    book.callers[at].1[kind].add(bytes);
    book.live.insert((kind, address), (bytes, at, entered));
}

/// Notes that memory of one of these kinds is gone.
pub(crate) fn remove(kinds: &[Kind], address: u64) {
    let entered = {
        let mut book = book();
        let found = kinds
            .iter()
            .find_map(|&kind| Some((kind as usize, book.live.remove(&(kind as usize, address))?)));
        let Some((kind, (bytes, at, entered))) = found else { return };
        book.sums[kind].remove(bytes);
        book.callers[at].1[kind].remove(bytes);
        entered
    };
    host::leave(entered);
}

/// Bytes in use of a kind.
pub(crate) fn bytes(kind: usize) -> u64 {
    book().sums.get(kind).map_or(0, |sum| sum.bytes)
}

/// The ledger as text.
pub(crate) fn report() -> String {
    let mut text = String::from("thermalloc: memory by kind and caller\n");
    let book = book();
    for (kind, name) in KINDS {
        let sum = book.sums[kind as usize];
        if sum.allocs == 0 {
            continue;
        }
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{name}: {} bytes in {} blocks, peak {}, {} allocations, {} frees",
            sum.bytes, sum.blocks, sum.peak_bytes, sum.allocs, sum.frees
        );
        for (caller, sums) in &book.callers {
            let sum = sums[kind as usize];
            if sum.allocs > 0 {
                let _ = writeln!(
                    text,
                    "  {caller}: {} bytes in {} blocks, peak {}, {} allocations",
                    sum.bytes, sum.blocks, sum.peak_bytes, sum.allocs
                );
            }
        }
    }
    text
}
