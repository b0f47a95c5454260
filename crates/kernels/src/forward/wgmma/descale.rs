//! Descale factors of 8-bit inputs, one for each batch entry and KV head: those of Q and K join the factor of
//! the scores, that of V the division by the row sums.

use attend::Softcap;
use problem::{Problem, Tensor};
use ptx::{Builder, CmpOp, F32, Global, R32};
use tile::WorkTile;

use super::emit::Forward;
use crate::contract::Contract;

/// The factors of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descale {
    start: Global,
    /// Elements between batch entries.
    batch: R32,
    /// Elements between KV heads.
    head: R32,
}

impl Descale {
    /// The factors of Q, K and V; `None` for a tensor without factors.
    pub(super) fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> [Option<Descale>; 3] {
        [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
            let (start, layout) = c.descale(k, tensor).zip(problem.scales.of(tensor))?;
            let mut stride = |of: &str, elements: i64| {
                c.u32(k, &format!("descale_{}_{of}", tensor.name()), elements as u32)
            };
            let (batch, head) = (stride("batch", layout.batch), stride("head", layout.head));
            Some(Descale { start, batch, head })
        })
    }

    fn load(&self, k: &mut Builder, [batch, head]: [R32; 2]) -> F32 {
        let before = k.mul_wide_u(batch, self.batch);
        let own = k.mul_wide_u(head, self.head);
        let index = k.add(before, own);
        let base = k.mad(index, 4, self.start.base);
        k.ld(Global { base, offset: self.start.offset })
    }
}

impl Forward<'_> {
    /// The KV head of a tile.
    pub(super) fn key_head(&self, k: &mut Builder, tile: &WorkTile) -> R32 {
        let heads = self.plan.packed_heads(self.problem);
        tile::divide(k, tile.head, self.problem.group_size() as u32 / heads)
    }

    /// The product of the factors of a tile's queries and keys; `None` without factors. A product that is
    /// negative becomes NaN, as [`problem::Scales`] asks for.
    fn score_descale(&self, k: &mut Builder, tile: &WorkTile) -> Option<F32> {
        let [q, key, _] = self.params.descales;
        if q.is_none() && key.is_none() {
            return None;
        }
        let at = [tile.batch, self.key_head(k, tile)];
        let factors = [q, key].map(|of| of.map(|of| of.load(k, at)));
        let product = factors.into_iter().flatten().reduce(|a, b| k.mul(a, b))?;
        let valid = k.setp_f(CmpOp::Ge, product, 0.0f32);
        Some(k.selp(product, f32::NAN, valid))
    }

    /// The factor of a tile's scores in the exponent, positive or NaN. With a cap, the factor of the scores
    /// in the cap is set instead.
    pub(super) fn tile_factor(&self, k: &mut Builder, tile: &WorkTile, cap: Option<&Softcap>) -> F32 {
        let Some(descale) = self.score_descale(k, tile) else { return self.params.factor };
        match cap.zip(self.params.softcap) {
            Some((own, common)) => {
                k.mul_to(own.factor, common.factor, descale);
                self.params.factor
            }
            None => {
                let factor = k.mul(self.params.factor, descale);
                // A factor of 0 would make NaN of the −∞ of masked scores.
                k.max_nan_to(factor, factor, f32::MIN_POSITIVE);
                factor
            }
        }
    }

    /// The factor of a tile's values; `None` without factors.
    pub(super) fn value_descale(&self, k: &mut Builder, tile: &WorkTile) -> Option<F32> {
        let [_, _, value] = self.params.descales;
        let value = value?;
        let at = [tile.batch, self.key_head(k, tile)];
        Some(value.load(k, at))
    }
}
