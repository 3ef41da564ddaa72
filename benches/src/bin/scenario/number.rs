//! Numbers of a few words, a new block for each result (after cfrac, which factors by continued fractions):
//! the expansion of a square root of 130 bits, its convergents modulo the number, and trial division of
//! every denominator by small primes. Most blocks live for one operation.

use crate::{Case, Outcome};
use std::cmp::Ordering;

/// Little-endian words, without leading zeros.
#[derive(Clone, PartialEq, Eq)]
struct Number(Box<[u32]>);

/// Counts results, which are the allocations.
struct Work {
    ops: usize,
}

impl Number {
    fn cmp(&self, other: &Number) -> Ordering {
        let by_length = self.0.len().cmp(&other.0.len());
        by_length.then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }

    fn at(&self, i: usize) -> u64 {
        u64::from(self.0.get(i).copied().unwrap_or(0))
    }
}

impl Work {
    fn number(&mut self, words: impl ExactSizeIterator<Item = u32>) -> Number {
        self.ops += 1;
        let mut words: Vec<u32> = words.collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        Number(words.into_boxed_slice())
    }

    fn small(&mut self, mut n: u128) -> Number {
        self.number((0..4).map(|_| {
            let word = low(n);
            n >>= 32;
            word
        }))
    }

    fn add(&mut self, a: &Number, b: &Number) -> Number {
        let mut carry = 0;
        self.number((0..a.0.len().max(b.0.len()) + 1).map(|i| {
            carry += a.at(i) + b.at(i);
            let word = low(carry.into());
            carry >>= 32;
            word
        }))
    }

    /// a - b, where a is not less.
    fn sub(&mut self, a: &Number, b: &Number) -> Number {
        let mut borrow = 0;
        self.number((0..a.0.len()).map(|i| {
            let difference = a.at(i).wrapping_sub(b.at(i)).wrapping_sub(borrow);
            borrow = difference >> 63;
            low(difference.into())
        }))
    }

    fn mul(&mut self, a: &Number, b: &Number) -> Number {
        let mut words = vec![0_u64; a.0.len() + b.0.len()];
        for (i, x) in a.0.iter().enumerate() {
            let mut carry = 0;
            for j in 0..b.0.len() {
                carry += u64::from(*x) * b.at(j) + words[i + j];
                words[i + j] = carry & u64::from(u32::MAX);
                carry >>= 32;
            }
            words[i + b.0.len()] += carry;
        }
        self.number(words.iter().map(|w| low((*w).into())))
    }

    /// The quotient, which is mostly small, and the rest.
    fn divide(&mut self, a: &Number, b: &Number) -> (u32, Number) {
        let (mut quotient, mut rest) = (0, a.clone());
        while rest.cmp(b).is_ge() {
            rest = self.sub(&rest, b);
            quotient += 1;
        }
        (quotient, rest)
    }

    fn divide_small(&mut self, a: &Number, by: u32) -> (Number, u32) {
        let mut rest = 0;
        let mut words: Vec<u32> =
            a.0.iter()
                .rev()
                .map(|word| {
                    let part = (rest << 32) | u64::from(*word);
                    rest = part % u64::from(by);
                    low((part / u64::from(by)).into())
                })
                .collect();
        words.reverse();
        (self.number(words.into_iter()), low(rest.into()))
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the low word is what is asked for")]
fn low(n: u128) -> u32 {
    n as u32
}

const N: u128 = 10_000_000_000_000_000_000_000_000_000_000_013_579;
const PRIMES: [u32; 24] =
    [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89];
/// What is left of a denominator after trial division is kept where it is below this.
const SMOOTH: u128 = 1 << 48;

pub fn cfrac(case: &Case) -> Outcome {
    let work = &mut Work { ops: 0 };
    let (n, limit) = (work.small(N), work.small(SMOOTH));
    let root = work.small(N.isqrt());
    // The k-th complete quotient is (m + sqrt N) / d, its whole part a; p is the numerator of the convergent mod N.
    let (mut a, mut m, mut d) = (root.clone(), work.small(0), work.small(1));
    let mut d_before = n.clone();
    let (mut p, mut p_before) = (root.clone(), work.small(1));
    let mut kept = vec![];
    for k in 1..=case.times(1_000_000) {
        let product = work.mul(&d, &a);
        let m_next = work.sub(&product, &m);
        let d_next = if m.cmp(&m_next).is_ge() {
            let step = work.sub(&m, &m_next);
            let change = work.mul(&a, &step);
            work.add(&d_before, &change)
        } else {
            let step = work.sub(&m_next, &m);
            let change = work.mul(&a, &step);
            work.sub(&d_before, &change)
        };
        (d_before, d, m) = (d, d_next, m_next);

        let mut cofactor = d.clone();
        for prime in PRIMES {
            let (mut quotient, mut rest) = work.divide_small(&cofactor, prime);
            while rest == 0 {
                cofactor = quotient;
                (quotient, rest) = work.divide_small(&cofactor, prime);
            }
        }
        if cofactor.cmp(&limit).is_lt() {
            kept.push((k, p.clone(), d.clone(), cofactor));
        }

        let sum = work.add(&root, &m);
        a = {
            let (quotient, _) = work.divide(&sum, &d);
            work.small(quotient.into())
        };
        let product = work.mul(&a, &p);
        let sum = work.add(&product, &p_before);
        let (_, next) = work.divide(&sum, &n);
        (p_before, p) = (p, next);
    }
    // Every relation must hold: p^2 = (-1)^k d modulo N.
    let mut wrong = 0;
    for (k, p, d, _) in kept.iter().take(50) {
        let square = work.mul(p, p);
        let rest = remainder(&square);
        let expected = if k % 2 == 0 { d.clone() } else { work.sub(&n, d) };
        wrong += usize::from(expected != work.small(rest));
    }
    assert_eq!(wrong, 0, "numbers were overwritten");
    Outcome::of(work.ops)
}

/// A number modulo N, bit by bit.
fn remainder(a: &Number) -> u128 {
    a.0.iter().rev().flat_map(|word| (0..32).rev().map(move |bit| word >> bit & 1)).fold(
        0,
        |rest, bit| {
            let doubled = rest << 1 | u128::from(bit);
            if doubled >= N { doubled - N } else { doubled }
        },
    )
}
