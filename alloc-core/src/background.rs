//! The background thread: gives cold pages back, empties the caches of idle CPUs and makes huge pages,
//! also when the program makes no call any more. It is made late, when the first pages become free or
//! the program has grown, by a raw `clone`: that takes no lock of libc and allocates nothing, so any free may make it. It runs on
//! its own stack with a dummy thread block, with all signals blocked, and calls nothing but system
//! calls. When nothing is left to do it sleeps without a time-out.
//!
//! Where it can't be made, or after a fork, the work is done by the threads that free pages.
use core::cell::UnsafeCell;

use crate::companion;
use crate::control::options;
use crate::explicit;
use crate::extent::page_map::LG_PAGE;
use crate::extent::trace;
use crate::front;
use crate::os::linux::{self, Linux};
use crate::os::{Errno, Os, ids};
use crate::policy::thp::{self, Thp};
use crate::process::HEAP;
use crate::prof;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::trace_file;

/// There is no thread.
const NONE: u32 = 0;
/// The thread runs, or sleeps with a time-out.
const AWAKE: u32 = 1;
/// The thread sleeps until it is woken.
const ASLEEP: u32 = 2;
/// A thread can't be made.
const UNAVAILABLE: u32 = 3;

/// Free pages below which no thread is made: 1 MiB.
const WORTH_PAGES: u64 = 256;
/// Pages of the window below which no thread is made for the sake of huge pages.
const LARGE_PAGES: u64 = thp::WORTH_BYTES >> LG_PAGE;
/// How often caches are looked at, milliseconds.
const CACHES_MS: u64 = 250;
/// How often pressure is looked at, milliseconds.
const PRESSURE_MS: u64 = 1000;
const STACK_BYTES: usize = 32 << 10;

static STATE: AtomicU32 = AtomicU32::new(NONE);
/// The kernel clears it when the thread has left its stack.
static ALIVE_TID: AtomicU32 = AtomicU32::new(0);
/// Where no thread is: when the next step, and the next look at pressure, are due.
static NEXT_STEP_MS: AtomicU64 = AtomicU64::new(0);
static NEXT_PRESSURE_MS: AtomicU64 = AtomicU64::new(0);

#[repr(C, align(4096))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);
// SAFETY: the one background thread uses it.
unsafe impl Sync for Stack {}
static STACK: Stack = Stack(UnsafeCell::new([0; STACK_BYTES]));
static TLS: linux::TlsBlock = linux::TlsBlock::new();

/// Says that pages became free, or that caches fill. Called with no lock held.
#[inline]
pub(crate) fn notice() {
    match STATE.load(Ordering::Relaxed) {
        AWAKE => {}
        ASLEEP => wake(),
        _ => without_thread(),
    }
}

#[cold]
fn wake() {
    if STATE.compare_exchange(ASLEEP, AWAKE, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        linux::futex_wake(&STATE, 1);
    }
}

/// Somebody may have work for the thread although there are no pages to give back: set once.
static WANTED: AtomicBool = AtomicBool::new(false);

/// Says that there may be such work from now on.
pub(crate) fn want() {
    WANTED.store(true, Ordering::Relaxed);
}

/// One load for a program that asked for neither a trace nor a profile and has no companion.
#[inline(always)]
fn is_wanted() -> bool {
    WANTED.load(Ordering::Relaxed) && (trace::on() || prof::wants_thread() || companion::any())
}

#[cold]
fn without_thread() {
    let large = u64::from(HEAP.pages.space.window.pages()) >= LARGE_PAGES;
    if dirty_hint() < WORTH_PAGES && !large && !is_wanted() {
        return;
    }
    start_or_step();
}

