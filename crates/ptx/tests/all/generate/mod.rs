//! Generates modules from a sequence of numbers: every operation with arbitrary modifiers, and operands of
//! the kinds in its signature. The modules need not be legal, only printable.

use flashcore_ptx::*;

/// Numbers that make the choices, used in order and repeated from the start.
pub struct Choices {
    numbers: Vec<u32>,
    at: usize,
}

impl Choices {
    pub fn new(numbers: Vec<u32>) -> Choices {
        Choices { numbers, at: 0 }
    }

    fn number(&mut self) -> u32 {
        self.at += 1;
        // Mixed with the position, so that repeated numbers give different choices.
        self.numbers[self.at % self.numbers.len()].wrapping_mul(2_654_435_761).wrapping_add(self.at as u32)
            >> 3
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.number() as usize % values.len()]
    }

    fn named<T: Copy>(&mut self, names: &[(T, &str)]) -> T {
        self.of(names).0
    }

    fn flag(&mut self) -> bool {
        self.number().is_multiple_of(2)
    }

    fn maybe<T>(&mut self, value: impl FnOnce(&mut Choices) -> T) -> Option<T> {
        if self.flag() { Some(value(self)) } else { None }
    }
}

const ROUNDINGS: [Rounding; 4] = [Rounding::Rn, Rounding::Rz, Rounding::Rm, Rounding::Rp];
const SPACES: [Space; 7] = [
    Space::Generic,
    Space::Global,
    Space::Shared,
    Space::SharedCluster,
    Space::Local,
    Space::Const,
    Space::Param,
];

fn ty(c: &mut Choices) -> Type {
    c.of(&Type::ALL)
}

fn mods(c: &mut Choices) -> FloatMods {
    let rounding = Precision::Rounded(c.of(&ROUNDINGS));
    FloatMods {
        precision: c.of(&[Precision::Unspecified, Precision::Approx, Precision::Full, rounding]),
        ftz: c.flag(),
        sat: c.flag(),
        relu: c.flag(),
        nan: c.flag(),
        xorsign_abs: c.flag(),
        abs: c.flag(),
    }
}

fn ordering(c: &mut Choices) -> (MemSem, Option<Scope>) {
    use MemSem::{AcqRel, Acquire, Default, Mmio, Relaxed, Release, Volatile, Weak};
    (
        c.of(&[Default, Weak, Volatile, Relaxed, Acquire, Release, AcqRel, Mmio]),
        c.maybe(|c| c.named(Scope::NAMES)),
    )
}

fn memory(c: &mut Choices, ldu: bool) -> Memory {
    let (sem, scope) = ordering(c);
    Memory {
        sem,
        scope,
        space: c.of(&SPACES),
        ty: ty(c),
        vector: c.of(&[1, 2, 4, 8]),
        cache: c.maybe(|c| c.named(CacheOp::NAMES)),
        non_coherent: c.flag(),
        l1: c.maybe(|c| c.named(Eviction::NAMES)),
        l2: c.maybe(|c| c.named(Eviction::NAMES)),
        l2_prefetch: c.maybe(|c| c.of(&[64, 128, 256])),
        cache_hint: c.flag(),
        unified: c.flag(),
        ldu,
    }
}

fn atomic(c: &mut Choices) -> Atomic {
    let (sem, scope) = ordering(c);
    Atomic {
        sem,
        scope,
        op: c.named(AtomicOp::NAMES),
        space: c.of(&SPACES),
        ty: ty(c),
        vector: c.of(&[1, 2, 4]),
        noftz: c.flag(),
        cache_hint: c.flag(),
    }
}

fn matrix(c: &mut Choices) -> MatrixAccess {
    let space = c.of(&[Space::Generic, Space::Shared]);
    MatrixAccess {
        shape: c.named(MatrixShape::NAMES),
        count: c.of(&[1, 2, 4]),
        trans: c.flag(),
        space,
        ty: ty(c),
    }
}

