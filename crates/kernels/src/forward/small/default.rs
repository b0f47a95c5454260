//! The default plan of a problem without a tuned plan.

use attend::{Packing, Rescale, Tanh};
use problem::{Band, Problem};
use tile::{RowStore, Turns, WARPGROUP_ROWS};

use super::plan::{MOST_PATHS, MOST_STAGES, Merge, Requests, RowOrder, Scores, SmallPlan};
use crate::Arch;
use crate::forward::contract::{default_tanh, rescale_within};
use crate::forward::packing::packs_well;

/// How much of the GPU the tiles of 64 query rows fill; each variant is an upper bound in waves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wave {
    Half,
    One,
    Two,
    Four,
    More,
}

impl Wave {
    fn of(tiles: u64, arch: &Arch) -> Wave {
        match (2 * tiles.min(1 << 32)).div_ceil(arch.multiprocessors.into()) {
            0..=1 => Wave::Half,
            2 => Wave::One,
            3..=4 => Wave::Two,
            5..=8 => Wave::Four,
            _ => Wave::More,
        }
    }

    /// Causal row tiles differ in length. If two CTAs share an SM from start to end, the order pairs lengths
    /// that add up; if more CTAs follow, the long tiles come first.
    fn order(self, mask: Band, row_tiles: u64) -> RowOrder {
        match (self, mask) {
            (_, Band::FULL) | (Wave::Half | Wave::One, _) => RowOrder::ByHead,
            (Wave::Two, _) => RowOrder::Folded,
            (Wave::Four | Wave::More, _) => {
                if row_tiles <= Arch::GRID_YZ {
                    RowOrder::LongestFirst
                } else {
                    RowOrder::ByHead
                }
            }
        }
    }
}

impl SmallPlan {
    /// The structure that keeps every SM busy in one wave with the fewest bytes per SM. The fewer tiles of
    /// query rows there are, the more SMs divide the keys of one tile; the more tiles there are, the more of
    /// them share the loads of a CTA. A warpgroup holds all its keys in one block while that suffices; beyond
    /// that, blocks stream. If no plan fits, returns the last resort unchecked. Heads of a group are packed
    /// if that fills tiles better: a tile costs the same however many of its rows exist.
    pub fn default_for(problem: &Problem, arch: &Arch) -> SmallPlan {
        let base = SmallPlan::BASE.filled(problem);
        let wave = Wave::of(base.tiles(problem), arch);
        let tile_order = wave.order(problem.band, base.row_tiles(problem));
        let base = SmallPlan { tile_order, tanh: default_tanh(problem), ..base };
        let plans = base.at_once(problem, wave).into_iter().chain(base.streamed(problem, wave));
        let plans: Vec<SmallPlan> = plans.map(|plan| plan.fitted(problem)).collect();
        let fitting = || plans.iter().filter(|plan| plan.check(problem, arch).is_ok());
        let best = fitting().find(|plan| plan.is_one_wave(problem, arch)).or_else(|| fitting().next());
        best.or(plans.last()).unwrap_or(&base).clone().staged(problem, arch)
    }

