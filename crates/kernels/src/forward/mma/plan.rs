use attend::{Order, OutputSums, Rescale, Tanh, merge_bytes};
use problem::{Band, DType, DTypes, Problem, Tensor};
use serde::{Deserialize, Serialize};
use tile::{CopyMode, PairSum, TileLayout};

use super::fp8::{
    column_step, default_rescale, default_sums, key_step, most_residents_of_fp8, tile_shape_of_fp8,
    widest_of_fp8,
};
use crate::error::accept;
use crate::forward::Visits;
use crate::forward::contract::{check_rescale, default_tanh, misaligned};
use crate::forward::lengths::{check_lengths, row_blocks};
use crate::grid::Extents;
use crate::{Arch, Dims, PlanError};

/// Where a warp's queries are kept during the main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryHome {
    /// In registers, read once.
    Registers,
    /// In shared memory, read again for each KV block.
    Shared,
}

/// The order in which CTAs compute tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CtaOrder {
    /// Neighbouring CTAs compute neighbouring row blocks of one head, whose keys stay in L2. In a causal
    /// head, long rows come first.
    RowsFirst,
    /// Neighbouring CTAs compute neighbouring heads: all long rows of a causal problem come first.
    HeadsFirst,
}

/// The genes of a plan of this family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MmaPlan {
    /// Query rows of a CTA.
    pub block_m: u32,
    /// Keys of a KV block.
    pub block_n: u32,
    /// Warps of a CTA.
    pub warps: u32,
    /// Warps that share the same rows and divide each KV block among them (split-KV inside the CTA, merged at
    /// the end). The `warps / kv_warps` groups divide the CTA's rows evenly. More than 1 shortens the
    /// dependency chain on a small grid.
    pub kv_warps: u32,
    /// Warps that share the same rows and divide the head dims among them: 1 or 2. Each of two warps
    /// multiplies its half of the columns of Q and K, adds the other warp's part of S through shared memory,
    /// and computes its half of O's columns. 2 halves the registers of O: for head_dim_v above 256, and by
    /// default in f32 for wider rows than 128 on large grids, where each warp then has 32 rows. Cannot be
    /// combined with `kv_warps`.
    #[serde(default = "one")]
    pub dim_warps: u32,
    /// CTAs that share the same rows and divide their KV blocks into parts of equal length (split-KV over
    /// CTAs, FlashAttention-3's `num_splits`). A second kernel merges the results in the order of the splits,
    /// so that they are bitwise reproducible. More than 1 uses idle SMs when rows are few and keys are many.
    #[serde(default = "one")]
    pub splits: u32,
    /// Number of KV blocks in shared memory.
    pub stages: u32,
    /// How the steps of successive KV blocks interleave.
    #[serde(alias = "order")]
    pub products: Order,
    /// Minimum number of resident CTAs per SM, which limits the registers; `None` leaves the choice to ptxas.
    pub resident_ctas: Option<u32>,
    pub queries: QueryHome,
    /// When accumulators are rescaled.
    pub rescale: Rescale,
    /// Where the P V of successive blocks are summed. Only 8-bit values use sums by block, because their sums
    /// on the tensor cores keep few bits.
    #[serde(default)]
    pub output_sums: OutputSums,
    /// How tiles are loaded and stored.
    pub copy: CopyMode,
    /// The order in which CTAs compute tiles.
    #[serde(alias = "grid")]
    pub tile_order: CtaOrder,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    #[serde(default)]
    pub tanh: Tanh,
    /// Which KV blocks are visited if the problem has a mask program.
    #[serde(default)]
    pub visits: Visits,
}

/// Maximum columns of O for one warp: with 16 rows, they fill half of a thread's registers.
const WIDEST: usize = 256;

/// Maximum number of splits: one thread of the merge reads all of them.
pub(super) const MOST_SPLITS: u32 = 32;

const fn one() -> u32 {
    1
}

/// Minimum number of keys in a split by default. Fewer keys take less time than the second kernel (predicted
/// by the time model for an H200 and an L4, not yet measured).
const LEAST_KEYS: usize = 256;

/// Estimated registers in addition to the tiles: addresses, loop state and B fragments (from ptxas' register
/// counts of the default plans).
const OTHER_REGISTERS: u32 = 44;

