//! Transparent huge pages: what the option and the system say, and what counts as evidence that a
//! huge page would be filled. Decisions only; `extent::hugepage` looks and acts.
use core::ffi::CStr;

use crate::os::Os;

/// The option `thp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thp {
    /// Where memory was seen to be dense.
    Evidence,
    /// All memory, at once.
    Always,
    /// No memory.
    Never,
}

/// The option `hugetlb`: pages of the kernel's reserved pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hugetlb {
    /// None.
    Off,
    /// Pages of 2 MiB.
    Mib2,
    /// Pages of 1 GiB.
    Gib1,
}

impl Hugetlb {
    /// log2 of the page's bytes.
    pub(crate) fn lg_page(self) -> Option<u32> {
        match self {
            Self::Off => None,
            Self::Mib2 => Some(21),
            Self::Gib1 => Some(30),
        }
    }
}

/// What the system allows: `/sys/kernel/mm/transparent_hugepage/enabled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum System {
    Always,
    Madvise,
    /// Or there are none, or none of 2 MiB.
    Never,
}

/// Reads what the system allows.
pub(crate) fn system(os: &impl Os) -> System {
    let mut buffer = [0; 64];
    let path = c"/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
    let len = os.read_file(path, &mut buffer).unwrap_or(0);
    if buffer[..len].trim_ascii() != b"2097152" {
        return System::Never;
    }
    match mode(os, c"/sys/kernel/mm/transparent_hugepage/enabled", &mut buffer) {
        Some("always") => System::Always,
        Some("madvise") => System::Madvise,
        _ => System::Never,
    }
}

/// The word in brackets of such a file.
pub(crate) fn mode<'a>(os: &impl Os, path: &CStr, buffer: &'a mut [u8]) -> Option<&'a str> {
    let len = os.read_file(path, buffer).ok()?;
    let chosen = buffer.get(..len)?.split(|&b| b == b'[').nth(1)?;
    core::str::from_utf8(chosen.split(|&b| b == b']').next()?).ok()
}

/// Peak of the memory in use from which on huge pages are worth a look, bytes. A small program gains nothing by
/// them, and would grow.
pub(crate) const WORTH_BYTES: u64 = 32 << 20;
/// A huge page's memory has to be dense at two looks, this long apart, milliseconds.
pub(crate) const DWELL_MS: u64 = 1000;
/// A frame that was found sparse is looked at again after this long, then after twice as long, and
/// so on, milliseconds.
pub(crate) const AGAIN_MS: (u64, u64) = (1000, 64_000);

/// Whether `resident` of `pages` pages are enough: more than nine in ten, so that a huge page costs at
/// most a ninth more than was touched.
pub(crate) fn is_dense(resident: usize, pages: usize) -> bool {
    resident * 10 > pages * 9
}

/// How long to rest after collapsing for `spent_us` microseconds, so that it takes at most a third of a
/// CPU's time: milliseconds.
pub(crate) fn rest_ms(spent_us: u64) -> u64 {
    spent_us * 2 / 1000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::fake::FakeKernel;

    fn with(enabled: &str, pmd: &str) -> System {
        let os = FakeKernel::new(4096);
        os.put_file("/sys/kernel/mm/transparent_hugepage/enabled", enabled);
        os.put_file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", pmd);
        system(&os)
    }

    #[test]
    fn the_systems_modes() {
        assert_eq!(with("[always] madvise never\n", "2097152\n"), System::Always);
        assert_eq!(with("always [madvise] never\n", "2097152\n"), System::Madvise);
        assert_eq!(with("always madvise [never]\n", "2097152\n"), System::Never);
        assert_eq!(with("always [madvise] never\n", "536870912\n"), System::Never);
        assert_eq!(with("nonsense", "2097152\n"), System::Never);
        assert_eq!(system(&FakeKernel::new(4096)), System::Never, "no files, no huge pages");
    }

    #[test]
    fn nine_tenths_are_not_enough_and_more_are() {
        assert!(!is_dense(460, 512));
        assert!(is_dense(461, 512));
        assert!(is_dense(512, 512));
    }
}
