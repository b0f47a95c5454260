//! The plan of the family that streams KV blocks.

mod default;
mod emit;
mod family;

use attend::{OnlineSoftmax, Packing, Rescale, Tanh};
use problem::Problem;
use ptx::Builder;
use serde::{Deserialize, Serialize};
use tile::{AccTile, Mbarriers, Pipeline, RowStore, Turns};

use super::common::{Common, RowOrder, SharedMap};
use super::emit::{Forward, SmallPlan};
use crate::error::accept;
use crate::forward::contract::check_rescale;
use crate::{Arch, Baked, Dims, PlanError};

/// The genes of a plan of this family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StreamedPlan {
    /// Number of warpgroups of a CTA with different query rows, 64 each.
    pub row_warpgroups: u32,
    /// Whether a tile has rows of one query head, or of all query heads of a group (pack-GQA).
    #[serde(default)]
    pub packing: Packing,
    /// CTAs of a cluster that share query rows and divide the keys: 1, 2 or 4.
    pub cluster: u32,
    /// Warpgroups of a CTA that share query rows and divide the CTA's keys: 1, 2 or 4.
    pub kv_warpgroups: u32,
    /// Keys whose scores a warpgroup holds at once.
    pub block_n: u32,
    /// Number of KV blocks in shared memory for a warpgroup.
    pub stages: u32,
    /// When O is rescaled.
    pub rescale: Rescale,
    /// Speculative row max: blocks that need no mask do not compute a row max. A block is recomputed if a
    /// lane's sum of its exponentials reaches `2^speculative` times the weight of a row max: `2^speculative`
    /// in bf16, and `2^min(speculative + 7, 15)` in f16.
    #[serde(default, alias = "guess")]
    pub speculative: Option<u8>,
    /// Whether row warpgroups use the tensor cores in turn (ping-pong).
    #[serde(default)]
    pub turns: Turns,
    /// The order in which CTAs take row tiles.
    #[serde(default, alias = "order")]
    pub tile_order: RowOrder,
    /// How O is stored.
    pub store: RowStore,
    /// Whether the kernel may start before the previous kernel has ended (programmatic dependent launch).
    pub overlapping: bool,
    /// Minimum number of resident CTAs per SM, which limits the registers.
    pub resident_ctas: u32,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    #[serde(default)]
    pub tanh: Tanh,
}

/// Maximum number of stages.
const MOST_STAGES: u32 = 8;
/// Estimated registers in addition to the accumulators (from ptxas' register counts).
const OTHER_REGISTERS: u32 = 40;

impl SmallPlan for StreamedPlan {
    const FAMILY: &'static str = "small_streamed";

    fn common(&self) -> Common {
        let &StreamedPlan { row_warpgroups, packing, cluster, kv_warpgroups, block_n, .. } = self;
        let &StreamedPlan { tile_order, store, overlapping, resident_ctas, tanh, .. } = self;
        Common {
            row_warpgroups,
            packing,
            cluster,
            kv_warpgroups,
            block_n,
            tile_order,
            store,
            overlapping,
            resident_ctas,
            tanh,
        }
    }

    /// One copy of queries loads all rows of the CTA.
    fn shared_map(&self, dims: impl Into<Dims>) -> SharedMap {
        let rings = Pipeline::bytes(1) + 2 * self.kv_warpgroups * Pipeline::bytes(self.stages);
        let common = self.common();
        SharedMap::new(&common, dims, [common.rows(), 1, self.stages, rings / Mbarriers::BYTES])
    }

    fn with_main_loop(&self, baked: Baked, problem: &Problem) -> Baked {
        Baked { resident: self.resident(problem), ..baked }
    }

    fn attend(forward: &Forward<'_, StreamedPlan>, k: &mut Builder) -> (OnlineSoftmax, AccTile) {
        let (softmax, o) = forward.stream(k);
        softmax.gather_sums(k);
        forward.join(k, softmax, o)
    }
}

impl StreamedPlan {
    /// Query rows of a CTA.
    pub fn rows(&self) -> u32 {
        self.common().rows()
    }

    /// Keys whose scores a cluster holds at once.
    pub fn cluster_keys(&self) -> u32 {
        self.common().cluster_keys()
    }

    /// Whether every block has its own stage.
    fn resident(&self, problem: &Problem) -> bool {
        problem.seq_kv.div_ceil(self.cluster_keys() as usize) <= self.stages as usize
    }

    /// Estimated registers of a thread: accumulators of S and O, and also P, because scores are issued ahead.
    fn registers(&self, problem: &Problem) -> u32 {
        self.block_n / 2 + self.block_n / 4 + problem.head_dim_v as u32 / 2 + OTHER_REGISTERS
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
        self.check_stages(problem)?;
        common.check_problem(Self::FAMILY, problem)?;
        common.check_packing(
            problem,
            common.rows(),
            "divisors of 64 · row_warpgroups with packing = packed",
        )?;
        common.check_shares(problem)?;
        common.check_store(Self::FAMILY, problem)?;
        common.check_grid(problem)?;
        common.check_resources(arch, self.shared_map(problem).bytes, self.registers(problem))
    }

    /// Checks the genes of the main loop.
    fn check_stages(&self, problem: &Problem) -> Result<(), PlanError> {
        accept("stages", self.stages.into(), (2..=MOST_STAGES).contains(&self.stages), "2 to 8")?;
        check_rescale(self.rescale, problem.dtypes.weights())?;
        if let Some(limit) = self.speculative {
            accept("speculative", limit.into(), (1..=15).contains(&limit), "1 to 15")?;
        }
        if self.turns == Turns::PingPong {
            let one = self.kv_warpgroups == 1;
            accept("kv_warpgroups", self.kv_warpgroups.into(), one, "1 with turns = ping_pong")?;
            let rows = self.row_warpgroups > 1;
            accept("row_warpgroups", self.row_warpgroups.into(), rows, "2 to 4 with turns = ping_pong")?;
        }
        Ok(())
    }
}
