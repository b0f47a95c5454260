//! Descale factors of 8-bit inputs with one factor per block of rows.
//!
//! Factors of Q and K multiply the scores before the softcap and the mask, factors of V multiply the sums P V
//! of a KV block. A KV block, or a warp's part of it, has keys of one factor of V.

use ptx::{Builder, CmpOp, F32, Global, R32};
use tile::{AccTile, divide};

use crate::{Coverage, Masker, OnlineSoftmax};

/// The factors of the blocks of rows of a sequence and head, in global memory.
#[derive(Clone, Copy, Debug)]
pub struct BlockFactors {
    /// The factor of the first block.
    pub first: Global,
    /// Elements from one factor to the next.
    pub stride: R32,
    /// Rows that share a factor.
    pub rows: u32,
    /// The last row that has a factor.
    pub last: R32,
}

impl BlockFactors {
    /// The factor of a row. Rows of a tile beyond the last row get the factor of the last row.
    pub fn load(&self, k: &mut Builder, row: R32) -> F32 {
        let row = k.min_u(row, self.last);
        let block = divide(k, row, self.rows);
        let index = k.mul_wide_u(block, self.stride);
        let base = k.mad(index, 4, self.first.base);
        k.ld(Global { base, offset: self.first.offset })
    }
}

/// Replaces a factor of Q or K that is negative, infinite or NaN by NaN.
pub fn accepted_score_factor(k: &mut Builder, factor: F32) -> F32 {
    let positive = k.setp_f(CmpOp::Ge, factor, 0.0f32);
    let finite = k.setp_f(CmpOp::Lt, factor, f32::INFINITY);
    let fits = k.and_pred(positive, finite);
    k.selp(factor, f32::NAN, fits)
}

/// The factors of a tile's scores.
#[derive(Clone, Debug)]
pub struct ScoreFactors {
    /// For each of the lane's rows, or for each group of neighbouring ones: the factor of Q, times the factor
    /// of K if K has one per head. NaN if a factor is not accepted.
    of_rows: Vec<F32>,
    /// The factors of K, if K has one per block of rows.
    keys: Option<BlockFactors>,
    place: Place,
}

/// Where factors are multiplied with the scores.
#[derive(Clone, Debug)]
enum Place {
    /// In the exponent: the softmax multiplies scores by these factors.
    Exponent {
        /// The factor of scores without descale factors, positive.
        common: F32,
        /// The factors of the scores that are computed, for each of `of_rows`.
        next: Vec<F32>,
        /// The factors of the scores that the softmax takes, for each of `of_rows`. [`ScoreFactors::enter`]
        /// sets them.
        current: Vec<F32>,
    },
    /// On the scores themselves.
    Scores,
}

impl ScoreFactors {
    /// Factors in the exponent, where they cost nothing per score. All keys of a tile must have one factor.
    /// `common` is the factor of scores without descale factors.
    pub fn in_exponent(
        k: &mut Builder,
        common: F32,
        of_rows: Vec<F32>,
        keys: Option<BlockFactors>,
    ) -> ScoreFactors {
        let [next, current] = [0; 2].map(|_| of_rows.iter().map(|_| k.reg()).collect());
        ScoreFactors { of_rows, keys, place: Place::Exponent { common, next, current } }
    }

    /// Factors that multiply each score, for tiles whose keys have several factors, and for scores with a
    /// softcap.
    pub fn on_scores(of_rows: Vec<F32>, keys: Option<BlockFactors>) -> ScoreFactors {
        ScoreFactors { of_rows, keys, place: Place::Scores }
    }

    /// The softmax of a tile with these factors.
    pub fn in_softmax(&self, softmax: OnlineSoftmax) -> OnlineSoftmax {
        match &self.place {
            Place::Exponent { current, .. } => softmax.with_row_factors(current),
            Place::Scores => softmax,
        }
    }

    /// Loads the factors of keys, one for each group of keys that share a factor.
    pub fn load(&self, k: &mut Builder, of: &WarpKeys) -> Vec<F32> {
        let Some(keys) = self.keys else { return Vec::new() };
        let groups = (of.count / keys.rows).max(1);
        (0..groups)
            .map(|group| {
                let first = if group == 0 { of.origin } else { k.add(of.origin, group * keys.rows) };
                let factor = keys.load(k, first);
                accepted_score_factor(k, factor)
            })
            .collect()
    }

