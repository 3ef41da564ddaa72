//! Managed memory: one address for host and device, with advice where it should lie.

use crate::driver::{DevicePtr, Driver, Error, Location, Stream, constant};
use crate::ledger::{Entry, Space};
use crate::pool::Pool;
use std::fmt;
use std::sync::Arc;

/// Where managed memory should lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the device of this number.
    Device(i32),
    /// On the host.
    Host,
}

impl Place {
    fn location(self) -> Location {
        match self {
            Self::Device(ordinal) => Location::device(ordinal),
            Self::Host => Location { kind: constant::MEM_LOCATION_TYPE_HOST, id: 0 },
        }
    }

    fn device(self) -> i32 {
        match self {
            Self::Device(ordinal) => ordinal,
            Self::Host => constant::DEVICE_CPU,
        }
    }
}

/// What the driver should know of managed memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// It is mostly read: each reader may have a copy.
    ReadMostly,
    /// It is written again.
    NotReadMostly,
    /// It should lie there.
    Prefer(Place),
    /// It has no preferred place any more.
    NoPreference(Place),
    /// That place uses it: keep it mapped there.
    AccessedBy(Place),
    /// That place does not use it any more.
    NotAccessedBy(Place),
}

/// Managed memory. Dropped, it waits for the device and is freed.
pub struct Managed {
    driver: Arc<Driver>,
    pool: Pool,
    ptr: DevicePtr,
    bytes: usize,
    /// Its number in the ledger.
    entered: u64,
}

impl fmt::Debug for Managed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Managed").field("ptr", &self.ptr).field("bytes", &self.bytes).finish()
    }
}

impl Pool {
    /// Managed memory that every device may use.
    ///
    /// # Errors
    /// The device has no managed memory, or not that much.
    pub fn managed(&self, bytes: usize) -> Result<Managed, Error> {
        let gpu = &self.inner.gpu;
        if !gpu.features.managed {
            return Err(Error::Unavailable { call: "cuMemAllocManaged" });
        }
        let _current = gpu.enter()?;
        let mut ptr = 0;
        let flags = constant::MEM_ATTACH_GLOBAL;
        // SAFETY: a valid place to write to.
        unsafe { gpu.driver.mem_alloc_managed(&raw mut ptr, bytes.max(1), flags) }?;
        let entry = Entry {
            space: Space::Managed,
            device: gpu.ordinal,
            addr: ptr,
            bytes: bytes as u64,
            usable_bytes: bytes as u64,
            stream: Stream::NULL,
            tag: "",
        };
        let entered = self.inner.ledger.map_or(0, |ledger| ledger.enter(&entry));
        Ok(Managed { driver: Arc::clone(&gpu.driver), pool: self.clone(), ptr, bytes, entered })
    }
}

impl Managed {
    /// Its address, on the host and on the device.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Advises the driver on all of it.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn advise(&self, advice: Advice) -> Result<(), Error> {
        let (code, place) = match advice {
            Advice::ReadMostly => (constant::MEM_ADVISE_SET_READ_MOSTLY, Place::Host),
            Advice::NotReadMostly => (constant::MEM_ADVISE_UNSET_READ_MOSTLY, Place::Host),
            Advice::Prefer(place) => (constant::MEM_ADVISE_SET_PREFERRED_LOCATION, place),
            Advice::NoPreference(place) => (constant::MEM_ADVISE_UNSET_PREFERRED_LOCATION, place),
            Advice::AccessedBy(place) => (constant::MEM_ADVISE_SET_ACCESSED_BY, place),
            Advice::NotAccessedBy(place) => (constant::MEM_ADVISE_UNSET_ACCESSED_BY, place),
        };
        let _current = self.pool.inner.gpu.enter()?;
        if self.driver.table().mem_advise_v2.is_some() {
            // SAFETY: live managed memory of that size.
            return unsafe {
                self.driver.mem_advise_v2(self.ptr, self.bytes, code, place.location())
            };
        }
        // SAFETY: as above.
        unsafe { self.driver.mem_advise(self.ptr, self.bytes, code, place.device()) }
    }

    /// Moves it, in the order of `stream`.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn prefetch(&self, place: Place, stream: Stream) -> Result<(), Error> {
        let _current = self.pool.inner.gpu.enter()?;
        if self.driver.table().mem_prefetch_async_v2.is_some() {
            // SAFETY: live managed memory of that size, and a live stream.
            return unsafe {
                self.driver.mem_prefetch_async_v2(self.ptr, self.bytes, place.location(), 0, stream)
            };
        }
        // SAFETY: as above.
        unsafe { self.driver.mem_prefetch_async(self.ptr, self.bytes, place.device(), stream) }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        if let Some(ledger) = self.pool.inner.ledger.filter(|_| self.entered != 0) {
            ledger.leave(self.entered, Stream::NULL, false);
        }
        let Ok(_current) = self.pool.inner.gpu.enter() else { return };
        // SAFETY: it was allocated there; the call waits for the device.
        let _ = unsafe { self.driver.mem_free(self.ptr) };
    }
}
