//! Checks calls against their callees.

use crate::{Body, Function, FunctionKind, Instruction, Op, Operand, Param};

use super::symbols::{Scope, Symbol};
use super::{Fault, Rule, fault};

pub(super) fn check(inst: &Instruction, body: &Body, scope: &Scope<'_>) -> Result<(), Fault> {
    let (Op::Call { .. }, [Operand::List(results), Operand::Function(name), Operand::List(args)]) =
        (inst.op, &inst.operands[..])
    else {
        return Ok(());
    };
    let Some(Symbol::Function(callee)) = scope.get(name) else {
        return fault(Rule::Call, format!("{name} is not a declared function"));
    };
    if callee.kind == FunctionKind::Entry {
        return fault(Rule::Call, format!("{name} is a kernel, which cannot be called"));
    }
    list("results", callee, &callee.returns, results, body, scope)?;
    list("arguments", callee, &callee.params, args, body, scope)
}

fn list(
    what: &str,
    callee: &Function,
    declared: &[Param],
    given: &[Operand],
    body: &Body,
    scope: &Scope<'_>,
) -> Result<(), Fault> {
    if declared.len() != given.len() {
        let (name, n) = (&callee.name, declared.len());
        return fault(Rule::Call, format!("{} {what} in a call of {name}; expected {n}", given.len()));
    }
    for (param, operand) in declared.iter().zip(given) {
        let wanted = u64::from(param.ty.bytes()) * u64::from(param.elements.unwrap_or(1));
        if let (Operand::Symbol(name, _), Some(_)) = (operand, param.elements)
            && let Some((align, _)) = scope.get(name).and_then(|symbol| symbol.layout())
            && align != param.align
        {
            let (have, want) = (&param.name, param.align);
            return fault(
                Rule::Call,
                format!("{name} is aligned to {align}; expected {want}, the alignment of {have}"),
            );
        }
        let bytes = match operand {
            Operand::Reg(reg) => body.registers.get(reg.0 as usize).map(|r| u64::from(r.ty.bytes())),
            Operand::Symbol(name, _) => match scope.get(name) {
                Some(symbol) => symbol.layout().and_then(|(_, bytes)| bytes),
                None => return fault(Rule::Symbol, format!("{name} is not declared")),
            },
            Operand::Imm(_) => Some(wanted),
            _ => return fault(Rule::Operand, "a call passes .param variables, registers and immediates"),
        };
        if bytes != Some(wanted) {
            let given = bytes.map_or("an unknown number of".into(), |b| b.to_string());
            return fault(Rule::Call, format!("{given} bytes for {}; expected {wanted}", param.name));
        }
    }
    Ok(())
}
