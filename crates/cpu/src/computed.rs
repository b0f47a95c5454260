//! The element type of a computation.

use problem::{DType, DTypes, Problem};

/// The element type in which a problem's inputs are computed.
pub(crate) fn computed_type(problem: &Problem) -> DType {
    let DTypes { q, k, v, .. } = problem.dtypes;
    match (q.is_fp8(), v) {
        _ if k.is_fp8() && problem.scales.are_per_block() => DType::F32,
        (false, _) => q,
        (true, DType::F16) => DType::F16,
        (true, _) => DType::Bf16,
    }
}
