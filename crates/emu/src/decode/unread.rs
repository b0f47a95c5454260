//! Atomics whose results no instruction reads. Compilers write `atom` where `red` would do.

use ptx::{Address, Base, Body, Instruction, Op, Operand, Reg, Statement};

/// How often the instructions of a body name each register.
pub(super) fn mentions(body: &Body) -> Vec<u32> {
    let mut counts = vec![0; body.registers.len()];
    for statement in &body.statements {
        let Statement::Inst(inst) = statement else { continue };
        inst.guard.iter().for_each(|guard| count(guard.reg, &mut counts));
        inst.operands.iter().for_each(|operand| count_all(operand, &mut counts));
    }
    counts
}

fn count(reg: Reg, counts: &mut [u32]) {
    if let Some(count) = counts.get_mut(reg.0 as usize) {
        *count += 1;
    }
}

fn count_all(operand: &Operand, counts: &mut [u32]) {
    match operand {
        Operand::Reg(reg) | Operand::Not(reg) => count(*reg, counts),
        Operand::Address(Address { base: Base::Reg(reg), .. }) => count(*reg, counts),
        Operand::Pair(a, b) => a.iter().chain(b).for_each(|reg| count(*reg, counts)),
        Operand::Vector(all) | Operand::List(all) => all.iter().for_each(|one| count_all(one, counts)),
        _ => {}
    }
}

/// Whether an instruction is an atomic whose result is named nowhere else.
pub(super) fn is_unread(inst: &Instruction, mentions: &[u32]) -> bool {
    matches!(inst.op, Op::Atom(_))
        && match inst.operands.first() {
            Some(Operand::Sink) => true,
            Some(Operand::Reg(reg)) => mentions.get(reg.0 as usize) == Some(&1),
            _ => false,
        }
}
