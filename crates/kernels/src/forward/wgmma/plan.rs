//! The genes, and what follows from them for a problem.

use problem::{DType, Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{
    Chains, Handout, LastRound, Ones, Order, Packing, Rescale, RowStore, Sums, SwizzledTile, Tail, TileOrder,
    Tiles, Turns, WARPGROUP_ROWS,
};

use crate::Arch;
use crate::forward::contract::misaligned;
use crate::forward::packing::packed_heads;

/// How rows keep to their maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Softmax {
    /// The reference is the running maximum; O is rescaled at every block.
    Classic,
    /// The reference moves only when a score of the warp exceeds it by more than `slack` powers of two.
    Lazy {
        /// Powers of two; in f16 up to [`Rescale::MOST_IN_F16`].
        slack: u8,
    },
    /// No maximum is taken of blocks that need no mask, but for the first: exponentials are taken against the
    /// old reference, and a block of which a lane's sum reaches `2^limit` times the weight of a maximum is
    /// computed once more, with its maximum. Where products make the sums, a block is where a probability
    /// reaches 2, as of a score that exceeds the maximum that its reference was taken from by `limit + 1`
    /// powers.
    Optimistic {
        /// As of [`Softmax::Lazy`], for the blocks that do take a maximum.
        slack: u8,
        /// Powers of two, up to 15 in f16, where 8 and more mean the same: maxima weigh 2^7 there, and f16
        /// holds 2^15. Where products make the sums, references lie `limit` powers of two above maxima, and
        /// probabilities as far below one; then, too, it is at most 15.
        limit: u8,
    },
}

impl Softmax {
    /// The nearest that probabilities of a type allow.
    pub(crate) fn within(self, dtype: DType, sums: Sums) -> Softmax {
        let most = largest_slack(dtype);
        match self {
            Softmax::Classic => Softmax::Classic,
            Softmax::Lazy { slack } => Softmax::Lazy { slack: slack.min(most) },
            Softmax::Optimistic { slack, limit } => {
                let limit = limit.min(largest_limit(dtype, sums));
                Softmax::Optimistic { slack: slack.min(most).min(limit.saturating_sub(1)), limit }
            }
        }
    }
}

/// The largest slack. A bf16 has the range of the f32 that the sums are, and so has O: it overflows, where
/// the mean of the values would not, from values of about 2^60 on.
pub(super) const fn largest_slack(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => Rescale::MOST_IN_F16,
        DType::Bf16 | DType::F32 => 60,
    }
}

/// The largest limit. Where products make the sums, probabilities lie `limit` powers of two below one, and
/// what they add to O, an f32, lies as far below the values: with 15, values down to 2^-118 keep the
/// precision of bf16.
pub(super) const fn largest_limit(dtype: DType, sums: Sums) -> u8 {
    match (dtype, sums) {
        (DType::F16, _) => 15,
        (_, Sums::Product) => 15,
        (DType::Bf16 | DType::F32, Sums::Lanes) => 60,
    }
}

/// Where the blocks of keys end that a warpgroup visits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ends {
    /// Where those of the tile do.
    #[default]
    Common,
    /// Where those do that its own rows see: it lets the others pass.
    Own,
}

/// How much is computed of the first block that a warpgroup visits, where the mask's diagonal runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Diagonal {
    /// All of it.
    #[default]
    Whole,
    /// Probabilities of the first half of its keys, where its rows see no more; where tiles do not overlap,
    /// scores too.
    Halved,
}

/// How O leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// Straight from registers.
    #[default]
    Direct,
    /// Through shared memory, by TMA, while the next tile is computed.
    Bulk,
}

/// Where products take probabilities from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probabilities {
    /// The registers in which the softmax leaves them.
    #[default]
    Registers,
    /// Shared memory, where they are written for it.
    Shared,
}

