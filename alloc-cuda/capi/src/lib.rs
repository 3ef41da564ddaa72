//! libthermalloc_cuda: the device pool for C, CuPy and PyTorch. Translation only.
//!
//! Invariants: a device's pool is made at its first use and lives as long as the process. No
//! function unwinds; failure is a null pointer or a number other than 0, and
//! `thermalloc_cuda_last_error` tells this thread why.
#![allow(clippy::cast_possible_truncation, reason = "usize has 64 bits where CUDA is")]
#![allow(clippy::missing_safety_doc, reason = "the header has the conditions")]

mod conf;
mod host;
mod pools;

use pools::{fail, pool, with};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use thermalloc_cuda_pool::DefaultPool;
use thermalloc_cuda_pool::driver::Stream;
use thermalloc_cuda_pool::stats::ROWS;

/// A stream as C passes it.
fn stream(handle: *mut c_void) -> Stream {
    Stream(handle.addr())
}

const OK: c_int = 0;
const FAILED: c_int = -1;

/// Makes the pool of a device if there is none; `conf` as `THERMALLOC_CUDA_CONF`, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_init(device: c_int, conf: *const c_char) -> c_int {
    let conf = if conf.is_null() {
        None
    } else {
        // SAFETY: the caller passes a C string.
        Some(unsafe { CStr::from_ptr(conf) }.to_string_lossy().into_owned())
    };
    match pools::make(device, conf.as_deref()) {
        Some(_) => OK,
        None => FAILED,
    }
}

/// A block for work on a stream; null where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_alloc(
    bytes: usize,
    device: c_int,
    handle: *mut c_void,
) -> *mut c_void {
    let Some(pool) = pool(device) else { return std::ptr::null_mut() };
    match pool.alloc(bytes as u64, stream(handle)) {
        Ok(ptr) => std::ptr::without_provenance_mut(ptr as usize),
        Err(error) => {
            fail(&error.to_string());
            std::ptr::null_mut()
        }
    }
}

/// Gives a block back in the order of its own stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_free(ptr: *mut c_void, device: c_int) -> c_int {
    if ptr.is_null() {
        return OK;
    }
    // SAFETY: the caller's duty: no later work uses the block.
    with(device, |pool| unsafe { pool.free(ptr.addr() as u64) }.map_err(|error| error.to_string()))
}

/// Gives a block back in the order of a stream that comes after its uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_free_on(
    ptr: *mut c_void,
    device: c_int,
    handle: *mut c_void,
) -> c_int {
    if ptr.is_null() {
        return OK;
    }
    with(device, |pool| {
        // SAFETY: the caller's duty.
        unsafe { pool.free_on(ptr.addr() as u64, stream(handle)) }
            .map_err(|error| error.to_string())
    })
}

/// Says that another stream uses the block until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_record_use(
    ptr: *mut c_void,
    device: c_int,
    handle: *mut c_void,
) -> c_int {
    with(device, |pool| {
        pool.record_use(ptr.addr() as u64, stream(handle)).map_err(|error| error.to_string())
    })
}

/// Says that another stream's last use of the block has been submitted.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_end_use(
    ptr: *mut c_void,
    device: c_int,
    handle: *mut c_void,
) -> c_int {
    with(device, |pool| {
        pool.end_use(ptr.addr() as u64, stream(handle)).map_err(|error| error.to_string())
    })
}

/// To be called before a stream is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_forget_stream(device: c_int, handle: *mut c_void) -> c_int {
    with(device, |pool| pool.forget_stream(stream(handle)).map_err(|error| error.to_string()))
}

/// The device whose pool has a block at this address; -1 if none.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_device_of(ptr: *mut c_void) -> c_int {
    pools::device_of(ptr.addr() as u64).unwrap_or(FAILED)
}

/// The size of a block in use, rounding included; 0 if none starts there.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_usable_size(ptr: *mut c_void, device: c_int) -> usize {
    let found = pools::existing(device).and_then(|pool| pool.block_at(ptr.addr() as u64));
    found.map_or(0, |(_, bytes, _)| bytes as usize)
}

