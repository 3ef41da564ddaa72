//! Large blocks: a table of 5 to 25 MiB each (after malloc-large of mimalloc-bench), and tensors of 0.3 to
//! 16 MB in steps, as a training loop asks for them, with and without idle gaps between the steps.

use crate::{Case, Outcome};
use std::collections::VecDeque;
use std::sync::Barrier;
use std::thread::scope;
use std::time::Duration;
use thermalloc_benches::{Block, Random, now};

/// Replaces random ones of 20 blocks; every page is written.
pub fn malloc_large(case: &Case) -> Outcome {
    let mut random = Random::new(1);
    let mut blocks = [Block::NONE; 20];
    let ops = case.times(1000);
    for _ in 0..ops {
        let slot = random.below(blocks.len());
        blocks[slot].free();
        let size = random.between(5 << 20, 25 << 20);
        blocks[slot] = Block::new(size);
        blocks[slot].touch_pages(size);
    }
    blocks.iter().for_each(|b| b.free());
    Outcome::of(ops)
}

const A_STEP: usize = 8;
const LIVE_IN_A_STEP: usize = 3;
const SMALLEST: usize = 300_000;
const LARGEST: usize = 16_000_000;

/// The sizes of a thread's tensors: the same in each step but for the batch, of which there are four.
struct Model {
    sizes: Vec<usize>,
    random: Random,
}

impl Model {
    fn new(id: usize) -> Self {
        let mut random = Random::new(id as u64 + 1);
        let sizes = (0..A_STEP).map(|_| random.doubling(18, 24).clamp(SMALLEST, LARGEST)).collect();
        Self { sizes, random }
    }

    /// malloc, memset and, when some newer ones are there, free.
    fn step(&mut self) {
        let batch = self.random.between(7, 10);
        let mut live = VecDeque::with_capacity(LIVE_IN_A_STEP);
        for size in &self.sizes {
            if live.len() == LIVE_IN_A_STEP {
                live.pop_front().into_iter().for_each(Block::free);
            }
            let size = (size * batch / 10).max(SMALLEST);
            let block = Block::new(size);
            block.fill(size, 1);
            live.push_back(block);
        }
        live.into_iter().for_each(Block::free);
    }
}

pub fn tensors(case: &Case) -> Outcome {
    let steps = case.times(9600) / A_STEP / case.threads + 1;
    scope(|scope| {
        for id in 0..case.threads {
            scope.spawn(move || {
                let mut model = Model::new(id);
                (0..steps).for_each(|_| model.step());
            });
        }
    });
    Outcome::of(case.threads * steps * A_STEP)
}

/// All threads do a step, then all sleep for 20 ms. The time is that of the steps.
pub fn tensors_with_gaps(case: &Case) -> Outcome {
    const GAP: Duration = Duration::from_millis(20);
    let steps = case.times(4800) / A_STEP / case.threads + 1;
    let together = &Barrier::new(case.threads + 1);
    let mut busy = Duration::ZERO;
    scope(|scope| {
        for id in 0..case.threads {
            scope.spawn(move || {
                let mut model = Model::new(id);
                for _ in 0..steps {
                    together.wait();
                    model.step();
                    together.wait();
                }
            });
        }
        for _ in 0..steps {
            let start = now();
            together.wait();
            together.wait();
            busy += now() - start;
            std::thread::sleep(GAP);
        }
    });
    Outcome { busy: Some(busy), ..Outcome::of(case.threads * steps * A_STEP) }
}
