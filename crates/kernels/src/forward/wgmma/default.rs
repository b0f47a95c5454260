//! The default plan of a problem without a tuned plan.

use attend::{Chains, Order, OutputSums, Packing, Sums, Tanh, Tiles};
use problem::{DType, Problem};
use tile::{Handout, SwizzledTile, Tail, TileOrder, Turns};

use super::fp8::key_steps;
use super::plan::{
    Diagonal, Ends, Probabilities, Rescaling, SEARCHING_REGISTERS, Share, Store, Tables, WgmmaPlan,
    section_mib,
};
use crate::Arch;
use crate::forward::Visits;
use crate::forward::contract::default_tanh;
use crate::forward::fp8::keys_of_factors;
use crate::forward::packing::packs_well;

impl WgmmaPlan {
    /// Small tiles, and each gene at its simplest value: the start of plans that state what they change.
    pub const PLAIN: WgmmaPlan = WgmmaPlan {
        share: Share::Rows,
        consumers: 1,
        resident_ctas: 1,
        cluster: 1,
        packing: Packing::Apart,
        block_n: 32,
        stages: 2,
        tiles: Tiles::InTurn,
        products: Order::ScoresAhead,
        producer_registers: None,
        queries_ahead: 0,
        store: Store::Direct,
        turns: Turns::Free,
        rescale: Rescaling::Beyond(8),
        exps_by_fma: 0,
        probabilities: Probabilities::Registers,
        tables: Tables::Registers,
        chains: Chains { max: 2, sum: 1 },
        sums: Sums::Lanes,
        output_sums: OutputSums::Running,
        diagonal: Diagonal::Whole,
        ends: Ends::Common,
        handout: Handout::Static,
        tail: Tail::Whole,
        tile_order: TileOrder::InOrder,
        section_mib: section_mib(),
        tanh: Tanh::Exp2,
        visits: Visits::Band,
    };

    /// The plans that were fastest on an H200 (16k tokens, hidden size 2048). Shapes that were not measured
    /// get FlashAttention-3's tiles.
    pub fn default_for(problem: &Problem, arch: &Arch) -> WgmmaPlan {
        let causal = problem.band.is_causal();
        let dim = problem.head_dim.max(problem.head_dim_v);
        let speculative = Rescaling::Speculative { beyond: 8, limit: 15 };
        let lazy = Rescaling::Beyond(8);
        // With programs in full blocks, or with sinks and a window, a speculative softmax spills, because it
        // needs a second copy of the code of a block. So do 128 keys at small head dims. A mask program does
        // not run in full blocks that a list names.
        let in_full = problem.programs.mask.is_some() && Visits::default_for(problem) == Visits::Band;
        let programs = problem.programs.score.is_some() || in_full;
        let crowded = programs || problem.score.sink && !causal && !problem.band.is_full();
        let tensors = has_element_tables(problem);
        let shares_tables = WgmmaPlan::may_share_tables(problem);
        let base = WgmmaPlan {
            consumers: 2,
            block_n: 128,
            rescale: if crowded { lazy } else { speculative },
            sums: if problem.head_dim_v == 64 { Sums::Product } else { Sums::Lanes },
            ends: if causal { Ends::Own } else { Ends::Common },
            handout: Handout::Dynamic,
            tile_order: TileOrder::LongestFirst,
            tanh: default_tanh(problem),
            section_mib: if dim > 64 && problem.seq_kv > 2048 { 64 } else { section_mib() },
            ..WgmmaPlan::PLAIN
        };
        let in_order = WgmmaPlan { handout: Handout::Static, tile_order: TileOrder::InOrder, ..base.clone() };
        let mut plan = match (dim, causal) {
            _ if problem.dtypes.q.is_fp8() => WgmmaPlan::default_for_fp8(problem),
            (..=64, true) if problem.seq_kv <= 1024 => {
                WgmmaPlan { stages: 3, tiles: Tiles::Overlapped, ..base }
            }
            // Registers for the elements of a block.
            (..=64, _) if tensors && (shares_tables || !causal) => WgmmaPlan {
                rescale: speculative,
                sums: Sums::Lanes,
                stages: 3,
                tiles: Tiles::Overlapped,
                turns: Turns::PingPong,
                ..base
            },
            (..=64, _) => WgmmaPlan {
                consumers: 3,
                block_n: match (causal, crowded) {
                    (true, _) => 96,
                    (false, true) => 112,
                    (false, false) => 128,
                },
                stages: 3,
                tiles: Tiles::Overlapped,
                turns: Turns::PingPong,
                ..base
            },
            (65..=80, true) => WgmmaPlan { consumers: 3, block_n: 96, turns: Turns::PingPong, ..base },
            (81..=96, true) => base,
            (65..=96, false) => {
                WgmmaPlan { consumers: 3, block_n: 64, stages: 4, turns: Turns::PingPong, ..in_order }
            }
            (97..=128, true) => base,
            (97..=128, false) if problem.seq_kv > 4096 => WgmmaPlan { block_n: 144, ..in_order },
            (97..=128, false) => WgmmaPlan { turns: Turns::PingPong, ..in_order },
            // Blocks of 64 keys, one stage each. With fewer keys, S would read Q from shared memory more
            // often.
            (257.., _) if problem.head_dim_v > 256 => WgmmaPlan {
                share: Share::HeadDim,
                ends: Ends::Common,
                block_n: 64,
                stages: 1,
                rescale: lazy,
                sums: Sums::Lanes,
                ..base
            },
            (129..=192, _) => WgmmaPlan { block_n: 112, rescale: lazy, ..base },
            _ => WgmmaPlan { block_n: if tensors { 64 } else { 80 }, rescale: lazy, ..base },
        };
        plan = plan.visiting(problem).fitted(problem);
        if plan.check_problem(problem).is_err() {
            return plan; // its resource use may overflow
        }
        plan = plan.filled(problem).fitted_to_pages(problem);
        if plan.store.by_tma() && plan.check_bulk_store(problem).is_err() {
            plan.store = Store::Direct; // the heads are packed
        }
        if plan.blank_warpgroups(problem) && !plan.visits.lists(problem) {
            (plan.ends, plan.tail) = (Ends::Own, Tail::Whole);
        }
        let shared = plan.clone().feeding_tables(problem).within_resources(problem, arch);
        let plan = plan.within_resources(problem, arch);
        // Tables take shared memory from blocks of keys.
        let enough = shared.block_n >= plan.block_n.min(SwizzledTile::PANEL);
        let fits = shared.tables == Tables::Shared && shared.check_resources(problem, arch).is_ok();
        if enough && fits { shared } else { plan }
    }

