//! The online softmax on accumulator fragments (Milakov & Gimelshein 2018; FlashAttention-2, Algorithm 1), in
//! the log2 domain: with `c = scale · log2 e > 0`, a row's probabilities are `exp2(s · c − m)`, one FFMA and
//! one EX2 each.

use ptx::{Builder, CmpOp, F32, Half, Pred};

use tile::{AccTile, ProbTile};

use super::Sums;

/// When the row_max follows the row max and O is rescaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// At every block.
    Always,
    /// When a row of the warp exceeds its row_max by more than this many powers of two (lazy rescaling).
    /// Until then probabilities may reach `2^threshold`, which f16 holds up to 15; numerator and denominator
    /// share the factor.
    Beyond(u8),
}

impl Rescale {
    /// The most powers of two that probabilities may grow by in f16: a maximum weighs 2^7 there, and 2^15 is
    /// the last power of two.
    pub const MOST_IN_F16: u8 = F16_LARGEST_POWER - F16_BELOW_MAXIMA;
}

/// Powers of two by which stored maxima lie below the row max where probabilities are f16, whose smallest
/// number is 2^-24: what weighs less than 2^-25 of a row_max is lost to P V, while its row's sum counts it.
/// So that is 2^-32 of the maximum. A bf16 has the exponents of an f32.
const F16_BELOW_MAXIMA: u8 = 7;
/// The last power of two in f16.
const F16_LARGEST_POWER: u8 = 15;

/// Powers of two by which stored maxima lie above the row max, where nothing else asks for more.
const fn usual_headroom(half: Half) -> f32 {
    match half {
        Half::F16 => -(F16_BELOW_MAXIMA as f32),
        Half::Bf16 => 0.0,
    }
}

/// What the sum of a lane's probabilities must stay below for the weights of none to exceed `2^limit` times
/// that of the maximum, nor the range of f16.
pub(crate) fn largest_sum(half: Half, limit: u8) -> f32 {
    let power = f32::from(limit) - usual_headroom(half);
    f32::exp2(match half {
        Half::F16 => power.min(F16_LARGEST_POWER.into()),
        Half::Bf16 => power,
    })
}

/// The row_max of a row that has seen only −∞, from the mask or from the inputs. It is finite, so −∞ minus
/// the row_max is −∞ and the weight is 0, as in the oracle; −∞ − (−∞) would be NaN. No finite score lies
/// below it.
pub(crate) const NO_MAX: f32 = f32::MIN;

/// Running maximum and sum of the rows a lane holds.
#[derive(Clone, Debug)]
pub struct OnlineSoftmax {
    pub(crate) half: Half,
    pub(crate) when: Rescale,
    pub(crate) factor: F32,
    /// The value m that is subtracted in the exponent, scaled, one per row; [`NO_MAX`] until a score
    /// above −∞ was seen.
    pub(crate) row_max: Vec<F32>,
    /// The lane's own part of each row's sum. The parts of the quad are added at the end.
    pub(crate) sum: Vec<F32>,
    pub(crate) sums: Sums,
    /// Powers of two by which a new row_max lies above the row max.
    pub(crate) headroom: f32,
    /// How many of eight exponentials of a speculative block run on the FMA pipe.
    pub(crate) by_fma: u32,
}

/// The result of the softmax at the end, one value per row.
#[derive(Clone, Debug)]
pub struct Finished {
    /// `ln Σ exp(scale · s)`; −∞ for a row that saw no key.
    pub lse: Vec<F32>,
}

impl OnlineSoftmax {
    /// The softmax of `rows` rows of a warp. `factor` is `scale · log2 e`, positive.
    pub fn new(k: &mut Builder, half: Half, rescale: Rescale, factor: F32, rows: u32) -> OnlineSoftmax {
        let lane_rows = rows / 8;
        let row_max = (0..lane_rows).map(|_| k.mov(NO_MAX)).collect();
        let sum = (0..lane_rows).map(|_| k.mov(0.0f32)).collect();
        let (sums, headroom) = (Sums::Lanes, usual_headroom(half));
        OnlineSoftmax { half, when: rescale, factor, row_max, sum, sums, headroom, by_fma: 0 }
    }

    /// The row sums come from a product ([`OnlineSoftmax::take_sums`]), and stored maxima lie `headroom`
    /// powers of two above the row max. Rescale thresholds still count from the row max.
    #[must_use]
    pub fn summed_by_products(self, headroom: u8) -> OnlineSoftmax {
        OnlineSoftmax { sums: Sums::Product, headroom: headroom.into(), ..self }
    }

    /// `of_eight` of eight exponentials of a speculative block run on the FMA pipe. Their result is large,
    /// not infinite or NaN, on overflow; such a block is recomputed.
    #[must_use]
    pub fn with_exponentials_by_fma(self, of_eight: u32) -> OnlineSoftmax {
        OnlineSoftmax { by_fma: of_eight, ..self }
    }

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

    /// Sets the row maxima from the first block, when nothing has to be rescaled.
    pub fn begin(&self, k: &mut Builder, maxima: &LaneMaxima) {
        for (&row_max, maximum) in self.row_max.iter().zip(self.scaled(k, maxima)) {
            k.max_to(row_max, row_max, maximum);
        }
    }

    /// Raises the row maxima and rescales the running sums. Returns each row's rescale
    /// factor for O.
    pub fn raise_to(&self, k: &mut Builder, maxima: &LaneMaxima) -> Vec<F32> {
        let maxima = self.scaled(k, maxima);
        (0..).zip(maxima).map(|(i, maximum)| self.raise_row(k, i, maximum)).collect()
    }

