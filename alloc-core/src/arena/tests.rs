//! The arenas over the fake kernel: blocks don't overlap, keep their bytes, come from and go back to
//! any arena, and the accounts are exact to the byte.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

use proptest::prelude::*;

use super::figures::ClassStats;
use super::{BATCH, Heap};
use crate::extent::page_map::{LG_PAGE, PAGE};
use crate::front::size_class::{
    CACHED_MAX, CLASSES, LARGE, SLAB_CLASSES, SizeClass, class_bytes, class_of, class_of_aligned,
};
use crate::os::Os;
use crate::os::fake::{Call, FakeKernel};

fn heap(page_size: usize, arenas: u32) -> Heap<FakeKernel> {
    /// Windows of heaps that live at the same time must not meet: 400 GiB apart.
    static NEXT: AtomicU64 = AtomicU64::new(200);
    let heap = Heap::new(FakeKernel::new(page_size));
    heap.init(NEXT.fetch_add(400, Ordering::Relaxed) % 8000, arenas).unwrap();
    heap
}

/// A live block: its size and what its bytes are.
#[derive(Clone, Copy)]
struct Block {
    size: usize,
    tag: u8,
}

#[derive(Clone, Debug)]
enum Op {
    Alloc { cpu: u32, size: usize, lg_align: u32, zero: bool },
    Free { nth: usize, count: usize },
    Resize { nth: usize, size: usize },
    Fit { nth: usize, size: usize, extra: usize },
    Reset,
    Step { ms: u64 },
    Trim,
    FailMap { nth: u64 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![
        6 => 1usize..2000,
        3 => 1usize..40_000,
        2 => 1usize..(2 << 20),
        1 => 1usize..(10 << 20),
        1 => (1usize..4).prop_map(|n| n << 21),
    ];
    let op = prop_oneof![
        10 => (0u32..6, size.clone(), prop_oneof![6 => Just(4u32), 2 => 4u32..13, 1 => 13u32..24], any::<bool>())
            .prop_map(|(cpu, size, lg_align, zero)| Op::Alloc { cpu, size, lg_align, zero }),
        6 => (any::<usize>(), 1usize..20).prop_map(|(nth, count)| Op::Free { nth, count }),
        2 => (any::<usize>(), size.clone()).prop_map(|(nth, size)| Op::Resize { nth, size }),
        3 => (any::<usize>(), size.clone(), size)
            .prop_map(|(nth, size, extra)| Op::Fit { nth, size, extra }),
        1 => Just(Op::Reset),
        2 => (0u64..5000).prop_map(|ms| Op::Step { ms }),
        1 => Just(Op::Trim),
        1 => (1u64..6).prop_map(|nth| Op::FailMap { nth }),
    ];
    proptest::collection::vec(op, 1..250)
}

struct Model {
    heap: Heap<FakeKernel>,
    live: BTreeMap<usize, Block>,
    next_tag: u8,
}

fn pointer(address: usize) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address)
}

