//! Integer values as linear sums of registers. With these sums, the model folds addresses as the
//! compiler does.

use ptx::{
    BinaryOp, Body, Imm, Instruction, Linkage, Module, Op, Operand, Space, Statement, TernaryOp, Variable,
};
use smallvec::{SmallVec, smallvec};

use super::dataflow::writes;

/// Σ coefficient · register + constant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Linear {
    pub terms: SmallVec<[(u32, i64); 2]>,
    pub constant: i64,
}

impl Linear {
    pub(super) fn register(register: u32) -> Linear {
        Linear { terms: smallvec![(register, 1)], constant: 0 }
    }

    pub(super) fn scaled(mut self, factor: i64) -> Linear {
        self.terms.iter_mut().for_each(|(_, c)| *c = c.wrapping_mul(factor));
        self.constant = self.constant.wrapping_mul(factor);
        self
    }

    pub(super) fn plus(mut self, other: Linear) -> Linear {
        for (register, coefficient) in other.terms {
            match self.terms.iter_mut().find(|(r, _)| *r == register) {
                Some((_, c)) => *c = c.wrapping_add(coefficient),
                None => self.terms.push((register, coefficient)),
            }
        }
        self.terms.retain(|(_, c)| *c != 0);
        self.terms.sort_unstable();
        self.constant = self.constant.wrapping_add(other.constant);
        self
    }
}

/// The result of an instruction as a linear sum of its sources; `None` if it is not linear. Wrapping of
/// narrow values is ignored, as the compiler may ignore it in addresses.
pub(super) fn linear(instruction: &Instruction, base: u32) -> Option<Linear> {
    use BinaryOp as B;
    use TernaryOp as T;
    let operand = |i: usize| match instruction.operands.get(i) {
        Some(Operand::Reg(r)) => Some(Linear::register(base + r.0)),
        Some(Operand::Imm(Imm::Int(n))) => Some(Linear { constant: *n, ..Linear::default() }),
        _ => None,
    };
    let product = |a: Linear, b: Linear| match (a.terms.is_empty(), b.terms.is_empty()) {
        (true, _) => Some(b.scaled(a.constant)),
        (_, true) => Some(a.scaled(b.constant)),
        _ => None,
    };
    if instruction.guard.is_some() || !matches!(instruction.operands.first(), Some(Operand::Reg(_))) {
        return None;
    }
    match instruction.op {
        Op::Mov(ty) if !ty.is_float() => operand(1),
        Op::Cvta { .. } => operand(1),
        Op::Cvt(c) if !c.to.is_float() && !c.from.is_float() && c.to.bits() >= c.from.bits() => operand(1),
        Op::Binary(_, ty, _) | Op::Ternary(_, ty, _) if ty.is_float() => None,
        Op::Binary(B::Add, ..) => Some(operand(1)?.plus(operand(2)?)),
        Op::Binary(B::Sub, ..) => Some(operand(1)?.plus(operand(2)?.scaled(-1))),
        Op::Binary(B::MulLo | B::MulWide, ..) => product(operand(1)?, operand(2)?),
        Op::Binary(B::Shl, ..) => match operand(2)? {
            by if by.terms.is_empty() && (0..63).contains(&by.constant) => {
                Some(operand(1)?.scaled(1 << by.constant))
            }
            _ => None,
        },
        Op::Ternary(T::MadLo | T::MadWide, ..) => Some(product(operand(1)?, operand(2)?)?.plus(operand(3)?)),
        _ => None,
    }
}

/// The number of low bits known to be zero for each register of a function: the minimum over its definitions.
pub(super) fn alignments(module: &Module, body: &Body) -> Vec<u8> {
    const UNDEFINED: u8 = 63;
    let mut zeros = vec![UNDEFINED; body.registers.len()];
    let code =
        || body.statements.iter().filter_map(|s| if let Statement::Inst(i) = s { Some(i) } else { None });
    // A round only lowers the numbers. Only a counter that is halved would change after a few rounds, and
    // such counters do not occur.
    for _ in 0..16 {
        let before = zeros.clone();
        for instruction in code() {
            let known = low_zeros(module, body, instruction, &zeros);
            for r in writes(instruction) {
                let slot = &mut zeros[r.0 as usize];
                *slot = (*slot).min(known);
            }
        }
        if zeros == before {
            break;
        }
    }
    zeros.iter_mut().filter(|z| **z == UNDEFINED).for_each(|z| *z = 0);
    zeros
}

/// The alignment that ptxas gives to a variable. It places a shared array of known size at a multiple of 16
/// bytes, whatever its declared alignment (observed in the code of ptxas 13, which joins loads from arrays of
/// halves declared with alignment 2).
fn placed_at(variable: &Variable) -> u32 {
    let placed_by_ptxas = variable.space == Space::Shared && variable.linkage != Linkage::Extern;
    if placed_by_ptxas && variable.bytes() >= 16 { variable.align.max(16) } else { variable.align.max(1) }
}

fn low_zeros(module: &Module, body: &Body, instruction: &Instruction, zeros: &[u8]) -> u8 {
    let of = |i: usize| match instruction.operands.get(i) {
        Some(Operand::Reg(r)) => zeros[r.0 as usize],
        Some(Operand::Imm(Imm::Int(n))) => n.trailing_zeros().min(63) as u8,
        Some(Operand::Symbol(name, offset)) => {
            let variable = module.variables().chain(&body.variables).find(|v| v.name == *name);
            let align = variable.map_or(1, placed_at).trailing_zeros();
            align.min(offset.trailing_zeros()).min(63) as u8
        }
        _ => 0,
    };
    match (linear(instruction, 0), instruction.op) {
        (Some(sum), _) => {
            let terms =
                sum.terms.iter().map(|(r, c)| zeros[*r as usize].saturating_add(c.trailing_zeros() as u8));
            terms.chain([sum.constant.trailing_zeros() as u8]).min().unwrap_or(0).min(63)
        }
        (None, Op::Mov(_)) => of(1),
        (None, Op::Binary(BinaryOp::And, ..)) => of(1).max(of(2)),
        (None, Op::Binary(BinaryOp::Or | BinaryOp::Xor, ..)) => of(1).min(of(2)),
        (None, Op::Selp(_)) => of(1).min(of(2)),
        _ => 0,
    }
}
