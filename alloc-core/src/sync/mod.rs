//! The one place that names synchronisation primitives: core's as shipped, loom's under
//! `cfg(loom)`, so that the code under test is the code shipped. loom's are made at run time:
//! a type that has one is built by [`const_fn!`] and is no `static` in a loom build.
pub(crate) mod lock;
pub(crate) mod passage;

#[cfg(not(loom))]
pub(crate) use core::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use core::sync::atomic;
#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;
#[cfg(loom)]
pub(crate) use loom::hint::spin_loop;
#[cfg(loom)]
pub(crate) use loom::sync::atomic;

use atomic::AtomicU32;

/// Declares functions that are `const` but for a loom build.
macro_rules! const_fn {
    ($($(#[$meta:meta])* $vis:vis const fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)+) => {
        $(
            #[cfg(not(loom))]
            $(#[$meta])*
            $vis const fn $name($($arg: $ty),*) -> $ret $body
            #[cfg(loom)]
            $(#[$meta])*
            $vis fn $name($($arg: $ty),*) -> $ret $body
        )+
    };
}
pub(crate) use const_fn;

/// `[value; len]` of a type that is not `Copy`, in a [`const_fn!`].
macro_rules! array {
    ($value:expr; $len:expr) => {{
        #[cfg(not(loom))]
        let array = [const { $value }; $len];
        #[cfg(loom)]
        let array = core::array::from_fn::<_, { $len }, _>(|_| $value);
        array
    }};
}
pub(crate) use array;

/// `core::cell::UnsafeCell` behind loom's interface, which sees each access begin and end.
#[cfg(not(loom))]
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    #[inline(always)]
    pub(crate) const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    /// Reads through the pointer that `f` gets.
    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Writes through the pointer that `f` gets.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A word that threads of this process sleep on. Leaves `errno` alone.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct Futex {
    word: AtomicU32,
    /// What the kernel's hash bucket is: the check of the word and the sleep are one step.
    #[cfg(loom)]
    bucket: loom::sync::Mutex<()>,
    #[cfg(loom)]
    bell: loom::sync::Condvar,
}

impl Futex {
    const_fn! {
        pub(crate) const fn new(value: u32) -> Self {
            Self {
                word: AtomicU32::new(value),
                #[cfg(loom)]
                bucket: loom::sync::Mutex::new(()),
                #[cfg(loom)]
                bell: loom::sync::Condvar::new(),
            }
        }
    }

    #[inline(always)]
    pub(crate) fn word(&self) -> &AtomicU32 {
        &self.word
    }
}

#[cfg(not(loom))]
impl Futex {
    /// Sleeps while the word is `expected`, until a wake, a signal or the time limit.
    pub(crate) fn wait(&self, expected: u32, timeout_ms: Option<u64>) {
        // Every return means the same to the caller: look at the word again.
        let _ = crate::os::linux::futex_wait(&self.word, expected, timeout_ms);
    }

    /// Wakes up to `count` sleepers.
    pub(crate) fn wake(&self, count: u32) {
        crate::os::linux::futex_wake(&self.word, count);
    }
}

#[cfg(loom)]
impl Futex {
    pub(crate) fn wait(&self, expected: u32, _timeout_ms: Option<u64>) {
        let bucket = self.bucket.lock().unwrap();
        if self.word.load(atomic::Ordering::Relaxed) == expected {
            drop(self.bell.wait(bucket).unwrap());
        }
    }

    pub(crate) fn wake(&self, count: u32) {
        let _bucket = self.bucket.lock().unwrap();
        for _ in 0..count.min(8) {
            self.bell.notify_one();
        }
    }
}

/// Tells threads apart, and is the same in a fork's child: the thread pointer. Never 0.
#[cfg(not(loom))]
#[inline]
pub(crate) fn thread_token() -> usize {
    crate::os::linux::thread_pointer()
}

#[cfg(loom)]
pub(crate) fn thread_token() -> usize {
    use core::hash::{Hash, Hasher};
    let mut hasher = std::hash::DefaultHasher::new();
    loom::thread::current().id().hash(&mut hasher);
    usize::try_from(hasher.finish() | 1).unwrap()
}

/// Lets others run.
#[cfg(not(loom))]
pub(crate) fn yield_now() {
    crate::os::linux::yield_now();
}

#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
