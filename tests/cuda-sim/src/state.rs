//! One simulated machine: everything behind one lock.
//!
//! Whatever is wrong with a program is judged when it submits, from clocks; so nothing depends on how
//! far the device got.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use thermalloc_cuda::driver::{Call, Context, HostFn, MemHandle, code};

use crate::arena::Arena;
use crate::capture::{Capture, ExecData, GraphData, ObjectData};
use crate::clock::Clock;
use crate::config::Config;
use crate::memory::{Grave, Phys, Region};
use crate::pool::Pool;
use crate::rng::Rng;
use crate::shadow::Shadow;
use crate::stream::{EventSlot, StreamSlot};

pub(crate) type R<T = ()> = Result<T, u32>;

/// A kind of mistake.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Mistake {
    /// Two accesses, at least one a write, that nothing orders.
    Race,
    /// An access to an address that was never memory.
    IllegalAddress,
    /// An access to memory that was freed or unmapped before.
    UseAfterFree,
    /// Memory freed, unmapped or released twice.
    DoubleFree,
    /// Freeing or unmapping what is none, or not as it was made.
    BadFree,
    /// Memory unmapped, or host memory unregistered, while the device may use it.
    UnmapInUse,
    /// A stream, event, pool or graph that was destroyed.
    BadHandle,
    /// A call that can block, made while the probed lock was held.
    CallUnderLock,
    /// A driver call from a host function.
    CallInHostFunction,
    /// A kernel found other bytes than it expected.
    WrongData,
    /// A call that a capture forbids.
    Capture,
    /// Something still there at the end.
    Leak,
}

/// A mistake of the program under test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What kind.
    pub mistake: Mistake,
    /// What, where and with whom.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.mistake, self.text)
    }
}

/// Makes calls of one function fail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) call: Call,
    pub(crate) skip: u64,
    pub(crate) times: u64,
    /// Of those calls, one in so many, at random.
    pub(crate) one_in: u64,
    pub(crate) code: u32,
}

pub(crate) struct Device {
    pub(crate) total: u64,
    pub(crate) used: u64,
    pub(crate) peak_used: u64,
    pub(crate) other_process: u64,
    pub(crate) context_refs: u32,
    pub(crate) sticky: u32,
    pub(crate) legacy: u32,
    pub(crate) default_pool: usize,
    pub(crate) current_pool: usize,
    pub(crate) peers: u32,
    pub(crate) graph_used: u64,
    pub(crate) graph_used_high: u64,
    pub(crate) graph_reserved_high: u64,
}

/// Violations beyond this many are only counted.
const KEPT_VIOLATIONS: usize = 1000;

pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) generation: u64,
    pub(crate) initialised: bool,
    pub(crate) now_ns: u64,
    pub(crate) rng: Rng,
    pub(crate) devices: Vec<Device>,
    pub(crate) streams: Vec<StreamSlot>,
    pub(crate) events: Vec<EventSlot>,
    pub(crate) free_events: Vec<u32>,
    pub(crate) next_unique: usize,
    /// What the host has seen complete.
    pub(crate) host: Clock,
    pub(crate) shadow: Shadow,
    pub(crate) arena: Arena,
    pub(crate) regions: BTreeMap<u64, Region>,
    pub(crate) graves: BTreeMap<u64, Grave>,
    pub(crate) reservations: BTreeMap<u64, u64>,
    pub(crate) phys: HashMap<MemHandle, Phys>,
    pub(crate) next_handle: MemHandle,
    pub(crate) next_phys: u64,
    pub(crate) vram_fd: i32,
    pub(crate) own_fds: Vec<i32>,
    pub(crate) pinned: u64,
    pub(crate) pools: BTreeMap<usize, Pool>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: BTreeMap<usize, GraphData>,
    pub(crate) execs: BTreeMap<usize, ExecData>,
    pub(crate) objects: BTreeMap<usize, ObjectData>,
    pub(crate) modules: BTreeMap<usize, ()>,
    pub(crate) functions: Vec<String>,
    /// Callbacks to be made when the lock is not held.
    pub(crate) deferred: Vec<(HostFn, usize)>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) violations_seen: u64,
    pub(crate) calls: Vec<u64>,
}

