//! Tables of the profiler in memory of the allocator's own: they grow by segments, are never given
//! back and are used without a lock. An index that was handed out stays valid.
use core::ptr::null_mut;

use super::map;
use crate::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// A type whose zero bytes are a value, and which threads share: atomics.
///
/// # Safety
/// It is so.
pub(crate) unsafe trait Shared: Sync {}

// SAFETY: an atomic.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU64 {}

/// At most `N` segments of `PER` entries.
#[derive(Debug)]
pub(crate) struct Segments<T, const N: usize, const PER: usize> {
    segments: [AtomicPtr<T>; N],
}

impl<T: Shared + 'static, const N: usize, const PER: usize> Segments<T, N, PER> {
    pub(crate) const fn new() -> Self {
        Self { segments: [const { AtomicPtr::new(null_mut()) }; N] }
    }

    /// Entries that there can be.
    pub(crate) const MOST: usize = N * PER;

    /// The entry, if it was ever ensured.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&'static T> {
        let segment = self.segments.get(index / PER)?.load(Acquire);
        if segment.is_null() {
            return None;
        }
        // SAFETY: the segment has `PER` entries, zeroed when new, and stays.
        Some(unsafe { &*segment.wrapping_add(index % PER) })
    }

    /// The entry; nothing where memory or indices are out.
    #[inline]
    pub(crate) fn ensure(&self, index: usize) -> Option<&'static T> {
        self.get(index).or_else(|| self.grow(index))
    }

    #[cold]
    fn grow(&self, index: usize) -> Option<&'static T> {
        let slot = self.segments.get(index / PER)?;
        let fresh = map(PER * size_of::<T>()).cast::<T>();
        if fresh.is_null() {
            return None;
        }
        // Who comes second has mapped in vain: once in a segment's life, and not worth a lock.
        let _ = slot.compare_exchange(null_mut(), fresh, AcqRel, Acquire);
        self.get(index)
    }

    #[cfg(test)]
    fn segments(&self) -> usize {
        self.segments.iter().filter(|s| !s.load(Relaxed).is_null()).count()
    }
}

/// An index by hash: slots hold entry numbers of a table beside it, below a part of their hash. It grows by
/// levels, each four times the one before.
///
/// Invariant: a slot is only ever filled. So what is not found among its slots of a level, one of which is
/// empty, is in no later level either.
#[derive(Debug)]
pub(crate) struct Index<const SLOTS: usize> {
    levels: [AtomicPtr<AtomicU64>; LEVELS],
}

const LEVELS: usize = 6;
/// Slots of a level, one after the other, in which an entry may lie.
const PROBES: usize = 32;

impl<const SLOTS: usize> Index<SLOTS> {
    pub(crate) const fn new() -> Self {
        Self { levels: [const { AtomicPtr::new(null_mut()) }; LEVELS] }
    }

    fn slots(&self, level: usize) -> Option<&'static [AtomicU64]> {
        let len = SLOTS << (2 * level);
        let slot = &self.levels[level];
        let mut slots = slot.load(Acquire);
        if slots.is_null() {
            let fresh: *mut AtomicU64 = map(len * size_of::<AtomicU64>()).cast();
            if fresh.is_null() {
                return None;
            }
            slots = match slot.compare_exchange(null_mut(), fresh, AcqRel, Acquire) {
                Ok(_) => fresh,
                Err(other) => other,
            };
        }
        // SAFETY: the mapping has that many words, zeroed when new, and stays.
        Some(unsafe { core::slice::from_raw_parts(slots, len) })
    }

    /// The entry for which `is` holds among those of `hash`; else the one that `make` makes, which may be
    /// nothing. Two threads at the same time may make one each: one of the two is then never found.
    pub(crate) fn find_or_insert(
        &self,
        hash: u64,
        is: impl Fn(u32) -> bool,
        make: impl FnOnce() -> Option<u32>,
    ) -> Option<u32> {
        let mark = hash & !u64::from(u32::MAX);
        let mut made = None;
        let mut make = Some(make);
        for level in 0..LEVELS {
            let slots = self.slots(level)?;
            for probe in 0..PROBES {
                #[allow(clippy::cast_possible_truncation, reason = "reduced to the slots")]
                let slot = &slots[(hash as usize).wrapping_add(probe) % slots.len()];
                let mut found = slot.load(Acquire);
                if found == 0 {
                    if let Some(make) = make.take() {
                        made = make();
                    }
                    match slot.compare_exchange(0, mark | u64::from(made?), Release, Acquire) {
                        Ok(_) => return made,
                        Err(other) => found = other,
                    }
                }
                #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
                let entry = found as u32;
                if found & !u64::from(u32::MAX) == mark && is(entry) {
                    return Some(entry);
                }
            }
        }
        None
    }
}

/// A hash of words (murmur's finaliser over each).
pub(crate) fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0x2545_F491_4F6C_DD1D, |hash, word| {
        let mut h = hash.rotate_left(5) ^ word;
        h = h.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        h ^ h >> 32
    })
}

/// Words that are stored one after the other and never change: stacks, names.
#[derive(Debug)]
pub(crate) struct Pool<const N: usize> {
    words: Segments<AtomicU64, N, POOL_WORDS>,
    used: AtomicU64,
}

