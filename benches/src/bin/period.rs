//! A program that works for a moment in each period and sleeps in between: how many page faults does it
//! take once it has gone round, what CPU time, and what does it hold while it sleeps?

use std::time::Duration;
use thermalloc_benches::{Block, Json, cpu, now, option, proc};

/// Blocks of each round: 1 MiB to 16 MiB.
const SIZES: [usize; 5] = [1 << 20, 3 << 20, 5 << 20, 9 << 20, 16 << 20];

fn round(bytes: usize, blocks: &mut Vec<Block>) {
    let mut done = 0;
    for size in SIZES.into_iter().cycle() {
        if done >= bytes {
            break;
        }
        let block = Block::new(size);
        block.touch_pages(size);
        blocks.push(block);
        done += size;
    }
    blocks.drain(..).for_each(Block::free);
}

fn main() {
    let bytes = option::<usize>("mib", 200) << 20;
    let period = Duration::from_millis(option("period-ms", 12_500));
    let (warm, watched): (u32, u32) = (option("warm", 3), option("watched", 3));
    let mut blocks = Vec::with_capacity(bytes >> 20);
    let (start, mut faults, mut used, mut asleep) = (now(), 0, Duration::ZERO, 0);
    for i in 0..warm + watched {
        if i == warm {
            (faults, used) = (proc::minor_faults(), cpu());
        }
        round(bytes, &mut blocks);
        std::thread::sleep((start + period * (i + 1)).saturating_sub(now()));
        asleep = proc::rss_kib();
    }
    let rounds = f64::from(watched);
    Json::new("period")
        .number("period_s", period.as_secs_f64())
        .number("faults_per_round", (proc::minor_faults() - faults) as f64 / rounds)
        .number("cpu_ms_per_round", (cpu() - used).as_secs_f64() * 1000.0 / rounds)
        .number("asleep_mib", asleep as f64 / 1024.0)
        .print();
}
