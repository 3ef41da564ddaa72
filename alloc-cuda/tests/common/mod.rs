//! A pool on a simulated machine, and random programs that keep the rules.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::cast_possible_truncation, reason = "small random numbers")]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use thermalloc_cuda::driver::{Driver, Event, Stream, constant};
use thermalloc_cuda::{AllocError, Backing, Pool, PoolBuilder};
use thermalloc_cuda_sim::{Access, Config, Data, Progress, Sim};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const CHUNK: u64 = 2 * MIB;

pub(crate) struct Machine {
    pub(crate) pool: Pool,
    pub(crate) clock: Arc<AtomicU64>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) sim: Sim,
}

pub(crate) fn config() -> Config {
    Config { progress: Progress::Random, data: Data::Edges, ..Config::default() }
}

impl Machine {
    pub(crate) fn new(config: Config) -> Self {
        Self::with(config, |builder| builder)
    }

    pub(crate) fn with(config: Config, build: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let sim = Sim::new(config);
        let driver = Arc::new(sim.driver().expect("a simulated driver"));
        sim.use_device(&driver, 0).expect("device 0");
        let clock = Arc::new(AtomicU64::new(1_000_000));
        let builder = Pool::builder(0).clock_ms(Arc::clone(&clock)).wait_ms(Some(200));
        let pool = build(builder).build_on(Arc::clone(&driver)).expect("a pool");
        Self { pool, clock, driver, sim }
    }

    pub(crate) fn stream(&self) -> Stream {
        let mut stream = Stream::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.stream_create(&raw mut stream, constant::STREAM_NON_BLOCKING) }
            .expect("a stream");
        stream
    }

    pub(crate) fn event(&self) -> Event {
        let mut event = Event::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING) }
            .expect("an event");
        event
    }

    pub(crate) fn write(&self, stream: Stream, ptr: u64, bytes: u64, value: u8) {
        self.sim.launch(stream, &[Access::write(ptr, bytes, value)]).expect("a launch");
    }

    pub(crate) fn expect(&self, stream: Stream, ptr: u64, bytes: u64, value: u8) {
        self.sim.launch(stream, &[Access::expect(ptr, bytes, value)]).expect("a launch");
    }

    /// Orders `after` behind what `before` was given so far.
    pub(crate) fn hand_over(&self, event: Event, before: Stream, after: Stream) {
        // SAFETY: live objects.
        unsafe { self.driver.event_record(event, before) }.expect("a record");
        // SAFETY: live objects.
        unsafe { self.driver.stream_wait_event(after, event, 0) }.expect("a wait");
    }

    pub(crate) fn sync(&self, stream: Stream) {
        // SAFETY: a live stream.
        unsafe { self.driver.stream_synchronize(stream) }.expect("a sync");
    }

    pub(crate) fn free(&self, ptr: u64) {
        // SAFETY: the tests use no block after they freed it.
        unsafe { self.pool.free(ptr) }.expect("a free");
    }

    pub(crate) fn advance_ms(&self, ms: u64) {
        self.clock.fetch_add(ms, Relaxed);
    }
}

pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

struct Live {
    bytes: u64,
    stream: usize,
    value: u8,
    /// Other streams that read it.
    shared: Vec<usize>,
}

/// What a random program found wrong; nothing if all is well.
pub(crate) type Verdict = Result<(), String>;

