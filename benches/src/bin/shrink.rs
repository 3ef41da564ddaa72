//! A program drops from much live memory to little and goes on at full rate: does the resident size follow,
//! and at what price in page faults?

use std::time::{Duration, Instant};
use thermalloc_benches::{Block, Json, Random, option, proc};

/// Live blocks with their sizes; sizes are log-uniform from 64 B to 1 MiB, every page written.
struct Live {
    blocks: Vec<(Block, usize)>,
    bytes: usize,
    random: Random,
}

impl Live {
    fn grow(&mut self, bytes: usize) {
        while self.bytes < bytes {
            let size = self.random.doubling(6, 20);
            let block = Block::new(size);
            block.touch_pages(size);
            self.blocks.push((block, size));
            self.bytes += size;
        }
    }

    fn shrink(&mut self, bytes: usize) {
        while self.bytes > bytes {
            let slot = self.random.below(self.blocks.len());
            let (block, size) = self.blocks.swap_remove(slot);
            block.free();
            self.bytes -= size;
        }
    }
}

fn main() {
    let high = option::<usize>("high-mib", 2048) << 20;
    let low = option::<usize>("low-mib", 200) << 20;
    let (early, late) = (option("early-s", 8.0), option("late-s", 15.0));
    // Room for all, so that the table of blocks itself never moves.
    let mut live =
        Live { blocks: Vec::with_capacity(high / 16384), bytes: 0, random: Random::new(1) };
    live.grow(high);
    let peak = proc::rss_kib();
    live.shrink(low);

    let start = Instant::now();
    let (mut live_peak, mut ops) = (0, 0_u64);
    let mut until = |live: &mut Live, seconds: f64| {
        while start.elapsed() < Duration::from_secs_f64(seconds) {
            for _ in 0..16 {
                live.shrink(low - (1 << 20));
                live.grow(low);
                live_peak = live_peak.max(live.bytes);
                ops += 1;
            }
        }
        (proc::rss_kib(), proc::minor_faults(), Instant::now())
    };
    let (early_rss, ..) = until(&mut live, early);
    let (_, faults, since) = until(&mut live, late - 5.0_f64.min(late - early));
    let (late_rss, faults_end, end) = until(&mut live, late);

    let mib = |kib: usize| kib as f64 / 1024.0;
    Json::new("shrink")
        .number("peak_mib", mib(peak))
        .number("live_mib", live_peak as f64 / f64::from(1 << 20))
        .number("early_mib", mib(early_rss))
        .number("late_mib", mib(late_rss))
        .number("late_over_live", late_rss as f64 * 1024.0 / live_peak as f64)
        .number("faults_per_s", (faults_end - faults) as f64 / (end - since).as_secs_f64())
        .number("rounds_per_s", ops as f64 / start.elapsed().as_secs_f64())
        .print();
}
