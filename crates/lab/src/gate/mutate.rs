//! Faults put into a correct kernel on purpose, so that the gate itself can be tested: a gate that lets one of these
//! pass proves nothing.

use ptx::{
    Arg, BarKind, BinaryOp, BulkRoute, CmpOp, FloatMods, GridDependency, Imm, Instruction, Item, Kernel,
    Mbarrier, MbarrierOp, Op, Operand, Space, Statement, TernaryOp, Type,
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
    /// A memory or proxy fence is left out, that of an mbarrier's initialisation included.
    DropFence,
    /// An arrival on an mbarrier or a named barrier is left out.
    DropArrival,
    /// An mbarrier is not told of the bytes that are to come.
    DropExpectation,
    /// A wait for a phase of an mbarrier is left out.
    DropPhaseWait,
    /// A wait for a phase of an mbarrier asks for the other one, so that it goes on with what the stage held before.
    WrongPhase,
    /// An arrival at the cluster's barrier, or a wait there, is left out.
    DropClusterBarrier,
    /// The end of a group of bulk copies, or a wait for one, is left out.
    DropBulkWait,
    /// A `wgmma.fence` is left out.
    DropProductFence,
    /// The end of a group of products (`wgmma.commit_group`) is left out.
    DropProductGroup,
    /// A wait for products (`wgmma.wait_group`) is left out.
    DropProductWait,
    /// A wait for the end of the grid before (`griddepcontrol.wait`) is left out.
    DropGridWait,
    /// An asynchronous copy is left out, so that its stage keeps what was there.
    DropCopy,
    /// A bulk copy lands behind its slot.
    WrongSlot,
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
    pub const ALL: [Fault; 21] = [
        Fault::DropBarrier,
        Fault::DropWarpBarrier,
        Fault::DropAsyncWait,
        Fault::DropFence,
        Fault::DropArrival,
        Fault::DropExpectation,
        Fault::DropPhaseWait,
        Fault::WrongPhase,
        Fault::DropClusterBarrier,
        Fault::DropBulkWait,
        Fault::DropProductFence,
        Fault::DropProductGroup,
        Fault::DropProductWait,
        Fault::DropGridWait,
        Fault::DropCopy,
        Fault::WrongSlot,
        Fault::BoundTooLarge,
        Fault::ComparisonOffByOne,
        Fault::SkipRescale,
        Fault::WrongScale,
        Fault::SkipStore,
    ];

    /// Whether it takes away what orders memory, copies and products; the others change what is computed, and from what.
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

    /// Whether an instruction is a site of this fault.
    fn applies(self, inst: &Instruction) -> bool {
        match (self, inst.op) {
            (Fault::DropBarrier, Op::Bar { kind, .. }) => kind == BarKind::Sync,
            (Fault::DropWarpBarrier, Op::BarWarpSync) => true,
            (Fault::DropAsyncWait, Op::CpAsyncWaitGroup | Op::CpAsyncWaitAll) => true,
            (Fault::DropFence, Op::Fence(..) | Op::Membar(_) | Op::FenceProxy(_) | Op::FenceMbarrierInit) => {
                true
            }
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

    /// What stands in the place of the instruction; nothing when it is left out.
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
                // The predicate holds, and so no loop asks again.
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

/// What a product multiplies; not what is added to it.
fn factors(product: &Instruction) -> &[Operand] {
    &product.operands[1..3]
}

/// Bytes by which a copy misses its slot: a pattern of the 128-byte swizzle.
const SLOT_ERROR: i64 = 1024;

/// Whether a bulk copy fills shared memory.
fn brings(op: &Op) -> bool {
    match op {
        Op::CpAsyncBulk(copy) => copy.route != BulkRoute::CtaToGlobal,
        Op::CpAsyncBulkTensor(copy) => copy.route != BulkRoute::CtaToGlobal,
        _ => false,
    }
}

/// The wait for the phase of the other parity.
fn wrong_phase(mut wait: Instruction) -> Vec<Instruction> {
    match &mut wait.operands[2] {
        Operand::Imm(Imm::Int(parity)) => {
            *parity ^= 1;
            vec![wait]
        }
        parity => {
            // The register has its value back before anything else reads it.
            let operands = [parity.clone(), parity.clone(), Operand::Imm(Imm::Int(1))];
            let mut flip = wait.clone();
            flip.op = Op::Binary(BinaryOp::Xor, Type::B32, FloatMods::default());
            flip.operands = operands.into_iter().collect();
            vec![flip.clone(), wait, flip]
        }
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
    let (at, edited) = places.into_iter().nth(site - arguments)?;
    entry.statements.splice(at..=at, edited.into_iter().map(Statement::Inst));
    Some(mutant)
}

/// A kernel may take its scale as an argument.
fn scale_arguments(kernel: &Kernel, fault: Fault) -> usize {
    let count = || kernel.args.iter().filter(|a| matches!(a, Arg::F32(_))).count();
    if fault == Fault::WrongScale { count() } else { 0 }
}
