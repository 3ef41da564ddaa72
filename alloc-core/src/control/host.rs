//! The table through which other libraries of a process reach this allocator, so that it has one
//! set of options and one ledger: the device pool, a profiler, the command line.
//!
//! The C library exports it as `thermalloc_host_v1`; a user finds it by a weak reference or by
//! `dlsym` and works without it. Invariant: fields are only ever added at the end, and `size`
//! grows with them. Functions are callable from any thread at any time, and do not allocate.

use super::options::{self, OPTIONS, SetError};
use super::report::{self, Format};
use super::stats;
use super::text::Line;
use crate::companion;
pub use crate::companion::Companion;
use crate::process;
use crate::prof;
pub use crate::prof::{DeviceBlock, DevicePool};
use core::ffi::{c_char, c_void};

/// Takes a piece of a report: the context, its bytes and their number.
pub type Sink = unsafe extern "C" fn(ctx: *mut c_void, bytes: *const u8, len: usize);

const VERSION: u32 = 1;
const VALUE_BYTES: usize = options::TEXT_BYTES;
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

/// Version 1 of the table.
#[repr(C)]
#[derive(Debug)]
pub struct HostTable {
    /// Bytes of this table: what lies beyond does not exist.
    size: u32,
    /// 1; greater where fields were added, which older users need not know.
    version: u32,
    /// The value in force as text, no NUL: the bytes that it has, of which at most `out_len` were
    /// written; -1 where no option has the name.
    option_read: unsafe extern "C" fn(
        name: *const u8,
        name_len: usize,
        out: *mut u8,
        out_len: usize,
    ) -> isize,
    /// 0, ENOENT (no such option), EPERM (not live) or EINVAL (not a value of it).
    option_write: unsafe extern "C" fn(
        name: *const u8,
        name_len: usize,
        value: *const u8,
        value_len: usize,
    ) -> i32,
    /// How many statistics there are.
    stat_count: extern "C" fn() -> usize,
    /// A statistic's name, static and with a final NUL; null beyond the last.
    stat_name: extern "C" fn(index: usize) -> *const c_char,
    /// Writes up to `count` figures of one snapshot, from statistic `first` on; how many.
    stat_read: unsafe extern "C" fn(first: usize, count: usize, out: *mut u64) -> usize,
    /// Gives free pages back to the kernel at once; 0 where there were none.
    purge: extern "C" fn() -> usize,
    /// Writes a report: 0 text, 1 JSON, 2 `malloc_info`, 3 Prometheus. 0, or EINVAL for another format.
    report: unsafe extern "C" fn(sink: Sink, ctx: *mut c_void, format: u32) -> i32,
    /// Enters memory of a device into the profiler's ledger; what to give to `device_free`, or 0 where it
    /// is not recorded.
    device_alloc: unsafe extern "C" fn(block: *const DeviceBlock) -> u64,
    /// Takes it off again; `pending` not 0: a stream still uses it, and a second call will follow.
    device_free: extern "C" fn(handle: u64, stream: u64, pending: u32),
    /// Lets the background thread set a companion's pace: 0, or EINVAL. It stays as long as the process.
    companion_add: unsafe extern "C" fn(companion: *const Companion) -> i32,
    /// Says what a pool of device memory holds, for whoever looks at the process; ENOSPC: there are too many.
    device_pool: unsafe extern "C" fn(pool: *const DevicePool) -> i32,
}

/// The table of this allocator.
pub static HOST: HostTable = HostTable::this();

impl HostTable {
    /// The table of this allocator, for a static under its exported name.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // a hundred bytes
    pub const fn this() -> Self {
        HostTable {
            size: size_of::<HostTable>() as u32,
            version: VERSION,
            option_read,
            option_write,
            stat_count,
            stat_name,
            stat_read,
            purge,
            report,
            device_alloc,
            device_free,
            companion_add,
            device_pool,
        }
    }

