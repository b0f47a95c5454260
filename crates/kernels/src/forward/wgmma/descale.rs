//! The descale factors of a tile.

use attend::{RowRange, ScoreFactors, ScorePrograms, Softcap, ValueFactors};
use ptx::{Builder, F32, R32};
use tile::{Consumer, WorkTile};

use super::launch::Params;
use super::memory::Forward;
use crate::forward::descale::{HeadPlace, ScaledTile, ScoreDescale, Scores, Scoring, descaled};

impl Scores for Forward<'_> {
    fn scoring(&self) -> Scoring<'_> {
        let Params { score_descale, factor, softcap, programs, .. } = &self.params;
        let (descale, factor) = (*score_descale, *factor);
        Scoring { descale, factor, softcap: softcap.as_ref(), programs: programs.as_ref() }
    }
}

impl Forward<'_> {
    /// The KV head of a tile.
    pub(super) fn key_head(&self, k: &mut Builder, tile: &WorkTile) -> R32 {
        let heads = self.plan.packed_heads(self.baked);
        tile::divide(k, tile.head, self.baked.group_size() / heads)
    }

    fn head_place(&self, k: &mut Builder, tile: &WorkTile) -> HeadPlace {
        let of_one_head = self.plan.packed_heads(self.baked) == 1;
        let key_head = self.key_head(k, tile);
        HeadPlace { batch: tile.batch, key_head, head: of_one_head.then_some(tile.head) }
    }

    /// The factor of a tile's scores in the exponent and the programs. The descale factors
    /// of the tile's head are in the first of these that takes the scores: the factor of the softcap, which
    /// is set here, else a score program, else the exponent. Factors per block of rows are left out
    /// ([`Forward::block_factors`]).
    pub(super) fn tile_factor(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        cap: Option<&Softcap>,
    ) -> (F32, Option<ScorePrograms>) {
        let (factor, programs) = (self.params.factor, self.params.programs.clone());
        let Some(descale) = self.head_descale() else { return (factor, programs) };
        let at = self.head_place(k, tile);
        let descale = descale.load(k, at);
        match (cap.zip(self.params.softcap), programs) {
            (Some((own, common)), programs) => {
                k.mul_to(own.factor, common.factor, descale);
                (factor, programs)
            }
            (None, Some(programs)) if programs.shapes_scores() => {
                (factor, Some(programs.descaled(k, descale)))
            }
            (None, programs) => (descaled(k, factor, descale), programs),
        }
    }

    /// The factors of a warp's scores, if Q or K has factors per block of rows. `rows` are those of the tile.
    pub(super) fn block_factors(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        rows: &RowRange,
        consumer: &Consumer,
    ) -> Option<ScoreFactors> {
        let descale = self.params.score_descale.filter(ScoreDescale::is_per_block)?;
        let at = self.head_place(k, tile);
        let first = k.mad(consumer.threads.row_warp, 16, rows.first);
        // Without packed heads, the warp's first row is a multiple of 16, and its rows have one factor. With
        // packed heads, a warp may have rows of two blocks of positions.
        let positions = if rows.heads == 1 {
            vec![first]
        } else {
            let own = k.add(first, consumer.threads.quad);
            let other = k.add(own, 8);
            [own, other].map(|row| rows.position(k, row)).to_vec()
        };
        let scaled = ScaledTile {
            at,
            rows: &positions,
            lengths: [self.params.seq_q, self.params.seq_kv],
            keys: self.plan.block_n,
            factor: self.exponent_factor(),
        };
        descale.of_tile(k, &scaled)
    }

    /// The factor of a tile's values; `None` without a factor of the head.
    pub(super) fn value_descale(&self, k: &mut Builder, tile: &WorkTile) -> Option<F32> {
        let value = self.params.value_descale.filter(|value| !value.is_per_block())?;
        let at = [tile.batch, self.key_head(k, tile)];
        Some(value.load(k, at))
    }

    /// The factors of a tile's values, if V has factors per block of rows.
    pub(super) fn value_factors(&self, k: &mut Builder, tile: &WorkTile) -> Option<ValueFactors> {
        let value = self.params.value_descale.filter(|value| value.is_per_block())?;
        let at = [tile.batch, self.key_head(k, tile)];
        value.blocks(k, at, self.params.seq_kv)
    }
}
