//! The error of forward attention on 8-bit inputs as a function of the number of keys, with the sums of sm_90
//! tensor cores.
//!
//! [`errors`] computes [`ROWS`] query rows of one head block by block, with the arithmetic of a kernel:
//! scores and P V by the emulator's tensor-core numerics, the online softmax in f32, P rounded to e4m3. It
//! does not run a kernel, so a million keys take only seconds. The sums of O are computed by several
//! [`Scheme`]s from the same P. The error is the difference from attention in f64 on the same 8-bit inputs.

use emu::numerics::Lanes32;
use emu::numerics::tensor::{Accumulator, Input, MmaKind, Shape, TensorRules, mma};
use problem::E4m3;
use serde::{Deserialize, Serialize};

/// Number of query rows: the rows of one tensor-core tile.
pub const ROWS: usize = 16;
/// Columns of V.
pub const COLUMNS: usize = 16;
/// Head dim of Q and K.
pub const DIM: usize = 128;
/// Number of products in a tensor-core sum.
pub const STEP: usize = 32;
/// Columns of a tensor-core tile.
const TILE: usize = 8;

/// How O is summed over the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// P V of each block in a separate accumulator, which is added to O in f32: two-level sums.
    ByBlock,
    /// One accumulator over all blocks, of 128 keys.
    Running,
    /// One accumulator over all blocks, of FlashAttention-3's 224 keys.
    FlashAttention3,
    /// Exact sums of the same P, which show the rounding of P alone.
    Exact,
}

impl Scheme {
    /// All schemes.
    pub const ALL: [Scheme; 4] = [Scheme::ByBlock, Scheme::Running, Scheme::FlashAttention3, Scheme::Exact];

    /// The name in tables and charts.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::ByBlock => "two-level sums",
            Scheme::Running => "single-level sums",
            Scheme::FlashAttention3 => "FlashAttention-3's scheme",
            Scheme::Exact => "exact sums",
        }
    }

    const fn block(self) -> usize {
        match self {
            Scheme::FlashAttention3 => 224,
            Scheme::ByBlock | Scheme::Running | Scheme::Exact => 128,
        }
    }
}

/// The distribution from which the inputs are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draw {
    /// Independent normal numbers.
    Normal,
    /// Student's t with three degrees of freedom: a few elements are large.
    HeavyTailed,
    /// Normal numbers, and one key that takes about half of the weight of each row.
    HeavyKey,
    /// Normal numbers, with a mean in each column of V and large elements in a few columns of K, as
    /// activations of language models have them.
    Channels,
}

impl Draw {
    /// All distributions.
    pub const ALL: [Draw; 4] = [Draw::Normal, Draw::HeavyTailed, Draw::HeavyKey, Draw::Channels];

    /// The name in tables and charts.
    pub const fn name(self) -> &'static str {
        match self {
            Draw::Normal => "normal",
            Draw::HeavyTailed => "heavy-tailed",
            Draw::HeavyKey => "one heavy key",
            Draw::Channels => "channels with means",
        }
    }
}

/// The error of a scheme at a number of keys.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Point {
    /// Keys.
    pub keys: usize,
    /// How O was summed.
    pub scheme: Scheme,
    /// Root mean square of the error divided by that of the output.
    pub relative: f64,
}

/// The errors of all schemes, in the order of [`Scheme::ALL`], on one draw of `keys` keys, a multiple of
/// [`STEP`].
pub fn errors(draw: Draw, keys: usize, seed: u64) -> Vec<Point> {
    let inputs = Inputs::new(draw, keys, seed);
    let queries = inputs.queries();
    let want = inputs.reference(&queries);
    let norm = want.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    Scheme::ALL
        .into_iter()
        .map(|scheme| {
            let got = inputs.attention(&queries, scheme);
            let pairs = got.iter().flatten().zip(want.iter().flatten());
            let error = pairs.map(|(got, want)| (got - want).powi(2)).sum::<f64>().sqrt();
            Point { keys, scheme, relative: error / norm }
        })
        .collect()
}

