//! Traces of made-up programs. Each depends on its seed alone.

use crate::PAGE;
use crate::trace::{Event, Trace, What};

const MS: u64 = 1000;
const SECOND: u64 = 1000 * MS;
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// How often a program does a step, microseconds.
const STEP_US: usize = 100_000;
/// When the program of [`ramp`] drops what it has grown to, and what it keeps from then on.
pub const RAMP_DROP_US: u64 = 10 * SECOND;
/// Live at most after the drop, bytes.
pub const RAMP_REST_BYTES: usize = 200 * MIB;
/// When the program of [`idle`] stops.
pub const IDLE_FROM_US: u64 = 20 * SECOND;
/// What it keeps, bytes.
pub const IDLE_REST_BYTES: usize = 16 * MIB;

/// Random numbers (splitmix64): the same for the same seed everywhere and always.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number from `low` to `high` - 1.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    /// A length between the two whose logarithm is evenly spread, whole pages.
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
    fn bytes(&mut self, low: usize, high: usize) -> usize {
        let share = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let bytes = low as f64 * (high as f64 / low as f64).powf(share);
        (bytes as usize).next_multiple_of(PAGE)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, usize::try_from(self.within(0, i as u64 + 1)).unwrap_or(0));
        }
    }
}

/// A step of a program: tensors that live for some later tensors' time, like activations.
struct Batch(Vec<Tensor>);

struct Tensor {
    bytes: usize,
    from_us: u64,
    to_us: u64,
}

impl Batch {
    /// Tensors of `low` to `high` bytes, `total` bytes in all, within 60 ms.
    fn new(random: &mut Random, total: usize, (low, high): (usize, usize)) -> Self {
        let (mut tensors, mut sum) = (Vec::new(), 0);
        while sum < total {
            let bytes = random.bytes(low, high).min((total - sum).next_multiple_of(PAGE));
            sum += bytes;
            tensors.push(Tensor { bytes, from_us: 0, to_us: 0 });
        }
        let apart = 40 * MS / tensors.len() as u64;
        for (tensor, i) in tensors.iter_mut().zip(0..) {
            tensor.from_us = i * apart;
            tensor.to_us = tensor.from_us + random.within(apart + 1, 8 * apart + 20 * MS);
        }
        Self(tensors)
    }

    fn run(&self, trace: &mut Trace, ids: &mut u64, at_us: u64) {
        self.run_part(trace, ids, at_us, 100);
    }

    /// With tensors of `percent` of their length.
    fn run_part(&self, trace: &mut Trace, ids: &mut u64, at_us: u64, percent: usize) {
        for tensor in &self.0 {
            *ids += 1;
            let bytes = (tensor.bytes * percent / 100).next_multiple_of(PAGE);
            trace.alloc(at_us + tensor.from_us, *ids, bytes);
            trace.free(at_us + tensor.to_us, *ids);
        }
    }
}

fn finished(mut trace: Trace, end_us: u64) -> Trace {
    trace.sort();
    trace.end_us = end_us;
    trace
}

/// A loop of mixed tensor sizes: the same step every 100 ms, for a minute.
#[must_use]
pub fn steady(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let batch = Batch::new(&mut random, 256 * MIB, (16 * KIB, 24 * MIB));
    let (mut trace, mut ids, end_us) = (Trace::default(), 0, 60 * SECOND);
    for at_us in (0..end_us).step_by(STEP_US) {
        batch.run(&mut trace, &mut ids, at_us);
    }
    finished(trace, end_us)
}

/// As [`steady`], with another batch size from 30 to 100 % in each step.
#[must_use]
pub fn varied(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let batch = Batch::new(&mut random, 256 * MIB, (16 * KIB, 24 * MIB));
    let (mut trace, mut ids, end_us) = (Trace::default(), 0, 60 * SECOND);
    for at_us in (0..end_us).step_by(STEP_US) {
        let percent = usize::try_from(random.within(30, 101)).unwrap_or(100);
        batch.run_part(&mut trace, &mut ids, at_us, percent);
    }
    finished(trace, end_us)
}

