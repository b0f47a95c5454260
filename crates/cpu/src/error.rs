use problem::{DType, ProblemError};

use crate::Isa;

/// Why attention was refused. Each variant names the argument, its value and what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// The problem itself cannot be stated.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The slices hold another element type than the problem names.
    #[error("the slices hold {slices}, but problem.dtype = {problem}; pass slices of {problem}")]
    DType {
        /// Element type of the slices.
        slices: DType,
        /// Element type of the problem.
        problem: DType,
    },
    /// A buffer ends before its tensor does.
    #[error("{tensor} has {len} elements; its shape and strides reach over {needed}")]
    BufferTooShort {
        /// The tensor: q, k, v, out or lse.
        tensor: &'static str,
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A plan's field is outside its range.
    #[error("invalid value '{value}' for plan.{field}: expected 1 to {most}")]
    Plan {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest that would be accepted, beside the plan's other fields.
        most: usize,
    },
    /// The plan asks for numbers of a row as lanes where the instructions want query rows.
    #[error("invalid value 'dims' for plan.lanes with plan.isa = {0}: expected queries, or isa = avx512")]
    QueryLanes(Isa),
    /// The plan asks for instructions that this processor lacks.
    #[error("invalid value '{isa}' for plan.isa: expected one that this processor has: {available}")]
    Isa {
        /// The instruction set asked for.
        isa: Isa,
        /// Those present, printed.
        available: String,
    },
    /// The executor ended the call early.
    #[error("the call was stopped before its outputs were complete")]
    Stopped,
}
