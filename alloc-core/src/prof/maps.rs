//! What is mapped into the process: `/proc/self/maps`, read piece by piece, and what the ELF headers of
//! loaded modules say. Everything is read with memory of the profiler's own and without the loader.
use core::ffi::CStr;

use super::map;
use crate::os::linux;
use crate::sync::atomic::{
    AtomicBool, AtomicPtr,
    Ordering::{AcqRel, Acquire, Release},
};

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) offset: u64,
    /// 1 readable, 2 writable, 4 executable.
    pub(crate) flags: u32,
    pub(crate) path: &'a [u8],
}

/// A line holds a path of up to 4096 bytes.
const BUFFER_BYTES: usize = 16 << 10;

static BUFFER: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
static BUSY: AtomicBool = AtomicBool::new(false);

/// In a fork's child: whoever was reading is not there.
pub(crate) fn forget() {
    BUSY.store(false, Release);
}

/// Calls `each` with every mapping, in the order of addresses. False: they can't be read, or somebody
/// else reads them just now.
pub(crate) fn for_each(mut each: impl FnMut(Mapping<'_>)) -> bool {
    for_each_line(c"/proc/self/maps", &mut |line| {
        if let Some(mapping) = parse(line) {
            each(mapping);
        }
    })
}

/// Calls `each` with every line of a file of `/proc`. False: it can't be read, or somebody else reads
/// one just now.
pub(super) fn for_each_line(path: &CStr, each: &mut dyn FnMut(&[u8])) -> bool {
    if BUSY.swap(true, Acquire) {
        return false;
    }
    let done = with_buffer(|buffer| read_lines(path, buffer, each));
    BUSY.store(false, Release);
    done
}

fn with_buffer(read: impl FnOnce(&mut [u8]) -> bool) -> bool {
    let mut buffer = BUFFER.load(Acquire);
    if buffer.is_null() {
        buffer = map(BUFFER_BYTES);
        if buffer.is_null() {
            return false;
        }
        let _ = BUFFER.compare_exchange(core::ptr::null_mut(), buffer, AcqRel, Acquire);
    }
    // SAFETY: that many bytes, mapped for good; `BUSY` keeps others off.
    read(unsafe { core::slice::from_raw_parts_mut(buffer, BUFFER_BYTES) })
}

fn read_lines(path: &CStr, buffer: &mut [u8], each: &mut dyn FnMut(&[u8])) -> bool {
    let Ok(file) = linux::open(path) else { return false };
    let mut len = 0;
    let whole = loop {
        match linux::read(file, &mut buffer[len..]) {
            Ok(0) => break len == 0,
            Ok(more) => len += more,
            Err(crate::os::Errno(libc::EINTR)) => continue,
            Err(_) => break false,
        }
        let end = buffer[..len].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        buffer[..end]
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
            .for_each(&mut *each);
        buffer.copy_within(end..len, 0);
        len -= end;
    };
    linux::close(file);
    whole
}

/// A line like `7f00-7f80 r-xp 00001000 fe:01 1234   /lib/a.so`.
pub(super) fn parse(line: &[u8]) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let range = fields.next()?;
    let flags = fields.next()?;
    let offset = hex(fields.next()?)?;
    let path = fields.nth(2).unwrap_or(&[]).trim_ascii_start();
    let dash = range.iter().position(|&byte| byte == b'-')?;
    let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
    let flag = |at: usize, letter| u32::from(flags.get(at) == Some(&letter)) << at;
    Some(Mapping {
        start: usize::try_from(start).ok()?,
        end: usize::try_from(end).ok()?,
        offset,
        flags: flag(0, b'r') | flag(1, b'w') | flag(2, b'x'),
        path,
    })
}

fn hex(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(str::from_utf8(text).ok()?, 16).ok()
}

/// A file with an ELF header, as it is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Module {
    pub(crate) start: usize,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for unwinding"))]
    pub(crate) end: usize,
}

