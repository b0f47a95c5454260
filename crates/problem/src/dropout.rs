//! Dropout of the normalised probabilities: O = (Z ∘ P) V, where an element of Z is 0 or 1 / (1 − p).
//!
//! Z depends on the state of the generator and on the element's place alone, so that every device, tile shape
//! and pass has the same mask. The generator is Philox4x32-10 (Salmon et al. 2011). Element (query i, key j)
//! of query head h in batch entry b, positions counted in the sequence, has a 16-bit number `u`:
//!
//! | word | value |
//! |---|---|
//! | key 0, key 1 | seed, low word; seed, high word ^ offset, high word |
//! | counter 0 | 8 · ⌊j / 32⌋ + j mod 8 |
//! | counter 1 | 8 · ⌊i / 16⌋ + i mod 8 |
//! | counter 2 | b · heads_q + h |
//! | counter 3 | offset, low word |
//! | output | number 2 · (⌊i / 8⌋ mod 2) + ⌊j / 16⌋ mod 2; its high half if ⌊j / 8⌋ mod 2 = 1 |
//!
//! The eight elements of a counter belong to one lane in the accumulators of `mma.sync` and `wgmma`, whether
//! queries are the rows or the columns.
//!
//! An element is kept if `u ≥ round(65536 · p)`: the resolution of p is 2⁻¹⁶. No element is kept with
//! p = 1.

use std::ops::Range;

use crate::{Operand, Operands, Problem, ProblemError};

/// The multipliers of a round.
pub const PHILOX_MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Numbers that are added to the key after a round.
pub const PHILOX_WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// The number of rounds.
pub const PHILOX_ROUNDS: usize = 10;

/// The dropout mask of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    p: f32,
    key: [u32; 2],
    offset: u32,
}

/// The elements of a row that one counter word of the columns covers.
const COLUMNS: usize = 32;

impl Dropout {
    /// The mask for a probability and the words of `rng_state`.
    pub fn new(p: f32, [seed_low, seed_high, low, high]: [i32; 4]) -> Dropout {
        let key = [seed_low as u32, seed_high as u32 ^ high as u32];
        Dropout { p, key, offset: low as u32 }
    }

    /// The mask of a call; `None` without dropout. The inputs have been checked.
    pub fn of(problem: &Problem, inputs: &Operands<'_>) -> Option<Dropout> {
        let p = problem.dropout?;
        let state = inputs.integers(Operand::RngState);
        Some(Dropout::new(p, state.try_into().unwrap_or_default()))
    }

    /// The least `u` of an element that is kept, shifted to the high half of a word. For p = 1 some elements
    /// count as kept, and their factor is 0.
    pub fn threshold(p: f32) -> u32 {
        let least = (f64::from(p) * 65536.0).round().clamp(0.0, 65535.0);
        (least as u32) << 16
    }

    /// The factor of elements that are kept: 1 / (1 − p), or 0 for p = 1.
    pub fn scale(p: f32) -> f32 {
        if p < 1.0 { (1.0 / (1.0 - f64::from(p))) as f32 } else { 0.0 }
    }

    /// Writes the elements of Z of query `row` and of `keys`. `head` is b · heads_q + h.
    pub fn factors(&self, head: usize, row: usize, keys: Range<usize>, to: &mut [f32]) {
        let (threshold, scale) = (Dropout::threshold(self.p), Dropout::scale(self.p));
        let row_word = (row / 16 * 8 + row % 8) as u32;
        let first_output = row / 8 % 2 * 2;
        let mut block = keys.start / COLUMNS * COLUMNS;
        while block < keys.end {
            let mut line = [0.0; COLUMNS];
            for column in 0..8 {
                let column_word = (block / COLUMNS * 8 + column) as u32;
                let words = philox([column_word, row_word, head as u32, self.offset], self.key);
                for (half, of_half) in line.chunks_exact_mut(16).enumerate() {
                    let word = words[first_output + half];
                    for (number, at) in [(word << 16, column), (word & 0xffff_0000, column + 8)] {
                        of_half[at] = if number >= threshold { scale } else { 0.0 };
                    }
                }
            }
            let (start, end) = (keys.start.max(block), keys.end.min(block + COLUMNS));
            to[start - keys.start..end - keys.start].copy_from_slice(&line[start - block..end - block]);
            block += COLUMNS;
        }
    }

    /// Rejects a probability outside of 0 to 1.
    pub(crate) fn check(p: Option<f32>) -> Result<(), ProblemError> {
        match p.filter(|p| !(0.0..=1.0).contains(p)) {
            Some(p) => Err(ProblemError::Dropout { value: p.to_string() }),
            None => Ok(()),
        }
    }
}

