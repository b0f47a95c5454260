//! The online softmax, split into the steps that a consumer warpgroup runs while `wgmma` products are in
//! flight. O must not be touched until the product that adds to it is complete, so its rescale is deferred.

use ptx::{Builder, CmpOp, F32, Pred};

use tile::AccTile;

use super::exp2::exp2_by_fma;
use super::{LaneMaxima, OnlineSoftmax, Rescale, Sums};

/// Number of independent chains in a row's reductions. More chains hide latency and cost one more instruction
/// each at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Chains {
    /// Of the maximum.
    pub max: u32,
    /// Of the sum.
    pub sum: u32,
}

/// A deferred rescale of O.
#[derive(Clone, Debug)]
pub struct DeferredRescale {
    /// Whether any row_max of the warp moved; `None` if O is rescaled at every block.
    moved: Option<Pred>,
    /// The rescale factor α of each row.
    factors: Vec<F32>,
}

impl DeferredRescale {
    /// Rescales the rows of `o`.
    pub fn apply(&self, k: &mut Builder, o: &AccTile) {
        let scale = |k: &mut Builder| {
            for (row, &factor) in (0..).zip(&self.factors) {
                o.scale_row(k, row, factor);
            }
        };
        match self.moved {
            Some(moved) => k.if_(moved, scale),
            None => scale(k),
        }
    }
}

impl LaneMaxima {
    /// The maxima of one tile of scores, columns in order and rows interleaved, with `chains` chains per row.
    fn in_chains(k: &mut Builder, s: &AccTile, chains: u32) -> LaneMaxima {
        LaneMaxima(fold_rows(
            k,
            s,
            chains,
            |_, _, score| score,
            |k, a, b| k.max_to(a, a, b),
            |k, a, b| k.max(a, b),
        ))
    }
}

impl OnlineSoftmax {
    /// Raises the row maxima to those of a block, as [`Rescale`] says, and rescales the running sums.
    pub fn update_row_max(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> DeferredRescale {
        let maxima = LaneMaxima::in_chains(k, s, chains.max);
        match self.when {
            Rescale::Always => DeferredRescale { moved: None, factors: self.raise_to(k, &maxima) },
            Rescale::Beyond(threshold) => {
                let exceeds = self.lane_exceeds(k, &maxima, self.above_row_max(threshold));
                let moved = k.vote_any(exceeds);
                let mut factors = Vec::new();
                k.if_(moved, |k| factors = self.raise_to(k, &maxima));
                DeferredRescale { moved: Some(moved), factors }
            }
        }
    }

    /// Raises the row maxima to those of a block, without a threshold.
    pub fn raise_row_max(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> DeferredRescale {
        let maxima = LaneMaxima::in_chains(k, s, chains.max);
        DeferredRescale { moved: None, factors: self.raise_to(k, &maxima) }
    }

    /// Whether one of the lane's own scores exceeds its row's row_max by more than `threshold`. A warp vote
    /// over this needs no shuffles for the row max. NaN does not exceed.
    fn lane_exceeds(&self, k: &mut Builder, maxima: &LaneMaxima, threshold: f32) -> Pred {
        let mut exceeds: Option<Pred> = None;
        for (&row_max, &maximum) in self.row_max.iter().zip(&maxima.0) {
            let minus = k.neg(row_max);
            let growth = k.mad(maximum, self.factor, minus);
            exceeds = Some(match exceeds {
                None => k.setp_f(CmpOp::Gt, growth, threshold),
                Some(other) => k.setp_f_or(CmpOp::Gt, growth, threshold, other),
            });
        }
        exceeds.expect("a tile has rows")
    }

    /// `s = exp2(s · c − m)` in place. Returns the lane's part of each row's sum of the block, or nothing if
    /// a product computes the sums.
    pub fn exponentials(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> Vec<F32> {
        self.exponentials_by(k, s, chains, 0)
    }

    /// Like [`OnlineSoftmax::exponentials`], for a speculative block whose result is checked afterwards.
    pub fn speculative_exponentials(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> Vec<F32> {
        self.exponentials_by(k, s, chains, self.by_fma)
    }

    /// Like [`OnlineSoftmax::exponentials`], with the first `by_fma` of every eight columns on the FMA pipe.
    fn exponentials_by(&self, k: &mut Builder, s: &AccTile, chains: Chains, by_fma: u32) -> Vec<F32> {
        let minus: Vec<F32> = self.row_max.iter().map(|&row_max| k.neg(row_max)).collect();
        let exponential = |k: &mut Builder, (row, column): (usize, usize), score: F32| {
            k.mad_to(score, score, self.factor, minus[row]);
            if (column as u32 % 8) < by_fma {
                exp2_by_fma(k, score);
            } else {
                k.ex2_to(score, score);
            }
            score
        };
        match self.sums {
            Sums::Lanes => {
                fold_rows(k, s, chains.sum, exponential, |k, a, b| k.add_to(a, a, b), |k, a, b| k.add(a, b))
            }
            Sums::Product => {
                let rows: Vec<Vec<F32>> = (0..s.lane_rows()).map(|row| s.row(row).collect()).collect();
                for column in 0..rows[0].len() {
                    for (row, scores) in rows.iter().enumerate() {
                        exponential(k, (row, column), scores[column]);
                    }
                }
                Vec::new()
            }
        }
    }

    /// Adds the sums of a block to the running sums.
    pub fn add_sums(&self, k: &mut Builder, sums: &[F32]) {
        for (&total, &sum) in self.sum.iter().zip(sums) {
            k.add_to(total, total, sum);
        }
    }
}

/// Reduces each row of a tile, columns in order and rows interleaved. `map` prepares an element, `fold` adds
/// it to one of `chains` chains, `join` combines the chains.
fn fold_rows(
    k: &mut Builder,
    s: &AccTile,
    chains: u32,
    map: impl Fn(&mut Builder, (usize, usize), F32) -> F32,
    fold: impl Fn(&mut Builder, F32, F32),
    join: impl Fn(&mut Builder, F32, F32) -> F32,
) -> Vec<F32> {
    let rows: Vec<Vec<F32>> = (0..s.lane_rows()).map(|row| s.row(row).collect()).collect();
    let chains = (chains as usize).min(rows[0].len());
    let mut folded: Vec<Vec<F32>> = vec![Vec::new(); rows.len()];
    for column in 0..rows[0].len() {
        for (row, folded) in folded.iter_mut().enumerate() {
            let element = map(k, (row, column), rows[row][column]);
            if column < chains {
                let chain = k.mov(element);
                folded.push(chain);
            } else {
                fold(k, folded[column % chains], element);
            }
        }
    }
    folded.into_iter().map(|row| row.into_iter().reduce(|a, b| join(k, a, b)).expect("a chain")).collect()
}