impl MmaPlan {
    /// FlashAttention-2's tiles. If these would leave SMs idle, CTAs get fewer rows, and the warps divide the
    /// keys.
    pub fn default_for(problem: &Problem, arch: &Arch) -> MmaPlan {
        let dim = problem.head_dim.max(problem.head_dim_v);
        let float = problem.dtypes.out == DType::F32;
        let (block_m, block_n, warps) = match problem.dtypes.q {
            DType::F32 => tile_shape_of_f32(problem, dim, arch),
            DType::F16 | DType::Bf16 => tile_shape(dim, problem.band, arch),
            DType::E4m3 | DType::E5m2 => tile_shape_of_fp8(dim, arch),
        };
        // The maximum head dim for which several warps share rows on a small grid, and the maximum head dim
        // whose queries fit the registers.
        let (most_small, most_kept) = match problem.dtypes.q {
            DType::F32 => (128, 32),
            DType::F16 | DType::Bf16 => (WIDEST, 128),
            DType::E4m3 | DType::E5m2 => widest_of_fp8(arch),
        };
        // In f32, two warps share 32 rows and divide the columns; otherwise each would have 16 rows.
        let divides = problem.head_dim_v > WIDEST || (float && block_m == 128 && warps == 8);
        let dim_warps = if divides { 2 } else { 1 };
        let warps = if dim > WIDEST { block_m / 16 * dim_warps } else { warps };
        // Programs, and sinks combined with a window, need registers: with more keys, these shapes spill.
        let windowed = !problem.band.is_full() && !problem.band.is_causal();
        let block_n = match block_n {
            _ if !problem.programs.is_empty() => (block_n / 2).next_multiple_of(key_step(problem)),
            128 if problem.score.sink && windowed => 96,
            _ => block_n,
        };
        let small = dim <= most_small && ctas(problem, block_m) < arch.multiprocessors as usize;
        let (block_m, warps) = if small { (64, 4) } else { (block_m, warps) };
        let kv_warps = if small { kv_warps(problem, arch) } else { 1 };
        let block_n = match kv_warps {
            1 => block_n,
            _ if dim <= 128 && roomy(arch) && problem.dtypes.q.bytes() == 2 => 128,
            _ => 64.max(key_step(problem) * kv_warps),
        };
        let rows_per_warp = block_m * dim_warps / warps;
        let in_registers = rows_per_warp == 16 && dim <= most_kept;
        let mut plan = MmaPlan {
            block_m: block_m / kv_warps,
            block_n,
            warps,
            kv_warps,
            dim_warps,
            splits: 1,
            stages: 2,
            products: Order::InTurn,
            // Without this bound, ptxas spills in f32 to make room for one more CTA.
            resident_ctas: float.then_some(1),
            queries: if in_registers { QueryHome::Registers } else { QueryHome::Shared },
            rescale: default_rescale(problem),
            output_sums: default_sums(problem),
            copy: CopyMode::Async16,
            tile_order: if problem.band.is_causal() { CtaOrder::HeadsFirst } else { CtaOrder::RowsFirst },
            tanh: default_tanh(problem),
            visits: Visits::Band,
        };
        if plan.check_problem(problem, arch).is_err() {
            return plan; // its resource use may overflow
        }
        plan.copy = widest_copy(problem);
        plan = plan.visiting(problem);
        if plan.grid(problem).need_flat() {
            let tile_order = match plan.tile_order {
                CtaOrder::RowsFirst => CtaOrder::HeadsFirst,
                CtaOrder::HeadsFirst => CtaOrder::RowsFirst,
            };
            let other = MmaPlan { tile_order, ..plan.clone() };
            plan = if other.grid(problem).need_flat() { plan } else { other };
        }
        // Rows with the largest head dims leave room for only few keys in shared memory.
        while plan.block_n > 16 && (float || dim > WIDEST) {
            let least = MmaPlan { stages: 1, ..plan.clone() };
            if least.check_resources(problem, arch).is_ok() {
                break;
            }
            plan.block_n -= 16;
        }
        // Two resident CTAs per SM are faster than two stages. A CTA of 8 warps uses all registers of its SM.
        // If every SM has at most one CTA, all keys may be in flight at once.
        let choices: &[(u32, u32)] = match plan.kv_warps {
            1 if plan.warps <= 4 => &[(2, 2), (2, 1), (1, 2), (1, 1)],
            1 => &[(1, 2), (1, 1)],
            _ => &[(1, 4), (1, 3), (1, 2), (1, 1)],
        };
        let fits = |&&(ctas, stages): &&(u32, u32)| {
            let wanted = MmaPlan { stages, resident_ctas: Some(ctas), ..plan.clone() };
            wanted.check_resources(problem, arch).is_ok()
        };
        plan.stages = choices.iter().find(fits).map_or(1, |choice| choice.1);
        if plan.kv_warps > 1 && plan.stages > 1 && !float {
            let ahead = MmaPlan { products: Order::ScoresAhead, ..plan.clone() };
            plan = if ahead.check_resources(problem, arch).is_ok() { ahead } else { plan };
        }
        if problem.dtypes.q.is_fp8() {
            let bounded = |ctas| MmaPlan { resident_ctas: Some(ctas), ..plan.clone() };
            let fits = |plan: &MmaPlan| plan.check_resources(problem, arch).is_ok();
            let most = most_residents_of_fp8(dim, arch);
            plan = (1..=most).rev().map(bounded).find(fits).unwrap_or(plan);
        }
        let split = MmaPlan { splits: default_splits(problem, plan.block_m, arch), ..plan.clone() };
        if split.check_grid(problem).is_ok() { split } else { plan }
    }

