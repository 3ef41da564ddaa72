//! What the kernel says of the process's memory at the time of a dump: by mapping, by extent, and the
//! limits. So a report can set the allocator's own counts beside the resident size, and name what is
//! not the allocator's.
use super::file::Writer;
use super::maps;
use crate::explicit;
use crate::extent::page_map::Window;
use crate::os::page_scan::PageScan;
use crate::os::{linux, start};
use thermalloc_prof_format::{Record, Region, System, Text};

const PATH_BYTES: usize = 512;

/// The mapping whose figures are being read.
struct Current {
    region: Region<'static>,
    path: [u8; PATH_BYTES],
    path_bytes: usize,
}

impl Current {
    fn write(&self, writer: &mut Writer<'_>) {
        if self.region.resident_bytes + self.region.swap_bytes > 0 {
            let path = Text(&self.path[..self.path_bytes]);
            writer.push(&Record::Region(Region { path, ..self.region }));
        }
    }

    fn begin(&mut self, mapping: &maps::Mapping<'_>) {
        let any = |is: fn(&Window, usize) -> bool| {
            explicit::all_heaps().any(|heap| is(&heap.pages.space.window, mapping.start))
        };
        let blocks = u32::from(any(|window, at| window.page_of(at).is_some())) << 3;
        let tables = u32::from(any(|window, at| window.in_tables(at))) << 4;
        self.region = Region {
            start: mapping.start as u64,
            end: mapping.end as u64,
            flags: mapping.flags | blocks | tables,
            ..Region::default()
        };
        self.path_bytes = mapping.path.len().min(PATH_BYTES);
        self.path[..self.path_bytes].copy_from_slice(&mapping.path[..self.path_bytes]);
    }

    fn figure(&mut self, name: &[u8], bytes: u64) {
        let r = &mut self.region;
        match name {
            b"Rss" => r.resident_bytes = bytes,
            b"Shared_Clean" | b"Shared_Dirty" => r.shared_bytes += bytes,
            b"Anonymous" => r.anonymous_bytes = bytes,
            b"Swap" => r.swap_bytes = bytes,
            b"Locked" => r.locked_bytes = bytes,
            b"AnonHugePages" => r.huge_bytes = bytes,
            _ => {}
        }
    }
}

/// Every mapping with memory behind it.
pub(super) fn regions(writer: &mut Writer<'_>) {
    let mut current = Current { region: Region::default(), path: [0; PATH_BYTES], path_bytes: 0 };
    maps::for_each_line(c"/proc/self/smaps", &mut |line| {
        if let Some((name, bytes)) = figure(line) {
            current.figure(name, bytes);
        } else if let Some(mapping) = maps::parse(line) {
            current.write(writer);
            current.begin(&mapping);
        }
    });
    current.write(writer);
}

/// A line like `Rss:   1234 kB`, in bytes.
fn figure(line: &[u8]) -> Option<(&[u8], u64)> {
    let (name, rest) = line.split_at(line.iter().position(|&byte| byte == b':')?);
    let rest = rest[1..].trim_ascii();
    let number = rest.strip_suffix(b" kB").unwrap_or(rest);
    Some((name, str::from_utf8(number).ok()?.parse::<u64>().ok()?.saturating_mul(1024)))
}

