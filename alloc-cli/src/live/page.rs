//! Finds and reads the statistics page of a process. The process need not help: it may hang or be stopped.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use thermalloc_prof_format::page::{
    BUFFER_BYTES, MAGIC, PAGE_BYTES, WORD_MAGIC, WORD_PID, WORD_PUBLISHED, WORD_REQUESTED,
    WORD_TIME_NS, buffer_at,
};

use crate::failure::Failure;
use crate::prof::{Mapping, Profile};

/// A page that is mapped.
#[derive(Debug)]
pub(crate) struct Page {
    map: MmapRaw,
    pub(crate) path: PathBuf,
    pub(crate) pid: u32,
}

/// One state of a process.
#[derive(Debug)]
pub(crate) struct State {
    /// As a profile with one dump: figures, and the sums with most bytes.
    pub(crate) profile: Profile,
    /// Since it was written, seconds.
    pub(crate) age: f64,
    /// The process is there.
    pub(crate) alive: bool,
}

const HINT: &str = "start it with THERMALLOC_CONF=stats_page:/dev/shm/thermalloc.%p";

impl Page {
    /// The page of a process: where the option usually puts it, else by what the process has mapped.
    pub(crate) fn of(pid: u32) -> Result<Self, Failure> {
        let usual = PathBuf::from(format!("/dev/shm/thermalloc.{pid}"));
        let mapped = || {
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
            let mut found = maps.lines().filter_map(|line| {
                let path = line.splitn(6, ' ').nth(5)?.trim_start();
                path.starts_with('/').then(|| PathBuf::from(path))
            });
            found.find(|path| Self::open(path).is_ok())
        };
        if usual.exists() {
            return Self::open(&usual);
        }
        match mapped() {
            Some(path) => Self::open(&path),
            None => Err(Failure::not_found(format!("process {pid}"), "no statistics page", HINT)),
        }
    }

