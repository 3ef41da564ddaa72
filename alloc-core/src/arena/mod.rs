//! Stand-in: a list of free blocks a class.
#![allow(dead_code)]
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::front::size_class::{SizeClass, class_bytes};

static LOCK: AtomicUsize = AtomicUsize::new(0);
static FREE: [AtomicUsize; 256] = [const { AtomicUsize::new(0) }; 256];

fn locked<T>(f: impl FnOnce() -> T) -> T {
    while LOCK.swap(1, Ordering::Acquire) != 0 {
        core::hint::spin_loop();
    }
    let t = f();
    LOCK.store(0, Ordering::Release);
    t
}

pub(crate) fn take(_arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
    locked(|| {
        let head = &FREE[class as usize];
        for (i, slot) in out.iter_mut().enumerate() {
            let p = core::ptr::with_exposed_provenance_mut::<usize>(head.load(Ordering::Relaxed));
            if p.is_null() {
                *slot = crate::api::alloc_aligned(class_bytes(class), 16);
                if slot.is_null() {
                    return i;
                }
                continue;
            }
            // SAFETY: a free block, whose first word links to the next.
            head.store(unsafe { p.read() }, Ordering::Relaxed);
            *slot = p.cast();
        }
        out.len()
    })
}

pub(crate) fn give(_arena: usize, class: SizeClass, blocks: &[*mut u8]) {
    locked(|| {
        let head = &FREE[class as usize];
        for &block in blocks {
            // SAFETY: the caller gives the block away; it has at least 16 bytes.
            unsafe { block.cast::<usize>().write(head.load(Ordering::Relaxed)) };
            head.store(block.expose_provenance(), Ordering::Relaxed);
        }
    });
}