/// Apart, so that a program that stays small doesn't pay for its frame.
#[cold]
#[inline(never)]
fn start_or_step() {
    if STATE.load(Ordering::Relaxed) == NONE && options::background_thread() {
        start();
    }
    if STATE.load(Ordering::Relaxed) == AWAKE {
        return;
    }
    let now = Linux.now_ms();
    let next = NEXT_STEP_MS.load(Ordering::Relaxed);
    if now >= next
        && NEXT_STEP_MS
            .compare_exchange(next, now + 50, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    {
        step();
        let due = NEXT_PRESSURE_MS.load(Ordering::Relaxed);
        if now >= due {
            NEXT_PRESSURE_MS.store(now + PRESSURE_MS, Ordering::Relaxed);
            relieve();
        }
        trace_file::write_out();
        prof::tend();
    }
}

fn start() {
    // An earlier thread's stack is free once the kernel has cleared its id.
    if ALIVE_TID.load(Ordering::Acquire) != 0
        || STATE.compare_exchange(NONE, AWAKE, Ordering::AcqRel, Ordering::Relaxed).is_err()
    {
        return;
    }
    let stack_top = STACK.0.get().cast::<u8>().wrapping_add(STACK_BYTES);
    // SAFETY: the state lets one thread in here, and the thread block's old user is gone.
    let thread_pointer = unsafe { TLS.thread_pointer() };
    let arg = core::ptr::null_mut();
    // SAFETY: stack and thread block are that thread's alone; `run` keeps to system calls.
    if unsafe { linux::spawn_raw(stack_top, thread_pointer, run, arg, &ALIVE_TID) }.is_err() {
        STATE.store(UNAVAILABLE, Ordering::Release);
    }
}

/// In a fork's child: the thread is not there.
pub(crate) fn forget() {
    ALIVE_TID.store(0, Ordering::Release);
    STATE.store(NONE, Ordering::Release);
}

/// How often the thread has looked, and when it first did, microseconds.
static RUNS: AtomicU64 = AtomicU64::new(0);
static FIRST_RUN_US: AtomicU64 = AtomicU64::new(0);

/// What the thread has done.
pub(crate) struct Work {
    pub(crate) is_running: bool,
    pub(crate) runs: u64,
    /// Nanoseconds between two runs, on average.
    pub(crate) interval_ns: u64,
}

pub(crate) fn work() -> Work {
    let runs = RUNS.load(Ordering::Relaxed);
    let first = FIRST_RUN_US.load(Ordering::Relaxed);
    let since_us = if runs == 0 { 0 } else { Linux.now_us().saturating_sub(first) };
    let interval_ns = since_us.saturating_mul(1000).checked_div(runs).unwrap_or(0);
    let is_running = matches!(STATE.load(Ordering::Relaxed), AWAKE | ASLEEP);
    Work { is_running, runs, interval_ns }
}

extern "C" fn run(_: *mut u8) {
    FIRST_RUN_US.store(Linux.now_us(), Ordering::Relaxed);
    RUNS.store(0, Ordering::Relaxed);
    let (mut caches_ms, mut pressure_ms, mut huge_ms) = (0, 0, 0);
    while options::background_thread() {
        ids::follow_leader();
        RUNS.fetch_add(1, Ordering::Relaxed);
        let now = Linux.now_ms();
        let mut busy = true;
        if now >= caches_ms {
            busy = front::tend() > 0;
            explicit::each_heap(|heap, _| heap.release_unused());
            caches_ms = now + CACHES_MS;
        }
        if now >= pressure_ms && dirty_hint() > 0 {
            relieve();
            pressure_ms = now + PRESSURE_MS;
        }
        let rest_ms = step();
        let mut huge_rest = (huge_ms > now).then(|| huge_ms - now);
        if huge_rest.is_none() && options::thp() == Thp::Evidence {
            explicit::each_heap(|heap, _| huge_rest = sooner(huge_rest, heap.pages.hugify()));
            // What the program fills meanwhile is not to wait as long.
            huge_ms = now + huge_rest.unwrap_or(0).min(CACHES_MS);
        }
        trace_file::write_out();
        let profiles = prof::tend();
        let companions = companion::wake();
        if rest_ms.is_none() && !busy && !trace::on() && !profiles && !companions {
            sleep(huge_rest);
            continue;
        }
        let rest = rest_ms.unwrap_or(CACHES_MS).min(CACHES_MS).min(huge_rest.unwrap_or(CACHES_MS));
        let _ = linux::futex_wait(&STATE, AWAKE, Some(rest));
    }
    STATE.store(NONE, Ordering::Release);
}

/// Free pages that are resident, at about this time.
fn dirty_hint() -> u64 {
    HEAP.pages.dirty_hint() + explicit::heaps().map(|heap| heap.pages.dirty_hint()).sum::<u64>()
}

/// Gives cold pages back. Returns how long nothing more will be due.
fn step() -> Option<u64> {
    let mut rest_ms = None;
    explicit::each_heap(|heap, times| {
        heap.pages.set_times(times);
        rest_ms = sooner(rest_ms, heap.pages.step());
    });
    rest_ms
}

/// Gives up what the pressure that the process is under asks for.
fn relieve() {
    let pressure = crate::process::pressure();
    explicit::each_heap(|heap, _| heap.pages.relieve(pressure));
}

fn sooner(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

/// Sleeps until [`notice`], or for `most_ms`.
fn sleep(most_ms: Option<u64>) {
    STATE.store(ASLEEP, Ordering::SeqCst);
    // Pages that were freed before the state was seen have no one to wake for them.
    while STATE.load(Ordering::SeqCst) == ASLEEP && dirty_hint() == 0 {
        if linux::futex_wait(&STATE, ASLEEP, most_ms) == Err(Errno(libc::ETIMEDOUT)) {
            break;
        }
    }
    STATE.store(AWAKE, Ordering::SeqCst);
}
