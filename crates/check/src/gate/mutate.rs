//! Inserts faults into a correct kernel to test the gate itself: the gate must not pass a mutant.

use ptx::{
    Arg, BarKind, BinaryOp, BulkRoute, CmpOp, FloatMods, GridDependency, Guard, Imm, Instruction, Item,
    Kernel, Mbarrier, MbarrierOp, Op, Operand, Reg, Register, Space, Statement, TernaryOp, Type,
};

/// A kind of fault. A kernel has a number of sites for each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::VariantArray)]
pub enum Fault {
    /// Removes a CTA barrier.
    DropBarrier,
    /// Removes a warp barrier.
    DropWarpBarrier,
    /// Removes a wait for asynchronous copies.
    DropAsyncWait,
    /// Removes a memory or proxy fence, or the fence of an mbarrier's initialisation.
    DropFence,
    /// Removes an arrival on an mbarrier or a named barrier.
    DropArrival,
    /// Removes the `expect_tx` of an mbarrier.
    DropExpectation,
    /// Removes a wait for a phase of an mbarrier.
    DropPhaseWait,
    /// Makes a wait on an mbarrier use the other phase, so that the thread proceeds with the stage's old
    /// contents.
    WrongPhase,
    /// Removes an arrival or a wait at the cluster barrier.
    DropClusterBarrier,
    /// Removes the commit of a group of bulk copies, or a wait for one.
    DropBulkWait,
    /// Removes a `wgmma.fence`.
    DropProductFence,
    /// Removes a `wgmma.commit_group`.
    DropProductGroup,
    /// Removes a `wgmma.wait_group`.
    DropProductWait,
    /// Removes a wait for the previous grid (`griddepcontrol.wait`).
    DropGridWait,
    /// Removes an asynchronous copy, so that its stage keeps the old contents.
    DropCopy,
    /// Moves the destination of a bulk copy beyond its slot.
    WrongSlot,
    /// Adds one to a constant in a comparison (a bound, or the edge of a mask).
    BoundTooLarge,
    /// Makes a comparison include one more or one fewer element: `<` becomes `≤`, `≥` becomes `>`.
    ComparisonOffByOne,
    /// Removes a product that overwrites one of its factors (`x *= y`, the rescale of an accumulator).
    SkipRescale,
    /// Makes a constant factor in f32 (the softmax scale), or else an f32 argument, an eighth too large.
    WrongScale,
    /// Removes a store to global memory.
    SkipStore,
}

impl Fault {
    pub const ALL: &'static [Fault] = <Fault as strum::VariantArray>::VARIANTS;

    /// Whether the fault removes ordering of memory accesses, copies or products. The other faults change the
    /// computation.
    pub const fn orders(self) -> bool {
        !matches!(
            self,
            Fault::DropCopy
                | Fault::WrongSlot
                | Fault::BoundTooLarge
                | Fault::ComparisonOffByOne
                | Fault::SkipRescale
                | Fault::WrongScale
                | Fault::SkipStore
        )
    }

