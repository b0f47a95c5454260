//! The genes of the family, and the problems that it computes.

use attend::Order;
use problem::{Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{
    Handout, Handover, Pipeline, Relay, Roles, SwizzledTile, TileBroadcast, TileOrder, WARPGROUP_ROWS,
    WARPGROUP_THREADS,
};

use crate::backward::sums::TileCounts;
use crate::error::accept;
use crate::forward::contract::{check_tensor_map, is_half};
use crate::forward::lengths::{check_key_blocks, check_lengths, check_ragged, key_blocks, row_blocks};
use crate::forward::mma::CtaOrder;
use crate::grid::Extents;
use crate::{Arch, Dims, PlanError};

/// The genes of a plan of this family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FusedPlan {
    /// Tiles of Q in shared memory, at least 2. The scores ahead need a third to hide the latency of a load;
    /// warpgroups that take turns always have it.
    pub query_stages: u32,
    /// Tiles of dO in shared memory, at least 2; 2 for warpgroups that take turns.
    pub gradient_stages: u32,
    /// Tiles of K and of V in shared memory: 1, or 2 up to head dim 64, so that those of the next tile of
    /// keys are loaded while the CTA computes.
    #[serde(default = "one")]
    pub key_stages: u32,
    /// When the scores of the next query tile are computed: above 64 columns, always ahead.
    pub products: Order,
    /// The order in which CTAs compute tiles of keys.
    pub tile_order: CtaOrder,
    /// CTAs that divide the query rows of a tile of keys: where they are several, each leaves its part of dK
    /// and dV in f32, and a fourth kernel adds the parts.
    #[serde(default = "one")]
    pub row_parts: u32,
}

const fn one() -> u32 {
    1
}

/// The name of the family.
pub(super) const FAMILY: &str = "backward_fused";
/// The largest head dim: dK or dV of 64 keys fills half of a thread's registers.
const WIDEST: usize = 256;
/// Bytes of rows of query heads that L2 keeps, and the most heads whose tiles of keys alternate.
const CACHED_BYTES: u64 = 45 << 20;
const MOST_HEADS: u64 = 16;
/// The most parts of a tile of keys.
const MOST_PARTS: u32 = 32;
/// Keys of a CTA whose consumer warpgroups divide the keys.
pub(super) const KEYS: u32 = 128;
/// Threads of a CTA of the kernels before and after the main kernel.
pub(super) const THREADS: u32 = 256;
/// Slots of dS in shared memory, and of the turns and additions of dQ, with gradients apart.
pub(super) const APART_SLOTS: u32 = 2;

pub(super) const ROLES: Roles = Roles { consumers: 2, producer_registers: 24, consumer_registers: 240 };

/// Threads of a CTA with gradients apart: the producer's warpgroup and those of dV, dK and dQ.
const APART_THREADS: u32 = 4 * WARPGROUP_THREADS;
/// Slots of P in shared memory, with gradients apart.
pub(super) const WEIGHT_SLOTS: u32 = 1;
/// Bytes of the barriers between the consumers, with gradients apart.
const RELAY_BYTES: u32 = Relay::bytes(WEIGHT_SLOTS) + Relay::bytes(APART_SLOTS);

/// The tensors that the main kernel loads through tensor maps.
pub(super) const LOADED: [Tensor; 4] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut];

/// The sizes of a problem's tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileSizes {
    /// Columns of a row of Q, K, V and dO in shared memory: 64, 128, 192 or 256.
    pub columns: u32,
    /// Query rows of a tile.
    pub rows: u32,
}

impl TileSizes {
    pub fn new(dims: impl Into<Dims>) -> TileSizes {
        let Dims { head_dim, head_dim_v, .. } = dims.into();
        let columns = (head_dim.max(head_dim_v) as u32).next_multiple_of(64);
        TileSizes { columns, rows: if columns == 64 { 128 } else { 64 } }
    }

