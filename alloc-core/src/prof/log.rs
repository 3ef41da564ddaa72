//! The log (option `prof_events`): every event of recorded blocks, in the order in which they happened. The
//! background thread empties the ring into the file; a thread that finds the ring nearly full does so
//! itself. Where every block is recorded, a thread that finds it full while another writes waits for that.
//! The file is opened for each write, so that no descriptor is kept. What was written outlives a process that
//! is killed or leaves by `_exit`, and says by itself which files its stacks lie in: what is mapped is written
//! when the log begins, and what is new whenever call stacks are.
//!
//! A fork's child goes on in a file of its own where the path has `%p` in it, and else records nothing.
use core::ffi::CStr;

use super::file::{Desk, Writer};
use super::ring::{Ring, SLOTS, WORDS};
use super::{DumpError, MISSED, SITES, dump, large_period, live, now_ns};
use crate::control::options;
use crate::control::text::Line;
use crate::os::file::File;
use crate::os::{Errno, linux};
use crate::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release},
};
use crate::trace_file::expanded;
use thermalloc_prof_format::{Block, Free, Lost, Period, Record, Resize, Retag, Step};

static ON: AtomicBool = AtomicBool::new(false);
static RING: Ring = Ring::new();
static DESK: Desk = Desk::new();

/// Events in the ring at which a thread doesn't wait for the background thread.
const MANY: u64 = SLOTS / 8;
/// How often and how long a thread waits for room, milliseconds: ten seconds in all, which a dump of
/// millions of blocks takes on a slow disk.
const WAITS: u32 = 10_000;
const WAIT_MS: u64 = 1;
/// How often a dump does.
const SNAPSHOT_WAITS: u32 = 50;
/// The writer did not come on for as long as that: it may have been stopped by the thread that would wait. Until
/// it does nobody waits again.
static STUCK: AtomicBool = AtomicBool::new(false);

/// Stacks are in the log whose files may not be, and when that is looked at next: threads that allocate much
/// write often.
static MODULES: AtomicBool = AtomicBool::new(false);
static NEXT_MODULES_MS: AtomicU64 = AtomicU64::new(0);
const MODULES_MS: u64 = 200;

/// What happened to a block.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Kind {
    Alloc,
    /// At the time that the `usable` of the block says; pending on a stream if its `flags` say so.
    Free,
    Resize,
    Retag,
    /// Its number is the block's `step`.
    Step,
    Period,
}

/// Whether events are recorded.
#[inline]
pub(super) fn is_on() -> bool {
    ON.load(Relaxed)
}

/// Begins the log, where the option asks for it; `report` gets a line where the file can't be made.
pub(super) fn start(report: impl FnOnce(&[u8])) {
    let mut line = Line::new();
    let Some(path) = expanded(options::prof_events().as_bytes(), &mut line) else { return };
    if let Err(Errno(errno)) = begin(path) {
        let mut line = Line::<128>::new();
        line.str("thermalloc: option prof_events: \"")
            .excerpt(options::prof_events().as_bytes(), 40);
        line.str("\" can't be written (errno ").signed(errno.into()).str("): nothing is recorded");
        report(line.end().as_bytes());
    }
}

fn begin(path: &CStr) -> Result<(), Errno> {
    let Some(desk) = DESK.take() else { return Err(Errno(libc::EBUSY)) };
    if !RING.start() {
        return Err(Errno(libc::ENOMEM));
    }
    let memory = &mut *desk.memory;
    memory.begin();
    let file = File::open(path, true)?;
    let mut writer = Writer::new(&file, memory);
    dump::header(&mut writer);
    MODULES.store(!dump::mappings(&mut writer), Relaxed);
    memory.sequence = writer.finish()?;
    ON.store(true, Release);
    Ok(())
}

/// In a fork's child.
pub(super) fn forget() {
    DESK.forget();
    if ON.swap(false, Relaxed) && options::prof_events().as_bytes().windows(2).any(|w| w == b"%p") {
        start(|_| {});
    }
}

fn put(kind: Kind, block: &Block) {
    let mut words = [kind as u64; WORDS];
    words[1..].copy_from_slice(&live::pack(block));
    match RING.put(words) {
        Some(waiting) if waiting < MANY => {}
        Some(_) => drop(write_out()),
        None => full(words),
    }
}

/// Puts an event for which there was no room, or gives it up.
#[cold]
fn full(words: [u64; WORDS]) {
    write_out();
    let waits = if options::lg_prof_sample() > 0 || DESK.is_mine() { 0 } else { WAITS };
    for wait in 0..=waits {
        if RING.put(words).is_some() || !is_on() {
            return;
        }
        if wait == waits || STUCK.load(Relaxed) {
            break;
        }
        sleep();
        write_out();
    }
    if waits > 0 {
        STUCK.store(true, Relaxed);
    }
    RING.drop_one();
}

#[inline]
pub(super) fn alloc(block: &Block) {
    if is_on() {
        put(Kind::Alloc, block);
    }
}

/// A block was freed at `now`; `pending`: 1 where a stream still uses it.
#[inline]
pub(super) fn free(block: &Block, now: u64, pending: u16) {
    if is_on() {
        put(Kind::Free, &Block { usable: now, flags: pending, thread: super::thread(), ..*block });
    }
}

