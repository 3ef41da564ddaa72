//! A server whose workers come and go while requests live on (after Larson and Krishnan, 1998): each worker
//! replaces random blocks of its table, then ends and leaves the table, blocks and all, to a worker born then.

use crate::{Case, Outcome};
use std::thread::{Scope, scope};
use thermalloc_benches::{Block, Random};

const SLOTS: usize = 5000;
const REPLACED_BY_A_WORKER: usize = 100_000;

fn worker<'scope>(
    scope: &'scope Scope<'scope, '_>,
    mut table: Vec<Block>,
    mut random: Random,
    left: usize,
) {
    for _ in 0..REPLACED_BY_A_WORKER.min(left) {
        let slot = random.below(SLOTS);
        assert_eq!(table[slot].first(), 1, "a block was overwritten");
        table[slot].free();
        table[slot] = Block::new(random.between(8, 1000));
    }
    match left.saturating_sub(REPLACED_BY_A_WORKER) {
        0 => table.iter().for_each(|b| b.free()),
        left => {
            scope.spawn(move || worker(scope, table, random, left));
        }
    }
}

pub fn larson(case: &Case) -> Outcome {
    let each = case.times(64_000_000) / case.threads;
    scope(|scope| {
        for id in 0..case.threads {
            let mut random = Random::new(id as u64 + 1);
            let table = (0..SLOTS).map(|_| Block::new(random.between(8, 1000))).collect();
            scope.spawn(move || worker(scope, table, random, each));
        }
    });
    Outcome::of(case.threads * (each + SLOTS))
}
