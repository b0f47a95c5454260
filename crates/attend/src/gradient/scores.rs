//! The gradient of the softmax, from the LSE that the forward pass stored (FlashAttention-2, Algorithm 2,
//! lines 11 and 14).

use ptx::{Builder, CmpOp, F32, Pointer, Pred, R32, Shared};
use tile::AccTile;

use crate::score::ProgramScore;
use crate::{Coverage, GradientPrograms, Masker, Softcap};

/// From the products S = Q Kᵀ of a tile to its probabilities, and from their gradient dP to dS. The tile has
/// queries along its rows and keys along its columns, or the reverse.
#[derive(Clone, Copy, Debug)]
pub struct ScoreGradient<'a> {
    /// The softcap, or the factor of wide logits, if there is one.
    pub softcap: Option<&'a Softcap>,
    /// 1 / (cap · log2 e), where that factor is in the scores, or the slope comes from P.
    pub inverse_cap: Option<F32>,
    /// The slope of the softcap in the result.
    pub slope: SoftcapSlope,
    /// The score and mask programs, if there are any.
    pub programs: Option<&'a GradientPrograms<'a>>,
    /// Hides probabilities; made by [`Masker::of_probabilities`].
    pub mask: &'a Masker,
    /// The factor of the scores in the exponent.
    pub factor: F32,
}

/// The slope 1 − t² of the softcap in the gradient of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftcapSlope {
    /// None: the result is the gradient of an element of a table. The result is 0 where a score is hidden,
    /// whatever the tensors have there.
    None,
    /// S keeps the tangent t in registers beside P.
    OfTangent,
    /// t = (log2 P + L·log2 e) / (cap · log2 e): one more MUFU operation, and no registers. Without programs.
    OfProbability,
}

/// Probabilities below this one count as hidden where their logarithm is taken: the logarithm of a subnormal
/// number is not accurate.
const LEAST: f32 = f32::from_bits(0x0380_0000); // 2⁻¹²⁰

/// A number for each query row of a tile.
#[derive(Clone, Debug)]
pub enum QueryNumbers {
    /// Queries are the tile's rows: the numbers of the lane's rows.
    Rows(Vec<F32>),
    /// Queries are the tile's columns: where the lane finds the numbers of its first two columns.
    Columns(Shared),
}

impl QueryNumbers {
    /// The numbers from 8-column tile `n` on.
    #[must_use]
    pub fn from_tile(self, n: u32) -> QueryNumbers {
        match self {
            QueryNumbers::Rows(_) => self,
            QueryNumbers::Columns(start) => QueryNumbers::Columns(start.at(i64::from(8 * 4 * n))),
        }
    }

    /// The numbers of the lane's elements in each 16×8 tile of column of tiles `n`.
    fn of_tiles(&self, k: &mut Builder, n: u32, m_tiles: u32) -> Vec<[F32; 4]> {
        match self {
            QueryNumbers::Rows(numbers) => {
                numbers.chunks_exact(2).map(|r| [r[0], r[0], r[1], r[1]]).collect()
            }
            QueryNumbers::Columns(start) => {
                let [left, right] = k.ld_vec(start.at(i64::from(8 * 4 * n)));
                vec![[left, right, left, right]; m_tiles as usize]
            }
        }
    }
}

