use attend::Tanh;
use problem::{Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{CopyMode, PairSum, TileLayout};

use crate::backward::sums::TileCounts;
use crate::derivatives::TableGradient;
use crate::error::accept;
use crate::forward::contract::{default_tanh, is_half, misaligned};
use crate::forward::lengths::{check_key_blocks, check_lengths, key_blocks, row_blocks};
use crate::forward::mma::{CtaOrder, QueryHome};
use crate::grid::Extents;
use crate::{Arch, Dims, PlanError};

/// The genes of a plan of this family. Names that begin with `dq` belong to the kernel of dQ, and those with
/// `dkv` to the kernel of dK and dV.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SplitPlan {
    /// Query rows of a CTA.
    pub dq_rows: u32,
    /// Keys of a block.
    pub dq_keys: u32,
    /// Warps of a CTA. They divide the rows.
    pub dq_warps: u32,
    /// Number of blocks of keys and values in shared memory, at least 2.
    pub dq_stages: u32,
    /// Where a warp's Q and dO are kept.
    pub dq_operands: QueryHome,
    /// Minimum number of resident CTAs per SM, which limits the registers; `None` leaves the choice to ptxas.
    pub dq_resident_ctas: Option<u32>,
    /// Keys of a CTA.
    pub dkv_keys: u32,
    /// Query rows of a block.
    pub dkv_rows: u32,
    /// Warps of a CTA. They divide the keys.
    pub dkv_warps: u32,
    /// Warps that share the same keys and divide the head dims among them: 1 or 2. Each of two warps
    /// multiplies its half of the columns, adds the other warp's part of S and of dP through shared memory,
    /// and computes its half of the columns of dK and dV, which otherwise exceed the registers.
    pub dkv_dim_warps: u32,
    /// Number of blocks of queries and dO in shared memory, at least 2.
    pub dkv_stages: u32,
    /// Where a warp's K and V are kept.
    pub dkv_operands: QueryHome,
    /// As `dq_resident_ctas`.
    pub dkv_resident_ctas: Option<u32>,
    /// How tiles are loaded and stored.
    pub copy: CopyMode,
    /// The order in which CTAs compute tiles.
    pub tile_order: CtaOrder,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    pub tanh: Tanh,
}

/// One of the two kernels, by the rows that its CTAs take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// CTAs take query rows and compute dQ.
    Queries,
    /// CTAs take keys and compute dK and dV.
    Keys,
}

/// The genes of one of the two kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitTiles {
    side: Side,
    /// Rows of a CTA.
    pub own: u32,
    /// Rows of a block that passes through shared memory.
    pub streamed: u32,
    pub warps: u32,
    pub dim_warps: u32,
    pub stages: u32,
    pub operands: QueryHome,
    pub resident_ctas: Option<u32>,
}

/// The name of the family.
pub(super) const FAMILY: &str = "split";
/// The largest head dim.
const WIDEST: usize = 256;
/// Estimated registers in addition to the tiles: addresses, loop state and B fragments.
const OTHER_REGISTERS: u32 = 44;

