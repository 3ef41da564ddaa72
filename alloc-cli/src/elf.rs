//! The little of an ELF header that decides whether a preload can work: which machine, which word
//! size, and whether the file asks for a dynamic loader.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const MAGIC: &[u8] = b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const ET_DYN: u16 = 3;
const PT_INTERP: u32 = 3;

/// What a preload needs to know of an ELF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Machine, word size and byte order: a library loads only where they are the same.
    pub(crate) platform: (u16, u8, u8),
    /// A shared library or a position-independent program.
    pub(crate) shared: bool,
    /// Names a dynamic loader; without one LD_PRELOAD is never read.
    pub(crate) has_loader: bool,
}

/// Reads the header of `path`; `None` where it is not an ELF file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Header>> {
    let file = File::open(path)?;
    let mut start = [0; 64];
    let len = read_up_to(&file, &mut start, 0)?;
    if len < start.len() || !start.starts_with(MAGIC) {
        return Ok(None);
    }
    let fields = Fields { little: start[5] == LITTLE_ENDIAN, wide: start[4] == CLASS_64 };
    let mut segments = vec![0; fields.segment_table_len(&start)];
    let len = read_up_to(&file, &mut segments, fields.segment_table_offset(&start))?;
    let has_loader = segments[..len]
        .chunks_exact(fields.segment_len(&start))
        .any(|segment| fields.u32(segment, 0) == PT_INTERP);
    Ok(Some(Header {
        platform: (fields.u16(&start, 18), start[4], start[5]),
        shared: fields.u16(&start, 16) == ET_DYN,
        has_loader,
    }))
}

/// Fills `buf` from `offset`, or as much of it as the file has.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match file.read_at(&mut buf[len..], offset.saturating_add(len as u64))? {
            0 => break,
            n => len += n,
        }
    }
    Ok(len)
}

/// How to read numbers of one file.
#[derive(Clone, Copy)]
struct Fields {
    little: bool,
    wide: bool,
}

impl Fields {
    fn u16(self, bytes: &[u8], at: usize) -> u16 {
        let field = [bytes[at], bytes[at + 1]];
        if self.little { u16::from_le_bytes(field) } else { u16::from_be_bytes(field) }
    }

    fn u32(self, bytes: &[u8], at: usize) -> u32 {
        let (first, second) = (self.u16(bytes, at), self.u16(bytes, at + 2));
        let (low, high) = if self.little { (first, second) } else { (second, first) };
        u32::from(high) << 16 | u32::from(low)
    }

    fn u64(self, bytes: &[u8], at: usize) -> u64 {
        let (first, second) = (self.u32(bytes, at), self.u32(bytes, at + 4));
        let (low, high) = if self.little { (first, second) } else { (second, first) };
        u64::from(high) << 32 | u64::from(low)
    }

    fn segment_table_offset(self, start: &[u8]) -> u64 {
        if self.wide { self.u64(start, 32) } else { u64::from(self.u32(start, 28)) }
    }

    /// At least 4, so that a damaged header cannot make empty segments.
    fn segment_len(self, start: &[u8]) -> usize {
        usize::from(self.u16(start, if self.wide { 54 } else { 42 })).max(4)
    }

    fn segment_table_len(self, start: &[u8]) -> usize {
        let count = usize::from(self.u16(start, if self.wide { 56 } else { 44 }));
        count * self.segment_len(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_program_is_dynamic_and_of_this_machine() {
        let own = read(Path::new("/proc/self/exe")).unwrap().unwrap();
        assert!(own.has_loader);
        assert_eq!(own.platform.1, if cfg!(target_pointer_width = "64") { 2 } else { 1 });
    }

    #[test]
    fn text_and_empty_files_are_not_elf() {
        assert_eq!(read(Path::new("/proc/self/status")).unwrap(), None);
        assert_eq!(read(Path::new("/dev/null")).unwrap(), None);
        assert!(read(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn numbers_of_both_byte_orders() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        let little = Fields { little: true, wide: true };
        let big = Fields { little: false, wide: true };
        assert_eq!(little.u64(&bytes, 0), u64::from_le_bytes(bytes));
        assert_eq!(big.u64(&bytes, 0), u64::from_be_bytes(bytes));
    }
}
