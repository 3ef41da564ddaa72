//! The recorded blocks that are live, and the sums by site and tag.
//!
//! Invariants: an entry belongs to whoever allocates or frees its block; others only read it, and see
//! by its version when they read it half written. A block adds to its sums exactly what it takes off
//! when it is freed.
use super::table::{Index, Segments, Shared, hash};
use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
    fence,
};
use thermalloc_prof_format::Block;

/// A block's words, as they are stored.
const WORDS: usize = 10;

#[derive(Debug)]
struct Entry {
    /// Odd while the entry is being written.
    version: AtomicU32,
    next_free: AtomicU32,
    /// Serial first; 0: no block.
    words: [AtomicU64; WORDS],
}
// SAFETY: atomics.
unsafe impl Shared for Entry {}

pub(super) fn pack(b: &Block) -> [u64; WORDS] {
    let where_ = u64::from(b.thread) | u64::from(b.space) << 32 | u64::from(b.device) << 40;
    [
        b.serial,
        b.time_ns,
        b.address,
        b.size,
        b.usable,
        b.weight.to_bits(),
        u64::from(b.site) | u64::from(b.tag) << 32,
        where_ | u64::from(b.flags) << 48,
        b.step,
        b.stream,
    ]
}

#[allow(clippy::cast_possible_truncation, reason = "takes words apart")]
pub(super) fn unpack(w: [u64; WORDS]) -> Block {
    Block {
        serial: w[0],
        time_ns: w[1],
        address: w[2],
        size: w[3],
        usable: w[4],
        weight: f64::from_bits(w[5]),
        site: w[6] as u32,
        tag: (w[6] >> 32) as u32,
        thread: w[7] as u32,
        space: (w[7] >> 32) as u8,
        device: (w[7] >> 40) as u8,
        flags: (w[7] >> 48) as u16,
        step: w[8],
        stream: w[9],
    }
}

/// The table of live blocks. Entry 0 is none.
#[derive(Debug)]
pub(crate) struct Live {
    entries: Segments<Entry, 4096, 1024>,
    /// The first free entry, below a count that makes each state of the list a new one.
    free: AtomicU64,
    used: AtomicU32,
    count: AtomicU64,
    serial: AtomicU64,
}

impl Live {
    pub(crate) const fn new() -> Self {
        Self {
            entries: Segments::new(),
            free: AtomicU64::new(0),
            used: AtomicU32::new(0),
            count: AtomicU64::new(0),
            serial: AtomicU64::new(0),
        }
    }

    /// Enters a block, and gives it its serial; its index, or nothing where there is no room.
    pub(crate) fn enter(&self, block: &mut Block) -> Option<u32> {
        let index = self.pop_free().or_else(|| self.new_entry())?;
        block.serial = self.serial.fetch_add(1, Relaxed) + 1;
        self.count.fetch_add(1, Relaxed);
        self.write(self.entries.get(index as usize)?, pack(block));
        Some(index)
    }

    fn new_entry(&self) -> Option<u32> {
        // Full: the count must not go on for ever. An index that finds no memory is lost.
        if self.end() as usize >= Segments::<Entry, 4096, 1024>::MOST {
            return None;
        }
        let index = self.used.fetch_add(1, Relaxed) + 1;
        self.entries.ensure(index as usize).map(|_| index)
    }

    fn pop_free(&self) -> Option<u32> {
        let mut head = self.free.load(Acquire);
        loop {
            #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
            let index = head as u32;
            if index == 0 {
                return None;
            }
            let next = self.entries.get(index as usize)?.next_free.load(Relaxed);
            let new = ((head >> 32) + 1) << 32 | u64::from(next);
            match self.free.compare_exchange(head, new, AcqRel, Acquire) {
                Ok(_) => return Some(index),
                Err(now) => head = now,
            }
        }
    }