    pub(super) fn applies(self, inst: &Instruction) -> bool {
        match (self, inst.op) {
            (Fault::DropBarrier, Op::Bar { kind, .. }) => kind == BarKind::Sync,
            (Fault::DropWarpBarrier, Op::BarWarpSync) => true,
            (Fault::DropAsyncWait, Op::CpAsyncWaitGroup | Op::CpAsyncWaitAll) => true,
            (Fault::DropFence, Op::Fence(..) | Op::Membar(_) | Op::FenceProxy(_)) => true,
            (Fault::DropArrival, Op::Bar { kind, .. }) => kind == BarKind::Arrive,
            (Fault::DropArrival, Op::Mbarrier(Mbarrier { op, .. })) => {
                matches!(op, MbarrierOp::Arrive | MbarrierOp::ArriveNoComplete)
            }
            (Fault::DropExpectation, Op::Mbarrier(Mbarrier { op, .. })) => {
                let nothing = inst.operands.get(2) == Some(&Operand::Imm(Imm::Int(0)));
                op == MbarrierOp::ExpectTx || op == MbarrierOp::ArriveExpectTx && !nothing
            }
            (Fault::DropPhaseWait, Op::Mbarrier(Mbarrier { op, .. })) => op.waits(),
            (Fault::WrongPhase, Op::Mbarrier(Mbarrier { op, .. })) => {
                matches!(op, MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity)
            }
            (Fault::DropClusterBarrier, Op::BarrierCluster(_)) => true,
            (Fault::DropBulkWait, Op::CpAsyncBulkCommitGroup | Op::CpAsyncBulkWaitGroup { .. }) => true,
            (Fault::DropProductFence, Op::WgmmaFence) => true,
            (Fault::DropProductGroup, Op::WgmmaCommitGroup) => true,
            (Fault::DropProductWait, Op::WgmmaWaitGroup) => true,
            (Fault::DropGridWait, Op::Griddepcontrol(GridDependency::Wait)) => true,
            (Fault::DropCopy, Op::CpAsync(_)) => true,
            (Fault::DropCopy | Fault::WrongSlot, op) if brings(&op) => true,
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
                factors(inst).iter().any(|o| matches!(o, Operand::Imm(Imm::F32(_))))
            }
            (Fault::SkipStore, Op::St(memory)) => memory.space == Space::Global,
            _ => false,
        }
    }

    /// The instructions that replace the one at the site; empty when it is removed.
    fn edit(self, inst: &Instruction) -> Vec<Instruction> {
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
                for operand in &mut edited.operands[1..3] {
                    if let Operand::Imm(Imm::F32(bits)) = operand {
                        *bits = (f32::from_bits(*bits) * 1.125).to_bits();
                    }
                }
            }
            Fault::DropExpectation if matches!(inst.op, Op::Mbarrier(m) if m.op == MbarrierOp::ArriveExpectTx) =>
            {
                edited.operands[2] = Operand::Imm(Imm::Int(0));
            }
            Fault::DropPhaseWait => {
                // The predicate is set to true, so that no loop repeats the wait.
                edited.op = Op::Setp { cmp: CmpOp::Eq, combine: None, ty: Type::U32, ftz: false };
                edited.operands.truncate(1);
                edited.operands.extend([Operand::Imm(Imm::Int(0)), Operand::Imm(Imm::Int(0))]);
            }
            Fault::WrongPhase => return wrong_phase(edited),
            Fault::WrongSlot => {
                if let Some(Operand::Address(place)) = edited.operands.first_mut() {
                    place.offset += SLOT_ERROR;
                }
            }
            Fault::DropBarrier
            | Fault::DropWarpBarrier
            | Fault::DropAsyncWait
            | Fault::DropFence
            | Fault::DropArrival
            | Fault::DropExpectation
            | Fault::DropClusterBarrier
            | Fault::DropBulkWait
            | Fault::DropProductFence
            | Fault::DropProductGroup
            | Fault::DropProductWait
            | Fault::DropGridWait
            | Fault::DropCopy
            | Fault::SkipRescale
            | Fault::SkipStore => return Vec::new(),
        }
        vec![edited]
    }
}

/// The factors of a product, without the operand that is added.
fn factors(product: &Instruction) -> &[Operand] {
    &product.operands[1..3]
}

/// Offset of a misplaced copy, bytes: one pattern of the 128-byte swizzle.
const SLOT_ERROR: i64 = 1024;

/// Whether a bulk copy writes shared memory.
fn brings(op: &Op) -> bool {
    match op {
        Op::CpAsyncBulk(copy) => copy.route != BulkRoute::CtaToGlobal,
        Op::CpAsyncBulkTensor(copy) => copy.route != BulkRoute::CtaToGlobal,
        _ => false,
    }
}

/// The wait with the other phase parity.
fn wrong_phase(mut wait: Instruction) -> Vec<Instruction> {
    match &mut wait.operands[2] {
        Operand::Imm(Imm::Int(parity)) => {
            *parity ^= 1;
            vec![wait]
        }
        parity => {
            // The register is restored before any other instruction reads it.
            let operands = [parity.clone(), parity.clone(), Operand::Imm(Imm::Int(1))];
            let mut flip = wait.clone();
            flip.op = Op::Binary(BinaryOp::Xor, Type::B32, FloatMods::default());
            flip.operands = operands.into_iter().collect();
            vec![flip.clone(), wait, flip]
        }
    }
}

