//! Costs of malloc and free in small patterns, one CSV row a case. The allocator is whatever the process has.
//!
//! A thread repeats a chunk of operations until the clock of the main thread says stop, and reads its own CPU
//! time before and after: so other programs on the machine disturb the CPU column little.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use thermalloc_benches::{Block, Pipe, Random, library, now, option, thread_cpu};

const BATCH: usize = 100;
const LIVE: usize = 10_000;
/// Bounds what the patterns with many live blocks hold, all threads together.
const LIVE_BYTES: usize = 512 << 20;

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

const PATTERNS: [(&str, &[usize]); 8] = [
    ("pair", SIZES),
    ("lifo", SIZES),
    ("fifo", SIZES),
    ("random", SIZES),
    ("cross", SIZES),
    ("aligned", &[16 << 10, 128 << 10]),
    ("calloc", &[64, 1024, 32 << 10]),
    ("realloc", &[4096, 1 << 20]),
];
const SIZES: &[usize] = &[16, 64, 256, 1024, 32 << 10];
const THREADS: &[usize] = &[1, 2, 16];

struct Case {
    pattern: &'static str,
    size: usize,
    threads: usize,
}

/// What one thread did between the start and the end of measuring.
#[derive(Clone, Copy)]
struct Reading {
    ops: usize,
    cpu: Duration,
    wall: Duration,
}

struct Clock {
    phase: AtomicU8,
    ready: Barrier,
}

impl Clock {
    fn is(&self, phase: u8) -> bool {
        self.phase.load(Ordering::Relaxed) == phase
    }

    /// Repeats `chunk`, which returns how many operations it did.
    fn measure(&self, mut chunk: impl FnMut() -> usize) -> Reading {
        self.ready.wait();
        while self.is(WARM_UP) {
            chunk();
        }
        let (cpu, wall) = (thread_cpu(), now());
        let mut ops = chunk();
        while self.is(MEASURE) {
            ops += chunk();
        }
        Reading { ops, cpu: thread_cpu() - cpu, wall: now() - wall }
    }

    fn run(&self, warm_up: Duration, measure: Duration) {
        self.ready.wait();
        std::thread::sleep(warm_up);
        self.phase.store(MEASURE, Ordering::Relaxed);
        std::thread::sleep(measure);
        self.phase.store(STOP, Ordering::Relaxed);
    }
}

fn pairs(clock: &Clock, size: usize, make: impl Fn(usize) -> Block) -> Reading {
    let n = if size < 256 << 10 { 1000 } else { BATCH };
    clock.measure(|| {
        for _ in 0..n {
            make(size).free();
        }
        n
    })
}

fn batches(clock: &Clock, size: usize, last_first: bool) -> Reading {
    let mut blocks = [Block::NONE; BATCH];
    clock.measure(|| {
        for b in &mut blocks {
            *b = Block::new(size);
        }
        if last_first {
            blocks.iter().rev().for_each(|b| b.free());
        } else {
            blocks.iter().for_each(|b| b.free());
        }
        BATCH
    })
}

impl Case {
    /// Live blocks a thread in pattern `random`.
    fn live(&self) -> usize {
        LIVE.min(LIVE_BYTES / self.size / self.threads).max(16)
    }

    fn random(&self, clock: &Clock, seed: u64) -> Reading {
        let mut random = Random::new(seed);
        let mut blocks: Vec<Block> = (0..self.live()).map(|_| Block::new(self.size)).collect();
        let reading = clock.measure(|| {
            for _ in 0..BATCH {
                let slot = random.below(blocks.len());
                blocks[slot].free();
                blocks[slot] = Block::new(self.size);
            }
            BATCH
        });
        blocks.iter().for_each(|b| b.free());
        reading
    }

    /// Grows a block by half until it has `size` bytes; each call of realloc is an operation.
    fn realloc(&self, clock: &Clock) -> Reading {
        clock.measure(|| {
            let (mut size, mut ops) = (8, 0);
            let mut block = Block::new(size);
            while size < self.size {
                size = (size + size / 2).min(self.size);
                block = block.resize(size);
                ops += 1;
            }
            block.free();
            ops
        })
    }

    fn produce(&self, clock: &Clock, pipe: &Pipe) -> Reading {
        let reading = clock.measure(|| {
            let mut batch = pipe.batch();
            let n = batch.capacity();
            batch.extend((0..n).map(|_| Block::new(self.size)));
            pipe.send(batch);
            n
        });
        pipe.close();
        reading
    }