fn product(c: &mut Choices) -> Mma {
    let mut mma = Mma::new(
        MmaShape { m: c.of(&[8, 16]), n: 8, k: c.of(&[4, 8, 16, 32, 64]) },
        c.of(&[Type::F32, Type::F16, Type::S32]),
        c.of(&[Type::F16, Type::Bf16, Type::Tf32, Type::E4m3, Type::S8, Type::U4]),
        c.of(&[Type::F16, Type::Bf16, Type::Tf32, Type::E5m2, Type::U8, Type::S4]),
        c.of(&[Type::F32, Type::F16, Type::S32]),
    );
    mma.satfinite = c.flag();
    mma.kind_f8f6f4 = c.flag();
    mma.bits = c.maybe(|c| c.named(BitOp::NAMES));
    mma
}

fn wmma_shape(c: &mut Choices) -> MmaShape {
    MmaShape { m: c.of(&[8, 16, 32]), n: c.of(&[8, 16, 32]), k: c.of(&[4, 8, 16, 32, 128]) }
}

fn fragment(c: &mut Choices) -> WmmaAccess {
    WmmaAccess {
        matrix: c.of(&[WmmaMatrix::A, WmmaMatrix::B, WmmaMatrix::Accumulator]),
        order: c.named(MatrixOrder::NAMES),
        shape: wmma_shape(c),
        space: c.of(&SPACES),
        ty: ty(c),
    }
}

fn wmma(c: &mut Choices) -> Wmma {
    // The text names both A and B or, for two f16, neither.
    let (a, b) = c.of(&[(Type::F16, Type::F16), (Type::Bf16, Type::Tf32), (Type::U8, Type::F16)]);
    Wmma {
        a_order: c.named(MatrixOrder::NAMES),
        b_order: c.named(MatrixOrder::NAMES),
        shape: wmma_shape(c),
        rounding: c.maybe(|c| c.of(&ROUNDINGS)),
        d: ty(c),
        a,
        b,
        c: ty(c),
        satfinite: c.flag(),
        bits: c.maybe(|c| c.named(BitOp::NAMES)),
    }
}

fn mbarrier(c: &mut Choices) -> Mbarrier {
    let mbarrier = Mbarrier::new(c.named(MbarrierOp::NAMES));
    if mbarrier.op == MbarrierOp::PendingCount {
        return mbarrier;
    }
    let mbarrier =
        Mbarrier { space: c.of(&[Space::Generic, Space::Shared, Space::SharedCluster]), ..mbarrier };
    if !(mbarrier.op.arrives() || mbarrier.op.waits()) {
        return mbarrier;
    }
    let sem = c.of(&[mbarrier.sem, MemSem::Relaxed]);
    Mbarrier { sem, scope: c.of(&[Scope::Cta, Scope::Cluster]), ..mbarrier }
}

fn bulk(c: &mut Choices) -> Op {
    let (route, dims) = (c.of(&BulkRoute::ALL), 1 + (c.number() % 5) as u8);
    let tensor = c.of(&[BulkRoute::GlobalToCluster, BulkRoute::GlobalToCta, BulkRoute::CtaToGlobal]);
    let (multicast, cache_hint) = (c.flag(), c.flag());
    let op = c.named(AtomicOp::NAMES);
    let space = c.of(&[Space::Generic, Space::SharedCluster]);
    match c.number() % 10 {
        0 => Op::CpAsyncBulk(BulkCopy { route, multicast, cache_hint }),
        1 => Op::CpReduceAsyncBulk(BulkReduce { route, op, ty: ty(c), noftz: c.flag(), cache_hint }),
        2 | 3 => Op::CpAsyncBulkTensor(BulkTensor { route: tensor, dims, multicast, cache_hint }),
        4 => Op::CpReduceAsyncBulkTensor(BulkTensorReduce { dims, op, cache_hint }),
        5 => Op::CpAsyncBulkPrefetch { cache_hint },
        6 => Op::CpAsyncBulkPrefetchTensor { dims, cache_hint },
        7 => c.of(&[Op::CpAsyncBulkCommitGroup, Op::CpAsyncBulkWaitGroup { read: multicast }]),
        8 => Op::StAsync(StAsync { space, vector: c.of(&[1, 2, 4]), ty: ty(c) }),
        _ => Op::RedAsync(RedAsync { space, op, ty: ty(c) }),
    }
}

