//! Descale factors of 8-bit inputs with one factor per block of rows.
//!
//! Factors of Q and K multiply the scores before the softcap, the programs and the mask. Factors of V
//! multiply the sums P V of a KV block. A KV block, or a warp's part of it, has keys of one factor of V.

use ptx::{Builder, CmpOp, F32, Global, Pred, R32};
use tile::{AccTile, divide};

use crate::{Coverage, Masker, OnlineSoftmax, accepted_value_factor};

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
    /// of K if K has one per head. NaN if a factor is not accepted. Empty without such factors.
    of_rows: Vec<F32>,
    /// The factors of K, if K has one per block of rows.
    keys: Option<BlockFactors>,
    place: FactorPlace,
}

/// Where factors are multiplied with the scores.
#[derive(Clone, Debug)]
enum FactorPlace {
    /// In the exponent: the softmax multiplies scores by these factors.
    Exponent {
        /// `of_rows` times the factor of scores without descale factors.
        scaled: Vec<F32>,
        /// Whether one of `of_rows` is NaN; `None` without such factors.
        spoiled: Option<Pred>,
        /// The factors of the scores that are computed, for each of `scaled`.
        next: Vec<F32>,
        /// The factors of the scores that the softmax takes, for each of `scaled`. [`ScoreFactors::enter`]
        /// sets them.
        current: Vec<F32>,
    },
    /// On the scores themselves.
    Scores,
}

impl ScoreFactors {
    /// Factors in the exponent, where they cost nothing per score. All keys of a tile must have one factor.
    /// `common` is the factor of scores without descale factors, positive.
    pub fn in_exponent(
        k: &mut Builder,
        common: F32,
        of_rows: Vec<F32>,
        keys: Option<BlockFactors>,
    ) -> ScoreFactors {
        let scaled: Vec<F32> = match &of_rows[..] {
            [] => vec![common],
            _ => of_rows.iter().map(|&of_row| k.mul(of_row, common)).collect(),
        };
        let spoiled = of_rows.iter().fold(None, |spoiled, &of_row| {
            Some(match spoiled {
                None => k.setp_f(CmpOp::Neu, of_row, of_row),
                Some(spoiled) => k.setp_f_or(CmpOp::Neu, of_row, of_row, spoiled),
            })
        });
        let [next, current] = [0; 2].map(|_| scaled.iter().map(|_| k.reg()).collect());
        ScoreFactors { of_rows, keys, place: FactorPlace::Exponent { scaled, spoiled, next, current } }
    }

    /// Factors that multiply each score, for tiles whose keys have several factors, and for scores that a
    /// softcap or a score program takes.
    pub fn on_scores(of_rows: Vec<F32>, keys: Option<BlockFactors>) -> ScoreFactors {
        ScoreFactors { of_rows, keys, place: FactorPlace::Scores }
    }

    /// The softmax of a tile with these factors.
    pub fn in_softmax(&self, softmax: OnlineSoftmax) -> OnlineSoftmax {
        match &self.place {
            FactorPlace::Exponent { current, .. } => softmax.with_row_factors(current),
            FactorPlace::Scores => softmax,
        }
    }

    /// Loads the factors of keys, one for each group of keys that share a factor. Nothing waits for them
    /// before [`ScoreFactors::apply`].
    pub fn load(&self, k: &mut Builder, of: &WarpKeys) -> Vec<F32> {
        let Some(keys) = self.keys else { return Vec::new() };
        let groups = (of.count / keys.rows).max(1);
        (0..groups)
            .map(|group| {
                let first = if group == 0 { of.origin } else { k.add(of.origin, group * keys.rows) };
                keys.load(k, first)
            })
            .collect()
    }

    /// Multiplies scores that are not masked yet, or prepares the factors in the exponent. `of_keys` are the
    /// [loaded](ScoreFactors::load) factors of K.
    pub fn apply(&self, k: &mut Builder, s: &AccTile, of_keys: &[F32]) {
        match &self.place {
            FactorPlace::Exponent { scaled, spoiled, next, .. } => {
                let of_keys = of_keys.first().copied();
                for (&next, &scaled) in next.iter().zip(scaled) {
                    match of_keys {
                        None => k.mov_to(next, scaled),
                        Some(of_keys) => k.mul_to(next, scaled, of_keys),
                    }
                    // With a factor of 0, the −∞ of masked scores would become NaN. The maximum also
                    // replaces NaN.
                    k.max_to(next, next, f32::MIN_POSITIVE);
                }
                self.spoil(k, s, of_keys, *spoiled);
            }
            FactorPlace::Scores => self.multiply(k, s, of_keys),
        }
    }

    /// Gives the factors of the scores that were computed last to the softmax.
    pub fn enter(&self, k: &mut Builder) {
        if let FactorPlace::Exponent { next, current, .. } = &self.place {
            for (&current, &next) in current.iter().zip(next) {
                k.mov_to(current, next);
            }
        }
    }

    /// The accepted factors of rows times a factor of K; NaN where a factor is not accepted.
    fn products(&self, k: &mut Builder, of_keys: Option<F32>) -> Vec<F32> {
        let of_keys = of_keys.map(|factor| accepted_score_factor(k, factor));
        match (&self.of_rows[..], of_keys) {
            (of_rows, None) => of_rows.to_vec(),
            ([], Some(of_keys)) => vec![of_keys],
            (of_rows, Some(of_keys)) => of_rows.iter().map(|&of_row| k.mul(of_row, of_keys)).collect(),
        }
    }

    /// Makes scores NaN whose factor is not accepted. The mask then hides the scores of keys that a row does
    /// not see.
    fn spoil(&self, k: &mut Builder, s: &AccTile, of_keys: Option<F32>, spoiled: Option<Pred>) {
        let bad = match (of_keys, spoiled) {
            (None, None) => return,
            (None, Some(spoiled)) => spoiled,
            (Some(of_keys), spoiled) => {
                let negative = match spoiled {
                    None => k.setp_f(CmpOp::Lt, of_keys, 0.0f32),
                    Some(spoiled) => k.setp_f_or(CmpOp::Lt, of_keys, 0.0f32, spoiled),
                };
                // Infinite or NaN.
                k.setp_f_or(CmpOp::Geu, of_keys, f32::INFINITY, negative)
            }
        };
        let any = k.vote_any(bad);
        k.if_(any, |k| {
            let products = self.products(k, of_keys);
            for i in 0..s.lane_rows() {
                let product = of_row(&products, i, s.lane_rows());
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
            _ => of_keys.iter().map(|&of_keys| self.products(k, Some(of_keys))).collect(),
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
    /// Loads the factor of the values of keys. Nothing waits for it before [`ValueFactors::set`].
    pub fn load(&self, k: &mut Builder, of: &WarpKeys) -> F32 {
        self.0.load(k, of.origin)
    }

    /// Sets `to` to the loaded factor for each of the lane's rows. An infinite factor becomes NaN. NaN
    /// becomes 0 for a row that sees none of the values: the row's sum is 0, and 0 · NaN would reach O.
    pub fn set(&self, k: &mut Builder, to: &[F32], factor: F32, keys: &WarpKeys, mask: Option<&Masker>) {
        let factor = accepted_value_factor(k, factor);
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