    /// Whether each gradient has a warpgroup of its own (`apart.rs`): dK and dV of 64 keys do not fit beside
    /// each other in a thread's registers.
    pub const fn gradients_apart(self) -> bool {
        self.columns > 128
    }

    /// Whether the warpgroups take the tensor cores in turn (`turns.rs`). With tiles of 128 query rows, ptxas
    /// serialises the products of that loop where a mask hides keys.
    pub const fn takes_turns(self) -> bool {
        self.columns == 128
    }

    /// Keys of a CTA.
    pub const fn keys(self) -> u32 {
        if self.gradients_apart() { WARPGROUP_ROWS } else { KEYS }
    }

    /// How CTAs take tiles of keys. With gradients apart, or in an order of additions, a CTA computes one.
    pub const fn handout(self, ordered: bool) -> Handout {
        if self.gradients_apart() || ordered { Handout::Grid } else { Handout::Dynamic }
    }

    /// Threads of a CTA of the main kernel.
    pub const fn threads(self) -> u32 {
        if self.gradients_apart() { APART_THREADS } else { ROLES.threads() }
    }

    /// Bytes of the f32 sums of a tile of dQ.
    pub const fn sum_bytes(self) -> u32 {
        4 * self.rows * self.columns
    }

    /// The tile of rows of a tensor.
    pub fn tile(self, dims: impl Into<Dims>, tensor: Tensor) -> SwizzledTile {
        let dims = dims.into();
        let rows = if tensor.is_of_keys() { self.keys() } else { self.rows };
        SwizzledTile::new(rows, self.multiplied(dims, tensor)).of_width(width(dims, tensor))
    }

    /// Columns of a tensor that are multiplied: its width, unless that ends before the last panel.
    pub fn multiplied(self, dims: impl Into<Dims>, tensor: Tensor) -> u32 {
        let before = self.columns - SwizzledTile::PANEL;
        width(dims.into(), tensor).max(before + 8)
    }

    /// dSᵀ of a tile.
    pub const fn ds(self) -> SwizzledTile {
        SwizzledTile::new(self.keys(), self.rows)
    }

    /// Slots of dS in shared memory. In turns, dQ reads a slot one visit later. A warpgroup fills it again
    /// after a turn, which began when the other warpgroup had computed its dQ from the slot.
    pub const fn slots(self) -> u32 {
        if self.takes_turns() { 3 } else { 2 }
    }

    /// Bytes in which the parts of dQ wait for bulk reductions: if warpgroups take turns, or if additions to
    /// dQ have an order.
    pub const fn staging_bytes(self, ordered: bool) -> u32 {
        if self.takes_turns() || ordered && !self.gradients_apart() { self.sum_bytes() } else { 0 }
    }

    /// Bytes in which P passes from the warpgroup of dV to that of dK.
    pub const fn weight_bytes(self) -> u32 {
        if self.gradients_apart() { 4 * WARPGROUP_ROWS * self.rows } else { 0 }
    }

    /// Bytes of the two numbers of each query row of a tile.
    pub const fn number_bytes(self) -> u32 {
        2 * 4 * self.rows
    }

    /// Parts of dQ of a tile of query rows, each with an order of additions of its own: those of the
    /// warpgroups that add.
    pub const fn ordered_parts(self) -> u32 {
        if self.gradients_apart() { 1 } else { 2 }
    }

    /// Bytes of the barriers in shared memory that an order of additions needs.
    pub const fn order_barrier_bytes(self) -> u32 {
        match self.gradients_apart() {
            true => 2 * Relay::bytes(APART_SLOTS),
            false => self.ordered_parts() * Relay::bytes(1),
        }
    }

    /// The number of tiles of query rows of a head, and of batch entries with that many tiles each.
    pub const fn row_tiles(self, problem: &Problem) -> [u64; 2] {
        row_blocks(problem, self.rows, 1)
    }

