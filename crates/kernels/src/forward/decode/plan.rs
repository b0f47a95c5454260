//! The genes of the `decode` family, their check and their defaults.

use attend::{FixedMerge, LineMerge, Rescale, Tanh, merge_bytes};
use problem::Problem;
use serde::{Deserialize, Serialize};
use tile::{CopyMode, Mbarriers, WARP_VECTOR_BYTES, WarpSum};

use super::form;
use crate::error::accept;
use crate::forward::contract::{check_rescale, default_tanh, is_half, out_half};
use crate::forward::lengths::check_lengths;
use crate::forward::mma::{check_alignment, widest_copy};
use crate::{Arch, Dims, PlanError};

/// Rows of a warp.
pub(super) const ROWS: u32 = 16;

/// The most rows of a KV head with values in the keys for which the family is the default, with products of
/// warps: one position of the 128 heads of DeepSeek-V3. The other families read each row of K twice.
const MOST_LATENT_ROWS: usize = 128;
/// The most such rows with products of warpgroups: 64 positions of 128 heads. A tile visits the blocks that
/// any row of the sequence sees, so long causal sequences have another family.
const MOST_WARPGROUP_ROWS: usize = 8192;
/// With more rows of a KV head, warpgroups multiply by default. A CTA of warps has as many rows, so that more
/// rows load keys again; with fewer, the time model predicts that the memory is the limit of both.
const ROWS_OF_WARPS: usize = 32;

/// The family's name in errors.
pub(super) const NAME: &str = "decode";

/// The unit that computes the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductUnit {
    /// Warps, by `mma.sync`.
    #[default]
    Warp,
    /// Warpgroups, by `wgmma`, in latent attention on sm_90: two of them, with a producer (`warpgroups`).
    Warpgroup,
}

/// The genes of a plan of this family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DecodePlan {
    /// The unit that computes the matrix products. Warpgroups have one form: 8 warps, `dim_warps` 2 and
    /// blocks of 64 keys, with TMA or without it.
    #[serde(default)]
    pub products: ProductUnit,
    /// Warps of a CTA, which divide the keys of each block, or the head dims and the rows.
    pub warps: u32,
    /// Warps that have the same rows and keys, and divide the head dims. If more than 1, the CTA has 16 rows
    /// for each so many warps, and all its warps have the same keys; else all warps have the same 16 rows.
    #[serde(default = "one")]
    pub dim_warps: u32,
    /// Keys of a block for one warp.
    pub warp_keys: u32,
    /// Number of blocks in each warp's ring.
    pub stages: u32,
    /// CTAs per SM.
    pub resident_ctas: u32,
    /// Least number of blocks in a CTA's piece of the line. More blocks leave CTAs idle and save merges.
    pub least_blocks: u32,
    /// When accumulators are rescaled.
    pub rescale: Rescale,
    /// How tiles are loaded.
    pub copy: CopyMode,
    /// Whether TMA copies the rows of pages, instead of threads with `copy`.
    #[serde(default)]
    pub tma: bool,
    /// Whether the kernel may start before the previous kernel has ended (programmatic dependent launch).
    #[serde(default)]
    pub overlapping: bool,
    /// The instructions of the softcap. They have no effect on problems without a softcap.
    #[serde(default)]
    pub tanh: Tanh,
    /// Keys of a piece. The keys of each sequence are then cut at the multiples of it, instead of anywhere,
    /// so that the bits of a row depend neither on the batch nor on the grid.
    #[serde(default)]
    pub piece: Option<u32>,
}

const fn one() -> u32 {
    1
}

/// Bytes of the keys of a piece of an invariant plan, about. With 8192 keys of 128 elements in 8 KV heads,
/// almost every SM of an H200 has a piece, and parts, of f32, are a thirtieth of the keys and values.
const PIECE_BYTES: usize = 1 << 17;
/// Keys of a piece at most, so that rows of few bytes are divided among SMs, too.
const MOST_PIECE_KEYS: u32 = 1024;

