//! The genes of the family, and quantities that follow from them for a problem.

use attend::{Chains, Order, OutputSums, Packing, Rescale, Sums, Tanh, Tiles};
use problem::{DType, Problem, Tensor};
use serde::{Deserialize, Deserializer, Serialize};
use tile::{Handout, LastWave, Ones, PairSum, SwizzledTile, Tail, TileOrder, Turns, WARPGROUP_ROWS};

use super::fp8::transposes_values;
use crate::forward::Visits;
use crate::forward::lengths::row_blocks;
use crate::forward::packing::{packed_heads, whole_positions};
use crate::{Arch, Dims};

/// How the softmax reference (the stored row max) follows the row max. The former names are also read:
/// `classic`, `{"lazy": {"slack": n}}` and `{"optimistic": {"slack": n, "limit": m}}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescaling {
    /// The reference is the running maximum; O is rescaled at every block.
    #[serde(alias = "classic")]
    Always,
    /// The reference moves only when any score of the warp exceeds it by more than this many powers of two
    /// (lazy rescaling). Until then, probabilities may grow by that many powers of two. In f16 a row max has
    /// the weight 2^7 and 2^15 is the largest power, so the threshold is at most 8.
    #[serde(alias = "lazy")]
    Beyond(#[serde(deserialize_with = "threshold")] u8),
    /// Unmasked blocks after the first do not compute a row max (speculative row max): their exponentials use
    /// the old reference, and a block in which a lane's sum reaches `2^limit` times the weight of a row max
    /// is recomputed with its row max. A row max has the weight 1 in bf16. In f16 it has 2^7, and a block is
    /// recomputed at `2^min(limit + 7, 15)`. If products compute the sums, a block is recomputed when a
    /// probability reaches 2, that is, when a score exceeds the maximum behind its reference by `limit + 1`
    /// powers of two.
    #[serde(alias = "optimistic")]
    Speculative {
        /// The threshold of [`Rescaling::Beyond`], for the blocks that compute a row max.
        #[serde(alias = "slack")]
        beyond: u8,
        /// The limit in powers of two: in f16 at most 15, where 8 to 15 give the same kernel. If products
        /// compute the sums, references lie `limit` powers of two above the row max, and probabilities as far
        /// below one; `limit` is then at most 15 in bf16 too.
        limit: u8,
    },
}

/// Reads a number, or the object `{"slack": n}` of earlier files.
fn threshold<'de, D: Deserializer<'de>>(stored: D) -> Result<u8, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stored {
        Number(u8),
        Object { slack: u8 },
    }
    Stored::deserialize(stored).map(|stored| match stored {
        Stored::Number(powers) | Stored::Object { slack: powers } => powers,
    })
}

impl Rescaling {
    /// The nearest variant that the range of the probabilities' type allows.
    pub(crate) fn within(self, dtype: DType, sums: Sums) -> Rescaling {
        let most = largest_threshold(dtype);
        match self {
            Rescaling::Always => Rescaling::Always,
            Rescaling::Beyond(threshold) => Rescaling::Beyond(threshold.min(most)),
            Rescaling::Speculative { beyond, limit } => {
                let limit = limit.min(largest_limit(dtype, sums));
                Rescaling::Speculative { beyond: beyond.min(most).min(limit.saturating_sub(1)), limit }
            }
        }
    }
}

/// The largest threshold that the ranges allow. In f16 and e4m3, probabilities stay within the range of their
/// type. bf16 has the range of the f32 sums and of O, so O can overflow, while the mean of the values would
/// not, only for values from about 2^60 on. The families without this gene accept less in bf16
/// ([`check_rescale`](crate::forward::contract::check_rescale)).
pub(super) const fn largest_threshold(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => Rescale::MOST_IN_F16,
        DType::Bf16 | DType::F32 => 60,
        DType::E4m3 | DType::E5m2 => Rescale::MOST_IN_E4M3,
    }
}

