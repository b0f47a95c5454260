//! What each instruction needs of the target and of the `.version` (PTX ISA, the notes under each instruction).

use std::fmt;

use crate::{
    Atomic, AtomicOp, BarKind, BinaryOp, BitOp, BulkRoute, ClusterBarrier, CpAsync, Cvt, CvtRounding,
    CvtSaturation, Eviction, FenceSem, FloatMods, Instruction, LaunchBounds, MatrixAccess, MatrixShape,
    Mbarrier, MbarrierOp, MemSem, Memory, Mma, MmaShape, Module, Op, Operand, PrefetchLevel, ProxyFence,
    Scope, Space, SpecialReg, Statement, Target, TargetSuffix, TernaryOp, Type, UnaryOp, Version,
};

/// The least target and `.version` that something needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The lowest `.version`.
    pub version: Version,
    /// The lowest compute capability, times ten.
    pub sm: u32,
    /// Whether the target must be architecture- or family-specific (`sm_90a`, `sm_100f`).
    pub specific: bool,
}

impl Requirement {
    /// What every module may use: everything older than `.version 7.0` and sm_75 counts as always there.
    pub const BASE: Requirement = need(70, 75);

    /// What both together need.
    #[must_use]
    pub fn and(self, other: Requirement) -> Requirement {
        Requirement {
            version: self.version.max(other.version),
            sm: self.sm.max(other.sm),
            specific: self.specific || other.specific,
        }
    }

    /// Whether `target` is new and specific enough.
    pub fn met_by(&self, target: Target) -> bool {
        target.sm >= self.sm && (!self.specific || target.suffix != TargetSuffix::None)
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{} and .version {}", self.sm, if self.specific { "a" } else { "" }, self.version)
    }
}

/// `.version` times ten, and sm.
const fn need(version: u32, sm: u32) -> Requirement {
    Requirement { version: Version { major: version / 10, minor: version % 10 }, sm, specific: false }
}

const fn need_specific(version: u32, sm: u32) -> Requirement {
    Requirement { specific: true, ..need(version, sm) }
}

const BASE: Requirement = Requirement::BASE;

/// `requirement` if `condition`, else nothing in particular.
fn when(condition: bool, requirement: Requirement) -> Requirement {
    if condition { requirement } else { BASE }
}

impl Target {
    /// The first `.version` that knows this target (PTX ISA, "Release Notes").
    pub const fn minimum_version(self) -> Version {
        let v = match (self.sm, self.suffix) {
            (..=80, _) => 70,
            (81..=86, _) => 71,
            (87, _) => 74,
            (88..=90, TargetSuffix::None) => 78,
            (88..=90, _) => 80,
            (91..=101, TargetSuffix::None | TargetSuffix::ArchSpecific) => 86,
            (102..=120, TargetSuffix::None | TargetSuffix::ArchSpecific) => 87,
            _ => 88,
        };
        need(v, 0).version
    }
}

impl Module {
    /// What all its instructions and directives together need.
    pub fn requirement(&self) -> Requirement {
        let mut all = BASE;
        for function in self.functions() {
            all = all.and(function.bounds.requirement());
            for statement in function.body.iter().flat_map(|body| &body.statements) {
                if let Statement::Inst(inst) = statement {
                    all = all.and(inst.requirement());
                }
            }
        }
        all
    }

    /// The lowest `.version` that knows the target and everything in the module.
    pub fn minimum_version(&self) -> Version {
        self.target.minimum_version().max(self.requirement().version)
    }
}

impl LaunchBounds {
    /// What the directives need.
    pub fn requirement(&self) -> Requirement {
        let cluster =
            self.required_cluster.is_some() || self.max_cluster_rank.is_some() || self.explicit_cluster;
        when(cluster, need(78, 90))
    }
}

impl Instruction {
    /// What the instruction needs, special registers among its operands included.
    pub fn requirement(&self) -> Requirement {
        // A count on an arrival that may complete the phase came later than the arrival (PTX ISA, "mbarrier.arrive").
        let counted = match self.op {
            Op::Mbarrier(m) => {
                matches!(m.op, MbarrierOp::Arrive | MbarrierOp::ArriveDrop) && self.operands.len() > 2
            }
            _ => false,
        };
        let own = self.op.requirement().and(when(counted, need(78, 90)));
        self.operands.iter().fold(own, |all, operand| match operand {
            Operand::Special(register) => all.and(special(*register)),
            _ => all,
        })
    }
}

