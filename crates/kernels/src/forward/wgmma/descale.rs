//! The descale factors of a tile.

use attend::Softcap;
use ptx::{Builder, F32, R32};
use tile::WorkTile;

use super::emit::Forward;
use crate::forward::descale::descaled;

impl Forward<'_> {
    /// The KV head of a tile.
    pub(super) fn key_head(&self, k: &mut Builder, tile: &WorkTile) -> R32 {
        let heads = self.plan.packed_heads(self.baked);
        tile::divide(k, tile.head, self.baked.group_size() / heads)
    }

    /// The factor of a tile's scores in the exponent, positive or NaN. With a softcap, sets the factor of the
    /// scores inside the cap instead.
    pub(super) fn tile_factor(&self, k: &mut Builder, tile: &WorkTile, cap: Option<&Softcap>) -> F32 {
        let Some(descale) = self.params.score_descale else { return self.params.factor };
        let at = [tile.batch, self.key_head(k, tile)];
        let descale = descale.load(k, at);
        match cap.zip(self.params.softcap) {
            Some((own, common)) => {
                k.mul_to(own.factor, common.factor, descale);
                self.params.factor
            }
            None => descaled(k, self.params.factor, descale),
        }
    }

    /// The factor of a tile's values; `None` without factors.
    pub(super) fn value_descale(&self, k: &mut Builder, tile: &WorkTile) -> Option<F32> {
        let value = self.params.value_descale?;
        let at = [tile.batch, self.key_head(k, tile)];
        Some(value.load(k, at))
    }
}