impl SplitTiles {
    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        self.warps * 32
    }

    /// Rows of a warp.
    pub const fn warp_rows(self) -> u32 {
        self.own * self.dim_warps / self.warps
    }

    /// Columns of Q and K, and of V and dO, in shared memory: whole steps of a product for each warp. Columns
    /// beyond the head dims are zeros.
    pub fn columns(self, dims: impl Into<Dims>) -> [u32; 2] {
        let Dims { head_dim, head_dim_v, .. } = dims.into();
        [head_dim, head_dim_v].map(|dim| (dim as u32).next_multiple_of(16 * self.dim_warps))
    }

    /// The CTA's own tiles, Q and dO or K and V, and the tiles of a stage, K and V or Q and dO.
    pub fn layouts(self, dims: impl Into<Dims>) -> [[TileLayout; 2]; 2] {
        let columns = self.columns(dims);
        [self.own, self.streamed].map(|rows| columns.map(|columns| TileLayout::new(rows, columns)))
    }

    /// Bytes of a stage. In the kernel of dK and dV, the numbers of the query rows follow the tiles.
    pub fn stage_bytes(self, dims: impl Into<Dims>) -> u32 {
        let [_, streamed] = self.layouts(dims);
        let numbers = if self.side == Side::Keys { 2 * self.numbers_bytes() } else { 0 };
        streamed[0].bytes() + streamed[1].bytes() + numbers
    }

    /// Bytes of one number for each row of a block.
    pub const fn numbers_bytes(self) -> u32 {
        4 * self.streamed
    }

    /// Bytes of the ring. In the kernel of dQ, O lies in the last stage before that stage is filled.
    pub fn ring_bytes(self, dims: impl Into<Dims>) -> u32 {
        let dims = dims.into();
        let ([own, _], stage) = (self.layouts(dims), self.stage_bytes(dims));
        let last = if self.side == Side::Queries { stage.max(own[1].bytes()) } else { stage };
        (self.stages - 1) * stage + last
    }

    /// Bytes in which two `dim_warps` exchange their parts of S, and as many for dP.
    pub const fn sum_bytes(self) -> u32 {
        match self.dim_warps {
            1 => 0,
            _ => PairSum::bytes(self.warps / 2, self.warp_rows(), self.streamed),
        }
    }

    /// Shared memory of a CTA, in bytes.
    pub fn shared_bytes(self, dims: impl Into<Dims>) -> u32 {
        let dims = dims.into();
        let [own, _] = self.layouts(dims);
        own[0].bytes() + own[1].bytes() + self.ring_bytes(dims) + 2 * self.sum_bytes()
    }

    /// Estimated registers of a thread: accumulators, S and dP, P with a softcap or a program, and the CTA's
    /// own operands if they are kept in registers.
    fn registers(self, problem: &Problem) -> u32 {
        let [dim, dim_v] = self.columns(problem).map(|columns| columns / self.dim_warps);
        let sums = match self.side {
            Side::Queries => dim / 2,
            Side::Keys => (dim + dim_v) / 2,
        };
        let keeps_scores = problem.score.softcap.is_some() || problem.programs.score.is_some();
        let scores = self.streamed / 2 * if keeps_scores { 3 } else { 2 };
        let operands = if self.operands == QueryHome::Registers { (dim + dim_v) / 4 } else { 0 };
        self.warp_rows() / 16 * (sums + scores + operands) + OTHER_REGISTERS
    }

    /// Checks shared memory and registers for the resident CTAs.
    fn check_resources(self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let (bytes, resident) = (self.shared_bytes(problem), self.resident_ctas.unwrap_or(1));
        let share = (arch.shared_per_sm / resident).saturating_sub(Arch::SHARED_RESERVED);
        let limit = arch.shared_per_cta.min(share);
        if bytes > limit {
            return Err(PlanError::SharedMemory { bytes: bytes.into(), limit, sm: arch.sm });
        }
        let registers = self.registers(problem);
        let limit = self.max_registers();
        if registers > limit { Err(PlanError::Registers { registers, limit }) } else { Ok(()) }
    }

    /// Registers that a thread may have.
    pub fn max_registers(self) -> u32 {
        let share = Arch::REGISTERS_PER_SM / (self.threads() * self.resident_ctas.unwrap_or(1)).max(1);
        Arch::REGISTERS_PER_THREAD.min(share)
    }

    fn check_genes(self) -> Result<(), PlanError> {
        let [own, streamed, warps, dim_warps, stages, resident] = match self.side {
            Side::Queries => {
                ["dq_rows", "dq_keys", "dq_warps", "dq_dim_warps", "dq_stages", "dq_resident_ctas"]
            }
            Side::Keys => {
                ["dkv_keys", "dkv_rows", "dkv_warps", "dkv_dim_warps", "dkv_stages", "dkv_resident_ctas"]
            }
        };
        accept(warps, self.warps.into(), (1..=16).contains(&self.warps), "1 to 16")?;
        accept(dim_warps, self.dim_warps.into(), [1, 2].contains(&self.dim_warps), "1 and 2")?;
        let divides = self.warps.is_multiple_of(self.dim_warps);
        accept(dim_warps, self.dim_warps.into(), divides, "divisors of the warps")?;
        let step = 16 * self.warps / self.dim_warps;
        let fits = self.own > 0 && self.own.is_multiple_of(step) && self.own <= 512;
        accept(own, self.own.into(), fits, "multiples of 16 · warps up to 512")?;
        let fits = self.streamed > 0 && self.streamed.is_multiple_of(16) && self.streamed <= 256;
        accept(streamed, self.streamed.into(), fits, "multiples of 16 up to 256")?;
        accept(stages, self.stages.into(), (2..=8).contains(&self.stages), "2 to 8")?;
        let ctas = self.resident_ctas.unwrap_or(1);
        accept(resident, ctas.into(), (1..=16).contains(&ctas), "1 to 16")
    }
}