type Row<T, const N: usize> = [T; N];
type Queries = Vec<Row<E4m3, DIM>>;
type Output = Vec<Row<f64, COLUMNS>>;

/// Inputs that are drawn again whenever they are needed: each key and value depends only on its index.
struct Inputs {
    draw: Draw,
    keys: usize,
    seed: u64,
}

impl Inputs {
    const fn new(draw: Draw, keys: usize, seed: u64) -> Inputs {
        Inputs { draw, keys, seed }
    }

    fn numbers(&self, stream: u64, index: usize) -> Random {
        Random::new(self.seed ^ stream << 56 ^ (index as u64).wrapping_mul(0xD134_2543_DE82_EF95))
    }

    fn element(&self, random: &mut Random) -> f64 {
        match self.draw {
            Draw::HeavyTailed => random.student(),
            Draw::Normal | Draw::HeavyKey | Draw::Channels => random.normal(),
        }
    }

    fn queries(&self) -> Queries {
        let row = |i| {
            let mut random = self.numbers(1, i);
            std::array::from_fn(|_| E4m3::from_f32(random.normal() as f32))
        };
        (0..ROWS).map(row).collect()
    }

    fn key(&self, index: usize) -> Row<E4m3, DIM> {
        let mut random = self.numbers(2, index);
        // A key in the direction of the sum of the queries has a score of about √(16 · 128) · size / √128
        // with each query.
        if self.draw == Draw::HeavyKey && index == self.keys / 3 {
            let queries = self.queries();
            let weight = (self.keys as f64).ln() + 0.5;
            let size = weight * (DIM as f64).sqrt() / DIM as f64;
            return std::array::from_fn(|i| {
                let sum: f32 = queries.iter().map(|query| query[i].to_f32()).sum();
                E4m3::from_f32((size * f64::from(sum)) as f32)
            });
        }
        std::array::from_fn(|i| {
            let large = if self.draw == Draw::Channels && i % 32 == 0 { 4.0 } else { 1.0 };
            E4m3::from_f32((large * self.element(&mut random)) as f32)
        })
    }

    fn value(&self, index: usize) -> Row<E4m3, COLUMNS> {
        let mut random = self.numbers(3, index);
        std::array::from_fn(|i| {
            let mean = if self.draw == Draw::Channels { (i as f64 - 7.5) / 7.5 } else { 0.0 };
            E4m3::from_f32((mean + self.element(&mut random)) as f32)
        })
    }

    /// Attention in f64.
    fn reference(&self, queries: &Queries) -> Output {
        let mut rows = vec![(f64::NEG_INFINITY, 0.0, [0.0; COLUMNS]); ROWS];
        let scale = (DIM as f64).sqrt().recip();
        for index in 0..self.keys {
            let (key, value) = (self.key(index), self.value(index));
            for (query, (max, sum, out)) in queries.iter().zip(&mut rows) {
                let product = |(a, b): (&E4m3, &E4m3)| f64::from(a.to_f32()) * f64::from(b.to_f32());
                let logit = scale * query.iter().zip(&key).map(product).sum::<f64>();
                if logit > *max {
                    let alpha = (*max - logit).exp();
                    (*max, *sum) = (logit, *sum * alpha);
                    out.iter_mut().for_each(|out| *out *= alpha);
                }
                let weight = (logit - *max).exp();
                *sum += weight;
                out.iter_mut().zip(&value).for_each(|(out, v)| *out += weight * f64::from(v.to_f32()));
            }
        }
        rows.into_iter().map(|(_, sum, out)| out.map(|out| out / sum)).collect()
    }

