//! The statistics page (option `stats_page`): what others read of a live process. The layout is that of
//! `thermalloc_prof_format::page`; the background thread writes it every second, and writes a dump
//! where a reader asks for one.
//!
//! Invariant: `PAGE` is null or the mapping of this process's own file; a fork's child has none until it
//! has made its own.
use core::ptr::null_mut;

use super::names::Why;
use super::sites::MOST_FRAMES;
use super::{SITES, TAGS, TOTALS, dump, map, now_ns, period, pools, system};
use crate::control::options;
use crate::control::stats;
use crate::control::text::Line;
use crate::os::{Errno, linux};
use crate::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use crate::trace_file::expanded;
use thermalloc_prof_format::page::{
    BUFFER_BYTES, MAGIC, PAGE_BYTES, WORD_MAGIC, WORD_PID, WORD_PUBLISHED, WORD_REQUESTED,
    WORD_SERVED, WORD_TIME_NS, buffer_at,
};
use thermalloc_prof_format::{
    ChunkWriter, Record, Site, SnapshotBegin, SnapshotEnd, Stat, Tag, Text, Words,
};

static PAGE: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static BUSY: AtomicBool = AtomicBool::new(false);
static DUE_NS: AtomicU64 = AtomicU64::new(0);
static CHOSEN: AtomicPtr<Chosen> = AtomicPtr::new(null_mut());

/// How often it is written.
const EVERY_NS: u64 = 1_000_000_000;
/// Sums in the page: those with most live bytes.
const MOST_TOTALS: usize = 128;

/// The sums chosen, and room for a stack.
struct Chosen {
    totals: [(u64, u32); MOST_TOTALS],
    frames: [u64; MOST_FRAMES],
}

/// Whether there is a page to write.
pub(super) fn is_on() -> bool {
    !PAGE.load(Relaxed).is_null()
}

/// Makes the page, where the option asks for one; `report` gets a line where it can't be made.
pub(super) fn start(report: impl FnOnce(&[u8])) {
    let mut line = Line::new();
    let Some(path) = expanded(options::stats_page().as_bytes(), &mut line) else { return };
    match linux::map_file(path, PAGE_BYTES) {
        Ok(page) => {
            word(page, WORD_PID).store(u64::from(linux::getpid().cast_unsigned()), Relaxed);
            word(page, WORD_MAGIC).store(MAGIC, Release);
            PAGE.store(page, Release);
        }
        Err(Errno(errno)) => {
            let mut line = Line::<128>::new();
            line.str("thermalloc: option stats_page: \"");
            line.excerpt(options::stats_page().as_bytes(), 40);
            line.str("\" can't be written (errno ").signed(errno.into()).str("): there is none");
            report(line.end().as_bytes());
        }
    }
}

/// In a fork's child: the page is its parent's. It makes one of its own where the path tells them apart.
pub(super) fn forget() {
    BUSY.store(false, Release);
    if !PAGE.swap(null_mut(), Relaxed).is_null()
        && options::stats_page().as_bytes().windows(2).any(|w| w == b"%p")
    {
        start(|_| {});
    }
}

/// At the process's end: a page without a process would only puzzle its readers.
pub(super) fn finish() {
    let mut line = Line::new();
    if is_on()
        && let Some(path) = expanded(options::stats_page().as_bytes(), &mut line)
    {
        PAGE.store(null_mut(), Relaxed);
        linux::unlink(path);
    }
}

fn word(page: *mut u8, index: usize) -> &'static AtomicU64 {
    // SAFETY: a word of the header, which is mapped for good and shared as atomics only.
    unsafe { AtomicU64::from_ptr(page.cast::<u64>().wrapping_add(index)) }
}

/// Writes the page if it is due, and dumps that readers asked for.
pub(super) fn tend() {
    let page = PAGE.load(Acquire);
    if page.is_null() {
        return;
    }
    let now = now_ns();
    if now >= DUE_NS.load(Relaxed) && !BUSY.swap(true, Acquire) {
        DUE_NS.store(now + EVERY_NS, Relaxed);
        publish(page, now);
        BUSY.store(false, Release);
    }
    let (requested, served) = (word(page, WORD_REQUESTED), word(page, WORD_SERVED));
    let (asked, seen) = (requested.load(Acquire), served.load(Relaxed));
    if asked != seen && served.compare_exchange(seen, asked, AcqRel, Relaxed).is_ok() {
        let _ = dump::by_prefix(Why::Request);
    }
}

