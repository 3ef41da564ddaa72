//! The primitive paths. Each is generic over the handle, so that nothing stands between the loop and what the
//! handle inlines.

use crate::peers::Free;
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use thermalloc_benches::{Pipe, Random};

/// What an operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// malloc, and free at once, which is told the size.
    FreeSized,
    /// The same, and free is not told it.
    Free,
    /// One of a batch of 100, freed in the order of allocation.
    Batch,
    /// Replacing a random one of up to 10,000 live blocks.
    Random,
    /// One call of realloc, growing a block by half from 16 bytes to the size.
    Realloc,
    /// Aligned to 64 bytes, or to a page from 4096 bytes on.
    Aligned,
    /// Zeroed, and freed at once: the same memory again and again.
    ZeroedReused,
    /// Zeroed and kept, so that all but a little comes from memory that the process never had.
    ZeroedFresh,
    /// Allocated in one thread and freed in another; threads / 2 such pairs.
    Cross,
}

pub struct Case {
    pub name: &'static str,
    pub path: Path,
    pub sizes: &'static [usize],
    pub threads: &'static [usize],
}

const SIZES: &[usize] = &[16, 64, 256, 1024, 32 << 10, 256 << 10, 2 << 20];

/// Fresh memory comes first: later there are free blocks of other cases to be had.
pub const CASES: &[Case] = &[
    Case {
        name: "calloc_fresh",
        path: Path::ZeroedFresh,
        sizes: &[64, 1024, 32 << 10, 1 << 20],
        threads: &[1],
    },
    Case { name: "pair_sized", path: Path::FreeSized, sizes: SIZES, threads: &[1, 2] },
    Case { name: "pair", path: Path::Free, sizes: SIZES, threads: &[1, 2] },
    Case { name: "batch", path: Path::Batch, sizes: SIZES, threads: &[1, 2] },
    Case { name: "random", path: Path::Random, sizes: &[64, 1024], threads: &[1, 2] },
    Case { name: "realloc", path: Path::Realloc, sizes: &[4096, 1 << 20], threads: &[1] },
    Case { name: "aligned", path: Path::Aligned, sizes: &[64, 16 << 10, 128 << 10], threads: &[1] },
    Case {
        name: "calloc_reused",
        path: Path::ZeroedReused,
        sizes: &[64, 1024, 32 << 10, 1 << 20],
        threads: &[1],
    },
    Case {
        name: "cross",
        path: Path::Cross,
        sizes: &[16, 64, 1024, 32 << 10, 256 << 10],
        threads: &[2],
    },
];

/// A block that may go to another thread.
#[derive(Clone, Copy)]
struct Block(*mut u8);
// SAFETY: an allocator's blocks belong to no thread; every holder here is the only one.
unsafe impl Send for Block {}

/// An allocator as the loops use it: each block's first byte is written.
struct Calls<'a, A> {
    alloc: &'a A,
    free: Free,
    layout: Layout,
}

impl<A: GlobalAlloc> Calls<'_, A> {
    #[inline(always)]
    fn block(&self) -> Block {
        // SAFETY: no case has size 0.
        Self::got(unsafe { self.alloc.alloc(black_box(self.layout)) })
    }

    #[inline(always)]
    fn zeroed(&self) -> Block {
        // SAFETY: no case has size 0.
        Self::got(unsafe { self.alloc.alloc_zeroed(black_box(self.layout)) })
    }

    #[inline(always)]
    fn resize(&self, block: Block, from: usize, to: usize) -> Block {
        let layout = Layout::from_size_align(from, self.layout.align()).expect("a layout");
        // SAFETY: a live block of this allocator's with that layout; to is not 0.
        Self::got(unsafe { self.alloc.realloc(block.0, black_box(layout), to) })
    }

    #[inline(always)]
    fn free_sized(&self, block: Block) {
        // SAFETY: a live block of this allocator's with this layout.
        unsafe { self.alloc.dealloc(black_box(block.0), black_box(self.layout)) };
    }

    #[inline(always)]
    fn free(&self, block: Block) {
        // SAFETY: a live block of this allocator's.
        unsafe { (self.free)(black_box(block.0)) };
    }

    #[inline(always)]
    fn got(p: *mut u8) -> Block {
        let p = black_box(p);
        assert!(!p.is_null(), "out of memory");
        // SAFETY: a block of at least one byte.
        unsafe { p.write_volatile(1) };
        Block(p)
    }
}

