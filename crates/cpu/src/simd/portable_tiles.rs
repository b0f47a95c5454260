//! Tiles of bf16 terms in plain Rust: the arithmetic of AMX for tests on processors without it.

use super::Portable;
use super::portable_pairs::{LANES, element};
use super::tiles::{self, HasTiles, Magnitudes, Place, Sums, Tall, Tiles, WORDS};
use crate::terms::TILE;
use crate::tile::{MAX_WIDTH, Step};
use crate::view::ElementRows;

/// [`Tiles`] on the vectors of [`Portable`].
#[derive(Clone, Copy)]
pub(crate) struct PortableTiles;

/// The nearest bf16 number, ties away from zero, as 16 bits. The remainder replaces the number.
fn split(rest: &mut f32) -> u32 {
    let rounded = rest.to_bits().wrapping_add(0x8000) & 0xffff_0000;
    *rest -= f32::from_bits(rounded);
    rounded >> 16
}

/// The next terms of two numbers, as a word.
fn split_word(rest: &mut [f32; 2]) -> f32 {
    let [first, second] = rest.each_mut().map(split);
    f32::from_bits(first | second << 16)
}

/// The number as the product of tiles reads and writes it: 0 if subnormal.
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x }
}

/// The two bf16 numbers of a word.
fn terms_of(word: f32) -> [f32; 2] {
    let bits = word.to_bits();
    [bits << 16, bits & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)))
}

impl HasTiles for PortableTiles {
    type Tiles<'a> = PortableTiles;
    type Vectors = Portable<LANES>;

    fn vectors(self) -> Portable<LANES> {
        Portable
    }

    fn magnitudes<'a>(self, rows: impl ElementRows<'a>) -> Magnitudes {
        let elements = rows.flat_map(|row| (0..row.len()).map(move |at| element(row, at).abs().to_bits()));
        let (least, largest) = elements.fold((u32::MAX, 0), |(least, largest), bits| {
            (least.min(bits.wrapping_sub(1)), largest.max(bits))
        });
        Magnitudes::of_bits(least, largest)
    }

    fn within<R>(self, work: impl FnOnce(PortableTiles) -> R) -> R {
        work(self)
    }
}

impl Tiles for PortableTiles {
    type Vectors = Portable<LANES>;

    fn vectors(self) -> Portable<LANES> {
        Portable
    }

    fn terms<'a>(self, rows: impl ElementRows<'a>, terms: usize, negate: bool, to: &mut [f32], words: usize) {
        let (depth, sign) = (words / terms, if negate { -1.0 } else { 1.0 });
        for (row, to) in rows.zip(to.chunks_exact_mut(words)) {
            for pair in 0..depth {
                let mut rest = [2 * pair, 2 * pair + 1].map(|at| sign * element(row, at));
                for term in to.chunks_exact_mut(depth) {
                    term[pair] = split_word(&mut rest);
                }
            }
        }
    }

    fn row_pairs<'a>(self, mut rows: impl ElementRows<'a>, terms: usize, to: &mut [f32], dim: usize) {
        let matrix = to.len() / terms;
        for first in (0..matrix).step_by(dim) {
            let pair = [rows.next(), rows.next()];
            for at in 0..dim {
                let mut rest = pair.map(|row| row.map_or(0.0, |row| element(row, at)));
                for term in to.chunks_exact_mut(matrix) {
                    term[first + at] = split_word(&mut rest);
                }
            }
        }
    }

    fn split_pair(self, [first, second]: &mut [[f32; LANES]; 2]) -> [f32; LANES] {
        std::array::from_fn(|lane| {
            let mut rest = [first[lane], second[lane]];
            let word = split_word(&mut rest);
            [first[lane], second[lane]] = rest;
            word
        })
    }

    /// Computes tile by tile as TDPBF16PS does: first and second elements of pairs have separate sums in f32.
    fn multiply<const VECTORS: usize>(
        self,
        a: Tall<'_>,
        b: &[f32],
        c: &mut [f32],
        sums: Sums,
        _: usize,
        steps: impl Iterator<Item = Place>,
    ) {
        let width = VECTORS * LANES;
        let c = &mut c[..a.tiles * TILE * width];
        if sums == Sums::Fresh {
            c.fill(0.0);
        }
        for [at_a, at_b] in steps {
            // First and second elements of B's pairs, row by row.
            let mut terms = [[[0.0; MAX_WIDTH]; WORDS]; 2];
            for (word, row) in b[at_b..][..WORDS * width].chunks_exact(width).enumerate() {
                for (column, &pair) in row.iter().enumerate() {
                    [terms[0][word][column], terms[1][word][column]] = terms_of(pair);
                }
            }
            for (row, c) in c.chunks_exact_mut(width).enumerate() {
                let mut sums = [[0.0; MAX_WIDTH]; 2];
                for (word, &pair) in a.data[at_a + row * a.ld..][..WORDS].iter().enumerate() {
                    for ((sums, terms), x) in sums.iter_mut().zip(&terms).zip(terms_of(pair)) {
                        // Products of bf16 numbers are exact, so this equals a fused multiply-add.
                        for (sum, y) in sums[..width].iter_mut().zip(&terms[word]) {
                            *sum = flushed(x * y + *sum);
                        }
                    }
                }
                let [first, second] = &sums;
                for (c, (first, second)) in c.iter_mut().zip(first.iter().zip(second)) {
                    *c = flushed(flushed(*c) + flushed(first + second));
                }
            }
        }
    }

    fn step(self, step: Step<'_>, terms: usize) {
        match (terms, step.panel.width / LANES) {
            (1, 2) => tiles::run_step::<_, 1, 2>(self, step),
            (1, _) => tiles::run_step::<_, 1, 1>(self, step),
            (_, 2) => tiles::run_step::<_, 2, 2>(self, step),
            _ => tiles::run_step::<_, 2, 1>(self, step),
        }
    }
}
