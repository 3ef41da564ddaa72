//! One device: its context, what it can do, and the calls that the pool makes of it.

use crate::driver::{
    AccessDesc, AllocationProp, Context, Driver, Error, Event, Features, Location, MemPool,
    MemPoolProps, Stream, code, constant,
};
use crate::fault::{self, planted};
use crate::heap::CHUNK;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Locks whatever happened to another thread: the books are written in steps that cannot fail.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a pool's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Physical chunks of 2 MiB, mapped to reserved addresses.
    Virtual,
    /// Segments of a memory pool of the driver.
    DriverPool,
    /// Segments of `cuMemAlloc`.
    Plain,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Virtual => "virtual memory",
            Self::DriverPool => "the driver's pool",
            Self::Plain => "cuMemAlloc",
        })
    }
}

/// A device.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) driver: Arc<Driver>,
    pub(crate) ordinal: i32,
    pub(crate) device: i32,
    pub(crate) context: Context,
    pub(crate) features: Features,
    pub(crate) backing: Backing,
    pub(crate) total_bytes: u64,
    /// Handle types that chunks can be exported as.
    handle_types: u32,
    mem_pool: MemPool,
    access: RwLock<Vec<AccessDesc>>,
    events: Mutex<Vec<Event>>,
    pub(crate) events_made: AtomicU64,
}

/// Makes the device's context current until it is dropped, and the one before again then.
pub(crate) struct Current<'a> {
    gpu: &'a Gpu,
    pushed: bool,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = Context::NULL;
            // SAFETY: a valid place to write to; the context was pushed by this value.
            let _ = unsafe { self.gpu.driver.ctx_pop_current(&raw mut context) };
        }
    }
}

/// While it lives, this thread may make calls that a capture of another stream would forbid.
pub(crate) struct Relaxed_<'a> {
    gpu: &'a Gpu,
    before: Option<u32>,
}

impl Drop for Relaxed_<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            // SAFETY: a valid place to read and to write.
            let _ = unsafe { self.gpu.driver.thread_exchange_stream_capture_mode(&raw mut mode) };
        }
    }
}

impl Gpu {
    /// The device, with the best backing of those up to `wanted` that it has.
    pub(crate) fn new(
        driver: Arc<Driver>,
        ordinal: i32,
        wanted: Option<Backing>,
    ) -> Result<Self, Error> {
        let (mut device, mut context, mut total) = (0, Context::NULL, 0usize);
        // SAFETY: a valid place to write to.
        unsafe { driver.device_get(&raw mut device, ordinal) }?;
        // SAFETY: as above, and a device that the driver named.
        unsafe { driver.primary_ctx_retain(&raw mut context, device) }?;
        // SAFETY: as above.
        unsafe { driver.device_total_mem(&raw mut total, device) }?;
        let features = driver.features(device)?;
        let mut gpu = Self {
            driver,
            ordinal,
            device,
            context,
            features,
            backing: Backing::Plain,
            total_bytes: total as u64,
            handle_types: if features.export_fd {
                constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            } else {
                constant::MEM_HANDLE_TYPE_NONE
            },
            mem_pool: MemPool::NULL,
            access: RwLock::new(vec![AccessDesc {
                location: Location::device(device),
                flags: constant::MEM_ACCESS_FLAGS_PROT_READWRITE,
            }]),
            events: Mutex::new(Vec::new()),
            events_made: AtomicU64::new(0),
        };
        let wants = |backing| wanted.is_none_or(|w| w == backing);
        if features.vmm && wants(Backing::Virtual) && gpu.chunk_fits() {
            gpu.backing = Backing::Virtual;
        } else if features.pools
            && wanted.is_none_or(|w| w != Backing::Plain)
            && gpu.make_pool().is_ok()
        {
            gpu.backing = Backing::DriverPool;
        }
        Ok(gpu)
    }

    /// Whether 2 MiB are a multiple of the granularity; where export makes the difference, without it.
    fn chunk_fits(&mut self) -> bool {
        for types in [self.handle_types, constant::MEM_HANDLE_TYPE_NONE] {
            let mut bytes = 0usize;
            let prop = AllocationProp::device(self.device, types);
            // SAFETY: valid places to read and to write.
            let found = unsafe {
                self.driver.mem_get_allocation_granularity(
                    &raw mut bytes,
                    &raw const prop,
                    constant::MEM_ALLOC_GRANULARITY_MINIMUM,
                )
            };
            if found.is_ok() && bytes > 0 && CHUNK.is_multiple_of(bytes as u64) {
                self.handle_types = types;
                return true;
            }
        }
        false
    }

