//! Libraries that go with the allocator, such as the device pool. The background thread has no libc
//! under it and makes system calls only, so it cannot do their work; it sets the pace and wakes a
//! thread of theirs.
//!
//! Invariant: a companion is added once and stays as long as the process.
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::background;
use crate::os::linux;
use crate::process;

/// What a library shares with the allocator. Layout of the C header.
#[repr(C)]
#[derive(Debug)]
pub struct Companion {
    struct_bytes: usize,
    /// The allocator's own.
    next: AtomicPtr<Companion>,
    /// One more each time that the background thread looks: a private futex.
    looks: AtomicU32,
    reserved: AtomicU32,
}

impl Companion {
    /// A companion for a static.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            struct_bytes: size_of::<Self>(),
            next: AtomicPtr::new(ptr::null_mut()),
            looks: AtomicU32::new(0),
            reserved: AtomicU32::new(0),
        }
    }

    /// The background thread's looks so far; a private futex.
    #[must_use]
    pub fn looks(&self) -> &AtomicU32 {
        &self.looks
    }
}

impl Default for Companion {
    fn default() -> Self {
        Self::new()
    }
}

static FIRST: AtomicPtr<Companion> = AtomicPtr::new(ptr::null_mut());

fn all() -> impl Iterator<Item = &'static Companion> {
    let mut at = FIRST.load(Ordering::Acquire);
    core::iter::from_fn(move || {
        // SAFETY: null, or a companion, which stays as long as the process.
        let companion = unsafe { at.as_ref() }?;
        at = companion.next.load(Ordering::Acquire);
        Some(companion)
    })
}

/// Adds a companion; a second time it changes nothing. `false`: it is of another version, or memory is
/// out. It may come before the process's first block.
pub(crate) fn add(companion: &'static Companion) -> bool {
    if companion.struct_bytes < size_of::<Companion>() || !process::ready() {
        return false;
    }
    let new = ptr::from_ref(companion).cast_mut();
    let mut first = FIRST.load(Ordering::Acquire);
    loop {
        if all().any(|other| ptr::eq(other, companion)) {
            return true;
        }
        companion.next.store(first, Ordering::Relaxed);
        match FIRST.compare_exchange(first, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => first = now,
        }
    }
    background::want();
    background::notice();
    true
}

pub(crate) fn any() -> bool {
    !FIRST.load(Ordering::Acquire).is_null()
}

/// Wakes the companions' threads; `false` where there are none.
pub(crate) fn wake() -> bool {
    let mut any = false;
    for companion in all() {
        companion.looks.fetch_add(1, Ordering::Relaxed);
        linux::futex_wake(&companion.looks, 1);
        any = true;
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn companions_are_added_once_and_woken() {
        static ONE: Companion = Companion::new();
        static TWO: Companion = Companion::new();
        static OLD: Companion = Companion {
            struct_bytes: 8,
            next: AtomicPtr::new(ptr::null_mut()),
            looks: AtomicU32::new(0),
            reserved: AtomicU32::new(0),
        };
        assert!(add(&ONE) && add(&TWO) && add(&ONE) && !add(&OLD));
        assert!(any());
        let before = [ONE.looks.load(Ordering::Relaxed), TWO.looks.load(Ordering::Relaxed)];
        assert!(wake());
        assert!(ONE.looks.load(Ordering::Relaxed) > before[0]);
        assert!(TWO.looks.load(Ordering::Relaxed) > before[1]);
        assert_eq!(OLD.looks.load(Ordering::Relaxed), 0);
    }
}