impl DecodePlan {
    /// The plan that was the fastest on an H200 over batches of 1 to 128 sequences, if it fits: two stages
    /// (more bytes in flight were slower with keys in pages), and so many warps that they hide each
    /// other's latencies. Else as many stages as shared memory holds, up to five, and fewer warps where it is
    /// small.
    pub fn default_for(problem: &Problem, arch: &Arch) -> DecodePlan {
        let mut plan = DecodePlan {
            products: ProductUnit::Warp,
            warps: 4,
            dim_warps: 1,
            warp_keys: 16,
            stages: 5,
            resident_ctas: 1,
            least_blocks: 2,
            rescale: Rescale::Beyond(8),
            copy: widest_copy(problem),
            tma: false,
            overlapping: arch.sm >= 90,
            tanh: default_tanh(problem),
            piece: None,
        };
        let narrow = problem.dtypes.has_narrow_cache();
        if !narrow && (problem.head_dim > 256 || problem.head_dim != problem.head_dim_v) {
            let of_warpgroups = plan.of_latent_rows(problem, arch);
            return of_warpgroups.unwrap_or_else(|| plan.of_wide_heads(problem, arch));
        }
        // Rows of one page that a warp copies at once cost one shuffle of an address.
        let together = problem.pass.invariant().is_some()
            || problem.storage.pages().is_none_or(|pages| pages.rows.is_multiple_of(16));
        let (warps, warp_keys, resident_ctas) = match (problem.head_dim, narrow) {
            (..=64, false) => (8, 32, 1),
            (..=64, true) => (4, 32, 2),
            (..=128, false) if together => (4, 32, 1),
            (..=128, false) => (8, 16, 1),
            (..=128, true) => (8, 32, 1),
            _ => (4, 16, 1),
        };
        let fast = DecodePlan { warps, warp_keys, resident_ctas, stages: 2, least_blocks: 1, ..plan.clone() };
        if fast.check_dim(problem).and_then(|()| fast.check_shared(problem, arch)).is_ok() {
            return fast.with_faster_copies(problem, arch).ordered(problem);
        }
        // A second CTA multiplies while the first one widens an 8-bit cache.
        if narrow && problem.head_dim <= 128 {
            (plan.stages, plan.resident_ctas) = (4, 2);
        }
        while plan.check_shared(problem, arch).is_err() && (plan.warps, plan.stages) != (1, 2) {
            (plan.warps, plan.stages) = match (plan.warps, plan.stages) {
                (warps, stages) if stages > 3 || warps == 1 => (warps, stages - 1),
                (warps, _) => (warps / 2, 5),
            };
        }
        plan.ordered(problem)
    }

    /// The plan with copies by TMA where they were faster on an H200: up to 4 % with pages of 16 rows, and
    /// not with pages of 64 rows or wide heads.
    fn with_faster_copies(self, problem: &Problem, arch: &Arch) -> DecodePlan {
        let small_pages = problem.storage.pages().is_some_and(|pages| pages.rows < 64);
        let plan = DecodePlan { tma: small_pages && problem.head_dim <= 128, ..self.clone() };
        let fits = plan.check_tma(problem, arch).and_then(|()| plan.check_shared(problem, arch));
        if fits.is_ok() { plan } else { self }
    }

    /// Of an invariant problem, the plan with which a row has equal bits in every batch and phase. All that
    /// orders sums (warps, keys of a warp and of a piece, rescaling) depends on the head dim and the element
    /// types alone, not on lengths, pages or the number of SMs. A warp's vote on rescaling would let a row
    /// depend on the other rows of its tile.
    fn ordered(self, problem: &Problem) -> DecodePlan {
        if problem.pass.invariant().is_none() {
            return self;
        }
        let row_bytes = problem.head_dim.max(1).next_power_of_two() * problem.dtypes.k.bytes();
        let keys = ((PIECE_BYTES / row_bytes) as u32).clamp(self.block_n(), MOST_PIECE_KEYS);
        DecodePlan { piece: Some(keys), rescale: Rescale::Always, least_blocks: 1, ..self }
    }