/// Gives free memory back until `keep_bytes` are left; the bytes that went.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_trim(device: c_int, keep_bytes: usize) -> usize {
    pools::existing(device).map_or(0, |pool| pool.trim(keep_bytes as u64) as usize)
}

/// Settles what is complete and gives back what is cold.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_poll(device: c_int) {
    if let Some(pool) = pools::existing(device) {
        pool.poll();
    }
}

/// The most that the pool may have; 0: no limit.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_set_limit(device: c_int, bytes: usize) -> c_int {
    with(device, |pool| {
        pool.set_limit_bytes((bytes > 0).then_some(bytes as u64));
        Ok(())
    })
}

/// The same as a part of the device, 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_set_fraction(device: c_int, fraction: f64) -> c_int {
    with(device, |pool| {
        if !(0.0..=1.0).contains(&fraction) {
            return Err("thermalloc: memory fraction: it must be 0 to 1".to_owned());
        }
        let total = pool.device_bytes() as f64;
        #[allow(clippy::cast_sign_loss, reason = "neither is negative")]
        let bytes = (total * fraction) as u64;
        pool.set_limit_bytes((fraction < 1.0).then_some(bytes));
        Ok(())
    })
}

/// How long an allocation that finds no memory waits, milliseconds; 0: not at all.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_set_wait(device: c_int, ms: u64) -> c_int {
    with(device, |pool| {
        pool.set_wait_ms((ms > 0).then_some(ms));
        Ok(())
    })
}

/// How many statistics there are.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_stat_count() -> usize {
    ROWS.len()
}

/// A statistic's name, static; null beyond the last.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_stat_name(index: usize) -> *const c_char {
    ROWS.get(index).map_or(std::ptr::null(), |row| row.c_name.as_ptr())
}

/// Writes the first `count` statistics of a device's pool; how many. A device without a pool has
/// none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_stats(
    device: c_int,
    out: *mut u64,
    count: usize,
) -> usize {
    let Some(pool) = pools::existing(device).filter(|_| !out.is_null()) else { return 0 };
    let stats = pool.stats();
    for (i, row) in ROWS.iter().take(count).enumerate() {
        // SAFETY: the caller has room for `count` words.
        unsafe { out.wrapping_add(i).write(row.get(&stats)) };
    }
    ROWS.len().min(count)
}

/// Copies as many bytes as there is room for; how many there are.
unsafe fn copy_out(bytes: &[u8], out: *mut c_void, room: usize) -> usize {
    if !out.is_null() {
        // SAFETY: the caller has that much room; both ranges are apart.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len().min(room));
        }
    }
    bytes.len()
}

/// The statistics as text, without a NUL; how many bytes there are, of which at most `room` were
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_report(
    device: c_int,
    out: *mut c_void,
    room: usize,
) -> usize {
    let Some(pool) = pools::existing(device) else { return 0 };
    // SAFETY: the caller's duty.
    unsafe { copy_out(pool.report().as_bytes(), out, room) }
}

/// The snapshot for PyTorch's memory viewer, as the report.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_snapshot(
    device: c_int,
    out: *mut c_void,
    room: usize,
) -> usize {
    let Some(pool) = pools::existing(device) else { return 0 };
    // SAFETY: the caller's duty.
    unsafe { copy_out(&pool.snapshot(), out, room) }
}

/// Why the last call of this thread failed; static text until its next.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_last_error() -> *const c_char {
    pools::last_error()
}

/// Asked whether a stream's allocations belong to a private pool.
pub type Filter = unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> c_int;

struct Filtered {
    filter: Filter,
    context: *mut c_void,
    drop: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the header asks for a filter that any thread may call.
unsafe impl Send for Filtered {}
// SAFETY: as above.
unsafe impl Sync for Filtered {}

impl Filtered {
    fn takes(&self, stream: Stream) -> bool {
        let handle = std::ptr::without_provenance_mut(stream.0);
        // SAFETY: the context lives until `drop` was called.
        unsafe { (self.filter)(self.context, handle) != 0 }
    }
}

impl Drop for Filtered {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: it is called once, when nobody asks any more.
            unsafe { drop(self.context) };
        }
    }
}

