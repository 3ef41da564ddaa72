//! Replays a trace under a policy: the program of the trace, the policy's background thread and the
//! one who looks on take turns on one clock.

use std::collections::HashMap;
use std::sync::Arc;

use crate::machine::{Counts, Machine};
use crate::pages_for;
use crate::policy::{Kind, Place, Policy, Settings};
use crate::trace::{Event, Trace, What};

/// What was seen at one moment, pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// When, microseconds.
    pub at_us: u64,
    /// Resident pages.
    pub resident: u64,
    /// Faults so far.
    pub faults: u64,
    /// Pages of live blocks, as far as they were touched.
    pub live: u64,
}

/// What a replay came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The policy's name.
    pub policy: &'static str,
    /// The machine's counts at the end.
    pub counts: Counts,
    /// Faults in the second half of the trace.
    pub late_faults: u64,
    /// Resident pages times microseconds.
    pub page_us: u128,
    /// Allocations that found no pages.
    pub failures: u64,
    /// What else the policy says.
    pub note: Option<String>,
    /// One for each interval, from the start to the end.
    pub samples: Vec<Sample>,
}

impl Outcome {
    /// Faults from one time to another, which are multiples of the interval of samples.
    #[must_use]
    pub fn faults_between(&self, from_us: u64, to_us: u64) -> u64 {
        self.at(to_us).faults - self.at(from_us).faults
    }

    /// The last sample at or before a time.
    #[must_use]
    pub fn at(&self, at_us: u64) -> Sample {
        let after = self.samples.partition_point(|sample| sample.at_us <= at_us);
        self.samples[..after].last().copied().unwrap_or_default()
    }
}

/// Replays `trace`, with a sample each `interval_us`.
#[must_use]
pub fn replay(trace: &Trace, kind: Kind, settings: Settings, interval_us: u64) -> Outcome {
    let machine = Arc::new(Machine::default());
    let mut sim = Sim {
        policy: kind.start(&machine, settings),
        machine,
        blocks: HashMap::new(),
        live: 0,
        wake_us: None,
        sample_us: 0,
        interval_us: interval_us.max(1),
        half_us: trace.end_us / 2,
        half_faults: None,
        page_us: 0,
        failures: 0,
        samples: Vec::new(),
    };
    for event in &trace.events {
        sim.run_until(event.at_us);
        sim.event(event);
    }
    sim.run_until(trace.end_us);
    sim.outcome(kind)
}

struct Block {
    place: Place,
    /// Its length as the program asked for it, and how much of that is touched.
    pages: usize,
    touched: usize,
}

struct Sim {
    policy: Box<dyn Policy>,
    machine: Arc<Machine>,
    blocks: HashMap<u64, Block>,
    live: u64,
    /// When the background thread wakes.
    wake_us: Option<u64>,
    sample_us: u64,
    interval_us: u64,
    half_us: u64,
    half_faults: Option<u64>,
    page_us: u128,
    failures: u64,
    samples: Vec<Sample>,
}

impl Sim {
    /// Lets the time pass, with what is due meanwhile; the background thread goes before the program.
    fn run_until(&mut self, until_us: u64) {
        loop {
            if self.wake_us.is_none() && self.policy.wants_to_wake() {
                self.wake_us = Some(self.machine.now_us());
            }
            let wake_us = self.wake_us.unwrap_or(u64::MAX);
            let next_us = wake_us.min(self.sample_us).min(until_us).max(self.machine.now_us());
            self.pass(next_us);
            if wake_us <= next_us {
                self.wake_us = self.policy.wake().map(|rest_us| next_us + rest_us);
            } else if self.sample_us <= next_us {
                self.samples.push(self.sample());
                self.sample_us += self.interval_us;
            } else {
                return;
            }
        }
    }

    fn pass(&mut self, to_us: u64) {
        let counts = self.machine.counts();
        if to_us > self.half_us {
            self.half_faults.get_or_insert(counts.faults);
        }
        self.page_us += u128::from(counts.resident) * u128::from(to_us - self.machine.now_us());
        self.machine.set_now_us(to_us);
    }