impl Model {
    fn bytes(address: usize, len: usize) -> &'static mut [u8] {
        // SAFETY: the block is live, and the model's alone.
        unsafe { core::slice::from_raw_parts_mut(pointer(address), len) }
    }

    /// The places of a block that are written and looked at: its ends, and some between.
    fn probes(size: usize) -> impl Iterator<Item = usize> {
        (0..size).step_by((size / 7).max(1)).chain([size - 1])
    }

    fn alloc(&mut self, cpu: u32, size: usize, align: usize, zero: bool) {
        let class = class_of_aligned(size, align, PAGE);
        let p = match class {
            Some(class) => {
                let mut out = [core::ptr::null_mut(); 1];
                self.heap.take(cpu, class, &mut out);
                out[0]
            }
            None => self.heap.alloc_large(size, align, zero),
        };
        if p.is_null() {
            return;
        }
        let (p, usable) = (p.expose_provenance(), self.usable(p.expose_provenance()));
        assert_eq!(p % align, 0);
        assert!(usable >= size);
        if size.is_multiple_of(2 << 20) {
            assert_eq!(p % (2 << 20), 0, "exact multiples have a huge page's alignment");
        }
        if class.is_none() && zero {
            assert!(Self::bytes(p, size).iter().step_by(251).all(|&b| b == 0));
        }
        if let Some((&before, block)) = self.live.range(..=p).next_back() {
            assert!(before + block.size <= p, "overlap");
        }
        if let Some((&after, _)) = self.live.range(p..).next() {
            assert!(p + usable <= after, "overlap");
        }
        self.next_tag = self.next_tag.wrapping_add(1);
        let block = Block { size: usable, tag: self.next_tag };
        Self::probes(usable).for_each(|i| Self::bytes(p, usable)[i] = block.tag);
        self.live.insert(p, block);
    }

    fn code(&self, p: usize) -> u8 {
        self.heap.pages.space.window.code_of(p)
    }

    fn usable(&self, p: usize) -> usize {
        match self.code(p) {
            LARGE => self.heap.large_bytes(pointer(p)),
            class => class_bytes(class),
        }
    }

    fn verify(&self, p: usize, block: Block, len: usize) {
        let bytes = Self::bytes(p, block.size);
        assert!(Self::probes(block.size).take_while(|&i| i < len).all(|i| bytes[i] == block.tag));
    }

    /// Frees `count` live blocks from the `nth` on, those of one class together.
    fn free(&mut self, nth: usize, count: usize) {
        let mut by_class: BTreeMap<u8, Vec<*mut u8>> = BTreeMap::new();
        let skip = nth % self.live.len().max(1);
        let chosen: Vec<_> =
            self.live.iter().skip(skip).take(count).map(|(&p, &b)| (p, b)).collect();
        for (p, block) in chosen {
            self.verify(p, block, block.size);
            self.live.remove(&p);
            by_class.entry(self.code(p)).or_default().push(pointer(p));
        }
        for (code, blocks) in by_class {
            if code == LARGE {
                // SAFETY: the model gave the blocks up.
                blocks.iter().for_each(|&p| unsafe { self.heap.free_large(p) });
            } else {
                // SAFETY: as above.
                blocks.chunks(BATCH).for_each(|b| unsafe { self.heap.give(code, b) });
            }
        }
    }

    fn resize(&mut self, nth: usize, size: usize) {
        let nth = nth % self.live.len().max(1);
        let Some((&p, &block)) = self.live.iter().nth(nth) else { return };
        if self.code(p) != LARGE || size <= CACHED_MAX {
            return;
        }
        let Some(q) = self.heap.resize_large(pointer(p), size, 1) else { return };
        let q = q.expose_provenance();
        self.live.remove(&p);
        let usable = self.usable(q);
        assert!(usable >= size);
        self.verify(q, block, usable.min(block.size));
        Self::probes(usable).for_each(|i| Self::bytes(q, usable)[i] = block.tag);
        self.live.insert(q, Block { size: usable, tag: block.tag });
    }

    /// Resizes a block where it is.
    fn fit(&mut self, nth: usize, size: usize, extra: usize) {
        let nth = nth % self.live.len().max(1);
        let Some((&p, &block)) = self.live.iter().nth(nth) else { return };
        if usize::from(self.code(p)) <= SLAB_CLASSES {
            return;
        }
        let most = size + extra;
        let now = self.heap.resize_in_place(pointer(p), size, most);
        assert_eq!(now, self.usable(p));
        let rounded = |size: usize| size + (size >> 3) + 2 * self.heap.pages.space.os.page_size();
        assert!(now >= block.size.min(size) && now <= block.size.max(rounded(most.max(36 << 10))));
        self.verify(p, block, now.min(block.size));
        Self::probes(now).for_each(|i| Self::bytes(p, now)[i] = block.tag);
        self.live.insert(p, Block { size: now, tag: block.tag });
    }

    fn reset(&mut self) {
        self.live.clear();
        // SAFETY: no block is in use any more, and there are no batches.
        unsafe { self.heap.reset() };
        let usage = self.heap.usage();
        assert_eq!((usage.out_bytes, usage.slabs, usage.large), (0, 0, 0));
        assert_eq!(self.heap.pages.counts().in_use, 0);
    }

    fn check(&self) {
        let live: usize = self.live.values().map(|b| b.size).sum();
        assert_eq!(self.heap.usage().out_bytes, live, "the accounts are exact");
        let mut classes = [ClassStats::default(); CLASSES + 2];
        self.heap.add_class_stats(None, &mut classes);
        assert_eq!(classes.iter().map(|c| c.bytes).sum::<u64>(), live as u64);
        assert_eq!(classes.iter().map(|c| c.curregs).sum::<u64>(), self.live.len() as u64);
        let pages: u64 = classes.iter().map(|c| c.pages).sum();
        assert_eq!(pages, self.heap.pages.counts().in_use);
        assert!(classes.iter().all(|c| c.nmalloc == c.ndalloc + c.curregs));
    }
}

