//! The page layer against a simple model, on the fake kernel.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

use proptest::prelude::*;

use super::heap::PageHeap;
use super::page_map::{LG_PAGE, PAGE};
use super::{ExtentId, State};
use crate::heat::decay::Times;
use crate::os::Os;
use crate::os::fake::{Call, FakeKernel};
use crate::policy::pressure::Pressure;

fn heap(page_size: usize) -> PageHeap<FakeKernel> {
    let heap = PageHeap::new(FakeKernel::new(page_size));
    heap.init(random()).unwrap();
    heap
}

/// Windows of heaps that live at the same time must not meet: 400 GiB apart, and apart from that of
/// the process.
fn random() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(400, Ordering::Relaxed) % 8000
}

fn bytes(heap: &PageHeap<FakeKernel>, id: ExtentId) -> &'static mut [u64] {
    let e = heap.space.extents.get(id);
    let p = core::ptr::with_exposed_provenance_mut(heap.space.window.address(e.start()));
    // SAFETY: the test has the extent to itself until it frees it.
    unsafe { core::slice::from_raw_parts_mut(p, (e.pages() as usize) << (LG_PAGE - 3)) }
}

/// Walks the tiles of the window: no gap, no overlap, boundaries in the owner map, counts right.
fn check(heap: &PageHeap<FakeKernel>, live: &BTreeMap<ExtentId, u64>) {
    let sp = &heap.space;
    let (mut page, mut in_use, mut dirty, mut clean) = (0, 0u64, 0u64, 0u64);
    let mut seen = 0;
    while page < sp.window.pages() {
        let id = sp.window.owner(page);
        let e = sp.extents.get(id);
        assert_eq!(e.start(), page, "the owner map names the extent that starts here");
        assert_eq!(sp.window.owner(e.end() - 1), id, "and on its last page");
        let pages = u64::from(e.pages());
        match e.state() {
            State::Large => {
                assert!(live.contains_key(&id));
                seen += 1;
                in_use += pages;
            }
            State::Dirty => dirty += pages,
            State::Clean => clean += pages,
            State::Foreign => {}
            other => panic!("{other:?} between calls"),
        }
        page = e.end();
    }
    let counts = heap.counts();
    assert_eq!(seen, live.len());
    assert_eq!((counts.in_use, counts.dirty, counts.clean), (in_use, dirty, clean));
}