    /// The tiles of query rows that a CTA visits for a tile of keys without a mask; for packed queries, in
    /// the mean.
    fn visits(self, problem: &Problem) -> u64 {
        let [tiles, _] = self.row_tiles(problem);
        let entries = if problem.lengths.q.packed.is_some() { problem.batch.max(1) as u64 } else { 1 };
        tiles / entries * (problem.heads_q / problem.heads_kv.max(1)) as u64
    }
}

/// Elements of a row of a tensor.
pub(super) fn width(dims: Dims, tensor: Tensor) -> u32 {
    (if matches!(tensor.primal(), Tensor::Q | Tensor::K) { dims.head_dim } else { dims.head_dim_v }) as u32
}

impl FusedPlan {
    /// A plan for the problem, unchecked.
    pub fn default_for(problem: &Problem, arch: &Arch) -> FusedPlan {
        let sizes = TileSizes::new(problem);
        let apart = sizes.gradients_apart();
        // In a fixed order of additions, parts of dQ need shared memory at any head dim.
        let ordered = problem.pass.deterministic();
        // The tiles of K and V that come next hide their latency behind few visits, and take the place of a
        // third tile of dO.
        let preloaded = sizes.columns == 64 && !ordered && sizes.visits(problem) <= 8;
        let three = problem.band.is_full() && sizes.columns == 64 && !ordered && !preloaded;
        FusedPlan {
            query_stages: if apart { 2 } else { 3 },
            gradient_stages: if three { 3 } else { 2 },
            key_stages: if preloaded { 2 } else { 1 },
            products: Order::ScoresAhead,
            // Sequences of different lengths leave SMs idle if one head's tiles follow each other. Rows of
            // 128 columns and fewer of all heads stay in L2.
            tile_order: match problem.lengths.kv.packed {
                Some(_) if !apart => CtaOrder::HeadsFirst,
                _ => CtaOrder::RowsFirst,
            },
            row_parts: 1,
        }
        .balanced(problem, arch)
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", arch.sm.into(), arch.has_warpgroup_products(), "90, whose target is sm_90a")?;
        check_problem(problem)?;
        let sizes = TileSizes::new(problem);
        let stages = self.query_stages;
        if sizes.takes_turns() {
            accept("query_stages", stages.into(), (3..=4).contains(&stages), "3 or 4")?;
        } else {
            accept("query_stages", stages.into(), (2..=4).contains(&stages), "2 to 4")?;
        }
        let stages = self.gradient_stages;
        if sizes.takes_turns() {
            accept("gradient_stages", stages.into(), stages == 2, "2")?;
        } else {
            accept("gradient_stages", stages.into(), (2..=4).contains(&stages), "2 to 4")?;
        }
        let most = if sizes.columns == 64 && !problem.pass.deterministic() { 2 } else { 1 };
        let accepted = "1, or 2 up to head dim 64 if additions have no order";
        accept("key_stages", self.key_stages.into(), (1..=most).contains(&self.key_stages), accepted)?;
        let (bytes, limit) = (self.shared_bytes(problem), arch.shared_per_cta);
        if bytes > limit {
            return Err(PlanError::SharedMemory { bytes: bytes.into(), limit, sm: arch.sm });
        }
        let tiles = self.tile_count(problem);
        accept("tiles of keys · heads · batch", tiles, tiles < 1 << 31, "fewer than 2^31")?;
        let parts = self.row_parts;
        accept("row_parts", parts.into(), (1..=MOST_PARTS).contains(&parts), "1 to 32")?;
        if parts > 1 {
            let even = problem.lengths.is_even();
            accept("row_parts", parts.into(), even, "1 if the batch entries' lengths may differ")?;
            self.merge_grid(problem).check("CTAs (pieces of dK and dV · heads · batch)")?;
        }
        self.row_grid(problem).check("CTAs (tiles of rows · heads · batch)")
    }

