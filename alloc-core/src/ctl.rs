//! Typed access to statistics and options by jemalloc's names, in the manner of `tikv-jemalloc-ctl`.
//!
//! Statistics are those of one moment: [`epoch::advance`] takes new ones. What is read often is looked
//! up once and kept:
//!
//! ```
//! use thermalloc::ctl::{epoch, stats};
//!
//! # #[global_allocator]
//! # static GLOBAL: thermalloc::Thermalloc = thermalloc::Thermalloc;
//! epoch::advance()?;
//! let allocated = stats::allocated::read()?;
//! let resident = stats::resident::mib()?;
//! assert!(allocated <= resident.read()?);
//! # Ok::<(), thermalloc::ctl::Error>(())
//! ```
//!
//! All figures as text for Prometheus: [`control::report`](crate::control::report) with
//! [`Format::Prometheus`](crate::control::report::Format::Prometheus).

pub use crate::control::mallctl::Error;

use crate::control::mallctl::{self, DEPTH_MAX, Io, Place, Type};
use core::ffi::{CStr, c_char};
use core::marker::PhantomData;

mod sealed {
    /// A type that C and Rust have alike, and of which each value that the tree gives is one.
    pub trait Plain: Copy {
        const ZERO: Self;
    }
    impl Plain for bool {
        const ZERO: Self = false;
    }
    impl Plain for u32 {
        const ZERO: Self = 0;
    }
    impl Plain for u64 {
        const ZERO: Self = 0;
    }
    impl Plain for usize {
        const ZERO: Self = 0;
    }
    impl Plain for isize {
        const ZERO: Self = 0;
    }
}

/// The type of a number or a truth: `bool`, `u32` (C's `unsigned`), `u64`, `usize`, `isize` (`ssize_t`).
pub trait Value: sealed::Plain {}
impl<T: sealed::Plain> Value for T {}

/// A name that was looked up, of a value of type `T`.
#[derive(Debug)]
pub struct Mib<T> {
    indices: [usize; DEPTH_MAX],
    depth: usize,
    value: PhantomData<fn() -> T>,
}

impl<T> Clone for Mib<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Mib<T> {}

impl<T> Mib<T> {
    /// Looks `name` up.
    ///
    /// # Errors
    /// Where nothing has this name.
    pub fn of(name: &str) -> Result<Self, Error> {
        let mut indices = [0; DEPTH_MAX];
        let depth = mallctl::name_to_mib(name.as_bytes(), &mut indices)?;
        Ok(Self { indices, depth, value: PhantomData })
    }

    /// The same name with another index in the place of part `part` (of `arena.0.purge` it is part 1
    /// that is an index).
    #[must_use]
    pub fn at(mut self, part: usize, index: usize) -> Self {
        if let Some(slot) = self.indices.get_mut(part).filter(|_| part < self.depth) {
            *slot = index;
        }
        self
    }

    /// # Safety
    /// As for [`mallctl::by_mib`].
    unsafe fn call(&self, io: Io) -> Result<(), Error> {
        let mib = self.indices.get(..self.depth).unwrap_or(&[]);
        // SAFETY: the caller's promise.
        unsafe { mallctl::by_mib(mib, io) }
    }
}

impl<T: Value> Mib<T> {
    /// Its value.
    ///
    /// # Errors
    /// Where it can't be read, or is of another type.
    pub fn read(&self) -> Result<T, Error> {
        let mut value = T::ZERO;
        let mut len = size_of::<T>();
        let io = Io { old: (&raw mut value).cast(), old_len: &raw mut len, ..Io::NONE };
        // SAFETY: there is room for the value, and any that the tree writes is one of the type; where a
        // pointer would be read from there, it is null, which is refused.
        unsafe { self.call(io) }?;
        Ok(value)
    }

    /// Sets it.
    ///
    /// # Errors
    /// Where it can't be written, or is of another type, or does not allow the value.
    ///
    /// # Safety
    /// What has this name takes no pointer, and nobody relies on what the write changes.
    pub unsafe fn write(&self, value: T) -> Result<(), Error> {
        let io = Io { new: (&raw const value).cast(), new_len: size_of::<T>(), ..Io::NONE };
        // SAFETY: the caller's promise.
        unsafe { self.call(io) }
    }
}

impl Mib<&'static str> {
    /// Its text.
    ///
    /// # Errors
    /// Where it can't be read, or is no text.
    pub fn read(&self) -> Result<&'static str, Error> {
        let mib = self.indices.get(..self.depth).unwrap_or(&[]);
        if !matches!(mallctl::place(mib), Some(Place::End(leaf)) if leaf.ty == Type::Text) {
            return Err(Error::Invalid);
        }
        let mut value: *const c_char = core::ptr::null();
        let mut len = size_of::<*const c_char>();
        let io = Io { old: (&raw mut value).cast(), old_len: &raw mut len, ..Io::NONE };
        // SAFETY: there is room for a pointer, which is null.
        unsafe { self.call(io) }?;
        if value.is_null() {
            return Ok("");
        }
        // SAFETY: a text that can be read is a C string that stays.
        unsafe { CStr::from_ptr(value) }.to_str().map_err(|_| Error::Invalid)
    }
}

