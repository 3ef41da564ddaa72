//! What a person may set and what the allocator says of itself: one option table, one table of
//! statistics, and everything that is derived from them (parser, reports, host table, manual).
//!
//! Invariants: nothing here allocates, locks or calls into libc; the layers below read options
//! and are read for statistics, they never call this module for anything else.

// Until start-up calls `conf::load`, only the tests do.
#[allow(dead_code)]
pub(crate) mod conf;
pub mod host;
pub mod options;
pub mod report;
pub mod stats;
mod text;

#[cfg(test)]
mod docs;

/// The figures of the layers below, at this moment: the one source of every statistic.
///
/// Each layer that counts something writes its field here.
pub(crate) fn counters() -> stats::Counters {
    stats::Counters::default()
}

/// Gives every free page back to the kernel, hot or not: an explicit request.
pub(crate) fn purge() -> usize {
    crate::api::trim()
}