/// Allocations of the streams that `filter` takes come from the private pool of this name from now
/// on. A null filter takes every stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_begin_pool(
    device: c_int,
    first: u64,
    second: u64,
    filter: Option<Filter>,
    context: *mut c_void,
    drop: Option<unsafe extern "C" fn(*mut c_void)>,
) -> c_int {
    let filtered = filter.map(|filter| Filtered { filter, context, drop });
    with(device, move |pool| {
        let takes = move |stream| filtered.as_ref().is_none_or(|filter| filter.takes(stream));
        pool.begin_to_pool((first, second), Arc::new(takes));
        Ok(())
    })
}

/// Ends that.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_end_pool(device: c_int, first: u64, second: u64) -> c_int {
    with(device, |pool| {
        pool.end_to_pool((first, second));
        Ok(())
    })
}

/// Lets go of a private pool: once for each begin.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_release_pool(device: c_int, first: u64, second: u64) -> c_int {
    with(device, |pool| {
        pool.release_pool((first, second));
        Ok(())
    })
}

/// Pinned host memory near a device; null where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_pinned_alloc(bytes: usize, device: c_int) -> *mut c_void {
    let Some(pinned) = pools::pinned(device) else { return std::ptr::null_mut() };
    match pinned.alloc(bytes) {
        Ok(ptr) => ptr.as_ptr().cast(),
        Err(error) => {
            fail(&error.to_string());
            std::ptr::null_mut()
        }
    }
}

/// Says that a stream copies from or to pinned memory until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_pinned_record_use(
    ptr: *mut c_void,
    device: c_int,
    handle: *mut c_void,
) {
    if let (Some(pinned), Some(ptr)) = (pools::pinned(device), NonNull::new(ptr.cast())) {
        pinned.record_use(ptr, stream(handle));
    }
}

/// Gives pinned memory back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_pinned_free(ptr: *mut c_void, device: c_int) -> c_int {
    let Some(ptr) = NonNull::new(ptr.cast()) else { return OK };
    let Some(pinned) = pools::pinned(device) else { return FAILED };
    // SAFETY: the caller's duty.
    if unsafe { pinned.free(ptr) } {
        OK
    } else {
        fail("thermalloc: pinned memory: no block in use starts there");
        FAILED
    }
}

/// Lets the device's default pool keep up to `bytes` over synchronisations: for TensorFlow's
/// `cuda_malloc_async` and JAX, which use it.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_default_pool_keep(device: c_int, bytes: usize) -> c_int {
    with(device, |pool| {
        DefaultPool::of(Arc::clone(pool.driver()), device)
            .and_then(|default| default.set_threshold(bytes as u64))
            .map_err(|error| error.to_string())
    })
}

/// Writes what the device's default pool has: reserved, its peak, used, its peak, threshold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_default_pool_stats(device: c_int, out: *mut u64) -> c_int {
    with(device, |pool| {
        let stats = DefaultPool::of(Arc::clone(pool.driver()), device)
            .and_then(|default| default.stats())
            .map_err(|error| error.to_string())?;
        let words = [
            stats.reserved_bytes,
            stats.reserved_peak_bytes,
            stats.used_bytes,
            stats.used_peak_bytes,
            stats.threshold_bytes,
        ];
        // SAFETY: the caller has room for five words.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), out, words.len()) };
        Ok(())
    })
}

/// CuPy's `CFunctionAllocator`: its malloc. It passes no stream, so blocks are of the legacy default
/// stream.
#[unsafe(no_mangle)]
pub extern "C" fn thermalloc_cuda_cupy_malloc(
    _param: *mut c_void,
    bytes: usize,
    device: c_int,
) -> *mut c_void {
    thermalloc_cuda_alloc(bytes, device, std::ptr::null_mut())
}

/// CuPy's `CFunctionAllocator`: its free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thermalloc_cuda_cupy_free(
    _param: *mut c_void,
    ptr: *mut c_void,
    device: c_int,
) {
    // SAFETY: as CuPy's free: no later work uses the block.
    let _ = unsafe { thermalloc_cuda_free(ptr, device) };
}
