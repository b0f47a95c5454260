use problem::{DType, Mask, Problem, Strides, Tensor};
use serde::{Deserialize, Serialize};
use tile::{
    Chains, Handout, LastRound, Ones, Order, RowStore, Sums, SwizzledTile, Tail, TileOrder, Tiles, Turns,
    WARPGROUP_ROWS,
};

use crate::error::accept;
use crate::forward::contract::{check_tensor_map, check_tensor_maps};
use crate::{Arch, PlanError};

const FAMILY: &str = "wgmma";

/// How rows keep to their maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Softmax {
    /// The reference is the running maximum; O is rescaled at every block.
    Classic,
    /// The reference moves only when a score of the warp exceeds it by more than `slack` powers of two.
    Lazy {
        /// Powers of two; f16 holds probabilities up to 15.
        slack: u8,
    },
    /// No maximum is taken of blocks that need no mask, but for the first: exponentials are taken against the old reference, and
    /// a block of which a lane's sum reaches `2^limit` is computed once more, with its maximum. Where products make the sums, a block
    /// is where a probability reaches 2, as of a score that exceeds the maximum that its reference was taken from by `limit + 1` powers.
    Optimistic {
        /// As of [`Softmax::Lazy`], for the blocks that do take a maximum.
        slack: u8,
        /// Powers of two; f16 holds 15. Where products make the sums, references lie so far above maxima, and probabilities so far below
        /// one: 7 leave f16 the precision that it needs.
        limit: u8,
    },
}

impl Softmax {
    /// The nearest that probabilities of a type allow, and who sums them.
    pub(crate) fn within(self, dtype: DType, sums: Sums) -> Softmax {
        match self {
            Softmax::Classic => Softmax::Classic,
            Softmax::Lazy { slack } => Softmax::Lazy { slack: slack.min(largest_power(dtype) as u8) },
            Softmax::Optimistic { slack, limit } => {
                let limit = limit.min(largest_limit(dtype, sums) as u8);
                Softmax::Optimistic { slack: slack.min(limit.saturating_sub(1)), limit }
            }
        }
    }

    /// As wide as lanes' sums allow in either type, where it was narrow for the sake of products' sums.
    pub(crate) fn for_lanes(self) -> Softmax {
        match self {
            Softmax::Optimistic { slack, limit } => {
                Softmax::Optimistic { slack: slack.max(8), limit: limit.max(15) }
            }
            other => other,
        }
    }
}

/// The largest power of two that a probability may reach: 2^15 is the last in f16; a bf16 has the range of the f32 that the
/// sums are, and so has O: it overflows, where the mean of the values would not, from values of about 2^60 on.
const fn largest_power(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 15,
        DType::Bf16 | DType::F32 => 60,
    }
}

/// The largest limit of an optimistic softmax.
const fn largest_limit(dtype: DType, sums: Sums) -> u32 {
    match (sums, dtype) {
        (Sums::Product, DType::F16) => 7,
        _ => largest_power(dtype),
    }
}

/// What the rows of a tile are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Rows of one query head.
    #[default]
    Apart,
    /// Rows of all query heads that share a key head, position by position: where queries are few, tiles are fuller, and keys are read
    /// once for the group.
    Packed,
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
    /// Probabilities of the first half of its keys, where its rows see no more; where tiles do not overlap, scores too.
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
    /// CTAs of a cluster, on neighbouring tiles of a head, that request every block of keys and values together: 1 or 2.
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
    /// Whether what a block adds to O is in flight while the softmax of the next one runs (`scores_ahead`, FlashAttention-3's overlap within a
    /// warpgroup), or is waited for.
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
    /// Of eight exponentials of a block without a maximum, how many are computed by FMAs, not by the special-function unit.
    #[serde(default)]
    pub exps_by_fma: u32,
    /// Where products take probabilities from.
    #[serde(default)]
    pub probabilities: Probabilities,
    /// Chains of a row's maximum and sum.
    pub chains: Chains,
    /// Who makes the rows' sums. A product needs a head dim of values of 64 and returns no LSE, for which it is not exact enough.
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
    /// MiB of keys and values whose heads are taken together, where long tiles come first: what L2 should hold. Fewer heads hit
    /// it more often, more leave less for the last CTA.
    #[serde(default = "section_mib")]
    pub section_mib: u32,
    /// Whether the LSE is returned.
    pub lse: bool,
}

