//! Which blocks are recorded: a Poisson process over the bytes that a thread allocates.
//!
//! Invariants: a block of k bytes is chosen with probability 1 - exp(-k/T), whatever was allocated
//! before it, since the distance to the next sample has no memory and may be drawn anew at any block;
//! the weight is the inverse of that probability, fixed when the block is chosen.
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A mean distance between samples, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Period(pub(crate) u64);

impl Period {
    /// No block is chosen.
    pub(crate) const OFF: Self = Self(0);
    /// Every block is.
    pub(crate) const ALL: Self = Self(1);

    /// How many blocks of `size` bytes one that was chosen stands for.
    pub(crate) fn weight(self, size: usize) -> f64 {
        if self.0 <= 1 || size == 0 {
            return 1.0;
        }
        #[allow(clippy::cast_precision_loss, reason = "a ratio of sizes")]
        let hit = one_minus_exp(size as f64 / self.0 as f64);
        1.0 / hit
    }

    /// The period by which a block of `size` bytes is chosen with the probability `chance`, which is below 1.
    fn with_chance(chance: f64, size: usize) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "a size")]
        let period = size as f64 / -ln((1.0 - chance).clamp(f64::MIN_POSITIVE, 1.0 - f64::EPSILON));
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "casts saturate"
        )]
        Self((period as u64).clamp(1, 1 << 62))
    }

    /// Bytes to the next sample, from a random word.
    pub(crate) fn draw(self, random: u64) -> i64 {
        #[allow(clippy::cast_precision_loss, reason = "53 bits of the word are used")]
        let uniform = ((random >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64);
        #[allow(clippy::cast_precision_loss, reason = "a mean")]
        let distance = -ln(uniform) * self.0 as f64;
        #[allow(clippy::cast_possible_truncation, reason = "casts saturate; the bound is below")]
        let distance = distance as i64;
        distance.min(1 << 62)
    }
}

/// The state of a thread's random numbers after `state` (splitmix64), and the number.
pub(crate) fn next_random(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = state;
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (state, z ^ z >> 31)
}

/// A thread's way to its next sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Bytes to the next sample.
    pub(crate) left: i64,
    /// The period that they were drawn with.
    pub(crate) period: Period,
    pub(crate) random: u64,
}

impl Way {
    /// Goes on by `since` bytes, of which the last `size` are the block at hand. The period by which that
    /// block is the sample, `OFF` if it isn't. From then on `period` counts.
    ///
    /// What has passed was on the old period's way, so that decides of it: a block that is there because the
    /// old distance ends at it is no fair draw for another period.
    pub(crate) fn advance(&mut self, period: Period, since: i64, size: usize) -> Period {
        if matches!(period, Period::OFF | Period::ALL) {
            self.period = period;
            return period;
        }
        let old = self.period;
        if matches!(old, Period::OFF | Period::ALL) {
            // Nothing was on its way; the block at hand is the first.
            self.period = period;
            self.draw();
            return self.pass(i64::try_from(size).unwrap_or(i64::MAX));
        }
        let chosen = self.pass(since);
        if period != old {
            self.period = period;
            self.draw();
        }
        chosen
    }

    fn pass(&mut self, bytes: i64) -> Period {
        self.left = self.left.saturating_sub(bytes);
        if self.left >= 0 {
            return Period::OFF;
        }
        self.draw();
        self.period
    }

    /// Bytes after which to look again; -1: at the next block, whatever its size.
    pub(crate) fn next(&self, most: i64) -> i64 {
        match self.period {
            Period::OFF => most,
            Period::ALL => -1,
            _ => self.left.min(most),
        }
    }

    /// Whether a block that has the probability of `size` bytes at `period` is chosen, on its own.
    pub(crate) fn toss(&mut self, period: Period, size: usize) -> bool {
        let (state, random) = next_random(self.random);
        self.random = state;
        period.0 <= 1 || period.draw(random) < i64::try_from(size).unwrap_or(i64::MAX)
    }

    fn draw(&mut self) {
        let (state, random) = next_random(self.random);
        self.random = state;
        self.left = self.period.draw(random);
    }
}