    /// The table behind a symbol found at run time; nothing where it is null or too old.
    ///
    /// # Safety
    /// `table` is null or the address of the exported table of a loaded library, which stays
    /// loaded for the rest of the process.
    #[must_use]
    pub unsafe fn from_ptr(table: *const HostTable) -> Option<&'static HostTable> {
        if table.is_null() {
            return None;
        }
        // SAFETY: every version starts with the two words `size` and `version`.
        let [size, version] = unsafe { *table.cast::<[u32; 2]>() };
        if version < VERSION || (size as usize) < size_of::<HostTable>() {
            return None;
        }
        // SAFETY: it is not smaller than this version's table and lives as long as the process.
        Some(unsafe { &*table })
    }

    /// An option's value in force as text; nothing where no option has the name or `out` is too
    /// small for it (32 bytes are enough for all but a text, [`options::TEXT_BYTES`] for those).
    pub fn option<'a>(&self, name: &str, out: &'a mut [u8]) -> Option<&'a str> {
        // SAFETY: both ranges are live slices.
        let len =
            unsafe { (self.option_read)(name.as_ptr(), name.len(), out.as_mut_ptr(), out.len()) };
        let value = out.get(..usize::try_from(len).ok()?)?;
        core::str::from_utf8(value).ok()
    }

    /// Sets a live option.
    ///
    /// # Errors
    /// As [`options::set`].
    pub fn set_option(&self, name: &str, value: &str) -> Result<(), SetError> {
        // SAFETY: both ranges are live slices.
        let code =
            unsafe { (self.option_write)(name.as_ptr(), name.len(), value.as_ptr(), value.len()) };
        match code {
            0 => Ok(()),
            ENOENT => Err(SetError::Unknown),
            EPERM => Err(SetError::StartOnly),
            _ => Err(SetError::Invalid),
        }
    }

    /// How many statistics there are.
    #[must_use]
    pub fn stat_count(&self) -> usize {
        (self.stat_count)()
    }

    /// The name of a statistic.
    #[must_use]
    pub fn stat_name(&self, index: usize) -> Option<&'static core::ffi::CStr> {
        let name = (self.stat_name)(index);
        // SAFETY: a name is static and ends with a NUL.
        (!name.is_null()).then(|| unsafe { core::ffi::CStr::from_ptr(name) })
    }

    /// Reads the statistics from `first` on, of one snapshot, into `out`; how many were read.
    pub fn stat_read(&self, first: usize, out: &mut [u64]) -> usize {
        // SAFETY: `out` is a live slice of that many words.
        unsafe { (self.stat_read)(first, out.len(), out.as_mut_ptr()) }
    }

    /// Gives free pages back to the kernel at once; `false` where there were none.
    pub fn purge(&self) -> bool {
        (self.purge)() != 0
    }

    /// Enters memory of a device into the profiler's ledger; what to give to [`Self::device_free`], or 0
    /// where it is not recorded. `user` names who uses it, where that is known better than by scopes.
    #[must_use]
    pub fn device_alloc(&self, block: &DeviceBlock, user: &str) -> u64 {
        let block = DeviceBlock { user: user.as_ptr(), user_bytes: user.len(), ..*block };
        // SAFETY: both are live for the call.
        unsafe { (self.device_alloc)(&raw const block) }
    }

    /// Takes memory of a device off the ledger; `pending`: a stream still uses it, and a second call
    /// will follow.
    pub fn device_free(&self, handle: u64, stream: u64, pending: bool) {
        (self.device_free)(handle, stream, u32::from(pending));
    }

    /// Lets the background thread set a companion's pace; `false` where the two do not fit.
    pub fn companion_add(&self, companion: &'static Companion) -> bool {
        // SAFETY: it stays as long as the process.
        unsafe { (self.companion_add)(companion) == 0 }
    }

    /// Says what a pool of device memory holds, for whoever looks at the process; false: there are too many.
    pub fn device_pool(&self, pool: &DevicePool, name: &str) -> bool {
        let pool = DevicePool { name: name.as_ptr(), name_bytes: name.len(), ..*pool };
        // SAFETY: both are live for the call.
        unsafe { (self.device_pool)(&raw const pool) == 0 }
    }

    /// Writes a report to `sink`; `false` where the host does not know the format.
    pub fn report(&self, format: Format, mut sink: &mut dyn FnMut(&[u8])) -> bool {
        let ctx = core::ptr::from_mut(&mut sink).cast();
        // SAFETY: `forward` gets the context of its kind, which outlives the call.
        unsafe { (self.report)(forward, ctx, format as u32) == 0 }
    }
}

/// # Safety
/// `ctx` points to a `&mut dyn FnMut(&[u8])` that nothing else uses now; `bytes` to `len` bytes.
unsafe extern "C" fn forward(ctx: *mut c_void, bytes: *const u8, len: usize) {
    // SAFETY: the caller's first duty.
    let sink = unsafe { &mut *ctx.cast::<&mut dyn FnMut(&[u8])>() };
    // SAFETY: the caller's second duty.
    sink(unsafe { slice(bytes, len) });
}

/// The caller's bytes; a null pointer has none.
///
/// # Safety
/// `bytes` is null or points to `len` bytes that stay as they are for `'a`.
unsafe fn slice<'a>(bytes: *const u8, len: usize) -> &'a [u8] {
    if bytes.is_null() {
        return &[];
    }
    // SAFETY: not null, so it points to `len` bytes.
    unsafe { core::slice::from_raw_parts(bytes, len) }
}

