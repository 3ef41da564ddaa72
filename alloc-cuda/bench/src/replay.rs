//! Replays each trace under each policy on a machine with realistic latencies.

use crate::machine::{self, Machine};
use crate::policies::{
    BestFit, DriverPool, Plain, Policy, SizeBins, Thermalloc, event_calls, memory_calls,
};
use crate::traces::{self, Step, Trace};
use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use thermalloc_cuda::driver::{Event, Stream, constant};
use thermalloc_cuda::{Backing, PoolBuilder};
use thermalloc_cuda_sim::{Access, Config, Latency, Progress};

/// Rounds until the steady state, and then.
const WARM: usize = 30;
const ROUNDS: usize = 6;

/// What a replay found.
pub(crate) struct Found {
    pub(crate) warm_us: f64,
    pub(crate) us_per_alloc: f64,
    pub(crate) memory_calls_per_alloc: f64,
    pub(crate) event_calls_per_alloc: f64,
    pub(crate) event_calls_per_cross: f64,
    pub(crate) peak_reserved: u64,
    pub(crate) peak_needed: u64,
}

struct Player<'a> {
    m: &'a Machine,
    /// The pool's time, milliseconds: that of the simulated machine.
    clock: Arc<AtomicU64>,
    streams: Vec<Stream>,
    event: Event,
    /// By number: address, size, stream.
    blocks: HashMap<usize, (u64, u64, usize)>,
    in_use: u64,
    peak_in_use: u64,
    peak_reserved: u64,
    peak_needed: u64,
    allocs: u64,
    waited_ns: u64,
}

impl Player<'_> {
    fn play(&mut self, policy: &mut dyn Policy, steps: &[Step]) {
        for &step in steps {
            self.clock.store(self.m.sim.now_ns() / 1_000_000, Relaxed);
            match step {
                Step::Alloc { id, bytes, stream } => {
                    let ptr = policy.alloc(self.m, bytes, self.streams[stream]);
                    self.allocs += 1;
                    self.in_use += bytes;
                    self.peak_in_use = self.peak_in_use.max(self.in_use);
                    self.blocks.insert(id, (ptr, bytes, stream));
                    let access = [Access::write(ptr, bytes, 1)];
                    let launched = self.m.sim.launch(self.streams[stream], &access);
                    if let Err(error) = launched {
                        panic!("{error}");
                    }
                    self.look(policy);
                }
                Step::Free { id } => {
                    if let Some((ptr, bytes, stream)) = self.blocks.remove(&id) {
                        self.in_use -= bytes;
                        policy.free(self.m, ptr, self.streams[stream]);
                    }
                }
                Step::Use { id, stream } => {
                    let (ptr, bytes, own) = self.blocks[&id];
                    let (own, stream) = (self.streams[own], self.streams[stream]);
                    // SAFETY: live objects.
                    let _ = unsafe { self.m.driver.event_record(self.event, own) };
                    // SAFETY: live objects.
                    let _ = unsafe { self.m.driver.stream_wait_event(stream, self.event, 0) };
                    policy.record_use(self.m, ptr, stream);
                    let _ = self.m.sim.launch(stream, &[Access::read(ptr, bytes)]);
                }
                Step::End { id, stream } => {
                    policy.end_use(self.m, self.blocks[&id].0, self.streams[stream]);
                }
                Step::Kernel { stream } => {
                    let _ = self.m.sim.launch(self.streams[stream], &[]);
                }
            }
        }
    }

    /// A round ends with a look at its result, as a step of a program does.
    fn round(&mut self, policy: &mut dyn Policy, steps: &[Step]) {
        self.play(policy, steps);
        let end = self.m.sim.now_ns();
        for &stream in &self.streams {
            // SAFETY: a live stream.
            let _ = unsafe { self.m.driver.stream_synchronize(stream) };
        }
        self.waited_ns += self.m.sim.now_ns() - end;
    }

    fn look(&mut self, policy: &dyn Policy) {
        self.peak_reserved = self.peak_reserved.max(policy.reserved(self.m));
        // Looking costs time, so rarely.
        if self.allocs.is_multiple_of(8) {
            let stats = self.m.pool.stats();
            let needed = stats.active_bytes + stats.pending_bytes;
            self.peak_needed = self.peak_needed.max(needed);
        }
    }
}

