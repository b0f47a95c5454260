//! The descale factors of the CTA's head.

use attend::{Block, ScoreFactors, ScorePrograms, Softcap, ValueFactors, WarpKeys};
use ptx::{Builder, F32, R32};
use tile::divide;

use super::launch::Params;
use super::place::Forward;
use crate::forward::descale::{HeadPlace, ScaledTile, Scores, Scoring, descaled};

impl Scores for Forward<'_> {
    fn scoring(&self) -> Scoring<'_> {
        let Params { score_descale, factor, softcap, programs, .. } = &self.params;
        let (descale, factor) = (*score_descale, *factor);
        Scoring { descale, factor, softcap: softcap.as_ref(), programs: programs.as_ref() }
    }
}

impl Forward<'_> {
    /// The factor of scores in the exponent, the softcap and the programs. The first of these that takes the
    /// scores has the descale factors of the CTA's head: the softcap, else a score program, else the
    /// exponent. Factors per block of rows are left out ([`Forward::block_factors`]).
    pub(super) fn score_factors(&self, k: &mut Builder) -> (F32, Option<Softcap>, Option<ScorePrograms>) {
        let (factor, softcap, programs) =
            (self.params.factor, self.params.softcap, self.params.programs.clone());
        let Some(descale) = self.head_descale() else { return (factor, softcap, programs) };
        let at = self.head_place(k);
        let descale = descale.load(k, at);
        match (softcap, programs) {
            (Some(softcap), programs) => {
                (factor, Some(Softcap { factor: k.mul(softcap.factor, descale), ..softcap }), programs)
            }
            (None, Some(programs)) if programs.shapes_scores() => {
                (factor, None, Some(programs.descaled(k, descale)))
            }
            (None, programs) => (descaled(k, factor, descale), None, programs),
        }
    }

    /// The factors of the warp's scores, if Q or K has factors per block of rows. 16 rows have one factor.
    pub(super) fn block_factors(&self, k: &mut Builder) -> Option<ScoreFactors> {
        let descale = self.params.score_descale.filter(|descale| descale.is_per_block())?;
        let at = self.head_place(k);
        let rows = self.plan.warp_rows();
        let first = k.mad(self.threads.row_warp, rows, self.rows.first);
        let rows: Vec<R32> = (0..rows).step_by(16).map(|row| k.add(first, row)).collect();
        let tile = ScaledTile {
            at,
            rows: &rows,
            lengths: [self.params.seq_q, self.params.seq_kv],
            keys: self.plan.warp_keys(),
            factor: self.exponent_factor(),
        };
        descale.of_tile(k, &tile)
    }

    /// The keys of a block that the warp multiplies.
    pub(super) fn own_keys_of(&self, k: &mut Builder, block: &Block) -> WarpKeys {
        let count = self.plan.warp_keys();
        let origin = match self.threads.part {
            None => block.origin,
            Some(part) => k.mad(part, count, block.origin),
        };
        WarpKeys { origin, count, coverage: block.coverage }
    }

    /// The descale factor of the CTA's values; `None` without a factor of the head.
    pub(super) fn value_factor(&self, k: &mut Builder) -> Option<F32> {
        let descale = self.params.value_descale.filter(|descale| !descale.is_per_block())?;
        let at = self.batch_and_key_head(k);
        Some(descale.load(k, at))
    }

    /// The factors of the CTA's values, if V has factors per block of rows.
    pub(super) fn value_factors(&self, k: &mut Builder) -> Option<ValueFactors> {
        let descale = self.params.value_descale.filter(|descale| descale.is_per_block())?;
        let at = self.batch_and_key_head(k);
        descale.blocks(k, at, self.params.seq_kv)
    }

    fn batch_and_key_head(&self, k: &mut Builder) -> [R32; 2] {
        let HeadPlace { batch, key_head, .. } = self.head_place(k);
        [batch, key_head]
    }

    fn head_place(&self, k: &mut Builder) -> HeadPlace {
        let [head, batch] = self.head_and_batch(k);
        HeadPlace { batch, key_head: divide(k, head, self.baked.group_size()), head: Some(head) }
    }
}