/// Samples that may still be taken: so many more each second, up to those of [`SAVED_S`] seconds. The fewer
/// there are, the more often a period is doubled, so that a load which lasts gets what comes in, a burst after
/// a quiet time is recorded in full, and a quiet time mends all.
///
/// Counts that are lost between threads cost a few samples of precision.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Used of the most that can be saved, thousandths of a sample.
    used: AtomicU64,
    /// When that was so, milliseconds.
    at_ms: AtomicU64,
    doublings: AtomicU32,
}

/// What is not used is saved for so long.
const SAVED_S: u64 = 4;
/// 2^20 times the period asked for, at most.
const MOST_DOUBLINGS: u32 = 20;

impl Budget {
    pub(crate) const fn new() -> Self {
        let [used, at_ms] = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { used, at_ms, doublings: AtomicU32::new(0) }
    }

    /// How often the period is doubled at `now_ms`, where `a_second` samples are allowed (0: any number).
    pub(crate) fn doublings(&self, now_ms: u64, a_second: u32) -> u32 {
        self.update(now_ms, a_second, 0).1
    }

    /// Notes a sample at `now_ms`, of which `a_second` are allowed. True: the doublings have changed.
    pub(crate) fn spend(&self, now_ms: u64, a_second: u32) -> bool {
        let (old, new) = self.update(now_ms, a_second, 1000);
        old != new
    }

    /// Uses `more` thousandths; the doublings before and after.
    fn update(&self, now_ms: u64, a_second: u32, more: u64) -> (u32, u32) {
        let old = self.doublings.load(Relaxed);
        let passed = now_ms.saturating_sub(self.at_ms.load(Relaxed));
        if passed == 0 && more == 0 && a_second > 0 {
            return (old, old);
        }
        let most = u64::from(a_second) * 1000 * SAVED_S;
        let gained = passed.saturating_mul(u64::from(a_second));
        let used = self.used.load(Relaxed).saturating_sub(gained).saturating_add(more).min(most);
        self.used.store(used, Relaxed);
        self.at_ms.store(now_ms, Relaxed);
        let new = Self::doublings_at(used, most, old);
        if new != old {
            self.doublings.store(new, Relaxed);
        }
        (old, new)
    }

    /// The first half is for bursts; in the second there are [`MOST_DOUBLINGS`] steps, each with a margin so
    /// that a load between two steps doesn't go to and fro.
    fn doublings_at(used: u64, most: u64, old: u32) -> u32 {
        let Some(halves) =
            (used.saturating_sub(most / 2) * 4 * u64::from(MOST_DOUBLINGS)).checked_div(most)
        else {
            return 0;
        };
        #[allow(clippy::cast_possible_truncation, reason = "twice the steps at most")]
        let halves = halves as u32;
        if halves / 2 > old { halves / 2 } else { old.min(halves.div_ceil(2)) }
    }
}

/// A budget for kinds of blocks of one size each: how many of each there are is counted, and each gets a period
/// for a while, so that all samples together are what the budget allows.
///
/// Where they would be more, each kind has samples by its size and by the root of its rate. That makes the sum
/// of what is live known best (Neyman 1934: samples by the deviation of a stratum) where kinds have about the
/// same number of blocks live, so that those which come fast go fast; and what is rare is known well beside what
/// comes and goes all the time.
#[derive(Debug)]
pub(crate) struct Strata<const KINDS: usize> {
    kinds: [Stratum; KINDS],
    /// The size of a kind's blocks.
    bytes: fn(usize) -> usize,
    planned_ms: AtomicU64,
    /// Samples since then.
    taken: AtomicU32,
}

#[derive(Debug)]
struct Stratum {
    /// Blocks since the last plan.
    arrived: AtomicU64,
    /// A mean of the last seconds, thousandths of a block in a second.
    rate: AtomicU64,
    /// Bytes; 0: the one asked for.
    period: AtomicU64,
}

/// Rates are means of the last seconds, so many, which is also what a burst may save up.
const RATE_MS: u64 = SAVED_S * 1000;
/// A plan holds for so long, unless a quarter of a second's samples is taken before.
const PLAN_MS: u64 = 100;

impl<const KINDS: usize> Strata<KINDS> {
    pub(crate) const fn new(bytes: fn(usize) -> usize) -> Self {
        let kinds = [const { Stratum::new() }; KINDS];
        Self { kinds, bytes, planned_ms: AtomicU64::new(0), taken: AtomicU32::new(0) }
    }

