//! Variant of the softmax of a full block: no row max is computed, and the block is recomputed if a score
//! exceeds the stored row max by too much ([`SpeculativeMax`]).

use ptx::Builder;

use super::main_loop::{Loaded, MainLoop, Rings, TileRows, Visit};
use crate::{Elements, SpeculativeMax, Words};

impl MainLoop {
    /// The softmax of a block with the row max of earlier blocks. If a row of the warpgroup exceeds the limit
    /// (infinities and NaN included), the block is recomputed: its keys are still in their stage, the
    /// elements of staged reads in registers, and neither O nor the running sums contain the block yet.
    pub(super) fn softmax_speculative(
        &self,
        k: &mut Builder,
        speculative: &SpeculativeMax,
        visit: &Visit,
        (rows, factors, staged): (&TileRows, &Loaded, &[Words]),
    ) {
        let softmax = rows.softmax;
        let MainLoop { weights, chains, rings: Rings { keys, values, .. }, tiles, .. } = self;
        let (s, p) = (&tiles.s, &tiles.p);
        let sums = softmax.speculative_exponentials(k, s, *chains); //   P = exp2(S·c − m), with an old m
        self.wait_for_output(k);
        values.release(k);
        s.round_to(k, *weights, p);
        self.add_output(k);
        speculative.check(k, softmax, &sums, p, |k| {
            self.issue(k, |k| self.scores(k, s)); //                     S = Q Kᵀ, again
            k.wgmma_wait(0);
            let block = visit.scores(factors, (Elements::InPlace, staged));
            rows.chain.transform(k, s, &block, |k| self.origin(k, visit));
            let rescale = softmax.raise_row_max(k, s, *chains);
            self.rescale_output(k, &rescale); //                         m = max(m, S·c); O, l rescaled
            let exact = softmax.exponentials(k, s, *chains); //          P = exp2(S·c − m)
            for (&sum, &exact) in sums.iter().zip(&exact) {
                k.mov_to(sum, exact);
            }
            s.round_to(k, *weights, p);
        });
        keys.release(k);
        softmax.add_sums(k, &sums); //                                   l += Σ P
        self.set_value_factors(k, factors, rows);
    }
}
