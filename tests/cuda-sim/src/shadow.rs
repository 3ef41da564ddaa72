//! What is known of each byte of physical memory: who wrote it last, who has read it since.
//!
//! Intervals, not granules: a block is touched as a whole, so there are about as many intervals as
//! blocks, and two neighbours never blame each other. Keys are physical, so an alias through another
//! mapping is seen too.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::clock::{Clock, Epoch, Epochs};

#[derive(Clone, Debug)]
struct Piece {
    end: u64,
    write: Epoch,
    reads: Epochs,
}

/// An earlier access that the judged one is not ordered after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Conflict {
    pub(crate) earlier: Epoch,
    pub(crate) earlier_wrote: bool,
    pub(crate) at: u64,
}

/// The clocks that an access is judged by.
pub(crate) struct Known<'a> {
    pub(crate) stream: &'a Clock,
    pub(crate) host: &'a Clock,
}

impl Known<'_> {
    pub(crate) fn covers(&self, epoch: Epoch) -> bool {
        epoch.seq == 0 || self.stream.covers(epoch) || self.host.covers(epoch)
    }
}

#[derive(Default)]
pub(crate) struct Shadow {
    pieces: BTreeMap<u64, Piece>,
}

impl Shadow {
    /// Judges a read of `range` and remembers it.
    pub(crate) fn read(&mut self, range: Range<u64>, by: Epoch, known: &Known) -> Option<Conflict> {
        if let Some(piece) =
            self.pieces.get_mut(&range.start).filter(|piece| piece.end == range.end)
        {
            let conflict = unordered_write(range.start, piece, known);
            note_read(piece, by, known);
            return conflict;
        }
        self.cut(range.start);
        self.cut(range.end);
        let mut conflict = None;
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (&start, piece) in self.pieces.range_mut(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = piece.end;
            conflict = conflict.or_else(|| unordered_write(start, piece, known));
            note_read(piece, by, known);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        for gap in gaps {
            let mut reads = Epochs::default();
            reads.add(by);
            self.pieces.insert(gap.start, Piece { end: gap.end, write: Epoch::NONE, reads });
        }
        conflict
    }

    /// Judges a write of `range` and remembers it in place of all that was known.
    pub(crate) fn write(
        &mut self,
        range: Range<u64>,
        by: Epoch,
        known: &Known,
    ) -> Option<Conflict> {
        if let Some(piece) =
            self.pieces.get_mut(&range.start).filter(|piece| piece.end == range.end)
        {
            let conflict = unordered(range.start, piece, known);
            piece.write = by;
            piece.reads.clear();
            return conflict;
        }
        self.cut(range.start);
        self.cut(range.end);
        let mut conflict = None;
        let mut inside = Vec::new();
        for (&start, piece) in self.pieces.range(range.clone()) {
            conflict = conflict.or_else(|| unordered(start, piece, known));
            inside.push(start);
        }
        for start in inside {
            self.pieces.remove(&start);
        }
        self.pieces
            .insert(range.start, Piece { end: range.end, write: by, reads: Epochs::default() });
        conflict
    }

    /// Whether all accesses to `range` are known, without remembering anything: for an access of the host.
    pub(crate) fn judge(&self, range: Range<u64>, writes: bool, known: &Known) -> Option<Conflict> {
        let first = self
            .pieces
            .range(..range.start)
            .next_back()
            .filter(|(_, piece)| piece.end > range.start);
        first.into_iter().chain(self.pieces.range(range.clone())).find_map(|(&start, piece)| {
            if writes {
                unordered(start, piece, known)
            } else {
                unordered_write(start, piece, known)
            }
        })
    }

    /// The memory is gone, and its physical addresses are never used again.
    pub(crate) fn forget(&mut self, range: Range<u64>) {
        self.cut(range.start);
        self.cut(range.end);
        let inside: Vec<u64> = self.pieces.range(range).map(|(&start, _)| start).collect();
        for start in inside {
            self.pieces.remove(&start);
        }
    }

    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    fn cut(&mut self, at: u64) {
        let Some((&start, piece)) = self.pieces.range_mut(..at).next_back() else {
            return;
        };
        if start < at && at < piece.end {
            let right = piece.clone();
            piece.end = at;
            self.pieces.insert(at, right);
        }
    }
}

fn unordered_write(at: u64, piece: &Piece, known: &Known) -> Option<Conflict> {
    (!known.covers(piece.write)).then_some(Conflict {
        earlier: piece.write,
        earlier_wrote: true,
        at,
    })
}

fn unordered(at: u64, piece: &Piece, known: &Known) -> Option<Conflict> {
    let read = || {
        let earlier = piece.reads.iter().find(|epoch| !known.covers(*epoch))?;
        Some(Conflict { earlier, earlier_wrote: false, at })
    };
    unordered_write(at, piece, known).or_else(read)
}

/// A read that this one is ordered after need not be remembered: what is ordered after this one is
/// ordered after it.
fn note_read(piece: &mut Piece, by: Epoch, known: &Known) {
    if piece.reads.iter().all(|epoch| known.covers(epoch)) {
        piece.reads.clear();
    }
    piece.reads.add(by);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(slot: u32, seq: u64) -> Epoch {
        Epoch { slot, seq }
    }

    fn clock(of: &[Epoch]) -> Clock {
        let mut clock = Clock::default();
        for epoch in of {
            clock.advance(*epoch);
        }
        clock
    }

    #[test]
    fn an_unordered_overlap_is_found_and_an_ordered_one_is_not() {
        let host = Clock::default();
        let mut shadow = Shadow::default();
        let one = clock(&[epoch(1, 1)]);
        let two = clock(&[epoch(2, 1)]);
        let after_one = clock(&[epoch(1, 1), epoch(2, 2)]);
        let by = |stream| Known { stream, host: &host };
        assert_eq!(shadow.write(0..1000, epoch(1, 1), &by(&one)), None);
        assert_eq!(
            shadow.write(1000..2000, epoch(2, 1), &by(&two)),
            None,
            "neighbours do not collide"
        );
        let conflict = shadow.read(999..1001, epoch(2, 1), &by(&two)).unwrap();
        assert_eq!(
            (conflict.earlier, conflict.earlier_wrote, conflict.at),
            (epoch(1, 1), true, 999)
        );
        assert_eq!(shadow.read(0..10, epoch(2, 2), &by(&after_one)), None);
        let conflict = shadow.write(0..1000, epoch(1, 2), &by(&clock(&[epoch(1, 2)]))).unwrap();
        assert_eq!(
            (conflict.earlier, conflict.earlier_wrote),
            (epoch(2, 2), false),
            "a write after a read"
        );
    }

    #[test]
    fn what_the_host_saw_complete_is_ordered() {
        let mut shadow = Shadow::default();
        let none = Clock::default();
        let one = clock(&[epoch(1, 1)]);
        shadow.write(0..64, epoch(1, 1), &Known { stream: &one, host: &none });
        let two = clock(&[epoch(2, 1)]);
        assert!(shadow.judge(10..20, false, &Known { stream: &two, host: &none }).is_some());
        assert!(shadow.judge(10..20, true, &Known { stream: &two, host: &one }).is_none());
        assert_eq!(shadow.write(0..64, epoch(2, 1), &Known { stream: &two, host: &one }), None);
    }

    #[test]
    fn pieces_agree_with_a_byte_by_byte_model() {
        let mut rng = crate::rng::Rng::new(7);
        let mut shadow = Shadow::default();
        let mut model = vec![(Epoch::NONE, Vec::<Epoch>::new()); 64];
        let mut clocks = vec![Clock::default(); 3];
        let host = Clock::default();
        for seq in 1..4000 {
            let slot = rng.below(3) as usize;
            if rng.below(4) == 0 {
                let other = clocks[rng.below(3) as usize].clone();
                clocks[slot].join(&other);
            }
            let by = epoch(slot as u32, seq);
            clocks[slot].advance(by);
            let start = rng.below(64);
            let end = start + 1 + rng.below(64 - start);
            let known = Known { stream: &clocks[slot], host: &host };
            let writes = rng.below(2) == 0;
            let cells = &mut model[start as usize..end as usize];
            let expected = cells.iter().any(|(write, reads)| {
                !known.covers(*write) || (writes && reads.iter().any(|read| !known.covers(*read)))
            });
            for (write, reads) in cells {
                if writes {
                    *write = by;
                    reads.clear();
                } else {
                    reads.push(by);
                }
            }
            let found = if writes {
                shadow.write(start..end, by, &known)
            } else {
                shadow.read(start..end, by, &known)
            };
            assert_eq!(found.is_some(), expected, "access {seq} of {start}..{end}");
            assert!(shadow.pieces() <= 64);
        }
    }
}