/// The output of Philox4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..PHILOX_ROUNDS {
        let [c0, c1, c2, c3] = counter;
        let [first, second] = PHILOX_MULTIPLIERS;
        let (a, b) = (u64::from(first) * u64::from(c0), u64::from(second) * u64::from(c2));
        counter = [(b >> 32) as u32 ^ c1 ^ key[0], b as u32, (a >> 32) as u32 ^ c3 ^ key[1], a as u32];
        key = [key[0].wrapping_add(PHILOX_WEYL[0]), key[1].wrapping_add(PHILOX_WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library, Random123.
    #[test]
    fn philox_has_its_known_answers() {
        let all = u32::MAX;
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([all; 4], [all; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), expected);
        }
    }

    /// The share of kept elements is within five standard deviations of 1 − p, in each row, column and head
    /// alone; neighbours are not correlated; another seed, offset or head has another mask.
    #[test]
    fn masks_have_the_probability_and_no_pattern() {
        const SIZE: usize = 256;
        let mask = |state: [i32; 4], p: f32, head: usize| -> Vec<bool> {
            let row = |row| {
                let mut factors = vec![f32::NAN; SIZE];
                Dropout::new(p, state).factors(head, row, 0..SIZE, &mut factors);
                assert!(factors.iter().all(|&z| z == 0.0 || z == Dropout::scale(p)));
                factors.into_iter().map(|z| z != 0.0)
            };
            (0..SIZE).flat_map(row).collect()
        };
        let near = |kept: usize, of: usize, share: f64| {
            let deviation = (share * (1.0 - share) * of as f64).sqrt();
            let distance = kept as f64 - share * of as f64;
            assert!(distance.abs() <= 5.0 * deviation, "{kept} of {of}, not {share}");
        };
        for (p, state) in [(0.1f32, [7, 0, 0, 0]), (0.5, [-1, 3, 2, 1]), (0.875, [1, 1, 1, 1])] {
            let share = f64::from(1.0 - p);
            let kept = mask(state, p, 3);
            let count = |of: &dyn Fn(usize) -> bool| (0..SIZE * SIZE).filter(|&i| of(i)).count();
            near(count(&|i| kept[i]), SIZE * SIZE, share);
            for line in 0..SIZE {
                near(count(&|i| kept[i] && i / SIZE == line), SIZE, share);
                near(count(&|i| kept[i] && i % SIZE == line), SIZE, share);
            }
            // Pairs at the distances at which elements share a counter, and at others.
            let both = share * share + (1.0 - share) * (1.0 - share);
            for distance in [1, 7, 8, 16, 24, 32, SIZE, 8 * SIZE, 16 * SIZE, 8 * SIZE + 8] {
                let of = SIZE * SIZE - distance;
                near((0..of).filter(|&i| kept[i] == kept[i + distance]).count(), of, both);
            }
            for other in 0..5 {
                let mut changed = state;
                if let Some(word) = changed.get_mut(other) {
                    *word ^= 1;
                }
                let other = mask(changed, p, if other == 4 { 4 } else { 3 });
                near((0..SIZE * SIZE).filter(|&i| kept[i] == other[i]).count(), SIZE * SIZE, both);
            }
        }
    }

    /// The mask of an element does not depend on the range that it is computed with.
    #[test]
    fn masks_have_no_place_in_a_range() {
        let dropout = Dropout::new(0.5, [1, 2, 3, 4]);
        let mut all = [0.0; 100];
        dropout.factors(1, 9, 0..100, &mut all);
        for range in [0..1, 5..37, 31..33, 64..100, 99..100, 40..40] {
            let mut some = vec![f32::NAN; range.len()];
            dropout.factors(1, 9, range.clone(), &mut some);
            assert_eq!(some, all[range]);
        }
    }

    #[test]
    fn probabilities_have_limits_and_a_resolution() {
        assert_eq!(Dropout::threshold(0.5), 0x8000_0000);
        assert_eq!((Dropout::threshold(0.0), Dropout::scale(0.0)), (0, 1.0));
        assert_eq!((Dropout::threshold(1.0), Dropout::scale(1.0)), (0xffff_0000, 0.0));
        let mut p = Problem::mission();
        for (value, told) in [(-0.1, "-0.1"), (1.5, "1.5"), (f32::NAN, "NaN")] {
            p.dropout = Some(value);
            let expected = format!("invalid value '{told}' for dropout_p: expected a number from 0 to 1");
            assert_eq!(p.check().unwrap_err().to_string(), expected);
        }
        p.dropout = Some(1.0);
        p.check().unwrap();
        assert_eq!(p.operand(Operand::RngState).map(|state| state.bytes()), Some(16));
    }
}
