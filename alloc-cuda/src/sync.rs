//! The one place that names the primitives of what threads share without a heap's lock: std's as
//! shipped, loom's under `cfg(loom)`, so that the code under test is the code shipped.

#[cfg(not(loom))]
pub(crate) use crate::gpu::lock;
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, atomic};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, atomic};

#[cfg(loom)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap()
}