fn special(register: SpecialReg) -> Requirement {
    use SpecialReg as S;
    match register {
        S::ClusteridX | S::ClusteridY | S::ClusteridZ | S::NclusteridX | S::NclusteridY | S::NclusteridZ => {
            need(78, 90)
        }
        S::ClusterCtaidX | S::ClusterCtaidY | S::ClusterCtaidZ => need(78, 90),
        S::ClusterNctaidX | S::ClusterNctaidY | S::ClusterNctaidZ => need(78, 90),
        S::ClusterCtarank | S::ClusterNctarank | S::IsExplicitCluster => need(78, 90),
        S::AggrSmemSize => need(81, 90),
        _ => BASE,
    }
}

impl Op {
    /// What the operation needs with these modifiers.
    pub fn requirement(&self) -> Requirement {
        match *self {
            Op::Unary(op, ty, _) => unary(op, ty),
            Op::Binary(op, ty, mods) => binary(op, ty, mods),
            Op::Ternary(op, ty, mods) => ternary(op, ty, mods),
            Op::Setp { ty, .. } | Op::Set { ty, .. } => when(is_bf16(ty), need(78, 90)),
            Op::Bmsk(_) | Op::Szext(..) => need(76, 75),
            Op::Mov(ty) => when(ty == Type::B128, need(83, 75)),
            Op::Cvt(cvt) => convert(&cvt),
            Op::Cvta { space, .. } | Op::Isspacep(space) => match space {
                Space::SharedCluster => need(78, 90),
                Space::Param => need(77, 75),
                _ => BASE,
            },
            Op::Mapa { .. } | Op::Getctarank { .. } => need(78, 90),
            Op::Ld(m) | Op::St(m) => memory(&m),
            Op::Atom(a) | Op::Red(a) => atomic(&a),
            Op::Prefetch(_, level) => match level {
                PrefetchLevel::L2EvictLast | PrefetchLevel::L2EvictNormal => need(74, 80),
                PrefetchLevel::TensorMap => need(80, 90),
                PrefetchLevel::L1 | PrefetchLevel::L2 | PrefetchLevel::UniformL1 => BASE,
            },
            Op::Discard(_) | Op::CreatePolicy(_) => need(74, 80),
            Op::CpAsync(copy) => async_copy(&copy),
            Op::CpAsyncCommitGroup
            | Op::CpAsyncWaitGroup
            | Op::CpAsyncWaitAll
            | Op::CpAsyncMbarrierArrive { .. } => need(70, 80),
            Op::Ldmatrix(m) => when(m.shape != MatrixShape::M8N8, need_specific(86, 100)),
            Op::Stmatrix(m) => stmatrix(&m),
            Op::Movmatrix => need(78, 75),
            Op::Mma(mma) => product(&mma),
            Op::WmmaLoad(m) | Op::WmmaStore(m) => fragment(m.shape, m.ty),
            Op::Wmma(w) => fragment(w.shape, w.a).and(when(w.bits == Some(BitOp::And), need(71, 80))),
            Op::Lop3(combine) => when(combine.is_some(), need(82, 75)),
            Op::Redux { ty: Type::F32, .. } => need_specific(86, 100),
            Op::Redux { .. } => need(70, 80),
            Op::Elect => need(80, 90),
            Op::Bar { kind: BarKind::Sync | BarKind::Arrive, .. } => BASE,
            Op::BarrierCluster(ClusterBarrier::Arrive { relaxed: true, .. }) => need(80, 90),
            Op::BarrierCluster(_) => need(78, 90),
            Op::Fence(sem, s) => {
                scope(Some(s)).and(when(matches!(sem, FenceSem::Acquire | FenceSem::Release), need(86, 90)))
            }
            Op::Membar(s) => scope(Some(s)),
            Op::FenceProxy(ProxyFence::Alias) => need(75, 75),
            Op::FenceProxy(_) | Op::FenceMbarrierInit => need(80, 90),
            Op::FenceTensormap(..) => need(83, 90),
            Op::Mbarrier(m) => mbarrier(&m),
            Op::CpAsyncBulk(copy) => bulk(copy.route),
            Op::CpAsyncBulkTensor(copy) => bulk(copy.route),
            Op::CpReduceAsyncBulk(_)
            | Op::CpReduceAsyncBulkTensor(_)
            | Op::CpAsyncBulkPrefetch { .. }
            | Op::CpAsyncBulkPrefetchTensor { .. }
            | Op::CpAsyncBulkCommitGroup
            | Op::CpAsyncBulkWaitGroup { .. } => need(80, 90),
            Op::StAsync(_) | Op::RedAsync(_) => need(81, 90),
            Op::Wgmma(w) => need_specific(if w.a.is_integer() && w.a != w.b { 84 } else { 80 }, 90),
            Op::WgmmaFence | Op::WgmmaCommitGroup | Op::WgmmaWaitGroup => need_specific(80, 90),
            Op::Setmaxnreg(_) => need_specific(80, 90),
            Op::Griddepcontrol(_) => need(78, 90),
            _ => BASE,
        }
    }
}

