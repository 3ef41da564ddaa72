//! The profiler: a ledger of blocks, of which a sample is recorded with its call stack, what it is for
//! and how long it lives. Everything here runs inside `malloc` or beside it: it allocates from tables of
//! its own, takes no lock that it waits for, and calls nothing but the kernel (and TensorFlow, see
//! `tensorflow`).
//!
//! Invariants: a recorded block has pages of its own, whose extent names its entry in the ledger, so
//! that blocks which are not recorded pay nothing when they are freed; an entry belongs to the block's
//! owner. What is written to files is the format of `docs/profile-format.md`.
//!
//! ```
//! let _scope = thermalloc::prof::scope("weights:encoder");
//! let table = vec![0f32; 1 << 20]; // counted as weights
//! # drop(table);
//! ```
use core::marker::PhantomData;

mod dump;
mod file;
mod heap_v2;
mod live;
mod log;
mod maps;
mod names;
mod page;
mod pools;
mod ring;
mod sampler;
mod sites;
mod system;
mod table;
mod tags;
mod tensorflow;
mod unwind;
mod usdt;

pub use dump::DumpError;
pub use pools::DevicePool;
pub(crate) use pools::report as report_pool;
pub(crate) use sampler::{Period, Way};

use self::live::{Live, Totals};
use self::sampler::{Budget, Strata};
use self::sites::{MOST_FRAMES, Sites};
use self::table::{Segments, Shared};
use self::tags::{Meaning, Tags};
use crate::arena::Heap;
use crate::background;
use crate::control::options;
use crate::explicit;
use crate::front;
use crate::front::size_class::{
    CACHED_MAX, CLASSES, SLAB_CLASSES, SLAB_MAX, SizeClass, class_bytes, class_of,
};
use crate::os::linux::{self, Linux};
use crate::process::{self, HEAP};
use crate::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use thermalloc_prof_format::{Block, source, space};

static SITES: Sites = Sites::new();
static TAGS: Tags = Tags::new();
static LIVE: Live = Live::new();
static TOTALS: Totals = Totals::new();
/// Samples of blocks up to [`COUNTED_MAX`], up to [`EXACT_ABOVE_BYTES`], and of larger ones: each has a third
/// of the budget. Those in between share theirs by size class: a program has often a few sizes of which it
/// makes very many, and they must not hide the others.
static SMALL: Budget = Budget::new();
static MIDDLE: Strata<{ CLASSES - SLAB_CLASSES }> = Strata::new(middle_bytes);
static LARGE: Budget = Budget::new();
/// The step that the program announced last.
static STEP: AtomicU64 = AtomicU64::new(0);
/// Some block was recorded: frees of large blocks look whether it is theirs.
static EVER: AtomicBool = AtomicBool::new(false);
/// Blocks that were chosen and not recorded.
static MISSED: AtomicU64 = AtomicU64::new(0);

/// Blocks up to this size are chosen as the bytes are counted that a thread allocates. Larger ones are
/// tossed for, each on its own.
const COUNTED_MAX: usize = SLAB_MAX;
/// Blocks above this size are all recorded, as long as the budget allows it.
const EXACT_ABOVE_BYTES: usize = CACHED_MAX;
/// The binary logarithm of the period for blocks in between, unless the one for smaller ones is less: few
/// enough, and each worth more than a sample.
const LG_MIDDLE_PERIOD: u32 = 16;

/// Whether blocks are recorded.
#[inline]
pub(crate) fn is_on() -> bool {
    (options::prof() && options::prof_active()) || usdt::attached()
}

/// The period for blocks up to [`COUNTED_MAX`].
pub(crate) fn period() -> Period {
    if !is_on() {
        return Period::OFF;
    }
    match options::lg_prof_sample() {
        0 => Period::ALL,
        lg => Period(1 << (lg + SMALL.doublings(linux::now_ms(), share())).min(62)),
    }
}

