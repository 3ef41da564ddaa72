//! Threads on one pool, each on a stream of its own and now and then on another's.

#![allow(clippy::cast_possible_truncation, reason = "small random numbers")]

mod common;

use common::{MIB, Machine, Rng, config};
use std::sync::Mutex;
use thermalloc_cuda::driver::Stream;
use thermalloc_cuda_sim::{Access, Config, Data, Mistake, Progress};

#[test]
fn threads_race_neither_on_the_device_nor_in_the_books() {
    let quiet = Config { progress: Progress::Random, data: Data::Edges, ..config() };
    let m = Machine::with(quiet, |builder| builder.limit_bytes(700 * MIB).wait_ms(Some(50)));
    m.sim.probe(Some(|_| thermalloc_cuda::fault::locks_held() > 0));
    let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
    // Blocks that a thread passes on, with their size and value; their stream is synchronised.
    let passed: Mutex<Vec<(u64, u64, u8)>> = Mutex::new(Vec::new());
    let steps = if cfg!(debug_assertions) { 4_000 } else { 40_000 };
    std::thread::scope(|scope| {
        for (number, &stream) in streams.iter().enumerate() {
            let (m, passed) = (&m, &passed);
            scope.spawn(move || {
                m.sim.use_device(&m.driver, 0).expect("device 0");
                let mut rng = Rng::new(number as u64 + 1);
                let mut live: Vec<(u64, u64, u8)> = Vec::new();
                let on = m.pool.on(stream);
                for _ in 0..steps {
                    match rng.below(10) {
                        0..=4 if live.len() < 40 => {
                            let scale = rng.below(24);
                            let bytes = 1 + rng.below(1 << scale);
                            let Ok(ptr) = on.alloc(bytes) else { continue };
                            let value = rng.below(256) as u8;
                            m.write(stream, ptr, bytes, value);
                            live.push((ptr, bytes, value));
                        }
                        5..=8 if !live.is_empty() => {
                            let at = rng.below(live.len() as u64) as usize;
                            let (ptr, bytes, value) = live.swap_remove(at);
                            let access = [Access::expect(ptr, bytes, value)];
                            m.sim.launch(stream, &access).expect("a launch");
                            m.free(ptr);
                        }
                        9 if !live.is_empty() && rng.below(8) == 0 => {
                            m.sync(stream);
                            let block = live.swap_remove(0);
                            passed.lock().unwrap().push(block);
                        }
                        _ => {
                            let taken = passed.lock().unwrap().pop();
                            if let Some((ptr, bytes, value)) = taken {
                                m.pool.record_use(ptr, stream).expect("a live block");
                                m.expect(stream, ptr, bytes, value);
                                m.free(ptr);
                            }
                            if rng.below(50) == 0 {
                                m.pool.poll();
                            }
                        }
                    }
                }
                live.into_iter().for_each(|(ptr, ..)| m.free(ptr));
            });
        }
    });
    let left = std::mem::take(&mut *passed.lock().unwrap());
    left.into_iter().for_each(|(ptr, ..)| m.free(ptr));
    streams.iter().for_each(|&stream| m.sync(stream));
    m.pool.poll();
    m.pool.check().expect("exact books");
    let stats = m.pool.stats();
    assert_eq!((stats.active_bytes, stats.pending_bytes), (0, 0));
    assert_eq!(m.sim.count(Mistake::CallUnderLock), 0);
    m.sim.assert_clean();
}
