//! The gradient of the softmax, from the LSE that the forward pass stored (FlashAttention-2, Algorithm 2,
//! lines 11 and 14).

use ptx::{Builder, F32, Pointer, Pred, R32, Shared};
use tile::AccTile;

use crate::{Coverage, Masker, Softcap};

/// From the products S = Q Kᵀ of a tile to its probabilities, and from their gradient dP to dS. The tile has
/// queries along its rows and keys along its columns, or the reverse.
#[derive(Clone, Copy, Debug)]
pub struct ScoreGradient<'a> {
    /// The softcap, or the factor of wide logits, if there is one.
    pub softcap: Option<&'a Softcap>,
    /// The inverse of [`Softcap::cap`], if that factor is in the scores.
    pub inverse_cap: Option<F32>,
    /// Hides probabilities; made by [`Masker::of_probabilities`].
    pub mask: &'a Masker,
    /// The factor of the scores in the exponent.
    pub factor: F32,
}

/// A number for each query row of a tile.
#[derive(Clone, Debug)]
pub enum QueryNumbers {
    /// Queries are the tile's rows: the numbers of the lane's rows.
    Rows(Vec<F32>),
    /// Queries are the tile's columns: where the lane finds the numbers of its first two columns.
    Columns(Shared),
}

impl QueryNumbers {
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
    /// P = exp2(S·c − L·log2 e), 0 where a row does not see a key. Without a softcap, P takes the registers of
    /// S; with a softcap, S becomes the tangent t.
    ///
    /// `minus_log_sums` has −L·log2 e of each query row, and −∞ for a row without keys. `partial` says whether
    /// the mask hides some element of the tile, whose columns begin at `origin`; `None` if it hides none.
    pub fn probabilities(
        &self,
        k: &mut Builder,
        s: &AccTile,
        minus_log_sums: &QueryNumbers,
        (origin, partial): (R32, Option<Pred>),
    ) -> AccTile {
        if let Some(softcap) = self.softcap {
            softcap.apply(k, s);
        }
        let p =
            if self.is_capped() { AccTile::unset(k, 16 * s.m_tiles(), 8 * s.n_tiles()) } else { s.clone() };
        for n in 0..s.n_tiles() {
            for (m, numbers) in (0..).zip(minus_log_sums.of_tiles(k, n, s.m_tiles())) {
                for ((p, s), minus_log_sum) in p.tile(m, n).into_iter().zip(s.tile(m, n)).zip(numbers) {
                    k.mad_to(p, s, self.factor, minus_log_sum);
                    k.ex2_to(p, p);
                }
            }
        }
        if let Some(partial) = partial {
            k.if_(partial, |k| self.mask.apply(k, &p, origin, Coverage::Partial));
        }
        p
    }

    /// dS = P ∘ (dP − D), times the slope 1 − t² of the softcap, in the registers of dP. `minus_deltas` has −D
    /// of each query row.
    pub fn scores(
        &self,
        k: &mut Builder,
        s: &AccTile,
        p: &AccTile,
        dp: &AccTile,
        minus_deltas: &QueryNumbers,
    ) {
        for n in 0..s.n_tiles() {
            for (m, numbers) in (0..).zip(minus_deltas.of_tiles(k, n, s.m_tiles())) {
                let elements = dp.tile(m, n).into_iter().zip(p.tile(m, n)).zip(s.tile(m, n)).zip(numbers);
                for (((ds, p), t), minus_delta) in elements {
                    k.add_to(ds, ds, minus_delta);
                    k.mul_to(ds, ds, p);
                    if self.is_capped() {
                        self.slope(k, ds, t);
                    }
                }
            }
        }
    }

    fn is_capped(&self) -> bool {
        self.softcap.is_some_and(|softcap| softcap.tanh.is_some())
    }

    /// ds = ds · (1 − t²).
    fn slope(&self, k: &mut Builder, ds: F32, t: F32) {
        let t = match self.inverse_cap {
            None => t,
            Some(inverse) => k.mul(t, inverse),
        };
        let product = k.mul(ds, t);
        let minus = k.neg(t);
        k.mad_to(ds, product, minus, ds);
    }
}