    /// Multiplies scores that are not masked yet, or prepares the factors in the exponent. `of_keys` are the
    /// [loaded](ScoreFactors::load) factors of K.
    pub fn apply(&self, k: &mut Builder, s: &AccTile, of_keys: &[F32]) {
        match &self.place {
            Place::Exponent { common, next, .. } => {
                let products = self.times(k, of_keys.first().copied());
                for (&next, &product) in next.iter().zip(&products) {
                    k.mul_to(next, product, *common);
                    // With a factor of 0, the −∞ of masked scores would become NaN. The maximum also replaces
                    // NaN.
                    k.max_to(next, next, f32::MIN_POSITIVE);
                }
                self.spoil(k, s, &products);
            }
            Place::Scores => self.multiply(k, s, of_keys),
        }
    }

    /// Gives the factors of the scores that were computed last to the softmax.
    pub fn enter(&self, k: &mut Builder) {
        if let Place::Exponent { next, current, .. } = &self.place {
            for (&current, &next) in current.iter().zip(next) {
                k.mov_to(current, next);
            }
        }
    }

    /// The factors of rows times a factor of K.
    fn times(&self, k: &mut Builder, of_keys: Option<F32>) -> Vec<F32> {
        let product = |&of_row: &F32| of_keys.map_or(of_row, |of_keys| k.mul(of_row, of_keys));
        self.of_rows.iter().map(product).collect()
    }

    /// Makes the scores of rows with a NaN factor NaN. The mask then hides the scores of keys that a row does
    /// not see.
    fn spoil(&self, k: &mut Builder, s: &AccTile, products: &[F32]) {
        let mut bad = k.setp_f(CmpOp::Neu, products[0], products[0]);
        for &product in &products[1..] {
            bad = k.setp_f_or(CmpOp::Neu, product, product, bad);
        }
        let any = k.vote_any(bad);
        k.if_(any, |k| {
            for i in 0..s.lane_rows() {
                let product = of_row(products, i, s.lane_rows());
                for score in s.row(i) {
                    k.mad_to(score, product, 0.0f32, score);
                }
            }
        });
    }

    /// Multiplies the scores of each group of keys by the factor of the group and by those of the rows.
    fn multiply(&self, k: &mut Builder, s: &AccTile, of_keys: &[F32]) {
        let rows = self.keys.map_or(u32::MAX, |keys| keys.rows);
        let groups: Vec<Vec<F32>> = match of_keys {
            [] => vec![self.of_rows.clone()],
            _ => of_keys.iter().map(|&of_keys| self.times(k, Some(of_keys))).collect(),
        };
        for i in 0..s.lane_rows() {
            for (element, score) in (0..).zip(s.row(i)) {
                // A lane holds two of every eight columns.
                let group = element / 2 * 8 / rows;
                let factor = of_row(&groups[group as usize], i, s.lane_rows());
                k.mul_to(score, score, factor);
            }
        }
    }
}

/// The factor of one of `lane_rows` rows, of which neighbouring ones share a factor.
fn of_row(factors: &[F32], row: u32, lane_rows: u32) -> F32 {
    factors[row as usize * factors.len() / lane_rows as usize]
}

/// The factors of V, if V has one per block of rows.
#[derive(Clone, Copy, Debug)]
pub struct ValueFactors(pub BlockFactors);

/// Keys of a warp in a KV block.
#[derive(Clone, Copy, Debug)]
pub struct WarpKeys {
    /// The first key.
    pub origin: R32,
    /// The number of keys.
    pub count: u32,
    pub coverage: Coverage,
}

impl ValueFactors {
    /// Loads the factor of the values of keys. An infinite factor becomes NaN.
    pub fn load(&self, k: &mut Builder, of: &WarpKeys) -> F32 {
        let factor = self.0.load(k, of.origin);
        k.mad(factor, 0.0f32, factor)
    }

    /// Sets `to` to the factor for each of the lane's rows. A NaN factor becomes 0 for a row that sees none of
    /// the values: the row's sum is 0, and 0 · NaN would reach O.
    pub fn set(&self, k: &mut Builder, to: &[F32], factor: F32, keys: &WarpKeys, mask: Option<&Masker>) {
        for &to in to {
            k.mov_to(to, factor);
        }
        let Some(mask) = mask.filter(|_| keys.coverage == Coverage::Partial) else { return };
        let bad = k.setp_f(CmpOp::Neu, factor, factor);
        k.if_(bad, |k| {
            for (row, &to) in (0..).zip(to) {
                let sees = mask.sees_any(k, row, keys.origin, keys.count);
                k.selp_to(to, factor, 0.0f32, sees);
            }
        });
    }
}
