//! Blocks that another thread frees: one way, from producers to consumers (after xmalloc-test by Lever and
//! Boreham, 2000), and both ways, where all threads trade batches (after MicroQuill's sh8bench).

use crate::{Case, Outcome};
use std::sync::{Mutex, PoisonError};
use std::thread::scope;
use thermalloc_benches::{Block, Pipe, Random};

/// Half of the threads only allocate, the others only free.
pub fn xmalloc(case: &Case) -> Outcome {
    const BATCH: usize = 512;
    let sides = (case.threads / 2).max(1);
    let batches = case.times(24_000_000) / BATCH / sides + 1;
    let pipe = &Pipe::shared(8 * sides, BATCH, sides);
    scope(|scope| {
        for id in 0..sides {
            scope.spawn(move || {
                let mut random = Random::new(id as u64 + 1);
                for _ in 0..batches {
                    let mut batch = pipe.batch();
                    batch.extend((0..BATCH).map(|_| Block::new(random.doubling(3, 10))));
                    pipe.send(batch);
                }
                pipe.close();
            });
            scope.spawn(|| {
                while let Some(batch) = pipe.receive() {
                    batch.iter().for_each(|b| b.free());
                    pipe.recycle(batch);
                }
            });
        }
    });
    Outcome::of(sides * batches * BATCH)
}

/// Every thread fills a batch of small blocks, frees a part of it in one order or the other, and trades the
/// rest for what another thread left in the market.
pub fn sh8bench(case: &Case) -> Outcome {
    const BATCH: usize = 600;
    const TRADED: usize = BATCH / 3;
    let rounds = case.times(60_000_000) / BATCH / case.threads + 1;
    let market: &Vec<Mutex<Vec<Block>>> =
        &(0..case.threads).map(|_| Mutex::new(Vec::with_capacity(BATCH))).collect();
    scope(|scope| {
        for id in 0..case.threads {
            scope.spawn(move || {
                let mut random = Random::new(id as u64 + 1);
                let mut own = Vec::with_capacity(BATCH);
                let mut traded = Vec::with_capacity(BATCH);
                for round in 0..rounds {
                    // Small sizes are likelier: the smaller of two, of which one is rarely large.
                    own.extend(
                        (0..BATCH).map(|_| {
                            Block::new(random.doubling(3, 10).min(random.between(16, 1000)))
                        }),
                    );
                    traded.extend(own.drain(..TRADED));
                    if round % 2 == 0 {
                        own.drain(..).rev().for_each(Block::free);
                    } else {
                        own.drain(..).for_each(Block::free);
                    }
                    let mut stand = market[(id + round) % case.threads]
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    std::mem::swap(&mut *stand, &mut traded);
                    drop(stand);
                    traded.drain(..).for_each(Block::free);
                }
            });
        }
    });
    for stand in market {
        let blocks = stand.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.iter().for_each(|b| b.free());
    }
    Outcome::of(case.threads * rounds * BATCH)
}
