//! The parameters of dropout, in every family that has it.

use attend::DropoutParams;
use problem::{Dropout, Operand, Problem};
use ptx::Builder;

use crate::contract::Contract;

/// Declares the parameters; `None` without dropout.
pub(crate) fn declare_dropout(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
) -> Option<DropoutParams> {
    let p = problem.dropout?;
    Some(DropoutParams {
        state: c.operand(k, Operand::RngState)?,
        threshold: c.u32(k, "dropout_threshold", Dropout::threshold(p)),
        scale: c.f32(k, "dropout_scale", Dropout::scale(p)),
    })
}