    /// The period for a block of `kind`, which is there at `now_ms`, where `asked` is asked for and `a_second`
    /// samples are allowed (0: any number).
    pub(crate) fn period(&self, kind: usize, now_ms: u64, asked: Period, a_second: u32) -> Period {
        if a_second == 0 {
            return asked;
        }
        let stratum = &self.kinds[kind];
        stratum.arrived.fetch_add(1, Relaxed);
        let planned = self.planned_ms.load(Relaxed);
        let passed = now_ms.saturating_sub(planned);
        let early = passed > 0 && self.taken.load(Relaxed) >= a_second.div_ceil(4);
        if (passed >= PLAN_MS || early)
            && self.planned_ms.compare_exchange(planned, now_ms, Relaxed, Relaxed).is_ok()
        {
            self.plan(passed, asked, a_second);
        }
        Period(stratum.period.load(Relaxed).max(asked.0))
    }

    /// Notes a sample.
    pub(crate) fn spend(&self) {
        self.taken.fetch_add(1, Relaxed);
    }

    #[cold]
    fn plan(&self, passed_ms: u64, asked: Period, a_second: u32) {
        self.taken.store(0, Relaxed);
        // Of each kind: its rate, its part of what there is to share, and how many samples it would have.
        let mut shares = [(0.0, 0.0, 0.0); KINDS];
        for (kind, (stratum, share)) in self.kinds.iter().zip(&mut shares).enumerate() {
            let rate = stratum.update(passed_ms);
            let size = (self.bytes)(kind);
            let whole = rate / asked.weight(size);
            #[allow(clippy::cast_precision_loss, reason = "sizes and rates of some digits")]
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive")]
            let part = size as f64 * ((rate * 1e6) as u64).isqrt() as f64;
            *share = (rate, part, whole);
        }
        let each = Self::level(&shares, f64::from(a_second));
        for (kind, (stratum, (rate, part, whole))) in self.kinds.iter().zip(shares).enumerate() {
            let samples = part * each;
            let period = if samples >= whole {
                0
            } else {
                Period::with_chance(samples / rate, (self.bytes)(kind)).0
            };
            stratum.period.store(period, Relaxed);
        }
    }

    /// Samples for each unit of a part, so that together they are `budget`; no kind has more than all.
    fn level(shares: &[(f64, f64, f64); KINDS], budget: f64) -> f64 {
        let mut each = f64::INFINITY;
        // Each turn takes kinds out that have all of theirs, and leaves more for the others.
        for _ in 0..KINDS {
            let is_whole = |&&(_, part, whole): &&(f64, f64, f64)| part * each >= whole;
            let whole: f64 = shares.iter().filter(is_whole).map(|share| share.2).sum();
            let parts: f64 = shares.iter().filter(|share| !is_whole(share)).map(|s| s.1).sum();
            if parts > 0.0 && whole < budget {
                let next = (budget - whole) / parts;
                if next <= each * 1.000_001 && next >= each * 0.999_999 {
                    break;
                }
                each = next;
            } else if whole > budget {
                let parts: f64 = shares.iter().map(|share| share.1).sum();
                each = budget / parts;
            } else {
                break;
            }
        }
        each
    }
}

impl Stratum {
    const fn new() -> Self {
        let [arrived, rate, period] = [const { AtomicU64::new(0) }; 3];
        Self { arrived, rate, period }
    }

    /// Its rate, blocks a second, after `passed_ms` more.
    fn update(&self, passed_ms: u64) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "a mean")]
        let [arrived, before, passed, window] =
            [self.arrived.swap(0, Relaxed), self.rate.load(Relaxed), passed_ms, RATE_MS]
                .map(|number| number as f64);
        let rate = (before * window + arrived * 1e6) / (passed + window);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive")]
        self.rate.store(rate as u64, Relaxed);
        rate / 1e3
    }
}

/// The natural logarithm of a number above 0 and at most 1, to about 13 digits.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut mantissa = f64::from_bits(bits & 0x000F_FFFF_FFFF_FFFF | 0x3FF0_0000_0000_0000);
    #[allow(clippy::cast_possible_truncation, reason = "eleven bits")]
    let mut exponent = (bits >> 52) as i32 - 1023;
    if mantissa > core::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let f = (mantissa - 1.0) / (mantissa + 1.0);
    let square = f * f;
    let series = (0..9).rev().fold(0.0, |sum, i| sum * square + 1.0 / f64::from(2 * i + 1));
    2.0 * f * series + f64::from(exponent) * core::f64::consts::LN_2
}

