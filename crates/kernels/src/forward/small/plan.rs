use attend::{Division, Packing, Rescale, Tanh};
use problem::{Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{Mbarriers, Pipeline, RowStore, SwizzledTile, Turns, WARPGROUP_ROWS, WARPGROUP_THREADS};

use crate::error::accept;
use crate::forward::contract::{band, check_rescale, check_tensor_maps, is_half, misaligned, most_rows};
use crate::forward::packing::{check_packing, packed_heads};
use crate::{Arch, PlanError};

const FAMILY: &str = "small";

/// When TMA copies are requested. Each request is an instruction of one thread, so the order decides what
/// arrives first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Requests {
    /// Queries, keys and values at once, each by another warp.
    AtOnce,
    /// Values after the CTA barrier that follows the initialisation of all mbarriers.
    ValuesLate,
    /// Values and all key copies except the first after the CTA barrier that follows the initialisation of
    /// all mbarriers.
    FirstKeysOnly,
}

/// When the scores of a later softmax step are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// All at the start, as their keys arrive.
    AllAtOnce,
    /// When the maximum of the previous step is known.
    StepByStep,
}

/// How the parts of a row's keys are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// Each warpgroup sends the others their shares of O when all of O is complete.
    Shares,
    /// With two CTAs, each computes the peer's columns first and sends them while it computes its own.
    PeerFirst,
}

/// The order in which the grid's CTAs take tiles of query rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// Head by head. In a causal head the last rows, which see most keys, come first.
    #[default]
    ByHead,
    /// The last rows of all heads first, so that the tiles at the end are short.
    LongestFirst,
    /// The last rows of all heads first up to the middle of the grid, then the first rows of all heads first.
    /// The second of two CTAs that share an SM comes half a grid after the first, which pairs a long tile
    /// with a short one.
    Folded,
}

/// Genes of the family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SmallPlan {
    /// Warpgroups of a CTA that take 64 query rows each.
    pub row_warpgroups: u32,
    /// Rows of one query head, or of all query heads of a group (pack-GQA).
    #[serde(default)]
    pub packing: Packing,
    /// CTAs of a cluster that share query rows and divide the keys: 1, 2 or 4.
    pub cluster: u32,
    /// Warpgroups of a CTA that share query rows and divide the CTA's keys: 1, 2 or 4.
    pub kv_warpgroups: u32,
    /// Keys whose scores a warpgroup holds at once.
    pub block_n: u32,
    /// KV blocks that a warpgroup has stages for. With one stage the block holds all its keys and everything
    /// is requested once; with more, KV blocks stream.
    pub stages: u32,
    /// When O is rescaled while KV blocks stream.
    pub rescale: Rescale,
    /// Speculative row max: streaming blocks that need no mask take no row max. A block is recomputed if a
    /// lane's sum of its exponentials reaches `2^speculative`.
    #[serde(default, alias = "guess")]
    pub speculative: Option<u8>,
    /// Ping-pong between row warpgroups while KV blocks stream.
    #[serde(default)]
    pub turns: Turns,
    /// The order in which CTAs take row tiles.
    #[serde(default, alias = "order")]
    pub tile_order: RowOrder,
    /// Number of TMA copies for the keys of a block.
    pub key_copies: u32,
    /// Number of products for the scores of a block.
    pub qk_pieces: u32,
    /// Online-softmax steps per block. The exponentials of one step run while the scores of the next are
    /// computed.
    pub softmax_steps: u32,
    /// Number of P V products per softmax step. The exponentials of one piece run during the product of the
    /// piece before it.
    pub pv_pieces: u32,
    /// Largest number of paths for causal rows that see a part of their only block. More paths compute and
    /// mask less, but make the code longer.
    #[serde(default = "most_paths")]
    pub paths: u32,
    pub requests: Requests,
    pub scores: Scores,
    /// How the parts of the keys are merged.
    pub merge: Merge,
    /// How O is stored.
    pub store: RowStore,
    /// Whether the kernel may start before the previous kernel has ended (programmatic dependent launch).
    pub overlapping: bool,
    /// Least number of resident CTAs per SM, which bounds registers.
    pub resident_ctas: u32,
    /// The instructions of the softcap. Without effect on problems that have none.
    #[serde(default)]
    pub tanh: Tanh,
}

/// Largest number of paths that see a part of a block.
pub(super) const MOST_PATHS: u32 = 4;
/// Largest number of stages.
pub(super) const MOST_STAGES: u32 = 8;
/// Registers besides the accumulators, for plans without a loop and with one (from ptxas' register counts).
const OTHER_REGISTERS: [u32; 2] = [57, 40];

/// Byte offsets of everything in a CTA's shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedMap {
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
    pub messages: u32,
    pub barriers: u32,
    pub bytes: u32,
}

