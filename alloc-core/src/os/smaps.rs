//! What the kernel says of the process's own mappings: `/proc/self/smaps`, read piece by piece.
//!
//! Invariant: nothing is allocated, and a line that is not understood counts as nothing.
use super::linux;

/// A line is longer than this only by its file's name, which nobody reads.
const LINE_BYTES: usize = 128;

/// The lines of a file that is read in pieces; the end of a long line is cut off.
struct Lines {
    line: [u8; LINE_BYTES],
    len: usize,
}

impl Lines {
    fn feed(&mut self, piece: &[u8], mut each: impl FnMut(&[u8])) {
        for &byte in piece {
            if byte == b'\n' {
                each(self.line.get(..self.len).unwrap_or(&[]));
                self.len = 0;
            } else if let Some(slot) = self.line.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
    }
}

/// Sums of the mappings that `ours` accepts, from their first and last address.
struct Sum<F> {
    ours: F,
    counts: bool,
    kib: u64,
}

impl<F: Fn(usize, usize) -> bool> Sum<F> {
    fn line(&mut self, line: &[u8]) {
        if let Some((start, end)) = range(line) {
            self.counts = (self.ours)(start, end);
        } else if self.counts {
            // Reserved huge pages are not in Rss.
            let fields: [&[u8]; 3] = [b"Rss:", b"Private_Hugetlb:", b"Shared_Hugetlb:"];
            let kib = fields.iter().find_map(|field| kib(line.strip_prefix(*field)?));
            self.kib = self.kib.saturating_add(kib.unwrap_or(0));
        }
    }
}

/// The addresses at the start of a mapping's first line: `start-end ...`.
fn range(line: &[u8]) -> Option<(usize, usize)> {
    let addresses = line.split(|&byte| byte == b' ').next()?;
    let dash = addresses.iter().position(|&byte| byte == b'-')?;
    let (start, end) = addresses.split_at_checked(dash)?;
    Some((hex(start)?, hex(end.get(1..)?)?))
}

fn hex(digits: &[u8]) -> Option<usize> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0usize, |sum, &digit| {
        Some(sum.checked_mul(16)? + char::from(digit).to_digit(16)? as usize)
    })
}

fn kib(field: &[u8]) -> Option<u64> {
    let digits = field.trim_ascii().strip_suffix(b" kB")?;
    digits.iter().try_fold(0u64, |sum, &digit| {
        let digit = char::from(digit).to_digit(10)?;
        sum.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Resident bytes of the mappings of which `ours` says so, by their first address and the one after
/// their last; 0 where there is no such file.
pub(crate) fn resident_bytes(ours: impl Fn(usize, usize) -> bool) -> u64 {
    let mut lines = Lines { line: [0; LINE_BYTES], len: 0 };
    let mut sum = Sum { ours, counts: false, kib: 0 };
    let done = linux::read_pieces(c"/proc/self/smaps", |piece| {
        lines.feed(piece, |line| sum.line(line));
    });
    if done.is_ok() { sum.kib << 10 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FILE: &[u8] = b"7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \n\
        Size:               2048 kB\nKernelPageSize:        4 kB\nRss:                 100 kB\n\
        Pss:                 100 kB\nPrivate_Hugetlb:       0 kB\nVmFlags: rd wr mr mw me ac \n\
        7f0000200000-7f0000400000 rw-p 00000000 00:00 0 /dev/hugepages/a-name-that-is-long/\
        and-longer/and-longer/and-longer/and-longer/and-longer/and-longer/and-longer\n\
        Rss:                   0 kB\nPrivate_Hugetlb:    2048 kB\n\
        7fff00000000-7fff00021000 rw-p 00000000 00:00 0                          [stack]\n\
        Rss:                  64 kB\n";

    fn summed(file: &[u8], piece: usize) -> u64 {
        let mut lines = Lines { line: [0; LINE_BYTES], len: 0 };
        let mut sum = Sum { ours: |start, _| start < 0x7fff_0000_0000, counts: false, kib: 0 };
        for piece in file.chunks(piece) {
            lines.feed(piece, |line| sum.line(line));
        }
        sum.kib
    }

    #[test]
    fn ours_are_summed_whatever_the_pieces() {
        for piece in [1, 3, 64, 10_000] {
            assert_eq!(summed(FILE, piece), 2148, "pieces of {piece}");
        }
    }

    #[test]
    fn all_together_is_what_the_kernel_says() {
        let kernel = || {
            let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
            let line = rollup.lines().find(|line| line.starts_with("Rss:")).unwrap();
            kib(&line.as_bytes()[4..]).unwrap() << 10
        };
        // Other tests of this process allocate meanwhile.
        let looks: std::vec::Vec<_> =
            (0..50).map(|_| resident_bytes(|_, _| true).abs_diff(kernel())).collect();
        assert!(looks.iter().any(|&apart| apart < 4 << 20), "{looks:?}");
        assert_eq!(resident_bytes(|_, _| false), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(file: std::vec::Vec<u8>, piece in 1usize..40) {
            summed(&file, piece);
        }
    }
}