    fn consume(clock: &Clock, pipe: &Pipe) -> Reading {
        let take = || {
            pipe.receive().map(|batch| {
                let n = batch.len();
                batch.iter().for_each(|b| b.free());
                pipe.recycle(batch);
                n
            })
        };
        let reading = clock.measure(|| take().unwrap_or(0));
        while take().is_some() {}
        reading
    }

    fn thread(&self, clock: &Clock, id: usize, pipes: &[Pipe]) -> Reading {
        match self.pattern {
            "pair" => pairs(clock, self.size, Block::new),
            "calloc" => pairs(clock, self.size, Block::zeroed),
            "aligned" => pairs(clock, self.size, |size| Block::aligned(4096, size)),
            "lifo" => batches(clock, self.size, true),
            "fifo" => batches(clock, self.size, false),
            "random" => self.random(clock, id as u64),
            "realloc" => self.realloc(clock),
            "cross" if id.is_multiple_of(2) => self.produce(clock, &pipes[id / 2]),
            "cross" => Self::consume(clock, &pipes[id / 2]),
            other => unreachable!("{other}"),
        }
    }

    fn run(&self, warm_up: Duration, measure: Duration) -> Vec<Reading> {
        let clock = Clock { phase: AtomicU8::new(WARM_UP), ready: Barrier::new(self.threads + 1) };
        let batch = ((64 << 20) / self.size / 16).clamp(1, 256);
        let pipes: Vec<Pipe> = (0..self.threads / 2).map(|_| Pipe::new(16, batch)).collect();
        std::thread::scope(|scope| {
            let (clock, pipes) = (&clock, &pipes);
            let threads: Vec<_> = (0..self.threads)
                .map(|id| scope.spawn(move || self.thread(clock, id, pipes)))
                .collect();
            clock.run(warm_up, measure);
            threads.into_iter().map(|t| t.join().expect("no panics")).collect()
        })
    }

    /// CPU time an operation, elapsed time an operation of all threads together, and operations.
    fn cost(&self, readings: &[Reading]) -> (f64, f64, usize) {
        let cpu = |r: &[Reading]| {
            let ops: usize = r.iter().map(|r| r.ops).sum();
            r.iter().map(|r| r.cpu.as_secs_f64()).sum::<f64>() * 1e9 / ops as f64
        };
        // A producer does the first half of each operation, a consumer the other.
        let (first, second): (Vec<_>, Vec<_>) = match self.pattern {
            "cross" => (
                readings.iter().copied().step_by(2).collect(),
                readings.iter().copied().skip(1).step_by(2).collect(),
            ),
            _ => (readings.to_vec(), vec![]),
        };
        let rate: f64 = first.iter().map(|r| r.ops as f64 / r.wall.as_secs_f64()).sum();
        let free = if second.is_empty() { 0.0 } else { cpu(&second) };
        (cpu(&first) + free, 1e9 / rate, first.iter().map(|r| r.ops).sum())
    }
}

fn list<T: std::str::FromStr + Clone>(name: &str, default: &[T]) -> Vec<T> {
    let text: String = option(name, String::new());
    if text.is_empty() {
        return default.to_vec();
    }
    text.split(',')
        .map(|item| item.parse().unwrap_or_else(|_| panic!("--{name} {item}: not a value")))
        .collect()
}

fn cases() -> Vec<Case> {
    let wanted: Vec<String> = list("patterns", &[]);
    let threads = list("threads", THREADS);
    let mut cases = vec![];
    for (pattern, sizes) in PATTERNS {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == pattern) {
            continue;
        }
        for size in list("sizes", sizes) {
            let threads =
                threads.iter().copied().filter(|&n| pattern != "cross" || n >= 2 && n % 2 == 0);
            cases.extend(threads.map(|threads| Case { pattern, size: size.max(16), threads }));
        }
    }
    cases
}

fn main() {
    let only_list = std::env::args().any(|a| a == "--list");
    let label: String = option("label", "process".into());
    let warm_up = Duration::from_millis(option("warm-up-ms", 50));
    let measure = Duration::from_millis(option("measure-ms", 150));
    let library = library();
    println!("allocator,library,pattern,size,threads,ops,cpu_ns,wall_ns");
    for case in cases() {
        let Case { pattern, size, threads } = case;
        if only_list {
            println!("{label},{library},{pattern},{size},{threads},,,");
            continue;
        }
        let (cpu, wall, ops) = case.cost(&case.run(warm_up, measure));
        println!("{label},{library},{pattern},{size},{threads},{ops},{cpu:.2},{wall:.2}");
    }
}
