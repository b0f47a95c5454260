//! 8-bit inputs, for all families: types of the products, the rescale threshold, and the keys and sums of a
//! KV block with descale factors per block of rows.

use attend::OutputSums;
use problem::{DType, Problem, Tensor, descale_name};
use ptx::{Half, Type};
use tile::OperandType;

use crate::error::accept;
use crate::genes::Gene;
use crate::{Dims, PlanError};

/// The type of a tensor's elements in a product.
pub(crate) fn operand_type(dims: impl Into<Dims>, tensor: Tensor) -> Type {
    match dims.into().dtypes.of(tensor) {
        DType::E4m3 => Type::E4m3,
        DType::E5m2 => Type::E5m2,
        DType::Bf16 => Type::Bf16,
        DType::F16 | DType::F32 => Type::F16,
    }
}

/// The type to which P is rounded.
pub(crate) fn weights(dims: impl Into<Dims>) -> OperandType {
    match dims.into().dtypes.weights() {
        DType::E4m3 | DType::E5m2 => OperandType::E4m3,
        DType::Bf16 => OperandType::Half(Half::Bf16),
        DType::F16 | DType::F32 => OperandType::Half(Half::F16),
    }
}

/// The rescale threshold that leaves enough of e4m3's range to keys with small weights. Each power of two in
/// the threshold reduces the range at the small end: P of a key that weighs 2^−w of the heaviest key is
/// 2^(8 − threshold − w). The threshold is the largest one with which P of a key that weighs 1/`keys` is
/// 2^−8, twice the smallest number. Otherwise one heavy key could hide that many light keys, which together
/// weigh as much. From 16k keys on, too little of the range is left, and the threshold is 0.
pub(crate) const fn default_threshold(keys: usize) -> u8 {
    const MOST: u32 = 5;
    let threshold = 16u32.saturating_sub(keys.next_power_of_two().ilog2());
    match threshold {
        0..=2 => 0,
        3..MOST => threshold as u8,
        MOST.. => MOST as u8,
    }
}

/// Checks the keys of a KV block that a warp multiplies. They have one factor of V, by which their P V is
/// multiplied, and one factor of K or whole groups of keys with a factor each. `gene` names the number in
/// errors.
pub(crate) fn check_keys_of_factors(
    problem: &Problem,
    gene: &'static str,
    keys: u32,
) -> Result<(), PlanError> {
    for (tensor, groups) in [(Tensor::V, false), (Tensor::K, true)] {
        let Some(rows) = problem.scales.rows(tensor) else { continue };
        let fits = rows.is_multiple_of(keys) || groups && keys.is_multiple_of(rows);
        let numbers = if groups { "divisors and multiples" } else { "divisors" };
        let accepted = format!("{numbers} of {rows} with {} per {rows} rows", descale_name(tensor));
        accept(gene, keys.into(), fits, &accepted)?;
    }
    Ok(())
}

/// The largest number of keys up to `keys` that [`check_keys_of_factors`] accepts, `keys` itself or a
/// multiple of `step`; `keys` if there is none.
pub(crate) fn keys_of_factors(problem: &Problem, keys: u32, step: u32) -> u32 {
    let fits = |&n: &u32| check_keys_of_factors(problem, "keys", n).is_ok();
    let fewer = (1..=keys / step).rev().map(|n| n * step);
    std::iter::once(keys).chain(fewer).find(fits).unwrap_or(keys)
}

/// Rejects a single sum of P V over all keys if V has factors per block of rows: the products of each KV
/// block are multiplied by their own factor.
pub(crate) fn check_sums_of_factors(
    problem: &Problem,
    sums: OutputSums,
    family: &'static str,
) -> Result<(), PlanError> {
    if problem.scales.rows(Tensor::V).is_none() || sums == OutputSums::ByBlock {
        return Ok(());
    }
    let accepted = "by_block with descale_v per block of rows";
    Err(PlanError::unsupported(family, "output_sums", "running", accepted))
}

/// The values of the gene `output_sums`. Sums of 16-bit products are exact enough without a second level.
pub(crate) fn output_sums_gene(problem: &Problem) -> Gene {
    let values = match (problem.dtypes.v.is_fp8(), problem.scales.rows(Tensor::V)) {
        (false, _) => &[][..],
        (true, None) => &["running", "by_block"],
        (true, Some(_)) => &["by_block"],
    };
    Gene::new("output_sums").searched(values.iter().copied())
}