/// The period for a block of `size` bytes, which are more than that and at most [`EXACT_ABOVE_BYTES`].
fn middle_period(size: usize) -> Period {
    match options::lg_prof_sample() {
        0 => Period::ALL,
        lg => {
            let asked = Period(1 << lg.min(LG_MIDDLE_PERIOD));
            let kind = usize::from(class_of(size)) - SLAB_CLASSES - 1;
            MIDDLE.period(kind, linux::now_ms(), asked, share())
        }
    }
}

/// The size of the blocks of a kind of [`MIDDLE`].
#[allow(clippy::cast_possible_truncation, reason = "CLASSES is below 256")]
fn middle_bytes(kind: usize) -> usize {
    class_bytes((kind + SLAB_CLASSES + 1) as SizeClass)
}

/// The period for still larger ones, or for all blocks.
fn large_period() -> Period {
    if options::lg_prof_sample() == 0 {
        return Period::ALL;
    }
    match LARGE.doublings(linux::now_ms(), share()) {
        0 => Period::ALL,
        doublings => Period((EXACT_ABOVE_BYTES as u64) << doublings),
    }
}

/// Memory for a table, zeroed and for good; null when memory is out.
fn map(bytes: usize) -> *mut u8 {
    // The tests of the tables come before any allocation.
    #[cfg(test)]
    process::ready();
    HEAP.map_table(bytes)
}

fn now_ns() -> u64 {
    linux::now_ns(libc::CLOCK_MONOTONIC)
}

/// Whether a block of `size` bytes is recorded, and then how many it stands for. `due`: the period by
/// which the thread has come to its next sample, or `OFF`; it says nothing about a block above
/// [`COUNTED_MAX`].
pub(crate) fn choose(size: usize, due: Period) -> Option<f64> {
    if !front::is_profiled() {
        return None;
    }
    if size <= COUNTED_MAX {
        return (due != Period::OFF).then(|| due.weight(size));
    }
    let period = if size <= EXACT_ABOVE_BYTES { middle_period(size) } else { large_period() };
    (is_on() && front::toss(period, size)).then(|| period.weight(size))
}

/// A block of `class` from `heap`, for a request of `size` bytes that was chosen and stands for `weight`;
/// null: it can't be recorded.
#[cold]
#[inline(never)]
fn alloc(heap: &Heap<Linux>, class: SizeClass, size: usize, weight: f64) -> *mut u8 {
    if !process::ready() {
        return core::ptr::null_mut();
    }
    let Some(_recording) = Recording::begin() else { return core::ptr::null_mut() };
    let p = heap.alloc_recorded(class);
    if p.is_null() {
        MISSED.fetch_add(1, Relaxed);
        return p;
    }
    let block = host_block(p, size, class_bytes(class), weight);
    if let Some(record) = record(block, 0) {
        heap.set_record(p, record);
    }
    spend(size);
    p
}

/// As [`alloc`], where [`choose`] chooses the block; null: it doesn't, or as above.
#[inline]
pub(crate) fn alloc_chosen(
    heap: &Heap<Linux>,
    class: SizeClass,
    size: usize,
    due: Period,
) -> *mut u8 {
    let weight = if due != Period::OFF || size > COUNTED_MAX { choose(size, due) } else { None };
    weight.map_or(core::ptr::null_mut(), |weight| alloc(heap, class, size, weight))
}

/// Records a block of `heap` with pages of its own, of a request of `size` bytes, if it is one of those to
/// be recorded. `due`: as for [`choose`].
#[inline]
pub(crate) fn note_large(heap: &Heap<Linux>, p: *mut u8, size: usize, due: Period) {
    if !p.is_null() && is_on() {
        choose_large(heap, p, size, due);
    }
}

#[cold]
#[inline(never)]
fn choose_large(heap: &Heap<Linux>, p: *mut u8, size: usize, due: Period) {
    let Some(weight) = choose(size, due) else { return };
    if !heap.can_have_record(p) {
        return;
    }
    let Some(_recording) = Recording::begin() else { return };
    if let Some(record) = record(host_block(p, size, heap.large_bytes(p), weight), 0) {
        heap.set_record(p, record);
    }
    spend(size);
}

