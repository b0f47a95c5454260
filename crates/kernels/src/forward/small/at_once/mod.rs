//! The plan of the family that holds all keys of a warpgroup at once.

mod block;
mod default;
mod emit;
mod family;
mod loads;
mod paths;

use attend::{OnlineSoftmax, Packing, Tanh};
use problem::Problem;
use ptx::Builder;
use serde::{Deserialize, Serialize};
use tile::{AccTile, RowStore, SwizzledTile, WARPGROUP_ROWS};

use super::common::{Common, RowOrder, SharedMap};
use super::emit::{Forward, SmallPlan};
use crate::error::accept;
use crate::{Arch, Baked, Dims, PlanError};

/// When TMA copies are requested. Each request is an instruction of one thread, so the order of requests
/// determines the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Requests {
    /// Queries, keys and values at once, each by a different warp.
    AtOnce,
    /// Values after the CTA barrier that follows the initialisation of all mbarriers.
    ValuesLate,
    /// Values and all key copies except the first after the CTA barrier that follows the initialisation of
    /// all mbarriers.
    FirstKeysOnly,
}

/// When the scores of later softmax steps are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// All at the start, when their keys arrive.
    AllAtOnce,
    /// When the maximum of the previous step is known.
    StepByStep,
}

/// How the parts of a row's keys are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// When all of O is complete, each warpgroup sends the others their shares.
    Shares,
    /// With two CTAs, each computes the peer's columns first and sends them while it computes its own.
    PeerFirst,
}

/// The genes of a plan of this family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AtOncePlan {
    /// Number of warpgroups of a CTA with different query rows, 64 each.
    pub row_warpgroups: u32,
    /// Whether a tile has rows of one query head, or of all query heads of a group (pack-GQA).
    #[serde(default)]
    pub packing: Packing,
    /// CTAs of a cluster that share query rows and divide the keys: 1, 2 or 4.
    pub cluster: u32,
    /// Warpgroups of a CTA that share query rows and divide the CTA's keys: 1, 2 or 4.
    pub kv_warpgroups: u32,
    /// Keys of a warpgroup. The warpgroup holds all their scores at once.
    pub block_n: u32,
    /// The order in which CTAs take row tiles.
    #[serde(default, alias = "order")]
    pub tile_order: RowOrder,
    /// Number of TMA copies for the keys of a warpgroup.
    pub key_copies: u32,
    /// Number of products for the scores of a warpgroup.
    pub qk_pieces: u32,
    /// Online-softmax steps. The exponentials of one step run while the scores of the next are computed.
    pub softmax_steps: u32,
    /// Number of P V products per softmax step. The exponentials of one piece run during the product of the
    /// piece before it.
    pub pv_pieces: u32,
    /// Maximum number of code paths for causal rows that see only a part of their keys. With more paths,
    /// fewer scores are computed and masked, but the code is longer.
    #[serde(default = "most_paths")]
    pub paths: u32,
    pub requests: Requests,
    pub scores: Scores,
    /// How the parts of a row's keys are merged.
    pub merge: Merge,
    /// How O is stored.
    pub store: RowStore,
    /// Whether the kernel may start before the previous kernel has ended (programmatic dependent launch).
    pub overlapping: bool,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    #[serde(default)]
    pub tanh: Tanh,
}

/// Maximum number of paths that see a part of a block.
const MOST_PATHS: u32 = 4;
/// Estimated registers in addition to the accumulators (from ptxas' register counts).
const OTHER_REGISTERS: u32 = 57;

impl SmallPlan for AtOncePlan {
    const FAMILY: &'static str = "small_at_once";

    fn common(&self) -> Common {
        let &AtOncePlan { row_warpgroups, packing, cluster, kv_warpgroups, block_n, .. } = self;
        let &AtOncePlan { tile_order, store, overlapping, tanh, .. } = self;
        Common {
            row_warpgroups,
            packing,
            cluster,
            kv_warpgroups,
            block_n,
            tile_order,
            store,
            overlapping,
            // More resident CTAs never limited the registers, so this is not a gene.
            resident_ctas: 1,
            tanh,
        }
    }

    /// One copy of queries loads the rows of one warpgroup.
    fn shared_map(&self, dims: impl Into<Dims>) -> SharedMap {
        let load_barriers = self.row_warpgroups + self.kv_warpgroups * (self.key_copies + 1);
        SharedMap::new(&self.common(), dims, [WARPGROUP_ROWS, self.key_copies, 1, load_barriers])
    }

    /// A causal kernel has paths, which mask keys beyond the end too; with any other bound, all keys are
    /// masked.
    fn with_main_loop(&self, baked: Baked, problem: &Problem) -> Baked {
        let hidden_steps = if baked.band.is_causal() { self.hidden_steps(problem) } else { 0 };
        Baked { hidden_steps, divides: baked.divides && baked.band.is_full(), ..baked }
    }