    /// Shared memory of a CTA of the main kernel, in bytes: tiles, numbers of rows, then barriers.
    pub(super) fn shared_bytes(&self, problem: &Problem) -> u32 {
        let sizes = TileSizes::new(problem);
        let of_ring = |tensor| {
            let stages = self.stages(tensor);
            stages * sizes.tile(problem, tensor).bytes() + Pipeline::bytes(stages)
        };
        let rings: u32 = LOADED.into_iter().map(of_ring).sum();
        let numbers = self.gradient_stages * sizes.number_bytes();
        let barriers = if sizes.gradients_apart() { RELAY_BYTES } else { Handover::bytes(sizes.slots()) };
        let ordered = problem.pass.deterministic();
        let staging = sizes.staging_bytes(ordered) + if ordered { sizes.order_barrier_bytes() } else { 0 };
        let between = sizes.slots() * sizes.ds().bytes() + staging + sizes.weight_bytes();
        let broadcast = match sizes.handout(ordered) {
            Handout::Dynamic => TileBroadcast::shared_bytes(!problem.lengths.is_even()),
            _ => 0,
        };
        rings + numbers + between + broadcast + barriers
    }

    /// Stages of the ring of a tensor that is loaded through a tensor map.
    pub(super) const fn stages(&self, tensor: Tensor) -> u32 {
        match tensor {
            Tensor::Q => self.query_stages,
            Tensor::DOut => self.gradient_stages,
            _ => self.key_stages,
        }
    }

    /// The tiles of keys of a head, and of batch entries with that many tiles each.
    pub(super) fn key_tiles(&self, problem: &Problem) -> [u64; 2] {
        key_blocks(problem, TileSizes::new(problem).keys())
    }

    /// The tiles of keys of all heads, each as often as it has parts.
    pub(super) fn tile_count(&self, problem: &Problem) -> u64 {
        let [tiles, batch] = self.key_tiles(problem);
        tiles.saturating_mul(batch).saturating_mul(self.heads(problem))
    }

    /// The KV heads of a batch entry, each as often as its tiles have parts.
    pub(super) const fn heads(&self, problem: &Problem) -> u64 {
        (problem.heads_kv as u64).saturating_mul(self.row_parts as u64)
    }

    /// The order of the tiles of keys, and the heads of a section and of the last one. The parts of a head
    /// alternate.
    pub(super) fn order_of_tiles(&self, problem: &Problem) -> (TileOrder, [u64; 2]) {
        let [_, batch] = self.key_tiles(problem);
        let parts = u64::from(self.row_parts);
        match self.tile_order {
            _ if problem.pass.deterministic() => {
                let section = self.section(problem, batch) * parts;
                (TileOrder::LongestFirst, [section; 2])
            }
            CtaOrder::RowsFirst if parts == 1 => (TileOrder::InOrder, [1; 2]),
            CtaOrder::RowsFirst => (TileOrder::Level, [parts; 2]),
            CtaOrder::HeadsFirst => (TileOrder::Level, [parts, self.last_heads(problem, batch) * parts]),
        }
    }

    /// The number of last heads, over all batch entries, whose tiles of keys alternate if heads come first: a
    /// causal mask's longest tile does not come last then. With even lengths, no more than have their rows of
    /// Q, dO and dQ in L2 together.
    pub(super) fn last_heads(&self, problem: &Problem, batch: u64) -> u64 {
        let heads = (batch * problem.heads_kv as u64).max(1);
        if !problem.lengths.is_even() {
            return heads;
        }
        let bytes = 8 * u64::from(TileSizes::new(problem).columns) * problem.seq_q.max(1) as u64;
        (CACHED_BYTES / bytes).clamp(1, MOST_HEADS).min(heads)
    }

    /// The extents of the main kernel's grid: a CTA for each tile of keys, or as many as run at once.
    pub(super) fn grid(&self, problem: &Problem, arch: &Arch) -> Extents {
        let tiles = self.tile_count(problem);
        Extents(match TileSizes::new(problem).handout(problem.pass.deterministic()) {
            Handout::Dynamic => [tiles.min(arch.multiprocessors.into()), 1, 1],
            _ => [tiles, 1, 1],
        })
    }