/// About half of L2 (H100: 50 MB), FlashAttention-3's choice.
const fn section_mib() -> u32 {
    32
}

/// Registers of a producer's thread where several CTAs are resident: the fewest that `setmaxnreg` takes.
const FEEDING_REGISTERS: u32 = 24;
/// The most that `setmaxnreg` takes.
const MOST_REGISTERS: u32 = 256;
/// Registers of a consumer beside its tiles: addresses, rows' references and sums, loop state (measured on what ptxas can
/// hold without serialising products).
const OTHER_REGISTERS: u32 = 26;

impl WgmmaPlan {
    /// The plans that measured best on an H200 (16k tokens, hidden 2048), and FlashAttention-3's tiles where none was measured.
    pub fn default_for(problem: &Problem, arch: &Arch) -> WgmmaPlan {
        let causal = problem.mask.is_causal();
        let dim = problem.head_dim.max(problem.head_dim_v);
        let optimistic = Softmax::Optimistic { slack: 8, limit: 15 };
        let lazy = Softmax::Lazy { slack: 8 };
        let base = WgmmaPlan {
            consumers: 2,
            resident: 1,
            cluster: 1,
            packing: Packing::Apart,
            block_n: 128,
            stages: 2,
            tiles: Tiles::InTurn,
            products: Order::ScoresAhead,
            producer_registers: None,
            queries_ahead: 0,
            store: Store::Direct,
            turns: Turns::Free,
            softmax: optimistic,
            exps_by_fma: 0,
            probabilities: Probabilities::Registers,
            chains: Chains { max: 2, sum: 1 },
            sums: if problem.head_dim_v == 64 { Sums::Product } else { Sums::Lanes },
            diagonal: Diagonal::Whole,
            ends: if causal { Ends::Own } else { Ends::Common },
            handout: Handout::Dynamic,
            tail: Tail::Whole,
            order: TileOrder::LongestFirst,
            section_mib: if dim > 64 && problem.seq_kv > 2048 { 64 } else { section_mib() },
            lse: false,
        };
        let in_order = WgmmaPlan { handout: Handout::Static, order: TileOrder::InOrder, ..base.clone() };
        let mut plan = match (dim, causal) {
            (..=64, true) if problem.seq_kv <= 1024 => {
                WgmmaPlan { stages: 3, tiles: Tiles::Overlapped, ..base }
            }
            (..=64, _) => WgmmaPlan {
                consumers: 3,
                block_n: if causal { 96 } else { 128 },
                stages: 3,
                tiles: Tiles::Overlapped,
                turns: Turns::PingPong,
                ..base
            },
            (65..=96, true) => WgmmaPlan { consumers: 2, block_n: 128, ..base },
            (65..=96, false) => WgmmaPlan { consumers: 2, block_n: 144, softmax: lazy, ..base },
            (97..=128, true) => base,
            (97..=128, false) if problem.seq_kv > 4096 => WgmmaPlan { block_n: 144, ..in_order },
            (97..=128, false) => WgmmaPlan { turns: Turns::PingPong, ..in_order },
            (129..=192, _) => WgmmaPlan { block_n: 112, softmax: lazy, ..base },
            _ => WgmmaPlan { block_n: 80, softmax: lazy, ..base },
        };
        plan = plan.fitted(problem);
        if plan.check_problem(problem).is_err() {
            return plan; // what it would take of a multiprocessor may be no number
        }
        if packs_well(problem, plan.block_m()) {
            plan.packing = Packing::Packed;
        }
        if plan.blank_warpgroups(problem) {
            plan.ends = Ends::Own;
        }
        // Rows that no query fills are computed for nothing.
        while plan.consumers > 1 && plan.rows(problem) <= 64 * (u64::from(plan.consumers) - 1) {
            plan.consumers -= 1;
            plan.turns = if plan.consumers == 1 { Turns::Free } else { plan.turns };
        }
        while plan.block_n > 16 && plan.check_resources(problem, arch).is_err() {
            plan.block_n -= 16;
        }
        plan
    }

