//! The reasons why a call is rejected.

use problem::ProblemError;

use crate::Isa;

/// Why attention was rejected. Each message names the argument, its value and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The problem is not valid, or an operand does not fit it.
    #[error(transparent)]
    Problem(#[from] ProblemError),
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
    /// The plan does not order sums as every plan of an [invariant](problem::Invariant) problem does.
    #[error(
        "invalid value '{invariant}' for invariant with this plan: expected isa = {isa}, lanes = dims, \
         block_kv = {block_kv} and splits = 1"
    )]
    Invariant {
        /// The problem's demand.
        invariant: problem::Invariant,
        /// The accepted instruction set.
        isa: Isa,
        /// The accepted keys of a step.
        block_kv: usize,
    },
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