const fn is_bf16(ty: Type) -> bool {
    matches!(ty, Type::Bf16 | Type::Bf16x2)
}

const fn is_half(ty: Type) -> bool {
    is_bf16(ty) || matches!(ty, Type::F16 | Type::F16x2)
}

fn unary(op: UnaryOp, ty: Type) -> Requirement {
    match op {
        UnaryOp::Abs | UnaryOp::Neg => when(is_bf16(ty), need(70, 80)),
        UnaryOp::Ex2 | UnaryOp::Tanh => when(is_bf16(ty), need(78, 90)),
        _ => BASE,
    }
}

fn binary(op: BinaryOp, ty: Type, mods: FloatMods) -> Requirement {
    let by_type = match (op, ty) {
        (BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul, _) if is_bf16(ty) => need(78, 90),
        (_, Type::F32x2) => need(86, 100),
        (_, Type::U16x2 | Type::S16x2) => need(80, 90),
        (BinaryOp::Min | BinaryOp::Max, _) if is_half(ty) => need(70, 80),
        _ => BASE,
    };
    let by_modifier =
        [when(mods.nan, need(70, 80)), when(mods.xorsign_abs, need(72, 86)), when(mods.relu, need(80, 90))];
    by_modifier.into_iter().fold(by_type, Requirement::and)
}

fn ternary(op: TernaryOp, ty: Type, mods: FloatMods) -> Requirement {
    match op {
        TernaryOp::Fma if ty == Type::F32x2 => need(86, 100),
        TernaryOp::Fma => when(is_bf16(ty) || mods.relu, need(70, 80)),
        _ => BASE,
    }
}

const fn is_fp8(ty: Type) -> bool {
    matches!(ty, Type::E4m3 | Type::E5m2 | Type::E4m3x2 | Type::E5m2x2)
}

fn convert(cvt: &Cvt) -> Requirement {
    let saturates = cvt.saturation == CvtSaturation::SatFinite;
    match (cvt.to, cvt.from) {
        (Type::Tf32, _) if cvt.rounding == Some(CvtRounding::Rna) => {
            when(saturates, need(81, 80)).and(need(70, 80))
        }
        (Type::Tf32, _) => need(78, 90).and(when(saturates, need(81, 90))),
        (to, from) if is_fp8(to) || is_fp8(from) => need(81, 89),
        (Type::F16x2 | Type::Bf16x2, Type::F32) => need(70, 80).and(when(saturates, need(81, 80))),
        (Type::Bf16, Type::F32) => need(70, 80).and(when(saturates, need(81, 80))),
        (Type::F16, Type::F32) => when(cvt.relu, need(70, 80)).and(when(saturates, need(81, 80))),
        (Type::F32, Type::Bf16) if cvt.rounding.is_none() => need(71, 80),
        (Type::Bf16, _) | (_, Type::Bf16) => need(78, 90),
        _ => BASE,
    }
}

fn scope(scope: Option<Scope>) -> Requirement {
    when(scope == Some(Scope::Cluster), need(78, 90))
}

fn eviction(l1: Option<Eviction>, l2: Option<Eviction>) -> Requirement {
    when(l1.is_some(), need(74, 75)).and(when(l2.is_some(), need(88, 100)))
}

