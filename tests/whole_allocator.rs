//! The allocator of a Rust program under any valid layout: four threads allocate, resize and free,
//! and hand blocks to each other. The program's own memory, proptest's too, is in it as well.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;

use proptest::prelude::*;
use thermalloc::Thermalloc;
use thermalloc_tests::model::{Block, Ledger};

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

const THREADS: usize = 4;
/// Blocks that a thread keeps at most, and bytes of one that count as little.
const MOST_KEPT: usize = 64;
const LITTLE: usize = 1 << 20;
/// Blocks above [`LITTLE`] that a thread keeps at most.
const MOST_BIG: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Alloc(Layout),
    Zeroed(Layout),
    /// Resizes one of the thread's blocks.
    Realloc(prop::sample::Index, usize),
    Dealloc(prop::sample::Index),
    /// Leaves one of the thread's blocks for the others.
    Pass(prop::sample::Index),
    /// Takes one that was left.
    Take,
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![
        200 => 0..=128usize,
        200 => 0..=1024usize,
        120 => 0..=(33usize << 10),
        60 => 0..=LITTLE + 4096,
        10 => LITTLE..=8 << 20,
        2 => LITTLE..=64 << 20,
        // Exact multiples of a huge page, which get its alignment.
        4 => (1..=32usize).prop_map(|n| n << 21),
        8 => Just(2usize << 20),
    ]
}

fn alignments() -> impl Strategy<Value = usize> {
    prop_oneof![
        600 => 0..=4u32,
        120 => 5..=12u32,
        20 => 13..=21u32,
        2 => 22..=30u32,
    ]
    .prop_map(|lg| 1 << lg)
}

fn layouts() -> impl Strategy<Value = Layout> {
    (sizes(), alignments()).prop_map(|(size, align)| {
        Layout::from_size_align(size, align).expect("far below the limit")
    })
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => layouts().prop_map(Op::Alloc),
        2 => layouts().prop_map(Op::Zeroed),
        3 => (any::<prop::sample::Index>(), sizes()).prop_map(|(i, size)| Op::Realloc(i, size)),
        3 => any::<prop::sample::Index>().prop_map(Op::Dealloc),
        2 => any::<prop::sample::Index>().prop_map(Op::Pass),
        2 => Just(Op::Take),
    ]
}

struct Thread<'a> {
    ledger: &'a Ledger,
    passed: &'a Mutex<Vec<Block>>,
    kept: Vec<Block>,
    seed: u64,
}

impl Thread<'_> {
    fn run(&mut self, op: &Op) {
        match *op {
            Op::Alloc(layout) => {
                // SAFETY: the model allows no bytes; so does this allocator.
                let start = unsafe { GLOBAL.alloc(layout) };
                self.keep_new(start, layout);
            }
            Op::Zeroed(layout) => {
                // SAFETY: as above.
                let start = unsafe { GLOBAL.alloc_zeroed(layout) };
                assert!(!start.is_null(), "out of memory for {layout:?}");
                // SAFETY: just allocated.
                unsafe { Block::check_zero(start, layout) };
                self.keep_new(start, layout);
            }
            Op::Realloc(index, size) => {
                let Some(block) = self.pick(&index) else { return };
                let resize = |start, layout, size| {
                    // SAFETY: the block is live, with this layout.
                    (unsafe { GLOBAL.realloc(start, layout, size) }, size)
                };
                // SAFETY: what comes back is a block of that many bytes.
                let block = unsafe { block.resized(self.ledger, size, resize) };
                self.keep(block);
            }
            Op::Dealloc(index) => {
                if let Some(block) = self.pick(&index) {
                    self.free(block);
                }
            }
            Op::Pass(index) => {
                if let Some(block) = self.pick(&index) {
                    self.passed.lock().expect("no panic").push(block);
                }
            }
            Op::Take => {
                let block = self.passed.lock().expect("no panic").pop();
                if let Some(block) = block {
                    block.check();
                    self.keep(block);
                }
            }
        }
    }

    fn pick(&mut self, index: &prop::sample::Index) -> Option<Block> {
        (!self.kept.is_empty()).then(|| self.kept.swap_remove(index.index(self.kept.len())))
    }

    fn keep_new(&mut self, start: *mut u8, layout: Layout) {
        self.seed += 1;
        // SAFETY: just allocated with this layout.
        let block = unsafe { Block::new(self.ledger, start, layout, layout.size(), self.seed) };
        self.keep(block);
    }

    fn keep(&mut self, block: Block) {
        self.kept.push(block);
        let big = |block: &Block| block.usable() > LITTLE;
        if self.kept.len() > MOST_KEPT || self.kept.iter().filter(|b| big(b)).count() > MOST_BIG {
            let first =
                if self.kept.len() > MOST_KEPT { Some(0) } else { self.kept.iter().position(big) };
            let old = self.kept.swap_remove(first.expect("there is one"));
            self.free(old);
        }
    }

    fn free(&mut self, block: Block) {
        let (start, layout) = block.give_up(self.ledger);
        // SAFETY: live, and allocated with this layout.
        unsafe { GLOBAL.dealloc(start, layout) };
    }
}

fn run(programs: &[Vec<Op>]) {
    let (ledger, passed) = (Ledger::new(), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for (i, program) in programs.iter().enumerate() {
            let mut thread = Thread {
                ledger: &ledger,
                passed: &passed,
                kept: Vec::new(),
                seed: (i as u64) << 32,
            };
            scope.spawn(move || {
                program.iter().for_each(|op| thread.run(op));
                // What is left is for the next to free: blocks outlive their thread.
                thread.passed.lock().expect("no panic").append(&mut thread.kept);
            });
        }
    });
    let left = passed.into_inner().expect("no panic");
    let mut last = Thread { ledger: &ledger, passed: &Mutex::default(), kept: Vec::new(), seed: 0 };
    left.into_iter().for_each(|block| last.free(block));
    assert_eq!(ledger.blocks(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layouts_on_four_threads(
        programs in prop::collection::vec(prop::collection::vec(ops(), 0..400), THREADS)
    ) {
        run(&programs);
    }
}
