//! The online softmax on accumulator fragments (Milakov & Gimelshein 2018; FlashAttention-2, Algorithm 1), in
//! the log2 domain: with `c = scale · log2 e > 0`, a row's probabilities are `exp2(s · c − m)`, one FFMA and
//! one EX2 each.

use ptx::{Builder, CmpOp, F32, Pred};
use tile::{AccTile, OperandTile, OperandType};

use super::reduce::{QUAD, reduce};
use super::row_max::{NO_MAX, no_max_after_program, usual_headroom};
use super::{Rescale, Sums};
use crate::{ScorePrograms, Sinks};

/// Running maximum and sum of the rows a lane holds.
#[derive(Clone, Debug)]
pub struct OnlineSoftmax {
    /// The type to which probabilities are rounded.
    pub(crate) weights: OperandType,
    pub(crate) when: Rescale,
    /// The factor of each row's scores in the exponent, positive.
    pub(crate) factors: Vec<F32>,
    /// The stored row max m of each row, which exponentials subtract: the largest scaled score when m was
    /// last raised, plus the headroom; its first value until a greater score was seen. With
    /// [`Rescale::Beyond`], and after speculative blocks, m is stale: later scores may exceed it.
    pub(crate) row_max: Vec<F32>,
    /// The lane's part of each row's sum. The parts of a quad are added at the end.
    pub(crate) sum: Vec<F32>,
    pub(crate) sums: Sums,
    /// The row max m is set this many powers of two above the largest score.
    pub(crate) headroom: f32,
    /// How many of eight exponentials run on the FMA pipe: in speculative blocks, and for e4m3 in every
    /// block.
    pub(crate) by_fma: u32,
    /// Whether m is rounded up, so that no weight exceeds the headroom where m has units of more than 1.
    pub(crate) wide: bool,
    /// Factor of O in addition to the inverse of the sum; `None` for 1.
    pub(crate) output_factor: Option<F32>,
}

/// The final result of the softmax, one value per row.
#[derive(Clone, Debug)]
pub struct Finished {
    /// `ln Σ exp(scale · s)`; −∞ for a row that saw no key.
    pub lse: Vec<F32>,
}

impl OnlineSoftmax {
    /// The softmax of `rows` rows of a warp, after `programs`. `factor` is `scale · log2 e`, positive.
    pub fn new(
        k: &mut Builder,
        weights: impl Into<OperandType>,
        rescale: Rescale,
        factor: F32,
        rows: u32,
        programs: Option<&ScorePrograms>,
    ) -> OnlineSoftmax {
        let weights = weights.into();
        let lane_rows = rows / 8;
        let has_score = programs.is_some_and(|programs| programs.has_score() && !programs.is_wide());
        let no_max = if has_score { no_max_after_program(weights) } else { NO_MAX };
        let row_max = (0..lane_rows).map(|_| k.mov(no_max)).collect();
        let sum = (0..lane_rows).map(|_| k.mov(0.0f32)).collect();
        let factors = vec![factor; lane_rows as usize];
        let (sums, headroom) = (Sums::Lanes, usual_headroom(weights, rescale));
        OnlineSoftmax {
            weights,
            when: rescale,
            factors,
            row_max,
            sum,
            sums,
            headroom,
            by_fma: 0,
            wide: false,
            output_factor: None,
        }
    }

    /// Takes scores that were multiplied by all factors before, so that `factor` is 1 ([`crate::Softcap`]).
    #[must_use]
    pub fn of_wide(self, wide: bool) -> OnlineSoftmax {
        OnlineSoftmax { wide, ..self }
    }

    /// Takes the row sums from a product ([`OnlineSoftmax::take_sums`]), and sets m `headroom` powers of two
    /// above the largest score. Rescale thresholds still count from the largest score.
    #[must_use]
    pub fn summed_by_products(self, headroom: u8) -> OnlineSoftmax {
        OnlineSoftmax { sums: Sums::Product, headroom: headroom.into(), ..self }
    }

    /// Runs `of_eight` of eight exponentials on the FMA pipe: in speculative blocks, and for e4m3 in every
    /// block. On overflow these exponentials are large, not infinite or NaN; a speculative block with such a
    /// value is recomputed.
    #[must_use]
    pub fn with_exponentials_by_fma(self, of_eight: u32) -> OnlineSoftmax {
        OnlineSoftmax { by_fma: of_eight, ..self }
    }

    /// Takes registers with factors of the scores in the exponent, which the caller changes from one block to
    /// the next. Each register is for as many neighbouring rows of the lane.
    #[must_use]
    pub fn with_row_factors(self, factors: &[F32]) -> OnlineSoftmax {
        let rows = self.row_max.len();
        OnlineSoftmax { factors: (0..rows).map(|row| factors[row * factors.len() / rows]).collect(), ..self }
    }

    /// Also multiplies O by `factor`, a factor of V, when O is divided by the sums. Infinity counts as NaN.
    #[must_use]
    pub fn with_output_factor(self, factor: Option<F32>) -> OnlineSoftmax {
        OnlineSoftmax { output_factor: factor, ..self }
    }

    /// Turns the scores of a block into probabilities, rounded to the input type, and adds them to the
    /// running sums.
    pub fn probabilities(&self, k: &mut Builder, s: &AccTile) -> OperandTile {
        self.exponentiate_all(k, s);
        self.rounded(k, s)
    }

    /// Probabilities, rounded to the input type.
    pub fn rounded(&self, k: &mut Builder, p: &AccTile) -> OperandTile {
        p.round(k, self.weights)
    }

