//! The invariants of purging, on random traces against the fake kernel and clock. Beside the heap a
//! simple model keeps, for every page, whether it is in use and when it last was.
use std::collections::VecDeque;
use std::vec::Vec;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::heap::PageHeap;
use super::hugepage::FRAME_PAGES;
use super::page_map::{LG_PAGE, PAGE};
use super::tests::heap;
use super::{ExtentId, State};
use crate::heat::decay::Times;
use crate::os::Os;
use crate::os::fake::FakeKernel;
use crate::policy::pressure::Pressure;

/// Longest rest between two steps, milliseconds: the background thread looks at caches that often.
const REST_MS: u64 = 250;

/// The tail of a shrunk block from which on it goes back at once, pages.
const SHRINK_AT_ONCE: u64 = (8 << 20) / PAGE as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Clean,
    InUse,
    Dirty { used_ms: u64 },
}

/// Who purges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Step,
    Request,
}

/// A heap, the model of its pages, and what was seen of it.
struct Sim {
    heap: PageHeap<FakeKernel>,
    times: Times,
    pages: Vec<Page>,
    /// Live extents and when they die.
    live: Vec<(ExtentId, u64)>,
    in_use: u64,
    dirty: u64,
    /// Pages in use, and dirty pages, from a time on.
    in_use_log: VecDeque<(u64, u64)>,
    dirty_log: Vec<(u64, u64)>,
    /// Pages that steps purged: since when, until when, how many.
    purged_log: Vec<(u64, u64, u64)>,
    /// Pages handed out that had to be faulted in.
    faulted: u64,
    last_step_ms: u64,
    step_at_ms: u64,
}

impl Sim {
    fn new(page_size: usize, times: Times) -> Self {
        let heap = heap(page_size);
        heap.space.os.advance(100_000);
        heap.set_times(times);
        let thp = "/sys/kernel/mm/transparent_hugepage/";
        heap.space.os.put_file(&std::format!("{thp}enabled"), "[always] madvise never");
        heap.space.os.put_file(&std::format!("{thp}hpage_pmd_size"), "2097152");
        heap.space.os.assume_resident();
        Self {
            heap,
            times,
            pages: Vec::new(),
            live: Vec::new(),
            in_use: 0,
            dirty: 0,
            in_use_log: VecDeque::from([(0, 0)]),
            dirty_log: Vec::from([(0, 0)]),
            purged_log: Vec::new(),
            faulted: 0,
            last_step_ms: 0,
            step_at_ms: 0,
        }
    }

    fn now(&self) -> u64 {
        self.heap.space.os.now_ms()
    }

    fn log(&mut self) {
        let now = self.now();
        self.in_use_log.push_back((now, self.in_use));
        while self.in_use_log.len() > 1 && self.in_use_log[1].0 + self.times.window_ms <= now {
            self.in_use_log.pop_front();
        }
        self.dirty_log.push((now, self.dirty));
    }

    /// Most pages in use within the window that ends now.
    fn peak(&self) -> u64 {
        let from = self.now().saturating_sub(self.times.window_ms);
        let first = self.in_use_log.iter().rposition(|&(at, _)| at <= from).unwrap_or(0);
        self.in_use_log.range(first..).map(|&(_, in_use)| in_use).max().unwrap()
    }

    /// Enters a change of pages in the model.
    fn set(&mut self, start: u32, end: u32, to: Page) {
        let (start, end) = (start as usize, end as usize);
        if self.pages.len() < end {
            self.pages.resize(end, Page::Clean);
        }
        for page in &mut self.pages[start..end] {
            let from = core::mem::replace(page, to);
            assert!((from == Page::InUse) != (to == Page::InUse), "{from:?} to {to:?}");
            for (state, sign) in [(from, -1), (to, 1)] {
                match state {
                    Page::Clean => {}
                    Page::InUse => self.in_use = self.in_use.strict_add_signed(sign),
                    Page::Dirty { .. } => self.dirty = self.dirty.strict_add_signed(sign),
                }
            }
            if from == Page::Clean && to == Page::InUse {
                self.faulted += 1;
            }
        }
    }

    fn run_of(&self, id: ExtentId) -> (u32, u32) {
        let e = self.heap.space.extents.get(id);
        (e.start(), e.end())
    }

