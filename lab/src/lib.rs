//! The policy lab: replays an allocation trace under a purging policy, with a simulated kernel and
//! clock, and says what it costs in page faults and in resident memory over time.
//!
//! `trace` is the input, `generate` makes some, `policy` has one file a policy, `sim` replays, and
//! `table` and `picture` show what came of it. The policy `thermalloc` is the page heap as shipped;
//! the others are models written from what their sources and manuals say.
//!
//! Invariant: a result depends on trace and settings alone; nothing reads a real clock.

pub mod generate;
pub mod machine;
pub mod picture;
pub mod policy;
pub mod sim;
mod spans;
pub mod table;
pub mod trace;

/// The page of the simulated machine, bytes.
pub const PAGE: usize = 4096;

/// Pages that hold `bytes`, at least one.
#[must_use]
pub fn pages_for(bytes: usize) -> usize {
    bytes.max(1).div_ceil(PAGE)
}

/// Pages as MiB, for people.
#[must_use]
#[allow(clippy::cast_precision_loss)] // three digits are shown
pub fn mib(pages: u64) -> f64 {
    pages as f64 * PAGE as f64 / f64::from(1 << 20)
}
