//! Faults put into a correct kernel on purpose, so that the gate itself can be tested: a gate that lets one of these
//! pass proves nothing.

use ptx::{
    Arg, BarKind, BinaryOp, Imm, Instruction, Item, Kernel, Op, Operand, Space, Statement, TernaryOp, Type,
};

/// A kind of fault. Each has a number of sites in a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A CTA barrier is left out.
    DropBarrier,
    /// A barrier of a warp is left out.
    DropWarpBarrier,
    /// A wait for asynchronous copies is left out.
    DropAsyncWait,
    /// A memory or proxy fence is left out.
    DropFence,
    /// An asynchronous copy is left out, so that its stage keeps what was there.
    DropCopy,
    /// A constant that a number is compared with (a bound, a mask's edge) is one too large.
    BoundTooLarge,
    /// A comparison with a bound takes one element too many: `<` becomes `≤`, `≥` becomes `>`.
    ComparisonOffByOne,
    /// A product that overwrites one of its factors (`x *= y`, the rescale of an accumulator) is left out.
    SkipRescale,
    /// A constant of a multiplication in f32 (the softmax scale), or else an f32 argument, is an eighth too large.
    WrongScale,
    /// A store to global memory is left out.
    SkipStore,
}

impl Fault {
    /// Every kind.
    pub const ALL: [Fault; 10] = [
        Fault::DropBarrier,
        Fault::DropWarpBarrier,
        Fault::DropAsyncWait,
        Fault::DropFence,
        Fault::DropCopy,
        Fault::BoundTooLarge,
        Fault::ComparisonOffByOne,
        Fault::SkipRescale,
        Fault::WrongScale,
        Fault::SkipStore,
    ];

    /// Whether an instruction is a site of this fault.
    fn applies(self, inst: &Instruction) -> bool {
        match (self, inst.op) {
            (Fault::DropBarrier, Op::Bar { kind, .. }) => kind == BarKind::Sync,
            (Fault::DropWarpBarrier, Op::BarWarpSync) => true,
            (Fault::DropAsyncWait, Op::CpAsyncWaitGroup | Op::CpAsyncWaitAll) => true,
            (Fault::DropFence, Op::Fence(..) | Op::Membar(_) | Op::FenceProxy(_)) => true,
            (Fault::DropCopy, Op::CpAsync(_)) => true,
            (Fault::BoundTooLarge, Op::Setp { ty, .. }) => {
                ty.is_integer() && matches!(inst.operands.last(), Some(Operand::Imm(Imm::Int(_))))
            }
            (Fault::ComparisonOffByOne, Op::Setp { cmp, ty, .. }) => {
                ty.is_integer() && widened(cmp).is_some()
            }
            (Fault::SkipRescale, Op::Binary(BinaryOp::Mul, Type::F32 | Type::F16x2 | Type::F32x2, _)) => {
                inst.operands.iter().skip(1).any(|o| Some(o) == inst.operands.first())
            }
            (Fault::WrongScale, Op::Binary(BinaryOp::Mul, Type::F32, _))
            | (Fault::WrongScale, Op::Ternary(TernaryOp::Fma, Type::F32, _)) => {
                inst.operands.iter().any(|o| matches!(o, Operand::Imm(Imm::F32(_))))
            }
            (Fault::SkipStore, Op::St(memory)) => memory.space == Space::Global,
            _ => false,
        }
    }

    /// The instruction with the fault; `None` when it is left out.
    fn edit(self, inst: &Instruction) -> Option<Instruction> {
        let mut edited = inst.clone();
        match self {
            Fault::BoundTooLarge => {
                if let Some(Operand::Imm(Imm::Int(bound))) = edited.operands.last_mut() {
                    *bound = bound.wrapping_add(1);
                }
            }
            Fault::ComparisonOffByOne => {
                if let Op::Setp { cmp, .. } = &mut edited.op {
                    *cmp = widened(*cmp).unwrap_or(*cmp);
                }
            }
            Fault::WrongScale => {
                for operand in &mut edited.operands {
                    if let Operand::Imm(Imm::F32(bits)) = operand {
                        *bits = (f32::from_bits(*bits) * 1.125).to_bits();
                    }
                }
            }
            Fault::DropBarrier
            | Fault::DropWarpBarrier
            | Fault::DropAsyncWait
            | Fault::DropFence
            | Fault::DropCopy
            | Fault::SkipRescale
            | Fault::SkipStore => return None,
        }
        Some(edited)
    }
}

/// The comparison that also (or no longer) holds for equal numbers.
fn widened(cmp: ptx::CmpOp) -> Option<ptx::CmpOp> {
    use ptx::CmpOp::{Ge, Gt, Hi, Hs, Le, Lo, Ls, Lt};
    match cmp {
        Lt => Some(Le),
        Le => Some(Lt),
        Gt => Some(Ge),
        Ge => Some(Gt),
        Lo => Some(Ls),
        Ls => Some(Lo),
        Hi => Some(Hs),
        Hs => Some(Hi),
        _ => None,
    }
}

/// Number of places in the entry where the fault can be put.
pub fn sites(kernel: &Kernel, fault: Fault) -> usize {
    let statements = kernel.module.function(&kernel.entry).and_then(|f| f.body.as_ref());
    let in_code = statements.map_or(0, |body| {
        body.statements.iter().filter(|s| matches!(s, Statement::Inst(inst) if fault.applies(inst))).count()
    });
    in_code + scale_arguments(kernel, fault)
}

/// The kernel with the fault at its `site`-th place; `None` when there is no such place.
pub fn mutant(kernel: &Kernel, fault: Fault, site: usize) -> Option<Kernel> {
    let mut mutant = kernel.clone();
    let arguments = scale_arguments(kernel, fault);
    if site < arguments {
        let factors = mutant.args.iter_mut().filter_map(|a| if let Arg::F32(x) = a { Some(x) } else { None });
        factors.into_iter().nth(site).map(|x| *x *= 1.125)?;
        return Some(mutant);
    }
    let entry = mutant.module.items.iter_mut().find_map(|item| match item {
        Item::Function(f) if *f.name == *kernel.entry => f.body.as_mut(),
        Item::Function(_) | Item::Variable(_) => None,
    })?;
    let places = entry.statements.iter().enumerate().filter_map(|(at, s)| match s {
        Statement::Inst(inst) if fault.applies(inst) => Some((at, fault.edit(inst))),
        _ => None,
    });
    match places.into_iter().nth(site - arguments)? {
        (at, Some(edited)) => entry.statements[at] = Statement::Inst(edited),
        (at, None) => {
            entry.statements.remove(at);
        }
    }
    Some(mutant)
}

/// A kernel may take its scale as an argument.
fn scale_arguments(kernel: &Kernel, fault: Fault) -> usize {
    let count = || kernel.args.iter().filter(|a| matches!(a, Arg::F32(_))).count();
    if fault == Fault::WrongScale { count() } else { 0 }
}
