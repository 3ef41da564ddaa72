//! Threads that live for a moment, and many more threads than CPUs.

use crate::{Case, Outcome};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Barrier, Mutex};
use std::thread::scope;
use thermalloc_benches::{Block, Random, proc};

/// In each of some lines threads follow each other: one frees what the last one left, makes some blocks, frees
/// half of them and ends.
pub fn churn(case: &Case) -> Outcome {
    const BLOCKS: usize = 64;
    let lives = case.times(40_000) / case.threads;
    scope(|scope| {
        for line in 0..case.threads {
            scope.spawn(move || {
                let mut left: Vec<Block> = vec![];
                for life in 0..lives {
                    let one = std::thread::spawn(move || {
                        let mut random = Random::new((line * lives + life + 1) as u64);
                        left.drain(..).for_each(Block::free);
                        left.extend((0..BLOCKS).map(|_| Block::new(random.doubling(4, 11))));
                        left.drain(BLOCKS / 2..).for_each(Block::free);
                        left
                    });
                    left = one.join().expect("no panics");
                }
                left.drain(..).for_each(Block::free);
            });
        }
    });
    Outcome::of(case.threads * lives * BLOCKS)
}

/// A fixed number of live blocks and of replacements, shared by the threads whatever their number: time and
/// memory should not depend on it. Memory is read while all threads are still there.
pub fn oversubscription(case: &Case) -> Outcome {
    const LIVE: usize = 1 << 14;
    let slots = LIVE / case.threads;
    let each = case.times(120_000_000) / case.threads;
    let done = &Barrier::new(case.threads + 1);
    let read = &Barrier::new(case.threads + 1);
    let (live, stacks) = (&AtomicUsize::new(0), &Mutex::new(Vec::with_capacity(case.threads)));
    let mut extra = 0.0;
    scope(|scope| {
        for id in 0..case.threads {
            scope.spawn(move || {
                let (bytes, table) = replace(id, slots, each);
                live.fetch_add(bytes, Relaxed);
                stacks.lock().expect("no panics").push((&raw const bytes).addr());
                done.wait();
                read.wait();
                table.iter().for_each(|(b, _)| b.free());
            });
        }
        done.wait();
        // First the sum: what follows allocates.
        let resident = proc::exact_rss_kib();
        let stacks = proc::resident_at_kib(&stacks.lock().expect("no panics"));
        extra = resident as f64 - stacks as f64 - live.load(Relaxed) as f64 / 1024.0;
        read.wait();
    });
    Outcome { extra_kib: Some(extra), ..Outcome::of(case.threads * (each + slots)) }
}

/// Replaces random blocks; the table at the end and how many bytes it and its blocks have.
fn replace(id: usize, slots: usize, times: usize) -> (usize, Vec<(Block, usize)>) {
    let mut random = Random::new(id as u64 + 1);
    let new = |random: &mut Random| {
        let size = random.between(16, 1024);
        (Block::new(size), size)
    };
    let mut table: Vec<_> = (0..slots).map(|_| new(&mut random)).collect();
    for _ in 0..times {
        let slot = random.below(slots);
        table[slot].0.free();
        table[slot] = new(&mut random);
    }
    let bytes = table.iter().map(|(_, size)| size).sum::<usize>();
    (bytes + slots * size_of_val(&table[0]), table)
}
