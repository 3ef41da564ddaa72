//! Dumps: what the ledger holds, written to a file while the program runs on.
use core::ffi::CStr;

use super::file::{Desk, Memory, Writer};
use super::names::{self, Why};
use super::{
    LIVE, MISSED, Period, SITES, STEP, TOTALS, heap_v2, is_on, large_period, log, maps, now_ns,
    page, pools, system,
};
use crate::arena::Heap;
use crate::arena::slab::free_slots;
use crate::control::options::{self, Kind, TEXT_BYTES};
use crate::control::stats::{self, Span, Unit};
use crate::control::text::Line;
use crate::explicit;
use crate::extent::State;
use crate::extent::page_map::LG_PAGE;
use crate::front::size_class::class_bytes;
use crate::os::file::File;
use crate::os::linux::{self, Linux};
use crate::os::page_scan::PageScan;
use crate::os::{Errno, start};
use crate::process::{self as the_process, HEAP};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use thermalloc_prof_format::{
    Extent, Lifetimes, Lost, Mapping, Opt, Process, Record, SnapshotBegin, SnapshotEnd, Stat, Text,
    Words, extent_state,
};

/// How often and how long the last dump waits for another, milliseconds.
const FINAL_TRIES: u32 = 100;
const FINAL_WAIT_MS: u64 = 20;

/// Why there is no dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpError {
    /// The profiler is off (option `prof`).
    Off,
    /// Another dump is being written.
    Busy,
    /// The system's error number.
    System(i32),
}

impl core::fmt::Display for DumpError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            DumpError::Off => f.write_str("the profiler is off: start the process with prof:true"),
            DumpError::Busy => f.write_str("another dump is being written"),
            DumpError::System(errno) => write!(f, "errno {errno}"),
        }
    }
}

impl core::error::Error for DumpError {}

static DESK: Desk = Desk::new();
/// Dumps so far.
static SNAPSHOTS: AtomicU64 = AtomicU64::new(0);
/// Bytes allocated, as far as threads told; the last interval that was dumped.
static PASSED: AtomicU64 = AtomicU64::new(0);
/// When the limit is looked at again, and whether it was near.
static LIMIT_LOOK_MS: AtomicU64 = AtomicU64::new(0);
static NEAR_LIMIT: AtomicBool = AtomicBool::new(false);
const LIMIT_MS: u64 = 1000;
/// Memory was out, and that was dumped.
static FAILED: AtomicBool = AtomicBool::new(false);
/// Pages of the window at the last dump of a peak.
static PEAK_PAGES: AtomicU32 = AtomicU32::new(0);

/// In a fork's child.
pub(super) fn forget() {
    DESK.forget();
    names::forget();
}

/// Writes a dump to a new file at `path`.
pub(super) fn to(path: &CStr, reason: &[u8]) -> Result<(), DumpError> {
    native(path, u64::MAX, reason).map(drop)
}

/// Writes a dump in jemalloc's format to a new file at `path`.
pub(super) fn heap_v2_to(path: &CStr) -> Result<(), DumpError> {
    heap_v2(path, u64::MAX).map(drop)
}

/// Writes a dump of at most `most` bytes; how many it has.
fn native(path: &CStr, most: u64, reason: &[u8]) -> Result<u64, DumpError> {
    whole_or_none(path, most, |file, memory| {
        memory.begin();
        let mut writer = Writer::new(file, memory);
        header(&mut writer);
        mappings(&mut writer);
        snapshot(&mut writer, reason);
        writer.finish().map(drop)
    })
}

/// The same in jemalloc's format.
fn heap_v2(path: &CStr, most: u64) -> Result<u64, DumpError> {
    whole_or_none(path, most, heap_v2::write)
}