fn wgmma(c: &mut Choices) -> Wgmma {
    let source = c.of(&[WgmmaSource::Registers, WgmmaSource::Shared]);
    let input =
        c.of(&[Type::F16, Type::Bf16, Type::Tf32, Type::E4m3, Type::E5m2, Type::S8, Type::U8, Type::B1]);
    let sums = c.of(&[Type::F32, Type::F16, Type::S32]);
    Wgmma { satfinite: c.flag(), ..Wgmma::new(c.of(&[8, 64, 256]), sums, input, source) }
}

fn tensor_memory(c: &mut Choices) -> Op {
    let group = c.named(CtaGroup::NAMES);
    let moved = TensorMove {
        shape: c.named(TensorMoveShape::NAMES),
        repeat: c.of(&[1, 2, 16, 32]),
        halves: c.flag(),
    };
    let kind = c.named(TensorKind::NAMES);
    let scales = c.maybe(|c| c.named(ScaleVector::NAMES)).filter(|_| kind.has_block_scales());
    let masks_lanes = c.flag() && !kind.has_block_scales();
    match c.number() % 11 {
        0 => Op::Tcgen05Alloc { group, space: c.of(&[Space::Generic, Space::Shared]) },
        1 => Op::Tcgen05Dealloc { group },
        2 => Op::Tcgen05Relinquish { group },
        3 => Op::Tcgen05Ld(moved),
        4 => Op::Tcgen05St(moved),
        5 => Op::Tcgen05Wait { stores: c.flag() },
        6 => Op::Tcgen05Fence { after: c.flag() },
        7 => Op::Tcgen05Commit {
            group,
            space: c.of(&[Space::Generic, Space::SharedCluster]),
            multicast: c.flag(),
        },
        8 => Op::Tcgen05Cp {
            group,
            shape: c.named(TensorCopyShape::NAMES),
            unpack: c.maybe(|c| c.named(TensorUnpack::NAMES)),
        },
        9 => Op::Tcgen05Shift { group },
        _ => Op::Tcgen05Mma(TensorProduct {
            group,
            kind,
            stationary: c.flag(),
            a_in_tensor_memory: c.flag(),
            masks_lanes,
            scales,
        }),
    }
}

fn conversion(c: &mut Choices) -> Cvt {
    let (float, integer) = (CvtRounding::Float(c.of(&ROUNDINGS)), CvtRounding::Integer(c.of(&ROUNDINGS)));
    Cvt {
        to: ty(c),
        from: ty(c),
        rounding: c.maybe(|c| c.of(&[float, integer, CvtRounding::Rna])),
        ftz: c.flag(),
        saturation: c.of(&[CvtSaturation::None, CvtSaturation::Sat, CvtSaturation::SatFinite]),
        relu: c.flag(),
    }
}

fn arithmetic(c: &mut Choices) -> Op {
    let combine = c.maybe(|c| c.named(BoolOp::NAMES));
    match c.number() % 19 {
        0 => {
            let op = c.named(UnaryOp::NAMES);
            // `bfind` accepts no floating-point modifiers.
            let mods =
                if matches!(op, UnaryOp::Bfind | UnaryOp::BfindShiftamt) { FloatMods::NONE } else { mods(c) };
            Op::Unary(op, ty(c), mods)
        }
        1 => Op::Binary(c.named(BinaryOp::NAMES), ty(c), mods(c)),
        2 => Op::Ternary(c.named(TernaryOp::NAMES), ty(c), mods(c)),
        3 => Op::Carry(c.named(CarryOp::NAMES), ty(c)),
        4 => Op::Setp { cmp: c.named(CmpOp::NAMES), combine, ty: ty(c), ftz: c.flag() },
        5 => Op::Set { cmp: c.named(CmpOp::NAMES), combine, to: ty(c), ty: ty(c), ftz: c.flag() },
        6 => Op::Selp(ty(c)),
        7 => Op::Slct { ty: ty(c), cond: ty(c), ftz: c.flag() },
        8 => Op::Testp(c.named(TestpOp::NAMES), ty(c)),
        9 => c.of(&[Op::Lop3(combine), Op::Fns, Op::Movmatrix, Op::Activemask]),
        10 => Op::Shf(c.named(ShiftDirection::NAMES), c.named(ShfMode::NAMES)),
        11 => Op::Bfe(ty(c)),
        12 => Op::Bfi(ty(c)),
        13 => Op::Prmt(c.named(PrmtMode::SUFFIXES)),
        14 => Op::Szext(c.named(ShfMode::NAMES), ty(c)),
        15 => Op::Dp2a(c.named(DotHalf::NAMES), ty(c), ty(c)),
        16 => Op::Mov(ty(c)),
        17 => Op::CvtPack { to: ty(c), from: ty(c), chained: c.flag() },
        _ => Op::Cvt(conversion(c)),
    }
}