    /// The plan whose producer loads tables too, which needs more registers. Tiles of tables are whole
    /// panels, and have at most three stages. Not measured with 8-bit inputs.
    fn feeding_tables(self, problem: &Problem) -> WgmmaPlan {
        let plan = self.clone().with_shared_tables(problem);
        if plan.tables == Tables::Registers || problem.dtypes.q.is_fp8() {
            return self;
        }
        let two = plan.consumers == 2 && plan.resident_ctas == 1;
        WgmmaPlan {
            block_n: (plan.block_n / SwizzledTile::PANEL).max(1) * SwizzledTile::PANEL,
            stages: plan.stages.min(3),
            producer_registers: if two { Some(40) } else { plan.producer_registers },
            ..plan
        }
    }

    /// The plan with as many keys in a block as shared memory and registers allow.
    fn within_resources(mut self, problem: &Problem, arch: &Arch) -> WgmmaPlan {
        let (least, step) = key_steps(problem);
        while self.block_n > least && self.check_resources(problem, arch).is_err() {
            self.block_n = keys_of_factors(problem, self.block_n - step, step);
        }
        self
    }

    /// The nearest plan that the problem's pass, lengths, types and output strides allow. With an LSE, lanes
    /// compute the sums, because products would sum rounded probabilities.
    pub(crate) fn fitted(mut self, problem: &Problem) -> WgmmaPlan {
        if problem.dtypes.weights() != DType::Bf16 || problem.pass.lse() {
            self.sums = Sums::Lanes;
        }
        if !problem.lengths.is_even() {
            self.cluster = 1;
            self.tail = Tail::Whole;
            // The producer reads the lengths of the next tile while the consumers compute.
            self.handout = Handout::Dynamic;
            // In the last tile of each sequence, some warpgroups may have no query.
            self.ends = if self.share == Share::Rows { Ends::Own } else { Ends::Common };
            self = self.searching(problem);
        }
        if self.visits.lists(problem) {
            // All warpgroups of a tile, and no other tile, must visit the blocks of its list.
            self.cluster = 1;
            self.tail = Tail::Whole;
            self.ends = Ends::Common;
            self.diagonal = Diagonal::Whole;
        }
        if self.tables == Tables::Shared {
            self = self.with_shared_tables(problem);
        }
        self = self.fitted_to_fp8(problem).fitted_to_pages(problem);
        self.rescale = self.rescale.within(problem.dtypes.weights(), self.sums);
        if self.store.by_tma() && self.check_bulk_store(problem).is_err() {
            self.store = Store::Direct;
        }
        self
    }

    /// The plan whose producer has the registers to search for the rows of its next tile, if the consumers
    /// can spare them.
    fn searching(self, problem: &Problem) -> WgmmaPlan {
        if self.producer_registers.is_some() || self.consumers != 2 || self.resident_ctas != 1 {
            return self;
        }
        let plan = WgmmaPlan { producer_registers: Some(SEARCHING_REGISTERS), ..self.clone() };
        if plan.registers(problem) <= plan.register_split().1 { plan } else { self }
    }

    /// The plan with the default choice of the blocks to visit.
    pub(crate) fn visiting(self, problem: &Problem) -> WgmmaPlan {
        let plan = WgmmaPlan { visits: Visits::default_for(problem), ..self };
        match plan.list_tiles(problem) {
            Some(tiles) if tiles.check(problem).is_err() => WgmmaPlan { visits: Visits::Band, ..plan },
            _ => plan,
        }
    }

    /// The plan with as few empty rows as possible, because empty rows are computed too.
    pub(crate) fn filled(mut self, problem: &Problem) -> WgmmaPlan {
        self.packing = if packs_well(problem, self.block_m()) { Packing::Packed } else { Packing::Apart };
        while self.share == Share::Rows
            && self.consumers > 1
            && self.rows(problem) <= 64 * (u64::from(self.consumers) - 1)
        {
            self.consumers -= 1;
            self.turns = if self.consumers == 1 { Turns::Free } else { self.turns };
        }
        self
    }

    /// Whether some warpgroups of the last tile of a head have no query.
    fn blank_warpgroups(&self, problem: &Problem) -> bool {
        let last = self.rows(problem) % u64::from(self.block_m());
        last != 0 && last + 64 <= u64::from(self.block_m())
    }
}

/// Whether programs may read a tensor of 16-bit elements along the keys, such as a bias.
fn has_element_tables(problem: &Problem) -> bool {
    let mut tables = problem.programs.tables.iter();
    tables.any(|table| table.dtype.bytes() == 2 && table.extents.len() > 1 && table.strides.ends_with(&[1]))
}
