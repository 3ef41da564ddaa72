//! What TensorFlow says of the allocation at hand, in stock wheels and with no code changed: each thread
//! has an annotation with the operator, the step, the region and the data type.
//!
//! Its accessor is looked up in the module's own symbol table by the background thread, never by the
//! loader. It is called while a block is recorded, so that what it allocates itself is not. Invariants:
//! it is not called before the loader is done with the library, which is mapped long before its calls and
//! thread-local variables work; what it points to is looked at before it is read, and copied at once.
use super::tags::{Meaning, NAME_BYTES};
use super::{TAGS, maps, unwind};
use crate::control::options;
use crate::os::{linux, start::weak};
use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use thermalloc_prof_format::{component, source};

const ACCESSOR: &[u8] =
    b"_ZN3tsl8profiler27ScopedMemoryDebugAnnotation27ThreadMemoryDebugAnnotationEv";
const LIBRARY: &[u8] = b"/libtensorflow_framework.so.2";

/// The accessor; 0: not found, or not yet to be called.
static FOUND: AtomicUsize = AtomicUsize::new(0);
/// The accessor of a library that the last look found loaded.
static LOADED: AtomicUsize = AtomicUsize::new(0);
/// A module may be loaded until then: when to stop looking.
static LOOK_UNTIL_MS: AtomicU64 = AtomicU64::new(u64::MAX);
static NEXT_LOOK_MS: AtomicU64 = AtomicU64::new(0);

/// How long a `dlopen` is given to be over.
const LOADING_MS: u64 = 20_000;
const LOOK_MS: u64 = 500;
/// How long no `dlopen` may have begun where the loader can't be asked whether one is over.
const QUIET_MS: u64 = 5_000;

/// The struct that the accessor returns a reference to, as 2.15 to 2.21 have it: texts are libstdc++'s
/// `string_view`, length first.
#[repr(C)]
#[derive(Clone, Copy)]
struct Annotation {
    operator_bytes: usize,
    operator: usize,
    step: i64,
    region_bytes: usize,
    region: usize,
    dtype: i32,
}

/// A module may be loaded from now on.
pub(super) fn modules_changed() {
    LOOK_UNTIL_MS.store(linux::now_ms() + LOADING_MS, Relaxed);
}

/// Whether [`look`] is to be called again.
pub(super) fn looks() -> bool {
    options::prof_tensorflow()
        && FOUND.load(Relaxed) == 0
        && linux::now_ms() < LOOK_UNTIL_MS.load(Relaxed)
}

/// Looks for the library, now and then while modules are loaded; whether to come back for it.
pub(super) fn look() -> bool {
    if !looks() {
        return false;
    }
    let now = linux::now_ms();
    let due = NEXT_LOOK_MS.load(Relaxed);
    if now < due || NEXT_LOOK_MS.compare_exchange(due, now + LOOK_MS, Relaxed, Relaxed).is_err() {
        return true;
    }
    // The first look has no end set by anybody.
    let _ = LOOK_UNTIL_MS.compare_exchange(u64::MAX, now + LOADING_MS, Relaxed, Relaxed);
    unwind::modules_changed();
    let (mut base, mut found) = (0, None);
    maps::for_each(|mapping| {
        if mapping.path.ends_with(LIBRARY) {
            if mapping.offset == 0 {
                base = mapping.start;
            }
            if mapping.flags & 4 != 0 && base != 0 {
                found = Some(maps::Module { start: base, end: mapping.end });
            }
        }
    });
    let accessor =
        found.and_then(|module| module.symbol(ACCESSOR)).filter(|&at| is_loaded(at, now));
    let accessor = accessor.unwrap_or(0);
    // The loader knows an object just before its thread-local variables can be used: a look later they
    // can.
    if LOADED.swap(accessor, Relaxed) == accessor && accessor != 0 {
        FOUND.store(accessor, Release);
    }
    looks()
}

/// Whether the loader has done its work on the object of this address.
fn is_loaded(address: usize, now_ms: u64) -> bool {
    type FindObject = unsafe extern "C" fn(pc: *mut (), object: *mut [u64; 16]) -> i32;
    let find = weak!("_dl_find_object");
    if find.is_null() {
        return now_ms + LOADING_MS >= LOOK_UNTIL_MS.load(Relaxed).saturating_add(QUIET_MS);
    }
    // SAFETY: glibc's function of this name takes any address and fills a struct of at most 12 words.
    let find = unsafe { core::mem::transmute::<*const *const usize, FindObject>(find) };
    let mut object = [0; 16];
    // SAFETY: as above.
    unsafe { find(core::ptr::with_exposed_provenance_mut(address), &raw mut object) == 0 }
}

/// The tag and step of what the thread is at; nothing where TensorFlow says nothing. Only while a block
/// is being recorded.
#[inline]
pub(super) fn annotation() -> Option<(u32, u64)> {
    let accessor = FOUND.load(Acquire);
    if accessor == 0 || !options::prof_tensorflow() {
        return None;
    }
    // The library may have been unloaded.
    if linux::is_readable(accessor) { ask(accessor) } else { None }
}