    fn attend(forward: &Forward<'_, AtOncePlan>, k: &mut Builder) -> (OnlineSoftmax, AccTile) {
        forward.at_once(k)
    }
}

impl AtOncePlan {
    /// Query rows of a CTA.
    pub fn rows(&self) -> u32 {
        self.common().rows()
    }

    /// Keys of a cluster.
    pub fn cluster_keys(&self) -> u32 {
        self.common().cluster_keys()
    }

    /// Keys of one S product.
    const fn qk_keys(&self) -> u32 {
        self.block_n / self.qk_pieces
    }

    /// The S products of a softmax step.
    fn qk_pieces_of(&self, step: u32) -> std::ops::Range<u32> {
        let pieces = self.qk_pieces / self.softmax_steps;
        step * pieces..(step + 1) * pieces
    }

    /// Keys of one piece of P.
    const fn pv_keys(&self) -> u32 {
        self.block_n / self.softmax_steps / self.pv_pieces
    }

    /// The pieces of P of a softmax step.
    fn pv_pieces_of(&self, step: u32) -> std::ops::Range<u32> {
        step * self.pv_pieces..(step + 1) * self.pv_pieces
    }

    /// Estimated registers of a thread: accumulators of S and O.
    fn registers(&self, problem: &Problem) -> u32 {
        self.block_n / 2 + problem.head_dim_v as u32 / 2 + OTHER_REGISTERS
    }

    /// CTAs that an SM holds at once.
    pub(crate) fn occupancy(&self, problem: &Problem, arch: &Arch) -> u32 {
        self.common().occupancy(arch, self.shared_map(problem).bytes, self.registers(problem))
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", arch.sm.into(), arch.has_warpgroup_products(), "90")?;
        let common = self.common();
        common.check_genes()?;
        self.check_pieces()?;
        common.check_problem(Self::FAMILY, problem)?;
        let (keys, most) = (problem.seq_kv as u64, u64::from(common.cluster_keys()));
        let accepted = format!("up to {most} with this plan, and more with family small_streamed");
        accept("seq_kv", keys, keys <= most, &accepted)?;
        common.check_packing(problem, WARPGROUP_ROWS, "divisors of 64 with packing = packed")?;
        self.check_merge(problem)?;
        common.check_store(Self::FAMILY, problem)?;
        common.check_grid(problem)?;
        common.check_resources(arch, self.shared_map(problem).bytes, self.registers(problem))
    }

    /// Checks how copies, products and softmax steps divide the keys.
    fn check_pieces(&self) -> Result<(), PlanError> {
        let divides = |what, pieces: u32, whole: u32, step: u32, accepted: &str| {
            let fits = pieces > 0 && u64::from(whole).is_multiple_of(u64::from(pieces) * u64::from(step));
            accept(what, pieces.into(), fits, accepted)
        };
        // The swizzle atom and the step of n in `wgmma` are eight rows. The k step of P V is sixteen keys.
        divides("key_copies", self.key_copies, self.block_n, 8, "divisors of block_n / 8")?;
        divides("qk_pieces", self.qk_pieces, self.block_n, 8, "divisors of block_n / 8")?;
        divides("key_copies", self.key_copies, self.qk_pieces, 1, "divisors of qk_pieces")?;
        divides("softmax_steps", self.softmax_steps, self.qk_pieces, 1, "divisors of qk_pieces")?;
        let (step, accepted) = (16 * self.softmax_steps, "divisors of block_n / (16 · softmax_steps)");
        divides("pv_pieces", self.pv_pieces, self.block_n, step, accepted)?;
        accept("paths", self.paths.into(), [1, 2, MOST_PATHS].contains(&self.paths), "1, 2, 4")
    }

    fn check_merge(&self, problem: &Problem) -> Result<(), PlanError> {
        self.common().check_shares(problem)?;
        if self.merge == Merge::PeerFirst {
            accept("cluster", self.cluster.into(), self.cluster == 2, "2 with merge = peer_first")?;
            let one = self.kv_warpgroups == 1;
            accept("kv_warpgroups", self.kv_warpgroups.into(), one, "1 with merge = peer_first")?;
            let (columns, panel) = (problem.head_dim_v as u32, SwizzledTile::PANEL);
            let halves = columns <= panel || (columns / 2).is_multiple_of(panel);
            let accepted = "up to 64 and multiples of 128 with merge = peer_first, for each half to begin a panel or lie in one";
            accept("head_dim_v", columns.into(), halves, accepted)?;
        }
        Ok(())
    }
}

/// The value for plans that were written before this gene existed.
const fn most_paths() -> u32 {
    MOST_PATHS
}