    /// The nearest that the problem's type and its output's strides allow.
    pub(crate) fn fitted(mut self, problem: &Problem) -> WgmmaPlan {
        self.softmax = self.softmax.within(problem.dtype, self.sums);
        if self.store == Store::Bulk && self.check_bulk_store(problem).is_err() {
            self.store = Store::Direct;
        }
        self
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    /// The same plan, returning the LSE or not: that is not of rounded probabilities, which products would sum.
    #[must_use]
    pub fn with_lse(&self, lse: bool) -> WgmmaPlan {
        if lse && self.sums == Sums::Product {
            return WgmmaPlan { lse, sums: Sums::Lanes, softmax: self.softmax.for_lanes(), ..self.clone() };
        }
        WgmmaPlan { lse, ..self.clone() }
    }

    /// Query rows of a CTA.
    pub const fn block_m(&self) -> u32 {
        64 * self.consumers
    }

    /// Registers that a thread of the producer keeps, and what a consumer's takes (FlashAttention-3's split, where one CTA is resident and
    /// no gene says otherwise).
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
    const fn registers_at_launch(&self) -> u32 {
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

    /// Registers of a consumer's thread, about: accumulators of O and S, and P, which is read while S is written.
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
        match self.packing {
            Packing::Apart => 1,
            Packing::Packed => problem.group_size() as u32,
        }
    }

    /// Heads, or groups of packed heads, of a batch entry.
    pub(super) fn tile_heads(&self, problem: &Problem) -> u64 {
        problem.heads_q as u64 / u64::from(self.packed_heads(problem))
    }

    /// Rows of one of them.
    fn rows(&self, problem: &Problem) -> u64 {
        problem.seq_q as u64 * u64::from(self.packed_heads(problem))
    }

    /// Tiles of one of them, those of a cluster counted as one.
    pub(super) fn row_blocks(&self, problem: &Problem) -> u64 {
        self.rows(problem).div_ceil(u64::from(self.cluster * self.block_m()))
    }

    /// Whether a head's last tile has warpgroups without a query.
    fn blank_warpgroups(&self, problem: &Problem) -> bool {
        let last = self.rows(problem) % u64::from(self.block_m());
        last != 0 && last + 64 <= u64::from(self.block_m())
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
    fn blocks(&self, problem: &Problem) -> u64 {
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

    /// Heads that are taken together when long tiles come first: a divisor of all of them, whose keys and values fit L2. Of
    /// [`TileOrder::Strided`], the stride.
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

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", arch.sm.into(), arch.sm == 90, "90, whose target is sm_90a")?;
        self.check_problem(problem)?;
        self.check_genes(problem)?;
        self.check_resources(problem, arch)?;
        self.check_tail(problem, arch)?;
        let tiles = self.tile_count(problem);
        let most = (1 << 31) / u64::from(if self.handout == Handout::Grid { self.cluster } else { 1 });
        accept(
            "tiles of query rows",
            tiles,
            tiles < most,
            "fewer than 2^31, or than 2^31 / cluster with handout = grid",
        )?;
        let rows = self.rows(problem);
        accept("rows of packed heads", rows, rows < 1 << 31, "fewer than 2^31")
    }

    fn check_problem(&self, problem: &Problem) -> Result<(), PlanError> {
        if problem.dtype == DType::F32 {
            let (family, accepted) = (FAMILY, "f16, bf16");
            return Err(PlanError::DType { family, dtype: problem.dtype, accepted });
        }
        for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
            let fits = dim.is_multiple_of(8) && (8..=256).contains(&dim);
            accept(what, dim as u64, fits, "multiples of 8 from 8 to 256")?;
        }
        let length = |n: usize| (1..=1 << 30).contains(&n);
        for (what, n) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
            accept(what, n as u64, length(n), "1 to 2^30: a tensor map has no empty dimension")?;
        }
        check_tensor_maps(problem, FAMILY)?;
        let (_, origin) = problem.span(Tensor::Out).unwrap_or_default();
        if !aligned(problem, RowStore::Pairs) {
            let Strides { batch, head, row } = problem.out;
            return Err(PlanError::Problem {
                family: FAMILY,
                what: "out strides".to_owned(),
                value: format!("batch {batch}, head {head}, row {row}, origin {origin}"),
                accepted: "multiples of 2".to_owned(),
            });
        }
        Ok(())
    }