fn memory(m: &Memory) -> Requirement {
    [
        scope(m.scope),
        eviction(m.l1, m.l2),
        when(m.space == Space::SharedCluster, need(78, 90)),
        when(m.sem == MemSem::Mmio, need(82, 75)),
        when(m.ty == Type::B128, need(83, 75)),
        when(m.bytes() > 16, need(88, 100)),
        when(m.unified, need(80, 90)),
        when(m.cache_hint, need(74, 80)),
        when(m.l2_prefetch.is_some(), need(74, 75)),
        when(m.l2_prefetch == Some(256), need(74, 80)),
    ]
    .into_iter()
    .fold(BASE, Requirement::and)
}

fn atomic(a: &Atomic) -> Requirement {
    [
        scope(a.scope),
        when(a.space == Space::SharedCluster, need(78, 90)),
        when(is_bf16(a.ty), need(78, 90)),
        when(a.ty == Type::B128, need(83, 90)),
        when(a.vector > 1, need(81, 90)),
        when(a.cache_hint, need(74, 80)),
        when(a.op == AtomicOp::Cas && a.ty == Type::B16, BASE),
    ]
    .into_iter()
    .fold(BASE, Requirement::and)
}

fn async_copy(copy: &CpAsync) -> Requirement {
    [
        need(70, 80),
        when(copy.cache_hint || copy.l2_prefetch.is_some(), need(74, 80)),
        when(copy.ignore_src, need(75, 80)),
        when(copy.shared_cta, need(78, 80)),
    ]
    .into_iter()
    .fold(BASE, Requirement::and)
}

fn mbarrier(m: &Mbarrier) -> Requirement {
    let operation = match m.op {
        MbarrierOp::TryWait | MbarrierOp::TryWaitParity => need(78, 90),
        MbarrierOp::TestWaitParity => need(71, 80),
        MbarrierOp::ExpectTx
        | MbarrierOp::CompleteTx
        | MbarrierOp::ArriveExpectTx
        | MbarrierOp::ArriveDropExpectTx => need(80, 90),
        _ => need(70, 80),
    };
    let counts_bytes = matches!(m.op, MbarrierOp::ExpectTx | MbarrierOp::CompleteTx);
    operation
        .and(when(m.space == Space::SharedCluster || m.scope == Scope::Cluster, need(80, 90)))
        .and(when(m.sem == MemSem::Relaxed && !counts_bytes, need(86, 90)))
}

fn bulk(route: BulkRoute) -> Requirement {
    need(if route == BulkRoute::GlobalToCta { 86 } else { 80 }, 90)
}

fn stmatrix(m: &MatrixAccess) -> Requirement {
    if m.shape == MatrixShape::M8N8 { need(78, 90) } else { need_specific(86, 100) }
}

/// PTX ISA, "Matrix multiply-accumulate operation using mma instruction", target notes.
fn product(mma: &Mma) -> Requirement {
    let MmaShape { m, n, k } = mma.shape;
    if mma.kind_f8f6f4 {
        return need_specific(87, 120);
    }
    match (mma.a, m, n, k) {
        (Type::F16, 8, 8, 4) | (Type::F16, 16, 8, 8) => BASE,
        (Type::F16 | Type::Bf16 | Type::Tf32, ..) => need(70, 80),
        (Type::B1, ..) if mma.bits == Some(BitOp::And) => need(71, 80),
        (Type::F64, 8, ..) => need(70, 80),
        (Type::F64, ..) => need(78, 90),
        (Type::E4m3 | Type::E5m2, _, _, 16) => need(87, 89),
        (Type::E4m3 | Type::E5m2, ..) if mma.d == Type::F16 => need(87, 89),
        (Type::E4m3 | Type::E5m2, ..) => need(84, 89),
        (_, 8, ..) => BASE,
        _ => need(70, 80),
    }
}

/// PTX ISA, "wmma.load": what came after sm_75 are the other floating-point formats, and m16n16k8, whose accumulators are
/// f32 too.
fn fragment(shape: MmaShape, ty: Type) -> Requirement {
    let late = matches!(ty, Type::Bf16 | Type::Tf32 | Type::F64) || shape.k == 8;
    when(late, need(70, 80))
}