/// Runs `operations` random operations over `streams` streams and checks them against a model.
pub(crate) fn run_model(
    m: &Machine,
    seed: u64,
    operations: u64,
    streams: usize,
    cap: u64,
) -> Verdict {
    let mut rng = Rng::new(seed);
    let streams: Vec<Stream> = (0..streams).map(|_| m.stream()).collect();
    let event = m.event();
    let mut live: BTreeMap<u64, Live> = BTreeMap::new();
    let mut keys: Vec<u64> = Vec::new();
    let mut at: HashMap<u64, usize> = HashMap::new();
    let mut bytes_live = 0;
    let mut requested = 0u64;
    for step in 0..operations {
        let grows = bytes_live < cap * (1 + rng.below(8)) / 8;
        let choice = rng.below(100);
        if choice < 45 && grows || live.is_empty() {
            let stream = rng.below(streams.len() as u64) as usize;
            let bytes = size(&mut rng);
            match m.pool.alloc(bytes, streams[stream]) {
                Ok(ptr) => {
                    if ptr % 512 != 0 {
                        return Err(format!("{ptr:#x} is not aligned"));
                    }
                    let below = live.range(..ptr + bytes).next_back();
                    if let Some((other, block)) = below
                        && other + block.bytes > ptr
                    {
                        return Err(format!("step {step}: {ptr:#x} overlaps {other:#x}"));
                    }
                    let value = rng.below(256) as u8;
                    m.write(streams[stream], ptr, bytes, value);
                    live.insert(ptr, Live { bytes, stream, value, shared: Vec::new() });
                    at.insert(ptr, keys.len());
                    keys.push(ptr);
                    bytes_live += bytes;
                    requested += bytes;
                }
                Err(AllocError::OutOfMemory(_)) => {}
                Err(error) => return Err(error.to_string()),
            }
        } else if choice < 90 {
            let ptr = keys[rng.below(keys.len() as u64) as usize];
            let block = &live[&ptr];
            let own = streams[block.stream];
            m.expect(own, ptr, block.bytes, block.value);
            match rng.below(16) {
                // A program that waits by itself and frees on the other stream.
                0 if block.shared.is_empty() => {
                    let other = streams[rng.below(streams.len() as u64) as usize];
                    m.hand_over(event, own, other);
                    m.expect(other, ptr, block.bytes, block.value);
                    // SAFETY: `other` comes after all uses.
                    unsafe { m.pool.free_on(ptr, other) }.map_err(|error| error.to_string())?;
                }
                _ => {
                    // SAFETY: no use follows.
                    unsafe { m.pool.free(ptr) }.map_err(|error| error.to_string())?;
                }
            }
            if rng.below(64) == 0 {
                // SAFETY: it must be refused.
                if unsafe { m.pool.free(ptr) }.is_ok() {
                    return Err(format!("step {step}: {ptr:#x} was freed twice"));
                }
            }
            let Some(block) = live.remove(&ptr) else { continue };
            bytes_live -= block.bytes;
            requested -= block.bytes;
            if let Some(index) = at.remove(&ptr) {
                keys.swap_remove(index);
                if let Some(&moved) = keys.get(index) {
                    at.insert(moved, index);
                }
            }
        } else if choice < 96 {
            let ptr = keys[rng.below(keys.len() as u64) as usize];
            let other = rng.below(streams.len() as u64) as usize;
            let Some(block) = live.get_mut(&ptr) else { continue };
            if other != block.stream {
                m.hand_over(event, streams[block.stream], streams[other]);
                let known = m.pool.record_use(ptr, streams[other]);
                known.map_err(|error| error.to_string())?;
                m.expect(streams[other], ptr, block.bytes, block.value);
                if rng.below(2) == 0 {
                    let ended = m.pool.end_use(ptr, streams[other]);
                    ended.map_err(|error| error.to_string())?;
                }
                block.shared.push(other);
            }
        } else if choice == 96 {
            m.sync(streams[rng.below(streams.len() as u64) as usize]);
        } else if choice == 97 {
            m.advance_ms(rng.below(2000));
        } else if choice == 98 && rng.below(20) == 0 {
            m.pool.trim(rng.below(cap));
        } else {
            m.pool.poll();
        }
        if step % 4096 == 0 {
            check(m, requested).map_err(|error| format!("step {step}: {error}"))?;
        }
    }
    for (ptr, block) in &live {
        m.expect(streams[block.stream], *ptr, block.bytes, block.value);
        // SAFETY: no use follows.
        unsafe { m.pool.free(*ptr) }.map_err(|error| error.to_string())?;
    }
    streams.iter().for_each(|&stream| m.sync(stream));
    m.pool.poll();
    check(m, 0)?;
    let stats = m.pool.stats();
    if stats.pending_bytes > 0 || stats.active_bytes > 0 {
        return Err(format!("all is complete, but {stats:?}"));
    }
    Ok(())
}

fn check(m: &Machine, requested: u64) -> Verdict {
    let found = m.sim.violations();
    if let Some(first) = found.first() {
        return Err(format!("{} mistakes, the first: {first}", found.len()));
    }
    m.pool.check()?;
    let stats = m.pool.stats();
    if stats.requested_bytes != requested {
        return Err(format!("{} bytes are booked, {requested} in use", stats.requested_bytes));
    }
    let used = m.sim.used_bytes(0);
    // The driver's pool has larger pieces of its own.
    let exact = m.pool.backing() != Backing::DriverPool;
    if stats.reserved_bytes > used || exact && stats.reserved_bytes != used {
        return Err(format!("{} bytes are reserved, {used} used", stats.reserved_bytes));
    }
    Ok(())
}

/// A mixture of small, medium and large sizes.
fn size(rng: &mut Rng) -> u64 {
    match rng.below(10) {
        0..=3 => 1 + rng.below(4096),
        4..=6 => 1 + rng.below(MIB),
        7..=8 => 1 + rng.below(8 * MIB),
        // Programs ask for the same large sizes again.
        _ => (1 + rng.below(8)) * 7 * MIB,
    }
}