    fn alloc(&mut self, pages: usize, lg_align: u32, life_ms: u64) {
        let pages = self.heap.pages_for(pages * PAGE).unwrap();
        let id = self.heap.alloc(pages, 1 << lg_align, State::Large, 0).unwrap().id;
        let (start, end) = self.run_of(id);
        self.set(start, end, Page::InUse);
        self.live.push((id, self.now() + life_ms));
        self.log();
    }

    fn free(&mut self, index: usize) {
        let (id, _) = self.live.swap_remove(index);
        let (start, end) = self.run_of(id);
        self.heap.free(id);
        self.set(start, end, Page::Dirty { used_ms: self.now() });
        self.log();
    }

    fn resize(&mut self, nth: usize, pages: usize) {
        if self.live.is_empty() {
            return;
        }
        let id = self.live[nth % self.live.len()].0;
        let pages = self.heap.pages_for(pages * PAGE).unwrap();
        let (start, end) = self.run_of(id);
        let new_end = start + pages;
        if new_end < end {
            self.heap.shrink(id, pages);
            self.set(new_end, end, Page::Dirty { used_ms: self.now() });
            let large = u64::from(end - new_end) >= SHRINK_AT_ONCE;
            self.purged(if large { By::Request } else { By::Step });
        } else if new_end > end && self.heap.extend(id, pages) {
            self.set(end, new_end, Page::InUse);
        }
        self.log();
    }

    /// Takes what the kernel has seen over into the model, and checks invariant 1 on it.
    fn purged(&mut self, by: By) {
        let now = self.now();
        let base = self.heap.space.window.address(0);
        let mut purged = 0;
        for purge in self.heap.space.os.take_purges() {
            let first = (purge.addr - base) >> LG_PAGE;
            for at in first..first + (purge.len >> LG_PAGE) {
                let Page::Dirty { used_ms } = self.pages[at] else {
                    panic!("page {at} was purged, which is {:?}", self.pages[at]);
                };
                let hot = now - used_ms < self.times.window_ms;
                assert!(
                    by == By::Request || !hot,
                    "page {at} was purged {} ms after its use",
                    now - used_ms
                );
                self.pages[at] = Page::Clean;
                purged += 1;
            }
        }
        self.dirty -= purged;
        assert_eq!(self.heap.counts().dirty, self.dirty);
        if by == By::Step && purged > 0 {
            let (kept, peak) = (self.in_use + self.dirty, self.peak());
            assert!(
                kept >= peak,
                "{purged} pages were purged; {kept} are left, the peak is {peak}"
            );
            self.purged_log.push((self.last_step_ms, now, purged));
        }
        self.log();
    }

    /// One step of the background thread, which says when it wants the next.
    fn step(&mut self) {
        let rest = self.heap.step();
        self.purged(By::Step);
        // Every frame is dense here, and what is of a huge page is purged by rules of its own.
        self.heap.hugify();
        assert!(rest.is_some() || self.dirty == 0, "no more steps with {} dirty pages", self.dirty);
        self.last_step_ms = self.now();
        self.step_at_ms = self.now() + rest.map_or(REST_MS, |ms| ms.clamp(1, REST_MS));
    }

    /// Lets time pass: blocks die and steps are made when they are due.
    fn pass(&mut self, ms: u64) {
        let end = self.now() + ms;
        loop {
            let dies = self.live.iter().map(|&(_, at)| at).min().unwrap_or(u64::MAX);
            let next = self.step_at_ms.min(dies).min(end).max(self.now());
            self.heap.space.os.advance(next - self.now());
            while let Some(index) = self.live.iter().position(|&(_, at)| at <= next) {
                self.free(index);
            }
            if self.step_at_ms <= next {
                self.step();
            }
            if next == end {
                return;
            }
        }
    }

