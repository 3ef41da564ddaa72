//! The figures that the tree reads: those of one moment, until `epoch` is written.
//!
//! Invariant: a figure that was read stays the same until the epoch is advanced. Figures by arena and
//! by class take a walk over all extents; they are looked up when they are first asked for, and kept
//! for two: all arenas together, and the last one.

use super::super::stats::{self, Stats};
use super::{Error, Got};
use crate::explicit::{self, ArenaStats, ClassStats, Classes, Which};
use crate::extent::page_map::LG_PAGE;
use crate::extent::{Age, State};
use crate::front::size_class::{CLASSES, SLAB_CLASSES, SizeClass, class_bytes};
use crate::process::HEAP;
use crate::sync::lock::{Mutex, RawLock};

/// Classes above the slabs', and one for all that is larger.
pub(super) const LEXTENTS: usize = CLASSES - SLAB_CLASSES + 1;
/// Sizes of free pieces, four to a doubling: up to 4 TiB.
pub(super) const EXTENTS: usize = 116;
/// As many as jemalloc has.
pub(super) const HPA_SIZES: usize = 64;
/// The largest block, bytes.
const LARGEST: usize = 4 << 40;

/// What a free piece is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Free {
    Dirty,
    Muzzy,
    Clean,
}

#[derive(Clone, Copy)]
struct Pieces {
    count: u64,
    pages: u64,
}

struct Figures {
    /// 0: nothing was read yet.
    epoch: u64,
    stats: Stats,
    all: Slot,
    last: Slot,
    /// Of which epoch the free pieces are.
    pieces_epoch: u64,
    pieces: [[Pieces; 3]; EXTENTS],
}

struct Slot {
    which: Which,
    /// Of which epoch its figures are; 0: there are none.
    arena_epoch: u64,
    class_epoch: u64,
    arena: Option<ArenaStats>,
    classes: Classes,
}

const NO_CLASS: ClassStats = ClassStats {
    nmalloc: 0,
    ndalloc: 0,
    nfills: 0,
    nflushes: 0,
    curregs: 0,
    bytes: 0,
    nslabs: 0,
    curslabs: 0,
    nonfull_slabs: 0,
    pages: 0,
};

impl Slot {
    const fn new(which: Which) -> Self {
        Slot {
            which,
            arena_epoch: 0,
            class_epoch: 0,
            arena: None,
            classes: [NO_CLASS; CLASSES + 2],
        }
    }
}

static FIGURES: Mutex<Figures> = Mutex::new(Figures {
    epoch: 0,
    stats: Stats::ZERO,
    all: Slot::new(Which::All),
    last: Slot::new(Which::One(0)),
    pieces_epoch: 0,
    pieces: [[Pieces { count: 0, pages: 0 }; 3]; EXTENTS],
});

/// The lock, which comes before all locks of the layers below.
pub(crate) fn lock() -> &'static RawLock {
    FIGURES.raw()
}

impl Figures {
    fn advance(&mut self) {
        self.epoch += 1;
        self.stats = stats::snapshot();
    }

    fn begin(&mut self) {
        if self.epoch == 0 {
            self.advance();
        }
    }

    fn slot(&mut self, which: Which) -> &mut Slot {
        if which == Which::All {
            return &mut self.all;
        }
        if self.last.which != which {
            self.last.which = which;
            self.last.arena_epoch = 0;
            self.last.class_epoch = 0;
        }
        &mut self.last
    }

    fn count_pieces(&mut self) {
        self.pieces = [[Pieces { count: 0, pages: 0 }; 3]; EXTENTS];
        HEAP.pages.for_each_free(|e| {
            let kind = match (e.state(), e.age()) {
                (State::Clean, _) => Free::Clean,
                (_, Age::Muzzy) => Free::Muzzy,
                _ => Free::Dirty,
            };
            let of_size = self.pieces.get_mut(extent_index(e.pages()));
            if let Some(pieces) = of_size.and_then(|kinds| kinds.get_mut(kind as usize)) {
                pieces.count += 1;
                pieces.pages += u64::from(e.pages());
            }
        });
        self.pieces_epoch = self.epoch;
    }
}