#[derive(Clone, Debug)]
enum Op {
    Alloc { pages: usize, lg_align: u32 },
    Free { nth: usize },
    Resize { nth: usize, pages: usize },
    Step { ms: u64 },
    Trim,
    FailMap { nth: u64 },
    RefusePurge(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let pages = prop_oneof![4 => 1usize..40, 2 => 1usize..700, 1 => 1usize..5000];
    let op = prop_oneof![
        8 => (pages.clone(), prop_oneof![4 => Just(12u32), 1 => 12u32..23])
            .prop_map(|(pages, lg_align)| Op::Alloc { pages, lg_align }),
        6 => any::<usize>().prop_map(|nth| Op::Free { nth }),
        3 => (any::<usize>(), pages).prop_map(|(nth, pages)| Op::Resize { nth, pages }),
        4 => (0u64..3000).prop_map(|ms| Op::Step { ms }),
        1 => Just(Op::Trim),
        1 => (1u64..5).prop_map(|nth| Op::FailMap { nth }),
        1 => any::<bool>().prop_map(Op::RefusePurge),
    ];
    proptest::collection::vec(op, 1..120)
}

/// Every word of an extent says whose it is; extents that must read as zero are checked to.
fn fill(heap: &PageHeap<FakeKernel>, id: ExtentId, tag: u64) {
    for (i, word) in bytes(heap, id).iter_mut().step_by(512).enumerate() {
        *word = tag ^ i as u64;
    }
}

fn verify(heap: &PageHeap<FakeKernel>, id: ExtentId, tag: u64, words: usize) {
    for (i, word) in bytes(heap, id)[..words].iter().step_by(512).enumerate() {
        assert_eq!(*word, tag ^ i as u64, "another extent wrote here");
    }
}

fn run(page_size: usize, ops: Vec<Op>) {
    let heap = heap(page_size);
    let unit = page_size / PAGE;
    let mut live: BTreeMap<ExtentId, u64> = BTreeMap::new();
    let mut tag = 0u64;
    let nth_live = |live: &BTreeMap<ExtentId, u64>, nth: usize| {
        live.iter().nth(nth % live.len().max(1)).map(|(&id, &tag)| (id, tag))
    };
    for op in ops {
        match op {
            Op::Alloc { pages, lg_align } => {
                let pages = heap.pages_for(pages * PAGE).unwrap();
                assert_eq!(pages as usize % unit, 0);
                let align = 1usize << lg_align;
                let Some(taken) = heap.alloc(pages, align, State::Large, 0) else { continue };
                let words = bytes(&heap, taken.id);
                assert_eq!(words.as_ptr().addr() % align, 0);
                assert_eq!(words.len() * 8, pages as usize * PAGE);
                if taken.zero {
                    assert!(words.iter().step_by(512).all(|&word| word == 0));
                }
                tag += 1 << 20;
                fill(&heap, taken.id, tag);
                live.insert(taken.id, tag);
            }
            Op::Free { nth } => {
                if let Some((id, tag)) = nth_live(&live, nth) {
                    verify(&heap, id, tag, bytes(&heap, id).len());
                    live.remove(&id);
                    heap.free(id);
                }
            }
            Op::Resize { nth, pages } => {
                let Some((id, tag)) = nth_live(&live, nth) else { continue };
                let pages = heap.pages_for(pages * PAGE).unwrap();
                let old = heap.space.extents.get(id).pages();
                if pages < old {
                    heap.shrink(id, pages);
                } else if pages > old {
                    let grew = heap.extend(id, pages);
                    assert_eq!(heap.space.extents.get(id).pages(), if grew { pages } else { old });
                }
                let kept = (old.min(pages) as usize) << (LG_PAGE - 3);
                verify(&heap, id, tag, kept);
                fill(&heap, id, tag);
            }
            Op::Step { ms } => {
                heap.space.os.advance(ms);
                heap.step();
            }
            Op::Trim => {
                heap.trim();
            }
            Op::FailMap { nth } => heap.space.os.fail_nth(Call::Map, nth),
            Op::RefusePurge(true) => heap.space.os.fail_always(Call::Purge, libc::EINVAL),
            Op::RefusePurge(false) => heap.space.os.heal(Call::Purge),
        }
        check(&heap, &live);
    }
    heap.space.os.heal(Call::Purge);
    for (id, tag) in core::mem::take(&mut live) {
        verify(&heap, id, tag, bytes(&heap, id).len());
        heap.free(id);
    }
    heap.trim();
    check(&heap, &live);
    let counts = heap.counts();
    assert_eq!((counts.in_use, counts.dirty), (0, 0));
    let resident = heap.space.os.resident_bytes(
        heap.space.window.address(0),
        (heap.space.window.pages() as usize) << LG_PAGE,
    );
    assert_eq!(resident, 0, "what was trimmed is not resident");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn extents_tile_the_window_and_keep_their_bytes(ops in ops()) {
        run(4096, ops);
    }

    #[test]
    fn larger_pages_work_too(ops in ops(), lg in prop_oneof![Just(14), Just(16)]) {
        run(1 << lg, ops);
    }
}

#[test]
fn hot_pages_stay_and_cold_pages_go() {
    let heap = heap(4096);
    let os = &heap.space.os;
    heap.set_times(Times { window_ms: 5000, decay_ms: Some(2000) });
    os.advance(100_000);
    // A periodic program: 40 MiB in use at the peak of each step.
    for _ in 0..200 {
        let ids: Vec<_> =
            (0..10).map(|_| heap.alloc(1024, PAGE, State::Large, 0).unwrap().id).collect();
        os.advance(50);
        ids.iter().for_each(|&id| heap.free(id));
        heap.step();
        os.advance(50);
        heap.step();
    }
    assert_eq!(os.count(Call::Purge), 0, "a periodic program's pages are hot");
    assert!(heap.counts().mapped << LG_PAGE <= 44 << 20, "and reused");
    let idle_from = os.now_ms();
    while os.now_ms() < idle_from + 7100 {
        os.advance(50);
        heap.step();
        if os.now_ms() < idle_from + 4950 {
            assert_eq!(os.count(Call::Purge), 0, "hot at {}", os.now_ms() - idle_from);
        }
    }
    assert_eq!(heap.counts().dirty, 0, "cold pages are gone 7 s after the last use");
    let per_second = os.take_purges().iter().filter(|p| p.at_ms < idle_from + 6000).count();
    assert!(per_second > 1, "in steps");
}

#[test]
fn a_cold_piece_goes_although_its_neighbour_is_hot() {
    let heap = heap(4096);
    let os = &heap.space.os;
    os.advance(100_000);
    let cold = heap.alloc(20_000, PAGE, State::Large, 0).unwrap().id;
    let hot = heap.alloc(100, PAGE, State::Large, 0).unwrap().id;
    let _wall = heap.alloc(100, PAGE, State::Large, 0).unwrap();
    heap.free(cold);
    os.advance(500);
    heap.free(hot);
    for _ in 0..300 {
        let id = heap.alloc(100, PAGE, State::Large, 0).unwrap().id;
        os.advance(50);
        heap.free(id);
        heap.step();
    }
    let dirty = heap.counts().dirty;
    assert!(dirty <= 100 + 2, "{dirty} dirty pages beside 100 hot ones");
}

#[test]
fn a_large_request_takes_adjoining_pieces_together() {
    let heap = heap(4096);
    let os = &heap.space.os;
    os.advance(100_000);
    let ids: Vec<_> = (0..8).map(|_| heap.alloc(512, PAGE, State::Large, 0).unwrap().id).collect();
    let mapped = heap.counts().mapped;
    for id in ids {
        heap.free(id);
        os.advance(1000);
    }
    assert!(heap.alloc(4096, PAGE, State::Large, 0).is_some());
    assert_eq!(heap.counts().mapped, mapped, "eight pieces of different ages make one block");
}

#[test]
fn a_failing_kernel_loses_nothing() {
    let heap = heap(4096);
    heap.space.os.fail_always(Call::Map, libc::ENOMEM);
    assert!(heap.alloc(1, PAGE, State::Large, 0).is_none());
    heap.space.os.heal(Call::Map);
    let id = heap.alloc(1, PAGE, State::Large, 0).unwrap().id;
    heap.space.os.fail_always(Call::Map, libc::ENOMEM);
    assert!(heap.alloc(1 << 20, PAGE, State::Large, 0).is_none());
    heap.free(id);
    assert!(heap.alloc(1, PAGE, State::Large, 0).is_some(), "free pages need no kernel");
    assert_eq!(heap.pages_for(usize::MAX), None);
}

#[test]
fn never_purges_with_decay_off_and_at_once_with_zero() {
    let heap = heap(4096);
    heap.space.os.advance(100_000);
    heap.set_times(Times { window_ms: 5000, decay_ms: None });
    let id = heap.alloc(1000, PAGE, State::Large, 0).unwrap().id;
    heap.free(id);
    heap.space.os.advance(1_000_000);
    heap.step();
    assert_eq!(heap.counts().dirty, 1000);
    heap.set_times(Times { window_ms: 0, decay_ms: Some(0) });
    heap.space.os.advance(1);
    heap.step();
    assert_eq!(heap.counts().dirty, 0);
}

/// A program that uses 40 MiB for a moment every `period_ms` and sleeps in between. Returns the pages purged in each period.
fn periodic(heap: &PageHeap<FakeKernel>, period_ms: u64, periods: usize) -> Vec<u64> {
    let os = &heap.space.os;
    let mut purged = Vec::new();
    for _ in 0..periods {
        let before = heap.counts().purged;
        let ids: Vec<_> =
            (0..10).map(|_| heap.alloc(1024, PAGE, State::Large, 0).unwrap().id).collect();
        os.advance(100);
        ids.iter().for_each(|&id| heap.free(id));
        for _ in 0..(period_ms - 100) / 50 {
            os.advance(50);
            heap.step();
        }
        purged.push(heap.counts().purged - before);
    }
    purged
}

#[test]
fn a_period_longer_than_the_window_is_learned() {
    let heap = heap(4096);
    heap.space.os.advance(100_000);
    let purged = periodic(&heap, 12_500, 8);
    assert!(purged[0] > 10_000, "at first they go: {purged:?}");
    assert!(purged[3..].iter().all(|&pages| pages == 0), "then they stay: {purged:?}");
    assert!(heap.counts().regretted > 0 && heap.counts().window_ms > 12_500);
    // The program falls silent for longer than ever: the window falls back, and everything goes.
    for _ in 0..(12_500 * 5 / 4 + 7000) / 50 {
        heap.space.os.advance(50);
        heap.step();
    }
    assert_eq!((heap.counts().dirty, heap.counts().window_ms), (0, 5000));
}

#[test]
fn a_window_is_never_wider_than_a_minute() {
    let heap = heap(4096);
    heap.space.os.advance(100_000);
    let purged = periodic(&heap, 90_000, 4);
    assert!(purged.iter().all(|&pages| pages > 10_000), "{purged:?}");
    assert_eq!(heap.counts().window_ms, 5000, "what is asked for after so long is not regretted");
}

#[test]
fn pieces_are_purged_many_to_a_call_and_refusals_lose_none() {
    let heap = heap(4096);
    let os = &heap.space.os;
    os.advance(100_000);
    let ids: Vec<_> = (0..200).map(|_| heap.alloc(16, PAGE, State::Large, 0).unwrap().id).collect();
    ids.iter().step_by(2).for_each(|&id| heap.free(id));
    os.fail_nth(Call::Purge, 10);
    heap.trim();
    let counts = heap.counts();
    assert_eq!((counts.purged, counts.dirty, counts.purge_failures), (99 * 16, 16, 1));
    assert!(counts.purge_calls <= 4, "{} calls", counts.purge_calls);
    heap.trim();
    assert_eq!(heap.counts().dirty, 0);
}

#[test]
fn pressure_takes_the_cold_pages_first_and_then_the_warm_ones() {
    let heap = heap(4096);
    heap.space.os.advance(100_000);
    let block = |pages| heap.alloc(pages, PAGE, State::Large, 0).unwrap().id;
    let (old, hot) = (block(3000), block(1000));
    heap.free(old);
    heap.space.os.advance(6000);
    heap.free(hot);
    let again = block(400);
    heap.relieve(Pressure::None);
    assert_eq!(heap.counts().dirty, 3600);
    heap.relieve(Pressure::Cold);
    assert_eq!((heap.counts().dirty, heap.counts().pressure_purged), (600, 3000));
    heap.relieve(Pressure::Warm);
    assert_eq!((heap.counts().dirty, heap.counts().pressure), (0, 2));
    heap.free(again);
}

#[test]
fn the_lowest_dirty_run_is_taken_before_clean_pages() {
    let heap = heap(4096);
    let block = |pages: u32| heap.alloc(pages, PAGE, State::Large, 0).unwrap().id;
    let at = |id: ExtentId| heap.space.extents.get(id).start();
    let (low, _a, middle, _b, high, _c) =
        (block(100), block(1), block(60), block(1), block(100), block(1));
    let (low_at, middle_at) = (at(low), at(middle));
    heap.free(low);
    heap.trim();
    heap.free(high);
    heap.space.os.advance(3000);
    heap.free(middle);
    assert_eq!(at(block(50)), middle_at, "dirty and lowest, although another is larger");
    assert_eq!(at(block(100)), at(high), "dirty");
    assert_eq!(at(block(100)), low_at, "clean, but not above what was used");
}

#[test]
fn a_run_that_is_partly_dirty_is_entered_where_it_is_dirty() {
    let heap = heap(4096);
    let block = |pages: u32| heap.alloc(pages, PAGE, State::Large, 0).unwrap().id;
    let at = |id: ExtentId| heap.space.extents.get(id).start();
    let (low, high, _wall) = (block(100), block(50), block(1));
    let start = at(high);
    heap.free(low);
    heap.trim();
    heap.free(high);
    assert_eq!(at(block(60)), start - 10);
}
