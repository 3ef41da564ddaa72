//! Files of the profiler: records into chunks, chunks into a file, with memory that is mapped once.
use core::ptr::null_mut;

use super::sites::MOST_FRAMES;
use super::{SITES, TAGS, THREADS, map};
use crate::os::Errno;
use crate::os::file::File;
use crate::sync::atomic::{
    AtomicBool, AtomicPtr,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use thermalloc_prof_format::{ChunkWriter, Record, Site, Tag, Text, Thread, Words};

const BUFFER_BYTES: usize = 64 << 10;

/// Where one writer works at a time.
#[derive(Debug)]
pub(super) struct Desk {
    busy: AtomicBool,
    memory: AtomicPtr<Memory>,
}

/// What lies on a desk. All zero when new.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) frames: [u64; MOST_FRAMES],
    pub(super) introduced: Introduced,
    /// Number of the file's next chunk.
    pub(super) sequence: u64,
    pub(super) buffer: [u8; BUFFER_BYTES],
}

/// The right to a desk, until dropped.
pub(super) struct AtDesk<'a> {
    desk: &'a Desk,
    pub(super) memory: &'a mut Memory,
}

impl Desk {
    pub(super) const fn new() -> Self {
        Self { busy: AtomicBool::new(false), memory: AtomicPtr::new(null_mut()) }
    }

    /// The desk, if nobody is at it.
    pub(super) fn take(&self) -> Option<AtDesk<'_>> {
        if self.busy.swap(true, Acquire) {
            return None;
        }
        let mut memory = self.memory.load(Acquire);
        if memory.is_null() {
            memory = map(size_of::<Memory>()).cast();
            if memory.is_null() {
                self.busy.store(false, Release);
                return None;
            }
            let _ = self.memory.compare_exchange(null_mut(), memory, AcqRel, Relaxed);
        }
        // SAFETY: mapped for good, zero when new, and `busy` keeps others off.
        Some(AtDesk { desk: self, memory: unsafe { &mut *memory } })
    }

    /// In a fork's child: whoever was at it is not there.
    pub(super) fn forget(&self) {
        self.busy.store(false, Release);
    }
}

impl Drop for AtDesk<'_> {
    fn drop(&mut self) {
        self.desk.busy.store(false, Release);
    }
}

/// Takes records. After an error it takes them still, and writes nothing.
pub(super) struct Writer<'a> {
    file: &'a File,
    chunk: ChunkWriter<'a>,
    introduced: &'a mut Introduced,
    result: Result<(), Errno>,
    records: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(file: &'a File, memory: &'a mut Memory) -> Self {
        let Memory { introduced, sequence, buffer, .. } = memory;
        let chunk = ChunkWriter::new(buffer, *sequence);
        Self { file, chunk, introduced, result: Ok(()), records: 0 }
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

    /// Describes the site, the tag and the thread that the next record names, and all before them.
    pub(super) fn introduce(&mut self, site: u32, tag: u32, thread: u32) {
        while self.introduced.sites < site {
            self.introduced.sites += 1;
            let id = self.introduced.sites;
            let mut frames = [0; MOST_FRAMES];
            if let Some((len, flags)) = SITES.read(id, &mut frames) {
                let frames = Words::from_slice(&frames[..len]);
                self.push(&Record::Site(Site { site: id, flags, frames }));
            }
        }
        while self.introduced.tags < tag {
            self.introduced.tags += 1;
            self.tag(self.introduced.tags);
        }
        while self.introduced.threads < thread {
            self.introduced.threads += 1;
            self.thread(self.introduced.threads);
        }
    }

    fn tag(&mut self, id: u32) {
        TAGS.read(id, |m| {
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
    }

    fn thread(&mut self, number: u32) {
        let Some(thread) = THREADS.get(number as usize) else { return };
        let tid = thread.tid.load(Acquire);
        if tid == 0 {
            return;
        }
        let words = [0, 1].map(|i| thread.name[i].load(Relaxed).to_ne_bytes());
        let name = words.as_flattened();
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        self.push(&Record::Thread(Thread { thread: number, tid, name: Text(&name[..len]) }));
    }
}

/// How far sites, tags and threads were described in a file. A number that is not to be had yet when
/// its turn comes belongs to somebody who is about to enter it, and who names it in no record before:
/// it is described with [`Introduced::again`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Introduced {
    sites: u32,
    tags: u32,
    threads: u32,
}

impl Introduced {
    /// Describes the last few once more, next time.
    pub(super) fn again(&mut self) {
        const FEW: u32 = 8;
        self.sites = self.sites.saturating_sub(FEW);
        self.tags = self.tags.saturating_sub(FEW);
        self.threads = self.threads.saturating_sub(FEW);
    }
}