impl Mib<()> {
    /// Runs it.
    ///
    /// # Errors
    /// Where it can't be run, or not now.
    ///
    /// # Safety
    /// What it does is allowed: an arena that is reset or destroyed has no block that is used afterwards.
    pub unsafe fn run(&self) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.call(Io::NONE) }
    }
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $path:literal $(, $write:ident)?;)*) => {
        $(
            $(#[$doc])*
            #[allow(non_camel_case_types, reason = "jemalloc's name")]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl $name {
                #[doc = concat!("Looks `", $path, "` up.")]
                ///
                /// # Errors
                /// None: the name is there.
                pub fn mib() -> Result<Mib<$ty>, Error> {
                    Mib::of($path)
                }

                #[doc = concat!("Reads `", $path, "`.")]
                ///
                /// # Errors
                /// Where it can't be read now.
                pub fn read() -> Result<$ty, Error> {
                    Self::mib()?.read()
                }

                $(names! { $write $ty, $path })?
            }
        )*
    };
    (write $ty:ty, $path:literal) => {
        #[doc = concat!("Sets `", $path, "`.")]
        ///
        /// # Errors
        /// Where it does not allow the value.
        pub fn write(value: $ty) -> Result<(), Error> {
            // SAFETY: it takes a plain value, and changes no memory of a caller's.
            unsafe { Self::mib()?.write(value) }
        }

        #[doc = concat!("Sets `", $path, "` and says what it was.")]
        ///
        /// # Errors
        /// Where it does not allow the value.
        pub fn update(value: $ty) -> Result<$ty, Error> {
            let before = Self::read()?;
            Self::write(value)?;
            Ok(before)
        }
    };
}

names! {
    /// The version.
    version: &'static str = "version";
    /// The number of the moment that statistics are of.
    epoch: u64 = "epoch";
    /// Whether a background thread gives cold pages back.
    background_thread: bool = "background_thread", write;
}

impl epoch {
    /// Takes new statistics; the number of their moment.
    ///
    /// # Errors
    /// None.
    pub fn advance() -> Result<u64, Error> {
        Self::mib()?.advance()
    }
}

impl Mib<u64> {
    /// Of `epoch`: takes new statistics, and reads the number of their moment.
    ///
    /// # Errors
    /// Where the name is another.
    pub fn advance(&self) -> Result<u64, Error> {
        if self.depth != 1 || self.indices != epoch::mib()?.indices {
            return Err(Error::NoEntry);
        }
        // SAFETY: `epoch` takes a number.
        unsafe { self.write(1) }?;
        self.read()
    }
}

/// Options as they were when the process started.
pub mod opt {
    use super::{Error, Mib};
    names! {
        /// Number of automatic arenas.
        narenas: u32 = "opt.narenas";
        /// Over this time pages that are cold go back, milliseconds; -1 never.
        dirty_decay_ms: isize = "opt.dirty_decay_ms";
        /// Over this time pages go back that the kernel was offered before; -1 never.
        muzzy_decay_ms: isize = "opt.muzzy_decay_ms";
        /// Whether there is a background thread from the start.
        background_thread: bool = "opt.background_thread";
        /// Whether blocks are cached.
        tcache: bool = "opt.tcache";
        /// What huge pages are used for.
        thp: &'static str = "opt.thp";
    }
}

/// What the arenas have in common.
pub mod arenas {
    use super::{Error, Mib};
    names! {
        /// Number of arenas.
        narenas: u32 = "arenas.narenas";
        /// Bytes of a page.
        page: usize = "arenas.page";
        /// Every size is a multiple of this.
        quantum: usize = "arenas.quantum";
        /// Number of size classes in slabs.
        nbins: u32 = "arenas.nbins";
        /// Number of size classes above those.
        nlextents: u32 = "arenas.nlextents";
        /// Largest size that caches hold.
        tcache_max: usize = "arenas.tcache_max";
        /// Of the automatic arenas, and of new ones, milliseconds; -1 never.
        dirty_decay_ms: isize = "arenas.dirty_decay_ms", write;
        /// Of the automatic arenas, and of new ones, milliseconds; -1 never.
        muzzy_decay_ms: isize = "arenas.muzzy_decay_ms", write;
    }
}