    fn run(&mut self, ops: &[Op]) {
        for &op in ops {
            match op {
                Op::Alloc { pages, lg_align, life_ms } => self.alloc(pages, lg_align, life_ms),
                Op::Resize { nth, pages } => self.resize(nth, pages),
                Op::Pass { ms } => self.pass(ms),
                Op::Trim => {
                    self.heap.trim();
                    self.purged(By::Request);
                }
                Op::Relieve(pressure) => {
                    let (held, peak) = (self.in_use + self.dirty, self.peak());
                    self.heap.relieve(pressure);
                    self.purged(By::Request);
                    let kept = match pressure {
                        Pressure::None => held,
                        Pressure::Cold => held.min(peak),
                        Pressure::Warm => self.in_use,
                    };
                    assert!(self.in_use + self.dirty >= kept, "{pressure:?} took too much");
                    assert!(pressure != Pressure::Warm || self.dirty == 0);
                    assert_eq!(self.heap.counts().pressure, pressure as u64);
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc { pages: usize, lg_align: u32, life_ms: u64 },
    Resize { nth: usize, pages: usize },
    Pass { ms: u64 },
    Trim,
    Relieve(Pressure),
}

/// From one page to 32 MiB.
fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..=16, 4 => 17usize..=512, 1 => 513usize..=8192]
}

/// Times from a moment to several windows.
fn spans() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..=300, 2 => 301u64..=4000, 1 => 4001u64..=15_000]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let pressure = prop_oneof![Just(Pressure::None), Just(Pressure::Cold), Just(Pressure::Warm)];
    let op = prop_oneof![
        40 => (sizes(), prop_oneof![9 => Just(12u32), 1 => 12u32..23], spans())
            .prop_map(|(pages, lg_align, life_ms)| Op::Alloc { pages, lg_align, life_ms }),
        8 => (any::<usize>(), sizes()).prop_map(|(nth, pages)| Op::Resize { nth, pages }),
        24 => spans().prop_map(|ms| Op::Pass { ms }),
        1 => Just(Op::Trim),
        1 => pressure.prop_map(Op::Relieve),
    ];
    proptest::collection::vec(op, 1..120)
}

fn page_sizes() -> impl Strategy<Value = usize> {
    prop_oneof![3 => Just(4usize << 10), 1 => Just(16usize << 10), 1 => Just(64usize << 10)]
}

fn times() -> impl Strategy<Value = Times> {
    let window = prop_oneof![Just(5000), Just(0), 1u64..1000, 1000u64..20_000];
    let decay = prop_oneof![2 => Just(Some(2000)), 1 => (1u64..20_000).prop_map(Some), 1 => Just(Some(0)), 1 => Just(None)];
    (window, decay).prop_map(|(window_ms, decay_ms)| Times::new(window_ms, decay_ms))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    /// No page in use within the window is purged, and of the others only so many that the window's
    /// peak still fits into what is resident; but for trim, pressure and large tails.
    #[test]
    fn i1_a_hot_page_is_never_purged(page in page_sizes(), times in times(), ops in ops()) {
        let mut sim = Sim::new(page, times);
        sim.run(&ops);
        sim.pass(2 * times.window_ms + 2 * times.decay_ms.unwrap_or(1000));
    }

    /// A window and a decay after the program's last call, and one step, nothing dirty is left; or as
    /// much later as regret has learned that the program may be quiet.
    #[test]
    fn i2_a_cold_page_always_goes_back(
        page in page_sizes(),
        times in times(),
        ops in ops(),
        all_freed in any::<bool>(),
    ) {
        let mut sim = Sim::new(page, times);
        sim.run(&ops);
        while all_freed && !sim.live.is_empty() {
            sim.free(0);
        }
        for (_, dies) in &mut sim.live {
            *dies = u64::MAX;
        }
        let before = sim.dirty;
        let quiet_ms = sim.heap.inner.lock().regret.quiet_ms();
        sim.pass(quiet_ms.max(times.window_ms) + times.decay_ms.unwrap_or(60_000) + REST_MS);
        match times.decay_ms {
            Some(_) => prop_assert_eq!(sim.dirty, 0),
            None => prop_assert_eq!(sim.dirty, before, "without a decay nothing goes"),
        }
    }

    /// The pages that steps purge within any time up to a second are at most twice what an even
    /// spread of the dirty pages over the decay would be; the least step is one page of the kernel's, or
    /// one huge page.
    #[test]
    fn i3_purging_is_bounded(
        page in page_sizes(),
        window_ms in prop_oneof![Just(5000u64), 0u64..10_000],
        decay_ms in prop_oneof![Just(2000u64), 1u64..20_000],
        ops in ops(),
    ) {
        let mut sim = Sim::new(page, Times::new(window_ms, Some(decay_ms)));
        sim.run(&ops);
        sim.pass(window_ms + decay_ms + 1000);
        for (i, &(from, until, _)) in sim.purged_log.iter().enumerate() {
            let mut dirty = most_within(&sim.dirty_log, from.saturating_sub(decay_ms), until);
            let mut purged = 0;
            for &(_, until, pages) in &sim.purged_log[i..] {
                if until > from + 1000 {
                    break;
                }
                purged += pages;
                dirty = dirty.max(most_within(&sim.dirty_log, from, until));
                let least = if page == PAGE { u64::from(FRAME_PAGES) } else { (page / PAGE) as u64 };
                prop_assert!(
                    purged.saturating_sub(least) * decay_ms <= 2 * dirty * (until - from),
                    "{} of {} pages went from {} until {} ms", purged, dirty, from, until
                );
            }
        }
    }

    /// A program whose period is no longer than the window has all it needs after two periods: blocks
    /// of one size, so that where they lie doesn't matter.
    #[test]
    fn i4_a_periodic_program_faults_no_more(
        page in page_sizes(),
        (window_ms, period_ms) in periods(),
        decay_ms in decays(),
        pages in sizes(),
        blocks in proptest::collection::vec((0u64..1000, 1u64..1000), 1..40),
    ) {
        let blocks: Vec<_> = blocks.into_iter().map(|(at, life)| (at, pages, life)).collect();
        let faulted = periodic(page, Times::new(window_ms, decay_ms), period_ms, &blocks).0;
        prop_assert!(faulted[2..].iter().all(|&pages| pages == 0), "{:?}", faulted);
    }
}

