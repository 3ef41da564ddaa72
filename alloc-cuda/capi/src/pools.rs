//! The pool of each device, and the last error of each thread.

use crate::conf::{self, Chosen};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use thermalloc_cuda_pool::driver::{Driver, Error};
use thermalloc_cuda_pool::{PinnedPool, Pool};

const DEVICES: usize = 64;

static POOLS: [OnceLock<(Pool, Chosen)>; DEVICES] = [const { OnceLock::new() }; DEVICES];
static PINNED: [OnceLock<PinnedPool>; DEVICES] = [const { OnceLock::new() }; DEVICES];
/// Held while a pool is made.
static MAKING: Mutex<()> = Mutex::new(());

thread_local! {
    static ERROR: RefCell<CString> = RefCell::new(CString::default());
}

/// Sets what `thermalloc_cuda_last_error` says.
pub(crate) fn fail(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has nobody to tell.
    let _ = ERROR.try_with(|error| *error.borrow_mut() = text);
}

pub(crate) fn last_error() -> *const c_char {
    ERROR.try_with(|error| error.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

fn slot(device: c_int) -> Option<usize> {
    usize::try_from(device).ok().filter(|&index| index < DEVICES)
}

/// The pool of a device, if it was made.
pub(crate) fn existing(device: c_int) -> Option<&'static Pool> {
    POOLS[slot(device)?].get().map(|(pool, _)| pool)
}

/// The pool of a device.
#[inline]
pub(crate) fn pool(device: c_int) -> Option<&'static Pool> {
    existing(device).or_else(|| make(device, None))
}

/// The driver, loaded once for all devices.
fn driver() -> Result<Arc<Driver>, Error> {
    static DRIVER: OnceLock<Arc<Driver>> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(Arc::clone(driver));
    }
    let driver = Arc::new(Driver::load()?);
    Ok(Arc::clone(DRIVER.get_or_init(|| driver)))
}

/// Makes the pool of a device, unless it is there.
pub(crate) fn make(device: c_int, conf: Option<&str>) -> Option<&'static Pool> {
    let Some(index) = slot(device) else {
        fail(&format!("thermalloc: device pool: there is no device {device}"));
        return None;
    };
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((pool, _)) = POOLS[index].get() {
        return Some(pool);
    }
    let (builder, chosen) = match conf::builder(device, conf) {
        Ok(builder) => builder,
        Err(error) => {
            fail(&error);
            return None;
        }
    };
    match driver().and_then(|driver| builder.build_on(driver)) {
        Ok(pool) => Some(&POOLS[index].get_or_init(|| (pool, chosen)).0),
        Err(error) => {
            fail(&format!("thermalloc: device pool: device {device}: {error}"));
            None
        }
    }
}

/// Runs something with a device's pool; 0, or -1 and the error.
pub(crate) fn with(device: c_int, run: impl FnOnce(&Pool) -> Result<(), String>) -> c_int {
    let Some(pool) = pool(device) else { return -1 };
    match run(pool) {
        Ok(()) => 0,
        Err(error) => {
            fail(&error);
            -1
        }
    }
}

/// The pools that were made.
pub(crate) fn all() -> impl Iterator<Item = &'static (Pool, Chosen)> {
    POOLS.iter().filter_map(OnceLock::get)
}

/// The device whose pool has a block at an address.
pub(crate) fn device_of(ptr: u64) -> Option<c_int> {
    let found = POOLS
        .iter()
        .position(|slot| slot.get().is_some_and(|(pool, _)| pool.block_at(ptr).is_some()))?;
    c_int::try_from(found).ok()
}

/// The pinned memory of a device.
pub(crate) fn pinned(device: c_int) -> Option<&'static PinnedPool> {
    let pool = pool(device)?;
    Some(PINNED[slot(device)?].get_or_init(|| pool.pinned()))
}
