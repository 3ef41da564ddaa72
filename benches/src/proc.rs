//! Resident size and faults, read without allocating.

use std::fs::File;
use std::io::Read;

/// A line of /proc/self/status in KiB, for example `VmRSS`.
pub fn status_kib(name: &str) -> usize {
    let mut text = [0_u8; 4096];
    let n = File::open("/proc/self/status").and_then(|mut f| f.read(&mut text)).unwrap_or(0);
    let text = std::str::from_utf8(&text[..n]).unwrap_or("");
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Resident size in KiB. The kernel's cheap counter may lag by some pages for each CPU; the exact sum is in smaps.
pub fn rss_kib() -> usize {
    status_kib("VmRSS")
}

/// Resident size in KiB, summed page by page: exact.
pub fn exact_rss_kib() -> usize {
    let mut text = [0_u8; 2048];
    let n = File::open("/proc/self/smaps_rollup").and_then(|mut f| f.read(&mut text)).unwrap_or(0);
    let text = std::str::from_utf8(&text[..n]).unwrap_or("");
    let line = text.lines().find_map(|l| l.strip_prefix("Rss:"));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or_else(rss_kib)
}

/// Resident KiB of the mappings that hold these addresses, each mapping once. Allocates.
pub fn resident_at_kib(addresses: &[usize]) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let (mut holds, mut sum) = (false, 0);
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|word| {
            let (low, high) = word.split_once('-')?;
            let hex = |s| usize::from_str_radix(s, 16).ok();
            Some(hex(low)?..hex(high)?)
        });
        if let Some(range) = range {
            holds = addresses.iter().any(|a| range.contains(a));
        } else if let Some(rest) = line.strip_prefix("Rss:")
            && holds
        {
            sum += rest.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        }
    }
    sum
}

/// Peak resident size in KiB.
pub fn peak_kib() -> usize {
    status_kib("VmHWM")
}

/// Minor faults of the process so far.
pub fn minor_faults() -> i64 {
    Usage::now().faults
}

/// What the process has used so far, all threads together, ended ones too.
pub struct Usage {
    /// Seconds in user mode.
    pub user: f64,
    /// Seconds in the kernel.
    pub sys: f64,
    /// Minor faults.
    pub faults: i64,
}

impl Usage {
    /// Up to now.
    pub fn now() -> Self {
        // SAFETY: a rusage is plain integers, for which zero is a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: usage is valid to write to.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        Usage {
            user: seconds(usage.ru_utime),
            sys: seconds(usage.ru_stime),
            faults: usage.ru_minflt,
        }
    }
}
