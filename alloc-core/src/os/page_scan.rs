//! What lies behind pages, by `PAGEMAP_SCAN` (Linux 6.7). `mincore` says that a page is there which was only
//! read, and for which the kernel's page of zeros stands; that is no memory of the process's.
use super::linux;

/// Ranges that one call may find.
const RANGES: usize = 64;
/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: usize = 0xC060_6610;
const PRESENT: u64 = 1 << 3;
const ZEROS: u64 = 1 << 5;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Range {
    start: u64,
    end: u64,
    categories: u64,
}

/// The kernel's `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    ranges: u64,
    ranges_len: u64,
    most_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    told: u64,
}

/// The process's page tables, to be asked.
#[derive(Debug)]
pub(crate) struct PageScan {
    descriptor: i32,
}

impl PageScan {
    /// `None` where there is no `/proc`.
    pub(crate) fn open() -> Option<Self> {
        linux::open(c"/proc/self/pagemap").ok().map(|descriptor| Self { descriptor })
    }

    /// Bytes of `[address, address + bytes)`, both multiples of the kernel's page, with memory behind them.
    /// `None`: an older kernel, or nothing is mapped there.
    pub(crate) fn resident(&self, address: usize, bytes: usize) -> Option<usize> {
        let (mut at, end) = (address as u64, (address + bytes) as u64);
        let mut resident = 0;
        while at < end {
            let mut ranges = [Range::default(); RANGES];
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start: at,
                end,
                ranges: ranges.as_mut_ptr().expose_provenance() as u64,
                ranges_len: RANGES as u64,
                inverted: ZEROS,
                all_of: PRESENT | ZEROS,
                told: PRESENT,
                ..Scan::default()
            };
            let argument = (&raw mut scan).expose_provenance();
            // SAFETY: the request's struct, and room for as many ranges as it says.
            let found = unsafe { linux::ioctl(self.descriptor, PAGEMAP_SCAN, argument) }.ok()?;
            let found = ranges.get(..found)?;
            resident += found.iter().map(|range| range.end - range.start).sum::<u64>();
            if scan.walk_end <= at {
                return None;
            }
            at = scan.walk_end;
        }
        usize::try_from(resident).ok()
    }
}

impl Drop for PageScan {
    fn drop(&mut self) {
        linux::close(self.descriptor);
    }
}