/// Calls of events that the trace itself makes.
fn own_event_calls(trace: &Trace) -> u64 {
    2 * trace.round.iter().filter(|step| matches!(step, Step::Use { .. })).count() as u64
}

pub(crate) fn replay(
    trace: &Trace,
    make: &dyn Fn(&Machine) -> Box<dyn Policy>,
    build: &dyn Fn(PoolBuilder) -> PoolBuilder,
    vmm: bool,
) -> Found {
    let config = Config {
        vram_bytes: 64 << 30,
        latency: Latency::REALISTIC,
        progress: Progress::Timed,
        vmm,
        ..Config::default()
    };
    let clock = Arc::new(AtomicU64::new(0));
    let m = machine::machine(config, |pool| build(pool).clock_ms(Arc::clone(&clock)));
    let mut policy = make(&m);
    let mut event = Event::NULL;
    // SAFETY: a valid place to write to.
    let _ = unsafe { m.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING) };
    let mut player = Player {
        m: &m,
        clock,
        streams: (0..trace.streams).map(|_| m.stream()).collect(),
        event,
        blocks: HashMap::new(),
        in_use: 0,
        peak_in_use: 0,
        peak_reserved: 0,
        peak_needed: 0,
        allocs: 0,
        waited_ns: 0,
    };
    player.play(&mut *policy, &trace.once);
    for _ in 0..WARM {
        player.round(&mut *policy, &trace.round);
    }
    let warm_us = m.sim.now_ns() as f64 / 1000.0;
    let before = m.pool.stats();
    let (memory, events, allocs) = (memory_calls(&m), event_calls(&m), player.allocs);
    let now = m.sim.now_ns() - player.waited_ns;
    for _ in 0..ROUNDS {
        player.round(&mut *policy, &trace.round);
    }
    let allocs = (player.allocs - allocs) as f64;
    let events = event_calls(&m) - events - ROUNDS as u64 * own_event_calls(trace);
    let stats = m.pool.stats();
    let crossed = stats.cross_stream_reuses + stats.deferred_frees
        - (before.cross_stream_reuses + before.deferred_frees);
    let launches = trace
        .round
        .iter()
        .filter(|step| !matches!(step, Step::Free { .. } | Step::End { .. }))
        .count();
    // The time of the trace's own kernels and events is not the allocator's.
    let own_ns = ROUNDS as u64
        * (launches as u64 * Latency::REALISTIC.launch_ns
            + own_event_calls(trace) * Latency::REALISTIC.event_ns);
    let spent = (m.sim.now_ns() - player.waited_ns - now).saturating_sub(own_ns);
    if let Some(first) = m.sim.violations().first() {
        panic!("{}: {}: {first}", trace.name, policy.name());
    }
    if std::env::var_os("CUDA_BENCH_REPORT").is_some() {
        let _ = writeln!(
            std::io::stderr(),
            "{} {}\n{}\n{:?}\nrecords {} queries {} waits {} crossed {crossed}",
            trace.name,
            policy.name(),
            m.pool.report(),
            m.pool.driver_calls(),
            stats.event_records - before.event_records,
            stats.event_queries - before.event_queries,
            stats.waits_inserted - before.waits_inserted,
        );
    }
    Found {
        warm_us,
        us_per_alloc: spent as f64 / 1000.0 / allocs,
        memory_calls_per_alloc: (memory_calls(&m) - memory) as f64 / allocs,
        event_calls_per_alloc: events as f64 / allocs,
        event_calls_per_cross: if crossed > 0 { events as f64 / crossed as f64 } else { 0.0 },
        peak_reserved: player.peak_reserved,
        peak_needed: player.peak_needed.max(player.peak_in_use),
    }
}