    fn push_free(&self, index: u32, entry: &Entry) {
        let mut head = self.free.load(Relaxed);
        loop {
            #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
            entry.next_free.store(head as u32, Relaxed);
            let new = ((head >> 32) + 1) << 32 | u64::from(index);
            match self.free.compare_exchange(head, new, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    fn write(&self, entry: &Entry, words: [u64; WORDS]) {
        let version = entry.version.load(Relaxed) | 1;
        entry.version.store(version, Relaxed);
        fence(Release);
        for (to, word) in entry.words.iter().zip(words) {
            to.store(word, Relaxed);
        }
        entry.version.store(version.wrapping_add(1), Release);
    }

    /// The block of an entry whose owner the caller is.
    pub(crate) fn block(&self, index: u32) -> Option<Block> {
        let entry = self.entries.get(index as usize)?;
        let words = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(|i| entry.words[i].load(Relaxed));
        (words[0] != 0).then(|| unpack(words))
    }

    /// Changes the block of an entry whose owner the caller is.
    pub(crate) fn update(&self, index: u32, block: &Block) {
        if let Some(entry) = self.entries.get(index as usize) {
            self.write(entry, pack(block));
        }
    }

    /// Removes the block of an entry whose owner the caller is.
    pub(crate) fn leave(&self, index: u32) -> Option<Block> {
        let block = self.block(index)?;
        let entry = self.entries.get(index as usize)?;
        self.write(entry, [0; WORDS]);
        self.count.fetch_sub(1, Relaxed);
        self.push_free(index, entry);
        Some(block)
    }

    /// Live blocks by a glance.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Blocks that were ever entered.
    pub(crate) fn entered(&self) -> u64 {
        self.serial.load(Relaxed)
    }

    /// One more than the highest index that may hold a block.
    pub(crate) fn end(&self) -> u32 {
        self.used.load(Acquire) + 1
    }

    /// The block of an entry that may change meanwhile; nothing where it is none, or just changes.
    pub(crate) fn glance(&self, index: u32) -> Option<Block> {
        let entry = self.entries.get(index as usize)?;
        for _ in 0..20 {
            let before = entry.version.load(Acquire);
            let words = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(|i| entry.words[i].load(Relaxed));
            fence(Acquire);
            if before & 1 == 0 && entry.version.load(Relaxed) == before {
                return (words[0] != 0).then(|| unpack(words));
            }
        }
        None
    }
}

/// Bins of lifetimes: by time, doubling from 2 microseconds on, then by steps, doubling.
pub(crate) const TIME_BINS: usize = 32;
pub(crate) const STEP_BINS: usize = 12;

/// Fractional bits of a weighted number of blocks.
const FRACTION: f64 = 65_536.0;

/// What blocks of one site and tag in one space come to.
#[derive(Debug)]
pub(crate) struct Total {
    key: AtomicU64,
    live_blocks: AtomicU64,
    live_bytes: AtomicU64,
    all_blocks: AtomicU64,
    all_bytes: AtomicU64,
    weighted_live_blocks: AtomicU64,
    weighted_live_bytes: AtomicU64,
    weighted_all_blocks: AtomicU64,
    weighted_all_bytes: AtomicU64,
    bins: [AtomicU64; TIME_BINS + STEP_BINS],
}
// SAFETY: atomics.
unsafe impl Shared for Total {}

/// A block's share of a sum.
#[derive(Clone, Copy)]
struct Share {
    bytes: u64,
    weighted_blocks: u64,
    weighted_bytes: u64,
}

impl Share {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "positive, and casts saturate"
    )]
    fn of(block: &Block) -> Self {
        Self {
            bytes: block.size,
            weighted_blocks: (block.weight * FRACTION + 0.5) as u64,
            weighted_bytes: (block.weight * block.size as f64 + 0.5) as u64,
        }
    }
}

/// The figures of a [`Total`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) site: u32,
    pub(crate) tag: u32,
    pub(crate) space: u32,
    pub(crate) live_blocks: u64,
    pub(crate) live_bytes: u64,
    pub(crate) all_blocks: u64,
    pub(crate) all_bytes: u64,
    pub(crate) weighted_live_blocks: f64,
    pub(crate) weighted_live_bytes: f64,
    pub(crate) weighted_all_blocks: f64,
    pub(crate) weighted_all_bytes: f64,
}

