//! The page layer against a simple model, on the fake kernel.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

use proptest::prelude::*;

use super::heap::PageHeap;
use super::hugepage::FRAME_PAGES;
use super::page_map::{LG_PAGE, PAGE};
use super::{ExtentId, State};
use crate::heat::decay::Times;
use crate::os::Os;
use crate::os::fake::{Call, FakeKernel};
use crate::policy::pressure::Pressure;
use crate::policy::thp::{Hugetlb, Thp};

pub(super) fn heap(page_size: usize) -> PageHeap<FakeKernel> {
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
    heap.set_times(Times::new(5000, Some(2000)));
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
    assert!(
        dirty <= 100 + 200 / 4 + 2,
        "{dirty} dirty pages beside 100 hot ones, and a quarter of the peak"
    );
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
    heap.set_times(Times::new(5000, None));
    let id = heap.alloc(1000, PAGE, State::Large, 0).unwrap().id;
    heap.free(id);
    heap.space.os.advance(1_000_000);
    heap.step();
    assert_eq!(heap.counts().dirty, 1000);
    heap.set_times(Times::new(0, Some(0)));
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

/// A heap whose kernel has transparent huge pages in this mode, with one block of `pages` pages, of
/// which every page is touched but one in `gap` (0: none is left out).
fn dense(mode: &str, pages: u32, gap: usize) -> (PageHeap<FakeKernel>, ExtentId) {
    let heap = heap(4096);
    heap.space.os.put_file("/sys/kernel/mm/transparent_hugepage/enabled", mode);
    heap.space.os.put_file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152");
    heap.space.os.advance(100_000);
    let id = heap.alloc(pages, 2 << 20, State::Large, 0).unwrap().id;
    let _wall = heap.alloc(1, PAGE, State::Large, 0).unwrap();
    for (i, word) in bytes(&heap, id).iter_mut().step_by(512).enumerate() {
        if gap == 0 || i % gap != 0 {
            *word = 1;
        }
    }
    (heap, id)
}

/// Lets the background look for `ms`. Returns the bytes collapsed.
fn look(heap: &PageHeap<FakeKernel>, ms: u64) -> usize {
    for _ in 0..ms / 50 {
        heap.space.os.advance(50);
        heap.step();
        heap.hugify();
    }
    heap.space.os.take_collapses().iter().map(|range| range.len).sum()
}

/// 64 MiB.
const DENSE: u32 = 32 * FRAME_PAGES;

#[test]
fn dense_memory_becomes_huge_pages_and_sparse_memory_does_not() {
    for mode in ["always [madvise] never", "[always] madvise never"] {
        let (heap, _) = dense(mode, DENSE, 0);
        assert_eq!(look(&heap, 500), 0, "one look is no evidence");
        assert_eq!(look(&heap, 5000), 64 << 20);
        assert_eq!(heap.counts().huge.whole, 32);
        assert_eq!(look(&heap, 100_000), 0, "and not twice");
    }
    let (heap, _) = dense("always [madvise] never", DENSE, 9);
    assert_eq!(look(&heap, 200_000), 0, "eight in nine pages are not enough");
    assert!(heap.space.os.count(Call::Resident) < 32 * 10, "nor is it looked at all the time");
    let (heap, _) = dense("always madvise [never]", DENSE, 0);
    assert_eq!(look(&heap, 100_000) as u64 + heap.space.os.count(Call::Resident), 0);
    let (heap, _) = dense("always [madvise] never", FRAME_PAGES, 0);
    assert_eq!(look(&heap, 100_000), 0, "small programs stay small");
}

#[test]
fn a_frame_with_clean_pages_is_no_huge_page() {
    let (heap, id) = dense("always [madvise] never", DENSE, 0);
    heap.shrink(id, DENSE - 1);
    heap.trim();
    assert_eq!(look(&heap, 20_000), 62 << 20);
    // The page beyond its end is used again: the frame is full once more.
    assert!(heap.extend(id, DENSE));
    bytes(&heap, id)[((DENSE as usize) - 1) << 9] = 1;
    assert_eq!(look(&heap, 20_000), 2 << 20);
}

#[test]
fn memory_that_is_free_at_every_look_but_used_in_between_becomes_huge_pages() {
    let (heap, id) = dense("always [madvise] never", DENSE, 0);
    let _ballast = heap.alloc(DENSE, PAGE, State::Large, 0).unwrap();
    heap.free(id);
    assert_eq!(look(&heap, 3000), 0, "what nobody uses is left alone");
    for _ in 0..40 {
        let id = heap.alloc(DENSE, 2 << 20, State::Large, 0).unwrap().id;
        heap.free(id);
        look(&heap, 100);
    }
    assert_eq!(heap.counts().huge.whole, 32);
}

#[test]
fn sizes_whose_blocks_were_dense_are_advised_before_the_first_touch() {
    let (heap, _) = dense("always [madvise] never", DENSE, 0);
    look(&heap, 100);
    let block = |pages: u32, gap: usize| {
        let id = heap.alloc(pages, PAGE, State::Large, 0).unwrap().id;
        for word in bytes(&heap, id).iter_mut().step_by(512 * gap) {
            *word = 1;
        }
        heap.free(id);
        heap.trim();
    };
    for _ in 0..3 {
        block(4 * FRAME_PAGES + 1, 3);
        block(4 * FRAME_PAGES - 1, 1);
    }
    assert_eq!(heap.space.os.take_advice(), [], "sparse blocks, and small ones");
    for _ in 0..3 {
        block(5 * FRAME_PAGES, 1);
    }
    let advice = heap.space.os.take_advice();
    assert_eq!(advice.len(), 1, "the third of its size");
    let (range, wanted) = advice[0];
    assert!(wanted && range.addr.is_multiple_of(2 << 20) && range.len.is_multiple_of(2 << 20));
    assert!(range.len >= 4 * (2 << 20));
    // What is still resident needs no advice.
    let id = heap.alloc(5 * FRAME_PAGES, PAGE, State::Large, 0).unwrap().id;
    bytes(&heap, id).fill(1);
    heap.free(id);
    let _ = heap.space.os.take_advice();
    heap.alloc(5 * FRAME_PAGES, PAGE, State::Large, 0).unwrap();
    assert_eq!(heap.space.os.take_advice(), []);
}

#[test]
fn a_refused_collapse_is_tried_again_much_later() {
    let (heap, _) = dense("always [madvise] never", DENSE, 0);
    heap.space.os.fail_always(Call::Collapse, libc::ENOMEM);
    look(&heap, 20_000);
    let refused = heap.counts().huge.refused;
    assert_eq!((refused, heap.counts().huge.whole), (32, 0));
    heap.space.os.heal(Call::Collapse);
    assert_eq!(look(&heap, 70_000), 64 << 20);
}

#[test]
fn a_huge_page_in_use_keeps_its_few_free_pages_while_the_program_works() {
    let (heap, id) = dense("always [madvise] never", DENSE, 0);
    assert_eq!(look(&heap, 10_000), 64 << 20);
    // The last three frames and a hundred pages of the one before become free, and then more than is
    // kept beyond the peak.
    let rest = heap.alloc(12_000, PAGE, State::Large, 0).unwrap().id;
    let _wall = heap.alloc(1, PAGE, State::Large, 0).unwrap();
    heap.shrink(id, DENSE - 3 * FRAME_PAGES - 100);
    heap.space.os.advance(1000);
    heap.free(rest);
    let _ = heap.space.os.take_purges();
    let base = heap.space.window.address(0);
    let mut purged = 0;
    for _ in 0..100 {
        // Work, of a size that finds no place among those pages.
        let id = heap.alloc(DENSE, PAGE, State::Large, 0).unwrap().id;
        look(&heap, 100);
        heap.free(id);
        for purge in heap.space.os.take_purges() {
            if purge.addr >= base + ((DENSE as usize) << LG_PAGE) {
                continue;
            }
            let whole = (purge.addr - base) % (2 << 20) == 0 && purge.len % (2 << 20) == 0;
            assert!(whole, "{purge:?}: whole huge pages");
            purged += purge.len;
        }
    }
    assert_eq!((purged, heap.counts().huge.split), (3 * (2 << 20), 0));
    look(&heap, 7500);
    assert_eq!(heap.counts().dirty, 0, "a quiet program gives all the same");
    assert_eq!(heap.counts().huge.split, 1);
}

#[test]
fn a_huge_page_that_is_mostly_free_is_split_when_it_is_cold() {
    let (heap, id) = dense("always [madvise] never", DENSE, 0);
    assert_eq!(look(&heap, 10_000), 64 << 20);
    let rest = heap.alloc(12_000, PAGE, State::Large, 0).unwrap().id;
    let _wall = heap.alloc(1, PAGE, State::Large, 0).unwrap();
    heap.shrink(id, DENSE - 300);
    heap.space.os.advance(1000);
    heap.free(rest);
    for _ in 0..80 {
        // Work, of a size that finds no place among those pages.
        let id = heap.alloc(DENSE, PAGE, State::Large, 0).unwrap().id;
        look(&heap, 100);
        heap.free(id);
    }
    assert_eq!(heap.counts().huge.split, 1);
}

#[test]
fn the_window_is_advised_as_the_option_says() {
    for (thp, wanted) in
        [(Thp::Always, Some(true)), (Thp::Never, Some(false)), (Thp::Evidence, None)]
    {
        let heap = heap(4096);
        heap.set_huge(thp, Hugetlb::Off);
        heap.space.os.fail_nth(Call::AdviseHuge, 2);
        for _ in 0..3 {
            heap.alloc(DENSE, PAGE, State::Large, 0).unwrap();
        }
        let advice = heap.space.os.take_advice();
        assert!(advice.iter().all(|&(_, huge)| Some(huge) == wanted));
        assert_eq!(advice.is_empty(), wanted.is_none());
    }
}

#[test]
fn reserved_pages_are_used_first_and_never_given_back() {
    let heap = heap(4096);
    heap.set_huge(Thp::Evidence, Hugetlb::Mib2);
    let block = |pages: u32| heap.alloc(pages, PAGE, State::Large, 0).unwrap().id;
    let first = block(700);
    assert_eq!(heap.counts().fixed, 1024);
    // The pool is empty.
    heap.space.os.fail_always(Call::MapHuge, libc::ENOMEM);
    let second = block(700);
    // Then it has some again.
    heap.space.os.heal(Call::MapHuge);
    let third = block(2000);
    assert_eq!(heap.counts().fixed, 1024 + 2048);
    for (tag, id) in [first, second, third].into_iter().enumerate() {
        fill(&heap, id, tag as u64);
    }
    for (tag, id) in [first, second, third].into_iter().enumerate() {
        verify(&heap, id, tag as u64, (heap.space.extents.get(id).pages() as usize) << 9);
        heap.free(id);
    }
    // Nor is the tail of a shrunk block, which else goes at once.
    let fourth = block(8000);
    heap.shrink(fourth, 100);
    heap.free(fourth);
    heap.trim();
    let purged: usize = heap.space.os.take_purges().iter().map(|purge| purge.len).sum();
    assert_eq!(purged, 700 * PAGE, "only what is ordinary memory");
    // And a request never spans both kinds.
    for _ in 0..20 {
        let id = block(900);
        let e = heap.space.extents.get(id);
        let kinds = [e.start(), e.end() - 1].map(|page| heap.space.frames.is_fixed(page));
        assert_eq!(kinds[0], kinds[1]);
    }
}

#[test]
fn muzzy_pages_are_offered_first_and_given_back_later() {
    let heap = heap(4096);
    heap.set_times(Times { muzzy_ms: Some(4000), ..Times::new(1000, Some(1000)) });
    let os = &heap.space.os;
    os.advance(100_000);
    let id = heap.alloc(1000, PAGE, State::Large, 0).unwrap().id;
    heap.free(id);
    look(&heap, 2500);
    let counts = heap.counts();
    assert_eq!((counts.dirty, counts.muzzy + counts.purged), (0, 1000));
    assert!(os.count(Call::PurgeLazily) > 0 && counts.muzzy > 600, "{}", counts.muzzy);
    let again = heap.alloc(600, PAGE, State::Large, 0).unwrap();
    assert!(!again.zero, "muzzy pages may hold old bytes");
    assert_eq!(heap.counts().muzzy, counts.muzzy - 600);
    look(&heap, 4500);
    assert_eq!((heap.counts().muzzy, heap.counts().purged), (0, 400));
    // A kernel that refuses the offer keeps nothing from going.
    heap.free(again.id);
    os.fail_always(Call::PurgeLazily, libc::EINVAL);
    look(&heap, 10_000);
    assert_eq!((heap.counts().dirty, heap.counts().muzzy), (0, 0));
}

#[test]
fn dirty_pieces_beside_each_other_are_taken_before_clean_pages() {
    let heap = heap(4096);
    let os = &heap.space.os;
    os.advance(100_000);
    heap.set_times(Times::new(20_000, Some(2000)));
    let block = |pages| heap.alloc(pages, PAGE, State::Large, 0).unwrap();
    // Pieces of different ages: two, then six pages; five; eight single pages. Clean pages after each.
    let pieces: [&[u32]; 3] = [&[2, 6], &[5], &[1; 8]];
    let (mut dirty, mut clean) = (Vec::new(), Vec::new());
    for sizes in pieces {
        dirty.extend(sizes.iter().map(|&pages| block(pages).id));
        clean.push(block(64).id);
        let _wall = block(1);
    }
    clean.into_iter().for_each(|id| heap.free(id));
    heap.trim();
    for id in dirty {
        heap.free(id);
        os.advance(1500);
    }
    assert_eq!(heap.counts().dirty, 8 + 5 + 8);
    let blocks = [block(8), block(8)];
    assert_eq!(heap.counts().dirty, 5, "{blocks:?}");
}
