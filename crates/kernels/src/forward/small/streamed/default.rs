//! The default plan of a problem without a tuned plan.

use attend::{Packing, Rescale};
use problem::Problem;
use tile::{RowStore, Turns};

use super::{MOST_STAGES, StreamedPlan};
use crate::Arch;
use crate::forward::contract::{default_tanh, rescale_within};
use crate::forward::small::common::{Common, RowOrder};
use crate::forward::small::emit::SmallPlan;
use crate::forward::small::wave::{Wave, is_narrow};

impl StreamedPlan {
    /// The first candidate that keeps every SM busy in one wave, else the first that fits. If none fits, the
    /// last one, unchecked. Heads of a group are packed if that fills tiles better.
    pub fn default_for(problem: &Problem, arch: &Arch) -> StreamedPlan {
        let wave = Wave::of_problem(problem, arch);
        let base = StreamedPlan::BASE.filled(problem);
        let tile_order = wave.order(problem.band, base.common().row_tiles(problem));
        let base = StreamedPlan { tile_order, tanh: default_tanh(problem), ..base };
        let plans: Vec<StreamedPlan> =
            base.variants(problem, wave).map(|plan| plan.fitted(problem)).collect();
        let fitting = || plans.iter().filter(|plan| plan.check(problem, arch).is_ok());
        let best = fitting().find(|plan| plan.common().is_one_wave(problem, arch));
        let best = best.or_else(|| fitting().next()).or(plans.last()).unwrap_or(&base);
        best.clone().staged(problem, arch)
    }

    /// One warpgroup per tile and two stages: the start of plans that state what they change.
    pub const BASE: StreamedPlan = StreamedPlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 128,
        stages: 2,
        rescale: Rescale::Beyond(8),
        speculative: None,
        turns: Turns::Free,
        tile_order: RowOrder::ByHead,
        store: RowStore::Chunks,
        overlapping: false,
        resident_ctas: 1,
        tanh: Common::BASE.tanh,
    };

    /// Candidates for the wave, best first (measured on an H200). While two warpgroups per SM suffice, their
    /// blocks have many keys. For larger grids there are four warpgroups with fewer keys per block: some
    /// compute exponentials while others use the tensor cores.
    fn variants(&self, problem: &Problem, wave: Wave) -> impl Iterator<Item = StreamedPlan> + use<> {
        let causal = problem.band.is_causal();
        let narrow = is_narrow(problem);
        // Row warpgroups, CTAs of a cluster, CTAs per SM, and choices for the keys of a block.
        type Shape = (u32, u32, u32, &'static [u32]);
        let alone: &[Shape] =
            &[(1, 1, 3, &[128]), (1, 1, 2, &[128, 96, 64]), (1, 1, 1, &[128, 96, 64, 48, 32, 16])];
        let stay = problem.seq_kv <= 64 * MOST_STAGES as usize;
        let shared: &[Shape] = match wave {
            Wave::Half => &[(1, 2, 1, &[128, 96, 64])],
            Wave::One => &[(2, 2, 1, &[128, 96, 64]), (1, 1, 1, &[128, 96, 64])],
            // Short rows leave the SM to long ones.
            Wave::Two if causal => &[(1, 1, 2, &[128, 64])],
            Wave::Two => &[(2, 1, 1, &[128, 96, 64])],
            Wave::Four if narrow && stay && !causal => &[(4, 1, 1, &[64])],
            Wave::Four | Wave::More if narrow && causal => &[(1, 1, 3, &[64])],
            Wave::Four | Wave::More if narrow => &[(1, 1, 4, &[64])],
            Wave::Four => &[(2, 1, 1, &[128, 96, 64])],
            Wave::More => &[],
        };
        let tiles = self.common().row_tiles(problem);
        let shared = shared.iter().filter(move |&&(rows, ..)| u64::from(rows) <= tiles);
        let base = StreamedPlan {
            // With programs, the code that recomputes a block spills.
            speculative: (matches!(wave, Wave::Four | Wave::More) && problem.programs.is_empty())
                .then_some(12),
            ..self.clone()
        };
        shared.chain(alone).flat_map(move |&(row_warpgroups, cluster, resident_ctas, blocks)| {
            let turns = if row_warpgroups == 4 { Turns::PingPong } else { Turns::Free };
            let base = StreamedPlan { row_warpgroups, cluster, resident_ctas, turns, ..base.clone() };
            // For a causal mask, blocks must end where row tiles end.
            let blocks = blocks.iter().filter(move |&&block_n| !(causal && block_n == 96));
            blocks.map(move |&block_n| StreamedPlan { block_n, ..base.clone() })
        })
    }

    /// The plan with as many stages as the family needs for streaming, or as many as fit.
    fn staged(mut self, problem: &Problem, arch: &Arch) -> StreamedPlan {
        while self.stages < MOST_STAGES && !self.resident(problem) {
            let more = StreamedPlan { stages: self.stages + 1, ..self.clone() };
            if more.check(problem, arch).is_err() {
                break;
            }
            self = more;
        }
        self
    }

    /// The plan with the heads of a group packed if that fills tiles better.
    pub(super) fn filled(mut self, problem: &Problem) -> StreamedPlan {
        self.packing = self.common().filled(problem).packing;
        self
    }

    /// The plan with the threshold and the store that the problem allows.
    pub(super) fn fitted(mut self, problem: &Problem) -> StreamedPlan {
        self.rescale = rescale_within(self.rescale, problem.dtypes.weights());
        self.store = self.common().fitted_store(Self::FAMILY, problem);
        self
    }
}