    /// Attention with the arithmetic of a kernel.
    fn attention(&self, queries: &Queries, scheme: Scheme) -> Output {
        /// P lies this many powers of two above the weight relative to the row max.
        const POWERS: f32 = 8.0;
        let factor = ((DIM as f64).sqrt().recip() * std::f64::consts::LOG2_E) as f32;
        let mut state = [(f32::MIN, 0.0f32); ROWS];
        let mut running = [[0.0f32; COLUMNS]; ROWS];
        let mut exact = [[0.0f64; COLUMNS]; ROWS];
        let mut end = self.keys;
        while end > 0 {
            let begin = end.saturating_sub(scheme.block());
            let block = self.scores(queries, begin..end);
            let mut probs = vec![[E4m3::from_bits(0); ROWS]; end - begin];
            for (row, (max, sum)) in state.iter_mut().enumerate() {
                let largest = block.iter().map(|scores| scores[row]).fold(f32::NEG_INFINITY, f32::max);
                let next = max.max(largest.mul_add(factor, -POWERS));
                let alpha = (*max - next).exp2();
                (*max, *sum) = (next, *sum * alpha);
                for (scores, probs) in block.iter().zip(&mut probs) {
                    let weight = scores[row].mul_add(factor, -next).exp2();
                    *sum += weight;
                    probs[row] = E4m3::from_f32(weight);
                }
                running[row].iter_mut().for_each(|out| *out *= alpha);
                exact[row].iter_mut().for_each(|out| *out *= f64::from(alpha));
            }
            let values: Vec<_> = (begin..end).map(|index| self.value(index)).collect();
            match scheme {
                Scheme::Exact => {
                    for (probs, value) in probs.iter().zip(&values) {
                        for (out, p) in exact.iter_mut().zip(probs) {
                            let add = |(out, v): (&mut f64, &E4m3)| {
                                *out += f64::from(p.to_f32()) * f64::from(v.to_f32());
                            };
                            out.iter_mut().zip(value).for_each(add);
                        }
                    }
                }
                Scheme::Running | Scheme::FlashAttention3 => add_product(&probs, &values, &mut running),
                Scheme::ByBlock => {
                    let mut sums = [[0.0; COLUMNS]; ROWS];
                    add_product(&probs, &values, &mut sums);
                    let pairs = running.iter_mut().flatten().zip(sums.iter().flatten());
                    pairs.for_each(|(out, sum)| *out += sum);
                }
            }
            end = begin;
        }
        let out = |row: usize| {
            let sum = f64::from(state[row].1);
            match scheme {
                Scheme::Exact => exact[row].map(|out| out / sum),
                _ => running[row].map(|out| f64::from(out) / sum),
            }
        };
        (0..ROWS).map(out).collect()
    }

    /// Q Kᵀ of some keys, key by key.
    fn scores(&self, queries: &Queries, keys: std::ops::Range<usize>) -> Vec<[f32; ROWS]> {
        let keys: Vec<_> = keys.map(|index| self.key(index)).collect();
        let mut scores = vec![[0.0; ROWS]; keys.len()];
        for (keys, scores) in keys.chunks(TILE).zip(scores.chunks_mut(TILE)) {
            let mut sums = [[0.0; TILE]; ROWS];
            for step in 0..DIM / STEP {
                let at = |k: usize| step * STEP + k;
                sums = product(|row, k| queries[row][at(k)], |k, column| keys[column][at(k)], &sums);
            }
            for (column, scores) in scores.iter_mut().enumerate() {
                *scores = std::array::from_fn(|row| sums[row][column]);
            }
        }
        scores
    }
}

/// Adds P V to `sums` with the arithmetic of a tensor core.
fn add_product(probs: &[[E4m3; ROWS]], values: &[Row<E4m3, COLUMNS>], sums: &mut [[f32; COLUMNS]; ROWS]) {
    for (probs, values) in probs.chunks(STEP).zip(values.chunks(STEP)) {
        for first in (0..COLUMNS).step_by(TILE) {
            let tile: [[f32; TILE]; ROWS] =
                std::array::from_fn(|row| std::array::from_fn(|column| sums[row][first + column]));
            let tile = product(|row, k| probs[k][row], |k, column| values[k][first + column], &tile);
            for (sums, tile) in sums.iter_mut().zip(tile) {
                sums[first..first + TILE].copy_from_slice(&tile);
            }
        }
    }
}