const POOL_WORDS: usize = 8192;

impl<const N: usize> Pool<N> {
    pub(crate) const fn new() -> Self {
        Self { words: Segments::new(), used: AtomicU64::new(1) }
    }

    /// Stores `len` words, at most a segment of them; where they are.
    pub(crate) fn store(&self, len: usize, words: impl Iterator<Item = u64>) -> Option<u32> {
        let at = self.room(len)?;
        for (i, word) in words.take(len).enumerate() {
            self.words.ensure(at as usize + i)?.store(word, Relaxed);
        }
        Some(at)
    }

    fn room(&self, len: usize) -> Option<u32> {
        debug_assert!(len <= POOL_WORDS);
        let len = len as u64;
        let mut used = self.used.load(Relaxed);
        loop {
            let segment = POOL_WORDS as u64;
            let at =
                if used % segment + len > segment { used.next_multiple_of(segment) } else { used };
            if at + len > (N * POOL_WORDS) as u64 {
                return None;
            }
            match self.used.compare_exchange(used, at + len, Relaxed, Relaxed) {
                Ok(_) => return u32::try_from(at).ok(),
                Err(now) => used = now,
            }
        }
    }

    /// The words from `at` on.
    pub(crate) fn load(&self, at: u32, len: usize) -> impl Iterator<Item = u64> {
        (0..len).map(move |i| self.words.get(at as usize + i).map_or(0, |word| word.load(Relaxed)))
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::sync::Mutex;
    use std::vec::Vec;

    #[test]
    fn segments_grow_and_end() {
        static TABLE: Segments<AtomicU32, 3, 100> = Segments::new();
        assert!(TABLE.get(5).is_none());
        TABLE.ensure(5).unwrap().store(7, Relaxed);
        assert_eq!(TABLE.get(5).unwrap().load(Relaxed), 7);
        assert_eq!(TABLE.segments(), 1);
        assert!(TABLE.ensure(299).is_some() && TABLE.ensure(300).is_none());
        assert_eq!((TABLE.segments(), Segments::<AtomicU32, 3, 100>::MOST), (2, 300));
    }

    #[test]
    fn threads_find_what_others_inserted() {
        static INDEX: Index<4096> = Index::new();
        static VALUES: Segments<AtomicU64, 64, 256> = Segments::new();
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let value = |entry: u32| VALUES.get(entry as usize).unwrap().load(Acquire);
        let insert = |key: u64| {
            let make = || {
                let entry = NEXT.fetch_add(1, Relaxed);
                VALUES.ensure(entry as usize)?.store(key, Release);
                Some(entry)
            };
            // Few hashes: that they collide is the point.
            INDEX.find_or_insert(key % 61, |entry| value(entry) == key, make).unwrap()
        };
        let found = Mutex::new(HashMap::<u64, Vec<u32>>::new());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for key in 1..=150 {
                        let entry = insert(key);
                        assert_eq!(value(entry), key);
                        found.lock().unwrap().entry(key).or_default().push(entry);
                    }
                });
            }
        });
        for (key, entries) in found.into_inner().unwrap() {
            assert_eq!(entries.len(), 4);
            assert!(entries.iter().all(|&e| e == entries[0]), "{key}: {entries:?}");
        }
    }

    #[test]
    fn an_index_grows_by_levels_and_ends() {
        static INDEX: Index<64> = Index::new();
        // One hash, again and again: as many as its slots of all levels.
        const MOST: u32 = (LEVELS * PROBES) as u32;
        let insert = |key: u32| INDEX.find_or_insert(9, |e| e == key, || Some(key));
        for key in 1..=MOST {
            assert_eq!(insert(key), Some(key));
        }
        assert_eq!(insert(MOST + 1), None);
        assert!((1..=MOST).all(|key| insert(key) == Some(key)), "each is found again");
        // Many hashes: none is refused as long as the last level is nearly empty.
        static LARGE: Index<64> = Index::new();
        let find = |key: u32, made: Option<u32>| {
            LARGE.find_or_insert(hash([u64::from(key)].into_iter()), |e| e == key, || made)
        };
        assert!((1..=40_000).all(|key| find(key, Some(key)) == Some(key)));
        assert!((1..=40_000).all(|key| find(key, None) == Some(key)));
        assert_eq!(find(40_001, None), None);
    }

    #[test]
    fn pools_keep_words_together() {
        static POOL: Pool<2> = Pool::new();
        let mut stored = Vec::new();
        while let Some(at) = POOL.store(100, 0..100) {
            stored.push(at);
        }
        assert_eq!(stored.len(), 2 * (POOL_WORDS / 100));
        for at in stored {
            assert!(POOL.load(at, 100).eq(0..100));
            assert_eq!(at as usize / POOL_WORDS, (at as usize + 99) / POOL_WORDS);
        }
    }

    #[test]
    fn hashes_differ() {
        let a = hash([1, 2, 3].into_iter());
        assert_ne!(a, hash([1, 3, 2].into_iter()));
        assert_ne!(a, hash([1, 2].into_iter()));
        let low: std::collections::HashSet<u64> =
            (0..1000u64).map(|i| hash([i << 4].into_iter()) % 65_536).collect();
        assert!(low.len() > 950);
    }
}