impl SmallPlan {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.division().warpgroups() * WARPGROUP_THREADS
    }

    /// Query rows of a CTA.
    pub const fn rows(&self) -> u32 {
        WARPGROUP_ROWS * self.row_warpgroups
    }

    /// Number of query heads whose rows are packed.
    pub(super) fn packed_heads(&self, problem: &Problem) -> u32 {
        packed_heads(self.packing, problem)
    }

    /// Heads, or groups of packed heads, per batch entry.
    pub(super) fn tile_heads(&self, problem: &Problem) -> u64 {
        problem.heads_q as u64 / u64::from(self.packed_heads(problem))
    }

    /// Row tiles per head, or per group of packed heads.
    pub(super) fn row_tiles(&self, problem: &Problem) -> u64 {
        let rows = (problem.seq_q as u64).saturating_mul(self.packed_heads(problem).into());
        rows.div_ceil(self.rows().into())
    }

    /// Row tiles of all heads.
    pub(super) fn tiles(&self, problem: &Problem) -> u64 {
        let heads = self.tile_heads(problem).saturating_mul(problem.batch as u64);
        self.row_tiles(problem).saturating_mul(heads)
    }

    /// CTAs of the grid.
    pub(crate) fn ctas(&self, problem: &Problem) -> u64 {
        self.tiles(problem).saturating_mul(self.cluster.into())
    }

    /// Whether all CTAs are resident at once with the plan's `resident_ctas`.
    pub(crate) fn is_one_wave(&self, problem: &Problem, arch: &Arch) -> bool {
        self.ctas(problem) <= u64::from(self.resident_ctas) * u64::from(arch.multiprocessors)
    }

    /// Keys whose scores a cluster holds at once.
    pub const fn cluster_keys(&self) -> u32 {
        self.division().parts() * self.block_n
    }

    /// Keys of one S product.
    pub(super) const fn qk_keys(&self) -> u32 {
        self.block_n / self.qk_pieces
    }

    /// The S products of a softmax step.
    pub(super) fn qk_pieces_of(&self, step: u32) -> std::ops::Range<u32> {
        let pieces = self.qk_pieces / self.softmax_steps;
        step * pieces..(step + 1) * pieces
    }

    /// Keys of one piece of P.
    pub(super) const fn pv_keys(&self) -> u32 {
        self.block_n / self.softmax_steps / self.pv_pieces
    }

    /// The pieces of P of a softmax step.
    pub(super) fn pv_pieces_of(&self, step: u32) -> std::ops::Range<u32> {
        step * self.pv_pieces..(step + 1) * self.pv_pieces
    }

    pub(super) const fn division(&self) -> Division {
        Division {
            ctas: self.cluster,
            kv_warpgroups: self.kv_warpgroups,
            row_warpgroups: self.row_warpgroups,
        }
    }

    /// The tile of one TMA copy of queries: a warpgroup's rows, or with streaming blocks the CTA's rows.
    pub(super) fn query_tile(&self, problem: &Problem) -> SwizzledTile {
        let rows = if self.streams() { self.rows() } else { WARPGROUP_ROWS };
        SwizzledTile::new(rows, problem.head_dim as u32).packed(self.packed_heads(problem))
    }

    /// The tile of one TMA copy of a block's keys.
    pub(super) const fn key_tile(&self, problem: &Problem) -> SwizzledTile {
        SwizzledTile::new(self.block_n / self.key_copies, problem.head_dim as u32)
    }

    /// The tile of a block's values.
    pub(super) const fn value_tile(&self, problem: &Problem) -> SwizzledTile {
        SwizzledTile::new(self.block_n, problem.head_dim_v as u32)
    }

    pub(super) fn shared_map(&self, problem: &Problem) -> SharedMap {
        let division = self.division();
        let queries = self.query_tile(problem);
        let keys = self.rows() / queries.rows * queries.bytes();
        let blocks = self.kv_warpgroups * self.stages;
        let values = keys + blocks * self.key_copies * self.key_tile(problem).bytes();
        let messages = values + blocks * self.value_tile(problem).bytes();
        let barriers = messages + division.message_room(problem.head_dim_v as u32);
        let count = self.load_barriers() + division.barriers();
        SharedMap { queries: 0, keys, values, messages, barriers, bytes: barriers + count * Mbarriers::BYTES }
    }

    /// Whether KV blocks stream.
    pub const fn streams(&self) -> bool {
        self.stages > 1
    }

    /// Whether every streaming block has a stage of its own.
    pub(super) fn resident(&self, problem: &Problem) -> bool {
        problem.seq_kv.div_ceil(self.cluster_keys() as usize) <= self.stages as usize
    }

    /// Mbarriers of queries, keys and values.
    pub(super) const fn load_barriers(&self) -> u32 {
        if self.streams() {
            let rings = Pipeline::bytes(1) + 2 * self.kv_warpgroups * Pipeline::bytes(self.stages);
            return rings / Mbarriers::BYTES;
        }
        self.row_warpgroups + self.kv_warpgroups * (self.key_copies + 1)
    }

    /// Shared memory of a CTA, in bytes.
    pub fn shared_bytes(&self, problem: &Problem) -> u64 {
        self.shared_map(problem).bytes.into()
    }

    /// Estimated registers of a thread: accumulators of S and O, and P if scores are issued ahead.
    pub fn registers(&self, problem: &Problem) -> u32 {
        let p = if self.streams() { self.block_n / 4 } else { 0 };
        let others = OTHER_REGISTERS[usize::from(self.streams())];
        self.block_n / 2 + p + problem.head_dim_v as u32 / 2 + others
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", arch.sm.into(), arch.sm == 90, "90")?;
        self.check_genes(problem)?;
        self.check_problem(problem)?;
        self.check_merge(problem)?;
        self.check_store(problem)?;
        self.check_grid(problem)?;
        self.check_resources(problem, arch)
    }

    fn check_problem(&self, problem: &Problem) -> Result<(), PlanError> {
        if !is_half(problem) {
            let accepted = "f16, bf16";
            return Err(PlanError::DType { family: FAMILY, dtype: problem.dtypes, accepted });
        }
        for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
            let fits = dim.is_multiple_of(8) && (8..=256).contains(&dim);
            accept(what, dim as u64, fits, "multiples of 8 from 8 to 256")?;
        }
        for (what, length) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
            let (most, accepted) = most_rows(problem);
            accept(what, length as u64, (1..=most).contains(&length), &accepted.replacen("up", "1", 1))?;
        }
        if !self.streams() {
            let (keys, most) = (problem.seq_kv as u64, u64::from(self.cluster_keys()));
            let accepted = format!("up to {most} with this plan, and more with stages > 1");
            accept("seq_kv", keys, keys <= most, &accepted)?;
        }
        let accepted = "divisors of 64 with packing = packed, or of 64 · row_warpgroups with stages > 1, too";
        let heads = self.packed_heads(problem);
        check_packing(problem, heads, self.query_tile(problem).rows.is_multiple_of(heads), accepted)?;
        check_tensor_maps(problem, FAMILY)
    }

    fn check_genes(&self, problem: &Problem) -> Result<(), PlanError> {
        for (what, value) in [("cluster", self.cluster), ("kv_warpgroups", self.kv_warpgroups)] {
            accept(what, value.into(), [1, 2, 4].contains(&value), "1, 2, 4")?;
        }
        let rows = (1..=4).contains(&self.row_warpgroups);
        accept("row_warpgroups", self.row_warpgroups.into(), rows, "1 to 4")?;
        let threads = self.threads();
        accept("threads", threads.into(), threads <= 1024, "up to 1024 (128 a warpgroup)")?;
        let keys = self.block_n.is_multiple_of(16) && (16..=256).contains(&self.block_n);
        accept("block_n", self.block_n.into(), keys, "multiples of 16 from 16 to 256")?;
        let divides = |what, pieces: u32, whole: u32, step: u32, accepted: &str| {
            let fits = pieces > 0 && u64::from(whole).is_multiple_of(u64::from(pieces) * u64::from(step));
            accept(what, pieces.into(), fits, accepted)
        };
        // The swizzle atom and the step of n in `wgmma` are eight rows; the k step of P V is sixteen keys.
        divides("key_copies", self.key_copies, self.block_n, 8, "divisors of block_n / 8")?;
        divides("qk_pieces", self.qk_pieces, self.block_n, 8, "divisors of block_n / 8")?;
        divides("key_copies", self.key_copies, self.qk_pieces, 1, "divisors of qk_pieces")?;
        divides("softmax_steps", self.softmax_steps, self.qk_pieces, 1, "divisors of qk_pieces")?;
        let (step, accepted) = (16 * self.softmax_steps, "divisors of block_n / (16 · softmax_steps)");
        divides("pv_pieces", self.pv_pieces, self.block_n, step, accepted)?;
        accept("paths", self.paths.into(), [1, 2, MOST_PATHS].contains(&self.paths), "1, 2, 4")?;
        accept("stages", self.stages.into(), (1..=MOST_STAGES).contains(&self.stages), "1 to 8")?;
        if self.streams() {
            for (what, pieces) in [
                ("key_copies", self.key_copies),
                ("qk_pieces", self.qk_pieces),
                ("softmax_steps", self.softmax_steps),
                ("pv_pieces", self.pv_pieces),
            ] {
                accept(what, pieces.into(), pieces == 1, "1 with stages > 1")?;
            }
        }
        let streams = |accepted| accept("stages", self.stages.into(), self.streams(), accepted);
        if matches!(self.rescale, Rescale::Beyond(_)) {
            streams("2 to 8 with rescale = beyond")?;
        }
        check_rescale(self.rescale, problem.dtypes.weights())?;
        if let Some(limit) = self.speculative {
            streams("2 to 8 with speculative")?;
            accept("speculative", limit.into(), (1..=15).contains(&limit), "1 to 15")?;
        }
        if self.turns == Turns::PingPong {
            streams("2 to 8 with turns = ping_pong")?;
            let one = self.kv_warpgroups == 1;
            accept("kv_warpgroups", self.kv_warpgroups.into(), one, "1 with turns = ping_pong")?;
            let rows = self.row_warpgroups > 1;
            accept("row_warpgroups", self.row_warpgroups.into(), rows, "2 to 4 with turns = ping_pong")?;
        }
        let resident = (1..=8).contains(&self.resident_ctas);
        accept("resident_ctas", self.resident_ctas.into(), resident, "1 to 8")
    }

    /// Checks that the parts of the keys get equal shares of O's columns.
    pub(super) fn check_merge(&self, problem: &Problem) -> Result<(), PlanError> {
        let (parts, columns) = (self.division().parts(), problem.head_dim_v as u32);
        let even = (columns / 8).is_multiple_of(parts);
        accept("cluster · kv_warpgroups", parts.into(), even, "divisors of head_dim_v / 8")?;
        if self.merge == Merge::PeerFirst {
            accept("cluster", self.cluster.into(), self.cluster == 2, "2 with merge = peer_first")?;
            let one = self.kv_warpgroups == 1;
            accept("kv_warpgroups", self.kv_warpgroups.into(), one, "1 with merge = peer_first")?;
            accept("stages", self.stages.into(), !self.streams(), "1 with merge = peer_first")?;
            let panel = SwizzledTile::PANEL;
            let halves = columns <= panel || (columns / 2).is_multiple_of(panel);
            let accepted = "up to 64 and multiples of 128 with merge = peer_first, for each half to begin a panel or lie in one";
            accept("head_dim_v", columns.into(), halves, accepted)?;
        }
        Ok(())
    }

    /// Checks that stores are aligned, in global memory and to the tiles of a share.
    pub(super) fn check_store(&self, problem: &Problem) -> Result<(), PlanError> {
        let step = self.store.elements();
        let share = problem.head_dim_v as u32 / self.division().parts();
        if self.store == RowStore::Chunks {
            accept("head_dim_v / parts", share.into(), share >= 32, "32 and more with store = chunks")?;
        }
        match misaligned(problem, Tensor::Out, step) {
            None => Ok(()),
            Some((what, stride)) => Err(PlanError::Problem {
                family: FAMILY,
                what: format!("out {what}"),
                value: stride.to_string(),
                accepted: format!("multiples of {step} elements with this store"),
            }),
        }
    }

    fn check_grid(&self, problem: &Problem) -> Result<(), PlanError> {
        let heads = match self.packing {
            Packing::Apart => ("heads_q", problem.heads_q as u64),
            Packing::Packed => ("heads_kv", problem.heads_kv as u64),
        };
        let batch = ("batch", problem.batch as u64);
        let [y, z] = match self.tile_order {
            RowOrder::ByHead => [heads, batch],
            _ => [batch, ("tiles of query rows", self.row_tiles(problem))],
        };
        for (what, value) in [y, z] {
            accept(what, value, value <= Arch::GRID_YZ, "up to 65535")?;
        }
        let (what, heads) = heads;
        let fits = heads.saturating_mul(self.cluster.into()) < 1 << 31;
        accept(what, heads, fits, "fewer than 2^31 / cluster")
    }

    fn check_resources(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let bytes = self.shared_bytes(problem);
        let share = (arch.shared_per_sm / self.resident_ctas).saturating_sub(Arch::SHARED_RESERVED);
        let limit = arch.shared_per_cta.min(share);
        if bytes > u64::from(limit) {
            return Err(PlanError::SharedMemory { bytes, limit, sm: arch.sm });
        }
        let registers = self.registers(problem);
        let share = Arch::REGISTERS_PER_SM / (self.threads() * self.resident_ctas);
        let limit = Arch::REGISTERS_PER_THREAD.min(share);
        if registers > limit {
            return Err(PlanError::Registers { registers, limit });
        }
        Ok(())
    }

    /// Whether the keys fill whole blocks of the cluster.
    pub(super) fn divides(&self, problem: &Problem) -> bool {
        problem.seq_kv.is_multiple_of(self.cluster_keys() as usize)
    }

    /// Whether the last block may have keys beyond the end or keys that some row does not see.
    pub(super) fn masks(&self, problem: &Problem) -> bool {
        !band(problem).is_full() || !self.divides(problem)
    }
}

/// The value for plans that were written before the gene existed.
const fn most_paths() -> u32 {
    MOST_PATHS
}