fn host_block(p: *mut u8, size: usize, usable: usize, weight: f64) -> Block {
    Block {
        address: p.addr() as u64,
        size: size as u64,
        usable: usable as u64,
        weight,
        space: space::HOST,
        ..Block::default()
    }
}

/// Samples a second that each budget allows; 0: any number.
fn share() -> u32 {
    options::prof_budget().div_ceil(3)
}

/// Notes a sample of a block of `size` bytes.
fn spend(size: usize) {
    if size <= COUNTED_MAX {
        spend_of(&SMALL);
    } else if size > EXACT_ABOVE_BYTES {
        spend_of(&LARGE);
    } else {
        MIDDLE.spend();
    }
}

fn spend_of(budget: &Budget) {
    // Who asks for every block gets every block.
    if options::lg_prof_sample() > 0 && budget.spend(linux::now_ms(), share()) {
        log::period();
    }
}

/// The thread records a block: what it allocates meanwhile, and a signal handler on it, is not recorded.
struct Recording(PhantomData<*mut ()>);

impl Recording {
    fn begin() -> Option<Self> {
        if front::begin_recording() {
            return Some(Self(PhantomData));
        }
        MISSED.fetch_add(1, Relaxed);
        None
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        front::end_recording();
    }
}

/// Enters a block into the ledger, under `tag` or what the thread is at; its entry.
fn record(mut block: Block, tag: u32) -> Option<u32> {
    let entered = record_into(&mut block, tag);
    if entered.is_none() {
        MISSED.fetch_add(1, Relaxed);
    }
    entered
}

fn record_into(block: &mut Block, tag: u32) -> Option<u32> {
    let scratch = Scratch::take()?;
    block.time_ns = now_ns();
    block.thread = thread();
    block.site = scratch.with(|frames| {
        let (len, flags) = unwind::capture(frames);
        SITES.intern(&frames[..len], flags)
    });
    drop(scratch);
    (block.tag, block.step) = (front::scope(), STEP.load(Relaxed));
    if tag != 0 {
        block.tag = tag;
    } else if block.tag == 0
        && let Some((tag, step)) = tensorflow::annotation()
    {
        (block.tag, block.step) = (tag, step);
    }
    let total = TOTALS.of(block)?;
    let record = LIVE.enter(block)?;
    EVER.store(true, Relaxed);
    total.add(block);
    log::alloc(block);
    usdt::alloc(block);
    Some(record)
}

/// Room for a stack: not on the thread's own, which may be a signal's and small.
struct Scratch(&'static ScratchSlot);

struct ScratchSlot {
    busy: AtomicU32,
    frames: core::cell::UnsafeCell<[u64; MOST_FRAMES]>,
}
// SAFETY: `busy` lets one thread reach the frames.
unsafe impl Sync for ScratchSlot {}
// SAFETY: as above; zero is free.
unsafe impl Shared for ScratchSlot {}

static SCRATCH: Segments<ScratchSlot, 8, 16> = Segments::new();

impl Scratch {
    fn take() -> Option<Self> {
        if !unwind::prepare() {
            return None;
        }
        for i in 0..Segments::<ScratchSlot, 8, 16>::MOST {
            let slot = SCRATCH.ensure(i)?;
            if slot.busy.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                return Some(Self(slot));
            }
        }
        None
    }

    fn with<R>(&self, with: impl FnOnce(&mut [u64; MOST_FRAMES]) -> R) -> R {
        // SAFETY: the slot is this thread's until it is dropped, and the borrow ends here.
        with(unsafe { &mut *self.0.frames.get() })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.0.busy.store(0, Release);
    }
}

/// A thread that recorded something.
#[derive(Debug)]
struct Thread {
    tid: AtomicU32,
    name: [AtomicU64; 2],
}
// SAFETY: atomics.
unsafe impl Shared for Thread {}

static THREADS: Segments<Thread, 64, 256> = Segments::new();
static THREAD_COUNT: AtomicU32 = AtomicU32::new(0);

/// The calling thread's number, from 1; 0 where there is no room for another.
fn thread() -> u32 {
    match front::thread_number() {
        0 => new_thread(),
        number => number,
    }
}