/// 1 - exp(-x) for an x above 0.
fn one_minus_exp(x: f64) -> f64 {
    if x < 1e-2 {
        // Terms of the series, so that a small result keeps its digits.
        return x * (1.0 - x / 2.0 * (1.0 - x / 3.0 * (1.0 - x / 4.0 * (1.0 - x / 5.0))));
    }
    if x > 40.0 {
        return 1.0;
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 58")]
    let halvings = (x / core::f64::consts::LN_2) as u32;
    let rest = x - f64::from(halvings) * core::f64::consts::LN_2;
    let exp = (1..20).rev().fold(1.0, |sum, i| 1.0 - sum * rest / f64::from(i));
    #[allow(clippy::cast_precision_loss, reason = "a power of two")]
    let scale = (1u64 << halvings) as f64;
    1.0 - exp / scale
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn logarithm_and_exponential_are_those_of_std() {
        let mut random = 1;
        for _ in 0..100_000 {
            let (state, word) = next_random(random);
            random = state;
            let x = ((word >> 11) + 1) as f64 / (1u64 << 53) as f64;
            assert!((ln(x) - x.ln()).abs() <= 1e-12 * x.ln().abs() + 1e-15, "{x}");
            for x in [x, x * 1e-6, x * 60.0] {
                let exact = -(-x).exp_m1();
                assert!((one_minus_exp(x) - exact).abs() <= 1e-11 * exact, "{x}");
            }
        }
        assert_eq!(ln(1.0), 0.0);
        assert!((ln(2f64.powi(-53)) + 53.0 * std::f64::consts::LN_2).abs() < 1e-12);
    }

    /// Sizes of a program, over and over.
    const SIZES: [usize; 6] = [16, 100, 3000, 48, 70_000, 1];

    /// Allocates `rounds` times all sizes; estimates of blocks and bytes, and their standard errors.
    fn estimate(period: Period, rounds: usize, seed: u64) -> [(f64, f64); 2] {
        let mut way = Way { left: 0, period: Period::OFF, random: seed };
        let (mut interval, mut counter) = (0i64, 0i64);
        let [mut blocks, mut bytes] = [(0.0, 0.0); 2];
        for size in SIZES.iter().cycle().take(SIZES.len() * rounds) {
            counter -= *size as i64;
            if counter >= 0 {
                continue;
            }
            if way.advance(period, interval - counter, *size) != Period::OFF {
                let weight = period.weight(*size);
                for (sum, of) in [(&mut blocks, 1.0), (&mut bytes, *size as f64)] {
                    sum.0 += weight * of;
                    sum.1 += weight * (weight - 1.0) * of * of;
                }
            }
            interval = way.next(2 << 20);
            counter = interval;
        }
        [blocks, bytes].map(|(sum, variance): (f64, f64)| (sum, variance.sqrt()))
    }

    #[test]
    fn estimates_are_within_three_standard_errors() {
        for (period, seed) in [(512 << 10, 1), (64 << 10, 2), (4096, 3), (1000, 4), (100_003, 5)] {
            let rounds = 20_000;
            let [blocks, bytes] = estimate(Period(period), rounds, seed);
            let all = (rounds * SIZES.len()) as f64;
            let sum = (rounds * SIZES.iter().sum::<usize>()) as f64;
            assert!((blocks.0 - all).abs() < 3.0 * blocks.1, "{period}: {blocks:?} of {all}");
            assert!((bytes.0 - sum).abs() < 3.0 * bytes.1, "{period}: {bytes:?} of {sum}");
            assert!(bytes.1 < 0.1 * sum, "{period}: says something");
        }
    }

    #[test]
    fn the_error_that_is_claimed_is_the_error() {
        let (rounds, tries) = (300, 400);
        let sum = (rounds * SIZES.iter().sum::<usize>()) as f64;
        let (mut within, mut mean) = (0, 0.0);
        for seed in 0..tries {
            let [_, (bytes, error)] = estimate(Period(50_000), rounds, seed << 20);
            within += u32::from((bytes - sum).abs() < error);
            mean += bytes / f64::from(u32::try_from(tries).unwrap());
        }
        // 68 % within one standard error, with a margin of about three times its own deviation.
        assert!((240..=310).contains(&within), "{within} of {tries}");
        assert!((mean / sum - 1.0).abs() < 0.01, "unbiased: {}", mean / sum);
    }

    #[test]
    fn every_block_or_none() {
        let [blocks, bytes] = estimate(Period::ALL, 10, 1);
        assert_eq!((blocks, bytes.1), ((60.0, 0.0), 0.0));
        assert_eq!(bytes.0, 10.0 * SIZES.iter().sum::<usize>() as f64);
        assert_eq!(estimate(Period::OFF, 10, 1)[0], (0.0, 0.0));
        let mut way = Way { left: 5, period: Period::ALL, random: 0 };
        assert_eq!(way.advance(Period::ALL, 0, 0), Period::ALL, "of no bytes too");
        assert_eq!(way.next(100), -1);
    }

    #[test]
    fn a_period_that_changes_all_the_time_stays_unbiased() {
        let mut way = Way { left: 0, period: Period::OFF, random: 7 };
        let (mut estimate, mut interval, mut counter) = (0.0, 0i64, 0i64);
        let blocks = 2_000_000u32;
        for i in 0..blocks {
            counter -= 1000;
            if counter >= 0 {
                continue;
            }
            // At each look another one, as with a budget at its limit.
            let period = Period([20_000, 80_000, 40_000][i as usize % 3]);
            let chosen = way.advance(period, interval - counter, 1000);
            if chosen != Period::OFF {
                estimate += chosen.weight(1000);
            }
            interval = way.next(100_000);
            counter = interval;
        }
        assert!((estimate / f64::from(blocks) - 1.0).abs() < 0.02, "{estimate}");
    }

    #[test]
    fn on_and_off() {
        let mut way = Way { left: 0, period: Period::OFF, random: 7 };
        assert_eq!(way.advance(Period::OFF, 1 << 30, 1 << 20), Period::OFF);
        let found = (0..1000).filter(|_| {
            way.advance(Period::OFF, 1 << 20, 16);
            way.advance(Period(1000), 1 << 20, 1000) != Period::OFF
        });
        // Only the block at hand counts, not what passed while it was off.
        assert!((550..=710).contains(&found.count()), "about 1 - 1/e");
    }

    #[test]
    fn a_toss_is_as_likely_as_a_sample() {
        let mut way = Way { left: 0, period: Period::OFF, random: 3 };
        let period = Period(4 << 20);
        let hits = (0..100_000).filter(|_| way.toss(period, 2 << 20)).count();
        assert!((hits as f64 * period.weight(2 << 20) / 100_000.0 - 1.0).abs() < 0.02);
        assert!(way.toss(Period::OFF, 1), "no period: all of them");
    }

    /// Goes on for some seconds with so many tosses in each; the samples taken in each.
    fn load(budget: &Budget, now_ms: &mut u64, a_second: u64, seconds: usize) -> Vec<u64> {
        let mut tosses = 0u64;
        let second = |_| {
            let mut taken = 0;
            for _ in 0..1000 {
                *now_ms += 1;
                for _ in 0..a_second / 1000 {
                    tosses += 1;
                    if tosses.is_multiple_of(1 << budget.doublings(*now_ms, 1000)) {
                        budget.spend(*now_ms, 1000);
                        taken += 1;
                    }
                }
            }
            taken
        };
        (0..seconds).map(second).collect()
    }

    #[test]
    fn a_load_that_lasts_gets_what_the_budget_allows_and_a_burst_all_of_it() {
        for rate in [2_000, 10_000, 100_000, 10_000_000] {
            let (budget, mut now) = (Budget::new(), 1_000_000);
            let taken = load(&budget, &mut now, rate, 8);
            let steady = &taken[4..];
            assert!(steady.iter().all(|n| (500..=1500).contains(n)), "{rate}: {taken:?}");
            assert!(taken.iter().sum::<u64>() < 4000 + 8 * 1000, "{rate}: {taken:?}");
            // After a quiet time no block of a burst is left out.
            now += 4000;
            assert_eq!(budget.doublings(now, 1000), 0);
            let burst = (0..1000).all(|_| {
                budget.spend(now, 1000);
                budget.doublings(now, 1000) == 0
            });
            assert!(burst);
        }
    }

    const KIND_BYTES: [usize; 8] = [65536, 65536, 65536, 65536, 65536, 65536, 262_144, 1 << 20];
    const ASKED: Period = Period(64 << 10);

    /// Goes on for some seconds with so many blocks of each kind in each; the samples of each in a second of the
    /// last half, and how many blocks they stand for.
    fn strata(rates: [u64; 8], a_second: u32, seconds: u64) -> [(u64, f64); 8] {
        let budget = Strata::<8>::new(|kind| KIND_BYTES[kind]);
        let (mut taken, mut due) = ([(0, 0.0); 8], [0; 8]);
        let mut way = Way { left: 0, period: Period::OFF, random: 5 };
        for ms in 0..seconds * 1000 {
            for (kind, rate) in rates.iter().enumerate() {
                due[kind] += rate;
                while due[kind] >= 1000 {
                    due[kind] -= 1000;
                    let period = budget.period(kind, 1_000_000 + ms, ASKED, a_second);
                    if way.toss(period, KIND_BYTES[kind]) {
                        budget.spend();
                        if ms >= seconds * 500 {
                            taken[kind].0 += 1;
                            taken[kind].1 += period.weight(KIND_BYTES[kind]);
                        }
                    }
                }
            }
        }
        taken.map(|(n, stands)| (n * 2 / seconds, stands * 2.0 / seconds as f64))
    }

    #[test]
    fn what_is_rare_is_known_beside_what_comes_all_the_time() {
        let rates = [20_000, 50, 50, 100, 50, 50, 150, 150];
        let taken = strata(rates, 1000, 60);
        let sum: u64 = taken.iter().map(|kind| kind.0).sum();
        assert!((900..=1100).contains(&sum), "{taken:?}");
        for ((n, stands), rate) in taken.iter().zip(rates) {
            assert!((stands / rate as f64 - 1.0).abs() < 0.1, "{rate}: {taken:?}");
            // One in twenty if all were alike.
            assert!(*n >= rate * 3 / 10 || rate == 20_000, "{rate}: {taken:?}");
        }
        assert!(taken[7].0 >= 149, "large ones all: {taken:?}");
    }

    #[test]
    fn many_kinds_share_the_budget() {
        for rates in [[50_000, 10_000, 2_000, 40, 40, 40, 40, 40], [3_000; 8], [200_000; 8]] {
            let taken = strata(rates, 1000, 40);
            let sum: u64 = taken.iter().map(|kind| kind.0).sum();
            assert!((900..=1100).contains(&sum), "{taken:?}");
        }
        let taken = strata([300, 0, 0, 0, 0, 0, 0, 0], 1000, 20);
        assert!((170..=210).contains(&taken[0].0), "1 - 1/e of them: {taken:?}");
        let taken = strata([0, 0, 0, 0, 0, 0, 0, 9000], 0, 4);
        assert!(taken[7].0 > 8990, "no budget: {taken:?}");
    }

    #[test]
    fn a_burst_after_a_quiet_time_is_recorded_as_asked() {
        let budget = Strata::<8>::new(|kind| KIND_BYTES[kind]);
        let mut taken = 0;
        for block in 0..2_000_000u64 {
            let period = budget.period(7, 1_000_000 + block / 1000, ASKED, 1000);
            let mut way = Way { left: 0, period, random: block };
            taken += u64::from(way.toss(period, KIND_BYTES[7]));
            if way.toss(period, KIND_BYTES[7]) {
                budget.spend();
            }
            if block < 3900 {
                assert_eq!(period, ASKED, "{block}");
            }
        }
        assert!(taken < 40_000, "{taken} in two seconds of a million blocks each");
    }

    #[test]
    fn chances() {
        for (chance, size) in [(0.5, 100), (1e-9, 1 << 20), (0.999, 40_000)] {
            let weight = Period::with_chance(chance, size << 10).weight(size << 10);
            assert!((weight * chance - 1.0).abs() < 1e-4, "{chance} {size}");
        }
        assert_eq!(Period::with_chance(0.0, 1 << 20).0, 1 << 62);
    }

    #[test]
    fn no_budget_no_doublings() {
        let (budget, mut now) = (Budget::new(), 1);
        load(&budget, &mut now, 100_000, 5);
        assert!(budget.doublings(now, 1000) > 0);
        assert_eq!(budget.doublings(now, 0), 0);
        assert!(!budget.spend(now, 0));
    }
}