/// Statistics of the moment that [`epoch`] fixed, in bytes.
pub mod stats {
    use super::{Error, Mib};
    names! {
        /// Live blocks.
        allocated: usize = "stats.allocated";
        /// Pages in use.
        active: usize = "stats.active";
        /// Tables of the allocator's own.
        metadata: usize = "stats.metadata";
        /// An upper bound of the memory in use.
        resident: usize = "stats.resident";
        /// Address space with memory behind it, or that may have.
        mapped: usize = "stats.mapped";
        /// Address space kept for reuse, with no memory behind it.
        retained: usize = "stats.retained";
        /// Memory in use as the kernel counts it; of now, whatever the epoch.
        resident_measured: u64 = "thermalloc.stats.resident_measured_bytes";
    }
}

/// The calling thread.
pub mod thread {
    use super::{Error, Mib};
    use core::marker::PhantomData;
    names! {
        /// The thread's arena.
        arena: u32 = "thread.arena", write;
        /// Bytes that it has allocated so far.
        allocated: u64 = "thread.allocated";
        /// Bytes that it has freed so far.
        deallocated: u64 = "thread.deallocated";
    }

    /// A counter of the calling thread, read without a call.
    #[derive(Clone, Copy, Debug)]
    pub struct Counter {
        at: *const u64,
        /// It is the thread's own.
        own: PhantomData<*const ()>,
    }

    impl Counter {
        /// The figure.
        #[must_use]
        pub fn get(self) -> u64 {
            // SAFETY: a counter lives as long as its thread, which this value can't leave.
            unsafe { self.at.read_volatile() }
        }

        fn of(name: &str) -> Result<Self, Error> {
            let at = Mib::<usize>::of(name)?.read()?;
            Ok(Self { at: core::ptr::with_exposed_provenance(at), own: PhantomData })
        }
    }

    /// The counter behind [`allocated`].
    ///
    /// # Errors
    /// None.
    pub fn allocatedp() -> Result<Counter, Error> {
        Counter::of("thread.allocatedp")
    }

    /// The counter behind [`deallocated`].
    ///
    /// # Errors
    /// None.
    pub fn deallocatedp() -> Result<Counter, Error> {
        Counter::of("thread.deallocatedp")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_written_and_kept() {
        let _kept = crate::api::alloc(1);
        assert!(version::read().unwrap().starts_with("5.3.0-"));
        let before = epoch::advance().unwrap();
        let mib = epoch::mib().unwrap();
        assert_eq!((mib.read(), mib.advance()), (Ok(before), Ok(before + 1)));
        assert!(stats::allocated::read().unwrap() <= stats::active::mib().unwrap().read().unwrap());
        assert_eq!(arenas::quantum::read(), Ok(16));
        assert_eq!(opt::thp::read(), Ok("default"));
        assert_eq!(arenas::dirty_decay_ms::update(1234).unwrap(), 2000);
        assert_eq!(arenas::dirty_decay_ms::read(), Ok(1234));
        assert_eq!(arenas::dirty_decay_ms::write(-2), Err(Error::Fault));
        arenas::dirty_decay_ms::write(2000).unwrap();
        assert!(stats::resident_measured::read().unwrap() > 0);
    }

    #[test]
    fn an_index_is_changed() {
        let bin = Mib::<usize>::of("arenas.bin.0.size").unwrap();
        assert_eq!((bin.read(), bin.at(2, 7).read()), (Ok(16), Ok(128)));
        assert_eq!(bin.at(2, 72).read(), Err(Error::NoEntry));
        assert_eq!(bin.at(9, 7).read(), Ok(16));
        assert_eq!(Mib::<u32>::of("arenas.bin.0.size").unwrap().read(), Err(Error::Invalid));
        assert_eq!(Mib::<usize>::of("arenas.bins").unwrap_err(), Error::NoEntry);
        assert_eq!(Mib::<usize>::of("arena.0.name").unwrap().read(), Err(Error::Invalid));
        for no_text in ["arena.0.name", "thread.allocatedp", "epoch", "arenas"] {
            assert_eq!(Mib::<&str>::of(no_text).unwrap().read(), Err(Error::Invalid), "{no_text}");
        }
        assert_eq!(Mib::<u64>::of("arena.0.name").unwrap().advance(), Err(Error::NoEntry));
    }

    #[test]
    fn a_thread_reads_its_counters() {
        std::thread::spawn(|| {
            let _kept = crate::api::alloc(1);
            let counter = thread::allocatedp().unwrap();
            let before = counter.get();
            let block = crate::api::alloc(1000);
            let since = counter.get() - before;
            assert!((1000..2000).contains(&since), "{since}");
            let freed = thread::deallocatedp().unwrap().get();
            // SAFETY: just allocated.
            unsafe { crate::api::free(block) };
            assert_eq!(thread::deallocated::read().unwrap() - freed, since);
        })
        .join()
        .unwrap();
    }
}
