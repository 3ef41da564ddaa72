//! Outcomes as text: a table for people, and resident memory over time as CSV.

use std::io::{self, Write};

use crate::mib;
use crate::sim::Outcome;

/// Writes a line for each outcome.
///
/// # Errors
/// Where writing fails.
pub fn write(outcomes: &[Outcome], mut to: impl Write) -> io::Result<()> {
    writeln!(
        to,
        "{:<12} {:>10} {:>10} {:>11} {:>8} {:>9} {:>9} {:>12}",
        "policy", "faults", "2nd half", "purged MiB", "purges", "peak MiB", "end MiB", "MiB x s"
    )?;
    for outcome in outcomes {
        let counts = outcome.counts;
        writeln!(
            to,
            "{:<12} {:>10} {:>10} {:>11.1} {:>8} {:>9.1} {:>9.1} {:>12.0}",
            outcome.policy,
            counts.faults,
            outcome.late_faults,
            mib(counts.purged),
            counts.purge_calls,
            mib(counts.peak),
            mib(counts.resident),
            mib_seconds(outcome)
        )?;
        if outcome.failures > 0 {
            writeln!(to, "{:<12} {} allocations failed", "", outcome.failures)?;
        }
        if let Some(note) = &outcome.note {
            writeln!(to, "{:<12} {note}", "")?;
        }
    }
    Ok(())
}

/// Resident MiB times seconds.
#[must_use]
#[allow(clippy::cast_precision_loss)] // a few digits are shown
pub fn mib_seconds(outcome: &Outcome) -> f64 {
    outcome.page_us as f64 / 1e6 / 256.0
}

/// Writes the samples: the time, live memory, and for each policy what is resident and its faults so
/// far.
///
/// # Errors
/// Where writing fails.
pub fn write_csv(outcomes: &[Outcome], mut to: impl Write) -> io::Result<()> {
    write!(to, "ms,live_bytes")?;
    for outcome in outcomes {
        write!(to, ",{0}_resident_bytes,{0}_faults", outcome.policy)?;
    }
    writeln!(to)?;
    let Some(first) = outcomes.first() else { return Ok(()) };
    for (i, sample) in first.samples.iter().enumerate() {
        write!(to, "{},{}", sample.at_us / 1000, sample.live * 4096)?;
        for outcome in outcomes {
            let sample = outcome.samples[i];
            write!(to, ",{},{}", sample.resident * 4096, sample.faults)?;
        }
        writeln!(to)?;
    }
    Ok(())
}