/// # Safety
/// `name` points to `name_len` bytes, `out` to `out_len` bytes that may be written.
unsafe extern "C" fn option_read(
    name: *const u8,
    name_len: usize,
    out: *mut u8,
    out_len: usize,
) -> isize {
    // Before the process's first block nobody has read what it sets.
    let _ = process::ready();
    // SAFETY: the caller's duty.
    let Some(row) = options::find_bytes(unsafe { slice(name, name_len) }) else {
        return -1;
    };
    let mut value = Line::<VALUE_BYTES>::new();
    row.show_plain_in(&OPTIONS, &mut value);
    let text = value.as_bytes();
    if !out.is_null() {
        // SAFETY: no more than both ranges hold; `text` is a local of ours.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), out, text.len().min(out_len)) };
    }
    text.len().cast_signed()
}

/// # Safety
/// `name` points to `name_len` bytes and `value` to `value_len` bytes.
unsafe extern "C" fn option_write(
    name: *const u8,
    name_len: usize,
    value: *const u8,
    value_len: usize,
) -> i32 {
    let _ = process::ready();
    // SAFETY: the caller's duty.
    let name = unsafe { slice(name, name_len) };
    // SAFETY: the caller's duty.
    let value = unsafe { slice(value, value_len) };
    match options::set_bytes(name, value) {
        Ok(()) => 0,
        Err(SetError::Unknown) => ENOENT,
        Err(SetError::StartOnly) => EPERM,
        Err(SetError::Invalid) => EINVAL,
    }
}

extern "C" fn stat_count() -> usize {
    stats::ROWS.len()
}

extern "C" fn stat_name(index: usize) -> *const c_char {
    stats::ROWS.get(index).map_or(core::ptr::null(), |row| row.c_name.as_ptr())
}

/// # Safety
/// `out` points to `count` words that may be written.
unsafe extern "C" fn stat_read(first: usize, count: usize, out: *mut u64) -> usize {
    if out.is_null() {
        return 0;
    }
    let stats = stats::snapshot();
    let rows = stats::ROWS.get(first..).unwrap_or(&[]);
    let rows = rows.get(..count).unwrap_or(rows);
    for (i, row) in rows.iter().enumerate() {
        // SAFETY: `i` is less than `count`; the words need not be initialised.
        unsafe { out.wrapping_add(i).write(row.get(&stats)) };
    }
    rows.len()
}

extern "C" fn purge() -> usize {
    super::purge()
}

/// # Safety
/// `sink` may be called with `ctx` until this returns.
unsafe extern "C" fn report(sink: Sink, ctx: *mut c_void, format: u32) -> i32 {
    let format = match format {
        0 => Format::Text,
        1 => Format::Json,
        2 => Format::MallocInfo,
        3 => Format::Prometheus,
        _ => return EINVAL,
    };
    report::write(format, &mut |line| {
        // SAFETY: the caller's duty; `line` is live for the call.
        unsafe { sink(ctx, line.as_ptr(), line.len()) }
    });
    0
}

/// # Safety
/// `block` is null or points to a block that says its own size, and whose `user` is null or points to
/// `user_bytes` bytes.
unsafe extern "C" fn device_alloc(block: *const DeviceBlock) -> u64 {
    // SAFETY: the caller's duty.
    let Some(bytes) = (unsafe { block.cast::<usize>().as_ref() }) else { return 0 };
    if *bytes < size_of::<DeviceBlock>() {
        return 0;
    }
    // SAFETY: it is not smaller than what is known of it.
    let block = unsafe { &*block };
    // SAFETY: the caller's duty.
    prof::device_alloc(block, unsafe { slice(block.user, block.user_bytes) })
}

extern "C" fn device_free(handle: u64, stream: u64, pending: u32) {
    prof::device_free(handle, stream, pending != 0);
}

/// # Safety
/// `companion` is null or points to a companion that stays as long as the process.
unsafe extern "C" fn companion_add(companion: *const Companion) -> i32 {
    // SAFETY: the caller's duty.
    match unsafe { companion.as_ref() } {
        Some(companion) if companion::add(companion) => 0,
        _ => EINVAL,
    }
}