fn whole_or_none(
    path: &CStr,
    most: u64,
    write: impl FnOnce(&File, &mut Memory) -> Result<(), Errno>,
) -> Result<u64, DumpError> {
    if !options::prof() && !is_on() {
        return Err(DumpError::Off);
    }
    let desk = DESK.take().ok_or(DumpError::Busy)?;
    let system = |Errno(errno)| DumpError::System(errno);
    let file = File::open(path, true).map_err(system)?.at_most(most);
    let result = write(&file, &mut *desk.memory);
    if result == Err(Errno(libc::EDQUOT)) {
        // It is of no use to anybody, and would take up what others may have.
        linux::unlink(path);
    }
    result.map(|()| file.written()).map_err(system)
}

/// Writes a dump to a file that is named as the options say.
pub(super) fn by_prefix(why: Why) -> Result<(), DumpError> {
    // What happens by itself belongs into the log, where there is one.
    if log::is_on() && matches!(why, Why::Interval | Why::Peak) {
        return log::snapshot(why.word().as_bytes());
    }
    let room = names::room()?;
    let mut line = Line::new();
    let path = names::next(&mut line, why).ok_or(DumpError::System(libc::EINVAL))?;
    let result = if options::prof_jeprof() {
        heap_v2(path, room)
    } else {
        native(path, room, why.word().as_bytes())
    };
    names::written(result);
    result.map(drop)
}

/// A thread has allocated `bytes` more: a dump each time that another interval is full.
#[cold]
pub(super) fn on_interval(bytes: u64) {
    let lg = options::lg_prof_interval().min(62);
    let before = PASSED.fetch_add(bytes, Relaxed);
    if before >> lg != before.wrapping_add(bytes) >> lg {
        let _ = by_prefix(Why::Interval);
    }
}

/// A dump when the program has grown beyond all that it was.
pub(super) fn on_peak() {
    if !options::prof_gdump() {
        return;
    }
    let (pages, last) = (HEAP.pages.space.window.pages(), PEAK_PAGES.load(Relaxed));
    if pages > last
        && PEAK_PAGES.compare_exchange(last, pages, Relaxed, Relaxed).is_ok()
        && by_prefix(Why::Peak) == Err(DumpError::Busy)
    {
        // At the next look.
        PEAK_PAGES.store(last, Relaxed);
    }
}

/// A dump when the process comes near the limit of its cgroup or its own, and again when it has been
/// away from it.
pub(super) fn on_limit() {
    let percent = options::prof_limit_percent();
    let now = linux::now_ms();
    let due = LIMIT_LOOK_MS.load(Relaxed);
    if percent == 0
        || now < due
        || LIMIT_LOOK_MS.compare_exchange(due, now + LIMIT_MS, Relaxed, Relaxed).is_err()
    {
        return;
    }
    let near = the_process::near_limit(percent.into());
    if near && !NEAR_LIMIT.swap(near, Relaxed) {
        let _ = by_prefix(Why::Limit);
    }
    NEAR_LIMIT.store(near, Relaxed);
}

/// A dump when memory is out, once in a process's life.
pub(super) fn on_failure() {
    if options::prof_oom() && !FAILED.swap(true, Relaxed) {
        let _ = by_prefix(Why::Oom);
    }
}

/// Sees to it that a dump needs no more memory.
pub(super) fn prepare() {
    if options::prof_oom() {
        drop(DESK.take());
    }
}

/// What the options ask for at the process's end.
pub(super) fn at_exit() {
    page::finish();
    insist(log::finish);
    // What nobody looked for since the last growth.
    insist(|| {
        on_peak();
        let grown = HEAP.pages.space.window.pages() > PEAK_PAGES.load(Relaxed);
        !(options::prof_gdump() && grown)
    });
    if options::prof_final() {
        insist(|| by_prefix(Why::Exit) != Err(DumpError::Busy));
    }
    if options::prof_leak() {
        leak_summary();
    }
}

/// Tries again while another thread writes a dump: the last ones must not be lost for that.
fn insist(mut done: impl FnMut() -> bool) {
    for _ in 0..FINAL_TRIES {
        if done() {
            return;
        }
        let _ = linux::futex_wait(&AtomicU32::new(0), 0, Some(FINAL_WAIT_MS));
    }
}

