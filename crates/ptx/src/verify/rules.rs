//! Checks from which the rows of instructions compose their rules.

use crate::{Imm, Instruction, Operand, Type};

use super::{Fault, Rule, fault};

/// `Err` with a message if `holds` is false.
pub(crate) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

/// `Err` with the accepted types if `ty` is not one of them.
pub(crate) fn one_of(what: &str, ty: Type, types: &[Type]) -> Result<(), String> {
    ensure(types.contains(&ty), || {
        let list = types.iter().map(|t| format!(".{t}")).collect::<Vec<_>>().join(" ");
        format!("{what} has no type .{ty}; it takes {list}")
    })
}

/// The value of the integer constant in an operand position, if there is one.
pub(crate) fn constant(inst: &Instruction, position: usize) -> Option<i64> {
    match inst.operands.get(position) {
        Some(Operand::Imm(Imm::Int(value))) => Some(*value),
        _ => None,
    }
}

/// Checks that a constant is in a range, limits included. Registers pass.
pub(crate) fn range(what: &str, value: Option<i64>, least: i64, most: i64) -> Result<(), Fault> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            fault(Rule::Constant, format!("{what}: {value} is not between {least} and {most}"))
        }
        _ => Ok(()),
    }
}

/// Checks that a constant is a multiple of `of`. Registers pass.
pub(crate) fn multiple(what: &str, value: Option<i64>, of: i64) -> Result<(), Fault> {
    match value {
        Some(value) if value % of != 0 => {
            fault(Rule::Constant, format!("{what}: {value} is not a multiple of {of}"))
        }
        _ => Ok(()),
    }
}

/// Checks that a constant member mask names at least one lane.
pub(crate) fn member_mask(value: Option<i64>) -> Result<(), Fault> {
    match value {
        Some(0) => fault(Rule::Constant, "a member mask of 0 names no lane"),
        _ => Ok(()),
    }
}
