//! Many live blocks of random sizes: each thread its own (after alloc-test by OLogN), and threads that come and
//! go and leave blocks to each other (after mimalloc's stress test). What is read at the end of a block's life
//! must be what was written at its beginning.

use crate::{Case, Outcome};
use std::sync::{Mutex, PoisonError};
use std::thread::scope;
use thermalloc_benches::Random;

/// Sizes from 16 bytes to 8 KiB, small ones likelier; every byte is written.
pub fn alloc_test(case: &Case) -> Outcome {
    const LIVE: usize = 150_000;
    let slots = case.times(LIVE) / case.threads + 1;
    let each = case.times(40_000_000) / case.threads;
    scope(|scope| {
        for id in 0..case.threads {
            scope.spawn(move || {
                let mut random = Random::new(id as u64 + 1);
                let mut table: Vec<Option<Box<[u8]>>> = vec![None; slots];
                for _ in 0..each {
                    // A fifth of the slots has most of the traffic.
                    let busy = if random.below(5) > 0 { slots / 5 + 1 } else { slots };
                    let slot = &mut table[random.below(busy)];
                    *slot = match slot.take() {
                        None => Some(
                            vec![0xA5; random.doubling(4, 13).min(random.doubling(4, 13))].into(),
                        ),
                        Some(block) => {
                            assert_eq!(
                                (block[0], block[block.len() - 1]),
                                (0xA5, 0xA5),
                                "overwritten"
                            );
                            None
                        }
                    };
                }
            });
        }
    });
    Outcome::of(each * case.threads / 2)
}

type Item = Option<Box<[usize]>>;

fn item(random: &mut Random) -> Item {
    let words = match random.below(1000) {
        0 => random.doubling(12, 15),
        _ => random.doubling(1, 7),
    };
    let mark = random.below(1 << 30);
    Some((0..words).map(|i| mark ^ i).collect())
}

fn check(item: Item) {
    if let Some(words) = item {
        let mark = words[0];
        assert!(words.iter().enumerate().all(|(i, w)| *w == mark ^ i), "overwritten");
    }
}

/// Threads live for a part of the work. Each has a list that grows and shrinks, some of it kept to the end,
/// and swaps every tenth item with one in a place that all threads reach.
pub fn mstress(case: &Case) -> Outcome {
    const LIVES: usize = 40;
    const MEETING_PLACES: usize = 1000;
    let each = case.times(20_000_000) / LIVES / case.threads;
    let places: &Vec<Mutex<Item>> = &(0..MEETING_PLACES).map(|_| Mutex::new(None)).collect();
    for life in 0..LIVES {
        scope(|scope| {
            for id in 0..case.threads {
                scope.spawn(move || {
                    stress(&mut Random::new((life * case.threads + id + 1) as u64), each, places)
                });
            }
        });
    }
    places
        .iter()
        .for_each(|place| check(place.lock().unwrap_or_else(PoisonError::into_inner).take()));
    Outcome::of(LIVES * case.threads * each)
}

fn stress(random: &mut Random, items: usize, places: &[Mutex<Item>]) {
    let (mut list, mut kept) = (vec![], vec![]);
    for i in 0..items {
        let mut new = item(random);
        if i % 10 == 0 {
            let place = &places[random.below(places.len())];
            std::mem::swap(&mut *place.lock().unwrap_or_else(PoisonError::into_inner), &mut new);
        }
        match random.below(8) {
            0 => kept.push(new),
            _ => list.push(new),
        }
        // As often as not the list is as long as it may get, and half of it goes.
        if list.len() >= 256 {
            for _ in 0..random.between(64, 256) {
                let last = list.len() - 1;
                list.swap(random.below(last + 1), last);
                list.pop().into_iter().for_each(check);
            }
        }
    }
    list.into_iter().chain(kept).for_each(check);
}
