//! How a plan divides the work of a problem: the quantities that its time depends on.

use problem::Problem;
use tile::{Handout, Tail, TileOrder, WARPGROUP_ROWS};

use crate::forward::mma::{CtaOrder, MmaPlan};
use crate::forward::packing::{packed_heads, whole_positions};
use crate::forward::small::{AtOncePlan, RowOrder, StreamedPlan};
use crate::forward::wgmma::WgmmaPlan;
use crate::{Arch, Plan};

/// The division of a problem's work. A step is the work on one KV block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Structure {
    /// Query rows of a tile, with those that exist in no head.
    pub rows: u32,
    /// Rows that are multiplied as one: those of a warpgroup, or of an `mma` CTA.
    pub unit_rows: u32,
    /// Keys of a step of one CTA, and the warpgroups that divide them.
    pub step_keys: u32,
    pub warpgroups: u32,
    /// CTAs that divide the keys of a tile.
    pub parts: u32,
    /// Whether a second kernel merges the parts.
    pub merges: bool,
    /// CTAs of all tiles.
    pub ctas: u64,
    /// CTAs that an SM holds at once.
    pub resident: u32,
    /// Steps of the CTA with the most keys, and of the mean CTA.
    pub most_steps: f64,
    pub mean_steps: f64,
    /// Steps of the first and of the last tile of a head, between which the steps of the others lie.
    pub ends: [f64; 2],
    /// Tiles of a head, or of the heads that are packed, and the number of such heads.
    pub tiles_of_head: u64,
    pub heads: u64,
    /// Warps or warpgroups of a CTA that merge their results, and whether a tile has several heads.
    pub merging: u32,
    pub is_packed: bool,
    /// Whether the tiles of the last wave are divided among all CTAs.
    pub shares_tail: bool,
    pub handout: Handout,
    pub longest_first: bool,
    /// Whether the tiles of a head start far apart, after tiles of all other heads.
    pub heads_first: bool,
}

/// The statements of the families about their plans.
struct Stated {
    rows: u32,
    packed: u32,
    step_keys: u32,
    /// Parts of a tile's keys: CTAs, and warpgroups of one CTA.
    ctas: u32,
    warpgroups: u32,
    resident: u32,
    /// Warps that share rows and merge their results.
    merging: u32,
}

impl Structure {
    /// `None` for plans whose time is not predicted.
    pub fn of(plan: &Plan, problem: &Problem, arch: &Arch) -> Option<Structure> {
        let stated = match plan {
            Plan::Mma(plan) => Stated::of_mma(plan, problem, arch),
            Plan::Wgmma(plan) => Stated::of_wgmma(plan, problem),
            Plan::SmallStreamed(plan) => Stated::of_streamed(plan, problem, arch),
            Plan::SmallAtOnce(plan) => Stated::of_at_once(plan, problem, arch),
            Plan::Decode(_) | Plan::BackwardSplit(_) | Plan::BackwardFused(_) => return None,
        };
        let packed = stated.packed as usize;
        let used = whole_positions(stated.rows, stated.packed) as usize;
        let tiles_of_head = (problem.seq_q * packed).div_ceil(used.max(1)).max(1);
        let heads = (problem.batch * problem.heads_q / packed.max(1)) as u64;
        let tiles = tiles_of_head as u64 * heads;
        let block = (stated.step_keys * stated.ctas * stated.warpgroups).max(1) as usize;
        let steps = |keys: usize| keys.div_ceil(block).max(1) as f64;
        // The rows of a causal head see one key more from row to row.
        let positions = (used / packed.max(1)).clamp(1, problem.seq_q.max(1));
        let visible = |row: usize| problem.band.keys(row, problem.seq_q, problem.seq_kv).len();
        let (first, last) = (visible(positions - 1), visible(problem.seq_q.saturating_sub(1)));
        let ends = [steps(first), steps(last)];
        let merges = matches!(plan, Plan::Mma(plan) if plan.splits > 1);
        let (shares_tail, handout, longest_first) = match plan {
            Plan::Wgmma(plan) => {
                (plan.tail == Tail::Shared, plan.handout, plan.tile_order == TileOrder::LongestFirst)
            }
            _ => (false, Handout::Grid, true),
        };
        let heads_first = match plan {
            Plan::Mma(plan) => plan.tile_order == CtaOrder::HeadsFirst,
            Plan::SmallStreamed(plan) => plan.tile_order != RowOrder::ByHead,
            Plan::SmallAtOnce(plan) => plan.tile_order != RowOrder::ByHead,
            _ => false,
        };
        Some(Structure {
            rows: stated.rows,
            unit_rows: if matches!(plan, Plan::Mma(_)) { stated.rows } else { WARPGROUP_ROWS },
            step_keys: stated.step_keys * stated.warpgroups,
            warpgroups: stated.warpgroups.max(1),
            parts: stated.ctas,
            merges,
            ctas: tiles * u64::from(stated.ctas),
            resident: stated.resident.max(1),
            most_steps: ends[0].max(ends[1]),
            mean_steps: (ends[0] + ends[1]) / 2.0,
            ends,
            tiles_of_head: tiles_of_head as u64,
            heads,
            merging: stated.merging.max(1),
            is_packed: packed > 1,
            shares_tail,
            handout,
            longest_first,
            heads_first,
        })
    }
}

impl Stated {
    fn of_mma(plan: &MmaPlan, problem: &Problem, arch: &Arch) -> Stated {
        let threads = plan.threads().max(32);
        let registers = plan.registers(problem).min(Arch::REGISTERS_PER_THREAD).next_multiple_of(8);
        let by_registers = Arch::REGISTERS_PER_SM / (threads * registers);
        let shared = plan.shared_bytes(problem) as u32 + Arch::SHARED_RESERVED;
        let resident = by_registers.min(arch.shared_per_sm / shared).min(Arch::THREADS_PER_SM / threads);
        Stated {
            rows: plan.block_m,
            packed: 1,
            step_keys: plan.block_n,
            ctas: plan.splits,
            warpgroups: 1,
            resident,
            merging: plan.kv_warps,
        }
    }

    fn of_wgmma(plan: &WgmmaPlan, problem: &Problem) -> Stated {
        Stated {
            rows: plan.block_m(),
            packed: packed_heads(plan.packing, problem),
            step_keys: plan.block_n,
            ctas: 1,
            warpgroups: 1,
            resident: plan.resident_ctas,
            merging: 1,
        }
    }

    fn of_streamed(plan: &StreamedPlan, problem: &Problem, arch: &Arch) -> Stated {
        Stated {
            rows: plan.rows(),
            packed: packed_heads(plan.packing, problem),
            step_keys: plan.block_n,
            ctas: plan.cluster,
            warpgroups: plan.kv_warpgroups,
            resident: plan.occupancy(problem, arch),
            merging: plan.kv_warpgroups,
        }
    }

    fn of_at_once(plan: &AtOncePlan, problem: &Problem, arch: &Arch) -> Stated {
        Stated {
            rows: plan.rows(),
            packed: packed_heads(plan.packing, problem),
            step_keys: plan.block_n,
            ctas: plan.cluster,
            warpgroups: plan.kv_warpgroups,
            resident: plan.occupancy(problem, arch),
            merging: plan.kv_warpgroups,
        }
    }
}