impl SplitPlan {
    /// The genes of a kernel.
    pub(super) const fn tiles(&self, side: Side) -> SplitTiles {
        match side {
            Side::Queries => SplitTiles {
                side,
                own: self.dq_rows,
                streamed: self.dq_keys,
                warps: self.dq_warps,
                dim_warps: 1,
                stages: self.dq_stages,
                operands: self.dq_operands,
                resident_ctas: self.dq_resident_ctas,
            },
            Side::Keys => SplitTiles {
                side,
                own: self.dkv_keys,
                streamed: self.dkv_rows,
                warps: self.dkv_warps,
                dim_warps: self.dkv_dim_warps,
                stages: self.dkv_stages,
                operands: self.dkv_operands,
                resident_ctas: self.dkv_resident_ctas,
            },
        }
    }

    /// The largest tiles that fit. A warp has 32 rows where its accumulators leave room, so that each B
    /// fragment that it reads from shared memory serves two products.
    pub fn default_for(problem: &Problem, arch: &Arch) -> SplitPlan {
        let dim = problem.head_dim.max(problem.head_dim_v);
        let wide = problem.head_dim + problem.head_dim_v > 320;
        let (dq_rows, dq_keys, dq_warps) = match dim {
            ..=64 => (128, 32, 4),
            65..=128 => (128, 64, 8),
            _ => (64, 32, 4),
        };
        let (dkv_keys, dkv_rows, dkv_warps) = match dim {
            ..=64 => (128, 32, 4),
            65..=128 => (128, 32, 8),
            _ if wide => (64, 32, 8),
            _ => (64, 16, 4),
        };
        let home = if dim <= 64 { QueryHome::Registers } else { QueryHome::Shared };
        let mut plan = SplitPlan {
            dq_rows,
            dq_keys,
            dq_warps,
            dq_stages: 2,
            dq_operands: home,
            dq_resident_ctas: None,
            dkv_keys,
            dkv_rows,
            dkv_warps,
            dkv_dim_warps: if wide { 2 } else { 1 },
            dkv_stages: 2,
            dkv_operands: QueryHome::Shared,
            dkv_resident_ctas: None,
            copy: CopyMode::Async16,
            tile_order: if problem.band.is_causal() { CtaOrder::HeadsFirst } else { CtaOrder::RowsFirst },
            tanh: default_tanh(problem),
        };
        let fits = |plan: &SplitPlan, side| plan.tiles(side).check_resources(problem, arch).is_ok();
        // Smaller blocks first, then fewer rows.
        while !fits(&plan, Side::Queries) && plan.dq_rows > 16 {
            if plan.dq_keys > 16 {
                plan.dq_keys /= 2;
            } else {
                (plan.dq_rows, plan.dq_warps) = (plan.dq_rows / 2, (plan.dq_warps / 2).max(1));
            }
        }
        while !fits(&plan, Side::Keys) && plan.dkv_keys > 16 {
            if plan.dkv_rows > 16 {
                plan.dkv_rows /= 2;
            } else {
                let least = plan.dkv_dim_warps;
                (plan.dkv_keys, plan.dkv_warps) = (plan.dkv_keys / 2, (plan.dkv_warps / 2).max(least));
            }
        }
        plan.copy = widest_copy(problem);
        plan
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", u64::from(arch.sm), arch.sm >= 80, "80 and later")?;
        check_problem(problem)?;
        check_alignment(problem, self.copy)?;
        for side in [Side::Queries, Side::Keys] {
            let tiles = self.tiles(side);
            tiles.check_genes()?;
            tiles.check_resources(problem, arch)?;
            self.grid(problem, side).check("CTAs (blocks of rows · heads · batch)")?;
        }
        check_lengths(problem, self.dq_rows, 1)?;
        check_key_blocks(problem, self.dkv_keys)?;
        let heads = problem.heads_q as u64 * problem.batch as u64;
        accept("heads_q · batch", heads, heads < 1 << 32, "fewer than 2^32")
    }

