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
    /// Goes on by `since` bytes, of which the last `size` are the block at hand. True: that block is
    /// chosen.
    pub(crate) fn advance(&mut self, period: Period, since: i64, size: usize) -> bool {
        let mut passed = since;
        if self.period != period {
            self.period = period;
            self.draw();
            passed = i64::try_from(size).unwrap_or(i64::MAX);
        }
        match period {
            Period::OFF => return false,
            Period::ALL => return true,
            _ => {}
        }
        self.left = self.left.saturating_sub(passed);
        if self.left >= 0 {
            return false;
        }
        self.draw();
        true
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

/// Doubles a period while more samples come than a budget allows, and halves it when they are few.
#[derive(Debug)]
pub(crate) struct Budget {
    began_ms: AtomicU64,
    count: AtomicU32,
    doublings: AtomicU32,
}

/// How long samples are counted before the period is looked at.
const SPELL_MS: u64 = 250;
/// 2^20 times the period asked for, at most.
const MOST_DOUBLINGS: u32 = 20;

impl Budget {
    pub(crate) const fn new() -> Self {
        Self { began_ms: AtomicU64::new(0), count: AtomicU32::new(0), doublings: AtomicU32::new(0) }
    }

    /// How often the period is doubled now.
    pub(crate) fn doublings(&self) -> u32 {
        self.doublings.load(Relaxed)
    }

    /// Notes a sample at `now_ms`, of which `a_second` are allowed (0: any number). True: the period has
    /// changed. A count that is lost between threads costs a few samples of precision.
    pub(crate) fn spend(&self, now_ms: u64, a_second: u32) -> bool {
        let quota = u64::from(a_second) * SPELL_MS / 1000;
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let doublings = self.doublings();
        let spell = now_ms.saturating_sub(self.began_ms.load(Relaxed));
        if quota == 0 {
            return doublings > 0 && self.start(now_ms, 0);
        }
        if spell < SPELL_MS {
            // Soon enough used up: what is left of the spell is not to cost as much again.
            return u64::from(count) > quota && self.start(now_ms, doublings + 1);
        }
        // A long silence counts as a long spell with few samples.
        let few = u64::from(count) * SPELL_MS * 4 < quota * spell;
        let next = if few { doublings.saturating_sub(1) } else { doublings };
        self.start(now_ms, next)
    }

    fn start(&self, now_ms: u64, doublings: u32) -> bool {
        self.began_ms.store(now_ms, Relaxed);
        self.count.store(0, Relaxed);
        let next = doublings.min(MOST_DOUBLINGS);
        self.doublings.swap(next, Relaxed) != next
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
            if way.advance(period, interval - counter, *size) {
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
        assert!(way.advance(Period::ALL, 0, 0), "of no bytes too");
        assert_eq!(way.next(100), -1);
    }

    #[test]
    fn a_changed_period_is_drawn_anew_and_stays_unbiased() {
        let mut way = Way { left: 0, period: Period::OFF, random: 7 };
        let (mut chosen, size) = (0.0, 1000usize);
        for i in 0..200_000u32 {
            let period = Period(if i / 37 % 2 == 0 { 20_000 } else { 300_000 });
            if way.advance(period, 1000, size) {
                chosen += period.weight(size);
            }
        }
        assert!((chosen / 200_000.0 - 1.0).abs() < 0.05, "{chosen}");
    }

    #[test]
    fn a_toss_is_as_likely_as_a_sample() {
        let mut way = Way { left: 0, period: Period::OFF, random: 3 };
        let period = Period(4 << 20);
        let hits = (0..100_000).filter(|_| way.toss(period, 2 << 20)).count();
        assert!((hits as f64 * period.weight(2 << 20) / 100_000.0 - 1.0).abs() < 0.02);
        assert!(way.toss(Period::OFF, 1), "no period: all of them");
    }

    #[test]
    fn the_budget_doubles_under_load_and_comes_back() {
        let budget = Budget::new();
        let mut now = 1000;
        // 10,000 a second for a second, of which 1000 are allowed.
        let mut taken = 0;
        for i in 0..10_000u32 {
            if i % 10 == 0 {
                now += 1;
            }
            if i % (1 << budget.doublings()) == 0 {
                budget.spend(now, 1000);
                taken += 1;
            }
        }
        assert!((3..=6).contains(&budget.doublings()), "{}", budget.doublings());
        assert!(taken < 2500, "{taken}");
        for _ in 0..100 {
            now += 100;
            budget.spend(now, 1000);
        }
        assert_eq!(budget.doublings(), 0);
        assert!(!budget.spend(now, 0));
    }
}