#[cold]
#[inline(never)]
fn new_thread() -> u32 {
    if THREAD_COUNT.load(Relaxed) as usize + 1 >= Segments::<Thread, 64, 256>::MOST {
        return 0;
    }
    let number = THREAD_COUNT.fetch_add(1, Relaxed) + 1;
    let Some(thread) = THREADS.ensure(number as usize) else { return 0 };
    let name = linux::thread_name();
    let (words, _) = name.as_chunks::<8>();
    thread
        .name
        .iter()
        .zip(words)
        .for_each(|(to, word)| to.store(u64::from_ne_bytes(*word), Relaxed));
    thread.tid.store(linux::gettid().cast_unsigned(), Release);
    front::set_thread_number(number);
    number
}

/// Whether a free of a large block has to look for a record.
#[inline(always)]
pub(crate) fn ever() -> bool {
    EVER.load(Relaxed)
}

/// The block of this record is being freed; 0 is no record.
#[cold]
#[inline(never)]
pub(crate) fn freed(record: u32) {
    if record != 0
        && let Some(block) = LIVE.leave(record)
    {
        gone(&block);
    }
}

fn gone(block: &Block) {
    let now = now_ns();
    TOTALS.remove(block, now, STEP.load(Relaxed));
    log::free(block, now, 0);
    usdt::free(block);
}

/// The block of this record now lies at `p` and is of `size` bytes, of which `usable` may be used.
#[cold]
#[inline(never)]
pub(crate) fn resized(record: u32, p: *mut u8, size: usize, usable: usize) {
    if record == 0 {
        return;
    }
    change(record, |block| {
        (block.address, block.size, block.usable) = (p.addr() as u64, size as u64, usable as u64);
        true
    });
}

/// Resizes a large block `p` of `heap` to `size` bytes by `resize`, which says where it lies then; what is
/// known of it goes along.
pub(crate) fn follow(
    heap: &Heap<Linux>,
    p: *mut u8,
    size: usize,
    resize: impl FnOnce() -> Option<*mut u8>,
) -> Option<*mut u8> {
    let record = if ever() { heap.record_at(p) } else { 0 };
    let q = resize()?;
    if record != 0 {
        heap.set_record(q, record);
        resized(record, q, size, heap.large_bytes(q));
    }
    Some(q)
}

/// Changes a block of the ledger as `with` says, unless that returns false.
fn change(record: u32, with: impl FnOnce(&mut Block) -> bool) -> bool {
    let Some(old) = LIVE.block(record) else { return false };
    let mut new = old;
    if !with(&mut new) {
        return false;
    }
    LIVE.update(record, &new);
    TOTALS.change(&old, &new);
    if old.tag == new.tag {
        log::resize(&new, now_ns())
    } else {
        log::retag(&new, now_ns())
    }
    true
}

/// What the background thread does for the profiler; also done by others where there is none. False: it
/// has nothing to come back for.
pub(crate) fn tend() -> bool {
    page::tend();
    if !is_on() {
        return page::is_on();
    }
    let looking = tensorflow::look();
    dump::on_peak();
    dump::on_limit();
    log::write_out() || looking || page::is_on()
}

/// Whether [`tend`] has something to do: the thread that calls it is wanted although there are no pages
/// to give back.
#[cold]
#[inline(never)]
pub(crate) fn wants_thread() -> bool {
    page::is_on()
        || is_on()
            && (log::is_on()
                || options::prof_gdump()
                || options::prof_limit_percent() > 0
                || tensorflow::looks())
}

/// A thread has allocated `bytes` more.
#[inline]
pub(crate) fn passed(bytes: i64) {
    if options::lg_prof_interval() > 0 && is_on() {
        dump::on_interval(bytes.cast_unsigned());
    }
}

/// Begins a log, where an option asks for it. Called once, when the heap is ready.
pub(crate) fn start(mut report: impl FnMut(&[u8])) {
    let only = options::prof_pid();
    if only != 0 && only != linux::getpid().cast_unsigned() {
        // A program that the chosen one has started: its environment is the same.
        options::forbid_prof();
        return;
    }
    page::start(&mut report);
    dump::prepare();
    if options::prof() {
        background::want();
        log::start(report);
    }
}