    fn check_genes(&self, problem: &Problem) -> Result<(), PlanError> {
        let within = |what, value: u32, low: u32, high: u32| {
            accept(what, value.into(), (low..=high).contains(&value), &format!("{low} to {high}"))
        };
        within("consumers", self.consumers, 1, 3)?;
        within("resident", self.resident, 1, 4)?;
        within("cluster", self.cluster, 1, 2)?;
        let keys = self.block_n.is_multiple_of(16) && (16..=256).contains(&self.block_n);
        accept("block_n", self.block_n.into(), keys, "multiples of 16 up to 256")?;
        let heads = self.packed_heads(problem);
        let divides = self.block_m().is_multiple_of(heads);
        let accepted = "divisors of a tile's rows (64 · consumers) with packing = packed";
        accept("query heads a key head", heads.into(), divides, accepted)?;
        let apart = heads == 1 || problem.q.head != 0;
        accept("q head stride", problem.q.head.unsigned_abs(), apart, "other than 0 with packing = packed")?;
        within("stages", self.stages, 1, 8)?;
        within("section_mib", self.section_mib, 1, 4096)?;
        if self.diagonal == Diagonal::Halved {
            let refuse = |what: &str, value: &str, accepted: &str| PlanError::Problem {
                family: FAMILY,
                what: what.to_owned(),
                value: value.to_owned(),
                accepted: format!("{accepted} with diagonal = halved"),
            };
            if !problem.mask.is_causal() {
                return Err(refuse("mask", problem.mask.name(), Mask::Causal.name()));
            }
            if self.ends != Ends::Own {
                return Err(refuse("ends", "common", "own"));
            }
            let halves = self.block_n.is_multiple_of(32);
            accept("block_n", self.block_n.into(), halves, "multiples of 32 with diagonal = halved")?;
        }
        within("queries_ahead", self.queries_ahead, 0, 2)?;
        if let Some(registers) = self.producer_registers {
            let most = self.registers_at_launch();
            let fits = registers.is_multiple_of(8) && (FEEDING_REGISTERS..=most).contains(&registers);
            let accepted = format!("multiples of 8 from {FEEDING_REGISTERS} to {most}");
            accept("producer_registers", registers.into(), fits, &accepted)?;
        }
        if self.exps_by_fma > 0 {
            within("exps_by_fma", self.exps_by_fma, 0, 8)?;
            let guesses = matches!(self.softmax, Softmax::Optimistic { .. });
            accept("exps_by_fma", self.exps_by_fma.into(), guesses, "0 without softmax = optimistic")?;
        }
        if self.store == Store::Bulk {
            self.check_bulk_store(problem)?;
        }
        within("chains.max", self.chains.max, 1, 8)?;
        within("chains.sum", self.chains.sum, 1, 8)?;
        if self.sums == Sums::Product {
            let dim = problem.head_dim_v as u64;
            accept("head_dim_v", dim, dim == 64, "64 with sums = product")?;
            if self.lse {
                return Err(PlanError::Problem {
                    family: FAMILY,
                    what: "lse".to_owned(),
                    value: "true".to_owned(),
                    accepted: "false with sums = product, which are of rounded probabilities".to_owned(),
                });
            }
        }
        let turns = self.turns == Turns::Free || self.consumers > 1;
        accept("consumers", self.consumers.into(), turns, "2 or 3 with turns = ping_pong")?;
        let most = largest_power(problem.dtype);
        match self.softmax {
            Softmax::Classic => Ok(()),
            Softmax::Lazy { slack } => within("slack", slack.into(), 0, most),
            Softmax::Optimistic { slack, limit } => {
                within("slack", slack.into(), 0, most)?;
                within("limit", limit.into(), u32::from(slack) + 1, largest_limit(problem.dtype, self.sums))
            }
        }
    }