    /// The plan with products of warpgroups, if they are the default: with copies by TMA if it can copy.
    fn of_latent_rows(&self, problem: &Problem, arch: &Arch) -> Option<DecodePlan> {
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        let plan = DecodePlan { least_blocks: 1, ..self.clone() }.of_warpgroups();
        let plans = [true, false].map(|tma| DecodePlan { tma, ..plan.clone() });
        let fits = |plan: &DecodePlan| rows > ROWS_OF_WARPS && plan.check(problem, arch).is_ok();
        plans.into_iter().find(fits)
    }

    /// The plan for head dims that warps divide: as many rows as one load of the keys serves, up to 32, then
    /// the largest block and the most stages, up to five, that shared memory holds.
    fn of_wide_heads(self, problem: &Problem, arch: &Arch) -> DecodePlan {
        let sizes = [(32, 5), (32, 4), (32, 3), (16, 5), (16, 4), (32, 2), (16, 3), (16, 2)];
        let of_size = |tiles: u32, &(warp_keys, stages): &(u32, u32)| DecodePlan {
            warps: tiles * self.warps,
            dim_warps: self.warps,
            warp_keys,
            stages,
            least_blocks: 1,
            ..self.clone()
        };
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        let needed = |tiles: &u32| *tiles == 1 || rows > (ROWS * tiles / 2) as usize;
        let plans = [2, 1].into_iter().filter(needed);
        let plans = plans.flat_map(|tiles| sizes.iter().map(move |size| (tiles, size)));
        let fits = |plan: &DecodePlan| plan.check_genes().and(plan.check_shared(problem, arch)).is_ok();
        plans.map(|(tiles, size)| of_size(tiles, size)).find(fits).unwrap_or_else(|| of_size(1, &(16, 2)))
    }

    /// The plan with products of warpgroups.
    #[must_use]
    pub const fn of_warpgroups(self) -> DecodePlan {
        DecodePlan {
            products: ProductUnit::Warpgroup,
            warps: 8,
            dim_warps: 2,
            warp_keys: form::BLOCK,
            stages: 2,
            resident_ctas: 1,
            tma: true,
            piece: None,
            ..self
        }
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        match self.products {
            ProductUnit::Warp => 32 * self.warps,
            ProductUnit::Warpgroup => form::ROLES.threads(),
        }
    }

    /// Keys of a block.
    pub const fn block_n(&self) -> u32 {
        if self.dim_warps == 1 { self.warps * self.warp_keys } else { self.warp_keys }
    }

    /// Groups of 16 query rows of a CTA.
    pub(super) const fn tiles(&self) -> u32 {
        if self.dim_warps == 1 { 1 } else { self.warps / self.dim_warps }
    }

    /// Query rows of a CTA.
    pub(super) const fn rows(&self) -> u32 {
        ROWS * self.tiles()
    }

    /// Keys of a block that a warp copies: those of its columns that no warp of other rows copies.
    pub(super) const fn copied_keys(&self) -> u32 {
        self.warp_keys / self.tiles()
    }

    /// Buffers of the sum of S. The ring of warps of several tiles has a barrier between two sums.
    pub(super) const fn sum_buffers(&self) -> u32 {
        if self.tiles() == 1 { 2 } else { 1 }
    }

    /// Bytes of a stage of a warp: a tile of each slice.
    pub(super) fn stage_bytes(&self, dims: impl Into<Dims>) -> u32 {
        self.slices(dims).into_iter().map(|slice| self.layout(slice).bytes()).sum()
    }

    /// Bytes of the rings of all warps.
    pub(super) fn ring_bytes(&self, dims: impl Into<Dims>) -> u32 {
        self.warps / self.tiles() * self.stages * self.stage_bytes(dims)
    }

