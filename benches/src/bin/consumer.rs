//! One thread allocates, another only frees, with a fixed number of bytes live: does the memory come back to
//! the allocating thread? The peak tells.

use std::time::Instant;
use thermalloc_benches::{Block, Json, Pipe, option, proc, thread_cpu};

const BATCH: usize = 256;

/// Keeps `live` blocks and hands over the oldest for each new one; returns how many it made.
fn produce(pipe: &Pipe, size: usize, live: usize, total: usize) -> usize {
    let mut ring = vec![Block::NONE; live];
    let mut made = 0;
    while made < total + live {
        let mut batch = pipe.batch();
        for _ in 0..BATCH {
            let slot = made % live;
            batch.push(ring[slot]);
            ring[slot] = if made < total { Block::new(size) } else { Block::NONE };
            made += 1;
        }
        pipe.send(batch);
    }
    pipe.close();
    total
}

fn main() {
    let size: usize = option("size", 592);
    let total = option::<usize>("gib", 10) * (1 << 30) / size;
    let live = option::<usize>("live-mib", 56) * (1 << 20) / size;
    let pipe = Pipe::new(16, BATCH);
    let start = Instant::now();
    let consumer_cpu = std::thread::scope(|scope| {
        scope.spawn(|| produce(&pipe, size, live, total));
        let consumer = scope.spawn(|| {
            while let Some(batch) = pipe.receive() {
                batch.iter().for_each(|b| b.free());
                pipe.recycle(batch);
            }
            thread_cpu()
        });
        consumer.join().expect("no panics")
    });
    Json::new("consumer")
        .number("blocks", total as f64)
        .number("live_mib", (live * size) as f64 / f64::from(1 << 20))
        .number("peak_mib", proc::peak_kib() as f64 / 1024.0)
        .number("seconds", start.elapsed().as_secs_f64())
        .number("free_ns", consumer_cpu.as_secs_f64() * 1e9 / total as f64)
        .print();
}