impl State {
    pub(crate) fn new(config: Config, generation: u64) -> R<Self> {
        let mut state = Self {
            generation,
            initialised: false,
            now_ns: 0,
            rng: Rng::new(config.seed),
            devices: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            free_events: Vec::new(),
            next_unique: 1,
            host: Clock::default(),
            shadow: Shadow::default(),
            arena: Arena::new()?,
            regions: BTreeMap::new(),
            graves: BTreeMap::new(),
            reservations: BTreeMap::new(),
            phys: HashMap::new(),
            next_handle: 1,
            next_phys: 1 << 21,
            vram_fd: crate::memory::memfd()?,
            own_fds: Vec::new(),
            pinned: 0,
            pools: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            objects: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: Vec::new(),
            deferred: Vec::new(),
            faults: Vec::new(),
            violations: Vec::new(),
            violations_seen: 0,
            calls: vec![0; Call::ALL.len()],
            config,
        };
        for device in 0..state.config.devices {
            let legacy = state.new_stream(device as u32, true, true);
            let pool = state.new_pool(device as u32, 0, state.vram_fd);
            state.devices.push(Device {
                total: state.config.vram_bytes,
                used: 0,
                peak_used: 0,
                other_process: 0,
                context_refs: 0,
                sticky: 0,
                legacy,
                default_pool: pool,
                current_pool: pool,
                peers: 0,
                graph_used: 0,
                graph_used_high: 0,
                graph_reserved_high: 0,
            });
        }
        Ok(state)
    }

    pub(crate) fn violate(&mut self, mistake: Mistake, text: String) {
        self.violations_seen += 1;
        if self.violations.len() < KEPT_VIOLATIONS {
            self.violations.push(Violation { mistake, text });
        }
    }

    /// A number that no other object of this machine has.
    pub(crate) fn unique(&mut self) -> usize {
        self.next_unique += 1;
        self.next_unique
    }

    /// Whether this call is made to fail.
    pub(crate) fn injected(&mut self, call: Call) -> Option<u32> {
        let Self { faults, rng, .. } = self;
        let fault = faults.iter_mut().find(|fault| fault.call == call && fault.times > 0)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        if fault.one_in > 1 && rng.below(fault.one_in) > 0 {
            return None;
        }
        fault.times -= 1;
        Some(fault.code)
    }

    pub(crate) fn device_of(&self, ordinal: i32) -> R<u32> {
        match u32::try_from(ordinal) {
            Ok(device) if (device as usize) < self.devices.len() => Ok(device),
            _ => Err(code::ERROR_INVALID_DEVICE),
        }
    }

    /// The largest request that a device could still serve, were it in one piece.
    pub(crate) fn device_free(&self, device: u32) -> u64 {
        let device = &self.devices[device as usize];
        device.total.saturating_sub(device.used + device.other_process)
    }

    pub(crate) fn charge(&mut self, device: u32, bytes: u64) -> R {
        if bytes > self.device_free(device) {
            return Err(code::ERROR_OUT_OF_MEMORY);
        }
        let device = &mut self.devices[device as usize];
        device.used += bytes;
        device.peak_used = device.peak_used.max(device.used);
        Ok(())
    }

    pub(crate) fn discharge(&mut self, device: u32, bytes: u64) {
        self.devices[device as usize].used -= bytes;
    }

    /// What the program forgot.
    pub(crate) fn leaks(&self) -> Vec<Violation> {
        let mut leaks = Vec::new();
        let mut leak = |text: String| leaks.push(Violation { mistake: Mistake::Leak, text });
        for (at, region) in &self.regions {
            leak(format!("{} of {} bytes at {at:#x}", region.kind.name(), region.len));
        }
        for (at, len) in &self.reservations {
            leak(format!("address range of {len} bytes at {at:#x}"));
        }
        for (handle, phys) in self.phys.iter().filter(|(_, phys)| phys.handles > 0) {
            leak(format!("physical memory {handle} of {} bytes", phys.len));
        }
        for stream in self.streams.iter().filter(|stream| stream.is_users()) {
            leak(format!("stream {}", stream.number));
        }
        for event in self.events.iter().filter(|event| event.alive) {
            leak(format!("event {:#x}", event.handle));
        }
        let own = |pool: &usize| self.devices.iter().any(|device| device.default_pool == *pool);
        for pool in self.pools.keys().filter(|pool| !own(pool)) {
            leak(format!("memory pool {pool:#x}"));
        }
        for graph in self.graphs.keys() {
            leak(format!("graph {graph:#x}"));
        }
        for exec in self.execs.keys() {
            leak(format!("instantiated graph {exec:#x}"));
        }
        for object in self.objects.keys() {
            leak(format!("user object {object:#x}"));
        }
        leaks
    }
}

impl Drop for State {
    fn drop(&mut self) {
        for fd in self.own_fds.iter().copied().chain([self.vram_fd]) {
            // SAFETY: our own descriptor.
            unsafe { libc::close(fd) };
        }
        self.unmap_host_memory();
    }
}

pub(crate) fn context_of(device: u32) -> Context {
    Context(0xC0DE_0000 | (device as usize + 1) << 4)
}

pub(crate) fn device_of_context(context: Context) -> Option<u32> {
    let number = (context.0 & 0xffff) >> 4;
    (number > 0 && context == context_of(number as u32 - 1)).then(|| number as u32 - 1)
}