/// The largest limit. If products compute the sums, probabilities lie `limit` powers of two below one, and
/// their contributions to O (f32) lie as far below the values. With 15, values down to 2^-118 keep the
/// precision of bf16.
pub(super) const fn largest_limit(dtype: DType, sums: Sums) -> u8 {
    match (dtype, sums) {
        (DType::F16, _) => 15,
        (DType::E4m3 | DType::E5m2, _) => Rescale::MOST_IN_E4M3,
        (_, Sums::Product) => 15,
        (DType::Bf16 | DType::F32, Sums::Lanes) => 60,
    }
}

/// The last KV block that a warpgroup visits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ends {
    /// The last block of the tile.
    #[default]
    Common,
    /// The last block that the warpgroup's own rows see. The warpgroup skips the blocks after it.
    Own,
}

/// How much is computed of the first block that a warpgroup visits (the block on the diagonal).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Diagonal {
    /// The whole block.
    #[default]
    Whole,
    /// If the rows see at most the first half of the keys, only the softmax of that half is computed. If
    /// tiles do not overlap, the scores are computed for that half only, too.
    Halved,
}

/// How O is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// Directly from registers.
    #[default]
    Direct,
    /// Through shared memory, by TMA, while the next tile is computed.
    Bulk,
    /// Like `Bulk`, but O takes the place of the tile's Q in shared memory. Q needs a second stage for the
    /// queries of the next tile.
    OverQueries,
}

impl Store {
    /// Whether TMA stores O.
    pub const fn by_tma(self) -> bool {
        matches!(self, Store::Bulk | Store::OverQueries)
    }

    /// The gene's value in a plan.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Store::Direct => "direct",
            Store::Bulk => "bulk",
            Store::OverQueries => "over_queries",
        }
    }
}

/// What the consumer warpgroups of a CTA divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Share {
    /// The rows of a tile, 64 each.
    #[default]
    Rows,
    /// The head dims of a tile of 64 rows, between two warpgroups. Each multiplies its half of the columns of
    /// Q and K, adds the other warpgroup's part of S through shared memory, and computes its half of O's
    /// columns. O of up to 512 columns then fits the registers.
    HeadDim,
}

/// Where P V reads P from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probabilities {
    /// The registers into which the softmax writes P.
    #[default]
    Registers,
    /// Shared memory, into which P is copied.
    Shared,
}

/// Where the score program reads tables from that have an element of 16 bits for each score, such as a bias
/// tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tables {
    /// Global memory. If there are enough registers, the elements are read one block ahead.
    #[default]
    Registers,
    /// Shared memory. The producer loads the elements of each block by TMA, as it loads keys and values.
    Shared,
}

