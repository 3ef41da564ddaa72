//! Vector clocks: what a stream's next operation is ordered after.
//!
//! A stream has a slot. An operation is an epoch: slot and number. Slots of destroyed streams are
//! used again only when all their work is known complete, so an epoch never names two operations
//! that could both be pending.

/// One operation of one stream. Number 0 is no operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Epoch {
    pub(crate) slot: u32,
    pub(crate) seq: u64,
}

impl Epoch {
    pub(crate) const NONE: Self = Self { slot: 0, seq: 0 };
}

/// For each slot the last operation that is ordered before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, slot: u32) -> u64 {
        self.0.get(slot as usize).copied().unwrap_or(0)
    }

    pub(crate) fn covers(&self, epoch: Epoch) -> bool {
        epoch.seq <= self.get(epoch.slot)
    }

    pub(crate) fn advance(&mut self, epoch: Epoch) {
        let slot = epoch.slot as usize;
        if self.0.len() <= slot {
            self.0.resize(slot + 1, 0);
        }
        self.0[slot] = self.0[slot].max(epoch.seq);
    }

    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.0.clear();
        self.0.extend_from_slice(&other.0);
    }
}

/// A few epochs, at most one a slot: the last reads of a piece of memory, the uses of a mapping.
#[derive(Clone, Debug, Default)]
pub(crate) struct Epochs {
    first: Epoch,
    others: Vec<Epoch>,
}

impl Epochs {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Epoch> + '_ {
        std::iter::once(self.first)
            .filter(|epoch| epoch.seq != 0)
            .chain(self.others.iter().copied())
    }

    pub(crate) fn add(&mut self, epoch: Epoch) {
        if self.first.seq == 0 || self.first.slot == epoch.slot {
            self.first = Epoch { slot: epoch.slot, seq: self.first.seq.max(epoch.seq) };
            return;
        }
        match self.others.iter_mut().find(|other| other.slot == epoch.slot) {
            Some(other) => other.seq = other.seq.max(epoch.seq),
            None => self.others.push(epoch),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.first = Epoch::NONE;
        self.others.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_takes_the_later_of_each_slot() {
        let mut left = Clock::default();
        left.advance(Epoch { slot: 0, seq: 5 });
        let mut right = Clock::default();
        right.advance(Epoch { slot: 2, seq: 3 });
        left.join(&right);
        assert!(left.covers(Epoch { slot: 0, seq: 5 }) && !left.covers(Epoch { slot: 0, seq: 6 }));
        assert!(left.covers(Epoch { slot: 2, seq: 3 }) && !right.covers(Epoch { slot: 0, seq: 1 }));
    }

    #[test]
    fn epochs_keep_the_last_of_each_slot() {
        let mut epochs = Epochs::default();
        for (slot, seq) in [(1, 4), (0, 2), (1, 9), (0, 1), (3, 3)] {
            epochs.add(Epoch { slot, seq });
        }
        let mut all: Vec<_> = epochs.iter().map(|epoch| (epoch.slot, epoch.seq)).collect();
        all.sort_unstable();
        assert_eq!(all, [(0, 2), (1, 9), (3, 3)]);
    }
}
