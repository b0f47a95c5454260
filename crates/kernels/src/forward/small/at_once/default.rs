//! The default plan of a problem without a tuned plan.

use attend::Packing;
use problem::Problem;
use tile::RowStore;

use super::{AtOncePlan, MOST_PATHS, Merge, Requests, Scores};
use crate::Arch;
use crate::forward::contract::default_tanh;
use crate::forward::small::common::{Common, RowOrder};
use crate::forward::small::emit::SmallPlan;
use crate::forward::small::wave::{Wave, is_narrow};

impl AtOncePlan {
    /// The structure that keeps every SM busy in one wave with the fewest bytes per SM. With few tiles of
    /// query rows, more SMs divide the keys of one tile; with many tiles, more tiles share the loads of a
    /// CTA. If no plan fits, returns the last candidate unchecked. Heads of a group are packed if that fills
    /// tiles better, because the cost of a tile does not depend on how many of its rows exist.
    pub fn default_for(problem: &Problem, arch: &Arch) -> AtOncePlan {
        let wave = Wave::of_problem(problem, arch);
        let base = AtOncePlan::BASE.filled(problem);
        let tile_order = wave.order(problem.band, base.common().row_tiles(problem));
        let base = AtOncePlan { tile_order, tanh: default_tanh(problem), ..base };
        let with_keys = |plan: AtOncePlan| {
            AtOncePlan { cluster: plan.common().cluster_with_keys(problem), ..plan }.fitted(problem)
        };
        let plans: Vec<_> = base.variants(problem, wave).into_iter().map(with_keys).collect();
        let fitting = || plans.iter().filter(|plan| plan.check(problem, arch).is_ok());
        let best = fitting().find(|plan| plan.common().is_one_wave(problem, arch));
        best.or_else(|| fitting().next()).or(plans.last()).unwrap_or(&base).clone()
    }

    const BASE: AtOncePlan = AtOncePlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 2,
        kv_warpgroups: 1,
        block_n: 256,
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
        tanh: Common::BASE.tanh,
    };

    /// Candidates for the wave, best first.
    fn variants(&self, problem: &Problem, wave: Wave) -> Vec<AtOncePlan> {
        let base = self;
        let keys = |parts: usize| problem.seq_kv.div_ceil(parts).next_multiple_of(16) as u32;
        let narrow = is_narrow(problem);
        let in_pieces = AtOncePlan { key_copies: 4, qk_pieces: 4, softmax_steps: 2, ..base.clone() };
        let in_steps =
            AtOncePlan { qk_pieces: 2, softmax_steps: 2, scores: Scores::StepByStep, ..base.clone() };
        let pair = match (problem.seq_kv, narrow) {
            (..=128, _) => AtOncePlan { block_n: 64, ..base.clone() },
            (..=256, _) => AtOncePlan { block_n: 128, ..base.clone() },
            (..=512, true) => {
                AtOncePlan { pv_pieces: 4, requests: Requests::FirstKeysOnly, ..in_pieces.clone() }
            }
            (..=512, false) => AtOncePlan { pv_pieces: 4, ..in_steps.clone() },
            _ => {
                AtOncePlan { kv_warpgroups: 2, key_copies: 2, qk_pieces: 2, softmax_steps: 2, ..base.clone() }
            }
        };
        let halves = match keys(2) {
            block_n @ 0..=128 => {
                AtOncePlan { cluster: 1, kv_warpgroups: 2, block_n, pv_pieces: 1, ..base.clone() }
            }
            _ => AtOncePlan {
                cluster: 1,
                kv_warpgroups: 2,
                key_copies: 2,
                qk_pieces: 2,
                softmax_steps: 2,
                ..base.clone()
            },
        };
        let rows = match (keys(1), narrow) {
            (block_n @ 0..=128, _) => AtOncePlan { block_n, pv_pieces: 1, ..base.clone() },
            (_, true) => in_pieces,
            (_, false) => in_steps,
        };
        let rows = AtOncePlan { cluster: 1, row_warpgroups: 2, ..rows };
        match wave {
            Wave::Half => vec![pair, halves],
            Wave::One => vec![halves],
            Wave::Two | Wave::Four | Wave::More => vec![rows],
        }
    }

    /// The plan with the heads of a group packed if that fills tiles better.
    pub(super) fn filled(mut self, problem: &Problem) -> AtOncePlan {
        self.packing = self.common().filled(problem).packing;
        self
    }

    /// The plan with the merge and the store that its other genes and the problem allow.
    pub(super) fn fitted(mut self, problem: &Problem) -> AtOncePlan {
        if self.check_merge(problem).is_err() {
            self.merge = Merge::Shares;
        }
        self.store = self.common().fitted_store(Self::FAMILY, problem);
        self
    }
}
