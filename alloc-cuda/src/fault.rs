//! Faults that tests plant, to show that they would be seen. Without the feature `planted-faults`
//! none exists and the questions for them vanish.

macro_rules! faults {
    ($($name:ident = $number:literal, $doc:literal;)*) => {
        $(#[doc = $doc] pub const $name: u32 = $number;)*

        /// All, with what they do.
        pub const ALL: &[(u32, &str)] = &[$(($number, $doc)),*];
    };
}

faults! {
    MISSING_WAIT = 1, "A reuse on another stream inserts no wait.";
    EARLY_REUSE = 2, "A block that waits for another stream counts as settled at once.";
    LOST_EVENT = 3, "An epoch is closed without its event being recorded anew.";
    DOUBLE_FREE = 4, "A second free of a block is taken for a first.";
    EARLY_UNMAP = 5, "Chunks are unmapped without asking whether their last use is complete.";
    LOST_USE = 6, "A use on a further stream is not noted.";
    NO_EPOCH = 7, "A free block of another stream is taken whatever its epoch.";
    WRONG_SEEN = 8, "A stream is thought to be past an epoch that it did not wait for.";
    OLD_EPOCH = 9, "A block is freed with the epoch before.";
    OVERLAP = 10, "The rest of a split begins within its head.";
    EARLY_EVENT = 11, "An event is recorded again while its epoch is not complete.";
    STALE_VIEW = 12, "A stitched block is used again though its parts are in use.";
    LOST_BYTES = 13, "A free of 4096 bytes is booked wrongly.";
}

#[cfg(feature = "planted-faults")]
static PLANTED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Plants a fault in this process; 0 takes it out.
#[cfg(feature = "planted-faults")]
pub fn plant(fault: u32) {
    PLANTED.store(fault, std::sync::atomic::Ordering::SeqCst);
}

#[cfg(feature = "planted-faults")]
#[inline]
pub(crate) fn planted(fault: u32) -> bool {
    PLANTED.load(std::sync::atomic::Ordering::Relaxed) == fault
}

#[cfg(not(feature = "planted-faults"))]
#[inline(always)]
pub(crate) fn planted(_: u32) -> bool {
    false
}

#[cfg(feature = "planted-faults")]
thread_local! {
    static LOCKS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Heaps that this thread has locked.
#[cfg(feature = "planted-faults")]
pub fn locks_held() -> u32 {
    LOCKS.with(std::cell::Cell::get)
}

/// Counts a lock of a heap, where tests ask for that.
#[derive(Debug)]
pub(crate) struct Locked(());

impl Locked {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        #[cfg(feature = "planted-faults")]
        LOCKS.with(|locks| locks.set(locks.get() + 1));
        Self(())
    }
}

#[cfg(feature = "planted-faults")]
impl Drop for Locked {
    fn drop(&mut self) {
        LOCKS.with(|locks| locks.set(locks.get() - 1));
    }
}
