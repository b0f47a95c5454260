//! Division by a number that is known when the kernel is emitted, or launched. `ptxas` does not optimise
//! `div.u32` for constants: even for a power of two it emits the reciprocal sequence (I2F, MUFU.RCP, F2I and
//! corrections).

use ptx::{Builder, R32};

/// `⌊a / by⌋` for `a < 2^31` and `by > 0`, computed by multiplication with a rounded-up reciprocal (Granlund
/// & Montgomery 1994, "Division by Invariant Integers using Multiplication", Theorem 4.2 with N = 31).
pub fn divide(k: &mut Builder, a: R32, by: u32) -> R32 {
    if by.is_power_of_two() {
        return if by == 1 { a } else { k.shr_u(a, by.trailing_zeros()) };
    }
    let (reciprocal, shift) = reciprocal(by);
    let high = k.mul_hi_u(a, reciprocal);
    if shift == 0 { high } else { k.shr_u(high, shift) }
}

/// A divisor of at least 2 that is a launch parameter.
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    pub number: R32,
    /// The two numbers of [`Divisor::numbers`].
    pub by: [R32; 2],
}

impl Divisor {
    /// What a launch passes beside the divisor.
    pub const fn numbers(divisor: u32) -> [u32; 2] {
        let (reciprocal, shift) = reciprocal(divisor);
        [reciprocal, shift]
    }

    /// `⌊a / divisor⌋` for `a < 2^31`.
    pub fn divide(&self, k: &mut Builder, a: R32) -> R32 {
        let [reciprocal, shift] = self.by;
        let high = k.mul_hi_u(a, reciprocal);
        k.shr_u(high, shift)
    }
}

/// `m` and `s` with `⌊a / by⌋ = ⌊a · m / 2^(32 + s)⌋`.
const fn reciprocal(by: u32) -> (u32, u32) {
    let log = 32 - (by - 1).leading_zeros();
    ((1u64 << (31 + log)).div_ceil(by as u64) as u32, log - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quotient_is_exact() {
        for by in (2..5000).chain([65_535, 1_000_003, (1 << 31) - 1]) {
            let (m, s) = reciprocal(by);
            let last = (1u32 << 31) - 1;
            let multiples = [1, 2, 7, last / by / 2, last / by].map(|n| n.min(last / by) * by);
            for a in multiples.into_iter().flat_map(|n| [n.saturating_sub(1), n, n + 1]).chain([0, last]) {
                let a = a.min(last);
                let got = ((u64::from(a) * u64::from(m)) >> (32 + s)) as u32;
                assert_eq!(got, a / by, "{a} / {by}");
            }
        }
    }
}