    fn make_pool(&mut self) -> Result<(), Error> {
        let props = MemPoolProps::device(self.device, constant::MEM_HANDLE_TYPE_NONE);
        // SAFETY: valid places to read and to write.
        unsafe { self.driver.mem_pool_create(&raw mut self.mem_pool, &raw const props) }?;
        // What the driver keeps could serve nobody else; this pool keeps what is warm itself.
        let mut threshold = 0u64;
        // SAFETY: the attribute is a u64.
        unsafe {
            self.driver.mem_pool_set_attribute(
                self.mem_pool,
                constant::MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut threshold).cast(),
            )
        }
    }

    /// Makes the context current.
    pub(crate) fn enter(&self) -> Result<Current<'_>, Error> {
        let mut now = Context::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.ctx_get_current(&raw mut now) }?;
        let pushed = now != self.context;
        if pushed {
            // SAFETY: a context that is retained for as long as this value lives.
            unsafe { self.driver.ctx_push_current(self.context) }?;
        }
        Ok(Current { gpu: self, pushed })
    }

    /// Lets this thread allocate while a stream is captured.
    pub(crate) fn relax(&self) -> Relaxed_<'_> {
        let mut mode = constant::STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid place to read and to write.
        let set = unsafe { self.driver.thread_exchange_stream_capture_mode(&raw mut mode) };
        Relaxed_ { gpu: self, before: set.is_ok().then_some(mode) }
    }

    /// Free and total bytes of the device, whoever uses it.
    pub(crate) fn mem_info(&self) -> Result<(u64, u64), Error> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: valid places to write to.
        unsafe { self.driver.mem_get_info(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    // ---- events -------------------------------------------------------------------------------

    /// Records an event on a stream; the event goes back to the pool of events when it is dropped.
    pub(crate) fn record(self: &Arc<Self>, stream: Stream) -> Result<Arc<Recorded>, Error> {
        let pooled = lock(&self.events).pop();
        let event = match pooled {
            Some(event) => event,
            None => {
                let _current = self.enter()?;
                let mut event = Event::NULL;
                // SAFETY: a valid place to write to.
                unsafe {
                    self.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING)
                }?;
                self.events_made.fetch_add(1, Relaxed);
                event
            }
        };
        let recorded = Arc::new(Recorded { gpu: Arc::clone(self), event });
        if planted(fault::LOST_EVENT) && pooled.is_some() {
            return Ok(recorded);
        }
        let _current = self.enter_for(stream)?;
        // SAFETY: an event of this context; the caller's stream is alive.
        unsafe { self.driver.event_record(event, stream) }?;
        Ok(recorded)
    }

    /// The default streams mean those of the current context.
    fn enter_for(&self, stream: Stream) -> Result<Option<Current<'_>>, Error> {
        if stream.0 <= Stream::PER_THREAD.0 { self.enter().map(Some) } else { Ok(None) }
    }

    /// Whether what was recorded is complete.
    pub(crate) fn is_complete(&self, event: &Recorded) -> Result<bool, Error> {
        // SAFETY: the event is alive.
        match unsafe { self.driver.event_query(event.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Some(code::ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes a stream wait for what was recorded.
    pub(crate) fn wait(&self, stream: Stream, event: &Recorded) -> Result<(), Error> {
        if planted(fault::MISSING_WAIT) {
            return Ok(());
        }
        let _current = self.enter_for(stream)?;
        // SAFETY: stream and event are alive.
        unsafe { self.driver.stream_wait_event(stream, event.event, 0) }
    }

    // ---- virtual memory -----------------------------------------------------------------------

    pub(crate) fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        let mut ptr = 0;
        // SAFETY: a valid place to write to.
        unsafe {
            self.driver.mem_address_reserve(&raw mut ptr, bytes as usize, CHUNK as usize, 0, 0)
        }?;
        Ok(ptr)
    }

    pub(crate) fn unreserve(&self, addr: u64, bytes: u64) {
        // SAFETY: the range was reserved as one and nothing is mapped in it.
        let _ = unsafe { self.driver.mem_address_free(addr, bytes as usize) };
    }

    pub(crate) fn create(&self) -> Result<u64, Error> {
        let prop = AllocationProp::device(self.device, self.handle_types);
        let mut handle = 0;
        // SAFETY: valid places to read and to write.
        unsafe { self.driver.mem_create(&raw mut handle, CHUNK as usize, &raw const prop, 0) }?;
        Ok(handle)
    }

    pub(crate) fn release(&self, handle: u64) {
        // SAFETY: a handle that was created here and is released once.
        let _ = unsafe { self.driver.mem_release(handle) };
    }

    /// Whether chunks can be exported as file descriptors.
    pub(crate) fn exports_fds(&self) -> bool {
        self.handle_types & constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0
    }

    /// Maps chunks side by side, all or none.
    pub(crate) fn map(&self, addr: u64, handles: &[u64]) -> Result<(), Error> {
        let mut end = addr;
        let mut mapped = || {
            for &handle in handles {
                // SAFETY: reserved addresses with nothing mapped, and a live handle.
                unsafe { self.driver.mem_map(end, CHUNK as usize, 0, handle, 0) }?;
                end += CHUNK;
            }
            self.allow(addr, handles.len() as u64 * CHUNK)
        };
        let result = mapped();
        if result.is_err() {
            self.unmap(addr, (end - addr) / CHUNK);
        }
        result
    }

    fn allow(&self, addr: u64, bytes: u64) -> Result<(), Error> {
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a mapped range and a list of valid descriptions.
        unsafe { self.driver.mem_set_access(addr, bytes as usize, access.as_ptr(), access.len()) }
    }

    pub(crate) fn unmap(&self, addr: u64, chunks: u64) {
        if chunks > 0 {
            // SAFETY: whole mappings; nothing that was submitted uses them any more.
            let _ = unsafe { self.driver.mem_unmap(addr, (chunks * CHUNK) as usize) };
        }
    }

    /// Lets another device use this device's memory; `ranges` are those mapped now.
    pub(crate) fn allow_peer(
        &self,
        peer: i32,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Result<(), Error> {
        let mut can = 0;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.device_can_access_peer(&raw mut can, peer, self.device) }?;
        if can == 0 {
            let call = "cuDeviceCanAccessPeer";
            return Err(Error::Call { call, code: code::ERROR_PEER_ACCESS_UNSUPPORTED });
        }
        let desc = AccessDesc {
            location: Location::device(peer),
            flags: constant::MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        {
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            if !access.contains(&desc) {
                access.push(desc);
            }
        }
        match self.backing {
            Backing::Virtual => {
                for (addr, bytes) in ranges {
                    self.allow(addr, bytes)?;
                }
                Ok(())
            }
            // SAFETY: a pool of ours and one valid description.
            Backing::DriverPool => unsafe {
                self.driver.mem_pool_set_access(self.mem_pool, &raw const desc, 1)
            },
            Backing::Plain => self.enable_peer(peer),
        }
    }

    /// Lets the peer's context reach this one's memory.
    fn enable_peer(&self, peer: i32) -> Result<(), Error> {
        let mut context = Context::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.primary_ctx_retain(&raw mut context, peer) }?;
        // SAFETY: it was retained above.
        unsafe { self.driver.ctx_push_current(context) }?;
        // SAFETY: both contexts are retained.
        let enabled = unsafe { self.driver.ctx_enable_peer_access(self.context, 0) };
        // SAFETY: it was pushed above.
        unsafe { self.driver.ctx_pop_current(&raw mut context) }?;
        match enabled {
            Err(error) if error.code() == Some(code::ERROR_PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
            other => other,
        }
    }

    // ---- segments -----------------------------------------------------------------------------

    pub(crate) fn alloc_segment(&self, bytes: u64, stream: Stream) -> Result<u64, Error> {
        let _current = self.enter()?;
        let mut ptr = 0;
        if self.backing == Backing::DriverPool {
            // SAFETY: a valid place to write to, and a live stream.
            unsafe {
                self.driver.mem_alloc_from_pool_async(
                    &raw mut ptr,
                    bytes as usize,
                    self.mem_pool,
                    stream,
                )
            }?;
        } else {
            // SAFETY: a valid place to write to.
            unsafe { self.driver.mem_alloc(&raw mut ptr, bytes as usize) }?;
        }
        Ok(ptr)
    }

    pub(crate) fn free_segment(&self, addr: u64, stream: Stream) {
        let Ok(_current) = self.enter() else { return };
        let _ = if self.backing == Backing::DriverPool {
            // SAFETY: a block of the pool, whose last use is complete.
            unsafe { self.driver.mem_free_async(addr, stream) }
        } else {
            // SAFETY: as above, of `cuMemAlloc`.
            unsafe { self.driver.mem_free(addr) }
        };
    }

    /// Gives back what the driver's pool keeps.
    pub(crate) fn trim_pool(&self) {
        if self.backing == Backing::DriverPool {
            // SAFETY: a pool of ours.
            let _ = unsafe { self.driver.mem_pool_trim_to(self.mem_pool, 0) };
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { self.driver.ctx_synchronize() }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        {
            let _current = self.enter();
            for event in lock(&self.events).drain(..) {
                // SAFETY: nobody has it any more.
                let _ = unsafe { self.driver.event_destroy(event) };
            }
            if self.mem_pool != MemPool::NULL {
                // SAFETY: all its blocks were freed.
                let _ = unsafe { self.driver.mem_pool_destroy(self.mem_pool) };
            }
        }
        // SAFETY: it was retained once.
        let _ = unsafe { self.driver.primary_ctx_release(self.device) };
    }
}

/// An event that was recorded; it is recorded anew only when nobody has it any more.
#[derive(Debug)]
pub(crate) struct Recorded {
    gpu: Arc<Gpu>,
    event: Event,
}

impl Recorded {
    /// Puts the event back while others still trust it, as a fault.
    pub(crate) fn recycle_early(&self) {
        if planted(fault::EARLY_EVENT) {
            lock(&self.gpu.events).push(self.event);
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !planted(fault::EARLY_EVENT) {
            lock(&self.gpu.events).push(self.event);
        }
    }
}