    fn sample(&self) -> Sample {
        let counts = self.machine.counts();
        Sample {
            at_us: self.machine.now_us(),
            resident: counts.resident,
            faults: counts.faults,
            live: self.live,
        }
    }

    fn event(&mut self, event: &Event) {
        match event.what {
            What::Alloc { bytes, percent } => {
                let pages = pages_for(bytes);
                let touched = (pages * usize::from(percent)).div_ceil(100);
                self.alloc(event.id, pages, touched);
            }
            What::Free => {
                if let Some(block) = self.blocks.remove(&event.id) {
                    self.live -= block.touched as u64;
                    self.policy.free(block.place);
                }
            }
            What::Resize { bytes } => self.resize(event.id, pages_for(bytes)),
        }
    }

    fn alloc(&mut self, id: u64, pages: usize, touched: usize) {
        let Some(place) = self.policy.alloc(pages) else {
            self.failures += 1;
            return;
        };
        self.machine.touch(place.page, touched);
        self.live += touched as u64;
        self.blocks.insert(id, Block { place, pages, touched });
    }

    /// A block that grows is touched to its end where it was touched to its end before.
    fn resize(&mut self, id: u64, pages: usize) {
        let Some(block) = self.blocks.remove(&id) else { return };
        let touched = if block.touched == block.pages { pages } else { block.touched.min(pages) };
        self.live -= block.touched as u64;
        if let Some(place) = self.policy.resize(block.place, pages) {
            self.machine.touch(place.page, touched);
            self.live += touched as u64;
            self.blocks.insert(id, Block { place, pages, touched });
            return;
        }
        self.alloc(id, pages, touched);
        self.policy.free(block.place);
    }

    fn outcome(mut self, kind: Kind) -> Outcome {
        if self.samples.last().is_none_or(|last| last.at_us < self.machine.now_us()) {
            self.samples.push(self.sample());
        }
        let counts = self.machine.counts();
        Outcome {
            policy: kind.name(),
            counts,
            late_faults: counts.faults - self.half_faults.unwrap_or(counts.faults),
            page_us: self.page_us,
            failures: self.failures,
            note: self.policy.note(),
            samples: self.samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_is_what_the_trace_does() {
        let mut trace = Trace { end_us: 2_000_000, ..Trace::default() };
        trace.alloc(0, 1, 100 << 12);
        trace.alloc(500_000, 2, 50 << 12);
        trace.free(1_000_000, 1);
        trace.alloc(1_500_000, 3, 100 << 12);
        trace.events.push(Event {
            at_us: 1_600_000,
            id: 3,
            what: What::Resize { bytes: 120 << 12 },
        });
        let outcome = replay(&trace, Kind::Never, Settings::default(), 250_000);
        assert_eq!(outcome.samples.len(), 9);
        let seen = |ms: u64| {
            let sample = outcome.at(ms * 1000);
            (sample.live, sample.resident, sample.faults)
        };
        assert_eq!(seen(250), (100, 100, 100));
        assert_eq!(seen(750), (150, 150, 150));
        assert_eq!(seen(1250), (50, 150, 150));
        assert_eq!(seen(2000), (170, 270, 270), "moved to a new place, as its neighbour is live");
        assert_eq!((outcome.late_faults, outcome.counts.purge_calls), (120, 0));
        assert_eq!(outcome.faults_between(1_000_000, 2_000_000), 120);
        let page_seconds = outcome.page_us as f64 / 1e6;
        assert!(
            (page_seconds - (50.0 + 75.0 + 75.0 + 15.0 + 108.0)).abs() < 0.01,
            "{page_seconds}"
        );
    }

    #[test]
    fn a_share_is_touched() {
        let mut trace = Trace { end_us: 1000, ..Trace::default() };
        trace.events.push(Event {
            at_us: 0,
            id: 1,
            what: What::Alloc { bytes: 200 << 12, percent: 25 },
        });
        let outcome = replay(&trace, Kind::Never, Settings::default(), 1000);
        assert_eq!((outcome.counts.faults, outcome.counts.resident), (50, 50));
    }
}