/// An allocation failed for want of memory.
#[doc(hidden)]
#[cold]
pub fn failed() {
    if is_on() {
        dump::on_failure();
    }
}

/// The process may load or has unloaded a module.
#[doc(hidden)]
pub fn modules_changed() {
    if is_on() {
        unwind::modules_changed();
        tensorflow::modules_changed();
    }
}

/// In a fork's child: the threads that were at work are not there.
pub(crate) fn forget() {
    for i in 0..Segments::<ScratchSlot, 8, 16>::MOST {
        if let Some(slot) = SCRATCH.get(i) {
            slot.busy.store(0, Relaxed);
        }
    }
    maps::forget();
    page::forget();
    dump::forget();
    log::forget();
}

/// Blocks recorded so far, those that are live, and those that were chosen and could not be recorded.
pub(crate) fn counts() -> [u64; 3] {
    [LIVE.entered(), LIVE.count(), MISSED.load(Relaxed) + SITES.lost() + TAGS.lost()]
}

extern "C" fn at_exit() {
    if options::prof() {
        dump::at_exit();
    }
}

#[used]
// SAFETY: the section holds pointers to functions without arguments.
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

// Scopes

/// Until it is dropped, what this thread allocates belongs to a scope. Made by [`scope`] and
/// [`Captured::attach`].
#[derive(Debug)]
#[must_use = "the scope ends where the guard is dropped"]
pub struct Scope {
    before: u32,
    of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        attach_raw(self.before);
    }
}

/// Opens a scope within the present one. A name that is a component's (`weights`, `activations`,
/// `gradients`, `optimizer`, `kv_cache`, `workspace`, `framework`, `python`, `loader`, `other`), or
/// begins with one before a colon or a slash, says what its memory is used for.
pub fn scope(name: &str) -> Scope {
    Scope { before: push_raw(name.as_bytes()), of_this_thread: PhantomData }
}

/// A scope to hand to other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Captured(u32);

/// The scope that this thread is in.
#[must_use]
pub fn capture() -> Captured {
    Captured(capture_raw())
}

impl Captured {
    /// Enters the scope, on any thread, until the guard is dropped.
    pub fn attach(self) -> Scope {
        Scope { before: attach_raw(self.0), of_this_thread: PhantomData }
    }
}

/// What `f` does, in the scope that the calling thread is in now, on whatever thread it is done:
/// `std::thread::spawn(prof::inherit(|| work()))`.
pub fn inherit<R>(f: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let captured = capture();
    move || {
        let _scope = captured.attach();
        f()
    }
}

/// Opens a scope; the one before, for [`attach_raw`].
#[doc(hidden)]
pub fn push_raw(name: &[u8]) -> u32 {
    let parent = front::scope();
    let component = tags::component_of(name);
    // A scope may be opened before the first allocation.
    if process::ready() && is_on() {
        let meaning =
            Meaning { parent, source: source::SCOPE, component, dtype: 0, name, region: &[] };
        front::set_scope(TAGS.intern(meaning));
    }
    parent
}

/// The number of the scope that the thread is in.
#[doc(hidden)]
#[must_use]
pub fn capture_raw() -> u32 {
    front::scope()
}

/// Makes a scope the one that the thread is in; the one before.
#[doc(hidden)]
pub fn attach_raw(tag: u32) -> u32 {
    let before = front::scope();
    front::set_scope(if TAGS.knows(tag) { tag } else { 0 });
    before
}

/// Says that a step of the program's work begins: a batch, a request. Blocks are known by the step in
/// which they were allocated, and peaks and lifetimes are told by it.
pub fn step(number: u64) {
    STEP.store(number, Relaxed);
    if is_on() {
        log::step(number, now_ns());
    }
}

/// Gives a block the scope of the calling thread, if it was recorded: for what turns out only later to be
/// a weight, say. Returns whether it was.
///
/// # Safety
/// `block` is a live block of this allocator that nobody frees or resizes meanwhile.
pub unsafe fn mark(block: *const u8) -> bool {
    mark_raw(block.cast_mut(), front::scope())
}