    /// Bytes of the memory through which warps merge, or add their parts of S.
    pub(super) fn room_bytes(&self, dims: impl Into<Dims>) -> u32 {
        match (self.warps, self.dim_warps) {
            (1, _) => 0,
            (warps, 1) => merge_bytes(warps, ROWS, dims.into().head_dim as u32),
            (warps, _) => WarpSum::bytes(warps, (ROWS, self.warp_keys), self.sum_buffers()),
        }
    }

    /// Bytes of a warp's copy of the queries, which do not fit its registers beside O for wide heads.
    pub(super) fn query_bytes(&self, dims: impl Into<Dims>) -> Option<u32> {
        let [of_keys, of_values] = self.warp_columns(dims);
        (of_keys / 4 + of_values / 2 > 100).then_some(of_keys / 16 * WARP_VECTOR_BYTES)
    }

    /// Bytes from the start of shared memory to the mbarriers of the stages: the rings, the memory through
    /// which warps merge, and queries come before.
    pub(super) fn barriers_from(&self, dims: impl Into<Dims>) -> u32 {
        let dims = dims.into();
        let queries = self.warps * self.query_bytes(dims).unwrap_or(0);
        self.ring_bytes(dims) + self.room_bytes(dims) + queries
    }

    /// Shared memory of a CTA, in bytes.
    pub fn shared_bytes(&self, problem: &Problem) -> u64 {
        if self.products == ProductUnit::Warpgroup {
            return form::SHARED_BYTES.into();
        }
        let barriers = if self.tma { self.warps * self.stages * Mbarriers::BYTES } else { 0 };
        u64::from(self.barriers_from(problem) + barriers)
    }

    /// The largest number of KV blocks on the line.
    fn most_blocks(&self, problem: &Problem) -> u64 {
        self.most_of(problem, self.block_n())
    }

    /// The largest number of blocks or pieces of `keys` keys on the line.
    fn most_of(&self, problem: &Problem, keys: u32) -> u64 {
        let (batch, group) = (problem.batch as u64, problem.group_size() as u64);
        let tiles = match problem.lengths.q.packed {
            None => (problem.seq_q as u64 * group).div_ceil(self.rows().into()).saturating_mul(batch),
            Some(rows) => (rows as u64 * group).div_ceil(self.rows().into()).saturating_add(batch),
        };
        let blocks = (problem.seq_kv as u64).div_ceil(keys.max(1).into()).max(1);
        tiles.saturating_mul(problem.heads_kv as u64).saturating_mul(blocks)
    }

    /// CTAs of the grid: the same number whatever the lengths, at most one for each block.
    pub fn ctas(&self, problem: &Problem, arch: &Arch) -> u32 {
        let all = u64::from(arch.multiprocessors * self.resident_ctas);
        all.min(self.most_of(problem, self.piece.unwrap_or(self.block_n()))).max(1) as u32
    }

    /// Bytes of the partial results and of the counters.
    pub(super) fn merge_bytes(&self, problem: &Problem, ctas: u32) -> [usize; 2] {
        let (of_ctas, columns) = (u64::from(ctas), problem.head_dim_v as u32 * self.tiles());
        let parts = match self.slots(problem, ctas) {
            None => LineMerge::bytes(of_ctas, self.warps, columns),
            Some(slots) => FixedMerge::bytes(of_ctas, slots.into(), self.warps, columns),
        };
        [parts as usize, LineMerge::counter_bytes(of_ctas, self.warps) as usize]
    }

