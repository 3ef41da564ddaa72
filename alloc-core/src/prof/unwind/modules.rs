//! Which module an address is in, and where its table of call frame information lies: by glibc's
//! `_dl_find_object` (2.35), which is made for this, takes no lock and knows of every `dlopen` and
//! `dlclose` at once. Where there is none (older, or static without it), by the list of mappings.
use core::ffi::{c_int, c_void};

use super::super::maps;
use crate::os::{linux, start::weak};
use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// `struct dl_find_object` as x86-64 has it.
#[repr(C)]
struct Object {
    flags: u64,
    map_start: *mut c_void,
    map_end: *mut c_void,
    link_map: *mut c_void,
    eh_frame: *mut c_void,
    reserved: [u64; 7],
}

type FindObject = unsafe extern "C" fn(pc: *mut c_void, result: *mut Object) -> c_int;

/// The address of the module's `.eh_frame_hdr`.
pub(super) fn eh_frame_hdr(pc: usize) -> Option<usize> {
    let find = weak!("_dl_find_object");
    if find.is_null() {
        return by_mappings(pc);
    }
    // SAFETY: the symbol of this name has this type.
    let find = unsafe { core::mem::transmute::<*const *const usize, FindObject>(find) };
    let null = core::ptr::null_mut;
    let mut object = Object {
        flags: 0,
        map_start: null(),
        map_end: null(),
        link_map: null(),
        eh_frame: null(),
        reserved: [0; 7],
    };
    // SAFETY: it writes `object` and takes any address.
    let found = unsafe { find(core::ptr::with_exposed_provenance_mut(pc), &raw mut object) };
    (found == 0 && !object.eh_frame.is_null()).then(|| object.eh_frame.expose_provenance())
}

/// Modules found by the list: start, end, table. They are only added.
struct Known {
    modules: [[AtomicUsize; 3]; 256],
    count: AtomicUsize,
    next_look_ms: AtomicU64,
}

static KNOWN: Known = Known {
    modules: [const { [const { AtomicUsize::new(0) }; 3] }; 256],
    count: AtomicUsize::new(0),
    next_look_ms: AtomicU64::new(0),
};

/// How soon an unknown address is looked up again.
const LOOK_MS: u64 = 1000;

fn by_mappings(pc: usize) -> Option<usize> {
    known(pc).or_else(|| {
        let now = linux::now_ms();
        let due = KNOWN.next_look_ms.load(Relaxed);
        let mine = now >= due
            && KNOWN.next_look_ms.compare_exchange(due, now + LOOK_MS, Relaxed, Relaxed).is_ok();
        if mine {
            maps::for_each_module(|module| {
                if known(module.start).is_none()
                    && let Some(table) = module.eh_frame_hdr()
                {
                    add([module.start, module.end, table]);
                }
            });
        }
        known(pc)
    })
}

fn known(pc: usize) -> Option<usize> {
    let count = KNOWN.count.load(Acquire).min(KNOWN.modules.len());
    let [_, _, table] = KNOWN.modules[..count]
        .iter()
        .map(|module| [0, 1, 2].map(|i| module[i].load(Relaxed)))
        .find(|&[start, end, _]| (start..end).contains(&pc))?;
    // It may have gone meanwhile.
    linux::is_readable(table).then_some(table)
}

/// One thread at a time.
fn add(words: [usize; 3]) {
    let at = KNOWN.count.load(Relaxed);
    let Some(module) = KNOWN.modules.get(at) else { return };
    module.iter().zip(words).for_each(|(to, word)| to.store(word, Relaxed));
    KNOWN.count.store(at + 1, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_same_tables() {
        KNOWN.next_look_ms.store(0, Relaxed);
        let addresses = [eh_frame_hdr as *const () as usize, libc::qsort as *const () as usize];
        for pc in addresses {
            let table = eh_frame_hdr(pc).unwrap();
            assert_eq!(by_mappings(pc), Some(table));
        }
        assert_eq!((eh_frame_hdr(8), by_mappings(8)), (None, None));
        let heap = std::boxed::Box::new(1);
        assert_eq!(by_mappings(core::ptr::from_ref(&*heap).addr()), None);
    }
}
