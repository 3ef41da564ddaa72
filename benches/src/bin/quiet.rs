//! Threads allocate, free everything and fall silent: how much is still resident some seconds later, when
//! nobody has called malloc since?

use std::sync::Barrier;
use std::time::Duration;
use thermalloc_benches::{Block, Json, Random, option, proc};

fn fill(seed: usize, bytes: usize) -> Vec<Block> {
    let mut random = Random::new(seed as u64);
    let mut blocks = Vec::with_capacity(bytes / 1024);
    let mut done = 0;
    while done < bytes {
        let size = random.between(40, 2040);
        blocks.push(Block::new(size));
        done += size;
    }
    blocks
}

fn main() {
    let threads: usize = option("threads", 4);
    let bytes = option::<usize>("mb", 190) * 1_000_000 / threads;
    let wait = option("seconds", 8.0);
    let start = proc::rss_kib();
    let step = &Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        for id in 0..threads {
            scope.spawn(move || {
                let blocks = fill(id, bytes);
                step.wait();
                step.wait();
                blocks.iter().for_each(|b| b.free());
                drop(blocks);
                step.wait();
                step.wait();
            });
        }
        step.wait();
        let peak = proc::rss_kib();
        step.wait();
        step.wait();
        let freed = proc::rss_kib();
        std::thread::sleep(Duration::from_secs_f64(wait));
        let quiet = proc::rss_kib();
        step.wait();
        Json::new("quiet")
            .number("seconds", wait)
            .number("start_mib", start as f64 / 1024.0)
            .number("peak_mib", peak as f64 / 1024.0)
            .number("freed_mib", freed as f64 / 1024.0)
            .number("quiet_mib", quiet as f64 / 1024.0)
            .number("percent_of_peak", 100.0 * quiet as f64 / peak as f64)
            .print();
    });
}
