//! Resident size and faults, read without allocating.

use std::fs::File;
use std::io::Read;

/// A line of /proc/self/status in KiB, for example `VmRSS`.
pub fn status_kib(name: &str) -> usize {
    let mut text = [0_u8; 4096];
    let n = File::open("/proc/self/status")
        .and_then(|mut f| f.read(&mut text))
        .unwrap_or(0);
    let text = std::str::from_utf8(&text[..n]).unwrap_or("");
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Resident size in KiB. The kernel's cheap counter may lag by some pages for each CPU; the exact sum is in smaps.
pub fn rss_kib() -> usize {
    status_kib("VmRSS")
}

/// Peak resident size in KiB.
pub fn peak_kib() -> usize {
    status_kib("VmHWM")
}

/// Minor faults of the process so far.
pub fn minor_faults() -> i64 {
    // SAFETY: a rusage is plain integers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: usage is valid to write to.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    usage.ru_minflt
}