fn run(page_size: usize, ops: Vec<Op>) {
    let mut model = Model { heap: heap(page_size, 3), live: BTreeMap::new(), next_tag: 0 };
    for op in ops {
        match op {
            Op::Alloc { cpu, size, lg_align, zero } => model.alloc(cpu, size, 1 << lg_align, zero),
            Op::Free { nth, count } => model.free(nth, count),
            Op::Resize { nth, size } => model.resize(nth, size),
            Op::Fit { nth, size, extra } => model.fit(nth, size, extra),
            Op::Reset => model.reset(),
            Op::Step { ms } => {
                model.heap.pages.space.os.advance(ms);
                model.heap.pages.step();
            }
            Op::Trim => {
                model.heap.release_unused();
                model.heap.pages.trim();
            }
            Op::FailMap { nth } => model.heap.pages.space.os.fail_nth(Call::Map, nth),
        }
        model.check();
    }
    model.free(0, usize::MAX);
    model.check();
    model.heap.release_unused();
    let usage = model.heap.usage();
    assert_eq!((usage.slabs, usage.large), (0, 0), "empty slabs go back to the page layer");
    model.heap.pages.trim();
    let window = &model.heap.pages.space.window;
    let len = (window.pages() as usize) << LG_PAGE;
    assert_eq!(model.heap.pages.space.os.resident_bytes(window.address(0), len), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_are_apart_and_accounts_exact(ops in ops()) {
        run(4096, ops);
    }

    #[test]
    fn so_with_larger_pages(ops in ops(), lg in prop_oneof![Just(14), Just(16)]) {
        run(1 << lg, ops);
    }
}

#[test]
fn threads_free_what_others_took() {
    let heap = Arc::new(heap(4096, 4));
    type Letterbox = std::sync::Mutex<Vec<(SizeClass, usize)>>;
    let mesh: Arc<[Letterbox; 4]> = Arc::default();
    let threads: Vec<_> = (0..4u32)
        .map(|me| {
            let (heap, mesh) = (Arc::clone(&heap), Arc::clone(&mesh));
            std::thread::spawn(move || {
                let mut x = u64::from(me) * 77 + 1;
                for _ in 0..30_000 {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    let class = class_of(usize::try_from(x % 3000 + 1).unwrap());
                    let mut out = [core::ptr::null_mut(); 8];
                    let n = heap.take(me, class, &mut out[..(x >> 20) as usize % 8 + 1]);
                    for p in &out[..n] {
                        // SAFETY: the block has at least 16 bytes and is this thread's.
                        unsafe { p.cast::<usize>().write(p.addr()) };
                    }
                    let to = (x >> 40) as usize % 4;
                    mesh[to]
                        .lock()
                        .unwrap()
                        .extend(out[..n].iter().map(|p| (class, p.expose_provenance())));
                    let mine = core::mem::take(&mut *mesh[me as usize].lock().unwrap());
                    for (class, p) in mine {
                        // SAFETY: the block was handed over.
                        assert_eq!(unsafe { pointer(p).cast::<usize>().read() }, p);
                        // SAFETY: as above.
                        unsafe { heap.give(class, &[pointer(p)]) };
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    for list in mesh.iter() {
        for (class, p) in core::mem::take(&mut *list.lock().unwrap()) {
            // SAFETY: all threads are done.
            unsafe { heap.give(class, &[pointer(p)]) };
        }
    }
    assert_eq!(heap.usage().out_bytes, 0);
    heap.release_unused();
    assert_eq!(heap.usage().slabs, 0);
}

#[test]
fn zeroing_a_large_block_again_does_not_make_it_resident() {
    let heap = heap(4096, 1);
    let size = 256 << 20;
    for round in 0..4 {
        let p = heap.alloc_large(size, 1, true);
        for at in [0, (round + 1) << 20, size - 1] {
            // SAFETY: inside the block.
            let byte = unsafe { &mut *p.wrapping_add(at) };
            assert_eq!(*byte, 0);
            *byte = 9;
        }
        // SAFETY: the block is given up.
        unsafe { heap.free_large(p) };
    }
    let resident = heap.pages.space.os.resident_bytes(heap.pages.space.window.address(0), size);
    assert!(resident < 1 << 20, "{resident} bytes resident");
}

#[test]
fn a_growing_block_is_moved_and_not_copied() {
    let heap = heap(4096, 1);
    let mut p = heap.alloc_large(8 << 20, 1, false);
    // SAFETY: the block is live and that long.
    unsafe { p.write_bytes(3, 8 << 20) };
    let _wall = heap.alloc_large((2 << 20) + 1, 1, false);
    p = heap.resize_large(p, 100 << 20, 1).unwrap();
    assert_eq!(heap.pages.space.os.count(Call::Move), 1);
    // SAFETY: the block is live and that long.
    let bytes = unsafe { core::slice::from_raw_parts(p, 100 << 20) };
    assert!(bytes[..8 << 20].iter().all(|&b| b == 3) && bytes[(8 << 20) + 1] == 0);
}

#[test]
fn every_slab_class_fills_whole_slabs() {
    let heap = heap(4096, 1);
    for class in 1..=SizeClass::try_from(SLAB_CLASSES).unwrap() {
        let mut out = [core::ptr::null_mut(); BATCH];
        let n = heap.take(0, class, &mut out);
        assert_eq!(n, BATCH);
        // SAFETY: the blocks are given up.
        unsafe { heap.give(class, &out) };
    }
    assert_eq!(heap.usage().out_bytes, 0);
}
