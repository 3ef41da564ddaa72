//! How a pool is made.

use crate::capture::Captures;
use crate::chunk_map::ChunkMap;
use crate::driver::{Driver, Error};
use crate::gpu::{Backing, Gpu};
use crate::heat::Heat;
use crate::history::History;
use crate::ledger::Ledger;
use crate::pool::{Inner, Pool, PoolCounts};
use crate::recent::coarse_ms;
use crate::record::Recorder;
use crate::shard::{Shards, Streams, next_number};
use crate::supply::SLACK_FIRST;
use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};

/// What to do when another stream has free memory that is not complete yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// Take more memory from the driver while the pool is within its usual size; wait beyond it.
    #[default]
    Grow,
    /// Insert a wait whenever that saves memory.
    Wait,
    /// Never make a stream wait.
    Complete,
}

/// Asked when memory has run out: frees what it can and says whether to try again.
pub type OnOutOfMemory = dyn Fn(u64) -> bool + Send + Sync;

/// The time of a pool, milliseconds.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    Real,
    Set(Arc<AtomicU64>),
}

impl Clock {
    pub(crate) fn now_ms(&self) -> u64 {
        match self {
            Self::Real => coarse_ms(),
            Self::Set(ms) => ms.load(Relaxed),
        }
    }
}

/// How a pool is made.
pub struct PoolBuilder {
    ordinal: i32,
    backing: Option<Backing>,
    pub(crate) options: Options,
    clock: Clock,
    callback: Option<Box<OnOutOfMemory>>,
    ledger: Option<&'static dyn Ledger>,
    record: Option<File>,
    background: bool,
}

/// What can be chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) limit_percent: Option<u64>,
    pub(crate) hot_window_ms: u64,
    pub(crate) decay_ms: Option<u64>,
    pub(crate) wait_ms: Option<u64>,
    pub(crate) reuse: Reuse,
    pub(crate) pressure_percent: u64,
    pub(crate) history: usize,
}

impl fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl PoolBuilder {
    /// A pool for the device of this number.
    pub fn new(ordinal: i32) -> Self {
        Self {
            ordinal,
            backing: None,
            options: Options {
                limit_bytes: None,
                limit_percent: None,
                hot_window_ms: 5000,
                decay_ms: Some(2000),
                wait_ms: Some(5000),
                reuse: Reuse::Grow,
                pressure_percent: 2,
                history: 0,
            },
            clock: Clock::Real,
            callback: None,
            ledger: None,
            record: None,
            background: false,
        }
    }

    /// Takes this backing, or the next simpler one that the device has.
    #[must_use]
    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = Some(backing);
        self
    }

    /// The most that the pool may have.
    #[must_use]
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.options.limit_bytes = Some(bytes);
        self
    }

    /// The most that the pool may have, as a part of the device.
    #[must_use]
    pub fn limit_percent(mut self, percent: u64) -> Self {
        self.options.limit_percent = Some(percent);
        self
    }

    /// Memory in use at one time within this window is kept.
    #[must_use]
    pub fn hot_window_ms(mut self, ms: u64) -> Self {
        self.options.hot_window_ms = ms;
        self
    }

    /// Over how long cold memory goes back; `None`: never.
    #[must_use]
    pub fn decay_ms(mut self, ms: Option<u64>) -> Self {
        self.options.decay_ms = ms;
        self
    }

    /// How long an allocation that finds no memory waits for pending memory. `None` switches that
    /// off: such a wait can deadlock with collectives.
    #[must_use]
    pub fn wait_ms(mut self, ms: Option<u64>) -> Self {
        self.options.wait_ms = ms;
        self
    }

    /// What to do when another stream has free memory that is not complete yet.
    #[must_use]
    pub fn reuse(mut self, reuse: Reuse) -> Self {
        self.options.reuse = reuse;
        self
    }

    /// Gives free memory back at once while less than this part of the device is free.
    #[must_use]
    pub fn pressure_percent(mut self, percent: u64) -> Self {
        self.options.pressure_percent = percent;
        self
    }

    /// Keeps the last `entries` allocations and frees for the snapshot.
    #[must_use]
    pub fn history(mut self, entries: usize) -> Self {
        self.options.history = entries;
        self
    }

    /// Gives cold memory back from a thread of the pool. Else that happens at later calls and at
    /// [`Pool::poll`].
    #[must_use]
    pub fn background(mut self, yes: bool) -> Self {
        self.background = yes;
        self
    }

    /// Is asked when memory has run out, with the bytes asked for. It may free blocks of the pool.
    #[must_use]
    pub fn on_out_of_memory(
        mut self,
        callback: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.callback = Some(Box::new(callback));
        self
    }

    /// Enters what is in use into a ledger.
    #[must_use]
    pub fn ledger(mut self, ledger: &'static dyn Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Writes what is asked for to a file, from which the project's bench replays it.
    #[must_use]
    pub fn record(mut self, file: File) -> Self {
        self.record = Some(file);
        self
    }

    /// Takes the time from a counter of milliseconds, for tests.
    #[must_use]
    pub fn clock_ms(mut self, ms: Arc<AtomicU64>) -> Self {
        self.clock = Clock::Set(ms);
        self
    }

    /// The pool, on the system's driver.
    ///
    /// # Errors
    /// There is no driver, or not this device.
    pub fn build(self) -> Result<Pool, Error> {
        self.build_on(Arc::new(Driver::load()?))
    }

    /// The pool, on a driver that is loaded.
    ///
    /// # Errors
    /// There is no such device.
    pub fn build_on(self, driver: Arc<Driver>) -> Result<Pool, Error> {
        let gpu = Arc::new(Gpu::new(driver, self.ordinal, self.backing)?);
        let options = self.options;
        let percent = options.limit_percent.map(|percent| gpu.total_bytes / 100 * percent);
        let limit = match (options.limit_bytes, percent) {
            (Some(bytes), Some(other)) => Some(bytes.min(other)),
            (bytes, other) => bytes.or(other),
        };
        let inner = Arc::new(Inner {
            number: AtomicU64::new(next_number()),
            gpu,
            map: ChunkMap::new(),
            streams: RwLock::new(Streams::default()),
            shards: RwLock::new(Shards::default()),
            limit_bytes: AtomicU64::new(limit.unwrap_or(u64::MAX)),
            wait_ms: AtomicU64::new(options.wait_ms.unwrap_or(0)),
            heat: Mutex::new(Heat::new(options.hot_window_ms, options.decay_ms)),
            clock: self.clock,
            options,
            callback: self.callback,
            watched: self.ledger.is_some() || self.record.is_some() || options.history > 0,
            ledger: self.ledger,
            recorder: self.record.map(Recorder::new),
            reserved: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            slack_parts: AtomicU64::new(SLACK_FIRST),
            rearrangements: AtomicU64::new(0),
            idle_chunks: Mutex::new(Vec::new()),
            last_poll_ms: AtomicU64::new(0),
            polling: AtomicBool::new(false),
            captures: Captures::default(),
            counts: PoolCounts::default(),
            history: History::new(options.history),
            tags: RwLock::new(vec!["untagged".to_owned()]),
        });
        if self.background {
            crate::background::start(&inner);
        }
        Ok(Pool { inner })
    }
}