impl ScoreGradient<'_> {
    /// P = exp2(S·c − L·log2 e), 0 where a row does not see a key. Without a softcap, P takes the registers
    /// of S; with a softcap, S becomes the tangent t. If a program scales gradients, S becomes the factor.
    ///
    /// `minus_log_sums` has −L·log2 e of each query row, and −∞ for a row without keys. `partial` says
    /// whether the mask hides some element of the tile, whose columns begin at `origin`; `None` if it hides
    /// none. `head` is the query head of the tile, for programs of blocks that have their own.
    pub fn probabilities(
        &self,
        k: &mut Builder,
        s: &AccTile,
        minus_log_sums: &QueryNumbers,
        (origin, partial, head): (R32, Option<Pred>, Option<R32>),
    ) -> AccTile {
        if let Some(softcap) = self.softcap {
            softcap.apply(k, s);
        }
        let p = if self.keeps_s() { AccTile::unset(k, 16 * s.m_tiles(), 8 * s.n_tiles()) } else { s.clone() };
        match self.programs {
            None => self.run_none(k, (s, &p), minus_log_sums),
            Some(programs) => self.run_programs(k, (programs, s, &p), minus_log_sums, (origin, head)),
        }
        if let Some(partial) = partial {
            k.if_(partial, |k| self.mask.apply(k, &p, origin, Coverage::Partial));
        }
        p
    }

    /// The probabilities of a tile without programs.
    fn run_none(&self, k: &mut Builder, (s, p): (&AccTile, &AccTile), minus_log_sums: &QueryNumbers) {
        for n in 0..s.n_tiles() {
            for (m, numbers) in (0..).zip(minus_log_sums.of_tiles(k, n, s.m_tiles())) {
                for ((p, s), minus_log_sum) in p.tile(m, n).into_iter().zip(s.tile(m, n)).zip(numbers) {
                    k.mad_to(p, s, self.factor, minus_log_sum);
                    k.ex2_to(p, p);
                }
            }
        }
    }

    /// The probabilities of logits that programs compute, and in S the factor on their gradients.
    fn run_programs(
        &self,
        k: &mut Builder,
        (programs, s, p): (&GradientPrograms<'_>, &AccTile, &AccTile),
        minus_log_sums: &QueryNumbers,
        block: (R32, Option<R32>),
    ) {
        let rows = |tile: &AccTile| -> Vec<Vec<F32>> {
            (0..tile.lane_rows()).map(|i| tile.row(i).collect()).collect()
        };
        let (scores, probabilities) = (rows(s), rows(p));
        let mut numbers = Vec::new();
        programs.each(k, s, block, |k, [row, column], of_score: ProgramScore| {
            if row == 0 && column % 2 == 0 {
                numbers = minus_log_sums.of_tiles(k, column as u32 / 2, s.m_tiles());
            }
            let minus_log_sum = numbers[row / 2][row % 2 * 2 + column % 2];
            let (s, p) = (scores[row][column], probabilities[row][column]);
            k.mad_to(p, of_score.logit.unwrap_or(s), self.factor, minus_log_sum);
            k.ex2_to(p, p);
            if let Some(sees) = of_score.sees {
                k.selp_to(p, p, 0.0, sees);
            }
            if self.keeps_s() {
                let slope: F32 = match of_score.slope {
                    Some(slope) => k.mov(slope),
                    None => k.mov(1.0),
                };
                if self.is_capped() {
                    self.scale_by_slope(k, slope, s);
                }
                k.mov_to(s, slope);
            }
        });
    }

    /// dS = P ∘ (dP − D), times the slope 1 − t² of the softcap and the factor of a program, in the registers
    /// of dP. `numbers` has −L·log2 e and −D of each query row.
    pub fn scores(
        &self,
        k: &mut Builder,
        s: &AccTile,
        p: &AccTile,
        dp: &AccTile,
        [minus_log_sums, minus_deltas]: &[QueryNumbers; 2],
    ) {
        for n in 0..s.n_tiles() {
            let log_sums = self.takes_logarithms().then(|| minus_log_sums.of_tiles(k, n, s.m_tiles()));
            for (m, numbers) in (0..).zip(minus_deltas.of_tiles(k, n, s.m_tiles())) {
                let (ds, p, t) = (dp.tile(m, n), p.tile(m, n), s.tile(m, n));
                for (i, minus_delta) in numbers.into_iter().enumerate() {
                    k.add_to(ds[i], ds[i], minus_delta);
                    k.mul_to(ds[i], ds[i], p[i]);
                    if let Some(log_sums) = &log_sums {
                        self.slope_of_probability(k, ds[i], p[i], log_sums[m as usize][i]);
                        continue;
                    }
                    match self.programs {
                        Some(_) if self.keeps_s() => k.mul_to(ds[i], ds[i], t[i]),
                        None if self.is_capped() => self.scale_by_slope(k, ds[i], t[i]),
                        _ => {}
                    }
                    // The factor of a hidden score may be infinite or NaN.
                    if self.slope == SoftcapSlope::None
                        || self.programs.is_some_and(GradientPrograms::has_slope)
                    {
                        let hidden = k.setp_f(CmpOp::Eq, p[i], 0.0f32);
                        k.selp_to(ds[i], 0.0, ds[i], hidden);
                    }
                }
            }
        }
    }

    /// Whether S keeps its registers beside P: for the tangent, or the factor on the gradients.
    fn keeps_s(&self) -> bool {
        self.is_capped() && self.slope == SoftcapSlope::OfTangent
            || self.programs.is_some_and(GradientPrograms::has_slope)
    }

    /// Whether the result has the slope of a softcap.
    fn is_capped(&self) -> bool {
        self.slope != SoftcapSlope::None && self.softcap.is_some_and(|softcap| softcap.tanh.is_some())
    }

    fn takes_logarithms(&self) -> bool {
        self.is_capped() && self.slope == SoftcapSlope::OfProbability
    }

    /// ds = ds · (1 − t²), with t from the probability.
    fn slope_of_probability(&self, k: &mut Builder, ds: F32, p: F32, minus_log_sum: F32) {
        let logarithm = k.lg2(p);
        let capped = k.sub(logarithm, minus_log_sum);
        self.scale_by_slope(k, ds, capped);
        let hidden = k.setp_f(CmpOp::Lt, p, LEAST);
        k.selp_to(ds, 0.0, ds, hidden);
    }

    /// ds = ds · (1 − t²), where t may have a factor.
    fn scale_by_slope(&self, k: &mut Builder, ds: F32, t: F32) {
        let t = match self.inverse_cap {
            None => t,
            Some(inverse) => k.mul(t, inverse),
        };
        let product = k.mul(ds, t);
        let minus = k.neg(t);
        k.mad_to(ds, product, minus, ds);
    }
}
