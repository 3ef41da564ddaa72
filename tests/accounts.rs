//! The accounts of a quiet process are exact to the byte. One test: a second one's thread would
//! allocate beside it.

use std::alloc::{GlobalAlloc, Layout};

use thermalloc::control::{options, stats};
use thermalloc::{Thermalloc, api};

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

/// Bytes of a block for `size`, as `docs/stats.md` and `docs/life-of-an-allocation.md` have it.
fn rounded(size: usize) -> usize {
    match size {
        0..=16 => 16,
        17..=128 => size.next_multiple_of(16),
        129..=0x10_0000 => size.next_multiple_of(size.next_power_of_two() / 16),
        _ => size.next_multiple_of(4096),
    }
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 1).expect("small")
}

#[test]
fn accounts_are_exact_at_quiet_points() {
    options::set("background_thread", "false").expect("a live option");
    let sizes: Vec<usize> = (0..140)
        .map(|i| i * 7 + 1)
        .chain((0..60).map(|i| 1000 + i * 1709))
        .chain([0x8000, 0x8001, 0x10_0000, 0x10_0001, 2 << 20, (5 << 20) + 17])
        .collect();
    let mut blocks = Vec::with_capacity(sizes.len());
    let before = stats::snapshot();
    let (mut bytes, mut large) = (0, 0);
    for &size in &sizes {
        // SAFETY: no size is 0.
        let start = unsafe { GLOBAL.alloc(layout(size)) };
        // SAFETY: just allocated.
        assert_eq!(unsafe { api::usable_size(start) }, rounded(size), "of {size}");
        blocks.push(start);
        bytes += rounded(size);
        large += usize::from(size > 1 << 20 && size != 2 << 20);
        let now = stats::snapshot();
        assert_eq!(now.allocated_bytes - before.allocated_bytes, bytes as u64, "after {size}");
        assert_eq!(now.large_live_blocks - before.large_live_blocks, large as u64);
        assert_eq!(now.mapped_bytes, now.active_bytes + now.dirty_bytes + now.retained_bytes);
        assert!(now.active_bytes >= now.allocated_bytes + now.cached_bytes);
    }

    // A thread frees half of them, and is over: what is in caches is not counted as live.
    let pairs: Vec<_> = blocks.iter().map(|start| start.expose_provenance()).zip(sizes).collect();
    let (here, there) = pairs.split_at(pairs.len() / 2);
    // What a first thread makes the standard library keep is no concern of this test.
    free_elsewhere(&[]);
    let before = stats::snapshot();
    free_elsewhere(there);
    let after = stats::snapshot();
    assert_eq!(before.allocated_bytes - after.allocated_bytes, sum(there), "freed elsewhere");
    free(here);
    let last = stats::snapshot();
    assert_eq!(after.allocated_bytes - last.allocated_bytes, sum(here), "freed here");

    // Nothing of that is changed by emptying the caches.
    assert!(last.cached_bytes > 0);
    api::trim();
    let trimmed = stats::snapshot();
    assert_eq!(trimmed.allocated_bytes, last.allocated_bytes);
    assert_eq!(trimmed.dirty_bytes, 0);
    assert!(trimmed.purged_bytes > last.purged_bytes);
}

type Blocks = [(usize, usize)];

fn sum(blocks: &Blocks) -> u64 {
    blocks.iter().map(|&(_, size)| rounded(size) as u64).sum()
}

fn free(blocks: &Blocks) {
    for &(start, size) in blocks {
        // SAFETY: live, and allocated with this layout.
        unsafe { GLOBAL.dealloc(core::ptr::with_exposed_provenance_mut(start), layout(size)) };
    }
}

/// Frees by another thread, and waits until that is gone altogether.
fn free_elsewhere(blocks: &Blocks) {
    std::thread::scope(|scope| scope.spawn(|| free(blocks)).join().expect("no panic"));
}
