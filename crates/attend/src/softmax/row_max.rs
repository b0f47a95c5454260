//! The row max m that exponentials subtract: when it is raised, and how O and l are rescaled then. With
//! [`Rescale::Beyond`] (lazy rescaling, FlashAttention-4) the stored row max may be stale.

use ptx::{Builder, CmpOp, F32, Half, Pred};
use tile::{AccTile, OperandType};

use super::reduce::quad_reduce;
use super::{Chains, LaneMaxima, OnlineSoftmax};

/// When the stored row max follows the running max and O is rescaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// At every block.
    Always,
    /// When the row max of any row of the warp exceeds the stored one by more than this many powers of two
    /// (lazy rescaling). Until then, probabilities may grow by that many powers of two. In f16 a row max has
    /// the weight 2^7 and 2^15 is the largest power, so the threshold is at most 8. Numerator and denominator
    /// share the factor.
    Beyond(u8),
}

impl Rescale {
    /// The largest threshold for f16. A row's maximum has the weight 2^7 there, and 2^15 is the largest power
    /// of two.
    pub const MOST_IN_F16: u8 = F16_LARGEST_POWER - F16_BELOW_MAXIMA;
    /// The largest threshold for e4m3. Each step removes one power of two from the range below a row's
    /// maximum.
    pub const MOST_IN_E4M3: u8 = E4M3_LARGEST_POWER;
}

/// For f16 probabilities, stored maxima lie this many powers of two below the row max. The smallest number of
/// f16 is 2^-24, so weights below 2^-25 of a stored maximum are lost in P V while the row's sum counts them.
/// The shift lowers this limit to 2^-32 of the maximum. bf16 has the exponent range of f32 and needs no
/// shift.
const F16_BELOW_MAXIMA: u8 = 7;
/// The last power of two in f16.
pub(super) const F16_LARGEST_POWER: u8 = 15;

/// The last power of two in e4m3.
const E4M3_LARGEST_POWER: u8 = 8;
/// The largest number in e4m3.
pub(super) const E4M3_LARGEST: f32 = 448.0;

/// Powers of two by which stored maxima lie above the row max, unless a variant needs more.
///
/// The smallest number of e4m3 is 2^-9. A row's largest probability is therefore the largest power of two
/// that stays in range when the maximum rises within the threshold: 2^8 without a threshold, as in
/// FlashAttention-3.
pub(super) const fn usual_headroom(weights: OperandType, rescale: Rescale) -> f32 {
    match (weights, rescale) {
        (OperandType::Half(Half::F16), _) => -(F16_BELOW_MAXIMA as f32),
        (OperandType::Half(Half::Bf16), _) => 0.0,
        (OperandType::E4m3, Rescale::Always) => -(E4M3_LARGEST_POWER as f32),
        (OperandType::E4m3, Rescale::Beyond(threshold)) => {
            -(E4M3_LARGEST_POWER.saturating_sub(threshold) as f32)
        }
    }
}

/// The stored row max of a row that has seen only −∞, from the mask or from the inputs. It is finite, so that
/// −∞ minus it is −∞ and the weight is 0, as in the oracle; −∞ − (−∞) would be NaN. No finite score is
/// smaller.
pub(crate) const NO_MAX: f32 = f32::MIN;

/// [`NO_MAX`] of kernels with a score program, in which a large negative bias may hide keys. Scaled scores
/// below it count as −∞. A row max `m = round(s · c)` is off by up to half a unit in its last place, and
/// `exp2(s · c − m)`, with the exact product, by as many powers of two: 64 at −2³¹, which f32 and bf16 hold,
/// and 1/2 at −2²³. All weights of a row share the error.
pub(super) const fn no_max_after_program(weights: OperandType) -> f32 {
    match weights {
        OperandType::Half(Half::Bf16) => -2_147_483_648.0,
        OperandType::Half(Half::F16) | OperandType::E4m3 => -8_388_608.0,
    }
}

/// A rescale of O that waits for the product that adds to O.
#[derive(Clone, Debug)]
pub struct DeferredRescale {
    /// Whether any row max of the warp was raised; `None` if O is rescaled at every block.
    raised: Option<Pred>,
    /// The rescale factor α of each row.
    factors: Vec<F32>,
}

impl DeferredRescale {
    /// Moves the rescale factors to `due`, one register per row: 1 for a row that is not rescaled.
    pub(crate) fn defer(&self, k: &mut Builder, due: &[F32]) {
        let mov = |k: &mut Builder| {
            for (&due, &factor) in due.iter().zip(&self.factors) {
                k.mov_to(due, factor);
            }
        };
        match self.raised {
            Some(raised) => k.if_(raised, mov),
            None => mov(k),
        }
    }

    /// Rescales the rows of `o`.
    pub fn apply(&self, k: &mut Builder, o: &AccTile) {
        let scale = |k: &mut Builder| {
            for (row, &factor) in (0..).zip(&self.factors) {
                o.scale_row(k, row, factor);
            }
        };
        match self.raised {
            Some(raised) => k.if_(raised, scale),
            None => scale(k),
        }
    }
}