    /// The plan with the default choice of the blocks to visit.
    pub(super) fn visiting(self, problem: &Problem) -> MmaPlan {
        let plan = MmaPlan { visits: Visits::default_for(problem), ..self };
        if plan.check_lists(problem).is_ok() { plan } else { MmaPlan { visits: Visits::Band, ..plan } }
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// Query rows of a warp.
    pub const fn warp_rows(&self) -> u32 {
        self.block_m / self.row_warps()
    }

    /// Keys of a KV block for one warp.
    pub const fn warp_keys(&self) -> u32 {
        self.block_n / self.kv_warps
    }

    /// Warps that share the same rows.
    pub(super) const fn sharing_warps(&self) -> u32 {
        self.kv_warps * self.dim_warps
    }

    /// Number of row groups in a CTA.
    pub(super) const fn row_warps(&self) -> u32 {
        self.warps / self.sharing_warps()
    }

    /// Columns of Q and K, and of V and O, in shared memory: whole chunks. With two `dim_warps` and in f32,
    /// each warp has an even number of chunks. Columns beyond the head dims are zeros.
    pub(super) fn columns(&self, dims: impl Into<Dims>) -> [u32; 2] {
        let dims = dims.into();
        let step = match (dims.dtypes.q, self.dim_warps) {
            // f32 and 8-bit types are multiplied in steps of two chunks.
            (DType::F32, warps) => 8 * warps,
            (DType::E4m3 | DType::E5m2, warps) => 32 * warps,
            (_, 1) => 8,
            (_, warps) => 16 * warps,
        };
        let step_v = if dims.dtypes.q.is_fp8() { column_step(dims) } else { step };
        let (dim, dim_v) = (dims.head_dim as u32, dims.head_dim_v as u32);
        [dim.next_multiple_of(step), dim_v.next_multiple_of(step_v)]
    }

    /// Tiles of Q, K, V and O in shared memory. O reuses the memory of Q. With 8-bit inputs, O in f32 has no
    /// tile.
    pub(super) fn layouts(&self, dims: impl Into<Dims>) -> [TileLayout; 4] {
        let dims = dims.into();
        let ([dim, dim_v], dtypes) = (self.columns(dims), dims.dtypes);
        let direct = dtypes.has_fp8() && dtypes.out == DType::F32;
        [
            (self.block_m, dim, dtypes.q),
            (self.block_n, dim, dtypes.k),
            (self.block_n, dim_v, dtypes.v),
            (if direct { 0 } else { self.block_m }, dim_v, dtypes.out),
        ]
        .map(|(rows, columns, dtype)| TileLayout::of_bytes(rows, columns * dtype.bytes() as u32))
    }

    /// Shared memory of a CTA, in bytes.
    pub fn shared_bytes(&self, problem: &Problem) -> u64 {
        let [q, k, v, o] = self.layouts(problem).map(|tile| u64::from(tile.bytes()));
        let merge = match self.kv_warps {
            1 => 0,
            _ => u64::from(merge_bytes(self.warps, self.warp_rows(), self.columns(problem)[1])),
        };
        q.max(o) + (u64::from(self.stages) * (k + v)).max(merge) + u64::from(self.sum_bytes())
    }

    /// Shared memory in which two `dim_warps` exchange their parts of S, after the ring of keys and values.
    const fn sum_bytes(&self) -> u32 {
        match self.dim_warps {
            1 => 0,
            _ => PairSum::bytes(self.row_warps(), self.warp_rows(), self.block_n),
        }
    }

    /// Estimated registers of a thread: accumulators of O and S, P fragments, and the Q fragments if they are
    /// kept in registers.
    pub fn registers(&self, problem: &Problem) -> u32 {
        let m_tiles = self.warp_rows() / 16;
        let [dim, dim_v] = self.columns(problem).map(|columns| columns / self.dim_warps);
        let (o, s) = (m_tiles * dim_v / 2, m_tiles * self.warp_keys() / 2);
        let q = match self.queries {
            QueryHome::Registers => m_tiles * dim * problem.dtypes.q.bytes() as u32 / 8,
            QueryHome::Shared => 0,
        };
        // In f32, S has two accumulators, and P two parts; in tf32, P has as many registers as S.
        let s = if problem.dtypes.q == DType::F32 { 2 * s } else { s };
        // The accumulators of 32 columns.
        let sums = match self.output_sums {
            OutputSums::Running => 0,
            OutputSums::ByBlock => 16 * m_tiles,
        };
        // The scores of two blocks are live at once; ptxas keeps some of them already as probabilities.
        let s = if self.products == Order::ScoresAhead { s + s / 2 } else { s };
        o + s + sums + q + OTHER_REGISTERS
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        self.check_problem(problem, arch)?;
        self.check_genes(problem)?;
        let step = column_step(problem);
        let even = (self.columns(problem)[1] / step).is_multiple_of(self.kv_warps);
        accept(
            "kv_warps",
            self.kv_warps.into(),
            even,
            &format!("divisors of head_dim_v / {step}, rounded up"),
        )?;
        check_alignment(problem, self.copy)?;
        self.check_grid(problem)?;
        self.check_lists(problem)?;
        self.check_resources(problem, arch)?;
        accept("sm", u64::from(arch.sm), arch.sm >= 80, "80 and later")
    }

    /// Checks shared memory and registers for the resident CTAs.
    fn check_resources(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let bytes = self.shared_bytes(problem);
        let resident = self.resident_ctas.unwrap_or(1);
        let share = (arch.shared_per_sm / resident).saturating_sub(Arch::SHARED_RESERVED);
        let limit = arch.shared_per_cta.min(share);
        if bytes > u64::from(limit) {
            return Err(PlanError::SharedMemory { bytes, limit, sm: arch.sm });
        }
        let registers = self.registers(problem);
        let share = Arch::REGISTERS_PER_SM / (self.threads() * resident);
        let limit = Arch::REGISTERS_PER_THREAD.min(share);
        if registers > limit {
            return Err(PlanError::Registers { registers, limit });
        }
        Ok(())
    }

    fn check_problem(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        MmaPlan::check_fp8_problem(problem, arch)?;
        let DTypes { q, k, .. } = problem.dtypes;
        if problem.dtypes.one().is_none() && !(q.is_fp8() && k.is_fp8()) {
            let (family, accepted) = ("mma", "f16, bf16, f32, or 8-bit queries and keys");
            return Err(PlanError::DType { family, dtype: problem.dtypes, accepted });
        }
        let dims = [("head_dim", problem.head_dim, 576), ("head_dim_v", problem.head_dim_v, 512)];
        for (what, dim, most) in dims {
            accept(what, dim as u64, (1..=most).contains(&dim), &format!("1 to {most}"))?;
        }
        check_lengths(problem, self.block_m, 1)
    }

    fn check_genes(&self, problem: &Problem) -> Result<(), PlanError> {
        let warps = (1..=16).contains(&self.warps);
        accept("warps", self.warps.into(), warps, "1 to 16")?;
        let divides = self.kv_warps > 0 && self.warps.is_multiple_of(self.kv_warps);
        accept("kv_warps", self.kv_warps.into(), divides, "divisors of warps")?;
        accept("dim_warps", self.dim_warps.into(), [1, 2].contains(&self.dim_warps), "1 and 2")?;
        let divides = self.warps.is_multiple_of(self.sharing_warps());
        accept("dim_warps", self.dim_warps.into(), divides, "divisors of warps")?;
        let alone = self.dim_warps == 1 || self.kv_warps == 1;
        accept("dim_warps", self.dim_warps.into(), alone, "1 with kv_warps > 1")?;
        let splits = (1..=MOST_SPLITS).contains(&self.splits);
        accept("splits", self.splits.into(), splits, &format!("1 to {MOST_SPLITS}"))?;
        let row_step = 16 * self.row_warps();
        let rows = self.block_m > 0 && self.block_m.is_multiple_of(row_step) && self.block_m <= 1024;
        accept(
            "block_m",
            self.block_m.into(),
            rows,
            "multiples of 16 · warps / kv_warps / dim_warps up to 1024",
        )?;
        let step = key_step(problem);
        let of_warps = self.block_n.is_multiple_of(step * self.kv_warps);
        let keys = self.block_n > 0 && of_warps && self.block_n <= 512;
        accept("block_n", self.block_n.into(), keys, &format!("multiples of {step} · kv_warps up to 512"))?;
        match self.products {
            Order::InTurn => accept("stages", self.stages.into(), (1..=8).contains(&self.stages), "1 to 8")?,
            Order::ScoresAhead => {
                let accepted = "2 to 8 with products = scores_ahead";
                accept("stages", self.stages.into(), (2..=8).contains(&self.stages), accepted)?;
            }
        }
        if let Some(resident) = self.resident_ctas {
            accept("resident_ctas", resident.into(), (1..=16).contains(&resident), "1 to 16")?;
        }
        self.check_fp8_genes(problem)?;
        check_rescale(self.rescale, problem.dtypes.weights())
    }

    /// The extents of the grid.
    pub(super) fn grid(&self, problem: &Problem) -> Extents {
        let ([rows, batch], heads) = (row_blocks(problem, self.block_m, 1), problem.heads_q as u64);
        let rows = rows * u64::from(self.splits);
        Extents(match self.tile_order {
            CtaOrder::RowsFirst => [rows, heads, batch],
            CtaOrder::HeadsFirst => [heads, batch, rows],
        })
    }

    /// Whether a kernel of the plan needs a flat grid.
    pub(super) fn needs_flat_grid(&self, problem: &Problem) -> bool {
        let merge = (self.splits > 1).then(|| MmaPlan::merge_grid(problem));
        let lists = self.list_tiles(problem).map(|tiles| tiles.grid(problem));
        [Some(self.grid(problem)), merge, lists].into_iter().flatten().any(Extents::need_flat)
    }

    /// Checks the limits of the merge: its grid, and indices below 2^31.
    fn check_merge(&self, problem: &Problem) -> Result<(), PlanError> {
        let even = problem.lengths.q.is_even();
        accept("splits", self.splits.into(), even, "1 with uneven lengths of the queries")?;
        let alone = !problem.pass.continues();
        accept("splits", self.splits.into(), alone, "1 in a call that continues from a result")?;
        let parts = problem.heads_q as u64 * problem.batch as u64 * u64::from(self.splits);
        accept("heads_q · batch · splits", parts, parts < 1 << 31, "fewer than 2^31")?;
        let threads = MmaPlan::merging_threads(problem);
        accept("seq_q · head_dim_v / 4", threads, threads < 1 << 30, "fewer than 2^30 with splits > 1")?;
        MmaPlan::merge_grid(problem).check("CTAs of the merge")
    }

    fn check_lists(&self, problem: &Problem) -> Result<(), PlanError> {
        self.list_tiles(problem).map_or(Ok(()), |tiles| tiles.check(problem))
    }

    fn check_grid(&self, problem: &Problem) -> Result<(), PlanError> {
        self.grid(problem).check("CTAs (row blocks · splits · heads_q · batch)")?;
        let all = problem.heads_q as u64 * problem.batch as u64;
        accept("heads_q · batch", all, all < 1 << 32, "fewer than 2^32")?;
        if self.splits > 1 {
            self.check_merge(problem)?;
        }
        Ok(())
    }
}

/// Checks that every row is aligned for copies of this width.
pub(crate) fn check_alignment(problem: &Problem, copy: CopyMode) -> Result<(), PlanError> {
    let found = Tensor::FORWARD.into_iter().find_map(|tensor| {
        let elements = (copy.bytes() / problem.dtypes.of(tensor).bytes() as u32).max(1);
        let (what, value) = misaligned(problem, tensor, elements)?;
        Some(PlanError::Misaligned { tensor: tensor.name(), what, value, elements })
    });
    found.map_or(Ok(()), Err)
}

/// The widest copies that the strides allow.
pub(crate) fn widest_copy(problem: &Problem) -> CopyMode {
    let fits = |&copy: &CopyMode| check_alignment(problem, copy).is_ok();
    CopyMode::ALL.into_iter().find(fits).unwrap_or(CopyMode::Elements)
}

/// The number of splits that give a CTA to every SM, if otherwise at most a quarter of the SMs would have a
/// CTA. A split has at least [`LEAST_KEYS`] keys.
pub(super) fn default_splits(problem: &Problem, rows: u32, arch: &Arch) -> u32 {
    let last = problem.seq_q.saturating_sub(1);
    let visible = problem.band.keys(last, problem.seq_q, problem.seq_kv).len();
    let idle = arch.multiprocessors as usize / ctas(problem, rows).max(1);
    let splits = idle.min(visible / LEAST_KEYS).min(MOST_SPLITS as usize) as u32;
    let merges = problem.lengths.q.is_even() && !problem.pass.continues();
    if idle >= 4 && splits > 1 && merges { splits } else { 1 }
}

/// Number of CTAs with `rows` query rows each.
fn ctas(problem: &Problem, rows: u32) -> usize {
    let [tiles, batch] = row_blocks(problem, rows, 1);
    (tiles * batch) as usize * problem.heads_q
}

/// The number of warps that share rows on a small grid, chosen so that every SM gets a CTA. The 64 rows of a
/// CTA are divided by this number.
fn kv_warps(problem: &Problem, arch: &Arch) -> u32 {
    let fits = |&&parts: &&u32| {
        let columns = problem.head_dim_v.div_ceil(column_step(problem) as usize);
        let columns = columns.is_multiple_of(parts as usize);
        columns && ctas(problem, 64 / parts) <= arch.multiprocessors as usize
    };
    [4, 2].iter().find(fits).copied().unwrap_or(1)
}

/// Whether shared memory is large enough for large tiles.
const fn roomy(arch: &Arch) -> bool {
    arch.shared_per_sm > 128 * 1024
}

/// Query rows of a CTA, keys of a block and warps for a head_dim, if there are enough rows for all SMs.
fn tile_shape(dim: usize, mask: Band, arch: &Arch) -> (u32, u32, u32) {
    match (dim, roomy(arch)) {
        // At these head dims, 128 keys spill a few registers.
        (33..=56, true) => (128, 96, 4),
        // At these head dims, 128 keys spill with a causal mask, whose diagonal needs additional registers.
        (57..=64, true) if mask.is_causal() => (128, 96, 4),
        (..=64, true) => (128, 128, 4),
        // With 64 keys, ptxas limits itself to 80 registers and spills.
        (..=32, false) => (128, 96, 4),
        (..=64, false) => (128, 64, 4),
        (65..=112, true) => (128, 64, 4),
        // 64 keys are as fast and spill two registers.
        (113..=128, true) => (128, 48, 4),
        (65..=128, false) => (128, 32, 4),
        (257.., true) => (64, 48, 8),
        (257.., false) => (32, 16, 4),
        (_, true) => (128, 64, 8),
        // At some of these head dims, 32 keys make ptxas limit itself to 128 registers and spill.
        (129..=176, false) => (64, 48, 4),
        (_, false) => (64, 32, 4),
    }
}

/// Like [`tile_shape`], for f32: rows have twice as many bytes, and S and P need twice the registers. A warp
/// of 32 rows uses each operand of K and V that it has read and split, or rounded, in two products.
fn tile_shape_of_f32(problem: &Problem, dim: usize, arch: &Arch) -> (u32, u32, u32) {
    // 128 rows of Q at head dim 256 need 128 KB.
    let many_rows = ctas(problem, 128) >= arch.multiprocessors as usize && arch.shared_per_cta > 192 * 1024;
    match (dim, roomy(arch)) {
        (..=64, _) => (128, if problem.dtypes.tf32 { 64 } else { 32 }, 4),
        (..=128, true) => (128, if problem.dtypes.tf32 { 32 } else { 16 }, 4),
        (..=128, false) => (64, 32, 4),
        (..=256, true) if many_rows => (128, 16, 8),
        (..=256, _) => (64, 16, 4),
        (_, true) => (32, 16, 4),
        (_, false) => (16, 16, 2),
    }
}