/// The comparison with equality included instead of excluded, or the reverse.
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

/// Number of sites of a fault in the entry and its arguments.
pub fn sites(kernel: &Kernel, fault: Fault) -> usize {
    let entry = kernel.module.function(&kernel.entry);
    let in_code = entry.map_or(0, |f| f.instructions().filter(|inst| fault.applies(inst)).count());
    in_code + scale_arguments(kernel, fault)
}

/// The kernel with the fault at site number `site`; `None` when there is no such site.
pub fn mutant(kernel: &Kernel, fault: Fault, site: usize) -> Option<Kernel> {
    let arguments = scale_arguments(kernel, fault);
    if site < arguments {
        let mut mutant = kernel.clone();
        let factors = mutant.args.iter_mut().filter_map(|a| if let Arg::F32(x) = a { Some(x) } else { None });
        factors.into_iter().nth(site).map(|x| *x *= 1.125)?;
        return Some(mutant);
    }
    replaced(kernel, fault, site - arguments, |inst, _| Some(fault.edit(inst)))
}

/// The kernel without the fault, with a trap for each thread whose comparison at the site would have another
/// result with the fault. `None` for a fault that changes no comparison.
pub fn witness(kernel: &Kernel, fault: Fault, site: usize) -> Option<Kernel> {
    replaced(kernel, fault, site.checked_sub(scale_arguments(kernel, fault))?, |inst, registers| {
        let edited = fault.edit(inst);
        let (Op::Setp { .. }, [changed]) = (inst.op, &edited[..]) else { return None };
        let mut predicate = |name: &str| {
            registers.push(Register { name: name.into(), ty: Type::Pred });
            Reg(registers.len() as u32 - 1)
        };
        let [right, wrong, differ] = ["%right", "%wrong", "%differ"].map(&mut predicate);
        let into = |compare: &Instruction, result: Reg| {
            let mut compare = compare.clone();
            compare.operands[0] = result.into();
            compare
        };
        let with = |guard, op, operands: &[Operand]| Instruction {
            guard,
            op,
            operands: operands.iter().cloned().collect(),
            line: inst.line,
        };
        // False for a thread that the guard excludes.
        let equal = Op::Setp { cmp: CmpOp::Ne, combine: None, ty: Type::U32, ftz: false };
        let zero = || Operand::Imm(Imm::Int(0));
        let xor = Op::Binary(BinaryOp::Xor, Type::Pred, FloatMods::default());
        Some(vec![
            with(None, equal, &[differ.into(), zero(), zero()]),
            into(inst, right),
            into(changed, wrong),
            with(inst.guard, xor, &[differ.into(), right.into(), wrong.into()]),
            with(Some(Guard { reg: differ, negated: false }), Op::Trap, &[]),
            inst.clone(),
        ])
    })
}

/// The kernel with other instructions in place of the one at a site in the code.
fn replaced(
    kernel: &Kernel,
    fault: Fault,
    site: usize,
    by: impl FnOnce(&Instruction, &mut Vec<Register>) -> Option<Vec<Instruction>>,
) -> Option<Kernel> {
    let mut module = kernel.module.clone().into_module();
    let entry = module.items.iter_mut().find_map(|item| match item {
        Item::Function(f) if *f.name == *kernel.entry => f.body.as_mut(),
        Item::Function(_) | Item::Variable(_) => None,
    })?;
    let mut places = entry.statements.iter().enumerate().filter_map(|(at, s)| match s {
        Statement::Inst(inst) if fault.applies(inst) => Some((at, inst.clone())),
        _ => None,
    });
    let (at, inst) = places.nth(site)?;
    let instructions = by(&inst, &mut entry.registers)?;
    entry.statements.splice(at..=at, instructions.into_iter().map(Statement::Inst));
    Some(Kernel { module: module.assume_verified(), ..kernel.clone() })
}

/// Number of f32 arguments, which may carry the softmax scale.
fn scale_arguments(kernel: &Kernel, fault: Fault) -> usize {
    let count = || kernel.args.iter().filter(|a| matches!(a, Arg::F32(_))).count();
    if fault == Fault::WrongScale { count() } else { 0 }
}