/// Mixed sizes don't always find their places of the period before, and then a block may need pages
/// that no block has had for a window. On average over many programs that is little.
#[test]
fn i4_mixed_sizes_fault_little_more() {
    let block = (0u64..1000, sizes(), 1u64..1000);
    let programs = (page_sizes(), periods(), 0u64..3000, proptest::collection::vec(block, 1..40));
    let mut runner = TestRunner::deterministic();
    for (purging, allowed) in [(true, 0.025), (false, 0.01)] {
        let mut shares = Vec::new();
        for _ in 0..60 {
            let (page, (window_ms, period_ms), decay_ms, blocks) =
                programs.new_tree(&mut runner).unwrap().current();
            let times = Times::new(window_ms, purging.then_some(decay_ms));
            let (faulted, peak) = periodic(page, times, period_ms, &blocks);
            let later: u64 = faulted[2..].iter().sum();
            shares.push(later as f64 / (PERIODS - 2) as f64 / peak as f64);
        }
        let share = shares.iter().sum::<f64>() / shares.len() as f64;
        assert!(share < allowed, "purging {purging}: {share} of the peak faulted in each period");
    }
}

/// The pieces that small blocks leave behind are put together again before the window grows.
#[test]
fn a_periodic_program_that_never_purges_does_not_grow() {
    let times = Times::new(100, None);
    let faulted = periodic(4096, times, 74, &[(0, 4, 1), (109, 1, 95), (852, 2, 176)]).0;
    assert!(faulted[5..].iter().all(|&pages| pages == 0), "{faulted:?}");
}

const PERIODS: usize = 20;

fn periods() -> impl Strategy<Value = (u64, u64)> {
    (100u64..10_000).prop_flat_map(|window| (Just(window), window / 10..=window))
}

fn decays() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(Some(0)), (1u64..3000).prop_map(Some), Just(None)]
}

/// Runs a program that has these blocks in every period: when it takes each and how long it keeps
/// it, in thousandths of the period, and the size in pages. Returns the pages faulted in by each
/// period, and the peak of those in use.
fn periodic(
    page: usize,
    times: Times,
    period_ms: u64,
    blocks: &[(u64, usize, u64)],
) -> (Vec<u64>, u64) {
    let mut sim = Sim::new(page, times);
    let mut blocks = blocks.to_vec();
    blocks.sort_by_key(|block| block.0);
    let mut faulted = Vec::new();
    for _ in 0..PERIODS {
        let (start, before) = (sim.now(), sim.faulted);
        for &(at, pages, life) in &blocks {
            sim.pass(start + at * period_ms / 1000 - sim.now());
            sim.alloc(pages, 12, life * period_ms / 1000);
        }
        sim.pass(start + period_ms - sim.now());
        faulted.push(sim.faulted - before);
    }
    (faulted, sim.peak())
}

/// The greatest level of `log` between two times.
fn most_within(log: &[(u64, u64)], from: u64, to: u64) -> u64 {
    let first = log.iter().rposition(|&(at, _)| at <= from).unwrap_or(0);
    log[first..].iter().take_while(|&&(at, _)| at <= to).map(|&(_, level)| level).max().unwrap()
}