    /// The number of tiles of query rows in a head, and the number of batch entries with that many tiles.
    pub(super) fn row_tiles(&self, problem: &Problem) -> [u64; 2] {
        row_blocks(problem, self.dq_rows, 1)
    }

    /// The parts of the sinks' gradients.
    pub(super) fn sink_counts(&self, problem: &Problem) -> TileCounts {
        (self.row_tiles(problem), self.dq_warps)
    }

    /// The extents of a kernel's grid.
    pub(super) fn grid(&self, problem: &Problem, side: Side) -> Extents {
        let own = self.tiles(side).own;
        let ([blocks, batch], heads) = match side {
            Side::Queries => (self.row_tiles(problem), problem.heads_q as u64),
            Side::Keys => (key_blocks(problem, own), problem.heads_kv as u64),
        };
        // Without keys, the one block of a head stores nothing.
        let blocks = blocks.max(1);
        Extents(match self.tile_order {
            CtaOrder::RowsFirst => [blocks, heads, batch],
            CtaOrder::HeadsFirst => [heads, batch, blocks],
        })
    }

    /// Whether a kernel of the plan needs a flat grid.
    pub(super) fn needs_flat_grid(&self, problem: &Problem) -> bool {
        let grids = [Side::Queries, Side::Keys].map(|side| self.grid(problem, side));
        let tables = TableGradient::all(problem, FAMILY).unwrap_or_default();
        let of_tables = tables.iter().filter_map(|table| table.grid(problem));
        grids.into_iter().chain(of_tables).any(Extents::need_flat)
    }
}

fn check_problem(problem: &Problem) -> Result<(), PlanError> {
    if !is_half(problem) {
        let (family, accepted) = (FAMILY, "f16 or bf16 for all tensors");
        return Err(PlanError::DType { family, dtype: problem.dtypes, accepted });
    }
    for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
        accept(what, dim as u64, (1..=WIDEST).contains(&dim), &format!("1 to {WIDEST}"))?;
    }
    for table in TableGradient::all(problem, FAMILY)? {
        if let Some(grid) = table.grid(problem) {
            grid.check("CTAs of a table's gradient (tiles of keys · tiles of queries · heads · batch)")?;
        }
        table.sums(problem).map_or(Ok(()), |sums| sums.check())?;
        let elements = problem.programs.tables[usize::from(table.table)].gradient().extents;
        let elements = elements.iter().fold(1u64, |product, &extent| product.saturating_mul(extent as u64));
        accept("elements of a table's gradient", elements, elements < 1 << 31, "fewer than 2^31")?;
    }
    Ok(())
}

/// Checks that every row is aligned for copies of this width.
fn check_alignment(problem: &Problem, copy: CopyMode) -> Result<(), PlanError> {
    let elements = copy.bytes() / 2;
    let found = Tensor::ALL.into_iter().find_map(|tensor| {
        let (what, value) = misaligned(problem, tensor, elements)?;
        Some(PlanError::Misaligned { tensor: tensor.name(), what, value, elements })
    });
    found.map_or(Ok(()), Err)
}

/// The widest copies that the strides allow.
pub(super) fn widest_copy(problem: &Problem) -> CopyMode {
    let fits = |&copy: &CopyMode| check_alignment(problem, copy).is_ok();
    CopyMode::ALL.into_iter().find(fits).unwrap_or(CopyMode::Elements)
}
