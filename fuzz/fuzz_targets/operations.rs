//! Sequences of operations on the public interface, by four threads that take turns: whichever
//! thread has its turn works on any slot, so that blocks are freed and resized far from where they
//! were made. One thread at a time, so that a finding is found again.
//!
//! The harness itself lives on the system allocator. Hence the accounts are exact: whatever they
//! show is what the slots hold.
#![no_main]

use std::alloc::Layout;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use thermalloc::api;
use thermalloc::control::{options, stats};
use thermalloc_tests::model::{Block, Ledger};

const THREADS: usize = 4;
const SLOTS: usize = 48;
/// Live bytes that an input may come to.
const MOST_LIVE: usize = 256 << 20;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Size(u8, u32);

impl Size {
    /// Small ones mostly, and each range's bounds.
    fn bytes(self) -> usize {
        let most = match self.0 % 12 {
            0..4 => 128,
            4..7 => 1024,
            7..9 => 33 << 10,
            9 => 1 << 20,
            10 => 3 << 20,
            _ => 9 << 20,
        };
        self.1 as usize % (most + 2)
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Align(u8);

impl Align {
    fn bytes(self) -> usize {
        match self.0 % 32 {
            lg @ 0..=12 => 1 << lg,
            lg @ 13..=15 => 1 << (lg + 4),
            31 => 1 << 22,
            lg => 1 << (lg % 8),
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Alloc(u8, Size),
    Zeroed(u8, Size),
    Aligned(u8, Size, Align),
    AlignedZeroed(u8, Size, Align),
    Realloc(u8, Size),
    ReallocAligned(u8, Size),
    Free(u8),
    FreeSized(u8),
    Check(u8),
    Trim,
    Huge(u8, u8),
    /// This many blocks of a size at once, all freed again: caches fill and overflow.
    Burst(Size, u8),
}

#[derive(Arbitrary, Debug)]
struct Turn {
    thread: u8,
    ops: Vec<Op>,
}

struct State {
    slots: [Option<Block>; SLOTS],
    next_seed: u64,
}

static LEDGER: Ledger = Ledger::new();
static STATE: Mutex<State> = Mutex::new(State { slots: [const { None }; SLOTS], next_seed: 0 });

fn usable(start: *const u8) -> usize {
    // SAFETY: null or a block that was just allocated.
    unsafe { api::usable_size(start) }
}

/// Bytes of the block that a request for `size` gets, as the manual says it: multiples of 16 to 128,
/// eight sizes to a doubling up to 1 MiB, then pages.
fn rounded(size: usize) -> usize {
    match size {
        0 => 16,
        1..=128 => size.next_multiple_of(16),
        129..=0x10_0000 => size.next_multiple_of(size.next_power_of_two() / 16),
        _ => size.next_multiple_of(4096),
    }
}

impl State {
    fn run(&mut self, op: Op) {
        match op {
            Op::Alloc(slot, size) => {
                let size = size.bytes();
                self.put(slot, size, 1, |_| api::alloc(size));
            }
            Op::Zeroed(slot, size) => {
                let size = size.bytes();
                self.put(slot, size, 1, |layout| zeroed(api::alloc_zeroed(size), layout));
            }
            Op::Aligned(slot, size, align) => {
                let (size, align) = (size.bytes(), align.bytes());
                self.put(slot, size, align, |_| api::alloc_aligned(size, align));
            }
            Op::AlignedZeroed(slot, size, align) => {
                let (size, align) = (size.bytes(), align.bytes());
                self.put(slot, size, align, |layout| {
                    zeroed(api::alloc_aligned_zeroed(size, align), layout)
                });
            }
            Op::Realloc(slot, size) => self.resize(slot, size.bytes(), false),
            Op::ReallocAligned(slot, size) => self.resize(slot, size.bytes(), true),
            Op::Free(slot) => self.free(slot, false),
            Op::FreeSized(slot) => self.free(slot, true),
            Op::Check(slot) => {
                if let Some(block) = &self.slots[usize::from(slot) % SLOTS] {
                    block.check();
                    assert_eq!(usable(block.start()), block.usable());
                }
            }
            Op::Trim => {
                api::trim();
                let after = stats::snapshot();
                assert_eq!((after.dirty_bytes, after.cached_blocks), (0, 0), "{after:?}");
            }
            Op::Huge(slot, shift) => self.refused(slot, shift),
            Op::Burst(size, n) => self.burst(size.bytes(), usize::from(n)),
        }
    }

    fn seed(&mut self) -> u64 {
        self.next_seed += 1;
        self.next_seed
    }

    fn put(&mut self, slot: u8, size: usize, align: usize, make: impl FnOnce(Layout) -> *mut u8) {
        self.free(slot, false);
        if LEDGER.bytes() + size > MOST_LIVE {
            return;
        }
        let layout = Layout::from_size_align(size, align).expect("a valid layout");
        let start = make(layout);
        let bytes = usable(start);
        if align <= 16 {
            assert_eq!(bytes, rounded(size), "of {size}");
            assert!(start.addr().is_multiple_of(16));
        }
        let seed = self.seed();
        // SAFETY: just allocated, and usable is what the allocator says.
        let block = unsafe { Block::new(&LEDGER, start, layout, bytes, seed) };
        self.slots[usize::from(slot) % SLOTS] = Some(block);
    }

    fn resize(&mut self, slot: u8, size: usize, aligned: bool) {
        let slot = &mut self.slots[usize::from(slot) % SLOTS];
        let Some(block) = slot.take() else { return };
        if LEDGER.bytes() + size > MOST_LIVE || (!aligned && block.layout().align() > 16) {
            *slot = Some(block);
            return;
        }
        let resize = |start, layout: Layout, size| {
            let moved = if aligned {
                // SAFETY: the block is live, and given up for what comes back.
                unsafe { api::realloc_aligned(start, size, layout.align()) }
            } else {
                // SAFETY: as above.
                unsafe { api::realloc(start, size) }
            };
            (moved, usable(moved))
        };
        // SAFETY: what comes back is a block with that many usable bytes.
        *slot = Some(unsafe { block.resized(&LEDGER, size, resize) });
    }

    fn free(&mut self, slot: u8, sized: bool) {
        let Some(block) = self.slots[usize::from(slot) % SLOTS].take() else { return };
        let (start, layout) = block.give_up(&LEDGER);
        if sized {
            // SAFETY: the block is live and given up, and the layout is its own.
            unsafe { api::free_sized(start, layout.size(), layout.align()) };
        } else {
            // SAFETY: as above.
            unsafe { api::free(start) };
        }
    }

    /// More than there can be is null, and changes nothing.
    fn refused(&mut self, slot: u8, shift: u8) {
        let size = usize::MAX >> (shift % 17);
        assert!(api::alloc(size).is_null());
        assert!(api::alloc_zeroed(size).is_null());
        assert!(api::alloc_aligned(size, 1 << (shift % 64)).is_null());
        assert!(api::alloc_aligned(1, 1 << (48 + shift % 16)).is_null());
        if let Some(block) = &self.slots[usize::from(slot) % SLOTS] {
            // SAFETY: the block is live, and stays.
            assert!(unsafe { api::realloc(block.start(), size) }.is_null());
            assert_eq!(usable(block.start()), block.usable());
            block.check();
        }
    }

    fn burst(&mut self, size: usize, n: usize) {
        let layout = Layout::from_size_align(size, 1).expect("a valid layout");
        let n = n.min((MOST_LIVE / 4) / size.max(1));
        let blocks: Vec<_> = (0..n)
            .map(|_| {
                let start = api::alloc(size);
                // SAFETY: just allocated.
                unsafe { Block::new(&LEDGER, start, layout, usable(start), self.seed()) }
            })
            .collect();
        for block in blocks {
            let (start, _) = block.give_up(&LEDGER);
            // SAFETY: the block is live and given up.
            unsafe { api::free(start) };
        }
    }
}

fn zeroed(start: *mut u8, layout: Layout) -> *mut u8 {
    if !start.is_null() {
        // SAFETY: just allocated with this layout.
        unsafe { Block::check_zero(start, layout) };
    }
    start
}

/// What the allocator says of itself is what the slots hold, to the byte.
fn accounts() {
    let now = stats::snapshot();
    assert_eq!(now.allocated_bytes, LEDGER.bytes() as u64, "{now:?}");
    assert!(now.active_bytes >= now.allocated_bytes + now.cached_bytes, "{now:?}");
    assert_eq!(
        now.mapped_bytes,
        now.active_bytes + now.dirty_bytes + now.retained_bytes,
        "{now:?}"
    );
}

/// A thread that does the turns it is sent and says when each is done.
struct Worker {
    turns: SyncSender<Vec<Op>>,
    done: Receiver<()>,
}

impl Worker {
    fn new() -> Self {
        let (turns, next) = sync_channel::<Vec<Op>>(1);
        let (say, done) = sync_channel(1);
        std::thread::spawn(move || {
            for ops in next {
                let mut state = STATE.lock().expect("a panic ends the process");
                ops.into_iter().for_each(|op| state.run(op));
                drop(state);
                say.send(()).expect("the main thread waits");
            }
        });
        Worker { turns, done }
    }

    fn run(&self, ops: Vec<Op>) {
        self.turns.send(ops).expect("the worker waits");
        self.done.recv().expect("the worker answers");
    }
}

fn workers() -> &'static Mutex<Vec<Worker>> {
    static WORKERS: OnceLock<Mutex<Vec<Worker>>> = OnceLock::new();
    WORKERS.get_or_init(|| {
        // Its work goes on beside ours, and a finding might not be found again.
        options::set("background_thread", "false").expect("a live option");
        Mutex::new((0..THREADS).map(|_| Worker::new()).collect())
    })
}

fuzz_target!(|turns: Vec<Turn>| {
    let workers = workers().lock().expect("a panic ends the process");
    for turn in turns {
        workers[usize::from(turn.thread) % THREADS].run(turn.ops);
    }
    accounts();
    let free_all = (0..SLOTS).map(|slot| Op::Free(u8::try_from(slot).expect("few slots")));
    workers[0].run(free_all.collect());
    accounts();
    assert_eq!(LEDGER.blocks(), 0);
});
