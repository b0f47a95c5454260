//! 8-bit inputs, for all families: types of the products, the rescale threshold, and unsupported descale
//! factors.

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

/// Rejects descale factors together with a score program, which can take only the softmax scale.
pub(crate) fn check_scales(problem: &Problem, family: &'static str) -> Result<(), PlanError> {
    if problem.scales.is_empty() || problem.programs.is_empty() {
        return Ok(());
    }
    let [what, value, accepted] =
        ["scales", "descale factors", "none beside score and mask programs"].map(str::to_owned);
    Err(PlanError::Problem { family, what, value, accepted })
}