/// What the process has and what it may have.
pub(super) fn limits(mut push: impl FnMut(&Record<'_>)) {
    let mut system = System { memlock_limit_bytes: u64::MAX, ..System::default() };
    maps::for_each_line(c"/proc/self/status", &mut |line| match figure(line) {
        Some((b"VmRSS", bytes)) => system.resident_bytes = bytes,
        Some((b"VmHWM", bytes)) => system.peak_resident_bytes = bytes,
        Some((b"VmSwap", bytes)) => system.swap_bytes = bytes,
        Some((b"VmLck", bytes)) => system.locked_bytes = bytes,
        Some((b"VmPin", bytes)) => system.pinned_bytes = bytes,
        _ => {}
    });
    maps::for_each_line(c"/proc/meminfo", &mut |line| {
        if let Some((b"MemTotal", bytes)) = figure(line) {
            system.memory_bytes = bytes;
        }
    });
    maps::for_each_line(c"/proc/self/limits", &mut |line| {
        if let Some(rest) = line.strip_prefix(b"Max locked memory") {
            let soft = rest.trim_ascii().split(|&byte| byte == b' ').next();
            let soft = soft.and_then(|soft| str::from_utf8(soft).ok());
            system.memlock_limit_bytes =
                soft.and_then(|soft| soft.parse().ok()).unwrap_or(u64::MAX);
        }
    });
    push(&Record::System(system));
}

/// Bytes of `[address, address + bytes)` with memory behind them, plus 1; 0: the kernel does not say.
pub(super) fn resident(scan: Option<&PageScan>, address: usize, bytes: usize) -> u64 {
    let page = start::page_size();
    // The kernel's pages may be larger than ours: those at the ends are counted where they begin.
    let (at, end) = (address.next_multiple_of(page), (address + bytes).next_multiple_of(page));
    if at >= end {
        return 1;
    }
    match scan.and_then(|scan| scan.resident(at, end - at)) {
        Some(resident) => resident as u64 + 1,
        None => in_core(at, end),
    }
}

/// The same as an older kernel says it: with pages that were only read.
fn in_core(mut at: usize, end: usize) -> u64 {
    let page = start::page_size();
    let mut pages = [0; 2048];
    let mut resident = 0;
    while at < end {
        let len = (end - at).min(pages.len() * page);
        if linux::mincore(at, len, &mut pages).is_err() {
            return 0;
        }
        let of = len.div_ceil(page);
        resident += pages[..of].iter().filter(|&&byte| byte & 1 == 1).count() * page;
        at += len;
    }
    resident as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_proc_files() {
        assert_eq!(figure(b"Rss:                  12 kB"), Some((&b"Rss"[..], 12288)));
        assert_eq!(figure(b"VmLck:\t       0 kB"), Some((&b"VmLck"[..], 0)));
        assert_eq!(figure(b"VmFlags: rd wr mr mw me ac sd"), None);
        assert_eq!(figure(b"Name:\tcat"), None);
        assert_eq!(figure(b"7f00-7f80 rw-p 00001000 fe:01 12   /a"), None);
    }

    #[test]
    fn pages_that_were_touched_are_resident() {
        let page = start::page_size();
        let scan = PageScan::open();
        let block = super::super::map(16 * page);
        assert!(!block.is_null());
        let before = resident(scan.as_ref(), block.addr(), 16 * page);
        assert_eq!(before, in_core(block.addr(), block.addr() + 16 * page));
        for i in 0..3 {
            // SAFETY: within the 16 pages.
            unsafe { block.wrapping_add(i * page).write(1) };
        }
        let now = resident(scan.as_ref(), block.addr(), 16 * page);
        assert_eq!(now, before + 3 * page as u64);
        assert_eq!(now, in_core(block.addr(), block.addr() + 16 * page));
        let nowhere = usize::MAX - 8 * page + 1;
        assert!(in_core(nowhere, nowhere + page) == 0 && resident(None, nowhere, page) == 0);
    }

    #[test]
    fn pages_that_were_only_read_are_not() {
        let page = start::page_size();
        let block = super::super::map(4 * page);
        let Some(scan) =
            PageScan::open().filter(|scan| scan.resident(block.addr(), page).is_some())
        else {
            // An older kernel, which can't tell.
            return;
        };
        let before = resident(Some(&scan), block.addr(), 4 * page);
        for i in 0..4 {
            // SAFETY: within the four pages.
            assert_eq!(unsafe { block.wrapping_add(i * page).read_volatile() }, 0);
        }
        assert_eq!(resident(Some(&scan), block.addr(), 4 * page), before);
    }
}