    /// Whether the tiles of the last round can be shared: all are as long, and it is known before who takes which.
    fn check_tail(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let Some(round) = self.last_round(problem, arch) else { return Ok(()) };
        if problem.mask != Mask::None {
            let (mask, accepted) = (problem.mask, Mask::None);
            return Err(PlanError::Mask { family: "wgmma with tail = shared", mask, accepted });
        }
        let refuse = |what, value: String, accepted: &str| {
            let (what, accepted) = (format!("{what} beside tail = shared"), accepted.to_owned());
            Err(PlanError::Problem { family: FAMILY, what, value, accepted })
        };
        if self.handout != Handout::Static {
            return refuse("handout", format!("{:?}", self.handout).to_lowercase(), "static");
        }
        if self.ends != Ends::Common {
            return refuse("ends", "own".to_owned(), "common");
        }
        let line = round.line();
        accept("blocks of shared tiles", line, line < 1 << 31, "fewer than 2^31")
    }

    /// Whether TMA can store O.
    fn check_bulk_store(&self, problem: &Problem) -> Result<(), PlanError> {
        let dim = problem.head_dim_v as u64;
        accept("head_dim_v", dim, dim.is_multiple_of(64), "multiples of 64 with store = bulk")?;
        let heads = self.packed_heads(problem);
        accept("packed heads", heads.into(), heads == 1, "1 with store = bulk")?;
        check_tensor_map(problem, Tensor::Out, FAMILY)
    }

    /// Places of queries in shared memory.
    pub(super) const fn query_stages(&self) -> u32 {
        self.tiles.query_stages() + self.queries_ahead
    }

    /// Whether shared memory and registers suffice.
    fn check_resources(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let bytes = u64::from(self.shared_bytes(problem));
        if bytes > u64::from(arch.shared_per_cta) {
            return Err(PlanError::SharedMemory { bytes, limit: arch.shared_per_cta, sm: arch.sm });
        }
        let resident = u64::from(self.resident) * (bytes + u64::from(Arch::SHARED_RESERVED));
        if self.resident > 1 && resident > u64::from(arch.shared_per_sm) {
            let limit = arch.shared_per_sm / self.resident - Arch::SHARED_RESERVED;
            return Err(PlanError::SharedMemory { bytes, limit, sm: arch.sm });
        }
        let registers = self.registers(problem);
        let limit = self.register_split().1.min(Arch::REGISTERS_PER_THREAD);
        if registers > limit {
            return Err(PlanError::Registers { registers, limit });
        }
        Ok(())
    }

    /// The output's strides decide how wide its stores may be.
    pub(super) fn row_store(&self, problem: &Problem) -> RowStore {
        if aligned(problem, RowStore::Chunks) { RowStore::Chunks } else { RowStore::Pairs }
    }
}

const fn one() -> u32 {
    1
}

const fn scores_ahead() -> Order {
    Order::ScoresAhead
}

/// The stride that is coprime to so many tiles next below their golden section, as long as a line of so many strides fits 32 bits.
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

/// Whether packed heads fill tiles of `block_m` rows so much better that it pays (FlashAttention-3's rule).
fn packs_well(problem: &Problem, block_m: u32) -> bool {
    let (group, rows) = (problem.group_size(), block_m as usize);
    let filled = |n: usize| n as f64 / n.next_multiple_of(rows) as f64;
    let possible = group > 1 && rows.is_multiple_of(group) && problem.q.head != 0;
    possible && filled(problem.seq_q) < 0.9 * filled(problem.seq_q * group)
}

/// Whether all rows of the output begin at a multiple of a store.
fn aligned(problem: &Problem, store: RowStore) -> bool {
    let ([batch, heads, rows, _], strides) = (problem.extents(Tensor::Out), problem.out);
    let steps = [(batch, strides.batch), (heads, strides.head), (rows, strides.row)];
    let width = i64::from(store.elements());
    let origin = problem.span(Tensor::Out).map_or(0, |(_, origin)| origin as i64);
    origin % width == 0 && steps.iter().all(|&(extent, stride)| extent == 1 || stride % width == 0)
}