impl Figures {
    /// As a record of a profile.
    pub(super) fn record(&self) -> thermalloc_prof_format::Totals {
        let f = self;
        thermalloc_prof_format::Totals {
            site: f.site,
            tag: f.tag,
            space: f.space,
            flags: 0,
            live_blocks: f.live_blocks,
            live_bytes: f.live_bytes,
            all_blocks: f.all_blocks,
            all_bytes: f.all_bytes,
            weighted_live_blocks: f.weighted_live_blocks,
            weighted_live_bytes: f.weighted_live_bytes,
            weighted_all_blocks: f.weighted_all_blocks,
            weighted_all_bytes: f.weighted_all_bytes,
        }
    }
}

/// All sums, by site, tag and space.
#[derive(Debug)]
pub(crate) struct Totals {
    index: Index<{ 1 << 13 }>,
    totals: Segments<Total, 16384, 128>,
    count: AtomicU32,
}

impl Totals {
    pub(crate) const fn new() -> Self {
        Self { index: Index::new(), totals: Segments::new(), count: AtomicU32::new(0) }
    }

    /// The sum that a block belongs to; nothing where there is no room for another.
    pub(crate) fn of(&self, block: &Block) -> Option<&'static Total> {
        // Tags have fewer than 24 bits, and so a key is never 0 in its top bit.
        let key = 1 << 63
            | u64::from(block.site) << 32
            | u64::from(block.tag) << 8
            | u64::from(block.space);
        let key_of = |id: u32| self.totals.get(id as usize).map_or(0, |t| t.key.load(Acquire));
        let id = self.index.find_or_insert(
            hash([key].into_iter()),
            |id| key_of(id) == key,
            || {
                let id = self.count.fetch_add(1, Relaxed) + 1;
                self.totals.ensure(id as usize)?.key.store(key, Release);
                Some(id)
            },
        )?;
        self.totals.get(id as usize)
    }

    /// Takes off a block that left, at `now_ns` in `step`.
    pub(crate) fn remove(&self, block: &Block, now_ns: u64, step: u64) {
        let Some(total) = self.of(block) else { return };
        let share = Share::of(block);
        total.part(share);
        let micros = now_ns.saturating_sub(block.time_ns) / 1000;
        let time = (micros.max(1).ilog2() as usize).min(TIME_BINS - 1);
        let steps = step.saturating_sub(block.step);
        let steps = if steps == 0 { 0 } else { steps.ilog2() as usize + 1 };
        for bin in [time, TIME_BINS + steps.min(STEP_BINS - 1)] {
            total.bins[bin].fetch_add(share.weighted_blocks, Relaxed);
        }
    }

    /// Replaces what a live block is.
    pub(crate) fn change(&self, old: &Block, new: &Block) {
        if let Some(total) = self.of(old) {
            total.part(Share::of(old));
        }
        if let Some(total) = self.of(new) {
            total.join(Share::of(new));
        }
    }

    /// One more than the highest number of a sum.
    pub(crate) fn end(&self) -> u32 {
        self.count.load(Acquire) + 1
    }

    /// The figures of a sum.
    pub(crate) fn read(&self, id: u32) -> Option<(Figures, &'static Total)> {
        let total = self.totals.get(id as usize)?;
        let key = total.key.load(Acquire);
        if key == 0 {
            return None;
        }
        let get = |figure: &AtomicU64| figure.load(Relaxed);
        #[allow(clippy::cast_precision_loss, reason = "an estimate")]
        let blocks = |figure: &AtomicU64| get(figure) as f64 / FRACTION;
        #[allow(clippy::cast_precision_loss, reason = "an estimate")]
        let bytes = |figure: &AtomicU64| get(figure) as f64;
        #[allow(clippy::cast_possible_truncation, reason = "takes the key apart")]
        let figures = Figures {
            site: (key >> 32 & 0x7FFF_FFFF) as u32,
            tag: (key as u32) >> 8,
            space: (key & 0xFF) as u32,
            live_blocks: get(&total.live_blocks),
            live_bytes: get(&total.live_bytes),
            all_blocks: get(&total.all_blocks),
            all_bytes: get(&total.all_bytes),
            weighted_live_blocks: blocks(&total.weighted_live_blocks),
            weighted_live_bytes: bytes(&total.weighted_live_bytes),
            weighted_all_blocks: blocks(&total.weighted_all_blocks),
            weighted_all_bytes: bytes(&total.weighted_all_bytes),
        };
        Some((figures, total))
    }
}

