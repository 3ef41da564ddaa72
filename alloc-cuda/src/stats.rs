//! The table of statistics of a device pool. A row is the field, its unit and meaning, and the line
//! of a report.
//!
//! Invariant: each figure is right of its moment; sums over several may be off by what happened in
//! between.

use crate::driver::Call;
use crate::gpu::lock;
use crate::heap::CHUNK;
use crate::pool::{Inner, Pool};
use std::ffi::CStr;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

/// One statistic.
#[derive(Debug)]
#[non_exhaustive]
pub struct Row {
    /// Its name: the field of [`Stats`].
    pub name: &'static str,
    /// The same, for C.
    pub c_name: &'static CStr,
    /// What it means.
    pub doc: &'static str,
    get: fn(&Stats) -> u64,
}

impl Row {
    /// This row's figure of a snapshot.
    pub fn get(&self, stats: &Stats) -> u64 {
        (self.get)(stats)
    }
}

macro_rules! stats {
    ($($name:ident, $doc:literal;)*) => {
        /// The figures of one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $(#[doc = $doc] pub $name: u64,)*
        }

        /// Every statistic, in the order of the manual.
        pub static ROWS: &[Row] = &[
            $(Row {
                name: stringify!($name),
                c_name: match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                },
                doc: $doc,
                get: |stats| stats.$name,
            },)*
        ];
    };
}

stats! {
    reserved_bytes, "Physical device memory that the pool has.";
    reserved_peak_bytes, "The most of it so far.";
    mapped_bytes, "Memory that addresses stand for; the rest of what is reserved waits to be mapped.";
    active_bytes, "Blocks handed out, with their rounding.";
    active_peak_bytes, "The most of them so far, summed over streams.";
    requested_bytes, "What was asked for in these blocks.";
    pending_bytes, "Blocks given back that another stream may still use.";
    pending_peak_bytes, "The most of them so far, summed over streams.";
    pending_blocks, "How many these are.";
    free_bytes, "Memory that is mapped and free.";
    largest_free_bytes, "The largest free block.";
    fragmentation_internal_percent, "Rounding, as a part of the blocks handed out.";
    fragmentation_external_percent, "Free memory outside the largest free block, as a part of what is reserved.";
    private_bytes, "Memory of private pools of graph captures.";
    private_pools, "Private pools that somebody holds.";
    stitched_blocks, "Stitched blocks that are mapped.";
    limit_bytes, "The most that the pool may have; the largest number where there is no limit.";
    allocs, "Allocations.";
    frees, "Frees.";
    hits, "Allocations served by the stream's own free memory.";
    stitches, "Stitched blocks made.";
    stitch_hits, "Allocations served by a stitched block that was made before.";
    cross_stream_reuses, "Allocations served by memory of another stream.";
    deferred_frees, "Frees of blocks that another stream had used.";
    complete_reuses, "Reuses across streams whose last use was found complete.";
    waits_inserted, "Waits that streams were made to do for the memory of another.";
    event_records, "Events recorded.";
    event_queries, "Events asked for.";
    events, "Events made; they are used again.";
    growths, "Times that the pool took memory from the driver.";
    grown_bytes, "Memory taken from the driver.";
    trimmed_bytes, "Memory given back to the driver.";
    pressure_events, "Times that the device was short of memory and free memory went at once.";
    ooms, "Allocations that failed.";
    oom_waits, "Times that an allocation waited for pending memory.";
    captures, "Captures begun.";
    aborted_captures, "Captures that were abandoned.";
    bad_frees, "Frees that were refused: of no block, or a second time.";
    driver_calls, "Calls of the driver.";
    driver_memory_calls, "Of these, such that take, map or give back memory.";
}

/// Calls of the driver in a report.
const REPORTED_CALLS: usize = 32;
/// The calls that take, map or give back memory.
const MEMORY_CALLS: &[Call] = &[
    Call::cuMemAlloc_v2,
    Call::cuMemFree_v2,
    Call::cuMemAllocFromPoolAsync,
    Call::cuMemAllocAsync,
    Call::cuMemFreeAsync,
    Call::cuMemAddressReserve,
    Call::cuMemAddressFree,
    Call::cuMemCreate,
    Call::cuMemRelease,
    Call::cuMemMap,
    Call::cuMemUnmap,
    Call::cuMemSetAccess,
    Call::cuMemPoolTrimTo,
];

