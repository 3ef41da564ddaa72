//! What a person may set and what the allocator says of itself: one option table, one table of
//! statistics, and everything that is derived from them (parser, reports, host table, manual).
//!
//! Invariants: nothing here allocates, locks or calls into libc; the layers below read options
//! and are read for statistics, they never call this module for anything else.

use crate::arena::Usage;
use crate::extent::heap::Counts;
use crate::extent::hugepage::FRAME_PAGES;
use crate::extent::page_map::LG_PAGE;
use crate::process::HEAP;

pub(crate) mod conf;
pub mod host;
pub(crate) mod jemalloc;
pub mod mallctl;
pub mod options;
pub mod places;
pub mod report;
pub mod stats;
pub mod stats_print;
pub(crate) mod text;

#[cfg(test)]
mod docs;

const FRAME_BYTES: u64 = (FRAME_PAGES as u64) << LG_PAGE;

/// The figures of the layers below, at this moment: the one source of every statistic.
pub(crate) fn counters() -> stats::Counters {
    if !crate::process::ready() {
        return stats::Counters::default();
    }
    let (pages, usage, caches) =
        crate::front::at_rest(|| (HEAP.pages.counts(), HEAP.usage(), crate::process::caches()));
    let (pages, usage) = with_explicit(pages, usage);
    let [prof_blocks, prof_live_blocks, prof_missed] = crate::prof::counts();
    let bytes = |pages: u64| pages << LG_PAGE;
    stats::Counters {
        allocated_bytes: (usage.out_bytes as u64).saturating_sub(caches.bytes),
        active_bytes: bytes(pages.in_use),
        metadata_bytes: pages.metadata_bytes + usage.metadata_bytes as u64,
        mapped_bytes: bytes(pages.mapped),
        retained_bytes: bytes(pages.clean),
        dirty_bytes: bytes(pages.dirty),
        dirty_extents: pages.dirty_pieces,
        warm_bytes: bytes(pages.dirty.min(pages.peak - pages.in_use)),
        in_use_peak_bytes: bytes(pages.peak),
        cached_bytes: caches.bytes,
        cached_blocks: caches.blocks,
        purged_bytes: bytes(pages.purged),
        regretted_bytes: bytes(pages.regretted),
        pressure_bytes: bytes(pages.pressure_purged),
        pressure: pages.pressure,
        window_ms: pages.window_ms,
        purge_calls: pages.purge_calls,
        purge_us: pages.purge_us,
        purge_failures: pages.purge_failures,
        muzzy_bytes: bytes(pages.muzzy),
        hugetlb_bytes: bytes(pages.fixed),
        huge_bytes: pages.huge.whole * FRAME_BYTES,
        huge_splits: pages.huge.split,
        collapsed_bytes: pages.huge.collapsed * FRAME_BYTES,
        collapse_failures: pages.huge.refused,
        collapse_us: pages.huge.spent_us,
        large_live_bytes: usage.large_bytes as u64,
        large_live_blocks: usage.large as u64,
        slabs: usage.slabs as u64,
        rseq_aborts: caches.rseq_aborts,
        prof_blocks,
        prof_live_blocks,
        prof_missed,
    }
}

/// Adds the explicit arenas' figures; the window in force and the pressure are the process's.
fn with_explicit(mut pages: Counts, mut usage: Usage) -> (Counts, Usage) {
    for heap in crate::explicit::heaps() {
        pages.add(&heap.pages.counts());
        usage.add(&heap.usage());
    }
    (pages, usage)
}

/// Reads options from two texts, those of `MALLOC_CONF` and `THERMALLOC_CONF`, into values of its own: `report`
/// gets each line, `value` each option's. For tests.
#[doc(hidden)]
pub fn try_conf(
    shared: &[u8],
    own: &[u8],
    report: &mut dyn FnMut(&[u8]),
    value: &mut dyn FnMut(i64),
) {
    let options = options::Options::new();
    conf::try_texts(&options, shared, own, report);
    options::ROWS.iter().for_each(|row| value(row.get_in(&options)));
}

/// Resident bytes of everything that is mapped, as the kernel says.
fn resident_measured() -> u64 {
    if !crate::process::ready() {
        return 0;
    }
    let heaps = || core::iter::once(&HEAP).chain(crate::explicit::heaps());
    crate::os::smaps::resident_bytes(|start, end| {
        heaps().any(|heap| {
            let span = heap.pages.space.window.span();
            span.contains(&start) && end <= span.end
        })
    })
}

/// Bytes that the calling thread has asked for so far; what it freed is not taken off.
#[must_use]
pub fn thread_allocated() -> u64 {
    crate::front::thread_allocated()
}

/// Gives every free page back to the kernel, hot or not: an explicit request.
pub(crate) fn purge() -> usize {
    crate::api::trim()
}
