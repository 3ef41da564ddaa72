//! Free blocks by size: one list for each size up to 2048 units, 64 for each doubling above. Two
//! levels of bits find the first list that is long enough, so that best fit costs a few loads.
//!
//! Invariant: a bit is set where its list is not empty.

use crate::block::{Block, BlockId};

/// Sizes of up to this many units have a list of their own.
const EXACT: u64 = 2048;
const LG_EXACT: u32 = 11;
/// Lists for each doubling above.
const STEPS: u64 = 64;
const LG_STEPS: u32 = 6;
const DOUBLINGS: u64 = 20;
const BINS: usize = (EXACT + DOUBLINGS * STEPS) as usize;
const WORDS: usize = BINS.div_ceil(64);
/// How far a list is searched or sorted.
const WALK: usize = 32;

/// The lists of one kind of memory.
pub(crate) struct Bins {
    summary: u64,
    words: [u64; WORDS],
    heads: Box<[BlockId; BINS]>,
    lg_unit: u32,
    /// Whether a list is kept by address: the lowest block first keeps memory in few places.
    sorted: bool,
}

const _: () = assert!(WORDS <= 64);

impl Bins {
    pub(crate) fn new(lg_unit: u32, sorted: bool) -> Self {
        Self { summary: 0, words: [0; WORDS], heads: Box::new([0; BINS]), lg_unit, sorted }
    }

    #[inline]
    fn index(&self, bytes: u64) -> usize {
        let units = bytes >> self.lg_unit;
        if units < EXACT {
            return units as usize;
        }
        let lg = units.ilog2();
        let step = (units >> (lg - LG_STEPS)) - STEPS;
        let index = EXACT + u64::from(lg - LG_EXACT) * STEPS + step;
        (index as usize).min(BINS - 1)
    }

    #[inline]
    fn first_from(&self, index: usize) -> Option<usize> {
        let word = index / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.words[word] & (!0 << (index % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let above = if word + 1 < 64 { self.summary & (!0 << (word + 1)) } else { 0 };
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    /// The smallest free block of at least `bytes`, and of those the lowest; 0 where there is none.
    #[inline]
    pub(crate) fn find(&self, blocks: &[Block], bytes: u64) -> BlockId {
        let index = self.index(bytes);
        let from = if index < EXACT as usize {
            index
        } else {
            let mut at = self.heads[index];
            for _ in 0..WALK {
                if at == 0 {
                    break;
                }
                let block = &blocks[at as usize];
                if block.bytes >= bytes {
                    return at;
                }
                at = block.bin_next;
            }
            index + 1
        };
        match self.first_from(from) {
            // The last list is for all sizes beyond.
            Some(i) if i + 1 < BINS || blocks[self.heads[i] as usize].bytes >= bytes => {
                self.heads[i]
            }
            _ => 0,
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, blocks: &mut [Block], id: BlockId) {
        let bytes = blocks[id as usize].bytes;
        let index = self.index(bytes);
        let (mut before, mut after) = (0, self.heads[index]);
        if self.sorted {
            let key = (bytes, blocks[id as usize].addr);
            for _ in 0..WALK {
                if after == 0 {
                    break;
                }
                let other = &blocks[after as usize];
                if (other.bytes, other.addr) > key {
                    break;
                }
                before = after;
                after = other.bin_next;
            }
        }
        let block = &mut blocks[id as usize];
        block.bin_prev = before;
        block.bin_next = after;
        if after != 0 {
            blocks[after as usize].bin_prev = id;
        }
        if before != 0 {
            blocks[before as usize].bin_next = id;
        } else {
            self.heads[index] = id;
            self.words[index / 64] |= 1 << (index % 64);
            self.summary |= 1 << (index / 64);
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut [Block], id: BlockId) {
        let block = &blocks[id as usize];
        let (before, after, bytes) = (block.bin_prev, block.bin_next, block.bytes);
        if after != 0 {
            blocks[after as usize].bin_prev = before;
        }
        if before != 0 {
            blocks[before as usize].bin_next = after;
            return;
        }
        let index = self.index(bytes);
        self.heads[index] = after;
        if after == 0 {
            self.words[index / 64] &= !(1 << (index % 64));
            if self.words[index / 64] == 0 {
                self.summary &= !(1 << (index / 64));
            }
        }
    }

    /// All free blocks, from the largest list down.
    pub(crate) fn largest_first<'a>(
        &'a self,
        blocks: &'a [Block],
    ) -> impl Iterator<Item = BlockId> + 'a {
        let lists = (0..WORDS).rev().flat_map(move |word| {
            let bits = self.words[word];
            (0..64).rev().filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 64 + bit)
        });
        lists.flat_map(move |index| {
            let mut at = self.heads[index];
            std::iter::from_fn(move || {
                let id = at;
                (id != 0).then(|| {
                    at = blocks[id as usize].bin_next;
                    id
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::State;

    #[test]
    fn the_best_fit_is_found_among_blocks_that_come_and_go() {
        let mut bins = Bins::new(15, true);
        let mut blocks = vec![Block::default()];
        for i in 1..200u64 {
            let bytes = (1 << 15) * (1 + i * i * 7 % 40_000);
            blocks.push(Block { addr: i << 40, bytes, state: State::Free, ..Block::default() });
        }
        let mut free = std::collections::BTreeSet::new();
        let mut x = 7u64;
        for _ in 0..50_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let id = (1 + x % 199) as BlockId;
            let key = (blocks[id as usize].bytes, id);
            if free.remove(&key) {
                bins.remove(&mut blocks, id);
            } else {
                free.insert(key);
                bins.insert(&mut blocks, id);
            }
            let want = (1 << 15) * (1 + (x >> 20) % 50_000);
            let best = free.range((want, 0)..).next().map_or(0, |&(bytes, _)| bytes);
            let found = bins.find(&blocks, want);
            assert_eq!(if found == 0 { 0 } else { blocks[found as usize].bytes }, best);
        }
        assert_eq!(bins.largest_first(&blocks).count(), free.len());
    }
}
