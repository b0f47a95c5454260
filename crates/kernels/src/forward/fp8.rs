//! Inputs of 8 bits, for all families: types of the products, the threshold of rescaling, and descale factors
//! that are refused.

use problem::{DType, Problem, Tensor};
use ptx::{Half, Type};
use tile::OperandType;

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

/// The threshold of rescaling that leaves enough of e4m3's range to light keys. Each power of two of it is
/// taken from the light end: P of a key that weighs 2^-w of the heaviest is 2^(8 - threshold - w). The
/// threshold is the largest with which P of a key that weighs 1/`keys` is 2^-8, twice the smallest number:
/// otherwise a heavy key could hide that many light keys, which together weigh as much. From 16k keys on, too
/// little is left, and the threshold is 0.
pub(crate) const fn default_threshold(keys: usize) -> u8 {
    const MOST: u32 = 5;
    let threshold = 16u32.saturating_sub(keys.next_power_of_two().ilog2());
    match threshold {
        0..=2 => 0,
        3..MOST => threshold as u8,
        MOST.. => MOST as u8,
    }
}

/// Refuses descale factors where scores go through a program, which takes them with the softmax scale alone.
pub(crate) fn check_scales(problem: &Problem, family: &'static str) -> Result<(), PlanError> {
    if problem.scales.is_empty() || problem.programs.is_empty() {
        return Ok(());
    }
    let [what, value, accepted] =
        ["scales", "descale factors", "none beside score and mask programs"].map(str::to_owned);
    Err(PlanError::Problem { family, what, value, accepted })
}