const BATCH: usize = 100;
/// Bounds live bytes of the patterns that hold many blocks.
const LIVE_BYTES: usize = 256 << 20;

/// Time of `iters` operations in each of `threads` threads.
pub fn time<A: GlobalAlloc + Sync>(
    alloc: &A,
    free: Free,
    path: Path,
    size: usize,
    threads: usize,
    iters: u64,
) -> Duration {
    let align = match path {
        Path::Aligned if size >= 4096 => 4096,
        Path::Aligned => 64,
        _ => 16,
    };
    let calls =
        Calls { alloc, free, layout: Layout::from_size_align(size, align).expect("a layout") };
    match path {
        Path::Cross => cross(&calls, threads / 2, iters),
        Path::ZeroedFresh => fresh(&calls, iters),
        _ => together(threads, |id| one(&calls, path, id, iters)),
    }
}

/// The longest time of `threads` threads that start at once. `work` makes ready first and returns the rest.
fn together<W: FnMut() + Send>(threads: usize, ready: impl Fn(u64) -> W + Sync) -> Duration {
    let start = Barrier::new(threads);
    let run = |id: usize| {
        let mut work = ready(id as u64);
        start.wait();
        let begin = Instant::now();
        work();
        begin.elapsed()
    };
    if threads == 1 {
        return run(0);
    }
    std::thread::scope(|scope| {
        let run = &run;
        let all: Vec<_> = (0..threads).map(|id| scope.spawn(move || run(id))).collect();
        all.into_iter().map(|t| t.join().expect("no panics")).max().expect("a thread")
    })
}

/// The work of one thread.
fn one<'a, A: GlobalAlloc + Sync>(
    calls: &'a Calls<'a, A>,
    path: Path,
    id: u64,
    iters: u64,
) -> Box<dyn FnMut() + Send + 'a> {
    match path {
        Path::FreeSized | Path::Aligned => {
            Box::new(move || (0..iters).for_each(|_| calls.free_sized(calls.block())))
        }
        Path::Free => Box::new(move || (0..iters).for_each(|_| calls.free(calls.block()))),
        Path::ZeroedReused => {
            Box::new(move || (0..iters).for_each(|_| calls.free_sized(calls.zeroed())))
        }
        Path::Batch => batches(calls, iters),
        Path::Random => random(calls, id, iters),
        Path::Realloc => growth(calls, iters),
        Path::Cross | Path::ZeroedFresh => unreachable!("have threads and processes of their own"),
    }
}

fn batches<'a, A: GlobalAlloc + Sync>(
    calls: &'a Calls<'a, A>,
    iters: u64,
) -> Box<dyn FnMut() + Send + 'a> {
    Box::new(move || {
        let mut blocks = [Block(std::ptr::null_mut()); BATCH];
        let mut left = iters;
        while left > 0 {
            let n = usize::try_from(left).unwrap_or(BATCH).min(BATCH);
            blocks[..n].iter_mut().for_each(|b| *b = calls.block());
            blocks[..n].iter().for_each(|b| calls.free_sized(*b));
            left -= n as u64;
        }
    })
}

fn random<'a, A: GlobalAlloc + Sync>(
    calls: &'a Calls<'a, A>,
    id: u64,
    iters: u64,
) -> Box<dyn FnMut() + Send + 'a> {
    let live = (LIVE_BYTES / calls.layout.size()).clamp(16, 10_000);
    let mut random = Random::new(id + 1);
    let mut blocks = Live(calls, (0..live).map(|_| calls.block()).collect());
    Box::new(move || {
        for _ in 0..iters {
            let slot = random.below(live);
            calls.free_sized(blocks.1[slot]);
            blocks.1[slot] = calls.block();
        }
    })
}