    /// Turns the scores of a block into probabilities, rounded to the input type, and adds them to the
    /// running sums.
    pub fn probabilities(&self, k: &mut Builder, s: &AccTile) -> ProbTile {
        for i in 0..s.lane_rows() {
            self.exponentiate(k, s, i);
        }
        s.round(k, self.half)
    }

    /// The scaled row maxima, with the headroom, from the maxima of the lanes.
    fn scaled(&self, k: &mut Builder, maxima: &LaneMaxima) -> Vec<F32> {
        let of_row = |&own: &F32| {
            let row = quad_reduce(k, own, |k, a, b| k.max(a, b));
            if self.headroom == 0.0 {
                k.mul(row, self.factor)
            } else {
                k.mad(row, self.factor, self.headroom)
            }
        };
        maxima.0.iter().map(of_row).collect()
    }

    /// Converts a threshold relative to the row max into one relative to the stored row_max.
    pub(crate) fn above_row_max(&self, threshold: u8) -> f32 {
        f32::from(threshold) - self.headroom
    }

    /// Whether a row's maximum exceeds its row_max by more than `threshold`. NaN does not.
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

    /// Moves a row's row_max and rescales its sum; returns the factor for O.
    fn raise_row(&self, k: &mut Builder, i: usize, maximum: F32) -> F32 {
        let row_max = self.row_max[i];
        let next = k.max(row_max, maximum);
        let distance = k.sub(row_max, next);
        let alpha = k.ex2(distance);
        k.mov_to(row_max, next);
        k.mul_to(self.sum[i], self.sum[i], alpha);
        alpha
    }

    /// `s = exp2(s · c − m)` in place, added to the row's sum.
    fn exponentiate(&self, k: &mut Builder, s: &AccTile, i: u32) {
        let minus = k.neg(self.row_max[i as usize]);
        for score in s.row(i) {
            k.mad_to(score, score, self.factor, minus);
            k.ex2_to(score, score);
        }
        let own = reduce(k, s.row(i), |k, a, b| k.add(a, b));
        let sum = self.sum[i as usize];
        k.add_to(sum, sum, own);
    }

    /// Completes the sums and divides `o` by them. A row that saw no key keeps its zeros.
    pub fn finish(&self, k: &mut Builder, o: &AccTile) -> Finished {
        self.gather_sums(k);
        self.normalize(k, o);
        Finished { lse: self.lse(k) }
    }

    /// Divides `o` by sums that are already complete.
    pub fn normalize(&self, k: &mut Builder, o: &AccTile) {
        for (i, inverse) in (0..).zip(self.inverses(k)) {
            o.scale_row(k, i, inverse);
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

    /// The factors that normalise O, from complete sums: 1 for a row that saw no key.
    pub(crate) fn inverses(&self, k: &mut Builder) -> Vec<F32> {
        let of_row = |&sum: &F32| {
            let empty = k.setp_f(CmpOp::Eq, sum, 0.0f32);
            let divisor = k.selp(1.0f32, sum, empty);
            k.rcp(divisor)
        };
        self.sum.iter().map(of_row).collect()
    }

    /// `ln Σ exp(scale · s)` from complete sums.
    pub fn lse(&self, k: &mut Builder) -> Vec<F32> {
        let of_row = |(&sum, &row_max): (&F32, &F32)| {
            // A sum of 0 gives −∞.
            let log = k.lg2(sum);
            let log = k.add(log, row_max);
            k.mul(log, std::f32::consts::LN_2)
        };
        self.sum.iter().zip(&self.row_max).map(of_row).collect()
    }
}

/// Lane masks of the butterfly shuffles within a quad; the four lanes of a quad share a row.
const QUAD: [u32; 2] = [1, 2];

/// Each row's largest score among those that one lane holds, collected tile by tile while later tiles are
/// computed.
#[derive(Clone, Debug)]
pub struct LaneMaxima(pub(crate) Vec<F32>);

impl LaneMaxima {
    /// The maxima of one tile of scores.
    pub fn of(k: &mut Builder, s: &AccTile) -> LaneMaxima {
        LaneMaxima((0..s.lane_rows()).map(|i| reduce(k, s.row(i), |k, a, b| k.max(a, b))).collect())
    }

    /// Combined with the maxima of another tile of the same rows.
    #[must_use]
    pub fn and(self, k: &mut Builder, other: &LaneMaxima) -> LaneMaxima {
        LaneMaxima(self.0.iter().zip(&other.0).map(|(&a, &b)| k.max(a, b)).collect())
    }
}

/// Reduces in four independent chains, which hide the latency of one.
fn reduce(
    k: &mut Builder,
    values: impl Iterator<Item = F32>,
    mut combine: impl FnMut(&mut Builder, F32, F32) -> F32,
) -> F32 {
    let mut values: Vec<F32> = values.collect();
    for i in 4..values.len() {
        values[i % 4] = combine(k, values[i % 4], values[i]);
    }
    let mut width = values.len().min(4);
    while width > 1 {
        width /= 2;
        for i in 0..width {
            values[i] = combine(k, values[i], values[i + width]);
        }
    }
    values[0]
}

/// Reduces over the four lanes that share a row.
fn quad_reduce(
    k: &mut Builder,
    mut value: F32,
    mut combine: impl FnMut(&mut Builder, F32, F32) -> F32,
) -> F32 {
    for mask in QUAD {
        let other = k.shfl_xor(value, mask);
        value = combine(k, value, other);
    }
    value
}
