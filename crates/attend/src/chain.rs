//! The chain from the products S = Q Kᵀ of a block to the logits that the softmax takes: descale factors,
//! softcap, programs, band. Every kernel has one chain; it states only the links that the problem has.

use ptx::{Builder, F32, R32};
use tile::AccTile;

use crate::{Coverage, Elements, Hides, Masker, RowPrograms, ScoreFactors, Softcap, Words};

/// The steps between the product of Q and K and the softmax of a tile's rows, in this order.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreChain<'a> {
    /// The descale factors, if Q or K has one per block of rows.
    pub descale: Option<&'a ScoreFactors>,
    /// The softcap, if there is one.
    pub softcap: Option<&'a Softcap>,
    /// The score and mask programs, if there are any.
    pub programs: Option<&'a RowPrograms<'a>>,
    /// The masker; `None` if neither the band nor the number of keys hides a key.
    pub mask: Option<&'a Masker>,
}

/// The scores of one block, or of a part of it.
#[derive(Clone, Copy, Debug)]
pub struct BlockScores<'a> {
    pub coverage: Coverage,
    /// Which masks hide keys, if a list says so.
    pub hides: Option<Hides>,
    /// The factors of the block's keys ([`ScoreFactors::load`]), and whether the softmax takes these scores
    /// before any others.
    pub descale: (&'a [F32], bool),
    /// Where table elements come from, and those of staged reads.
    pub elements: (Elements, &'a [Words]),
}

impl BlockScores<'_> {
    /// Scores of a walk without a list, without factors, with table elements read where they are needed.
    pub fn in_place(coverage: Coverage) -> Self {
        BlockScores { coverage, hides: None, descale: (&[], false), elements: (Elements::InPlace, &[]) }
    }
}

impl ScoreChain<'_> {
    /// Multiplies by the descale factors, applies the softcap and runs the programs. `origin` gives the first
    /// key of the scores.
    pub fn transform(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: &BlockScores<'_>,
        origin: impl Fn(&mut Builder) -> R32,
    ) {
        if let Some(factors) = self.descale {
            let (of_keys, enters) = block.descale;
            factors.apply(k, s, of_keys); //             S = S·f, if f changes with the block
            if enters {
                factors.enter(k);
            }
        }
        if let Some(softcap) = self.softcap {
            softcap.apply(k, s); //                      S = tanh(S·c'), if capped
        }
        if let Some(programs) = self.programs {
            let partial = block.coverage == Coverage::Partial;
            let hides = block.hides.filter(|_| programs.only_mask() && partial);
            Hides::by_program(hides, k, |k| {
                let at = (origin(k), block.coverage);
                let (elements, staged) = block.elements;
                programs.apply_with(k, s, at, elements, staged); // S = score(S), −∞ where the mask hides
            });
        }
    }

    /// Hides the keys that the band, or the number of keys, hides from a row.
    pub fn hide(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: &BlockScores<'_>,
        origin: impl Fn(&mut Builder) -> R32,
    ) {
        if let (Some(mask), Coverage::Partial) = (self.mask, block.coverage) {
            Hides::by_band(block.hides, k, |k| {
                let origin = origin(k);
                mask.apply(k, s, origin, block.coverage); // S = −∞ where a row sees no key
            });
        }
    }

    /// The whole chain.
    pub fn apply(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: &BlockScores<'_>,
        origin: impl Fn(&mut Builder) -> R32,
    ) {
        self.transform(k, s, block, &origin);
        self.hide(k, s, block, origin);
    }
}