/// Calls `each` with every module that has code.
#[cfg(any(target_arch = "x86_64", test))]
pub(crate) fn for_each_module(mut each: impl FnMut(Module)) -> bool {
    let mut base = 0;
    for_each(|mapping| {
        if mapping.offset == 0 && mapping.flags & 1 != 0 {
            base = mapping.start;
        }
        let file = mapping.path.starts_with(b"/") || mapping.path == b"[vdso]";
        if mapping.flags & 4 != 0 && file && base != 0 {
            each(Module { start: base, end: mapping.end });
        }
    })
}

/// One entry of the program header table.
#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: u32,
    offset: u64,
    address: usize,
    bytes: usize,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_NOTE: u32 = 4;
#[cfg(any(target_arch = "x86_64", test))]
const PT_GNU_EH_FRAME: u32 = 0x6474_E550;

/// A number in memory that is looked at first.
fn peek<T: Copy>(at: usize) -> Option<T> {
    const { assert!(size_of::<T>() <= 8) };
    if !linux::is_readable(at) {
        return None;
    }
    // SAFETY: the kernel could read eight bytes there; a plain number has no wrong values.
    Some(unsafe { core::ptr::with_exposed_provenance::<T>(at).read_unaligned() })
}

impl Module {
    fn segments(self) -> impl Iterator<Item = Segment> {
        let header = || {
            let magic = peek::<u32>(self.start)?;
            let table = usize::try_from(peek::<u64>(self.start + 32)?).ok()?;
            let [size, count] = [peek::<u16>(self.start + 54)?, peek::<u16>(self.start + 56)?];
            (magic == 0x464C_457F && size == 56 && table < 4096).then_some((table, count))
        };
        let (table, count) = header().unwrap_or((0, 0));
        (0..usize::from(count)).filter_map(move |i| {
            let at = self.start + table + i * 56;
            Some(Segment {
                kind: peek(at)?,
                offset: peek(at + 8)?,
                address: usize::try_from(peek::<u64>(at + 16)?).ok()?,
                bytes: usize::try_from(peek::<u64>(at + 40)?).ok()?,
            })
        })
    }

    /// The distance of addresses from those in the file.
    fn bias(self) -> Option<usize> {
        let first = self.segments().find(|s| s.kind == PT_LOAD && s.offset == 0)?;
        Some(self.start.wrapping_sub(first.address))
    }

    fn find(self, kind: u32) -> Option<Segment> {
        let bias = self.bias()?;
        let segment = self.segments().find(|s| s.kind == kind)?;
        Some(Segment { address: segment.address.wrapping_add(bias), ..segment })
    }