impl Total {
    /// Adds a block that was entered.
    pub(crate) fn add(&self, block: &Block) {
        let share = Share::of(block);
        self.all_blocks.fetch_add(1, Relaxed);
        self.all_bytes.fetch_add(share.bytes, Relaxed);
        self.weighted_all_blocks.fetch_add(share.weighted_blocks, Relaxed);
        self.weighted_all_bytes.fetch_add(share.weighted_bytes, Relaxed);
        self.join(share);
    }

    fn join(&self, share: Share) {
        self.live_blocks.fetch_add(1, Relaxed);
        self.live_bytes.fetch_add(share.bytes, Relaxed);
        self.weighted_live_blocks.fetch_add(share.weighted_blocks, Relaxed);
        self.weighted_live_bytes.fetch_add(share.weighted_bytes, Relaxed);
    }

    fn part(&self, share: Share) {
        self.live_blocks.fetch_sub(1, Relaxed);
        self.live_bytes.fetch_sub(share.bytes, Relaxed);
        self.weighted_live_blocks.fetch_sub(share.weighted_blocks, Relaxed);
        self.weighted_live_bytes.fetch_sub(share.weighted_bytes, Relaxed);
    }

    /// Freed blocks by lifetime, as the bits of floating-point numbers; nothing where there are none.
    pub(crate) fn lifetimes(&self) -> Option<[u64; TIME_BINS + STEP_BINS]> {
        let mut bins = [0; TIME_BINS + STEP_BINS];
        let mut any = false;
        for (to, bin) in bins.iter_mut().zip(&self.bins) {
            let weighted = bin.load(Relaxed);
            any |= weighted > 0;
            #[allow(clippy::cast_precision_loss, reason = "an estimate")]
            let blocks = weighted as f64 / FRACTION;
            *to = blocks.to_bits();
        }
        any.then_some(bins)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn block(n: u64) -> Block {
        Block {
            time_ns: n,
            address: n << 12,
            size: n * 10,
            usable: n * 11,
            weight: 1.5,
            site: 3,
            tag: u32::try_from(n % 2).unwrap(),
            thread: 9,
            space: 2,
            device: 200,
            flags: 0xABCD,
            step: n / 4,
            stream: u64::MAX - n,
            ..Block::default()
        }
    }

    #[test]
    fn blocks_come_and_go() {
        static LIVE: Live = Live::new();
        let mut blocks: Vec<_> = (1..=3000).map(block).collect();
        let indices: Vec<_> = blocks.iter_mut().map(|b| LIVE.enter(b).unwrap()).collect();
        assert_eq!(LIVE.count(), 3000);
        for (&index, block) in indices.iter().zip(&blocks) {
            assert_eq!(LIVE.glance(index), Some(*block));
            assert_eq!(LIVE.block(index), Some(*block));
        }
        let changed = Block { size: 1, ..blocks[7] };
        LIVE.update(indices[7], &changed);
        assert_eq!(LIVE.leave(indices[7]), Some(changed));
        assert_eq!((LIVE.leave(indices[7]), LIVE.glance(indices[7])), (None, None));
        let mut again = block(5);
        assert_eq!(LIVE.enter(&mut again), Some(indices[7]), "its entry is used again");
        assert_eq!(again.serial, 3001, "and its serial is not");
        assert_eq!((LIVE.count(), LIVE.end(), LIVE.glance(0)), (3000, 3001, None));
    }

    #[test]
    fn a_glance_sees_whole_blocks_while_threads_change_them() {
        static LIVE: Live = Live::new();
        static OVER: AtomicU32 = AtomicU32::new(0);
        static SEEN: AtomicU32 = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 1..=3 {
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for n in 0..30_000u64 {
                        let mut b = block(n * 4 + thread);
                        mine.push((LIVE.enter(&mut b).unwrap(), b));
                        if mine.len() > 20 {
                            let (index, block) = mine.swap_remove(n as usize % 20);
                            assert_eq!(LIVE.leave(index), Some(block), "nobody else had it");
                        }
                    }
                    // Some are there until the other side has had its turn.
                    while SEEN.load(Relaxed) == 0 {
                        std::thread::yield_now();
                    }
                    mine.into_iter().for_each(|(index, b)| assert_eq!(LIVE.leave(index), Some(b)));
                    OVER.fetch_add(1, Release);
                });
            }
            while OVER.load(Acquire) < 3 {
                for b in (0..LIVE.end()).filter_map(|index| LIVE.glance(index)) {
                    assert_eq!(b, Block { serial: b.serial, ..block(b.time_ns) }, "torn");
                    SEEN.fetch_add(1, Relaxed);
                }
            }
        });
        assert_eq!(LIVE.count(), 0);
        assert!(LIVE.end() <= 64, "entries are used again: {}", LIVE.end());
    }

    #[test]
    fn sums_come_back_to_zero() {
        static TOTALS: Totals = Totals::new();
        let blocks: Vec<_> = (1..=1000).map(block).collect();
        blocks.iter().for_each(|b| TOTALS.of(b).unwrap().add(b));
        let read = || -> Vec<_> { (0..TOTALS.end()).filter_map(|id| TOTALS.read(id)).collect() };
        let all = read();
        assert_eq!(all.len(), 2);
        let sum = |figure: fn(&Figures) -> f64| all.iter().map(|(f, _)| figure(f)).sum::<f64>();
        let bytes: u64 = blocks.iter().map(|b| b.size).sum();
        assert_eq!(sum(|f| f.live_bytes as f64), bytes as f64);
        assert_eq!(sum(|f| f.weighted_all_blocks), 1500.0);
        assert!((sum(|f| f.weighted_live_bytes) - bytes as f64 * 1.5).abs() < 1000.0);
        assert_eq!((all[0].0.site, all[0].0.tag, all[0].0.space), (3, 1, 2));
        for (i, b) in blocks.iter().enumerate() {
            let new = Block { tag: 9, size: 1, ..*b };
            let b = if i % 2 == 0 {
                TOTALS.change(b, &new);
                &new
            } else {
                b
            };
            TOTALS.remove(b, b.time_ns + 3_000_000, b.step + 5);
        }
        for (figures, total) in read() {
            assert_eq!((figures.live_blocks, figures.live_bytes), (0, 0));
            assert_eq!((figures.weighted_live_blocks, figures.weighted_live_bytes), (0.0, 0.0));
            if let Some(bins) = total.lifetimes() {
                let bins = bins.map(f64::from_bits);
                // 3 ms is from 2048 us to 4096 us; 5 steps are from 4 to 7.
                assert_eq!(bins[11], bins[TIME_BINS + 3]);
                assert_eq!(bins.iter().sum::<f64>(), 2.0 * bins[11]);
            }
        }
    }
}
