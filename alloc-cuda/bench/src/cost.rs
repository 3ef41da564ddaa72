//! What an allocation and its free cost the host, when the driver costs nothing.

use crate::machine;
use std::io::Write;
use std::sync::Barrier;
use thermalloc_cuda::driver::Stream;
use thermalloc_cuda::{OnStream, Pool};
use thermalloc_cuda_sim::{Config, Progress};

const OPERATIONS: u64 = 50_000;
const ROUNDS: usize = 21;

/// CPU time of this thread, nanoseconds.
fn cpu_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// A set of blocks of which one is replaced at a time; nanoseconds for an allocation and a free.
fn churn(on: &OnStream, pool: &Pool, sizes: &[u64], live: usize, seed: u64) -> f64 {
    let mut rng = machine::Rng::new(seed);
    let mut next = || sizes[rng.below(sizes.len() as u64) as usize];
    let alloc = |bytes| on.alloc(bytes).unwrap_or_else(|error| panic!("{error}"));
    let mut blocks: Vec<u64> = (0..live).map(|_| alloc(next())).collect();
    let mut step = |operations: u64| {
        for i in 0..operations {
            let at = (i.wrapping_mul(7919) as usize) % blocks.len();
            // SAFETY: nothing uses the block.
            if let Err(error) = unsafe { pool.free(blocks[at]) } {
                panic!("{error}");
            }
            blocks[at] = alloc(next());
        }
    };
    // Until the pool has its size.
    step(OPERATIONS);
    let start = cpu_ns();
    step(OPERATIONS);
    let ns = (cpu_ns() - start) as f64 / OPERATIONS as f64;
    for block in blocks {
        // SAFETY: nothing uses the block.
        let _ = unsafe { pool.free(block) };
    }
    ns
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Medians for one thread and for four, each on a stream of its own.
pub(crate) fn run(out: &mut impl Write) -> std::io::Result<()> {
    let cases: [(&str, Vec<u64>, usize); 4] = [
        ("one size, 64 KiB", vec![64 << 10], 1),
        ("small, 512 B to 1 MiB", (0..64).map(|i| 512 << (i % 12)).collect(), 256),
        ("large, 1 to 64 MiB", (1..64).map(|i| i << 20).collect(), 32),
        ("training mix", vec![512, 4096, 1 << 16, 1 << 20, 3 << 20, 12 << 20, 40 << 20], 64),
    ];
    writeln!(out, "{:<24} {:>10} {:>12} {:>7}", "sizes", "1 thread", "4 threads", "ratio")?;
    for (name, sizes, live) in cases {
        let m = machine::machine(
            Config { vram_bytes: 64 << 30, progress: Progress::Eager, ..Config::default() },
            |builder| builder,
        );
        let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
        let one = (0..ROUNDS)
            .map(|round| churn(&m.pool.on(streams[0]), &m.pool, &sizes, live, round as u64));
        let one = median(one.collect());
        let mut four = Vec::new();
        for round in 0..ROUNDS / 3 {
            let barrier = Barrier::new(4);
            std::thread::scope(|scope| {
                let threads: Vec<_> = streams
                    .iter()
                    .map(|&stream| {
                        let (m, sizes, barrier) = (&m, &sizes, &barrier);
                        scope.spawn(move || {
                            let on = m.pool.on(stream);
                            barrier.wait();
                            churn(&on, &m.pool, sizes, live, round as u64)
                        })
                    })
                    .collect();
                four.extend(threads.into_iter().filter_map(|thread| thread.join().ok()));
            });
        }
        let four = median(four);
        if std::env::var_os("REPORT").is_some() {
            writeln!(out, "{}", m.pool.report())?;
        }
        writeln!(out, "{name:<24} {one:>8.1} ns {four:>9.1} ns {:>7.2}", four / one)?;
    }
    Ok(())
}