    /// The table of call frame information.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(crate) fn eh_frame_hdr(self) -> Option<usize> {
        self.find(PT_GNU_EH_FRAME).map(|s| s.address)
    }

    /// Copies the GNU build id into `out`; its bytes.
    pub(crate) fn build_id(self, out: &mut [u8]) -> usize {
        self.note(out).unwrap_or(0)
    }

    fn note(self, out: &mut [u8]) -> Option<usize> {
        const GNU: u32 = u32::from_le_bytes(*b"GNU\0");
        let bias = self.bias()?;
        for notes in self.segments().filter(|s| s.kind == PT_NOTE) {
            let start = notes.address.wrapping_add(bias);
            let mut at = start;
            while at + 16 <= start + notes.bytes {
                let [name, len, kind] = [peek::<u32>(at)?, peek(at + 4)?, peek(at + 8)?];
                let (name, len) = (name as usize, len as usize);
                if kind == 3 && name == 4 && peek::<u32>(at + 12)? == GNU {
                    let len = len.min(out.len());
                    for (i, to) in out[..len].iter_mut().enumerate() {
                        *to = peek(at + 16 + i)?;
                    }
                    return Some(len);
                }
                at += 12 + name.next_multiple_of(4) + len.next_multiple_of(4);
            }
        }
        None
    }

    /// The address of a function that the module exports.
    pub(crate) fn symbol(self, name: &[u8]) -> Option<usize> {
        let bias = self.bias()?;
        let dynamic = self.find(PT_DYNAMIC)?;
        let entry = |tag: u64| {
            let value = (0..dynamic.bytes / 16).find_map(|i| {
                let at = dynamic.address + i * 16;
                (peek::<u64>(at)? == tag).then(|| peek::<usize>(at + 8))?
            })?;
            // The loader has made most of them addresses.
            Some(if value < self.start { value.wrapping_add(bias) } else { value })
        };
        let (hashes, strings, symbols) = (entry(0x6FFF_FEF5)?, entry(5)?, entry(6)?);
        let hash = name.iter().fold(5381u32, |h, &b| h.wrapping_mul(33).wrapping_add(b.into()));
        let [buckets, first, bloom] = [peek::<u32>(hashes)?, peek(hashes + 4)?, peek(hashes + 8)?];
        let bucket_table = hashes + 16 + bloom as usize * 8;
        let mut index = peek::<u32>(bucket_table + (hash.checked_rem(buckets)?) as usize * 4)?;
        if index < first {
            return None;
        }
        loop {
            let chain = bucket_table + buckets as usize * 4 + (index - first) as usize * 4;
            let here = peek::<u32>(chain)?;
            let symbol = symbols + index as usize * 24;
            if here | 1 == hash | 1 && is_text(strings + peek::<u32>(symbol)? as usize, name) {
                let [section, value] =
                    [u64::from(peek::<u16>(symbol + 6)?), peek::<u64>(symbol + 8)?];
                return (section != 0)
                    .then(|| usize::try_from(value).ok())?
                    .map(|v| v.wrapping_add(bias));
            }
            if here & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}

fn is_text(at: usize, text: &[u8]) -> bool {
    let byte = |i: usize| peek::<u8>(at + i);
    text.iter().enumerate().all(|(i, &want)| byte(i) == Some(want)) && byte(text.len()) == Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    #[test]
    fn lines() {
        let line = b"7f0012345000-7f0012346000 r-xp 00001000 fe:01 1234                       /lib/with space.so";
        let mapping = parse(line).unwrap();
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f00_1234_5000, 0x7f00_1234_6000, 4096)
        );
        assert_eq!((mapping.flags, mapping.path), (5, &b"/lib/with space.so"[..]));
        let anonymous = parse(b"1000-2000 -w-p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.flags, anonymous.path), (2, &b""[..]));
        assert_eq!(parse(b"nonsense"), None);
        assert_eq!(parse(b"12-zz r--p 0 0 0"), None);
    }

    #[test]
    fn all_mappings_are_seen() {
        let mut seen = Vec::new();
        while !for_each(|m| seen.push((m.start, String::from_utf8_lossy(m.path).into_owned()))) {
            std::thread::yield_now();
        }
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(seen.len().abs_diff(text.lines().count()) < 20);
        assert!(seen.is_sorted());
        let own = std::env::current_exe().unwrap();
        assert!(seen.iter().any(|(_, path)| *path == own.to_string_lossy()));
        assert!(seen.iter().any(|(_, path)| path == "[stack]"));
    }

    fn module_of(address: usize) -> Module {
        let mut found = None;
        while found.is_none() {
            for_each_module(|m| {
                if (m.start..m.end).contains(&address) {
                    found = Some(m);
                }
            });
        }
        found.unwrap()
    }

    #[test]
    fn symbols_of_libc_are_where_the_loader_says() {
        let libc = module_of(libc::qsort as *const () as usize);
        for (name, address) in [
            (&b"qsort"[..], libc::qsort as *const () as usize),
            (b"getpid", libc::getpid as *const () as usize),
        ] {
            assert_eq!(libc.symbol(name), Some(address));
        }
        assert_eq!(libc.symbol(b"no_such_function"), None);
        assert!(libc.eh_frame_hdr().is_some());
        let mut id = [0; 64];
        assert_eq!(libc.build_id(&mut id), 20);
        assert!(id[..20].iter().any(|&byte| byte != 0));
        let nothing = Module { start: 0, end: 0 };
        assert_eq!((nothing.build_id(&mut id), nothing.symbol(b"qsort")), (0, None));
    }
}