/// As [`mark`], with the number of a scope.
#[doc(hidden)]
pub fn mark_raw(block: *mut u8, tag: u32) -> bool {
    if !ever() || (tag != 0 && !TAGS.knows(tag)) {
        return false;
    }
    let heap = explicit::of(block.addr()).map_or(&HEAP, |arena| &arena.heap);
    let record = heap.record_at(block);
    record != 0
        && change(record, |block| {
            let other = block.tag != tag;
            block.tag = tag;
            other
        })
}

/// Writes what the ledger holds to a new file at `path`, which ends in a zero byte.
///
/// # Errors
/// Where the profiler is off, the file can't be written, or another dump is being written.
pub fn dump(path: &core::ffi::CStr) -> Result<(), DumpError> {
    dump::to(path, b"request")
}

/// As [`dump`], in jemalloc's format, which jeprof reads.
///
/// # Errors
/// As [`dump`].
pub fn dump_heap_v2(path: &core::ffi::CStr) -> Result<(), DumpError> {
    dump::heap_v2_to(path)
}

/// As [`dump`], into a file named by the option `prof_prefix`.
///
/// # Errors
/// As [`dump`].
pub fn dump_to_prefix() -> Result<(), DumpError> {
    dump::by_prefix(names::Why::Request)
}

// Device memory

/// Memory that a device library gives out, for the same ledger. Layout of the C header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceBlock {
    /// Bytes of this struct.
    pub struct_bytes: usize,
    /// Where it lies.
    pub address: u64,
    /// Bytes asked for.
    pub size: u64,
    /// Bytes that were given.
    pub usable: u64,
    /// The stream in whose order it is used.
    pub stream: u64,
    /// The device's ordinal.
    pub device: u32,
    /// 1 device, 2 pinned host, 3 managed memory.
    pub space: u32,
    /// Who uses it, where that is known better than by scopes (`nccl`, say), or null.
    pub user: *const u8,
    /// Bytes of `user`.
    pub user_bytes: usize,
}

/// Records memory of a device; what to call [`device_free`] with. 0: it is not recorded.
pub(crate) fn device_alloc(device: &DeviceBlock, user: &[u8]) -> u64 {
    if !is_on() || !process::ready() {
        return 0;
    }
    #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
    let size = device.size as usize;
    let period = large_period();
    if !front::toss(period, size) {
        return 0;
    }
    let Some(_recording) = Recording::begin() else { return 0 };
    let tag = if user.is_empty() {
        0
    } else {
        let component = tags::component_of(user);
        let parent = front::scope();
        TAGS.intern(Meaning {
            parent,
            source: source::DEVICE,
            component,
            dtype: 0,
            name: user,
            region: &[],
        })
    };
    let block = Block {
        address: device.address,
        size: device.size,
        usable: device.usable,
        weight: period.weight(size),
        space: u8::try_from(device.space).unwrap_or(space::DEVICE),
        device: u8::try_from(device.device).unwrap_or(u8::MAX),
        stream: device.stream,
        ..Block::default()
    };
    let record = record(block, tag);
    spend_of(&LARGE);
    // The serial tells a record from a later one in the same place.
    record.map_or(0, |record| {
        let serial = LIVE.block(record).map_or(0, |block| block.serial);
        serial << 32 | u64::from(record)
    })
}

/// Memory of a device was freed; `pending`: a stream still uses it, and a second call will follow.
pub(crate) fn device_free(handle: u64, stream: u64, pending: bool) {
    #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
    let record = handle as u32;
    let Some(mut block) = LIVE.block(record) else { return };
    if handle == 0 || block.serial << 32 != handle & !0xFFFF_FFFF {
        return;
    }
    if !pending {
        if let Some(block) = LIVE.leave(record) {
            gone(&Block { stream, ..block });
        }
        return;
    }
    block.flags |= 1;
    LIVE.update(record, &block);
    log::free(&Block { stream, ..block }, now_ns(), 1);
}