fn other(c: &mut Choices) -> Op {
    let space = c.of(&SPACES);
    match c.number() % 39 {
        0 => Op::Cvta { space: c.of(&SPACES[1..]), to_space: c.flag(), ty: ty(c) },
        1 => Op::Isspacep(space),
        2 => Op::Mapa { space, ty: ty(c) },
        3 | 4 => {
            let ldu = c.flag();
            Op::Ld(memory(c, ldu))
        }
        5 | 6 => Op::St(memory(c, false)),
        7 => Op::Atom(atomic(c)),
        8 => Op::Red(atomic(c)),
        9 => Op::Prefetch(
            space,
            c.of(&[PrefetchLevel::L1, PrefetchLevel::L2EvictLast, PrefetchLevel::TensorMap]),
        ),
        10 => Op::CpAsync(CpAsync {
            cache: c.of(&[CacheOp::Ca, CacheOp::Cg]),
            l2_prefetch: c.maybe(|c| c.of(&[64, 128, 256])),
            cache_hint: c.flag(),
            ignore_src: c.flag(),
            shared_cta: c.flag(),
        }),
        11 => c.of(&[
            Op::CpAsyncCommitGroup,
            Op::CpAsyncWaitGroup,
            Op::CpAsyncWaitAll,
            Op::Discard(Space::Global),
        ]),
        12 => Op::Ldmatrix(matrix(c)),
        13 => Op::Stmatrix(matrix(c)),
        14 | 15 => Op::Mma(product(c)),
        24 => Op::WmmaLoad(fragment(c)),
        25 => Op::WmmaStore(WmmaAccess { matrix: WmmaMatrix::Accumulator, ..fragment(c) }),
        26 => Op::Wmma(wmma(c)),
        16 => Op::Shfl(c.named(ShflMode::NAMES)),
        17 => Op::Vote(c.named(VoteMode::NAMES)),
        18 => Op::Match(c.named(MatchMode::NAMES), ty(c)),
        19 => Op::Redux { op: c.named(ReduxOp::NAMES), ty: ty(c), abs: c.flag(), nan: c.flag() },
        20 => {
            use BarKind::{Arrive, RedAnd, RedOr, RedPopc, Sync};
            Op::Bar { kind: c.of(&[Sync, Arrive, RedPopc, RedAnd, RedOr]), aligned: c.flag() }
        }
        21 => Op::Fence(c.named(FenceSem::NAMES), c.named(Scope::NAMES), c.flag()),
        22 => Op::Mbarrier(mbarrier(c)),
        27 | 28 => bulk(c),
        29 => c.of(&[Op::WgmmaFence, Op::WgmmaCommitGroup, Op::WgmmaWaitGroup]),
        30 => Op::Wgmma(wgmma(c)),
        31 => tensor_memory(c),
        32 => Op::FenceTensormap(c.of(&[FenceSem::Acquire, FenceSem::Release]), c.named(Scope::NAMES)),
        33 => Op::Elect,
        34 => Op::FenceProxy(c.named(ProxyFence::NAMES)),
        35 => Op::TryCancel { space: c.of(&[Space::Generic, Space::Shared]), multicast: c.flag() },
        36 => Op::QueryCancel(c.named(CancelQuery::NAMES)),
        37 => Op::TensormapReplace {
            field: c.named(TensorMapField::NAMES),
            space: c.of(&[Space::Generic, Space::Global, Space::Shared]),
        },
        38 => Op::TensormapCopy(c.named(Scope::NAMES)),
        _ => Op::Bra { uni: c.flag() },
    }
}