fn leak_summary() {
    let (mut bytes, mut blocks, mut sites) = (0.0, 0.0, 0u64);
    for (figures, _) in (1..TOTALS.end()).filter_map(|id| TOTALS.read(id)) {
        bytes += figures.weighted_live_bytes;
        blocks += figures.weighted_live_blocks;
        sites += u64::from(figures.live_blocks > 0);
    }
    let mut line = Line::<160>::new();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts saturate")]
    let (bytes, blocks) = (bytes as u64, blocks as u64);
    line.str("thermalloc: leak: about ").unsigned(bytes).str(" bytes in ").unsigned(blocks);
    line.str(" blocks of ").unsigned(sites).str(" sites are live at the end");
    let _ = linux::write(2, line.end().as_bytes());
}

/// The records that a file begins with.
pub(super) fn header(writer: &mut Writer<'_>) {
    process(|record| writer.push(record));
    for row in options::ROWS {
        if row.get() != row.default || row.kind == Kind::Text {
            option(writer, row);
        }
    }
}

/// The record that a file begins with.
pub(super) fn process(push: impl FnOnce(&Record<'_>)) {
    const VERSION: &[u8] = env!("CARGO_PKG_VERSION").as_bytes();
    const MACHINE: u32 = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    let mut text = [0; 32 + 1024];
    text[..VERSION.len()].copy_from_slice(VERSION);
    let path = linux::read_link(c"/proc/self/exe", &mut text[VERSION.len()..]).unwrap_or(0);
    let period_bytes = period_bytes();
    #[allow(clippy::cast_possible_truncation, reason = "a page, and a few letters")]
    push(&Record::Process(Process {
        pid: linux::getpid().cast_unsigned(),
        machine: MACHINE,
        time_ns: now_ns(),
        unix_ns: linux::now_ns(libc::CLOCK_REALTIME),
        period_bytes,
        exact_bytes: super::EXACT_ABOVE_BYTES as u64 + 1,
        page_bytes: start::page_size() as u32,
        version_bytes: VERSION.len() as u32,
        text: Text(&text[..VERSION.len() + path]),
    }));
}

/// The period in the format's terms: 0 records every block.
fn period_bytes() -> u64 {
    match super::period() {
        Period::ALL => 0,
        Period(bytes) => bytes,
    }
}

fn option(writer: &mut Writer<'_>, row: &options::Row) {
    let mut text = Line::<{ TEXT_BYTES + 64 }>::new();
    text.str(row.name);
    row.show_value(&mut text);
    if text.as_bytes().len() > row.name.len() {
        #[allow(clippy::cast_possible_truncation, reason = "an option's name")]
        let name_bytes = row.name.len() as u32;
        writer.push(&Record::Option(Opt { name_bytes, flags: 0, text: Text(text.as_bytes()) }));
    }
}

/// The mappings that have code in them, as far as the file doesn't say so already. False: they can't be read
/// just now.
pub(super) fn mappings(writer: &mut Writer<'_>) -> bool {
    let mut base = 0;
    maps::for_each(|mapping| {
        if mapping.offset == 0 {
            base = mapping.start;
        }
        let is_code = mapping.flags & 4 != 0 && !mapping.path.is_empty();
        if !is_code || !writer.maps_anew(&mapping) {
            return;
        }
        let mut text = [0; 64 + 1024];
        let id = maps::Module { start: base, end: mapping.end }.build_id(&mut text[..64]);
        let len = mapping.path.len().min(1024);
        text[id..id + len].copy_from_slice(&mapping.path[..len]);
        #[allow(clippy::cast_possible_truncation, reason = "at most 64")]
        writer.push(&Record::Mapping(Mapping {
            start: mapping.start as u64,
            end: mapping.end as u64,
            offset: mapping.offset,
            flags: mapping.flags,
            build_id_bytes: id as u32,
            text: Text(&text[..id + len]),
        }));
    })
}

/// The state of the ledger and of the allocator.
pub(super) fn snapshot(writer: &mut Writer<'_>, reason: &[u8]) {
    let number = SNAPSHOTS.fetch_add(1, Relaxed) + 1;
    let before = writer.records();
    let large_period_bytes = match large_period() {
        Period::ALL => 0,
        Period(bytes) => bytes,
    };
    writer.push(&Record::SnapshotBegin(SnapshotBegin {
        time_ns: now_ns(),
        number,
        step: STEP.load(Relaxed),
        period_bytes: period_bytes(),
        large_period_bytes,
        reason: Text(reason),
    }));
    totals(writer);
    for block in (1..LIVE.end()).filter_map(|index| LIVE.glance(index)) {
        writer.introduce(block.site, block.tag, block.thread);
        writer.push(&Record::Live(block));
    }
    figures(writer);
    let scan = PageScan::open();
    for heap in explicit::all_heaps() {
        heap.pages.glance(|e| extent(writer, heap, scan.as_ref(), e));
    }
    drop(scan);
    system::regions(writer);
    system::limits(|record| writer.push(record));
    pools::each(|record| writer.push(record));
    let (blocks, sites) = (MISSED.load(Relaxed), SITES.lost());
    if blocks + sites > 0 {
        writer.push(&Record::Lost(Lost { time_ns: now_ns(), events: 0, blocks, sites }));
    }
    let records = writer.records() - before + 1;
    writer.push(&Record::SnapshotEnd(SnapshotEnd { time_ns: now_ns(), number, records }));
}

fn totals(writer: &mut Writer<'_>) {
    for (f, total) in (1..TOTALS.end()).filter_map(|id| TOTALS.read(id)) {
        writer.introduce(f.site, f.tag, 0);
        writer.push(&Record::Totals(f.record()));
        if let Some(bins) = total.lifetimes() {
            #[allow(clippy::cast_possible_truncation, reason = "a constant")]
            writer.push(&Record::Lifetimes(Lifetimes {
                site: f.site,
                tag: f.tag,
                time_bins: super::live::TIME_BINS as u32,
                flags: f.space,
                bins: Words::from_slice(&bins),
            }));
        }
    }
}

fn figures(writer: &mut Writer<'_>) {
    let snapshot = stats::snapshot();
    for row in stats::ROWS {
        let unit = match row.unit {
            Unit::Bytes => 0,
            Unit::Count => 1,
            Unit::Milliseconds => 2,
            Unit::Microseconds => 3,
            Unit::Percent => 4,
        };
        writer.push(&Record::Stat(Stat {
            value: row.get(&snapshot),
            unit,
            flags: u32::from(row.span == Span::Total),
            name: Text(row.name.as_bytes()),
        }));
    }
}

fn extent(
    writer: &mut Writer<'_>,
    heap: &Heap<Linux>,
    scan: Option<&PageScan>,
    e: &crate::extent::Extent,
) {
    let (state, start, pages) = (e.state(), e.start(), e.pages());
    let kind = match state {
        State::Slab => extent_state::SLAB,
        State::Block => extent_state::BLOCK,
        State::Large => extent_state::LARGE,
        State::Recorded => extent_state::SAMPLED,
        State::Dirty | State::Purging => extent_state::DIRTY,
        State::Clean => extent_state::CLEAN,
        _ => return,
    };
    let (mut slots, mut used, mut class) = (0, 0, 0);
    if matches!(state, State::Slab | State::Block | State::Recorded) {
        #[allow(clippy::cast_possible_truncation, reason = "at most 1 MiB")]
        let bytes = class_bytes(e.code()) as u32;
        class = bytes;
    }
    if state == State::Slab {
        slots = u32::from(e.slots());
        used = slots - free_slots(e.ctl.load(Relaxed)).min(slots);
    }
    // It may have become something else meanwhile: a picture can bear to lack one.
    if (e.state(), e.start(), e.pages()) == (state, start, pages) {
        let address = heap.pages.space.window.address(start);
        writer.push(&Record::Extent(Extent {
            address: address as u64,
            bytes: u64::from(pages) << LG_PAGE,
            state: kind,
            class_bytes: class,
            slots,
            used,
            resident_bytes_plus_1: system::resident(scan, address, (pages as usize) << LG_PAGE),
        }));
    }
}