/// The genes of a plan of this family. Genes with a serde default were added later; a plan without them means
/// the default.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WgmmaPlan {
    /// Consumer warpgroups, of 64 query rows each unless they [share](Share) rows.
    pub consumers: u32,
    /// What the consumer warpgroups divide.
    #[serde(default)]
    pub share: Share,
    /// Resident CTAs per SM. More than one hides latency.
    #[serde(default = "one", alias = "resident")]
    pub resident_ctas: u32,
    /// CTAs of a cluster: 1 or 2. They compute neighbouring tiles of a head and load every KV block by
    /// multicast.
    #[serde(default = "one")]
    pub cluster: u32,
    /// Whether a tile has rows of one query head, or of all query heads of a group (pack-GQA).
    #[serde(default)]
    pub packing: Packing,
    /// Keys of a block.
    pub block_n: u32,
    /// KV blocks in shared memory: stages of the ring of keys, and of the ring of values.
    pub stages: u32,
    /// How successive tiles of query rows follow each other.
    pub tiles: Tiles,
    /// Whether the P V of a block is in flight during the softmax of the next block (`scores_ahead`,
    /// FlashAttention-3's intra-warpgroup overlap), or is complete before it starts.
    #[serde(default = "scores_ahead")]
    pub products: Order,
    /// Registers of a producer thread; `None` for FlashAttention-3's split. Consumers get the remaining
    /// registers.
    #[serde(default)]
    pub producer_registers: Option<u32>,
    /// Stages of Q in addition to those that the order of tiles needs.
    #[serde(default)]
    pub queries_ahead: u32,
    /// How O is stored.
    #[serde(default)]
    pub store: Store,
    /// Whether the consumer warpgroups use the tensor cores in turn (ping-pong).
    pub turns: Turns,
    /// How the softmax reference follows the row max.
    #[serde(alias = "softmax")]
    pub rescale: Rescaling,
    /// How many of eight exponentials run on the FMA pipe instead of the special-function unit: in blocks
    /// without a row max and, with 8-bit values, in all blocks.
    #[serde(default)]
    pub exps_by_fma: u32,
    /// Where P V reads P from.
    #[serde(default)]
    pub probabilities: Probabilities,
    /// Where the score program reads tables with an element for each score from.
    #[serde(default)]
    pub tables: Tables,
    /// Chains of the reductions of a row's maximum and sum.
    pub chains: Chains,
    /// Where the row sums are computed. A product needs head_dim_v 64 and the range of bf16: in f16,
    /// probabilities that lie `limit` powers of two below one would leave too little range for many keys that
    /// have small weights but a large total. An LSE cannot be returned, because sums of rounded probabilities
    /// are not exact enough.
    #[serde(default)]
    pub sums: Sums,
    /// Where the P V of successive blocks are summed.
    #[serde(default)]
    pub output_sums: OutputSums,
    /// The last KV block that a warpgroup visits.
    #[serde(default)]
    pub ends: Ends,
    /// How much of the first block that a warpgroup visits is computed.
    #[serde(default)]
    pub diagonal: Diagonal,
    /// How tiles are assigned to CTAs.
    pub handout: Handout,
    /// How the last, partial wave is assigned.
    #[serde(default)]
    pub tail: Tail,
    /// The order of tile indices.
    #[serde(alias = "order")]
    pub tile_order: TileOrder,
    /// Keys and values, in MiB, of the heads that form a section when long tiles come first. A section should
    /// fit in L2. Fewer heads have more L2 hits; more heads leave shorter tiles for the end.
    #[serde(default = "section_mib")]
    pub section_mib: u32,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    #[serde(default)]
    pub tanh: Tanh,
    /// Which KV blocks are visited if the problem has a mask program. Lists belong to whole tiles.
    #[serde(default)]
    pub visits: Visits,
}

/// About half of L2 (H100: 50 MB), FlashAttention-3's choice.
pub(super) const fn section_mib() -> u32 {
    32
}

/// Registers of a producer thread if several CTAs are resident: the minimum of `setmaxnreg`.
pub(super) const FEEDING_REGISTERS: u32 = 24;
/// Registers of a producer thread that searches for the rows of the next tile while it holds its own.
pub(super) const SEARCHING_REGISTERS: u32 = 40;
/// The maximum that a consumer can request with `setmaxnreg`.
const MOST_REGISTERS: u32 = 256;
/// Estimated registers of a consumer in addition to its tiles: addresses, references and sums of the rows,
/// loop state (measured as the number that ptxas can hold without serialising products).
const OTHER_REGISTERS: u32 = 26;
/// Estimated registers for descale factors per block of rows: their addresses, and the factors of a block.
const FACTOR_REGISTERS: u32 = 6;

impl WgmmaPlan {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    /// Query rows of a CTA.
    pub const fn block_m(&self) -> u32 {
        match self.share {
            Share::Rows => WARPGROUP_ROWS * self.consumers,
            Share::HeadDim => WARPGROUP_ROWS,
        }
    }

    /// Query rows from one tile to the next: the largest whole number of positions of the packed heads that
    /// fits in a CTA's rows.
    pub(super) fn tile_rows(&self, dims: impl Into<Dims>) -> u32 {
        whole_positions(self.block_m(), self.packed_heads(dims))
    }