    /// Like [`OnlineSoftmax::probabilities`], but without rounding.
    pub fn exponentiate_all(&self, k: &mut Builder, s: &AccTile) {
        for i in 0..s.lane_rows() {
            self.exponentiate(k, s, i);
        }
    }

    /// `s = exp2(s · c − m)` in place, added to the row's sum.
    fn exponentiate(&self, k: &mut Builder, s: &AccTile, i: u32) {
        let minus = k.neg(self.row_max[i as usize]);
        for score in s.row(i) {
            k.mad_to(score, score, self.factors[i as usize], minus);
            k.ex2_to(score, score);
        }
        let own = reduce(k, s.row(i), |k, a, b| k.add(a, b));
        let sum = self.sum[i as usize];
        k.add_to(sum, sum, own);
    }

    /// Makes the sums NaN of rows that have seen a key if `refused` is true. Comes before the sums of lanes
    /// or warps are added.
    pub fn spoil_seen(&self, k: &mut Builder, refused: Pred) {
        for &sum in &self.sum {
            let seen = k.setp_f(CmpOp::Ne, sum, 0.0f32);
            let spoiled = k.and_pred(seen, refused);
            k.selp_to(sum, f32::NAN, sum, spoiled);
        }
    }

    /// Completes the sums, adds the sinks, and divides `o` by the sums. A row that saw no key keeps its
    /// zeros.
    pub fn finish(&self, k: &mut Builder, o: &AccTile, sinks: Option<&Sinks>) -> Finished {
        self.gather_sums(k);
        self.normalize(k, o, sinks);
        Finished { lse: self.lse(k) }
    }

    /// Adds the sinks to sums that are otherwise complete, and divides `o` by the sums.
    pub fn normalize(&self, k: &mut Builder, o: &AccTile, sinks: Option<&Sinks>) {
        // Sinks change the sums, so the rows that saw a key are found first.
        let output_factors: Option<Vec<F32>> = self.output_factor.map(|factor| {
            let factor = accepted_value_factor(k, factor);
            self.sum.iter().map(|&sum| factor_if_seen(k, factor, sum)).collect()
        });
        let inverses = self.inverses(k, sinks);
        for (i, inverse) in inverses.into_iter().enumerate() {
            let factor = output_factors.as_ref().map_or(inverse, |factors| k.mul(inverse, factors[i]));
            o.scale_row(k, i as u32, factor);
        }
    }

    /// Adds the parts of the quad's lanes to complete sums.
    pub fn gather_sums(&self, k: &mut Builder) {
        for &sum in &self.sum {
            for mask in QUAD {
                let other = k.shfl_xor(sum, mask);
                k.add_to(sum, sum, other);
            }
        }
    }

    /// Adds the sinks to sums that are otherwise complete, and returns the factors that normalise O: 1 for a
    /// row that saw no key.
    pub(crate) fn inverses(&self, k: &mut Builder, sinks: Option<&Sinks>) -> Vec<F32> {
        let alphas = sinks.map(|sinks| self.add_sinks(k, sinks));
        let inverses: Vec<F32> = self.sum.iter().map(|&sum| inverse(k, sum)).collect();
        match alphas {
            None => inverses,
            Some(alphas) => {
                inverses.into_iter().zip(alphas).map(|(inverse, alpha)| k.mul(inverse, alpha)).collect()
            }
        }
    }

    /// Adds the sinks to sums that are otherwise complete, and returns the rescale factors for O. A sink may
    /// lie far above the row max; the row max is then raised to the sink.
    fn add_sinks(&self, k: &mut Builder, sinks: &Sinks) -> Vec<F32> {
        let add = |((&row_max, &sum), &sink): ((&F32, &F32), &F32)| {
            let next = k.max(row_max, sink);
            let [alpha, weight] = [row_max, sink].map(|logit| {
                let distance = k.sub(logit, next);
                k.ex2(distance)
            });
            k.mov_to(row_max, next);
            k.mad_to(sum, sum, alpha, weight);
            alpha
        };
        self.row_max.iter().zip(&self.sum).zip(&sinks.of_rows).map(add).collect()
    }

    /// `ln Σ exp(scale · s)` from complete sums.
    pub fn lse(&self, k: &mut Builder) -> Vec<F32> {
        self.sum.iter().zip(&self.row_max).map(|(&sum, &row_max)| log_sum(k, sum, row_max)).collect()
    }
}

/// Replaces an infinite factor of V by NaN.
pub fn accepted_value_factor(k: &mut Builder, factor: F32) -> F32 {
    k.mad(factor, 0.0f32, factor)
}

/// `factor`, or 1 for a row that saw no key, whose sum is 0: NaN must not reach the row's zeros.
pub(crate) fn factor_if_seen(k: &mut Builder, factor: F32, sum: F32) -> F32 {
    let empty = k.setp_f(CmpOp::Eq, sum, 0.0f32);
    k.selp(1.0f32, factor, empty)
}

/// The factor that normalises a row of O, from a complete sum: 1 for a row that saw no key.
pub(crate) fn inverse(k: &mut Builder, sum: F32) -> F32 {
    let empty = k.setp_f(CmpOp::Eq, sum, 0.0f32);
    let divisor = k.selp(1.0f32, sum, empty);
    k.rcp(divisor)
}

/// `ln Σ exp(scale · s)` of a row from its complete sum and its row max. A sum of 0 gives −∞.
pub(crate) fn log_sum(k: &mut Builder, sum: F32, row_max: F32) -> F32 {
    let log = k.lg2(sum);
    let log = k.add(log, row_max);
    k.mul(log, std::f32::consts::LN_2)
}