/// 400 MiB for 300 ms every `period_us`; ten periods, and half a minute at least. Between them the
/// program is active (it resizes a block to the length that it has), and asks for no pages.
#[must_use]
pub fn periodic(seed: u64, period_us: u64) -> Trace {
    let (mut trace, mut ids, end_us) = periods(seed, period_us);
    ids += 1;
    trace.alloc(0, ids, PAGE);
    for at_us in (0..end_us).step_by(STEP_US) {
        trace.events.push(Event { at_us, id: ids, what: What::Resize { bytes: PAGE } });
    }
    finished(trace, end_us)
}

/// As [`periodic`], with one block of 256 KiB at a time between, for 20 of every 100 ms.
#[must_use]
pub fn mixed(seed: u64, period_us: u64) -> Trace {
    let (mut trace, mut ids, end_us) = periods(seed, period_us);
    for at_us in (0..end_us).step_by(STEP_US) {
        ids += 1;
        trace.alloc(at_us + 50 * MS, ids, 256 * KIB);
        trace.free(at_us + 70 * MS, ids);
    }
    finished(trace, end_us)
}

/// The blocks of every period, the last id, and the end.
fn periods(seed: u64, period_us: u64) -> (Trace, u64, u64) {
    let mut random = Random::new(seed);
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 400 * MIB {
        sizes.push(random.bytes(64 * KIB, 32 * MIB));
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    random.shuffle(&mut order);
    let (mut trace, mut ids) = (Trace::default(), 0);
    let end_us = (10 * period_us).max((30 * SECOND).next_multiple_of(period_us));
    for at_us in (0..end_us).step_by(usize::try_from(period_us).unwrap_or(usize::MAX)) {
        for (size, i) in sizes.iter().zip(0..) {
            trace.alloc(at_us + i * MS / 4, ids + i, *size);
        }
        for (nth, i) in order.iter().zip(0..) {
            trace.free(at_us + 250 * MS + i * MS / 4, ids + *nth as u64);
        }
        ids += sizes.len() as u64;
    }
    (trace, ids, end_us)
}

/// Two minutes: 40 MiB for good, a small step every 100 ms, and bursts of 50 to 800 MiB that last up
/// to 2 s, half a second to 20 s apart.
#[must_use]
pub fn bursty(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let (mut trace, mut ids, end_us) = (Trace::default(), 0, 120 * SECOND);
    for _ in 0..20 {
        ids += 1;
        trace.alloc(0, ids, 2 * MIB);
    }
    let batch = Batch::new(&mut random, 20 * MIB, (16 * KIB, 2 * MIB));
    for at_us in (0..end_us).step_by(STEP_US) {
        batch.run(&mut trace, &mut ids, at_us);
    }
    let mut at_us = 0;
    loop {
        at_us += random.within(SECOND / 2, 20 * SECOND);
        let (total, lasts) =
            (random.bytes(50 * MIB, 800 * MIB), random.within(SECOND / 5, 2 * SECOND));
        if at_us + lasts >= end_us {
            return finished(trace, end_us);
        }
        let mut sum = 0;
        while sum < total {
            let bytes = random.bytes(64 * KIB, 32 * MIB);
            sum += bytes;
            ids += 1;
            trace.alloc(at_us + random.within(0, 100 * MS), ids, bytes);
            trace.free(at_us + lasts + random.within(100 * MS, 200 * MS), ids);
        }
        at_us += lasts;
    }
}

/// Grows to 2 GiB within 10 s, with a step every 100 ms; drops all but some of that, here and there,
/// and goes on with the same steps, 200 MiB at most, for half a minute.
#[must_use]
pub fn ramp(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let (mut trace, mut ids, end_us) = (Trace::default(), 0, 40 * SECOND);
    let batch = Batch::new(&mut random, 120 * MIB, (16 * KIB, 8 * MIB));
    for at_us in (0..end_us).step_by(STEP_US) {
        batch.run(&mut trace, &mut ids, at_us);
    }
    let mut blocks = Vec::new();
    let (mut sum, most) = (0, 2048 * MIB - 120 * MIB);
    while sum < most {
        let bytes = random.bytes(64 * KIB, 8 * MIB);
        let at_us = sum as u64 * (RAMP_DROP_US / 2) / most as u64 + RAMP_DROP_US / 4;
        sum += bytes;
        ids += 1;
        trace.alloc(at_us, ids, bytes);
        blocks.push((ids, bytes));
    }
    random.shuffle(&mut blocks);
    let mut kept = 0;
    for (id, bytes) in blocks {
        if kept + bytes <= RAMP_REST_BYTES - 120 * MIB {
            kept += bytes;
        } else {
            trace.free(RAMP_DROP_US, id);
        }
    }
    finished(trace, end_us)
}

/// Works for 20 s as [`steady`] does, keeps 16 MiB, and does nothing for another 20 s.
#[must_use]
pub fn idle(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let batch = Batch::new(&mut random, 256 * MIB, (16 * KIB, 24 * MIB));
    let (mut trace, mut ids) = (Trace::default(), 0);
    for _ in 0..8 {
        ids += 1;
        trace.alloc(0, ids, IDLE_REST_BYTES / 8);
    }
    for at_us in (0..IDLE_FROM_US).step_by(STEP_US) {
        batch.run(&mut trace, &mut ids, at_us);
    }
    finished(trace, 2 * IDLE_FROM_US)
}

/// The trace of this name: `steady`, `varied`, `periodic:MILLISECONDS`, `mixed:MILLISECONDS`, `bursty`, `ramp` or `idle`.
#[must_use]
pub fn by_name(name: &str, seed: u64) -> Option<Trace> {
    Some(match name {
        "steady" => steady(seed),
        "varied" => varied(seed),
        "bursty" => bursty(seed),
        "ramp" => ramp(seed),
        "idle" => idle(seed),
        _ => {
            let (kind, period_ms) = name.split_once(':')?;
            let period_us =
                period_ms.parse::<u64>().ok().filter(|ms| (1000..=3_600_000).contains(ms))? * MS;
            match kind {
                "periodic" => periodic(seed, period_us),
                "mixed" => mixed(seed, period_us),
                _ => return None,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_one_and_depends_on_its_seed_alone() {
        for name in ["steady", "varied", "periodic:1000", "mixed:12500", "bursty", "ramp", "idle"] {
            let trace = by_name(name, 1).unwrap();
            assert_eq!(trace, by_name(name, 1).unwrap(), "{name}");
            assert_ne!(trace, by_name(name, 2).unwrap(), "{name}");
            let mut text = Vec::new();
            trace.write(&mut text).unwrap();
            assert_eq!(Trace::read(text.as_slice()).unwrap(), trace, "{name}");
            assert!(trace.events.last().unwrap().at_us <= trace.end_us, "{name}");
        }
        for bad in ["periodic", "periodic:", "periodic:5", "steady:1", ""] {
            assert!(by_name(bad, 1).is_none(), "{bad}");
        }
    }

    #[test]
    fn they_are_of_the_size_that_they_say() {
        let s = ramp(1).summary();
        assert!((1900 * MIB as u64..2100 * MIB as u64).contains(&s.peak_bytes), "{s:?}");
        assert!(s.left.1 <= 80 * MIB as u64 && s.left.1 > 70 * MIB as u64, "{s:?}");
        assert_eq!(idle(1).summary().left, (8, IDLE_REST_BYTES as u64));
        let s = periodic(1, 4 * SECOND).summary();
        assert!((400 * MIB as u64..440 * MIB as u64).contains(&s.peak_bytes), "{s:?}");
    }
}
