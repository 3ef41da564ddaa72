//! The table of statistics. A row is the field, its unit and meaning, the line of a report, the
//! JSON member and the row of `docs/stats.md`.
//!
//! Invariant: the figures of a snapshot are read one after the other while the program runs, so
//! each is right of its moment and sums over several may be off by what happened in between.
//!
//! ```
//! let stats = thermalloc::control::stats::snapshot();
//! assert!(stats.resident_bytes >= stats.dirty_bytes);
//! ```

use core::ffi::CStr;

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things.
    Count,
    /// Milliseconds.
    Milliseconds,
    /// Microseconds.
    Microseconds,
    /// Hundredths.
    Percent,
}

impl Unit {
    /// The unit's word in reports; nothing for a plain count.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Count => "",
            Unit::Milliseconds => "ms",
            Unit::Microseconds => "us",
            Unit::Percent => "%",
        }
    }
}

/// What a figure speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// The state at this moment: goes up and down.
    Now,
    /// Everything since the process started: only goes up.
    Total,
}

/// One statistic.
#[derive(Debug)]
#[non_exhaustive]
pub struct Row {
    /// Its name: the field of [`Stats`] and the JSON member.
    pub name: &'static str,
    /// The same, for C.
    pub c_name: &'static CStr,
    /// What it counts.
    pub unit: Unit,
    /// A state or a total.
    pub span: Span,
    /// What it means.
    pub doc: &'static str,
    get: fn(&Stats) -> u64,
}

impl Row {
    /// This row's figure of a snapshot.
    #[must_use]
    pub fn get(&self, stats: &Stats) -> u64 {
        (self.get)(stats)
    }
}

macro_rules! c_name {
    ($name:ident) => {
        match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => panic!("an identifier has no NUL"),
        }
    };
}

/// Counted: `name: Unit Span, doc;`. Derived: `name: Unit Span = |counters| value, doc;`.
macro_rules! stats {
    (
        counted { $($counted:ident: $c_unit:ident $c_span:ident, $c_doc:literal;)* }
        derived { $($derived:ident: $d_unit:ident $d_span:ident = $value:expr, $d_doc:literal;)* }
    ) => {
        /// What the layers below count.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct Counters {
            $(pub(crate) $counted: u64,)*
        }

        /// The figures of one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $(#[doc = $c_doc] pub $counted: u64,)*
            $(#[doc = $d_doc] pub $derived: u64,)*
        }

        impl Stats {
            pub(crate) fn read(counters: &Counters) -> Self {
                $(let $derived: fn(&Counters) -> u64 = $value;)*
                Stats {
                    $($counted: counters.$counted,)*
                    $($derived: $derived(counters),)*
                }
            }
        }

        /// Every statistic, in the order of the manual.
        pub static ROWS: &[Row] = &[
            $(Row {
                name: stringify!($counted),
                c_name: c_name!($counted),
                unit: Unit::$c_unit,
                span: Span::$c_span,
                doc: $c_doc,
                get: |stats| stats.$counted,
            },)*
            $(Row {
                name: stringify!($derived),
                c_name: c_name!($derived),
                unit: Unit::$d_unit,
                span: Span::$d_span,
                doc: $d_doc,
                get: |stats| stats.$derived,
            },)*
        ];
    };
}

