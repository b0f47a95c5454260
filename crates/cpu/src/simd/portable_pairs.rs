//! Pairs of 16-bit integers in plain Rust: the arithmetic of AVX-512 VNNI for tests on processors without it.

use super::Portable;
use super::pairs::{self, Columnwise, Extent, Pairs, RowNorms};
use super::portable::map2;
use crate::Elements;
use crate::tile::Step;
use crate::view::ElementRows;

/// Lanes of the vectors, as many as AVX-512 has.
pub(super) const LANES: usize = 16;

type V = [f32; LANES];

/// [`Pairs`] on the vectors of [`Portable`].
#[derive(Clone, Copy)]
pub(crate) struct PortablePairs;

/// The two integers of a word.
fn integers_of(word: f32) -> [i32; 2] {
    let bits = word.to_bits();
    [bits as u16, (bits >> 16) as u16].map(|half| i32::from(half.cast_signed()))
}

/// A word of two integers, with the lower 16 bits of each.
fn word([first, second]: [i32; 2]) -> f32 {
    f32::from_bits(first.cast_unsigned() & 0xffff | second.cast_unsigned() << 16)
}

/// Element `at` of a row, widened; 0 after the last.
pub(super) fn element(from: Elements<'_>, at: usize) -> f32 {
    from.get(at).unwrap_or(0.0)
}

impl Pairs for PortablePairs {
    type Vectors = Portable<LANES>;

    #[inline(always)]
    fn vectors(self) -> Portable<LANES> {
        Portable
    }
    #[inline(always)]
    fn add_products(self, a: V, b: V, sum: V) -> V {
        std::array::from_fn(|i| {
            let ([a0, a1], [b0, b1]) = (integers_of(a[i]), integers_of(b[i]));
            // The factors exclude an overflow. In a debug build, an overflow would panic.
            let products = a0 * b0 + a1 * b1;
            f32::from_bits((sum[i].to_bits().cast_signed() + products).cast_unsigned())
        })
    }
    #[inline(always)]
    fn to_f32(self, sums: V) -> V {
        sums.map(|sum| sum.to_bits().cast_signed() as f32)
    }
    #[inline(always)]
    fn pair(self, first: V, second: V) -> V {
        map2(first, second, |first, second| word([first, second].map(|x| x.round_ties_even() as i32)))
    }
    #[inline(always)]
    fn load(self, from: Elements<'_>, at: usize) -> V {
        std::array::from_fn(|i| element(from, at + i))
    }
    #[inline(always)]
    fn store(self, words: V, to: &mut [f32]) {
        let count = to.len().min(LANES);
        to[..count].copy_from_slice(&words[..count]);
    }

    fn integers<'a>(self, rows: impl ElementRows<'a>, factor: f32, to: &mut [f32], words: usize) {
        for (row, to) in rows.zip(to.chunks_exact_mut(words)) {
            for (pair, to) in to.iter_mut().enumerate() {
                let integer = |at| {
                    // A cast saturates to 32 bits.
                    let nearest = (element(row, at) * factor).round_ties_even() as i32;
                    nearest.clamp(i16::MIN.into(), i16::MAX.into())
                };
                *to = word([integer(2 * pair), integer(2 * pair + 1)]);
            }
        }
    }

    fn row_pairs<'a>(self, rows: impl ElementRows<'a>, factors: &[f32], to: &mut [f32]) {
        pairs::row_pairs(self, rows, factors, to);
    }

    fn extent<'a>(self, rows: impl ElementRows<'a>) -> Extent {
        pairs::extent(self, rows)
    }

    fn add_columns<'a>(self, rows: impl ElementRows<'a> + Clone, columns: &mut Columnwise) {
        pairs::add_columns(self, rows, columns);
    }

    fn row_norms<'a>(self, rows: impl ElementRows<'a>, factors: &[f32]) -> RowNorms {
        pairs::row_norms(self, rows, factors)
    }

    fn step(self, step: Step<'_>) {
        match step.panel.width / LANES {
            4 => pairs::run_step::<_, 4>(self, step),
            3 => pairs::run_step::<_, 3>(self, step),
            2 => pairs::run_step::<_, 2>(self, step),
            _ => pairs::run_step::<_, 1>(self, step),
        }
    }
}