#[inline]
pub(super) fn resize(block: &Block, now: u64) {
    if is_on() {
        put(Kind::Resize, &Block { time_ns: now, thread: super::thread(), ..*block });
    }
}

#[inline]
pub(super) fn retag(block: &Block, now: u64) {
    if is_on() {
        put(Kind::Retag, &Block { time_ns: now, thread: super::thread(), ..*block });
    }
}

#[inline]
pub(super) fn step(step: u64, now: u64) {
    if is_on() {
        put(Kind::Step, &Block { time_ns: now, step, thread: super::thread(), ..Block::default() });
    }
}

/// Sampling goes on with another period.
#[inline]
pub(super) fn period() {
    if is_on() {
        let (small, large) = (super::period().0, large_period().0);
        put(
            Kind::Period,
            &Block { time_ns: now_ns(), size: small, usable: large, ..Block::default() },
        );
    }
}

/// Appends what was recorded since the last time. True: the log is on.
pub(super) fn write_out() -> bool {
    if !is_on() {
        return false;
    }
    let write = |writer: &mut Writer<'_>| {
        let known = writer.last_site();
        drain(writer, SLOTS);
        modules(writer, writer.last_site() > known);
    };
    if append(write).is_err_and(|errno| errno != Errno(libc::EBUSY)) {
        ON.store(false, Relaxed);
    }
    is_on()
}

/// Appends what was recorded since the last time, and a dump; waits a little for another thread that writes
/// events.
pub(super) fn snapshot(reason: &[u8]) -> Result<(), DumpError> {
    for _ in 0..SNAPSHOT_WAITS {
        match try_snapshot(reason) {
            Err(Errno(libc::EBUSY)) if !DESK.is_mine() => sleep(),
            done => return done.map_err(|Errno(errno)| DumpError::System(errno)),
        }
    }
    Err(DumpError::Busy)
}

fn try_snapshot(reason: &[u8]) -> Result<(), Errno> {
    append(|writer| {
        drain(writer, 2 * SLOTS);
        MODULES.store(!dump::mappings(writer), Relaxed);
        dump::snapshot(writer, reason);
    })
}

fn sleep() {
    let _ = linux::futex_wait(&AtomicU32::new(0), 0, Some(WAIT_MS));
}

/// Appends all events, and a dump. False: another thread is writing.
pub(super) fn finish() -> bool {
    !is_on() || snapshot(b"exit") != Err(DumpError::Busy)
}

fn append(write: impl FnOnce(&mut Writer<'_>)) -> Result<(), Errno> {
    let Some(desk) = DESK.take() else { return Err(Errno(libc::EBUSY)) };
    let mut line = Line::new();
    let file = File::open(
        expanded(options::prof_events().as_bytes(), &mut line).ok_or(Errno(libc::ENOENT))?,
        false,
    )?;
    let memory = &mut *desk.memory;
    let mut writer = Writer::new(&file, memory);
    write(&mut writer);
    memory.sequence = writer.finish()?;
    Ok(())
}

/// Writes what is mapped, if stacks are `new` that may lie in it or there was no time yet for earlier ones.
fn modules(writer: &mut Writer<'_>, new: bool) {
    if new {
        MODULES.store(true, Relaxed);
    }
    let now = linux::now_ms();
    if MODULES.load(Relaxed) && now >= NEXT_MODULES_MS.load(Relaxed) {
        NEXT_MODULES_MS.store(now + MODULES_MS, Relaxed);
        MODULES.store(!dump::mappings(writer), Relaxed);
    }
}

fn drain(writer: &mut Writer<'_>, most: u64) {
    STUCK.store(false, Relaxed);
    for _ in 0..most {
        let Some(words) = RING.take() else { break };
        let mut rest = [0; WORDS - 1];
        rest.copy_from_slice(&words[1..]);
        push(writer, words[0], live::unpack(rest));
    }
    let events = RING.dropped();
    if events > 0 {
        writer.push(&Record::Lost(Lost {
            time_ns: now_ns(),
            events,
            blocks: MISSED.load(Relaxed),
            sites: SITES.lost(),
        }));
    }
}

fn push(writer: &mut Writer<'_>, kind: u64, b: Block) {
    let Block { time_ns, serial, address, size, usable, thread, .. } = b;
    let record = match kind {
        0 => {
            writer.introduce(b.site, b.tag, thread);
            Record::Alloc(b)
        }
        1 => Record::Free(Free {
            time_ns: usable,
            serial,
            address,
            born_ns: time_ns,
            thread,
            flags: b.flags.into(),
            stream: b.stream,
        }),
        2 => Record::Resize(Resize { time_ns, serial, address, size, usable, thread, flags: 0 }),
        3 => {
            writer.introduce(0, b.tag, thread);
            Record::Retag(Retag { time_ns, serial, tag: b.tag, thread })
        }
        4 => Record::Step(Step { time_ns, step: b.step, thread, flags: 0 }),
        _ => Record::Period(Period { time_ns, period_bytes: size, large_period_bytes: usable }),
    };
    writer.introduce(0, 0, thread);
    writer.push(&record);
}
