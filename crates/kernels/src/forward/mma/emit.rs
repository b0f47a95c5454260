//! The generator: FlashAttention-2, Algorithm 1. Its steps are in files of their own: `place.rs` selects the
//! CTA's rows, `load.rs` loads Q, K and V, `steps.rs` computes a block, `store.rs` ends the rows.
//! [`attend::KvPipeline`] is the loop over the KV blocks. `launch.rs` declares the parameters.

use attend::{Block, BlockList, Bound, ScoreChain, Steps};
use problem::Problem;
use ptx::Builder;
use tile::AccTile;

use super::launch::Params;
use super::place::{Forward, row_block_and_split};
use super::plan::MmaPlan;
use super::steps::BlockSteps;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::descale::Scores;
use crate::{Arch, Baked};

const ENTRY: &str = "flash_forward_mma";

impl MmaPlan {
    /// Emits the kernel. If the plan lists blocks, the kernel that lists them comes before it; if CTAs divide
    /// the keys, the kernel that merges the results comes after it. The plan has been checked.
    pub(super) fn drafts<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        if let Some(resident) = self.resident_ctas {
            k.min_ctas_per_sm(resident);
        }
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, problem, baked, self);
        let launch = (ENTRY, self.launch(problem, baked));
        let body = move |k: &mut Builder| Forward::new(k, baked, self, params).body(k);
        let lists = self.list_tiles(problem).map(|tiles| tiles.draft(problem, baked, arch.target()));
        let forward = Draft::new(k, contract, launch, arch.target(), body);
        let merge = (self.splits > 1).then(|| self.merge(problem, baked, arch));
        lists.into_iter().chain([forward]).chain(merge).collect()
    }
}

impl Forward<'_> {
    /// The kernel; the numbers in the margin are the lines of Algorithm 1. A CTA takes one block of query
    /// rows (line 3). K and V of later blocks are requested during earlier ones.
    fn body(&self, k: &mut Builder) {
        let plan = self.plan;
        let list = self.list(k);
        let bound = self.bound(k, list.as_ref()); //                              1  the KV blocks
        let blocks = self.keys_and_values(k, bound, list, self.baked.divides);
        self.load_queries(k); //                                                  4  Q
        blocks.start(k); //                                                       7  the first K and V
        let q = self.queries(k, &blocks);
        let columns = plan.columns(self.baked)[1] / plan.dim_warps;
        let o = AccTile::zero(k, plan.warp_rows(), columns); //                   5  O = 0
        let state = self.row_state(k); //                                         5  l = 0, m = −∞
        let programs = state.programs.as_ref().map(|programs| {
            let (at, size) = (self.head_and_batch(k), (plan.warp_rows(), plan.warp_keys()));
            programs.for_rows(k, &self.key_threads(), &self.rows, size, at)
        });
        // A listed block may be partial because of the mask program alone.
        let unmasked = list.is_some() && self.baked.divides && self.params.band.is_full();
        let chain = ScoreChain {
            descale: state.scores.as_ref(),
            softcap: state.softcap.as_ref(),
            programs: programs.as_ref(),
            mask: (!unmasked).then_some(&state.mask),
        };
        let (sum, dropout) = (self.pair_sum(k), self.dropout(k));
        let of = BlockSteps { forward: self, q: &q, o: &o, state: &state, chain, sum, dropout };
        let steps = Steps {
            scores: |k: &mut Builder, block: &Block| of.scores(k, block), //      7–8  K, S = Q Kᵀ
            update: |k: &mut Builder, s: &AccTile| of.update(k, s),       //            9  m, l; O rescaled
            accumulate: |k: &mut Builder, s: &AccTile, block: &Block| {
                of.accumulate(k, s, block); //                                    7, 9–10  V, P, O += P V
            },
        };
        blocks.for_each_block(k, steps); //                                       6, 11
        self.spoil_seen(k, &state.softmax, state.factor);
        self.finish(k, state.softmax, o); //                                      12–15  O / l, L = m + ln l
    }

    /// The list of the blocks that the CTA visits, if the plan lists blocks.
    fn list(&self, k: &mut Builder) -> Option<BlockList> {
        self.params.lists.map(|lists| {
            let [head, batch] = self.head_and_batch(k);
            lists.read(k, [batch, head, self.tile], None)
        })
    }

    /// The blocks that the CTA visits.
    fn bound(&self, k: &mut Builder, list: Option<&BlockList>) -> Bound {
        let plan = self.plan;
        let bound = match list {
            None => Bound::new(k, &self.params.band, &self.rows, plan.block_n, self.baked.divides),
            Some(list) => list.bound(),
        };
        if plan.splits == 1 {
            return bound;
        }
        let [_, _, split] = row_block_and_split(k, plan, self.params.grid);
        bound.split(k, split, plan.splits)
    }
}
