//! thermalloc's page heap, as shipped. Its background thread is that of `alloc-core`'s
//! `background.rs`: it steps when the heap says that something is due, notes each quarter of a second
//! whether the program did anything, and sleeps without a limit when nothing is dirty.

use std::collections::HashMap;
use std::sync::Arc;

use ::thermalloc::lab::{Block, Heap, Kernel, Settings};

use super::{Place, Policy};
use crate::machine::Machine;
use crate::mib;

/// How often the thread looks at what the program did, milliseconds.
const LOOK_MS: u64 = 250;

struct Simulated(Arc<Machine>);

impl Kernel for Simulated {
    fn now_ms(&self) -> u64 {
        // Not 0: the heap's clock is that of a machine that has run for a while.
        1_000_000 + self.0.now_us() / 1000
    }

    fn purge(&self, page: usize, pages: usize) {
        self.0.purge(page, pages);
    }
}

pub(super) struct Thermalloc {
    heap: Heap<Simulated>,
    blocks: HashMap<usize, Block>,
    purge_calls: u64,
}

impl Thermalloc {
    pub(super) fn new(machine: Arc<Machine>, settings: Settings) -> Self {
        let heap = Heap::new(Simulated(machine), settings).expect("address space for the tables");
        Self { heap, blocks: HashMap::new(), purge_calls: 0 }
    }

    fn keep(&mut self, block: Block) -> Place {
        self.blocks.insert(block.page, block);
        Place { page: block.page, pages: block.pages }
    }

    fn block(&mut self, place: Place) -> Block {
        self.blocks.remove(&place.page).expect("a place of this policy")
    }

    fn count_calls(&mut self) {
        let calls = self.heap.counts().purge_calls;
        (self.purge_calls..calls).for_each(|_| self.heap.kernel().0.note_purge_call());
        self.purge_calls = calls;
    }
}

impl Policy for Thermalloc {
    fn alloc(&mut self, pages: usize) -> Option<Place> {
        let block = self.heap.alloc(pages)?;
        Some(self.keep(block))
    }

    fn free(&mut self, place: Place) {
        let block = self.block(place);
        self.heap.free(block);
    }

    fn resize(&mut self, place: Place, pages: usize) -> Option<Place> {
        let block = self.block(place);
        let resized = self.heap.resize(block, pages);
        self.count_calls();
        let place = self.keep(resized.unwrap_or(block));
        resized.map(|_| place)
    }

    fn wants_to_wake(&self) -> bool {
        self.heap.dirty() > 0
    }

    fn wake(&mut self) -> Option<u64> {
        let rest_ms = self.heap.step();
        self.count_calls();
        rest_ms.map(|ms| ms.clamp(1, LOOK_MS) * 1000)
    }

    fn note(&self) -> Option<String> {
        let counts = self.heap.counts();
        let regretted = mib(counts.regretted);
        (counts.regretted > 0).then(|| {
            format!("window {} ms at the end, {regretted:.1} MiB regretted", counts.window_ms)
        })
    }
}
