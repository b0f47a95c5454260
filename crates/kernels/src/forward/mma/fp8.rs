//! 8-bit inputs: types of the products, the requirements on a problem and a plan, and the defaults.
//!
//! The scores are a product of 8-bit Q and K. If V has 8 bits too, P is rounded to e4m3, and the lanes
//! permute bytes of V into operands ([`tile::mma_ab`]). With 16-bit V, P and the product with V are the same
//! as in the 16-bit kernels.

use attend::{OutputSums, Rescale};
use problem::{DType, Problem, Tensor};
use ptx::Half;
use tile::{CopyMode, MmaType};

use super::plan::MmaPlan;
use crate::error::accept;
use crate::forward::fp8::{check_keys_of_factors, check_sums_of_factors, keys_of_factors, operand_type};
use crate::{Arch, Dims, PlanError};

/// The maximum width of rows of 8-bit tensors.
const WIDEST: usize = 256;

/// The types in which S = Q Kᵀ and P V are multiplied.
pub(super) fn product_types(dims: impl Into<Dims>) -> [MmaType; 2] {
    let dims = dims.into();
    let dtypes = dims.dtypes;
    let half = |dtype| if dtype == DType::Bf16 { Half::Bf16 } else { Half::F16 };
    let float = if dtypes.tf32 { MmaType::Tf32 } else { MmaType::F32 };
    let scores = match dtypes.q {
        DType::F32 => float,
        DType::F16 | DType::Bf16 => MmaType::Half(half(dtypes.q)),
        DType::E4m3 | DType::E5m2 => MmaType::Fp8([Tensor::Q, Tensor::K].map(|of| operand_type(dims, of))),
    };
    let values = match dtypes.v {
        DType::F32 => float,
        DType::F16 | DType::Bf16 => MmaType::Half(half(dtypes.v)),
        DType::E4m3 | DType::E5m2 => MmaType::Fp8([ptx::Type::E4m3, operand_type(dims, Tensor::V)]),
    };
    [scores, values]
}

/// The step between the possible numbers of keys of a warp: the keys of one product P V.
pub(super) const fn key_step(problem: &Problem) -> u32 {
    if problem.dtypes.v.is_fp8() { 32 } else { 16 }
}

/// Columns of O that one product P V computes from a chunk of V.
pub(super) fn column_step(dims: impl Into<Dims>) -> u32 {
    if dims.into().dtypes.v.is_fp8() { 16 } else { 8 }
}

/// Where the P V of blocks are summed by default: block by block for 8-bit values, because a single
/// accumulator would lose keys with small weights.
pub(super) const fn default_sums(problem: &Problem) -> OutputSums {
    if problem.dtypes.v.is_fp8() { OutputSums::ByBlock } else { OutputSums::Running }
}

/// The default rescale threshold: 0 for e4m3, which leaves the whole range to keys with small weights. With a
/// threshold of 5, short problems with a heavy key fail the gate.
pub(super) const fn default_rescale(problem: &Problem) -> Rescale {
    match problem.dtypes.weights() {
        DType::E4m3 | DType::E5m2 => Rescale::Beyond(0),
        DType::F16 | DType::Bf16 | DType::F32 => Rescale::Beyond(8),
    }
}

/// Whether ptxas converts 8-bit operands to f16, which doubles their registers: `mma.sync` of sm_90 has no
/// 8-bit products.
const fn converts(arch: &Arch) -> bool {
    arch.sm == 90
}

/// Query rows, keys of a block and warps for a head_dim. Warps have 16 rows: with 32, some kernels spill.
pub(super) const fn tile_shape_of_fp8(dim: usize, arch: &Arch) -> (u32, u32, u32) {
    match (dim, converts(arch)) {
        (..=64, _) | (65..=128, false) => (64, 64, 4),
        _ => (64, 32, 4),
    }
}

/// The maximum head dim for which several warps share rows on a small grid, and the maximum head dim whose
/// 8-bit queries fit the registers.
pub(super) const fn widest_of_fp8(arch: &Arch) -> (usize, usize) {
    if converts(arch) { (128, 0) } else { (WIDEST, 128) }
}

/// The maximum number of resident CTAs for which a bound on registers is declared. Without a bound, ptxas
/// limits itself to 80, 96 or 128 registers in some kernels, and spills. With a bound, the widest heads of
/// sm_90 spill more: 0 means no bound.
pub(super) const fn most_residents_of_fp8(dim: usize, arch: &Arch) -> u32 {
    match (dim, converts(arch)) {
        (..=64, false) => 3,
        (193.., true) => 0,
        _ => 2,
    }
}

impl MmaPlan {
    /// Checks that the family supports a problem with 8-bit inputs.
    pub(super) fn check_fp8_problem(problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        if !problem.dtypes.has_fp8() {
            return Ok(());
        }
        accept("sm", arch.sm.into(), arch.multiplies_fp8(), "89 and later with 8-bit inputs")?;
        for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
            accept(what, dim as u64, (1..=WIDEST).contains(&dim), "1 to 256 with 8-bit inputs")?;
        }
        Ok(())
    }

    /// The nearest genes that descale factors per block of rows allow.
    pub(super) fn fitted_to_factors(self, problem: &Problem) -> MmaPlan {
        let keys = keys_of_factors(problem, self.warp_keys(), key_step(problem));
        let by_block = problem.scales.rows(Tensor::V).is_some();
        let output_sums = if by_block { OutputSums::ByBlock } else { self.output_sums };
        MmaPlan { block_n: keys * self.kv_warps, output_sums, ..self }
    }

    /// Checks that the genes are compatible with 8-bit inputs.
    pub(super) fn check_fp8_genes(&self, problem: &Problem) -> Result<(), PlanError> {
        if !problem.dtypes.v.is_fp8() && self.output_sums == OutputSums::ByBlock {
            let accepted = "running without 8-bit values";
            return Err(PlanError::unsupported("mma", "output_sums", "by_block", accepted));
        }
        if !problem.dtypes.has_fp8() {
            return Ok(());
        }
        check_sums_of_factors(problem, self.output_sums, "mma")?;
        check_keys_of_factors(problem, "block_n / kv_warps", self.warp_keys())?;
        accept("dim_warps", self.dim_warps.into(), self.dim_warps == 1, "1 with 8-bit inputs")?;
        // Elements of 8 bits are copied in pairs.
        let pairs = |tensor, dim: usize| !problem.dtypes.of(tensor).is_fp8() || dim.is_multiple_of(2);
        let dims = [("head_dim", Tensor::K, problem.head_dim), ("head_dim_v", Tensor::V, problem.head_dim_v)];
        for (what, tensor, dim) in dims {
            let copied = self.copy != CopyMode::Elements || pairs(tensor, dim);
            accept(what, dim as u64, copied, "even numbers with 8-bit inputs and copy = elements")?;
        }
        Ok(())
    }
}