/// # Safety
/// `pool` is null or points to a pool that says its own size, and whose `name` is null or points to
/// `name_bytes` bytes.
unsafe extern "C" fn device_pool(pool: *const DevicePool) -> i32 {
    // SAFETY: the caller's duty.
    let Some(bytes) = (unsafe { pool.cast::<usize>().as_ref() }) else { return EINVAL };
    if *bytes < size_of::<DevicePool>() {
        return EINVAL;
    }
    // SAFETY: it is not smaller than what is known of it.
    let pool = unsafe { &*pool };
    // SAFETY: the caller's duty.
    let name = unsafe { slice(pool.name, pool.name_bytes) };
    if pool.id == 0 {
        return EINVAL;
    }
    if prof::report_pool(pool, name) { 0 } else { ENOSPC }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn options_through_the_table() {
        let mut out = [0; 32];
        assert_eq!(HOST.option("rseq", &mut out), Some("true"));
        assert_eq!(HOST.option("cpu_cache_bytes", &mut out), Some("8388608"));
        assert_eq!(HOST.option("cpu_cache_bytes", &mut out[..3]), None);
        assert_eq!(HOST.option("colour", &mut out), None);
        assert_eq!(HOST.option("trace_file", &mut out), Some(""));
        assert_eq!(HOST.set_option("trace_file", "/tmp/x"), Err(SetError::StartOnly));
        assert_eq!(HOST.set_option("strip_deepbind", "true"), Ok(()));
        assert_eq!(HOST.set_option("strip_deepbind", "1"), Err(SetError::Invalid));
        assert_eq!(HOST.set_option("rseq", "true"), Err(SetError::StartOnly));
        assert_eq!(HOST.set_option("colour", "red"), Err(SetError::Unknown));
    }

    #[test]
    fn statistics_through_the_table() {
        assert_eq!(HOST.stat_count(), stats::ROWS.len());
        for (i, row) in stats::ROWS.iter().enumerate() {
            assert_eq!(HOST.stat_name(i), Some(row.c_name));
        }
        assert_eq!(HOST.stat_name(HOST.stat_count()), None);
        let mut out = [u64::MAX; 200];
        let count = HOST.stat_read(0, &mut out);
        assert_eq!(count, stats::ROWS.len());
        assert!(out[count..].iter().all(|&word| word == u64::MAX));
        assert_eq!(HOST.stat_read(count - 1, &mut out), 1);
        assert_eq!(HOST.stat_read(usize::MAX, &mut out), 0);
        assert_eq!(HOST.stat_read(0, &mut out[..2]), 2);
    }

    #[test]
    fn reports_through_the_table() {
        for format in [Format::Text, Format::Json, Format::MallocInfo, Format::Prometheus] {
            let (mut direct, mut through) = (0, Vec::new());
            report::write(format, &mut |_| direct += 1);
            assert!(HOST.report(format, &mut |line| through.push(line.to_vec())));
            assert_eq!(through.len(), direct);
        }
        // SAFETY: an unknown format calls no sink.
        let unknown = unsafe { (HOST.report)(forward, core::ptr::null_mut(), 4) };
        assert_eq!(unknown, EINVAL);
    }

    #[test]
    fn null_pointers_are_harmless() {
        let none = core::ptr::null_mut();
        // SAFETY: null is no bytes.
        let read = unsafe { (HOST.option_read)(none, 9, none, 9) };
        // SAFETY: null is no bytes.
        let written = unsafe { (HOST.option_write)(none, 9, none, 9) };
        assert_eq!((read, written), (-1, ENOENT));
        // SAFETY: nothing is written through null.
        let len = unsafe { (HOST.option_read)(b"rseq".as_ptr(), 4, none, 9) };
        // SAFETY: nothing is written through null.
        let figures = unsafe { (HOST.stat_read)(0, 9, core::ptr::null_mut()) };
        assert_eq!((len, figures), (4, 0));
    }

    #[test]
    fn a_table_that_is_too_old_is_refused() {
        let accepted = |table: &HostTable| {
            // SAFETY: the table outlives this call, and the result is not kept.
            unsafe { HostTable::from_ptr(table) }.is_some()
        };
        let table = HostTable::this;
        assert!(accepted(&HOST));
        assert!(accepted(&HostTable { version: 2, size: 200, ..table() }));
        assert!(!accepted(&HostTable { version: 0, ..table() }));
        assert!(!accepted(&HostTable { size: 8, ..table() }));
        // SAFETY: null is allowed.
        assert!(unsafe { HostTable::from_ptr(core::ptr::null()) }.is_none());
    }

    #[test]
    fn the_layout_is_that_of_the_c_header() {
        assert_eq!(core::mem::offset_of!(HostTable, option_read), 8);
        assert_eq!(core::mem::offset_of!(HostTable, report), 56);
        assert_eq!(core::mem::offset_of!(HostTable, companion_add), 80);
        assert_eq!(core::mem::offset_of!(HostTable, device_pool), 88);
        assert_eq!(size_of::<HostTable>(), 96);
        assert_eq!(size_of::<Companion>(), 24);
        assert_eq!(core::mem::offset_of!(DeviceBlock, device), 40);
        assert_eq!(size_of::<DeviceBlock>(), 64);
        assert_eq!(core::mem::offset_of!(DevicePool, live_bytes), 24);
        assert_eq!(size_of::<DevicePool>(), 80);
    }
}