/// A·B + C of one m64n8k32 `wgmma`, for 16 of its rows.
fn product(
    a: impl Fn(usize, usize) -> E4m3,
    b: impl Fn(usize, usize) -> E4m3,
    c: &[[f32; TILE]; ROWS],
) -> [[f32; TILE]; ROWS] {
    let shape = Shape { m: ROWS, n: TILE, k: STEP };
    let kind = MmaKind::new(shape, Input::E4m3, Input::E4m3, Accumulator::F32).expect("PTX has it");
    // PTX ISA, "Matrix Fragments for mma.m16n8k32".
    let word = |of: &dyn Fn(usize) -> E4m3| u32::from_le_bytes(std::array::from_fn(|i| of(i).to_bits()));
    let in_quad = |register: usize, lane: usize| 16 * register + lane % 4 * 4;
    let side_a: [Lanes32; 4] = std::array::from_fn(|register| {
        std::array::from_fn(|lane| {
            let row = lane / 4 + 8 * (register % 2);
            word(&|i| a(row, in_quad(register / 2, lane) + i))
        })
    });
    let side_b: [Lanes32; 2] = std::array::from_fn(|register| {
        std::array::from_fn(|lane| word(&|i| b(in_quad(register, lane) + i, lane / 4)))
    });
    let place = |register: usize, lane: usize| (lane / 4 + 8 * (register / 2), lane % 4 * 2 + register % 2);
    let before: [Lanes32; 4] = std::array::from_fn(|register| {
        std::array::from_fn(|lane| {
            let (row, column) = place(register, lane);
            c[row][column].to_bits()
        })
    });
    let mut after = [[0; 32]; 4];
    mma(kind, TensorRules::HopperAsync, &side_a, &side_b, &before, &mut after).expect("sm_90a has it");
    let mut sums = [[0.0; TILE]; ROWS];
    for (register, lanes) in after.iter().enumerate() {
        for (lane, &bits) in lanes.iter().enumerate() {
            let (row, column) = place(register, lane);
            sums[row][column] = f32::from_bits(bits);
        }
    }
    sums
}

/// Random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        let mut random = Random(seed);
        random.uniform();
        random
    }

    /// A number between 0 and 1, excluding both.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (((x ^ x >> 31) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Student's t with three degrees of freedom.
    fn student(&mut self) -> f64 {
        let normal = self.normal();
        let chi: f64 = (0..3).map(|_| self.normal().powi(2)).sum();
        normal / (chi / 3.0).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two-level sums add at most a fifth to the error of rounding P, except if columns of V have a mean:
    /// then the blocks are truncated in one direction. The error of a single accumulator grows with the
    /// number of keys. At 4096 keys it is less than 1 % for normal draws. With a heavy key it is two fifths,
    /// because the product of that key makes the accumulator large from the beginning.
    #[test]
    fn two_levels_keep_what_one_loses() {
        for draw in Draw::ALL {
            let of = |keys| {
                let points = errors(draw, keys, 1);
                move |scheme| points.iter().find(|p| p.scheme == scheme).expect("all schemes").relative
            };
            let (short, long) = (of(512), of(4096));
            assert!(long(Scheme::ByBlock) < long(Scheme::Running), "{draw:?}");
            let least = long(Scheme::ByBlock) / long(Scheme::Exact);
            assert!(draw == Draw::Channels || least <= 1.2, "{draw:?} {least}");
            let loss = |of: &dyn Fn(Scheme) -> f64| of(Scheme::Running) / of(Scheme::Exact);
            let losses = [loss(&short), loss(&long)];
            assert!(losses[1] > losses[0], "{draw:?} {losses:?}");
            assert!(draw != Draw::HeavyKey || losses[1] > 1.3, "{losses:?}");
        }
    }
}