impl Inner {
    pub(crate) fn stats(&self) -> Stats {
        let counts = &self.counts;
        let mut s = Stats {
            reserved_bytes: self.reserved.load(Relaxed),
            reserved_peak_bytes: self.reserved_peak.load(Relaxed),
            private_pools: self.captures.held() as u64,
            limit_bytes: self.limit_bytes.load(Relaxed),
            complete_reuses: counts.ready_steals.load(Relaxed),
            events: self.gpu.events_made.load(Relaxed),
            growths: counts.grown.load(Relaxed),
            grown_bytes: counts.grown_bytes.load(Relaxed),
            trimmed_bytes: counts.trimmed_bytes.load(Relaxed),
            pressure_events: counts.pressure.load(Relaxed),
            ooms: counts.ooms.load(Relaxed),
            oom_waits: counts.oom_waits.load(Relaxed),
            captures: counts.captures.load(Relaxed),
            aborted_captures: counts.aborted_captures.load(Relaxed),
            bad_frees: counts.bad_frees.load(Relaxed),
            driver_calls: self.gpu.driver.all_calls(),
            driver_memory_calls: MEMORY_CALLS.iter().map(|&c| self.gpu.driver.calls(c)).sum(),
            ..Stats::default()
        };
        for shard in self.all_shards() {
            let heap = shard.heap();
            s.mapped_bytes += heap.books.mapped();
            s.active_bytes += heap.books.active;
            s.active_peak_bytes += heap.peaks.active;
            s.requested_bytes += heap.books.requested;
            s.pending_bytes += heap.books.pending;
            s.pending_peak_bytes += heap.peaks.pending;
            s.pending_blocks += heap.pending.len() as u64;
            s.free_bytes += heap.books.free;
            s.largest_free_bytes = s.largest_free_bytes.max(heap.largest_free());
            s.stitched_blocks += heap.live_views() as u64;
            s.allocs += heap.counts.allocs;
            s.frees += heap.counts.frees;
            s.hits += heap.counts.hits;
            s.stitches += heap.counts.stitched;
            s.stitch_hits += heap.counts.stitch_hits;
            s.deferred_frees += heap.counts.deferred;
            s.cross_stream_reuses += heap.counts.cross_stream;
        }
        for stream in self.all_streams() {
            s.event_records += stream.records.load(Relaxed);
            s.event_queries += stream.queries.load(Relaxed);
            s.waits_inserted += stream.waits.load(Relaxed);
        }
        s.private_bytes = self.private_bytes();
        let percent = |part: u64, whole: u64| (part * 100).checked_div(whole).unwrap_or(0);
        s.fragmentation_internal_percent =
            percent(s.active_bytes.saturating_sub(s.requested_bytes), s.active_bytes);
        s.fragmentation_external_percent =
            percent(s.free_bytes.saturating_sub(s.largest_free_bytes), s.reserved_bytes);
        s
    }

    /// Chunks that wait to be mapped.
    pub(crate) fn idle_bytes(&self) -> u64 {
        lock(&self.idle_chunks).len() as u64 * CHUNK
    }
}

impl Pool {
    /// The figures of this moment.
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    /// The figures as text, a line each, and the last calls of the driver.
    pub fn report(&self) -> String {
        let stats = self.stats();
        let mut text = format!(
            "thermalloc device pool: device {}, memory of {}\n",
            self.ordinal(),
            self.backing()
        );
        for row in ROWS {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{:<32} {}", row.name, row.get(&stats));
        }
        let _ = writeln!(text, "{:<32} {}", "idle_bytes", self.inner.idle_bytes());
        for call in self.driver().recent_calls().iter().rev().take(REPORTED_CALLS).rev() {
            let _ = writeln!(text, "call: {call}");
        }
        text
    }

    /// The calls of the driver so far, by function, those never made left out.
    pub fn driver_calls(&self) -> Vec<(&'static str, u64)> {
        let driver = &self.inner.gpu.driver;
        let calls = Call::ALL.iter().map(|&call| (call.symbol(), driver.calls(call)));
        calls.filter(|&(_, count)| count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_every_row() {
        let manual = include_str!("../../docs/cuda.md");
        for row in ROWS {
            let line = format!("| `{}` | {} |", row.name, row.doc);
            assert!(manual.contains(&line), "docs/cuda.md lacks: {line}");
        }
    }

    #[test]
    fn names_are_unique_and_documented() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name), "{}", row.name);
            assert_eq!(row.c_name.to_str(), Ok(row.name));
            assert!(row.doc.ends_with('.'), "{}", row.name);
        }
    }
}
