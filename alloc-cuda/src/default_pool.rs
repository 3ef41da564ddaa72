//! The device's default pool of the driver, which TensorFlow's `cuda_malloc_async` and JAX use: there
//! is no hook to replace it, so it is tuned and watched.

use crate::driver::{Driver, Error, MemPool, constant};
use std::sync::Arc;

/// The default pool of a device.
#[derive(Clone, Debug)]
pub struct DefaultPool {
    driver: Arc<Driver>,
    pool: MemPool,
}

/// What the default pool has, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct DefaultPoolStats {
    /// Memory that it has from the device, and the most so far.
    pub reserved_bytes: u64,
    /// The most that it had.
    pub reserved_peak_bytes: u64,
    /// Memory handed out.
    pub used_bytes: u64,
    /// The most that was handed out.
    pub used_peak_bytes: u64,
    /// What it keeps at the next synchronisation.
    pub threshold_bytes: u64,
}

impl DefaultPool {
    /// The default pool of the device of this number.
    ///
    /// # Errors
    /// The device has none.
    pub fn of(driver: Arc<Driver>, ordinal: i32) -> Result<Self, Error> {
        let mut device = 0;
        // SAFETY: a valid place to write to.
        unsafe { driver.device_get(&raw mut device, ordinal) }?;
        let has = driver.attribute(device, constant::DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?;
        if has == 0 {
            return Err(Error::Unavailable { call: "cuDeviceGetDefaultMemPool" });
        }
        let mut pool = MemPool::NULL;
        // SAFETY: a valid place to write to.
        unsafe { driver.device_get_default_mem_pool(&raw mut pool, device) }?;
        Ok(Self { driver, pool })
    }

    /// Keeps up to `bytes` over synchronisations. The driver's default is 0: all that is free goes
    /// at each, and the next allocation stalls.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn set_threshold(&self, bytes: u64) -> Result<(), Error> {
        let mut bytes = bytes;
        // SAFETY: the attribute is a u64.
        unsafe {
            self.driver.mem_pool_set_attribute(
                self.pool,
                constant::MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut bytes).cast(),
            )
        }
    }

    fn get(&self, attribute: u32) -> Result<u64, Error> {
        let mut bytes = 0u64;
        let place = (&raw mut bytes).cast();
        // SAFETY: these attributes are u64.
        unsafe { self.driver.mem_pool_get_attribute(self.pool, attribute, place) }?;
        Ok(bytes)
    }

    /// The figures of this moment.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn stats(&self) -> Result<DefaultPoolStats, Error> {
        Ok(DefaultPoolStats {
            reserved_bytes: self.get(constant::MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_peak_bytes: self.get(constant::MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            used_bytes: self.get(constant::MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            used_peak_bytes: self.get(constant::MEMPOOL_ATTR_USED_MEM_HIGH)?,
            threshold_bytes: self.get(constant::MEMPOOL_ATTR_RELEASE_THRESHOLD)?,
        })
    }

    /// Keeps what was in use at one time since the last call, and lets the rest go: to be called
    /// once for each `hot_window_ms`. The bytes kept.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn cool(&self) -> Result<u64, Error> {
        let peak = self.get(constant::MEMPOOL_ATTR_USED_MEM_HIGH)?;
        self.set_threshold(peak)?;
        // SAFETY: a pool of the driver.
        unsafe { self.driver.mem_pool_trim_to(self.pool, peak as usize) }?;
        let mut zero = 0u64;
        // SAFETY: the attribute is a u64; 0 starts a new peak.
        unsafe {
            self.driver.mem_pool_set_attribute(
                self.pool,
                constant::MEMPOOL_ATTR_USED_MEM_HIGH,
                (&raw mut zero).cast(),
            )
        }?;
        Ok(peak)
    }
}