/// Genes of the family. Those with a default came later; a plan without them means it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WgmmaPlan {
    /// Warpgroups that compute, of 64 query rows each.
    pub consumers: u32,
    /// CTAs of a multiprocessor: what one has to wait for, the others hide.
    #[serde(default = "one")]
    pub resident: u32,
    /// CTAs of a cluster, on neighbouring tiles of a head, that request every block of keys and values
    /// together: 1 or 2.
    #[serde(default = "one")]
    pub cluster: u32,
    /// What the rows of a tile are.
    #[serde(default)]
    pub packing: Packing,
    /// Keys of a block.
    pub block_n: u32,
    /// Blocks of keys, and of values, in shared memory.
    pub stages: u32,
    /// How successive tiles of query rows follow.
    pub tiles: Tiles,
    /// Whether what a block adds to O is in flight while the softmax of the next one runs (`scores_ahead`,
    /// FlashAttention-3's overlap within a warpgroup), or is waited for.
    #[serde(default = "scores_ahead")]
    pub products: Order,
    /// Registers of a producer's thread, where not FlashAttention-3's split; consumers share what it leaves.
    #[serde(default)]
    pub producer_registers: Option<u32>,
    /// Places of queries beyond those that the order of tiles needs.
    #[serde(default)]
    pub queries_ahead: u32,
    /// How O leaves.
    #[serde(default)]
    pub store: Store,
    /// Whether warpgroups take turns at the tensor cores.
    pub turns: Turns,
    /// How rows keep to their maximum.
    pub softmax: Softmax,
    /// Of eight exponentials of a block without a maximum, how many are computed by FMAs, not by the
    /// special-function unit.
    #[serde(default)]
    pub exps_by_fma: u32,
    /// Where products take probabilities from.
    #[serde(default)]
    pub probabilities: Probabilities,
    /// Chains of a row's maximum and sum.
    pub chains: Chains,
    /// Who makes the rows' sums. A product needs a head dim of values of 64, and the range of bf16: in f16
    /// probabilities that lie a limit below one would leave no room for those of keys that are light each and
    /// heavy together. It returns no LSE, for which it is not exact enough.
    #[serde(default)]
    pub sums: Sums,
    /// Where the blocks end that a warpgroup visits.
    #[serde(default)]
    pub ends: Ends,
    /// How much is computed of the first block that a warpgroup visits.
    #[serde(default)]
    pub diagonal: Diagonal,
    /// How tiles reach the CTAs.
    pub handout: Handout,
    /// Who computes the tiles of the last round.
    #[serde(default)]
    pub tail: Tail,
    /// In which order.
    pub order: TileOrder,
    /// MiB of keys and values whose heads are taken together, where long tiles come first: what L2 should
    /// hold. Fewer heads hit it more often, more leave less for the last CTA.
    #[serde(default = "section_mib")]
    pub section_mib: u32,
    /// Whether the LSE is returned.
    pub lse: bool,
}

/// About half of L2 (H100: 50 MB), FlashAttention-3's choice.
pub(super) const fn section_mib() -> u32 {
    32
}

/// Registers of a producer's thread where several CTAs are resident: the fewest that `setmaxnreg` takes.
pub(super) const FEEDING_REGISTERS: u32 = 24;
/// The most that `setmaxnreg` takes.
const MOST_REGISTERS: u32 = 256;
/// Registers of a consumer beside its tiles: addresses, rows' references and sums, loop state (measured on
/// what ptxas can hold without serialising products).
const OTHER_REGISTERS: u32 = 26;

impl WgmmaPlan {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    /// The same plan, returning the LSE or not: that is not of rounded probabilities, which products would
    /// sum.
    #[must_use]
    pub fn with_lse(&self, lse: bool) -> WgmmaPlan {
        WgmmaPlan { lse, sums: if lse { Sums::Lanes } else { self.sums }, ..self.clone() }
    }

    /// Query rows of a CTA.
    pub const fn block_m(&self) -> u32 {
        64 * self.consumers
    }

    /// Registers that a thread of the producer keeps, and what a consumer's takes (FlashAttention-3's split,
    /// where one CTA is resident and no gene says otherwise).
    pub const fn register_split(&self) -> (u32, u32) {
        let producer = match (self.producer_registers, self.consumers, self.resident) {
            (None, 1, 1) => return (56, 256),
            (None, 2, 1) => return (24, 240),
            (None, 3, 1) => return (32, 160),
            (None, ..) => FEEDING_REGISTERS,
            (Some(registers), ..) => registers,
        };
        let left = self.registers_at_launch() * (self.consumers + 1) - producer;
        let consumer = left / self.consumers / 8 * 8;
        (producer, if consumer < MOST_REGISTERS { consumer } else { MOST_REGISTERS })
    }

    /// Registers of every thread until the roles part.
    pub(super) const fn registers_at_launch(&self) -> u32 {
        Arch::REGISTERS_PER_SM / (self.resident * self.threads()) / 8 * 8
    }

    /// Tiles of Q, K and V in shared memory.
    pub(super) fn tile_shapes(&self, problem: &Problem) -> [SwizzledTile; 3] {
        let (dim, dim_v) = (problem.head_dim as u32, problem.head_dim_v as u32);
        [
            SwizzledTile::new(self.block_m(), dim).packed(self.packed_heads(problem)),
            SwizzledTile::new(self.block_n, dim).in_parts(self.cluster),
            SwizzledTile::new(self.block_n, dim_v).in_parts(self.cluster),
        ]
    }

    /// A warpgroup's probabilities, where products take them from shared memory.
    pub(super) fn prob_tile(&self) -> Option<SwizzledTile> {
        (self.probabilities == Probabilities::Shared).then(|| SwizzledTile::new(WARPGROUP_ROWS, self.block_n))
    }

    /// Registers of a consumer's thread, about: accumulators of O and S, and P, which is read while S is
    /// written.
    pub fn registers(&self, problem: &Problem) -> u32 {
        self.columns_out(problem) / 2 + self.block_n / 2 + self.block_n / 4 + OTHER_REGISTERS
    }