fn publish(page: *mut u8, now: u64) {
    let Some(chosen) = chosen() else { return };
    let next = word(page, WORD_PUBLISHED).load(Relaxed) + 1;
    let buffer = page.wrapping_add(buffer_at(next));
    // SAFETY: the mapping has that buffer, `BUSY` keeps other writers off, and readers check what they copied.
    let buffer = unsafe { core::slice::from_raw_parts_mut(buffer, BUFFER_BYTES) };
    let mut chunk = ChunkWriter::new(buffer, 0);
    fill(&mut chunk, chosen, now, next);
    if chunk.finish().is_some() {
        word(page, WORD_TIME_NS).store(now, Relaxed);
        word(page, WORD_PUBLISHED).store(next, Release);
    }
}

/// Where the choice is made; under `BUSY`.
fn chosen() -> Option<&'static mut Chosen> {
    let mut chosen = CHOSEN.load(Acquire);
    if chosen.is_null() {
        chosen = map(size_of::<Chosen>()).cast();
        CHOSEN.store(chosen, Release);
    }
    // SAFETY: null, or mapped for good and zeroed; `BUSY` keeps others off.
    unsafe { chosen.as_mut() }
}

fn fill(chunk: &mut ChunkWriter<'_>, chosen: &mut Chosen, now: u64, number: u64) {
    dump::process(|record| {
        let _ = chunk.push(record);
    });
    let begin = SnapshotBegin {
        time_ns: now,
        number,
        step: super::STEP.load(Relaxed),
        period_bytes: period().0,
        large_period_bytes: 0,
        reason: Text(b"page"),
    };
    chunk.push(&Record::SnapshotBegin(begin));
    let snapshot = stats::snapshot();
    for row in stats::ROWS {
        let name = Text(row.name.as_bytes());
        let value = row.get(&snapshot);
        chunk.push(&Record::Stat(Stat { value, unit: row.unit as u32, flags: 0, name }));
    }
    system::limits(|record| {
        let _ = chunk.push(record);
    });
    pools::each(|record| {
        let _ = chunk.push(record);
    });
    let len = choose(&mut chosen.totals);
    for &(_, id) in &chosen.totals[..len] {
        total(chunk, id, &mut chosen.frames);
    }
    chunk.push(&Record::SnapshotEnd(SnapshotEnd { time_ns: now, number, records: 0 }));
}

/// The sums with most live bytes, most first; how many.
fn choose(chosen: &mut [(u64, u32); MOST_TOTALS]) -> usize {
    let mut len = 0;
    for id in 1..TOTALS.end() {
        let Some((figures, _)) = TOTALS.read(id) else { continue };
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "casts saturate"
        )]
        let bytes = figures.weighted_live_bytes as u64;
        if len == MOST_TOTALS && chosen[len - 1].0 >= bytes {
            continue;
        }
        let at = chosen[..len].partition_point(|other| other.0 >= bytes);
        len = (len + 1).min(MOST_TOTALS);
        chosen.copy_within(at..len - 1, at + 1);
        chosen[at] = (bytes, id);
    }
    len
}

fn total(chunk: &mut ChunkWriter<'_>, id: u32, frames: &mut [u64; MOST_FRAMES]) {
    let Some((f, _)) = TOTALS.read(id) else { return };
    if let Some((len, flags)) = SITES.read(f.site, frames) {
        let frames = Words::from_slice(&frames[..len]);
        chunk.push(&Record::Site(Site { site: f.site, flags, frames }));
    }
    let mut tag = f.tag;
    // A chain of scopes; deeper ones are cut.
    for _ in 0..8 {
        if tag == 0 {
            break;
        }
        tag = push_tag(chunk, tag);
    }
    chunk.push(&Record::Totals(f.record()));
}

/// Its parent.
fn push_tag(chunk: &mut ChunkWriter<'_>, tag: u32) -> u32 {
    let pushed = TAGS.read(tag, |m| {
        let mut text = [0; 2 * super::tags::NAME_BYTES];
        let len = m.name.len() + m.region.len();
        text[..m.name.len()].copy_from_slice(m.name);
        text[m.name.len()..len].copy_from_slice(m.region);
        #[allow(clippy::cast_possible_truncation, reason = "at most NAME_BYTES")]
        let name_bytes = m.name.len() as u32;
        chunk.push(&Record::Tag(Tag {
            tag,
            parent: m.parent,
            source: m.source,
            component: m.component,
            dtype: m.dtype,
            name_bytes,
            text: Text(&text[..len]),
        }));
        m.parent
    });
    pushed.unwrap_or(0)
}
