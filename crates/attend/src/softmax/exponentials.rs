//! The exponentials of a block and their sums, as a consumer warpgroup computes them while `wgmma` products
//! are in flight.

use ptx::{Builder, F32};
use tile::{AccTile, OperandType};

use super::exp2::exp2_by_fma;
use super::reduce::fold_rows;
use super::{Chains, OnlineSoftmax, Sums};

impl OnlineSoftmax {
    /// `s = exp2(s · c − m)` in place. Returns the lane's part of each row's sum over the block, or nothing
    /// if a product computes the sums.
    pub fn exponentials(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> Vec<F32> {
        // In e4m3, the rounding of P (up to 2^-4) exceeds the polynomial's error, so every block may use the
        // FMA pipe.
        let by_fma = if self.weights == OperandType::E4m3 { self.by_fma } else { 0 };
        self.exponentials_by(k, s, chains, by_fma)
    }

    /// Like [`OnlineSoftmax::exponentials`], for a speculative block whose result is checked afterwards.
    pub fn speculative_exponentials(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> Vec<F32> {
        self.exponentials_by(k, s, chains, self.by_fma)
    }

    /// Like [`OnlineSoftmax::exponentials`], with the first `by_fma` of every eight columns on the FMA pipe.
    fn exponentials_by(&self, k: &mut Builder, s: &AccTile, chains: Chains, by_fma: u32) -> Vec<F32> {
        let minus: Vec<F32> = self.row_max.iter().map(|&row_max| k.neg(row_max)).collect();
        let exponential = |k: &mut Builder, (row, column): (usize, usize), score: F32| {
            k.mad_to(score, score, self.factors[row], minus[row]);
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
