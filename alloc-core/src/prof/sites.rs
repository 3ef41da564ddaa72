//! The call stacks that recorded blocks came from, each under a number from 1. A stack that finds no
//! room has the number 0 and is counted.
use super::table::{Index, Pool, Segments, Shared, hash};
use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Most frames of a stack.
pub(crate) const MOST_FRAMES: usize = 256;
/// The stack is deeper than its frames.
pub(crate) const CUT: u32 = 1;
/// The stack could not be followed to its end.
pub(crate) const BROKEN: u32 = 2;

/// Slots of the first level.
const SLOTS: usize = 1 << 13;

#[derive(Debug)]
struct Site {
    hash: AtomicU64,
    frames: AtomicU32,
    /// Frames and flags; 0 while it is being written.
    len: AtomicU32,
}
// SAFETY: atomics.
unsafe impl Shared for Site {}

/// All sites.
#[derive(Debug)]
pub(crate) struct Sites {
    index: Index<SLOTS>,
    sites: Segments<Site, 4096, 1024>,
    frames: Pool<16384>,
    count: AtomicU32,
    lost: AtomicU64,
}

impl Sites {
    pub(crate) const fn new() -> Self {
        Self {
            index: Index::new(),
            sites: Segments::new(),
            frames: Pool::new(),
            count: AtomicU32::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// The number of this stack, new or known.
    pub(crate) fn intern(&self, frames: &[u64], flags: u32) -> u32 {
        let hash = hash(frames.iter().copied());
        let len = Self::pack(frames.len(), flags);
        let same = |id: u32| {
            self.sites.get(id as usize).is_some_and(|site| {
                site.hash.load(Relaxed) == hash
                    && site.len.load(Acquire) == len
                    && self
                        .frames
                        .load(site.frames.load(Relaxed), frames.len())
                        .eq(frames.iter().copied())
            })
        };
        let found = self.index.find_or_insert(hash, same, || self.add(frames, hash, len));
        found.unwrap_or_else(|| {
            self.lost.fetch_add(1, Relaxed);
            0
        })
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most MOST_FRAMES")]
    fn pack(frames: usize, flags: u32) -> u32 {
        (frames as u32 + 1) << 2 | flags
    }

    fn add(&self, frames: &[u64], hash: u64, len: u32) -> Option<u32> {
        let at = self.frames.store(frames.len(), frames.iter().copied())?;
        let id = self.count.fetch_add(1, Relaxed) + 1;
        let site = self.sites.ensure(id as usize)?;
        site.hash.store(hash, Relaxed);
        site.frames.store(at, Relaxed);
        site.len.store(len, Release);
        Some(id)
    }

    /// The highest number so far.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Copies the frames of a site into `out`; their number and the flags.
    pub(crate) fn read(&self, id: u32, out: &mut [u64; MOST_FRAMES]) -> Option<(usize, u32)> {
        let site = self.sites.get(id as usize)?;
        let packed = site.len.load(Acquire);
        let len = ((packed >> 2) as usize).checked_sub(1)?;
        let words = self.frames.load(site.frames.load(Relaxed), len);
        out.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        Some((len, packed & 3))
    }

    /// Stacks that found no room.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;

    #[test]
    fn a_stack_has_one_number() {
        static SITES: Sites = Sites::new();
        let a = SITES.intern(&[1, 2, 3], 0);
        assert_eq!(SITES.intern(&[1, 2, 3], 0), a);
        let others =
            [SITES.intern(&[1, 2], 0), SITES.intern(&[1, 2, 3], CUT), SITES.intern(&[], 0)];
        assert!(others.iter().all(|&id| id != a && id != 0));
        let mut frames = [0; MOST_FRAMES];
        assert_eq!(SITES.read(a, &mut frames), Some((3, 0)));
        assert_eq!(frames[..3], [1, 2, 3]);
        assert_eq!(SITES.read(others[1], &mut frames), Some((3, CUT)));
        assert_eq!(SITES.read(others[2], &mut frames), Some((0, 0)));
        assert_eq!(SITES.read(SITES.count() + 1, &mut frames), None);
        assert_eq!(SITES.read(0, &mut frames), None);
    }

    #[test]
    fn many_threads_find_the_same_stacks() {
        static SITES: Sites = Sites::new();
        let all: std::vec::Vec<std::vec::Vec<u32>> = std::thread::scope(|scope| {
            let work = || {
                (0..2000u64)
                    .map(|i| SITES.intern(&[i, i * 7, i << 32, 5][..1 + i as usize % 4], 0))
                    .collect()
            };
            let threads: std::vec::Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|ids| *ids == all[0] && !ids.contains(&0)));
        assert_eq!(SITES.lost(), 0);
        let mut frames = [0; MOST_FRAMES];
        for (i, &id) in all[0].iter().enumerate() {
            assert_eq!(SITES.read(id, &mut frames), Some((1 + i % 4, 0)));
            assert_eq!(frames[0], i as u64);
        }
    }
}