impl OnlineSoftmax {
    /// Updates the row maxima with the scores of a block, and rescales `o` and the running sums.
    pub fn update(&self, k: &mut Builder, s: &AccTile, o: &AccTile) {
        let own = LaneMaxima::of(k, s);
        let maxima = self.scaled(k, &own);
        match self.when {
            Rescale::Always => self.rescale(k, &maxima, o),
            Rescale::Beyond(threshold) => {
                let exceeds = self.exceeds(k, &maxima, threshold.into());
                let any = k.vote_any(exceeds);
                k.if_(any, |k| self.rescale(k, &maxima, o));
            }
        }
    }

    /// Sets the row maxima from the first block. Nothing has to be rescaled there.
    pub fn set_row_max(&self, k: &mut Builder, maxima: &LaneMaxima) {
        for (&row_max, maximum) in self.row_max.iter().zip(self.scaled(k, maxima)) {
            k.max_to(row_max, row_max, maximum);
        }
    }

    /// Raises the row maxima and rescales the running sums. Returns each row's rescale factor for O.
    pub fn raise_to(&self, k: &mut Builder, maxima: &LaneMaxima) -> Vec<F32> {
        let maxima = self.scaled(k, maxima);
        (0..).zip(maxima).map(|(i, maximum)| self.raise_row(k, i, maximum)).collect()
    }

    /// Raises the row maxima to those of a block according to [`Rescale`], and rescales the running sums.
    pub fn update_row_max(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> DeferredRescale {
        let maxima = LaneMaxima::in_chains(k, s, chains.max);
        match self.when {
            Rescale::Always => DeferredRescale { raised: None, factors: self.raise_to(k, &maxima) },
            Rescale::Beyond(threshold) => {
                let exceeds = self.lane_exceeds(k, &maxima, self.above_row_max(threshold));
                let raised = k.vote_any(exceeds);
                let mut factors = Vec::new();
                k.if_(raised, |k| factors = self.raise_to(k, &maxima));
                DeferredRescale { raised: Some(raised), factors }
            }
        }
    }

    /// Raises the row maxima to those of a block, without a threshold.
    pub fn raise_row_max(&self, k: &mut Builder, s: &AccTile, chains: Chains) -> DeferredRescale {
        let maxima = LaneMaxima::in_chains(k, s, chains.max);
        DeferredRescale { raised: None, factors: self.raise_to(k, &maxima) }
    }

    /// Whether one of the lane's own scores exceeds the stored max of its row by more than `threshold`. A
    /// warp vote on this result needs no shuffles for the row max. NaN does not exceed a threshold.
    fn lane_exceeds(&self, k: &mut Builder, maxima: &LaneMaxima, threshold: f32) -> Pred {
        let mut exceeds: Option<Pred> = None;
        for ((&row_max, &factor), &maximum) in self.row_max.iter().zip(&self.factors).zip(&maxima.0) {
            let minus = k.neg(row_max);
            let growth = k.mad(maximum, factor, minus);
            exceeds = Some(match exceeds {
                None => k.setp_f(CmpOp::Gt, growth, threshold),
                Some(other) => k.setp_f_or(CmpOp::Gt, growth, threshold, other),
            });
        }
        exceeds.expect("a tile has rows")
    }

    /// The scaled row maxima plus the headroom, computed from the maxima of the lanes.
    fn scaled(&self, k: &mut Builder, maxima: &LaneMaxima) -> Vec<F32> {
        let of_row = |(&own, &factor): (&F32, &F32)| {
            let row = quad_reduce(k, own, |k, a, b| k.max(a, b));
            match self.headroom {
                0.0 => k.mul(row, factor),
                headroom if self.wide && headroom < 0.0 => k.add_up(row, headroom),
                headroom => k.mad(row, factor, headroom),
            }
        };
        maxima.0.iter().zip(&self.factors).map(of_row).collect()
    }

    /// Converts a threshold relative to the largest score into one relative to the stored row max.
    pub(crate) fn above_row_max(&self, threshold: u8) -> f32 {
        f32::from(threshold) - self.headroom
    }

    /// Whether the maximum of any row exceeds its stored row max by more than `threshold`. NaN does not
    /// exceed a threshold.
    fn exceeds(&self, k: &mut Builder, maxima: &[F32], threshold: f32) -> Pred {
        let growth = k.mov(f32::NEG_INFINITY);
        for (&row_max, &maximum) in self.row_max.iter().zip(maxima) {
            let of_row = k.sub(maximum, row_max);
            k.max_to(growth, growth, of_row);
        }
        k.setp_f(CmpOp::Gt, growth, threshold)
    }

    /// Raises the row maxima and rescales `o` and the sums.
    fn rescale(&self, k: &mut Builder, maxima: &[F32], o: &AccTile) {
        for (i, &maximum) in maxima.iter().enumerate() {
            let alpha = self.raise_row(k, i, maximum);
            o.scale_row(k, i as u32, alpha);
        }
    }

    /// Raises a row's stored max and rescales its sum; returns the factor α for O.
    fn raise_row(&self, k: &mut Builder, i: usize, maximum: F32) -> F32 {
        let row_max = self.row_max[i];
        let next = k.max(row_max, maximum);
        let distance = k.sub(row_max, next);
        let alpha = k.ex2(distance);
        k.mov_to(row_max, next);
        k.mul_to(self.sum[i], self.sum[i], alpha);
        alpha
    }
}
