//! Finds plain loads that give a loop around a compare-and-swap its first value, as in CUDA's own `atomicAdd`
//! for `double`. The load races with the swaps of other threads. An old value costs one more round.

use std::collections::HashSet;

use ptx::{AtomicOp, Instruction, Kernel, MemSem, Op, Operand, Reg, Statement};

use crate::report::{Hazard, HazardKind};

/// Reports races of such a load with a swap as [`HazardKind::CasSeed`].
pub fn tell_seeds(kernel: &Kernel, hazards: &mut [Hazard]) {
    if !hazards.iter().any(|hazard| hazard.kind == HazardKind::Race) {
        return;
    }
    let mut seeds = HashSet::new();
    for body in kernel.module.functions().filter_map(|function| function.body.as_ref()) {
        let instructions: Vec<&Instruction> = body
            .statements
            .iter()
            .filter_map(|statement| match statement {
                Statement::Inst(inst) => Some(inst),
                Statement::Label(_) | Statement::Pragma(_) => None,
            })
            .collect();
        for load in instructions.iter().filter(|inst| is_plain_load(inst)) {
            seeds.extend(swaps(load, &instructions).into_iter().map(|swap| (load.line, swap)));
        }
    }
    for hazard in hazards.iter_mut().filter(|hazard| hazard.kind == HazardKind::Race) {
        let Some(other) = hazard.other_line else { continue };
        if seeds.contains(&(hazard.line, other)) || seeds.contains(&(other, hazard.line)) {
            hazard.kind = HazardKind::CasSeed;
            hazard.message += "; the value is only compared by a compare-and-swap";
        }
    }
}

fn is_plain_load(inst: &Instruction) -> bool {
    let plain = |m: &ptx::Memory| matches!(m.sem, MemSem::Default | MemSem::Weak);
    matches!(&inst.op, Op::Ld(m) if plain(m)) && matches!(inst.operands.first(), Some(Operand::Reg(_)))
}

/// The lines of the swaps that compare the loaded value; none if anything but arithmetic, branches and these
/// swaps uses it. The order of instructions is not regarded, so that a register with two uses counts as both.
fn swaps(load: &Instruction, instructions: &[&Instruction]) -> Vec<u32> {
    let mut values: HashSet<Reg> = HashSet::new();
    load.registers_written(|reg| values.extend([reg]));
    loop {
        let known = values.len();
        let mut lines = Vec::new();
        for inst in instructions {
            let mut is_used = false;
            inst.registers_read(|reg| is_used |= values.contains(&reg));
            if !is_used {
                continue;
            }
            match inst.op {
                Op::Atom(atomic) if atomic.op == AtomicOp::Cas => {
                    let [_, Operand::Address(address), Operand::Reg(compared), ..] = &inst.operands[..]
                    else {
                        return Vec::new();
                    };
                    if matches!(address.base, ptx::Base::Reg(reg) if values.contains(&reg)) {
                        return Vec::new();
                    }
                    // Without the comparison, the new value would depend on an old one.
                    if !values.contains(compared) {
                        return Vec::new();
                    }
                    lines.push(inst.line);
                }
                Op::Bra { .. } => {}
                Op::Mov(_)
                | Op::Unary(..)
                | Op::Binary(..)
                | Op::Ternary(..)
                | Op::Cvt(_)
                | Op::Selp(_)
                | Op::Setp { .. }
                | Op::Lop3(_)
                | Op::Shf(..)
                | Op::Prmt(_)
                | Op::Bfe(_)
                | Op::Bfi(_) => inst.registers_written(|reg| values.extend([reg])),
                _ => return Vec::new(),
            }
        }
        if values.len() == known {
            return lines;
        }
    }
}