    /// Registers of a producer thread and of a consumer thread (FlashAttention-3's split if one CTA is
    /// resident and no gene says otherwise).
    pub const fn register_split(&self) -> (u32, u32) {
        let producer = match (self.producer_registers, self.consumers, self.resident_ctas) {
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

    /// Registers of every thread before `setmaxnreg`.
    pub(super) const fn registers_at_launch(&self) -> u32 {
        Arch::REGISTERS_PER_SM / (self.resident_ctas * self.threads()) / 8 * 8
    }

    /// Tiles of Q, K and V in shared memory.
    pub(super) fn tile_shapes(&self, dims: impl Into<Dims>) -> [SwizzledTile; 3] {
        let dims = dims.into();
        let (dim, dim_v) = (dims.head_dim as u32, dims.head_dim_v as u32);
        let tile = |tensor, rows, width: u32, step| {
            let bytes = dims.dtypes.of(tensor).bytes() as u32;
            SwizzledTile::new(rows, width.next_multiple_of(step)).of_bytes(bytes).of_width(width)
        };
        // Each half of the columns of V must begin at a panel.
        let half = match self.share {
            Share::Rows => 8,
            Share::HeadDim => 2 * SwizzledTile::PANEL,
        };
        let value = if transposes_values(dims) {
            let bytes = dims.dtypes.v.bytes() as u32;
            SwizzledTile::new(dim_v, self.block_n).of_bytes(bytes).along_columns()
        } else {
            tile(Tensor::V, self.block_n, dim_v, half)
        };
        [
            tile(Tensor::Q, self.query_rows(dims), dim, 8).packed(self.packed_heads(dims)),
            tile(Tensor::K, self.block_n, dim, 8).in_parts(self.cluster),
            value.in_parts(self.cluster),
        ]
    }

    /// Rows of Q in shared memory. Packed heads are loaded by whole positions: at least as many as give every
    /// consumer its rows, rounded up to the multiple of 8 that the swizzle needs.
    fn query_rows(&self, dims: Dims) -> u32 {
        let heads = self.packed_heads(dims);
        self.block_m().next_multiple_of(heads).next_multiple_of(8)
    }

    /// Bytes of shared memory in which warpgroups that divide the head dim add their parts of S.
    pub(super) const fn sum_bytes(&self) -> u32 {
        match self.share {
            Share::Rows => 0,
            Share::HeadDim => PairSum::bytes(4, WARPGROUP_ROWS / 4, self.block_n),
        }
    }

    /// The tile of a warpgroup's P, if P V reads P from shared memory.
    pub(super) fn prob_tile(&self) -> Option<SwizzledTile> {
        (self.probabilities == Probabilities::Shared).then(|| SwizzledTile::new(WARPGROUP_ROWS, self.block_n))
    }

    /// Estimated registers of a consumer thread: accumulators of O and S, P, which is read while S is
    /// written, and the elements of tables in shared memory.
    pub fn registers(&self, problem: &Problem) -> u32 {
        let out = self.columns_out(problem) / 2;
        let accumulators = match self.output_sums {
            OutputSums::Running => out,
            OutputSums::ByBlock => 2 * out,
        };
        let prob_bytes = problem.dtypes.weights().bytes() as u32;
        let elements = self.staged_reads(problem) * self.block_n / 4;
        let factors = if problem.scales.are_per_block() { FACTOR_REGISTERS } else { 0 };
        let scores = self.block_n / 2 + self.block_n * prob_bytes / 8;
        accumulators + scores + elements + factors + OTHER_REGISTERS
    }

    /// Columns of the P V accumulator: O, and the row sums if products compute them.
    pub(super) fn columns_out(&self, dims: impl Into<Dims>) -> u32 {
        let dim = dims.into().head_dim_v as u32;
        let own = match self.share {
            Share::Rows => dim.next_multiple_of(8),
            Share::HeadDim => dim.next_multiple_of(2 * SwizzledTile::PANEL) / 2,
        };
        match self.sums {
            Sums::Lanes => own,
            Sums::Product => own + Ones::COLUMNS,
        }
    }

    /// Number of query heads whose rows are packed.
    pub(super) fn packed_heads(&self, dims: impl Into<Dims>) -> u32 {
        packed_heads(self.packing, dims)
    }

    /// Heads, or groups of packed heads, per batch entry.
    pub(super) fn tile_heads(&self, problem: &Problem) -> u64 {
        problem.heads_q as u64 / u64::from(self.packed_heads(problem))
    }

    /// Rows of a head, or of a group of packed heads.
    pub(super) fn rows(&self, problem: &Problem) -> u64 {
        problem.seq_q as u64 * u64::from(self.packed_heads(problem))
    }

    /// Tiles of a head (or group); the tiles of a cluster count as one.
    pub(super) fn row_blocks(&self, problem: &Problem) -> u64 {
        let [tiles, _] =
            row_blocks(problem, self.cluster * self.tile_rows(problem), self.packed_heads(problem));
        tiles
    }

    /// The number of batch entries with equally many tiles: one for packed queries.
    fn tile_batches(problem: &Problem) -> u64 {
        let [_, batch] = row_blocks(problem, 1, 1);
        batch
    }

    /// Tiles of all heads.
    pub(super) fn tile_count(&self, problem: &Problem) -> u64 {
        self.row_blocks(problem) * WgmmaPlan::tile_batches(problem) * self.tile_heads(problem)
    }

    /// Number of CTAs or clusters that are resident at the same time.
    pub(super) fn room(&self, arch: &Arch) -> u64 {
        u64::from(self.resident_ctas * arch.multiprocessors / self.cluster).max(1)
    }

    /// Number of CTAs or clusters that take tiles: the resident ones, if each of them has work.
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

    /// Number of KV blocks of a tile without a mask.
    pub(super) fn blocks(&self, problem: &Problem) -> u64 {
        (problem.seq_kv as u64).div_ceil(self.block_n.into())
    }

    /// The last wave, if its tiles are shared.
    pub(super) fn last_wave(&self, problem: &Problem, arch: &Arch) -> Option<LastWave> {
        let wave = LastWave {
            tiles: self.tile_count(problem),
            blocks: self.blocks(problem),
            takers: self.takers(problem, arch),
        };
        (self.tail == Tail::Shared).then_some(wave)
    }

    /// Warps that compute a tile, over all CTAs of a cluster.
    pub(super) const fn tile_warps(&self) -> u32 {
        4 * self.consumers * self.cluster
    }

    /// The heads of a section if long tiles come first: a divisor of all heads, whose keys and values fit in
    /// L2. For [`TileOrder::Strided`], the stride.
    pub(super) fn section(&self, problem: &Problem) -> u64 {
        if self.tile_order == TileOrder::Strided {
            return stride(self.tile_count(problem));
        }
        let heads = (WgmmaPlan::tile_batches(problem) * self.tile_heads(problem)) as usize;
        let [k, v] = [Tensor::K, Tensor::V].map(|tensor| problem.dtypes.of(tensor).bytes());
        let bytes = problem.seq_kv * (k * problem.head_dim + v * problem.head_dim_v);
        let group = problem.group_size() / self.packed_heads(problem) as usize;
        // Query heads of a group share keys and values.
        let fit =
            (((self.section_mib as usize) << 20) / bytes.max(1)).max(1).saturating_mul(group).min(heads);
        (1..=fit).rev().find(|n| heads.is_multiple_of(*n)).unwrap_or(1) as u64
    }

    /// Number of stages of Q.
    pub(super) const fn query_stages(&self) -> u32 {
        self.tiles.query_stages() + self.queries_ahead
    }
}

const fn one() -> u32 {
    1
}

const fn scores_ahead() -> Order {
    Order::ScoresAhead
}

/// The largest stride that is coprime to `tiles`, is at most the golden section of `tiles`, and keeps `stride
/// · tiles` below 2^32.
fn stride(tiles: u64) -> u64 {
    const GOLDEN: f64 = 0.618_033_988_749_895;
    let most = u64::from(u32::MAX) / tiles.max(1);
    let wanted = ((tiles as f64 * GOLDEN) as u64).clamp(1, most.max(1));
    (1..=wanted).rev().find(|&stride| coprime(stride, tiles)).unwrap_or(1)
}

/// Whether `a` and `b` are coprime (Euclid).
const fn coprime(a: u64, b: u64) -> bool {
    if b == 0 { a == 1 } else { coprime(b, a % b) }
}

/// The number of boxes of a block of `block_n` keys in pages of `rows` rows.
pub(super) const fn boxes(rows: u32, block_n: u32) -> u32 {
    block_n / common_divisor(rows, block_n)
}

/// The largest common divisor (Euclid).
pub(super) const fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
