//! The reasons why no kernel can be emitted.

use problem::{Band, DTypes, Invariant, PassKind, ProblemError};
use ptx::Violations;

/// Why no kernel could be emitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The problem itself is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The plan does not fit the problem or the architecture.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The verifier rejects the generator's output: a bug in the generator.
    #[allow(missing_docs, reason = "the message says what the fields are")]
    #[error(
        "the generator of {family} wrote invalid PTX: {violations}; this is a bug in FlashCore, please \
        report the plan and the problem"
    )]
    Generator { family: &'static str, violations: Violations },
}

/// Why a plan does not fit. Each variant names the gene or argument, its value and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The family does not compute these element types.
    #[error("invalid value '{dtype}' for dtype with family {family}: expected {accepted}")]
    DType { family: &'static str, dtype: DTypes, accepted: &'static str },
    /// No family computes the pass.
    #[error("invalid value '{}' for pass: expected a pass that a family of GPU kernels computes", pass.name())]
    NoFamily { pass: PassKind },
    /// The only family with equal bits in every batch and phase does not compute the problem.
    #[error(
        "invalid value '{invariant}' for invariant: expected a problem that family decode computes: {reason}"
    )]
    Invariant { invariant: Invariant, reason: Box<PlanError> },
    /// The family does not support a property of the problem.
    #[error("invalid value '{value}' for {what} with family {family}: expected {accepted}")]
    Problem { family: &'static str, what: String, value: String, accepted: String },
    /// The family does not support a feature of the problem.
    #[error("family {family} does not support {name}")]
    Feature { family: &'static str, name: &'static str },
    /// A number is outside its range, or not a multiple of the required number.
    #[error("invalid value '{value}' for {what}: expected {accepted}")]
    Value { what: &'static str, value: u64, accepted: String },
    /// The family does not support this mask.
    #[error("invalid value '{mask}' for mask with family {family}: expected {accepted}")]
    Mask { family: &'static str, mask: Band, accepted: Band },
    /// The plan needs more shared memory than a CTA can have.
    #[error(
        "{bytes} bytes of shared memory are needed, but a CTA of this plan can have {limit} on sm_{sm}; use \
        smaller tiles, fewer stages or fewer resident CTAs"
    )]
    SharedMemory { bytes: u64, limit: u32, sm: u32 },
    /// The plan needs more registers than a thread can have.
    #[error(
        "about {registers} registers per thread are needed, but {limit} are available; use fewer rows per \
        warp, \
         a smaller block_n, queries in shared memory, or fewer resident CTAs"
    )]
    Registers { registers: u32, limit: u32 },
    /// Rows are not aligned to the width of the plan's copies.
    #[error(
        "invalid value '{value}' for {what} of {tensor}: expected a multiple of {elements} elements, as copies of \
         that width need, or copy = elements"
    )]
    Misaligned { tensor: &'static str, what: &'static str, value: i64, elements: u32 },
}

impl PlanError {
    /// The error for a value that the family does not support.
    pub(crate) fn unsupported(
        family: &'static str,
        what: impl Into<String>,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> PlanError {
        PlanError::Problem { family, what: what.into(), value: value.to_string(), accepted: accepted.into() }
    }
}

/// Rejects a number unless `fits` holds.
pub(crate) fn accept(what: &'static str, value: u64, fits: bool, accepted: &str) -> Result<(), PlanError> {
    if fits { Ok(()) } else { Err(PlanError::Value { what, value, accepted: accepted.to_owned() }) }
}