stats! {
    counted {
        allocated_bytes: Bytes Now, "Live blocks, each rounded up to its size class.";
        active_bytes: Bytes Now, "Pages of slabs and of live large blocks.";
        metadata_bytes: Bytes Now, "Pages of thermalloc's own tables that were touched.";
        mapped_bytes: Bytes Now, "Address space mapped for blocks, with or without memory behind it.";
        retained_bytes: Bytes Now, "Address space kept for reuse with no memory behind it: purged, or never touched.";
        dirty_bytes: Bytes Now, "Free pages with memory behind them, the warm ones included.";
        warm_bytes: Bytes Now, "Dirty pages kept whatever their age: the peak demand of the hot window less the present one.";
        muzzy_bytes: Bytes Now, "Free pages that the kernel may take when it wants to; resident until then.";
        dirty_extents: Count Now, "Runs of dirty pages.";
        in_use_peak_bytes: Bytes Now, "Greatest demand for pages within the hot window.";
        cached_bytes: Bytes Now, "Free blocks in the caches of CPUs or threads and in the transfer stacks.";
        cached_blocks: Count Now, "Number of those blocks.";
        large_live_bytes: Bytes Now, "Pages of live blocks that no cache holds: those above 1 MiB but of exactly 2 MiB.";
        large_live_blocks: Count Now, "Number of those blocks.";
        slabs: Count Now, "Slabs, each a run of pages with blocks of one size class.";
        rseq_aborts: Count Total, "Restartable sequences that the kernel cut short and that ran again.";
        purge_calls: Count Total, "System calls that gave pages back.";
        purge_us: Microseconds Total, "Time that they took.";
        purge_failures: Count Total, "Those that the kernel refused.";
        purged_bytes: Bytes Total, "Pages given back to the kernel.";
        regretted_bytes: Bytes Total, "Pages asked for again within a minute of their last use although they had been purged meanwhile.";
        pressure_bytes: Bytes Total, "Pages given back because of a limit or of pressure in the cgroup.";
        pressure: Count Now, "Pressure at the last look: 0 none, 1 what is cold has to go, 2 everything free has to go.";
        window_ms: Milliseconds Now, "The hot window in force: the option's, widened by regret to at most a minute.";
        huge_bytes: Bytes Now, "Huge pages that thermalloc has made and that stand. What the kernel makes by itself, or by `thp:always`, is not among them.";
        huge_splits: Count Total, "Huge pages of which only a part was given back.";
        collapsed_bytes: Bytes Total, "Memory made huge pages of.";
        collapse_failures: Count Total, "Refusals of that by the kernel: pinned or locked pages, or no free huge page.";
        collapse_us: Microseconds Total, "Time that it took; at most a third of a CPU's.";
        hugetlb_bytes: Bytes Now, "Memory from the kernel's reserved huge pages.";
        prof_blocks: Count Total, "Blocks that the profiler recorded.";
        prof_live_blocks: Count Now, "Those that are live.";
        prof_missed: Count Total, "Blocks, stacks and names that it chose and could not record.";
    }
    derived {
        huge_percent: Percent Now = |c| (c.huge_bytes * 100).checked_div(sum(&[c.active_bytes, c.dirty_bytes])).unwrap_or(0), "Coverage: huge_bytes of the active and the dirty bytes.";
        resident_bytes: Bytes Now = |c| sum(&[c.active_bytes, c.dirty_bytes, c.muzzy_bytes, c.metadata_bytes]), "Estimate of the memory in use: active, dirty, muzzy and metadata. Too high by pages of live blocks that the program never touched.";
    }
}

fn sum(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |total, part| total.saturating_add(*part))
}

/// Reads every figure.
#[must_use]
pub fn snapshot() -> Stats {
    Stats::read(&super::counters())
}

/// The statistic of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_read_their_fields() {
        let stats = Stats::read(&Counters {
            active_bytes: 4,
            dirty_bytes: 3,
            metadata_bytes: 1,
            purge_calls: 77,
            ..Counters::default()
        });
        assert_eq!(stats.purge_calls, 77);
        assert_eq!(find("purge_calls").unwrap().get(&stats), 77);
        assert_eq!(find("resident_bytes").unwrap().get(&stats), 8);
    }

    #[test]
    fn an_estimate_of_nonsense_is_no_overflow() {
        let counters = Counters { active_bytes: u64::MAX, dirty_bytes: 1, ..Counters::default() };
        assert_eq!(Stats::read(&counters).resident_bytes, u64::MAX);
    }

    #[test]
    fn names_are_unique_and_say_their_unit() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name), "{}", row.name);
            assert_eq!(row.name.ends_with("_bytes"), row.unit == Unit::Bytes, "{}", row.name);
            assert_eq!(row.name.ends_with("_ms"), row.unit == Unit::Milliseconds, "{}", row.name);
            assert_eq!(row.name.ends_with("_us"), row.unit == Unit::Microseconds, "{}", row.name);
            assert_eq!(row.name.ends_with("_percent"), row.unit == Unit::Percent, "{}", row.name);
            assert_eq!(row.c_name.to_str(), Ok(row.name));
            assert!(row.doc.ends_with('.'), "{}", row.name);
        }
    }
}
