//! Files that dumps go to by themselves: their names, and how many and how much of them there may be.
//!
//! A name says when it was, how much was live and why: `PREFIX.PID.NUMBER.TIME.SIZE.WHY.thprof`, the time as
//! UTC. In jemalloc's format it is jemalloc's: `PREFIX.PID.NUMBER.LETTER[N].heap`.
use core::ffi::CStr;

use super::DumpError;
use crate::control::options::{self, TEXT_BYTES};
use crate::control::stats;
use crate::control::text::Line;
use crate::os::linux;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) const PATH_BYTES: usize = TEXT_BYTES + 120;

/// Why there is a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Exit,
    Interval,
    Limit,
    Oom,
    Peak,
    Request,
}

impl Why {
    /// The word for it in names and in the file.
    pub(super) fn word(self) -> &'static str {
        match self {
            Why::Exit => "exit",
            Why::Interval => "interval",
            Why::Limit => "limit",
            Why::Oom => "oom",
            Why::Peak => "peak",
            Why::Request => "request",
        }
    }

    /// jemalloc's letter for it, and the count of those that it numbers.
    fn letter(self) -> (u8, Option<&'static AtomicU64>) {
        static INTERVALS: AtomicU64 = AtomicU64::new(0);
        static PEAKS: AtomicU64 = AtomicU64::new(0);
        static REQUESTS: AtomicU64 = AtomicU64::new(0);
        match self {
            Why::Exit => (b'f', None),
            Why::Interval => (b'i', Some(&INTERVALS)),
            Why::Limit => (b'l', None),
            Why::Oom => (b'o', None),
            Why::Peak => (b'm', Some(&PEAKS)),
            Why::Request => (b'u', Some(&REQUESTS)),
        }
    }
}

/// Dumps that were begun, and bytes of those that were written.
static FILES: AtomicU64 = AtomicU64::new(0);
static WRITTEN_BYTES: AtomicU64 = AtomicU64::new(0);

/// In a fork's child.
pub(super) fn forget() {
    FILES.store(0, Relaxed);
    WRITTEN_BYTES.store(0, Relaxed);
}

/// The bytes that a dump may have.
pub(super) fn room() -> Result<u64, DumpError> {
    let most = u64::from(options::prof_dumps());
    let most_bytes = options::prof_dumps_bytes() as u64;
    let used = WRITTEN_BYTES.load(Relaxed);
    if (most > 0 && FILES.load(Relaxed) >= most) || (most_bytes > 0 && used >= most_bytes) {
        return Err(DumpError::System(libc::EDQUOT));
    }
    Ok(if most_bytes > 0 { most_bytes - used } else { u64::MAX })
}

/// A dump of so many bytes was written; or none, as it would have needed more room than there was: to try
/// the same at each occasion would cost the program time.
pub(super) fn written(result: Result<u64, DumpError>) {
    match result {
        Ok(bytes) => drop(WRITTEN_BYTES.fetch_add(bytes, Relaxed)),
        Err(DumpError::System(libc::EDQUOT)) => {
            WRITTEN_BYTES.fetch_max(options::prof_dumps_bytes() as u64, Relaxed);
        }
        Err(_) => {}
    }
}

/// The name of the next.
pub(super) fn next(line: &mut Line<PATH_BYTES>, why: Why) -> Option<&CStr> {
    let prefix = options::prof_prefix();
    match prefix.as_bytes() {
        b"" => line.str("thermalloc"),
        prefix => line.bytes(prefix),
    };
    line.str(".").signed(linux::getpid().into());
    line.str(".").unsigned(FILES.fetch_add(1, Relaxed)).str(".");
    if options::prof_jeprof() {
        let (letter, count) = why.letter();
        line.bytes(&[letter]);
        if let Some(count) = count {
            line.unsigned(count.fetch_add(1, Relaxed));
        }
        line.str(".heap\0");
    } else {
        time(line, linux::now_ns(libc::CLOCK_REALTIME) / 1_000_000_000);
        line.str(".").unsigned(stats::snapshot().allocated_bytes >> 20).str("M.");
        line.str(why.word()).str(".thprof\0");
    }
    CStr::from_bytes_with_nul(line.as_bytes()).ok()
}

/// `20261129T231239Z`, of seconds since 1970.
fn time<const N: usize>(line: &mut Line<N>, unix_s: u64) {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    // Years begin in March, so that the odd day is their last one; 400 of them have always as many days.
    let from_march = days + 719_468;
    let (era, day) = (from_march / 146_097, from_march % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    line.unsigned(era * 400 + year + u64::from(month <= 2));
    two_digits(line, month);
    two_digits(line, day);
    line.str("T");
    two_digits(line, second / 3600);
    two_digits(line, second / 60 % 60);
    two_digits(line, second % 60);
    line.str("Z");
}

fn two_digits<const N: usize>(line: &mut Line<N>, number: u64) {
    line.unsigned(number / 10).unsigned(number % 10);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;

    #[test]
    fn times_of_the_calendar() {
        let told = |unix_s| {
            let mut line = Line::<32>::new();
            time(&mut line, unix_s);
            String::from_utf8(line.as_bytes().to_vec()).unwrap()
        };
        for (unix_s, expected) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (951_868_800, "20000301T000000Z"),
            (1_709_164_800, "20240229T000000Z"),
            (1_767_225_599, "20251231T235959Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(told(unix_s), expected);
        }
    }
}
