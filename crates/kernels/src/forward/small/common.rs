//! The genes that both families for small grids have, and the layout of a CTA's shared memory.

use attend::{Division, Packing, Tanh};
use problem::{Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{Mbarriers, RowStore, SwizzledTile, WARPGROUP_ROWS, WARPGROUP_THREADS};

use crate::Symptom;
use crate::error::accept;
use crate::forward::contract::{check_tensor_maps, is_half, misaligned, most_rows};
use crate::forward::packing::{check_packing, packed_heads, packs_well};
use crate::genes::Turn::{Down, Up};
use crate::genes::{BLOCK_N, CLUSTER, Gene, PACKING};
use crate::grid::Extents;
use crate::{Arch, Dims, Features, PlanError};

/// The order in which the grid's CTAs take tiles of query rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// One head after another. In a causal head the last rows come first, because they see the most keys.
    #[default]
    ByHead,
    /// The last rows of all heads first, so that the tiles at the end are short.
    LongestFirst,
    /// In the first half of the grid, the last rows of all heads first; in the second half, the first rows of
    /// all heads first. If two CTAs share an SM, the second one comes half a grid after the first, so that a
    /// long tile is paired with a short one.
    Folded,
}

/// The genes that both families have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Common {
    pub row_warpgroups: u32,
    pub packing: Packing,
    pub cluster: u32,
    pub kv_warpgroups: u32,
    pub block_n: u32,
    pub tile_order: RowOrder,
    pub store: RowStore,
    pub overlapping: bool,
    pub resident_ctas: u32,
    pub tanh: Tanh,
}

/// The tiles of the TMA copies, and the byte offsets in a CTA's shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedMap {
    /// The tile of one copy of queries, of keys and of values.
    pub query_tile: SwizzledTile,
    pub key_tile: SwizzledTile,
    pub value_tile: SwizzledTile,
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
    pub messages: u32,
    pub barriers: u32,
    /// Number of mbarriers of queries, keys and values. They come first.
    pub load_barriers: u32,
    pub bytes: u32,
}

impl SharedMap {
    /// The layout for copies of `query_rows` query rows and of `1 / key_copies` of a block's keys, with
    /// `stages` KV blocks for each part of a CTA's keys.
    pub fn new(
        common: &Common,
        dims: impl Into<Dims>,
        [query_rows, key_copies, stages, load_barriers]: [u32; 4],
    ) -> SharedMap {
        let dims = dims.into();
        let (dim, dim_v) = (dims.head_dim as u32, dims.head_dim_v as u32);
        let query_tile = SwizzledTile::new(query_rows, dim).packed(common.packed_heads(dims));
        let key_tile = SwizzledTile::new(common.block_n / key_copies, dim);
        let value_tile = SwizzledTile::new(common.block_n, dim_v);
        let blocks = common.kv_warpgroups * stages;
        let keys = common.rows() / query_rows * query_tile.bytes();
        let values = keys + blocks * key_copies * key_tile.bytes();
        let messages = values + blocks * value_tile.bytes();
        let division = common.division();
        let barriers = messages + division.message_room(dim_v);
        let bytes = barriers + (load_barriers + division.barriers()) * Mbarriers::BYTES;
        SharedMap {
            query_tile,
            key_tile,
            value_tile,
            queries: 0,
            keys,
            values,
            messages,
            barriers,
            load_barriers,
            bytes,
        }
    }
}

