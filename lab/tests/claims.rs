//! What the policies do on made-up programs: thermalloc's promises, and what sets the others apart.

use thermalloc_lab::generate::{
    self, IDLE_FROM_US, IDLE_REST_BYTES, RAMP_DROP_US, RAMP_REST_BYTES,
};
use thermalloc_lab::policy::{ALL, Kind, Settings};
use thermalloc_lab::sim::{self, Outcome};
use thermalloc_lab::trace::Trace;

const SECOND: u64 = 1_000_000;
const MIB: u64 = 256;
/// A multiple of it is the end of every period below.
const INTERVAL_US: u64 = 50_000;

fn replay(trace: &Trace, kind: Kind) -> Outcome {
    let outcome = sim::replay(trace, kind, Settings::default(), INTERVAL_US);
    assert_eq!(outcome.failures, 0, "{}", outcome.policy);
    outcome
}

/// Faults of each period; the first begins at 0.
fn faults(outcome: &Outcome, period_us: u64, end_us: u64) -> Vec<u64> {
    // Half a period on, so that none begins at a sample.
    let at = |k: u64| outcome.at((k * period_us).saturating_sub(period_us / 2)).faults;
    (1..=end_us / period_us).map(|k| at(k) - at(k - 1)).collect()
}

#[test]
fn the_same_trace_has_the_same_figures() {
    let trace = generate::ramp(3);
    for kind in ALL {
        assert_eq!(replay(&trace, kind), replay(&trace, kind), "{}", kind.name());
    }
}

#[test]
fn a_steady_program_has_no_fault_after_its_second_step() {
    let trace = generate::steady(1);
    let outcome = replay(&trace, Kind::Thermalloc);
    assert_eq!(outcome.faults_between(SECOND / 5, trace.end_us), 0);
    assert_eq!(outcome.counts.purged, 0);
}

#[test]
fn a_period_within_the_window_has_no_fault_after_the_second() {
    for seed in 1..=3 {
        for period_us in [SECOND, 4 * SECOND] {
            for trace in [generate::periodic(seed, period_us), generate::mixed(seed, period_us)] {
                let faults = faults(&replay(&trace, Kind::Thermalloc), period_us, trace.end_us);
                assert!(faults[2..].iter().all(|&n| n == 0), "{period_us} us: {faults:?}");
            }
        }
    }
}

#[test]
fn a_period_of_two_and_a_half_windows_is_learned() {
    let period_us = 12_500_000;
    for seed in 1..=3 {
        let trace = generate::periodic(seed, period_us);
        let outcome = replay(&trace, Kind::Thermalloc);
        let faults = faults(&outcome, period_us, trace.end_us);
        assert!(faults[1] > 100 * MIB, "at first they go: {faults:?}");
        assert!(faults[3..].iter().all(|&n| n == 0), "then they stay: {faults:?}");
    }
}

#[test]
fn what_a_ramp_leaves_behind_goes_within_window_and_decay() {
    let settings = Settings::default();
    let within_us = (settings.window_ms + settings.decay_ms.expect("a decay")) * 1000;
    for seed in 1..=3 {
        let outcome = replay(&generate::ramp(seed), Kind::Thermalloc);
        // A slack of a step of the decay, and of what the window's ring is coarse by.
        let after = outcome.at(RAMP_DROP_US + within_us + SECOND);
        let most = RAMP_REST_BYTES as u64 / 4096 * 110 / 100 + 8 * MIB;
        assert!(after.resident <= most, "{} MiB with seed {seed}", after.resident / MIB);
        let end = outcome.counts.resident;
        assert!(end <= most, "{} MiB at the end with seed {seed}", end / MIB);
    }
}

#[test]
fn an_idle_program_gives_all_back() {
    let settings = Settings::default();
    let within_us = (settings.window_ms + settings.decay_ms.expect("a decay")) * 1000;
    let outcome = replay(&generate::idle(1), Kind::Thermalloc);
    // The last step ends somewhat later than the time of its start.
    let after = outcome.at(IDLE_FROM_US + within_us + SECOND / 2);
    assert_eq!(after.resident, IDLE_REST_BYTES as u64 / 4096);
}

/// Small blocks are carved out of a large free piece, and joined with it again when they are freed:
/// that must not make all of it young, or nothing of it is ever given back.
#[test]
fn a_cold_piece_goes_although_small_blocks_come_and_go_in_it() {
    let period_us = 30 * SECOND;
    let outcome = replay(&generate::mixed(1, period_us), Kind::Thermalloc);
    let before_the_next = outcome.at(period_us - INTERVAL_US);
    assert!(before_the_next.resident < 20 * MIB, "{} MiB", before_the_next.resident / MIB);
}

#[test]
fn jemalloc_purges_large_blocks_when_they_are_freed() {
    let mut trace = Trace { end_us: 2 * SECOND, ..Trace::default() };
    for (i, mib) in [(0, 8), (1, 4)] {
        trace.alloc(i * SECOND, i, mib << 20);
        trace.free(i * SECOND + 1000, i);
    }
    let outcome = replay(&trace, Kind::Jemalloc);
    assert_eq!((outcome.counts.purged, outcome.counts.resident), (8 * MIB, 4 * MIB));
    let outcome = replay(&trace, Kind::JemallocBackground);
    assert_eq!(outcome.counts.purged, 0, "with its background thread it keeps them for the decay");
}

#[test]
fn glibc_unmaps_what_is_above_its_threshold() {
    let mut trace = Trace { end_us: 20_000, ..Trace::default() };
    for i in 0..10 {
        trace.alloc(i * 1000, i, 40 << 20);
        trace.free(i * 1000 + 500, i);
    }
    let outcome = replay(&trace, Kind::Glibc);
    assert_eq!((outcome.counts.purge_calls, outcome.counts.faults), (10, 400 * MIB));
    assert_eq!(outcome.counts.resident, 0);
}

#[test]
fn tcmalloc_keeps_almost_all_and_never_keeps_all() {
    let trace = generate::idle(1);
    let (tcmalloc, never) = (replay(&trace, Kind::Tcmalloc), replay(&trace, Kind::Never));
    assert!(tcmalloc.counts.resident > never.counts.resident * 9 / 10);
    assert_eq!((never.counts.purged, never.counts.purge_calls), (0, 0));
    assert_eq!(never.counts.resident, never.counts.peak);
}

#[test]
fn who_never_purges_has_the_fewest_faults() {
    for name in ["periodic:4000", "periodic:12500", "mixed:4000", "bursty", "ramp", "idle"] {
        let trace = generate::by_name(name, 1).expect("a known name");
        let never = replay(&trace, Kind::Never).counts.faults;
        for kind in ALL {
            let faults = replay(&trace, kind).counts.faults;
            // Where blocks are put differs: a heap that grows less may save a tenth.
            assert!(faults + faults / 10 >= never, "{name}, {}: {faults} < {never}", kind.name());
        }
    }
}

#[test]
fn settings_have_their_effect() {
    let trace = generate::periodic(1, 4 * SECOND);
    let run = |settings| sim::replay(&trace, Kind::Thermalloc, settings, INTERVAL_US).counts;
    let never = run(Settings { decay_ms: None, ..Settings::default() });
    assert_eq!(never.purged, 0);
    let at_once = run(Settings { window_ms: 0, decay_ms: Some(0) });
    assert!(at_once.faults > 5 * never.faults, "{} and {}", at_once.faults, never.faults);
}