    /// Columns of what blocks add up: O, and the sums where products make them.
    pub(super) fn columns_out(&self, problem: &Problem) -> u32 {
        let own = (problem.head_dim_v as u32).next_multiple_of(8);
        match self.sums {
            Sums::Lanes => own,
            Sums::Product => own + Ones::COLUMNS,
        }
    }

    /// Query heads whose rows are packed.
    pub(super) fn packed_heads(&self, problem: &Problem) -> u32 {
        packed_heads(self.packing, problem)
    }

    /// Heads, or groups of packed heads, of a batch entry.
    pub(super) fn tile_heads(&self, problem: &Problem) -> u64 {
        problem.heads_q as u64 / u64::from(self.packed_heads(problem))
    }

    /// Rows of one of them.
    pub(super) fn rows(&self, problem: &Problem) -> u64 {
        problem.seq_q as u64 * u64::from(self.packed_heads(problem))
    }

    /// Tiles of one of them, those of a cluster counted as one.
    pub(super) fn row_blocks(&self, problem: &Problem) -> u64 {
        self.rows(problem).div_ceil(u64::from(self.cluster * self.block_m()))
    }

    /// Tiles of all heads.
    pub(super) fn tile_count(&self, problem: &Problem) -> u64 {
        self.row_blocks(problem) * problem.batch as u64 * self.tile_heads(problem)
    }

    /// CTAs or clusters that there is room for at a time.
    pub(super) fn room(&self, arch: &Arch) -> u64 {
        u64::from(self.resident * arch.multiprocessors / self.cluster).max(1)
    }

    /// CTAs or clusters that take tiles: as many as there is room for, if each has something to do.
    pub(super) fn takers(&self, problem: &Problem, arch: &Arch) -> u64 {
        let blocks = match self.tail {
            Tail::Whole => 1,
            Tail::Shared => self.blocks(problem),
        };
        let tiles = self.tile_count(problem);
        match self.handout {
            Handout::Grid => tiles,
            _ => self.room(arch).min(tiles.saturating_mul(blocks)),
        }
    }

    /// Blocks of keys of a tile, without a mask.
    pub(super) fn blocks(&self, problem: &Problem) -> u64 {
        (problem.seq_kv as u64).div_ceil(self.block_n.into())
    }

    /// The tiles of the last round, if they are shared.
    pub(super) fn last_round(&self, problem: &Problem, arch: &Arch) -> Option<LastRound> {
        let round = LastRound {
            tiles: self.tile_count(problem),
            blocks: self.blocks(problem),
            takers: self.takers(problem, arch),
        };
        (self.tail == Tail::Shared).then_some(round)
    }

    /// Warps that compute a tile, those of all CTAs of a cluster.
    pub(super) const fn tile_warps(&self) -> u32 {
        4 * self.consumers * self.cluster
    }

    /// Heads that are taken together when long tiles come first: a divisor of all of them, whose keys and
    /// values fit L2. Of [`TileOrder::Strided`], the stride.
    pub(super) fn section(&self, problem: &Problem) -> u64 {
        if self.order == TileOrder::Strided {
            return stride(self.tile_count(problem));
        }
        let heads = problem.batch * self.tile_heads(problem) as usize;
        let bytes = 2 * problem.seq_kv * (problem.head_dim + problem.head_dim_v);
        let group = problem.group_size() / self.packed_heads(problem) as usize;
        // Heads of a group share theirs.
        let fit =
            (((self.section_mib as usize) << 20) / bytes.max(1)).max(1).saturating_mul(group).min(heads);
        (1..=fit).rev().find(|n| heads.is_multiple_of(*n)).unwrap_or(1) as u64
    }

    /// Places of queries in shared memory.
    pub(super) const fn query_stages(&self) -> u32 {
        self.tiles.query_stages() + self.queries_ahead
    }

    /// The output's strides decide how wide its stores may be.
    pub(super) fn row_store(&self, problem: &Problem) -> RowStore {
        match misaligned(problem, Tensor::Out, RowStore::Chunks.elements()) {
            None => RowStore::Chunks,
            Some(_) => RowStore::Pairs,
        }
    }
}

const fn one() -> u32 {
    1
}

const fn scores_ahead() -> Order {
    Order::ScoresAhead
}

/// The stride that is coprime to so many tiles next below their golden section, as long as a line of so many
/// strides fits 32 bits.
fn stride(tiles: u64) -> u64 {
    const GOLDEN: f64 = 0.618_033_988_749_895;
    let most = u64::from(u32::MAX) / tiles.max(1);
    let wanted = ((tiles as f64 * GOLDEN) as u64).clamp(1, most.max(1));
    (1..=wanted).rev().find(|&stride| coprime(stride, tiles)).unwrap_or(1)
}

/// Whether 1 is the greatest common divisor (Euclid).
const fn coprime(a: u64, b: u64) -> bool {
    if b == 0 { a == 1 } else { coprime(b, a % b) }
}