    /// The extents of the grids of the kernels before and after it.
    pub(super) fn row_grid(&self, problem: &Problem) -> Extents {
        self.extents(TileSizes::new(problem).row_tiles(problem), problem.heads_q)
    }

    /// The number of heads, over all batch entries, whose tiles of keys alternate if additions have an order.
    /// A CTA then starts about one visit after its predecessor in the order of additions if the heads are as
    /// many as CTAs run, for each of its visits.
    fn section(&self, problem: &Problem, batch: u64) -> u64 {
        let heads = batch * problem.heads_kv as u64;
        let visits = TileSizes::new(problem).visits(problem).max(1);
        let wanted = u64::from(Arch::SM_90.multiprocessors).div_ceil(visits);
        let section = match self.tile_order {
            CtaOrder::HeadsFirst => heads,
            CtaOrder::RowsFirst => {
                (wanted..heads).find(|&section| heads.is_multiple_of(section)).unwrap_or(heads)
            }
        };
        section.max(1)
    }

    fn extents(&self, [tiles, batch]: [u64; 2], heads: usize) -> Extents {
        let heads = heads as u64;
        Extents(match self.tile_order {
            CtaOrder::RowsFirst => [tiles, heads, batch],
            CtaOrder::HeadsFirst => [heads, batch, tiles],
        })
    }

    /// The parts of the sinks' gradients.
    pub(super) fn sink_counts(&self, problem: &Problem) -> TileCounts {
        (TileSizes::new(problem).row_tiles(problem), THREADS / 32)
    }

    /// Whether a kernel of the plan needs a flat grid.
    pub(super) fn needs_flat_grid(&self, problem: &Problem) -> bool {
        self.row_grid(problem).need_flat() || self.row_parts > 1 && self.merge_grid(problem).need_flat()
    }
}

fn check_problem(problem: &Problem) -> Result<(), PlanError> {
    if !is_half(problem) {
        let accepted = "f16 or bf16 for all tensors";
        return Err(PlanError::DType { family: FAMILY, dtype: problem.dtypes, accepted });
    }
    let refuse =
        |what: &str, value: &str, accepted: &str| Err(PlanError::unsupported(FAMILY, what, value, accepted));
    if problem.pass.wants().tables != 0 {
        return refuse("wants", "gradients of tables", "dq, dk, dv and the gradients of sinks");
    }
    for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
        let fits = (8..=WIDEST).contains(&dim) && dim.is_multiple_of(8);
        accept(what, dim as u64, fits, &format!("multiples of 8 up to {WIDEST}"))?;
    }
    let (least, most) = (problem.head_dim.min(problem.head_dim_v), problem.head_dim.max(problem.head_dim_v));
    let alike = most <= 64 || least > 64 || most > 128;
    accept(
        "head_dim_v",
        problem.head_dim_v as u64,
        alike,
        "up to 64 if head_dim is, and above 64 if head_dim is, unless one of them exceeds 128",
    )?;
    let (q, kv) = (problem.lengths.q.packed, problem.lengths.kv.packed);
    for (what, rows) in [
        ("seq_q", problem.seq_q),
        ("seq_kv", problem.seq_kv),
        ("rows of packed queries", q.unwrap_or(1)),
        ("rows of packed keys", kv.unwrap_or(1)),
    ] {
        accept(what, rows as u64, rows > 0, "1 and more: a tensor map has no empty dimension")?;
    }
    LOADED.into_iter().try_for_each(|tensor| check_ragged(problem, tensor, FAMILY))?;
    let sizes = TileSizes::new(problem);
    check_lengths(problem, sizes.rows, 1)?;
    check_key_blocks(problem, sizes.keys())?;
    let tensors = [Tensor::Out, Tensor::Dq, Tensor::Dk, Tensor::Dv];
    LOADED.into_iter().chain(tensors).try_for_each(|tensor| check_tensor_map(problem, tensor, FAMILY))
}
