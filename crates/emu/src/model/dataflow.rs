//! Registers that an instruction reads and writes.

use ptx::{Base, Instruction, Op, Operand, Reg};
use smallvec::SmallVec;

type Regs = SmallVec<[Reg; 6]>;

fn collect(operand: &Operand, into: &mut Regs) {
    match operand {
        Operand::Reg(r) | Operand::Not(r) => into.push(*r),
        Operand::Vector(parts) | Operand::List(parts) => parts.iter().for_each(|o| collect(o, into)),
        Operand::Pair(a, b) => into.extend(a.iter().chain(b).copied()),
        Operand::Address(a) => {
            if let Base::Reg(r) = a.base {
                into.push(r);
            }
        }
        _ => {}
    }
}

fn has_result(op: &Op) -> bool {
    use ptx::{BarKind, Mbarrier as M};
    match op {
        Op::St(_) | Op::Red(_) | Op::Prefetch(..) | Op::Discard(_) | Op::CpAsync(_) | Op::Stmatrix(_) => {
            false
        }
        Op::Bar { kind, .. } => !matches!(kind, BarKind::Sync | BarKind::Arrive),
        Op::Mbarrier(m) => !matches!(m, M::Init | M::Inval),
        Op::BarWarpSync | Op::BrxIdx { .. } | Op::Nanosleep | Op::CpAsyncMbarrierArrive { .. } => false,
        _ => true,
    }
}

/// Registers read, the guard's and those of addresses included.
pub(crate) fn reads(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    let first = usize::from(has_result(&instruction.op));
    instruction.operands.iter().skip(first).for_each(|o| collect(o, &mut regs));
    regs.extend(instruction.guard.iter().map(|g| g.reg));
    regs
}

/// Registers written.
pub(crate) fn writes(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    if has_result(&instruction.op) {
        instruction.operands.first().into_iter().for_each(|o| collect(o, &mut regs));
    }
    regs
}