    /// Parts for which a CTA has room, if keys are cut at fixed pieces: of the tile that began before its
    /// share of the line at most all pieces but one, and at most the share, which an even cut makes a
    /// sixteenth longer.
    pub(super) fn slots(&self, problem: &Problem, ctas: u32) -> Option<u32> {
        let piece = self.piece?;
        let of_tile = (problem.seq_kv as u64).div_ceil(piece.into()).max(1);
        let share = self.most_of(problem, piece).div_ceil(ctas.into());
        Some(1 + (of_tile - 1).min(share + share / 16) as u32)
    }

    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", u64::from(arch.sm), arch.sm >= 80, "80 and later")?;
        self.check_genes()?;
        let narrow = problem.dtypes.has_narrow_cache();
        if !(is_half(problem) || narrow && out_half(problem).is_some()) {
            let accepted = "f16 or bf16 for all tensors, or for q and out with 8-bit k and v";
            return Err(PlanError::DType { family: NAME, dtype: problem.dtypes, accepted });
        }
        self.check_dim(problem)?;
        if narrow {
            accept("dim_warps", self.dim_warps.into(), self.dim_warps == 1, "1 with an 8-bit cache")?;
            accept("sm", arch.sm.into(), arch.multiplies_fp8(), "89 and later with an 8-bit cache")?;
            let of_heads = !problem.scales.are_per_block();
            accept("rows of a descale factor", 1, of_heads, "all rows of a head with family decode")?;
        }
        let some = problem.seq_kv > 0 || problem.storage.pages().is_none();
        accept("seq_kv", problem.seq_kv as u64, some, "1 or more with pages")?;
        check_lengths(problem, self.rows(), problem.group_size() as u32)?;
        let rows = (problem.seq_q as u64).saturating_mul(problem.group_size() as u64);
        accept("seq_q · group size", rows, rows < 1 << 30, "fewer than 2^30")?;
        let blocks = self.most_blocks(problem);
        accept("blocks of keys of all tiles", blocks, blocks < 1 << 31, "fewer than 2^31")?;
        check_alignment(problem, self.copy)?;
        if self.overlapping {
            accept("sm", arch.sm.into(), arch.sm >= 90, "90 and later with overlapping launches")?;
        }
        match self.products {
            ProductUnit::Warp => self.check_tma(problem, arch)?,
            ProductUnit::Warpgroup => self.check_warpgroups(problem, arch)?,
        }
        check_rescale(self.rescale, problem.dtypes.weights())?;
        self.check_invariant(problem, arch)?;
        self.check_shared(problem, arch)
    }

    /// Each warp stores a multiple of 8 columns of O, or of 16 with an 8-bit cache. Warps that divide the
    /// head dims also multiply steps of 16 columns of Q and K each.
    fn check_dim(&self, problem: &Problem) -> Result<(), PlanError> {
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        if self.dim_warps > 1 {
            let step = 16 * self.dim_warps as usize;
            for (argument, dim, most) in [("head_dim", dim, 576), ("head_dim_v", dim_v, 512)] {
                let fits = dim.is_multiple_of(step) && (step..=most).contains(&dim);
                accept(argument, dim as u64, fits, &format!("multiples of 16 · dim_warps up to {most}"))?;
            }
            return Ok(());
        }
        let least = if problem.dtypes.has_narrow_cache() { 16 } else { 8 };
        let of_warps = (2 * least).max(least * self.warps as usize);
        let fits = dim.is_multiple_of(of_warps) && (least..=256).contains(&dim);
        let accepted = format!("multiples of {} and of {least} · warps up to 256", 2 * least);
        accept("head_dim", dim as u64, fits, &accepted)?;
        accept("head_dim_v", dim_v as u64, dim_v == dim, "head_dim with family decode and dim_warps 1")
    }

    fn check_genes(&self) -> Result<(), PlanError> {
        let least = (1..=1 << 16).contains(&self.least_blocks);
        if self.products == ProductUnit::Warpgroup {
            let form = DecodePlan { tma: self.tma, ..self.clone().of_warpgroups() };
            accept("copy", self.copy.bytes().into(), self.copy == CopyMode::Async16, "async16 with wgmma")?;
            accept("least_blocks", self.least_blocks.into(), least, "1 to 65536")?;
            if *self != form {
                let (found, accepted) = (format!("{self:?}"), format!("{form:?}"));
                return Err(PlanError::unsupported(
                    NAME,
                    "genes with products of warpgroups",
                    found,
                    accepted,
                ));
            }
            return Ok(());
        }
        accept("warps", self.warps.into(), [1, 2, 4, 8].contains(&self.warps), "1, 2, 4 or 8")?;
        let divides = self.dim_warps > 0 && self.warps.is_multiple_of(self.dim_warps);
        accept("dim_warps", self.dim_warps.into(), divides, "divisors of the number of warps")?;
        accept("warp_keys", self.warp_keys.into(), [16, 32].contains(&self.warp_keys), "16 or 32")?;
        accept("warp_keys", self.warp_keys.into(), self.copied_keys() >= 8, "8 or more for 16 query rows")?;
        let apart = !self.tma || self.tiles() == 1;
        accept("rows of a CTA", self.rows().into(), apart, "16 with TMA")?;
        accept("stages", self.stages.into(), (2..=8).contains(&self.stages), "2 to 8")?;
        let resident = (1..=8).contains(&self.resident_ctas);
        accept("resident_ctas", self.resident_ctas.into(), resident, "1 to 8")?;
        accept("least_blocks", self.least_blocks.into(), least, "1 to 65536")?;
        let Some(piece) = self.piece else { return Ok(()) };
        let fits = piece.is_power_of_two() && (self.block_n()..=1 << 20).contains(&piece);
        accept("piece", piece.into(), fits, "a power of two from a block of keys to 2^20")?;
        accept("dim_warps", self.dim_warps.into(), self.dim_warps == 1, "1 with a piece")?;
        accept("least_blocks", self.least_blocks.into(), self.least_blocks == 1, "1 with a piece")
    }

    /// An invariant problem takes the one plan that orders its sums as every other call does.
    fn check_invariant(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let Some(invariant) = problem.pass.invariant() else { return Ok(()) };
        let has_pieces = self.dim_warps == 1;
        accept(
            "head_dim",
            problem.head_dim as u64,
            has_pieces,
            "those of dim_warps 1 if bits are invariant",
        )?;
        let order = |plan: &DecodePlan| (plan.warps, plan.warp_keys, plan.piece, plan.rescale, plan.tanh);
        let expected = DecodePlan::default_for(problem, arch);
        if order(self) == order(&expected) {
            return Ok(());
        }
        let DecodePlan { warps, warp_keys, piece, .. } = expected;
        let accepted = format!(
            "genes that keep it: warps = {warps}, warp_keys = {warp_keys}, piece = {}, rescale = always and \
             the default tanh",
            piece.unwrap_or(0)
        );
        Err(PlanError::unsupported(NAME, "invariant", invariant, accepted))
    }

    fn check_shared(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let share = (arch.shared_per_sm / self.resident_ctas).saturating_sub(Arch::SHARED_RESERVED);
        let (bytes, limit) = (self.shared_bytes(problem), arch.shared_per_cta.min(share));
        if bytes > u64::from(limit) {
            return Err(PlanError::SharedMemory { bytes, limit, sm: arch.sm });
        }
        Ok(())
    }

    /// Whether the family is the default: the keys lie in pages, and one tile holds the rows of a KV head; or
    /// the rows are few and the values are in the keys; or no other family reads the 8-bit cache.
    pub(super) fn suits(problem: &Problem, arch: &Arch) -> bool {
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        let of_warpgroups = || DecodePlan::default_for(problem, arch).products == ProductUnit::Warpgroup;
        problem.dtypes.has_narrow_cache()
            || problem.storage.pages().is_some() && rows <= ROWS as usize
            || problem.v_in_k && (rows <= MOST_LATENT_ROWS || rows <= MOST_WARPGROUP_ROWS && of_warpgroups())
    }

    /// Whether the family divides the keys of strided rows faster than `mma` with splits does: on an H200
    /// with 4096 keys and more, and not with 1024.
    pub(crate) fn divides_faster(problem: &Problem, arch: &Arch) -> bool {
        let rows = problem.seq_q.saturating_mul(problem.group_size());
        arch.has_warpgroup_products() && rows <= ROWS as usize && problem.seq_kv >= 4096
    }
}
