//! The reasons why a call is rejected.

use problem::{DType, ProblemError, TableType};

use crate::Isa;

/// Why attention was rejected. Each message names the argument, its value and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The problem is not valid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// An element of an array of lengths does not ascend or exceeds the tensor.
    #[error("invalid value '{value}' for {array}[{index}]: expected {low} to {high}")]
    Length {
        /// The array: `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q`, `seqused_k` or `leftpad_k`.
        array: &'static str,
        /// The element's index.
        index: usize,
        /// The element.
        value: i32,
        /// The smallest accepted value: the preceding element of a cumulative array.
        low: usize,
        /// The largest accepted value, by the tensor's rows and the problem's longest sequence.
        high: usize,
    },
    /// The element type of a table differs from that in the problem.
    #[error("table {table} holds {given:?}, but the problem states {expected:?}")]
    TableType {
        /// The table, as programs name it.
        table: &'static str,
        /// Type of the given elements.
        given: TableType,
        /// The problem's type.
        expected: TableType,
    },
    /// The element type of the slices differs from the problem's.
    #[error("{tensor} holds elements of {slices}; the problem's are {problem}")]
    DType {
        /// The tensor: q, k, v or out.
        tensor: &'static str,
        /// Element type of the slices.
        slices: DType,
        /// Element type of the problem.
        problem: DType,
    },
    /// A buffer is shorter than its tensor.
    #[error("{tensor} has {len} elements; its shape and strides need {needed}")]
    BufferTooShort {
        /// The tensor: q, k, v, out, lse, or a table (t0 to t7).
        tensor: &'static str,
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A field of the plan is out of range.
    #[error("invalid value '{value}' for plan.{field}: expected 1 to {most}")]
    Plan {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest accepted value, given the plan's other fields.
        most: usize,
    },
    /// The plan has its lanes along the head dim, but its instruction set supports only query rows as lanes.
    #[error("invalid value 'dims' for plan.lanes with plan.isa = {0}: expected queries, or isa = avx512")]
    QueryLanes(Isa),
    /// The processor does not support the plan's instruction set.
    #[error("invalid value '{isa}' for plan.isa: expected one that this processor has: {available}")]
    Isa {
        /// The plan's instruction set.
        isa: Isa,
        /// The supported instruction sets as text.
        available: String,
    },
    /// The executor stopped the call.
    #[error("the call was stopped before its outputs were complete")]
    Stopped,
}
