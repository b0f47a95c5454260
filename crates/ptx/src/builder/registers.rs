//! Sorts registers by type, so that the printed kernel declares each type once.

use crate::{Base, Body, Operand, Reg, Statement};

/// Sorts a body's registers by type and renames their uses. Registers of one type keep the order of their
/// declaration.
pub(super) fn sort(body: &mut Body) {
    let mut order: Vec<usize> = (0..body.registers.len()).collect();
    order.sort_by_key(|&old| body.registers[old].ty);
    let mut place = vec![Reg(0); order.len()];
    for (new, &old) in order.iter().enumerate() {
        place[old] = Reg(new as u32);
    }
    body.registers = order.iter().map(|&old| body.registers[old].clone()).collect();
    let rename = |reg: &mut Reg| *reg = place[reg.0 as usize];
    for statement in &mut body.statements {
        if let Statement::Inst(inst) = statement {
            if let Some(guard) = &mut inst.guard {
                rename(&mut guard.reg);
            }
            for operand in &mut inst.operands {
                visit(operand, &rename);
            }
        }
    }
}

/// Calls `rename` on every register of an operand.
fn visit(operand: &mut Operand, rename: &impl Fn(&mut Reg)) {
    match operand {
        Operand::Reg(reg) | Operand::Not(reg) => rename(reg),
        Operand::Vector(parts) | Operand::List(parts) => {
            for part in parts {
                visit(part, rename);
            }
        }
        Operand::Pair(d, p) => [d, p].into_iter().flatten().for_each(rename),
        Operand::Address(address) => {
            if let Base::Reg(reg) = &mut address.base {
                rename(reg);
            }
        }
        Operand::Sink
        | Operand::Imm(_)
        | Operand::Special(_)
        | Operand::Symbol(..)
        | Operand::Label(_)
        | Operand::Labels(_)
        | Operand::Function(_) => {}
    }
}