impl Common {
    /// One warpgroup per tile, without packed heads.
    pub const BASE: Common = Common {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 128,
        tile_order: RowOrder::ByHead,
        store: RowStore::Chunks,
        overlapping: false,
        resident_ctas: 1,
        tanh: Tanh::Exp2,
    };

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.division().warpgroups() * WARPGROUP_THREADS
    }

    /// Query rows of a CTA.
    pub const fn rows(&self) -> u32 {
        WARPGROUP_ROWS * self.row_warpgroups
    }

    /// Number of query heads whose rows are packed.
    pub fn packed_heads(&self, dims: impl Into<Dims>) -> u32 {
        packed_heads(self.packing, dims)
    }

    /// Heads, or groups of packed heads, per batch entry.
    pub fn tile_heads(&self, problem: &Problem) -> u64 {
        problem.heads_q as u64 / u64::from(self.packed_heads(problem))
    }

    /// Row tiles per head, or per group of packed heads.
    pub fn row_tiles(&self, problem: &Problem) -> u64 {
        let rows = (problem.seq_q as u64).saturating_mul(self.packed_heads(problem).into());
        rows.div_ceil(self.rows().into())
    }

    /// Row tiles of all heads.
    pub fn tiles(&self, problem: &Problem) -> u64 {
        let heads = self.tile_heads(problem).saturating_mul(problem.batch as u64);
        self.row_tiles(problem).saturating_mul(heads)
    }

    /// Whether all CTAs are resident at the same time with the plan's `resident_ctas`.
    pub fn is_one_wave(&self, problem: &Problem, arch: &Arch) -> bool {
        let ctas = self.tiles(problem).saturating_mul(self.cluster.into());
        ctas <= u64::from(self.resident_ctas) * u64::from(arch.multiprocessors)
    }

    /// Keys whose scores a cluster holds at once.
    pub const fn cluster_keys(&self) -> u32 {
        self.division().parts() * self.block_n
    }

    pub const fn division(&self) -> Division {
        Division {
            ctas: self.cluster,
            kv_warpgroups: self.kv_warpgroups,
            row_warpgroups: self.row_warpgroups,
        }
    }

    /// The genes, with the heads of a group packed if that fills tiles better.
    pub fn filled(mut self, problem: &Problem) -> Common {
        let packs =
            packs_well(problem, WARPGROUP_ROWS) && WARPGROUP_ROWS.is_multiple_of(problem.group_size() as u32);
        self.packing = if packs { Packing::Packed } else { Packing::Apart };
        self
    }

    /// The CTAs of a cluster, without those for which there are no keys.
    pub fn cluster_with_keys(&self, problem: &Problem) -> u32 {
        let of_cta = (self.kv_warpgroups * self.block_n).max(1) as usize;
        let needed = problem.seq_kv.div_ceil(of_cta).clamp(1, self.cluster.max(1) as usize);
        needed.next_power_of_two() as u32
    }

    /// The store that the problem allows.
    pub fn fitted_store(&self, family: &'static str, problem: &Problem) -> RowStore {
        if self.check_store(family, problem).is_ok() { self.store } else { RowStore::Pairs }
    }

    /// Checks the genes without regard to a problem.
    pub fn check_genes(&self) -> Result<(), PlanError> {
        for (what, value) in [("cluster", self.cluster), ("kv_warpgroups", self.kv_warpgroups)] {
            accept(what, value.into(), [1, 2, 4].contains(&value), "1, 2, 4")?;
        }
        let rows = (1..=4).contains(&self.row_warpgroups);
        accept("row_warpgroups", self.row_warpgroups.into(), rows, "1 to 4")?;
        let threads = self.threads();
        accept("threads", threads.into(), threads <= 1024, "up to 1024 (128 a warpgroup)")?;
        let keys = self.block_n.is_multiple_of(16) && (16..=256).contains(&self.block_n);
        accept("block_n", self.block_n.into(), keys, "multiples of 16 from 16 to 256")?;
        let resident = (1..=8).contains(&self.resident_ctas);
        accept("resident_ctas", self.resident_ctas.into(), resident, "1 to 8")
    }

    /// Checks types, head dims, lengths and strides.
    pub fn check_problem(&self, family: &'static str, problem: &Problem) -> Result<(), PlanError> {
        if !is_half(problem) {
            let accepted = "f16, bf16";
            return Err(PlanError::DType { family, dtype: problem.dtypes, accepted });
        }
        for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
            let fits = dim.is_multiple_of(8) && (8..=256).contains(&dim);
            accept(what, dim as u64, fits, "multiples of 8 from 8 to 256")?;
        }
        for (what, length) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
            let (most, accepted) = most_rows(problem);
            accept(what, length as u64, (1..=most).contains(&length), &accepted.replacen("up", "1", 1))?;
        }
        check_tensor_maps(problem, family)
    }

    /// Checks that packed heads fit the rows of one copy of queries.
    pub fn check_packing(&self, problem: &Problem, rows: u32, accepted: &str) -> Result<(), PlanError> {
        let heads = self.packed_heads(problem);
        check_packing(problem, heads, rows.is_multiple_of(heads), accepted)
    }

    /// Checks that the parts of the keys can divide the columns of O evenly.
    pub fn check_shares(&self, problem: &Problem) -> Result<(), PlanError> {
        let (parts, columns) = (self.division().parts(), problem.head_dim_v as u32);
        let even = (columns / 8).is_multiple_of(parts);
        accept("cluster · kv_warpgroups", parts.into(), even, "divisors of head_dim_v / 8")
    }

    /// Checks that stores are aligned in global memory and to the tiles of a share.
    pub fn check_store(&self, family: &'static str, problem: &Problem) -> Result<(), PlanError> {
        let step = self.store.elements();
        let share = problem.head_dim_v as u32 / self.division().parts();
        if self.store == RowStore::Chunks {
            accept("head_dim_v / parts", share.into(), share >= 32, "32 and more with store = chunks")?;
        }
        match misaligned(problem, Tensor::Out, step) {
            None => Ok(()),
            Some((what, stride)) => {
                let accepted = format!("multiples of {step} elements with this store");
                Err(PlanError::unsupported(family, format!("out {what}"), stride, accepted))
            }
        }
    }

    /// The extents of the grid. The CTAs of a cluster are neighbours in x.
    pub fn grid(&self, problem: &Problem) -> Extents {
        let (tiles, heads) = (self.row_tiles(problem), self.tile_heads(problem));
        let (cluster, batch) = (u64::from(self.cluster), problem.batch as u64);
        Extents(match self.tile_order {
            RowOrder::ByHead => [cluster * tiles, heads, batch],
            RowOrder::LongestFirst | RowOrder::Folded => [cluster * heads, batch, tiles],
        })
    }

    /// Checks the sizes of the grid.
    pub fn check_grid(&self, problem: &Problem) -> Result<(), PlanError> {
        self.grid(problem).check("CTAs (cluster · tiles of query rows · heads · batch)")
    }

    /// Checks `shared` bytes of a CTA and about `registers` registers of a thread against the limits for the
    /// plan's resident CTAs.
    pub fn check_resources(&self, arch: &Arch, shared: u32, registers: u32) -> Result<(), PlanError> {
        let share = (arch.shared_per_sm / self.resident_ctas).saturating_sub(Arch::SHARED_RESERVED);
        let limit = arch.shared_per_cta.min(share);
        if shared > limit {
            return Err(PlanError::SharedMemory { bytes: shared.into(), limit, sm: arch.sm });
        }
        let share = Arch::REGISTERS_PER_SM / (self.threads() * self.resident_ctas);
        let limit = Arch::REGISTERS_PER_THREAD.min(share);
        if registers > limit {
            return Err(PlanError::Registers { registers, limit });
        }
        Ok(())
    }

    /// CTAs that an SM holds at once, each with `shared` bytes and about `registers` registers of a thread.
    /// They may be more than the plan's `resident_ctas`, for which registers are limited.
    pub fn occupancy(&self, arch: &Arch, shared: u32, registers: u32) -> u32 {
        let threads = self.threads();
        let registers = threads * registers.next_multiple_of(8);
        let by_memory = arch.shared_per_sm / (shared + Arch::SHARED_RESERVED);
        by_memory.min(Arch::REGISTERS_PER_SM / registers.max(1)).min(Arch::THREADS_PER_SM / threads).max(1)
    }

    /// Whether the keys fill whole blocks of the cluster.
    pub fn divides(&self, problem: &Problem) -> bool {
        problem.seq_kv.is_multiple_of(self.cluster_keys() as usize)
    }
}

/// The features that both families support.
pub(super) fn features() -> Features {
    Features { sink: true, programs: true, ..Features::default() }
}

/// The declarations of the genes that both families have, except that of the softcap.
pub(super) fn genes(problem: &Problem) -> Vec<Gene> {
    // Without grouped heads there is nothing to pack.
    let packings = if problem.group_size() > 1 { &["apart", "packed"][..] } else { &[] };
    vec![
        Gene::new("row_warpgroups")
            .searched([1, 2, 3, 4])
            .curing(&[(Symptom::SmallGrid, Down), (Symptom::RedundantLoads, Up)]),
        Gene::new("packing").searched(packings.iter().copied()).wider(["apart", "packed"]).curing(PACKING),
        Gene::new("cluster").searched([1, 2]).wider([4]).curing(CLUSTER),
        Gene::new("kv_warpgroups").searched([1, 2]).wider([4]).curing(&[(Symptom::Barriers, Down)]),
        Gene::new("block_n").searched([48, 64, 128, 192, 256]).wider([32, 80, 96, 112, 160]).curing(BLOCK_N),
        Gene::new("tile_order").searched(["by_head", "longest_first", "folded"]),
        Gene::new("store"),
        Gene::new("overlapping"),
    ]
}