type Make = (&'static str, fn(&Machine) -> Box<dyn Policy>, fn(PoolBuilder) -> PoolBuilder, bool);

const POLICIES: [Make; 7] = [
    ("pool, virtual memory", |_| Box::new(Thermalloc("pool, virtual memory")), |b| b, true),
    (
        "pool on driver pool",
        |_| Box::new(Thermalloc("pool on driver pool")),
        |b| b.backing(Backing::DriverPool),
        true,
    ),
    (
        "pool, cuMemAlloc",
        |_| Box::new(Thermalloc("pool, cuMemAlloc")),
        |b| b.backing(Backing::Plain),
        false,
    ),
    ("plain driver", |_| Box::new(Plain), |b| b, true),
    ("driver pool", |m| Box::new(DriverPool::new(m)), |b| b, true),
    ("caching by size bins", |_| Box::<SizeBins>::default(), |b| b, true),
    ("best fit, no stitching", |_| Box::<BestFit>::default(), |b| b, true),
];

/// The pool on other traces, where its figures must hold as well.
pub(crate) fn vary(out: &mut impl Write, seeds: std::ops::Range<u64>) -> std::io::Result<()> {
    writeln!(
        out,
        "{:<36} {:<22} {:>9} {:>9} {:>10} {:>7}",
        "trace", "policy", "mem/all", "ev/cross", "peak MiB", "ratio"
    )?;
    for trace in seeds.flat_map(traces::varied) {
        for (name, make, build, vmm) in &POLICIES[..3] {
            let f = replay(&trace, make, build, *vmm);
            writeln!(
                out,
                "{:<36} {name:<22} {:>9.4} {:>9.3} {:>10.0} {:>7.3}",
                trace.name,
                f.memory_calls_per_alloc,
                f.event_calls_per_cross,
                f.peak_reserved as f64 / (1u64 << 20) as f64,
                f.peak_reserved as f64 / f.peak_needed as f64,
            )?;
        }
    }
    Ok(())
}

/// The table; `csv` is for the committed results.
pub(crate) fn run(out: &mut impl Write, csv: bool, traces: Vec<Trace>) -> std::io::Result<()> {
    if csv {
        writeln!(
            out,
            "trace,policy,us_per_alloc,memory_calls_per_alloc,event_calls_per_alloc,event_calls_per_cross_stream_reuse,peak_reserved_mib,peak_needed_mib,reserved_over_needed,warm_up_ms"
        )?;
    }
    for trace in traces {
        if !csv {
            writeln!(out, "\n{}", trace.name)?;
            writeln!(
                out,
                "  {:<24} {:>10} {:>9} {:>9} {:>9} {:>10} {:>7}",
                "policy", "us/alloc", "mem/all", "event/all", "ev/cross", "peak MiB", "ratio"
            )?;
        }
        for (name, make, build, vmm) in POLICIES {
            let f = replay(&trace, &make, &build, vmm);
            let mib = |bytes: u64| bytes as f64 / (1u64 << 20) as f64;
            let ratio = f.peak_reserved as f64 / f.peak_needed as f64;
            if csv {
                writeln!(
                    out,
                    "\"{}\",\"{name}\",{:.3},{:.4},{:.4},{:.4},{:.1},{:.1},{ratio:.4},{:.1}",
                    trace.name,
                    f.us_per_alloc,
                    f.memory_calls_per_alloc,
                    f.event_calls_per_alloc,
                    f.event_calls_per_cross,
                    mib(f.peak_reserved),
                    mib(f.peak_needed),
                    f.warm_us / 1000.0
                )?;
            } else {
                writeln!(
                    out,
                    "  {name:<24} {:>10.2} {:>9.3} {:>9.3} {:>9.3} {:>10.0} {ratio:>7.3}",
                    f.us_per_alloc,
                    f.memory_calls_per_alloc,
                    f.event_calls_per_alloc,
                    f.event_calls_per_cross,
                    mib(f.peak_reserved)
                )?;
            }
        }
    }
    Ok(())
}