    const BASE: SmallPlan = SmallPlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 2,
        kv_warpgroups: 1,
        block_n: 256,
        stages: 1,
        rescale: Rescale::Always,
        speculative: None,
        turns: Turns::Free,
        tile_order: RowOrder::ByHead,
        key_copies: 1,
        qk_pieces: 1,
        softmax_steps: 1,
        pv_pieces: 2,
        paths: MOST_PATHS,
        requests: Requests::ValuesLate,
        scores: Scores::AllAtOnce,
        merge: Merge::PeerFirst,
        store: RowStore::Chunks,
        overlapping: false,
        resident_ctas: 1,
        tanh: Tanh::Exp2,
    };

    /// Variants without a loop that hold all keys, best first.
    fn at_once(&self, problem: &Problem, wave: Wave) -> Vec<SmallPlan> {
        let base = self;
        let keys = |parts: usize| problem.seq_kv.div_ceil(parts).next_multiple_of(16) as u32;
        let narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
        let in_pieces = SmallPlan { key_copies: 4, qk_pieces: 4, softmax_steps: 2, ..base.clone() };
        let in_steps =
            SmallPlan { qk_pieces: 2, softmax_steps: 2, scores: Scores::StepByStep, ..base.clone() };
        let pair = match (problem.seq_kv, narrow) {
            (..=128, _) => SmallPlan { block_n: 64, ..base.clone() },
            (..=256, _) => SmallPlan { block_n: 128, ..base.clone() },
            (..=512, true) => {
                SmallPlan { pv_pieces: 4, requests: Requests::FirstKeysOnly, ..in_pieces.clone() }
            }
            (..=512, false) => SmallPlan { pv_pieces: 4, ..in_steps.clone() },
            _ => {
                SmallPlan { kv_warpgroups: 2, key_copies: 2, qk_pieces: 2, softmax_steps: 2, ..base.clone() }
            }
        };
        let halves = match keys(2) {
            block_n @ 0..=128 => {
                SmallPlan { cluster: 1, kv_warpgroups: 2, block_n, pv_pieces: 1, ..base.clone() }
            }
            _ => SmallPlan {
                cluster: 1,
                kv_warpgroups: 2,
                key_copies: 2,
                qk_pieces: 2,
                softmax_steps: 2,
                ..base.clone()
            },
        };
        let rows = match (keys(1), narrow) {
            (block_n @ 0..=128, _) => SmallPlan { block_n, pv_pieces: 1, ..base.clone() },
            (_, true) => in_pieces,
            (_, false) => in_steps,
        };
        let rows = SmallPlan { cluster: 1, row_warpgroups: 2, ..rows };
        match wave {
            Wave::Half => vec![pair, halves],
            Wave::One => vec![halves],
            Wave::Two => vec![rows],
            Wave::Four | Wave::More => Vec::new(),
        }
    }

    /// Variants whose KV blocks stream, best first (measured on an H200). While two warpgroups per SM
    /// suffice, their blocks have many keys. Beyond, four warpgroups with fewer keys per block, of which some
    /// compute exponentials while others use the tensor cores.
    fn streamed(&self, problem: &Problem, wave: Wave) -> impl Iterator<Item = SmallPlan> + use<> {
        let causal = problem.band.is_causal();
        let narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
        // Row warpgroups, CTAs of a cluster, CTAs per SM, and choices for the keys of a block.
        type Shape = (u32, u32, u32, &'static [u32]);
        let alone: &[Shape] =
            &[(1, 1, 3, &[128]), (1, 1, 2, &[128, 96, 64]), (1, 1, 1, &[128, 96, 64, 48, 32, 16])];
        let stay = problem.seq_kv <= 64 * MOST_STAGES as usize;
        let shared: &[Shape] = match wave {
            Wave::Half => &[(1, 2, 1, &[128, 96, 64])],
            Wave::One => &[(2, 2, 1, &[128, 96, 64]), (1, 1, 1, &[128, 96, 64])],
            // Short rows leave an SM to long ones.
            Wave::Two if causal => &[(1, 1, 2, &[128, 64])],
            Wave::Two => &[(2, 1, 1, &[128, 96, 64])],
            Wave::Four if narrow && stay && !causal => &[(4, 1, 1, &[64])],
            Wave::Four | Wave::More if narrow && causal => &[(1, 1, 3, &[64])],
            Wave::Four | Wave::More if narrow => &[(1, 1, 4, &[64])],
            Wave::Four => &[(2, 1, 1, &[128, 96, 64])],
            Wave::More => &[],
        };
        let tiles = self.row_tiles(problem);
        let shared = shared.iter().filter(move |&&(rows, ..)| u64::from(rows) <= tiles);
        let base = SmallPlan {
            stages: 2,
            rescale: Rescale::Beyond(8),
            // Beside programs, the code of a block's second computation spills.
            speculative: (matches!(wave, Wave::Four | Wave::More) && problem.programs.is_empty())
                .then_some(12),
            pv_pieces: 1,
            ..self.clone()
        };
        shared.chain(alone).flat_map(move |&(row_warpgroups, cluster, resident_ctas, blocks)| {
            let turns = if row_warpgroups == 4 { Turns::PingPong } else { Turns::Free };
            let base = SmallPlan { row_warpgroups, cluster, resident_ctas, turns, ..base.clone() };
            // For a causal mask, blocks that end where row tiles end.
            let blocks = blocks.iter().filter(move |&&block_n| !(causal && block_n == 96));
            blocks.map(move |&block_n| SmallPlan { block_n, ..base.clone() })
        })
    }

    /// The plan with as many stages as streaming blocks, or as many as fit.
    fn staged(mut self, problem: &Problem, arch: &Arch) -> SmallPlan {
        while self.streams() && self.stages < MOST_STAGES && !self.resident(problem) {
            let more = SmallPlan { stages: self.stages + 1, ..self.clone() };
            if more.check(problem, arch).is_err() {
                break;
            }
            self = more;
        }
        self
    }

    /// The plan with the heads of a group packed if that fills tiles better.
    pub(crate) fn filled(mut self, problem: &Problem) -> SmallPlan {
        let packs =
            packs_well(problem, WARPGROUP_ROWS) && WARPGROUP_ROWS.is_multiple_of(problem.group_size() as u32);
        self.packing = if packs { Packing::Packed } else { Packing::Apart };
        self
    }

    /// The plan with the merge and store that it and the problem allow.
    pub(crate) fn fitted(mut self, problem: &Problem) -> SmallPlan {
        self.rescale = rescale_within(self.rescale, problem.dtypes.weights());
        if self.check_merge(problem).is_err() {
            self.merge = Merge::Shares;
        }
        if self.check_store(problem).is_err() {
            self.store = RowStore::Pairs;
        }
        self
    }
}