#[cold]
#[inline(never)]
fn ask(accessor: usize) -> Option<(u32, u64)> {
    let accessor = core::ptr::with_exposed_provenance::<()>(accessor);
    // SAFETY: a function of this name takes nothing and returns a reference.
    let accessor = unsafe {
        core::mem::transmute::<*const (), extern "C" fn() -> *const Annotation>(accessor)
    };
    let at = accessor();
    if !linux::is_readable(at.addr())
        || !linux::is_readable(at.addr() + size_of::<Annotation>() - 8)
    {
        return None;
    }
    // SAFETY: both ends of it can be read; it is this thread's.
    let annotation = unsafe { at.read() };
    let mut texts = [[0; NAME_BYTES]; 2];
    let [name, region] = &mut texts;
    let name = copy(annotation.operator, annotation.operator_bytes, name)?;
    let region = copy(annotation.region, annotation.region_bytes, region)?;
    if name.is_empty() {
        return None;
    }
    let meaning = Meaning {
        parent: 0,
        source: source::TENSORFLOW,
        component: component::UNKNOWN,
        dtype: u16::try_from(annotation.dtype).ok()?,
        name,
        region,
    };
    Some((TAGS.intern(meaning), annotation.step.max(0).cast_unsigned()))
}

/// A text of another's; nothing where it can't be one, which another layout would look like.
fn copy(at: usize, len: usize, to: &mut [u8; NAME_BYTES]) -> Option<&[u8]> {
    const LONGEST: usize = 4096;
    if len == 0 {
        return Some(&[]);
    }
    if len > LONGEST {
        return None;
    }
    let len = len.min(NAME_BYTES);
    // The last look covers the text's end, unless that is the end of a page.
    let looks = [at, at + len.saturating_sub(8)];
    if !looks.into_iter().all(linux::is_readable) {
        return None;
    }
    // SAFETY: both ends can be read, and lie on at most two neighbouring pages.
    let text = unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(at), len) };
    to[..len].copy_from_slice(text);
    let text = &to[..len];
    text.iter().all(|byte| (b' '..=b'~').contains(byte)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;
    use std::sync::Mutex;

    static NOW: Mutex<Annotation> = Mutex::new(Annotation {
        operator_bytes: 0,
        operator: 0,
        step: 0,
        region_bytes: 0,
        region: 0,
        dtype: 0,
    });

    extern "C" fn accessor() -> *const Annotation {
        &raw const *NOW.lock().unwrap()
    }

    fn say(operator: (usize, usize), region: (usize, usize), dtype: i32) -> Option<(u32, u64)> {
        *NOW.lock().unwrap() = Annotation {
            operator: operator.0,
            operator_bytes: operator.1,
            step: 42,
            region: region.0,
            region_bytes: region.1,
            dtype,
        };
        ask(accessor as *const () as usize)
    }

    #[test]
    fn a_file_that_is_only_mapped_is_not_loaded() {
        let function = libc::qsort as *const () as usize;
        LOOK_UNTIL_MS.store(linux::now_ms() + LOADING_MS, Relaxed);
        assert!(is_loaded(function, linux::now_ms()));
        let text = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!is_loaded(text.as_ptr().expose_provenance(), linux::now_ms()));
    }

    #[test]
    fn what_it_says_becomes_a_tag() {
        let text = |text: &'static str| (text.as_ptr().expose_provenance(), text.len());
        let (tag, step) = say(text("gradient_tape/dense/MatMul"), text("temp"), 1).unwrap();
        assert_eq!(step, 42);
        let read = |tag| {
            TAGS.read(tag, |m| {
                let texts = [m.name, m.region].map(|t| String::from_utf8(t.to_vec()).unwrap());
                (texts, m.source, m.dtype)
            })
        };
        let texts = ["gradient_tape/dense/MatMul", "temp"].map(String::from);
        assert_eq!(read(tag), Some((texts, source::TENSORFLOW, 1)));
        assert_eq!(say(text("gradient_tape/dense/MatMul"), text("temp"), 1), Some((tag, 42)));
        assert_ne!(say(text("gradient_tape/dense/MatMul"), text("output"), 1), Some((tag, 42)));
        let long: &'static str = std::boxed::Box::leak("n".repeat(1000).into_boxed_str());
        let (tag, _) = say(text(long), text(""), 0).unwrap();
        assert_eq!(read(tag).unwrap().0[0].len(), NAME_BYTES);
        // No operator, and layouts that are not the one that is known.
        assert_eq!(say(text(""), text("temp"), 1), None);
        assert_eq!(say((1, 4), text("temp"), 1), None);
        assert_eq!(say((4, text("abcd").0), text("temp"), 1), None);
        assert_eq!(say(text("ab\u{7f}cd"), text("temp"), 1), None);
        assert_eq!(say(text("a"), text("temp"), -1), None);
    }
}
