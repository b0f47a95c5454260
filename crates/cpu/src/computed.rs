//! The element type of a computation.

use problem::{DType, DTypes, Problem};

/// The element type in which a problem's inputs are computed.
pub(crate) fn computed_type(problem: &Problem) -> DType {
    let DTypes { q, v, .. } = problem.dtypes;
    match (q.is_fp8(), v) {
        (false, _) => q,
        _ if problem.scales.are_per_block() => DType::F32,
        (true, DType::F16) => DType::F16,
        (true, _) => DType::Bf16,
    }
}
