//! Files of the profiler: records into chunks, chunks into a file, with memory that is mapped once.
use core::ptr::null_mut;

use super::maps::Mapping;
use super::sites::MOST_FRAMES;
use super::{SITES, TAGS, THREADS, map};
use crate::os::file::File;
use crate::os::{Errno, linux};
use crate::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use thermalloc_prof_format::{ChunkWriter, Record, Site, Tag, Text, Thread, Words};

const BUFFER_BYTES: usize = 64 << 10;

/// Where one writer works at a time.
#[derive(Debug)]
pub(super) struct Desk {
    /// The thread that is at it, by the kernel's number; 0: nobody.
    holder: AtomicU32,
    memory: AtomicPtr<Memory>,
}

/// What lies on a desk. All zero when new.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) frames: [u64; MOST_FRAMES],
    introduced: Introduced,
    mapped: Mapped,
    /// Number of the file's next chunk.
    pub(super) sequence: u64,
    pub(super) buffer: [u8; BUFFER_BYTES],
}

impl Memory {
    /// A file begins: nothing was described in it.
    pub(super) fn begin(&mut self) {
        (self.sequence, self.introduced, self.mapped) = (0, Introduced::default(), Mapped::NONE);
    }
}

/// The right to a desk, until dropped.
pub(super) struct AtDesk<'a> {
    desk: &'a Desk,
    pub(super) memory: &'a mut Memory,
}

impl Desk {
    pub(super) const fn new() -> Self {
        Self { holder: AtomicU32::new(0), memory: AtomicPtr::new(null_mut()) }
    }

    /// The desk, if nobody is at it.
    pub(super) fn take(&self) -> Option<AtDesk<'_>> {
        let me = linux::gettid().cast_unsigned();
        self.holder.compare_exchange(0, me, Acquire, Relaxed).ok()?;
        let mut memory = self.memory.load(Acquire);
        if memory.is_null() {
            memory = map(size_of::<Memory>()).cast();
            if memory.is_null() {
                self.holder.store(0, Release);
                return None;
            }
            let _ = self.memory.compare_exchange(null_mut(), memory, AcqRel, Relaxed);
        }
        // SAFETY: mapped for good, zero when new, and `holder` keeps others off.
        Some(AtDesk { desk: self, memory: unsafe { &mut *memory } })
    }

    /// Whether the calling thread is at it: in a signal handler, that is, which must not wait for it.
    pub(super) fn is_mine(&self) -> bool {
        self.holder.load(Relaxed) == linux::gettid().cast_unsigned()
    }

    /// In a fork's child: whoever was at it is not there.
    pub(super) fn forget(&self) {
        self.holder.store(0, Release);
    }
}

impl Drop for AtDesk<'_> {
    fn drop(&mut self) {
        self.desk.holder.store(0, Release);
    }
}

/// Takes records. After an error it takes them still, and writes nothing.
pub(super) struct Writer<'a> {
    file: &'a File,
    chunk: ChunkWriter<'a>,
    introduced: &'a mut Introduced,
    mapped: &'a mut Mapped,
    result: Result<(), Errno>,
    records: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(file: &'a File, memory: &'a mut Memory) -> Self {
        let Memory { introduced, mapped, sequence, buffer, .. } = memory;
        let chunk = ChunkWriter::new(buffer, *sequence);
        Self { file, chunk, introduced, mapped, result: Ok(()), records: 0 }
    }

    pub(super) fn push(&mut self, record: &Record<'_>) {
        self.records += 1;
        if !self.chunk.push(record) {
            self.flush();
            // One that is too long for a chunk of its own is left out.
            self.chunk.push(record);
        }
    }

    fn flush(&mut self) {
        if let Some(bytes) = self.chunk.finish()
            && self.result.is_ok()
        {
            self.result = self.file.write(bytes);
        }
    }

    /// Records pushed so far.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Writes what is left; the number of the next chunk.
    pub(super) fn finish(mut self) -> Result<u64, Errno> {
        self.flush();
        self.result.map(|()| self.chunk.sequence())
    }

    /// The site that was described last.
    pub(super) fn last_site(&self) -> u32 {
        self.introduced.sites.upto
    }

    /// Whether a mapping is to be described: what the file says last of its place is something else.
    pub(super) fn maps_anew(&mut self, mapping: &Mapping<'_>) -> bool {
        self.mapped.enter(mapping)
    }

    /// Describes the site, the tag and the thread that the next record names, and all before them.
    pub(super) fn introduce(&mut self, site: u32, tag: u32, thread: u32) {
        while let Some(id) = self.introduced.sites.next(site) {
            let known = self.site(id);
            self.introduced.sites.told(id, known);
        }
        while let Some(id) = self.introduced.tags.next(tag) {
            let known = self.tag(id);
            self.introduced.tags.told(id, known);
        }
        while let Some(id) = self.introduced.threads.next(thread) {
            let known = self.thread(id);
            self.introduced.threads.told(id, known);
        }
    }

    fn site(&mut self, id: u32) -> bool {
        let mut frames = [0; MOST_FRAMES];
        let Some((len, flags)) = SITES.read(id, &mut frames) else { return false };
        let frames = Words::from_slice(&frames[..len]);
        self.push(&Record::Site(Site { site: id, flags, frames }));
        true
    }

    fn tag(&mut self, id: u32) -> bool {
        let told = TAGS.read(id, |m| {
            let mut text = [0; 2 * super::tags::NAME_BYTES];
            let (name, region) = text.split_at_mut(m.name.len());
            name.copy_from_slice(m.name);
            region[..m.region.len()].copy_from_slice(m.region);
            #[allow(clippy::cast_possible_truncation, reason = "at most NAME_BYTES")]
            self.push(&Record::Tag(Tag {
                tag: id,
                parent: m.parent,
                source: m.source,
                component: m.component,
                dtype: m.dtype,
                name_bytes: m.name.len() as u32,
                text: Text(&text[..m.name.len() + m.region.len()]),
            }));
        });
        told.is_some()
    }

    fn thread(&mut self, number: u32) -> bool {
        let Some(thread) = THREADS.get(number as usize) else { return false };
        let tid = thread.tid.load(Acquire);
        if tid == 0 {
            return false;
        }
        let words = [0, 1].map(|i| thread.name[i].load(Relaxed).to_ne_bytes());
        let name = words.as_flattened();
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        self.push(&Record::Thread(Thread { thread: number, tid, name: Text(&name[..len]) }));
        true
    }
}