/// An operand of the kind. Registers are `%r0` to `%r7`; register 8 is a predicate.
fn operand(c: &mut Choices, slot: Slot) -> Operand {
    let reg = Reg(c.number() % 8);
    let element = |c: &mut Choices| Operand::Reg(Reg(c.number() % 8));
    match slot.kind {
        SlotKind::Value(Type::Pred) => {
            if c.of(&[true, false]) {
                Operand::Reg(Reg(8))
            } else {
                Operand::Not(Reg(8))
            }
        }
        SlotKind::Value(_) | SlotKind::Wide(_) | SlotKind::Packable(_) => match (slot.flow, c.number() % 5) {
            (Flow::Read, 0) => Operand::Imm(Imm::Int(i64::from(c.number() as i32))),
            (Flow::Read, 1) => Operand::Imm(Imm::F32(c.number())),
            (Flow::Read, 2) => Operand::Special(c.of(SpecialReg::ALL)),
            (Flow::Read, 3) => Operand::Symbol("buffer".into(), (c.number() % 64).into()),
            _ => Operand::Reg(reg),
        },
        SlotKind::Vector(_, count) | SlotKind::WideVector(_, count) => {
            Operand::Vector((0..count).map(|_| element(c)).collect())
        }
        SlotKind::Pair(_) => {
            c.maybe(|c| Operand::Pair(c.maybe(|_| reg), Some(Reg(8)))).unwrap_or(Operand::Reg(reg))
        }
        SlotKind::Address(_) | SlotKind::TensorAddress => {
            let base = c.maybe(|_| Base::Reg(reg)).unwrap_or(Base::Symbol("buffer".into()));
            Operand::Address(Address { base, offset: i64::from(c.number() as i16) })
        }
        SlotKind::Constant => Operand::Imm(Imm::Int(c.of(&[0, 4, 16]))),
        _ => Operand::Label(Label(0)),
    }
}

fn instruction(c: &mut Choices) -> Instruction {
    let mut op = if c.flag() { arithmetic(c) } else { other(c) };
    let guard = c.maybe(|c| Guard { reg: Reg(8), negated: c.flag() });
    let mut operands: smallvec::SmallVec<[Operand; 4]> =
        op.signature().iter().map(|&slot| operand(c, slot)).collect();
    // Only the type of the optional operand of `cp.async` shows which operand it is.
    if let Op::CpAsync(copy) = &mut op {
        operands[3] = Operand::Reg(Reg(if copy.ignore_src { 8 } else { 0 }));
    }
    Instruction { guard, op, operands, line: 0 }
}

/// A kernel of a few instructions.
pub fn module(c: &mut Choices) -> Module {
    let mut registers: Vec<Register> =
        (0..8).map(|i| Register { name: format!("%r{i}").into(), ty: Type::B32 }).collect();
    registers.push(Register { name: "%p".into(), ty: Type::Pred });
    let buffer = Variable {
        linkage: Linkage::Private,
        space: Space::Shared,
        align: 16,
        ty: Type::B8,
        vector: 1,
        name: "buffer".into(),
        dims: vec![64],
        init: None,
    };
    let mut statements = vec![Statement::Label(Label(0))];
    for _ in 0..1 + c.number() % 12 {
        statements.push(Statement::Inst(instruction(c)));
    }
    let body = Body { registers, labels: vec!["TOP".into()], variables: vec![buffer], statements };
    let function = Function {
        kind: FunctionKind::Entry,
        linkage: Linkage::Visible,
        name: "kernel".into(),
        returns: Vec::new(),
        params: Vec::new(),
        bounds: LaunchBounds { max_registers: c.maybe(Choices::number), ..LaunchBounds::default() },
        body: Some(body),
    };
    let target =
        Target { sm: c.of(&[80, 89, 90]), suffix: c.of(&[TargetSuffix::None, TargetSuffix::ArchSpecific]) };
    Module {
        version: Version { major: 8, minor: c.number() % 9 },
        target,
        items: vec![Item::Function(function)],
    }
}