/// Blocks that are freed when the time is taken.
struct Live<'a, A: GlobalAlloc>(&'a Calls<'a, A>, Vec<Block>);

impl<A: GlobalAlloc> Drop for Live<'_, A> {
    fn drop(&mut self) {
        self.1.iter().for_each(|b| self.0.free_sized(*b));
    }
}

fn growth<'a, A: GlobalAlloc + Sync>(
    calls: &'a Calls<'a, A>,
    iters: u64,
) -> Box<dyn FnMut() + Send + 'a> {
    Box::new(move || {
        let small = Layout::from_size_align(16, 16).expect("a layout");
        let first = Calls { alloc: calls.alloc, free: calls.free, layout: small };
        let (mut block, mut size) = (first.block(), 16);
        for _ in 0..iters {
            if size >= calls.layout.size() {
                calls.free(block);
                (block, size) = (first.block(), 16);
            }
            let next = (size + size / 2).min(calls.layout.size());
            block = calls.resize(block, size, next);
            size = next;
        }
        calls.free(block);
    })
}

/// Batches go through a queue whose waking is shared by thousands of blocks. The time is that until the last is freed.
fn cross<A: GlobalAlloc + Sync>(calls: &Calls<'_, A>, pairs: usize, iters: u64) -> Duration {
    let batch = ((64 << 20) / calls.layout.size() / 16).clamp(1, 256);
    let start = Barrier::new(2 * pairs);
    std::thread::scope(|scope| {
        let mut consumers = vec![];
        for _ in 0..pairs {
            let pipe = std::sync::Arc::new(Pipe::<Block>::new(16, batch));
            let (to, from, start) = (pipe.clone(), pipe, &start);
            scope.spawn(move || {
                start.wait();
                let mut left = iters;
                while left > 0 {
                    let n = left.min(batch as u64);
                    let mut blocks = to.batch();
                    blocks.extend((0..n).map(|_| calls.block()));
                    to.send(blocks);
                    left -= n;
                }
                to.close();
            });
            consumers.push(scope.spawn(move || {
                start.wait();
                let begin = Instant::now();
                while let Some(blocks) = from.receive() {
                    blocks.iter().for_each(|b| calls.free(*b));
                    from.recycle(blocks);
                }
                begin.elapsed()
            }));
        }
        consumers.into_iter().map(|c| c.join().expect("no panics")).max().expect("a pair")
    })
}

/// Children, one after another, allocate beyond everything that the process ever had, a bounded number of bytes
/// each, and say by a pipe how long it took them.
fn fresh<A: GlobalAlloc>(calls: &Calls<'_, A>, iters: u64) -> Duration {
    let each = ((LIVE_BYTES / calls.layout.size()) as u64).min(50_000);
    let mut sum = Duration::ZERO;
    let mut left = iters;
    while left > 0 {
        let n = left.min(each);
        sum += in_child(|| {
            let begin = Instant::now();
            for _ in 0..n {
                calls.zeroed();
            }
            begin.elapsed()
        });
        left -= n;
    }
    sum
}

fn in_child(work: impl FnOnce() -> Duration) -> Duration {
    let mut ends = [0; 2];
    // SAFETY: ends has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0, "pipe");
    // SAFETY: this process has one thread of ours; the child keeps to allocation and two system calls.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    let mut bytes = [0_u8; 8];
    if child == 0 {
        bytes = u64::try_from(work().as_nanos()).unwrap_or(u64::MAX).to_ne_bytes();
        // SAFETY: bytes is valid for its length; _exit ends the child.
        unsafe { libc::write(ends[1], bytes.as_ptr().cast(), bytes.len()) };
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child, "waitpid");
    assert_eq!(status, 0, "the child failed");
    // SAFETY: bytes is valid for its length. The child has written them, and a pipe has room for them.
    unsafe { libc::read(ends[0], bytes.as_mut_ptr().cast(), bytes.len()) };
    for end in ends {
        // SAFETY: the descriptor is ours and not used again.
        unsafe { libc::close(end) };
    }
    Duration::from_nanos(u64::from_ne_bytes(bytes))
}
