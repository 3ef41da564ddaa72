//! False sharing (after cache-thrash and cache-scratch of the Hoard benchmarks): does the allocator give parts
//! of one cache line to two threads by itself (active), or keep giving away a line that a program shared (passive)?

use crate::{Case, Outcome};
use std::sync::Barrier;
use std::thread::scope;
use thermalloc_benches::Block;

const SIZE: usize = 8;

/// The work of one thread: new blocks, each written many times.
fn writes(rounds: usize, times: usize) {
    for _ in 0..rounds {
        let block = Block::new(SIZE);
        block.poke(times);
        block.free();
    }
}

fn run(case: &Case, given: bool) -> Outcome {
    let (rounds, times) = (1000, case.times(4_000_000));
    let together = &Barrier::new(case.threads);
    let blocks: Vec<Block> = (0..case.threads).map(|_| Block::new(SIZE)).collect();
    scope(|scope| {
        for block in blocks.iter().copied() {
            scope.spawn(move || {
                together.wait();
                if given {
                    block.free();
                }
                writes(rounds, times);
            });
        }
    });
    if !given {
        blocks.iter().for_each(|b| b.free());
    }
    Outcome::of(case.threads * (rounds + 1))
}

/// Each thread has nothing but blocks of its own.
pub fn thrash(case: &Case) -> Outcome {
    run(case, false)
}

/// Each thread first frees a block that the main thread allocated beside those of the others.
pub fn scratch(case: &Case) -> Outcome {
    run(case, true)
}