    /// The page in a file.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let not = |why: &str| Failure::cannot_run(path.display(), why, HINT);
        let bytes = fs::metadata(path).map_err(|why| not(&why.to_string()))?.len();
        if bytes != PAGE_BYTES as u64 {
            return Err(not("not a statistics page"));
        }
        // Readers that may not write can't ask for dumps, and read all the same.
        let file = File::options().read(true).write(true).open(path).or_else(|_| File::open(path));
        let file = file.map_err(|why| not(&why.to_string()))?;
        let map = memmap2::MmapOptions::new().map_raw(&file);
        let map = map.or_else(|_| memmap2::MmapOptions::new().map_raw_read_only(&file));
        let map = map.map_err(|why| not(&why.to_string()))?;
        let mut page = Self { map, path: path.to_owned(), pid: 0 };
        if page.word(WORD_MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err(not("not a statistics page of this version"));
        }
        page.pid = u32::try_from(page.word(WORD_PID).load(Ordering::Relaxed)).unwrap_or(0);
        Ok(page)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < 8);
        // SAFETY: the file has a header of that many words, aligned as a mapping is, which both sides use
        // as atomics only.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().wrapping_add(index)) }
    }

    /// The last state that was published.
    pub(crate) fn read(&self) -> Result<State, Failure> {
        for _ in 0..20 {
            let published = self.word(WORD_PUBLISHED).load(Ordering::Acquire);
            if published > 0 {
                let copy = self.copy(buffer_at(published));
                let again = self.word(WORD_PUBLISHED).load(Ordering::Acquire);
                let profile = Profile::parse(&copy);
                if again == published && profile.pid != 0 {
                    return Ok(self.state(profile));
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        Err(Failure::cannot_run(
            self.path.display(),
            "nothing was written to it yet",
            "wait a second",
        ))
    }

    /// The buffer as it is: a state that is being written over fails its checksum.
    fn copy(&self, at: usize) -> Vec<u8> {
        let from = self.map.as_mut_ptr().wrapping_add(at).cast::<u64>();
        (0..BUFFER_BYTES / 8)
            .flat_map(|word| {
                // SAFETY: within the buffer, which the file has; the other side may write at the same time,
                // so the words are read as atomics.
                let word = unsafe { AtomicU64::from_ptr(from.wrapping_add(word)) };
                word.load(Ordering::Relaxed).to_ne_bytes()
            })
            .collect()
    }

    fn state(&self, mut profile: Profile) -> State {
        let alive = Path::new(&format!("/proc/{}", self.pid)).exists();
        let written = self.word(WORD_TIME_NS).load(Ordering::Relaxed);
        let age = crate::prof::float(now_ns().saturating_sub(written)) / 1e9;
        profile.mappings = mappings(self.pid);
        State { profile, age, alive }
    }

    /// Asks the process for a dump, which it writes within a second or so.
    pub(crate) fn request_dump(&self) -> Result<(), Failure> {
        let writable = File::options().write(true).open(&self.path).is_ok();
        if !writable {
            let why = "its statistics page may not be written to";
            return Err(Failure::cannot_run(self.path.display(), why, "run as its user"));
        }
        self.word(WORD_REQUESTED).fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// The files with code that a process has mapped.
fn mappings(pid: u32) -> Vec<Mapping> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(6, ' ');
            let (start, end) = fields.next()?.split_once('-')?;
            let flags = fields.next()?;
            let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
            let path = fields.nth(2)?.trim_start();
            let (start, end) =
                (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
            (flags.contains('x') && path.starts_with('/')).then(|| Mapping {
                start,
                end,
                offset,
                flags: 5,
                build_id: Vec::new(),
                path: path.to_owned(),
            })
        })
        .collect()
}

/// Every page that can be found, by process.
pub(crate) fn all() -> Vec<Page> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return Vec::new() };
    let mut pages: Vec<Page> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?;
            name.starts_with("thermalloc.").then(|| Page::open(&path).ok())?
        })
        .collect();
    pages.sort_by_key(|page| page.pid);
    pages
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use thermalloc_prof_format::{
        ChunkWriter, Pool, Process, Record, Site, SnapshotBegin, SnapshotEnd, Stat, Tag, Text,
        Totals, Words, component, source, space,
    };

    /// A page as a process with this id would have it.
    pub(crate) fn made(name: &str, pid: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("{name}.{}", std::process::id()));
        let mut bytes = vec![0; PAGE_BYTES];
        let words = [(WORD_MAGIC, MAGIC), (WORD_PUBLISHED, 3), (WORD_PID, pid.into())];
        for (word, value) in words {
            bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        let at = buffer_at(3);
        let mut chunk = ChunkWriter::new(&mut bytes[at..at + BUFFER_BYTES], 0);
        let totals = Totals {
            site: 1,
            tag: 1,
            weighted_live_blocks: 10.0,
            weighted_live_bytes: 3e6,
            weighted_all_blocks: 20.0,
            weighted_all_bytes: 6e6,
            ..Totals::default()
        };
        let stat = |value, name: &'static str| {
            Record::Stat(Stat { value, unit: 0, flags: 0, name: Text(name.as_bytes()) })
        };
        for record in [
            Record::Process(Process {
                pid,
                version_bytes: 5,
                text: Text(b"0.1.0/bin/server"),
                ..Process::default()
            }),
            Record::SnapshotBegin(SnapshotBegin { number: 3, ..SnapshotBegin::default() }),
            stat(5 << 20, "allocated_bytes"),
            stat(8 << 20, "active_bytes"),
            stat(2 << 20, "dirty_bytes"),
            stat(11 << 20, "resident_bytes"),
            Record::Pool(Pool {
                flags: 1,
                live_bytes: 5 << 20,
                free_bytes: 3 << 20,
                held_bytes: 8 << 20,
                ..Pool::default()
            }),
            Record::Pool(Pool {
                index: 9,
                threads: 3,
                live_bytes: 2 << 20,
                held_bytes: 2 << 20,
                name: Text(b"loader"),
                ..Pool::default()
            }),
            Record::Pool(Pool {
                space: space::DEVICE,
                device: 1,
                live_bytes: 3 << 30,
                free_bytes: 1 << 30,
                pending_bytes: 512 << 20,
                held_bytes: 5 << 30,
                peak_bytes: 6 << 30,
                name: Text(b"kv"),
                ..Pool::default()
            }),
            Record::Site(Site { site: 1, flags: 0, frames: Words::from_slice(&[0x1000]) }),
            Record::Tag(Tag {
                tag: 1,
                source: source::SCOPE,
                component: component::WEIGHTS,
                name_bytes: 7,
                text: Text(b"encoder"),
                ..Tag::default()
            }),
            Record::Totals(totals),
            Record::SnapshotEnd(SnapshotEnd { number: 3, ..SnapshotEnd::default() }),
        ] {
            assert!(chunk.push(&record));
        }
        assert!(chunk.finish().is_some());
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn a_page_is_read_and_asked_for_dumps() {
        let path = made("thermalloc-page-test", 77);
        let page = Page::open(&path).unwrap();
        assert_eq!(page.pid, 77);
        let state = page.read().unwrap();
        assert_eq!(state.profile.program, "/bin/server");
        let last = state.profile.last().unwrap();
        assert_eq!((last.stat("allocated_bytes"), last.totals.len()), (5 << 20, 1));
        page.request_dump().unwrap();
        page.request_dump().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes[WORD_REQUESTED * 8], 2);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_buffer_that_is_being_written_is_not_believed() {
        let path = made("thermalloc-page-torn", 78);
        let mut bytes = fs::read(&path).unwrap();
        bytes[buffer_at(3) + 100] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert!(Page::open(&path).unwrap().read().is_err());
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"short").unwrap();
        assert!(Page::open(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