/// Takes new figures.
pub(super) fn advance() {
    FIGURES.lock().advance();
}

pub(super) fn epoch() -> u64 {
    let mut figures = FIGURES.lock();
    figures.begin();
    figures.epoch
}

pub(super) fn total(get: fn(&Stats) -> u64) -> Got {
    let mut figures = FIGURES.lock();
    figures.begin();
    Ok(get(&figures.stats))
}

pub(super) fn row(row: &stats::Row) -> Got {
    let mut figures = FIGURES.lock();
    figures.begin();
    let stats = figures.stats;
    drop(figures);
    Ok(row.get(&stats))
}

pub(super) fn arena(which: Which, get: fn(&ArenaStats) -> u64) -> Got {
    let mut figures = FIGURES.lock();
    figures.begin();
    let epoch = figures.epoch;
    let slot = figures.slot(which);
    if slot.arena_epoch != epoch {
        slot.arena = explicit::stats(which);
        slot.arena_epoch = epoch;
    }
    slot.arena.as_ref().map(get).ok_or(Error::NoEntry)
}

pub(super) fn class(which: Which, index: usize, get: fn(&ClassStats) -> u64) -> Got {
    let mut figures = FIGURES.lock();
    figures.begin();
    let epoch = figures.epoch;
    let slot = figures.slot(which);
    if slot.class_epoch != epoch {
        if !explicit::class_stats(which, &mut slot.classes) {
            return Err(Error::NoEntry);
        }
        slot.class_epoch = epoch;
    }
    slot.classes.get(index).map(get).ok_or(Error::NoEntry)
}

/// Free pieces of a size, or their bytes, of the pages that the automatic arenas share.
pub(super) fn free_pieces(which: Which, index: usize, kind: Free, bytes: bool) -> Got {
    if !matches!(which, Which::All | Which::One(0)) {
        return Ok(0);
    }
    let mut figures = FIGURES.lock();
    figures.begin();
    if figures.pieces_epoch != figures.epoch {
        figures.count_pieces();
    }
    let kinds = figures.pieces.get(index).ok_or(Error::NoEntry)?;
    let pieces = kinds.get(kind as usize).ok_or(Error::NoEntry)?;
    Ok(if bytes { pieces.pages << LG_PAGE } else { pieces.count })
}

/// Bytes of the blocks of a class; of the one above all, the most that there may be.
pub(super) fn class_size(class: usize) -> usize {
    match SizeClass::try_from(class) {
        Ok(code) if class <= CLASSES => class_bytes(code),
        _ => LARGEST,
    }
}

/// The size of free pieces that `pages` belong to, rounded down.
fn extent_index(pages: u32) -> usize {
    let pages = pages.max(1);
    if pages < 4 {
        return pages as usize - 1;
    }
    let doublings = pages.ilog2() - 2;
    (4 * doublings + 3 + (pages >> doublings) - 4) as usize
}

/// Bytes of that size.
pub(crate) fn extent_bytes(index: usize) -> usize {
    let pages = match index.checked_sub(3) {
        Some(step) => (4 + step % 4) << (step / 4),
        None => index + 1,
    };
    pages << LG_PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_pieces_belong_to_the_largest_size_that_they_hold() {
        for pages in (1..70_000).chain([1 << 29, (1 << 30) - 1, 1 << 30]) {
            let index = extent_index(pages);
            let bytes = (pages as usize) << LG_PAGE;
            assert!(extent_bytes(index) <= bytes && bytes < extent_bytes(index + 1), "{pages}");
            assert!(index < EXTENTS, "{pages}");
        }
        assert_eq!(extent_bytes(EXTENTS - 1), LARGEST);
    }

    #[test]
    fn classes_have_sizes() {
        assert_eq!((class_size(1), class_size(SLAB_CLASSES)), (16, 32 << 10));
        assert_eq!((class_size(CLASSES - 1), class_size(CLASSES)), (1 << 20, 2 << 20));
        assert_eq!(class_size(CLASSES + 1), LARGEST);
    }
}
