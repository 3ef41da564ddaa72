//! stand-in
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};
pub(crate) struct Mutex<T> { s: AtomicU32, v: UnsafeCell<T> }
// SAFETY: x
unsafe impl<T: Send> Sync for Mutex<T> {}
pub(crate) struct Guard<'a, T>(&'a Mutex<T>);
impl<T> Mutex<T> {
    pub(crate) const fn new(v: T) -> Self { Self { s: AtomicU32::new(0), v: UnsafeCell::new(v) } }
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> { if self.s.swap(1, Ordering::Acquire) == 0 { Some(Guard(self)) } else { None } }
    pub(crate) fn lock(&self) -> Guard<'_, T> { loop { if let Some(g) = self.try_lock() { return g } } }
}
impl<T> core::ops::Deref for Guard<'_, T> { type Target = T; fn deref(&self) -> &T {
    // SAFETY: x
    unsafe { &*self.0.v.get() } } }
impl<T> core::ops::DerefMut for Guard<'_, T> { fn deref_mut(&mut self) -> &mut T {
    // SAFETY: x
    unsafe { &mut *self.0.v.get() } } }
impl<T> Drop for Guard<'_, T> { fn drop(&mut self) { self.0.s.store(0, Ordering::Release) } }
pub(crate) struct RawLock;
impl<T> Mutex<T> { pub(crate) fn raw(&self) -> &RawLock { &RawLock } }