/// How far sites, tags and threads were described in a file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Introduced {
    sites: Numbers,
    tags: Numbers,
    threads: Numbers,
}

/// Mappings that a file describes: a hash of each, in a place that its first address chooses. One whose place
/// another has taken is described again.
#[derive(Clone, Copy, Debug)]
struct Mapped([u64; MAPPED]);

const MAPPED: usize = 1024;

impl Mapped {
    const NONE: Self = Self([0; MAPPED]);

    /// Enters a mapping; false: it is there.
    fn enter(&mut self, mapping: &Mapping<'_>) -> bool {
        const FNV: u64 = 0x100_0000_01B3;
        let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(FNV);
        let words = [mapping.start as u64, mapping.end as u64, mapping.offset];
        let hash = words.into_iter().fold(0xCBF2_9CE4_8422_2325, step);
        let hash = mapping.path.iter().map(|&byte| byte.into()).fold(hash, step);
        let place = &mut self.0[(mapping.start >> 12) % MAPPED];
        core::mem::replace(place, hash) != hash
    }
}

/// Numbers up to which all were described, but for a few that were not to be had when their turn came: each
/// belongs to a thread that was about to enter it, and is described when a record names it.
#[derive(Clone, Copy, Debug, Default)]
struct Numbers {
    upto: u32,
    late: [u32; LATE],
}

/// As many threads enter something at a time, at most.
const LATE: usize = 32;

impl Numbers {
    /// The next that is to be described before `number` may be named; 0 needs none.
    fn next(&self, number: u32) -> Option<u32> {
        if number > self.upto {
            return Some(self.upto + 1);
        }
        (number > 0 && self.late.contains(&number)).then_some(number)
    }

    /// `number`, which was the next, was described, or is not known yet.
    fn told(&mut self, number: u32, known: bool) {
        if number <= self.upto {
            // Who names it has entered it.
            self.late.iter_mut().filter(|late| **late == number).for_each(|late| *late = 0);
            return;
        }
        self.upto = number;
        if !known {
            let free = self.late.iter().position(|&late| late == 0);
            self.late[free.unwrap_or(number as usize % LATE)] = number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_late_is_described_when_it_is_named() {
        let mut numbers = Numbers::default();
        let describe = |numbers: &mut Numbers, number, unknown: &[u32]| {
            let mut told = std::vec::Vec::new();
            while let Some(next) = numbers.next(number) {
                let known = !unknown.contains(&next);
                numbers.told(next, known);
                told.extend(known.then_some(next));
            }
            told
        };
        assert_eq!(describe(&mut numbers, 3, &[]), [1, 2, 3]);
        assert_eq!(describe(&mut numbers, 9, &[5, 7]), [4, 6, 8, 9]);
        assert_eq!(describe(&mut numbers, 5, &[]), [5]);
        assert_eq!(describe(&mut numbers, 5, &[]), []);
        assert_eq!(describe(&mut numbers, 2000, &[]).len(), 1991);
        assert_eq!(describe(&mut numbers, 7, &[]), [7], "however long ago its turn was");
        assert_eq!(describe(&mut numbers, 0, &[]), []);
    }

    #[test]
    fn a_mapping_is_described_when_its_place_is_anothers() {
        let mut mapped = Mapped::NONE;
        let at = |start, path| Mapping { start, end: start + 4096, offset: 0, flags: 5, path };
        assert!(mapped.enter(&at(0x1000, b"/a")));
        assert!(!mapped.enter(&at(0x1000, b"/a")));
        assert!(mapped.enter(&at(0x2000, b"/a")));
        assert!(mapped.enter(&at(0x1000, b"/b")), "instead of the first");
        assert!(mapped.enter(&at(0x1000, b"/a")), "it is back");
        assert!(mapped.enter(&Mapping { end: 0x3000, ..at(0x1000, b"/a") }), "and longer");
        assert!(mapped.enter(&Mapping { offset: 4096, ..at(0x2000, b"/a") }));
    }
}
