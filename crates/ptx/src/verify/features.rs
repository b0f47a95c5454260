//! Which target and which `.version` an instruction needs.
//!
//! One table; figures from the PTX ISA's notes on each instruction, each row checked against ptxas 13.

use crate::*;

/// What the target must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// `sm_NN` or later.
    From(u32),
    /// `sm_NNa`, or a later target with a suffix.
    Suffixed(u32),
}

impl Needs {
    pub(super) fn met_by(self, target: Target) -> bool {
        match self {
            Needs::From(sm) => target.sm >= sm,
            Needs::Suffixed(sm) => target.sm >= sm && target.suffix != TargetSuffix::None,
        }
    }
}

impl std::fmt::Display for Needs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Needs::From(sm) => write!(f, "sm_{sm} or later"),
            Needs::Suffixed(sm) => write!(f, "sm_{sm}a, or a later target with a suffix"),
        }
    }
}

/// Something that not every target or version knows.
pub(super) struct Feature {
    pub(super) what: &'static str,
    pub(super) version: Version,
    pub(super) needs: Needs,
    applies: fn(&Instruction) -> bool,
}

const fn row(
    what: &'static str,
    (major, minor): (u32, u32),
    needs: Needs,
    applies: fn(&Instruction) -> bool,
) -> Feature {
    Feature { what, version: Version { major, minor }, needs, applies }
}

use Needs::{From, Suffixed};

const FEATURES: &[Feature] = &[
    // Arithmetic.
    row("arithmetic on f16", (6, 5), From(53), |i| arithmetic_type(i).is_some_and(is_f16)),
    row("fma, abs and neg of bf16", (7, 0), From(80), |i| arithmetic_type(i).is_some_and(is_bf16)),
    row("add, sub, mul and functions of bf16", (7, 8), From(90), |i| {
        let function = matches!(i.op, Op::Unary(op, ..) if !matches!(op, UnaryOp::Abs | UnaryOp::Neg));
        let binary = matches!(i.op, Op::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul, ..));
        (function || binary) && arithmetic_type(i).is_some_and(is_bf16)
    }),
    row(
        "min and max of f16 and bf16",
        (7, 0),
        From(80),
        |i| matches!(i.op, Op::Binary(BinaryOp::Min | BinaryOp::Max, ty, _) if is_f16(ty) || is_bf16(ty)),
    ),
    row("`.NaN` of min and max", (7, 0), From(80), |i| modifiers(i).is_some_and(|m| m.nan)),
    row("`.xorsign.abs`", (7, 2), From(86), |i| modifiers(i).is_some_and(|m| m.xorsign_abs)),
    row("`.relu` of floats", (7, 0), From(80), |i| modifiers(i).is_some_and(|m| m.relu)),
    row("packed 16-bit integers", (8, 0), From(90), |i| {
        matches!(arithmetic_type(i), Some(Type::U16x2 | Type::S16x2))
    }),
    row("`.relu` of integers", (8, 0), From(90), |i| {
        modifiers(i).is_some_and(|m| m.relu) && arithmetic_type(i).is_some_and(Type::is_integer)
    }),
    row("packed f32", (8, 6), From(100), |i| arithmetic_type(i) == Some(Type::F32x2)),
    row("tanh, and ex2 of f16", (7, 0), From(75), |i| {
        matches!(i.op, Op::Unary(UnaryOp::Tanh, ..))
            || matches!(i.op, Op::Unary(UnaryOp::Ex2, ty, _) if is_f16(ty))
    }),
    row(
        "comparison of bf16",
        (7, 8),
        From(90),
        |i| matches!(i.op, Op::Setp { ty, .. } | Op::Set { ty, .. } if is_bf16(ty)),
    ),
    row("`bmsk` and `szext`", (7, 6), From(70), |i| matches!(i.op, Op::Bmsk(_) | Op::Szext(..))),
    row("`dp4a` and `dp2a`", (6, 5), From(61), |i| matches!(i.op, Op::Dp4a(..) | Op::Dp2a(..))),
    // Conversion.
    row("conversion from f32 to bf16 or tf32", (7, 0), From(80), |i| {
        converts(i, |c| is_bf16(c.to) || c.to == Type::Tf32)
    }),
    row("packed conversion and `.relu`", (7, 0), From(80), |i| converts(i, |c| c.packed() || c.relu)),
    row("conversion from bf16", (7, 1), From(80), |i| converts(i, |c| c.from == Type::Bf16)),
    row("conversion between bf16 and other types than f32", (7, 8), From(90), |i| {
        converts(i, |c| {
            (c.from == Type::Bf16 && c.to != Type::F32) || (c.to == Type::Bf16 && c.from != Type::F32)
        })
    }),
    row("`.rn` and `.rz` to tf32", (7, 8), From(90), |i| {
        converts(i, |c| c.to == Type::Tf32 && c.rounding != Some(CvtRounding::Rna))
    }),
    row("`.satfinite` to tf32", (8, 1), From(80), |i| {
        converts(i, |c| c.to == Type::Tf32 && c.saturation == CvtSaturation::SatFinite)
    }),
    row("conversion of fp8", (8, 1), From(89), |i| converts(i, |c| is_fp8(c.to) || is_fp8(c.from))),
    // Memory.
    row("`.shared::cluster`", (7, 8), From(90), |i| space(i) == Some(Space::SharedCluster)),
    row("`.cluster` scope", (7, 8), From(90), |i| scope(i) == Some(Scope::Cluster)),
    row("memory ordering", (6, 0), From(70), |i| {
        use MemSem::{AcqRel, Acquire, Mmio, Relaxed, Release};
        matches!(sem(i), Some(Relaxed | Acquire | Release | AcqRel | Mmio))
    }),
    row("`.mmio`", (8, 2), From(70), |i| sem(i) == Some(MemSem::Mmio)),
    row("`.L1::evict_…`", (7, 4), From(70), |i| memory(i).is_some_and(|m| m.l1.is_some())),
    row("`.L2::64B` and `.L2::128B`", (7, 4), From(75), |i| {
        memory(i).is_some_and(|m| m.l2_prefetch.is_some())
    }),
    row("`.L2::256B`", (7, 4), From(80), |i| memory(i).is_some_and(|m| m.l2_prefetch == Some(256))),
    row("`.L2::cache_hint`", (7, 4), From(80), cache_hint),
    row("`.b128` in memory", (8, 3), From(70), |i| memory(i).is_some_and(|m| m.ty == Type::B128)),
    row("32 bytes at once", (8, 8), From(100), |i| {
        memory(i).is_some_and(|m| m.bytes() > 16 || m.l2.is_some())
    }),
    row("atomics on f16", (6, 5), From(70), |i| atomic(i).is_some_and(|a| is_f16(a.ty))),
    row("atomics on bf16", (7, 8), From(90), |i| atomic(i).is_some_and(|a| is_bf16(a.ty))),
    row("vector atomics", (8, 1), From(90), |i| atomic(i).is_some_and(|a| a.vector > 1)),
    row("`.b128` atomics", (8, 3), From(90), |i| atomic(i).is_some_and(|a| a.ty == Type::B128)),
    row("cache policies, `discard` and `prefetch` with a priority", (7, 4), From(80), |i| {
        use PrefetchLevel::{L2EvictLast, L2EvictNormal};
        matches!(i.op, Op::CreatePolicy(_) | Op::Discard(_) | Op::Prefetch(_, L2EvictLast | L2EvictNormal))
    }),
    row("tensor maps", (8, 0), From(90), |i| matches!(i.op, Op::Prefetch(_, PrefetchLevel::TensorMap))),
    row("`mapa` and `getctarank`", (7, 8), From(90), |i| {
        matches!(i.op, Op::Mapa { .. } | Op::Getctarank { .. })
    }),
    // Asynchronous copies and mbarriers.
    row("`cp.async`", (7, 0), From(80), |i| {
        matches!(
            i.op,
            Op::CpAsync(_)
                | Op::CpAsyncCommitGroup
                | Op::CpAsyncWaitGroup
                | Op::CpAsyncWaitAll
                | Op::CpAsyncMbarrierArrive { .. }
        )
    }),
    row(
        "`cp.async` with cache modifiers",
        (7, 4),
        From(80),
        |i| matches!(i.op, Op::CpAsync(c) if c.cache_hint || c.l2_prefetch.is_some()),
    ),
    row("`cp.async` with a predicate", (7, 5), From(80), |i| matches!(i.op, Op::CpAsync(c) if c.ignore_src)),
    row("`cp.async` to `.shared::cta`", (7, 8), From(80), |i| matches!(i.op, Op::CpAsync(c) if c.shared_cta)),
    row("`mbarrier`", (7, 0), From(80), |i| matches!(i.op, Op::Mbarrier(_))),
    row("`mbarrier.test_wait.parity`, or `_` for the state", (7, 1), From(80), |i| {
        let parity = matches!(i.op, Op::Mbarrier(Mbarrier::TestWaitParity));
        parity || matches!((i.op, i.operands.first()), (Op::Mbarrier(_), Some(Operand::Sink)))
    }),
    row("`mbarrier.try_wait`", (7, 8), From(90), |i| {
        matches!(i.op, Op::Mbarrier(Mbarrier::TryWait | Mbarrier::TryWaitParity))
    }),
    row("`mbarrier.arrive` with a count", (7, 8), From(90), |i| {
        matches!(i.op, Op::Mbarrier(Mbarrier::Arrive | Mbarrier::ArriveDrop)) && i.operands.len() == 3
    }),
    // Matrices.
    row("`mma` of f16 and small integers", (6, 5), From(75), |i| mma(i, |_| true)),
    row("`mma` of bf16, tf32 and f64, and m16n8k16 or larger", (7, 0), From(80), |i| {
        mma(i, |m| {
            matches!(m.a, Type::Bf16 | Type::Tf32 | Type::F64)
                || (m.shape.m == 16 && m.shape != MmaShape::M16N8K8)
        })
    }),
    row("`mma` m16n8 of f64", (7, 8), From(90), |i| mma(i, |m| m.a == Type::F64 && m.shape.m == 16)),
    row("`mma` of fp8", (8, 4), From(89), |i| mma(i, |m| is_fp8(m.a))),
    row("`mma` of fp8 with f16 accumulators or k16", (8, 7), From(89), |i| {
        mma(i, |m| is_fp8(m.a) && (m.d == Type::F16 || m.shape.k == 16))
    }),
    row("`.kind::f8f6f4`", (8, 7), Suffixed(120), |i| mma(i, |m| m.kind_f8f6f4)),
    row("`ldmatrix`", (6, 5), From(75), |i| matches!(i.op, Op::Ldmatrix(_))),
    row(
        "`ldmatrix` and `stmatrix` of bytes",
        (8, 6),
        Suffixed(100),
        |i| matches!(i.op, Op::Ldmatrix(m) | Op::Stmatrix(m) if m.shape != MatrixShape::M8N8),
    ),
    row("`movmatrix`", (7, 8), From(75), |i| i.op == Op::Movmatrix),
    row("`stmatrix`", (7, 8), From(90), |i| matches!(i.op, Op::Stmatrix(_))),
    // Warp and synchronisation.
    row("`match`", (6, 0), From(70), |i| matches!(i.op, Op::Match(..))),
    row("`redux`", (7, 0), From(80), |i| matches!(i.op, Op::Redux { .. })),
    row("`redux` of f32", (8, 6), Suffixed(100), |i| matches!(i.op, Op::Redux { ty: Type::F32, .. })),
    row("`elect`", (8, 0), From(90), |i| i.op == Op::Elect),
    row("`fence`", (6, 0), From(70), |i| matches!(i.op, Op::Fence(..))),
    row("one-sided fences", (8, 6), From(90), |i| {
        matches!(i.op, Op::Fence(FenceSem::Acquire | FenceSem::Release, _))
    }),
    row("`fence.proxy.alias`", (7, 5), From(70), |i| matches!(i.op, Op::FenceProxy(ProxyFence::Alias))),
    row("the async proxy", (8, 0), From(90), |i| match i.op {
        Op::FenceProxy(fence) => fence != ProxyFence::Alias,
        op => op == Op::FenceMbarrierInit,
    }),
    row("`barrier.cluster`", (7, 8), From(90), |i| matches!(i.op, Op::BarrierCluster(_))),
    row("`barrier.cluster.arrive.relaxed`", (8, 0), From(90), |i| {
        matches!(i.op, Op::BarrierCluster(ClusterBarrier::Arrive { relaxed: true, .. }))
    }),
    row("`setmaxnreg`", (8, 0), Suffixed(90), |i| matches!(i.op, Op::Setmaxnreg(_))),
    row("`griddepcontrol`", (7, 8), From(90), |i| matches!(i.op, Op::Griddepcontrol(_))),
    row("registers of clusters", (7, 8), From(90), |i| {
        i.operands.iter().any(|o| matches!(o, Operand::Special(s) if s.name().contains("cluster")))
    }),
    row("`%aggr_smem_size`", (8, 1), From(90), |i| {
        i.operands.contains(&Operand::Special(SpecialReg::AggrSmemSize))
    }),
];

/// The features an instruction uses.
pub(super) fn used(inst: &Instruction) -> impl Iterator<Item = &'static Feature> {
    FEATURES.iter().filter(move |feature| (feature.applies)(inst))
}

const fn is_f16(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::F16x2)
}

const fn is_bf16(ty: Type) -> bool {
    matches!(ty, Type::Bf16 | Type::Bf16x2)
}

const fn is_fp8(ty: Type) -> bool {
    matches!(ty, Type::E4m3 | Type::E5m2 | Type::E4m3x2 | Type::E5m2x2)
}

fn arithmetic_type(i: &Instruction) -> Option<Type> {
    match i.op {
        Op::Unary(_, ty, _) | Op::Binary(_, ty, _) | Op::Ternary(_, ty, _) => Some(ty),
        _ => None,
    }
}

fn modifiers(i: &Instruction) -> Option<FloatMods> {
    match i.op {
        Op::Unary(_, _, m) | Op::Binary(_, _, m) | Op::Ternary(_, _, m) => Some(m),
        _ => None,
    }
}

fn converts(i: &Instruction, test: fn(Cvt) -> bool) -> bool {
    matches!(i.op, Op::Cvt(cvt) if test(cvt))
}

fn mma(i: &Instruction, test: fn(Mma) -> bool) -> bool {
    matches!(i.op, Op::Mma(mma) if test(mma))
}

fn memory(i: &Instruction) -> Option<Memory> {
    match i.op {
        Op::Ld(m) | Op::St(m) => Some(m),
        _ => None,
    }
}

fn atomic(i: &Instruction) -> Option<Atomic> {
    match i.op {
        Op::Atom(a) | Op::Red(a) => Some(a),
        _ => None,
    }
}

fn sem(i: &Instruction) -> Option<MemSem> {
    memory(i).map(|m| m.sem).or(atomic(i).map(|a| a.sem))
}

fn scope(i: &Instruction) -> Option<Scope> {
    match i.op {
        Op::Ld(m) | Op::St(m) => m.scope,
        Op::Atom(a) | Op::Red(a) => a.scope,
        Op::Fence(_, scope) => Some(scope),
        _ => None,
    }
}

fn cache_hint(i: &Instruction) -> bool {
    memory(i).is_some_and(|m| m.cache_hint) || atomic(i).is_some_and(|a| a.cache_hint)
}

fn space(i: &Instruction) -> Option<Space> {
    match i.op {
        Op::Ld(m) | Op::St(m) => Some(m.space),
        Op::Atom(a) | Op::Red(a) => Some(a.space),
        Op::Cvta { space, .. } | Op::Isspacep(space) => Some(space),
        _ => None,
    }
}

impl Target {
    /// The first `.version` that knows the target (PTX ISA, "Release Notes").
    pub fn minimum_version(self) -> Version {
        let (major, minor) = match (self.sm, self.suffix) {
            (..=80, _) => (7, 0),
            (81..=86, _) => (7, 1),
            (87, _) => (7, 4),
            (88..=90, TargetSuffix::None) => (7, 8),
            (88..=90, _) => (8, 0),
            (91..=101, TargetSuffix::None | TargetSuffix::ArchSpecific) => (8, 6),
            (102..=120, TargetSuffix::None | TargetSuffix::ArchSpecific) => (8, 7),
            _ => (8, 8),
        };
        Version { major, minor }
    }
}

impl Module {
    /// The lowest `.version` that knows the target and every instruction of the module.
    pub fn minimum_version(&self) -> Version {
        let instructions = self.functions().filter_map(|f| f.body.as_ref()).flat_map(|b| &b.statements);
        let features = instructions.filter_map(|s| match s {
            Statement::Inst(inst) => used(inst).map(|feature| feature.version).max(),
            Statement::Label(_) | Statement::Pragma(_) => None,
        });
        let clusters =
            self.functions().any(|f| f.bounds.uses_clusters()).then_some(Version { major: 7, minor: 8 });
        features.chain(clusters).fold(self.target.minimum_version(), Version::max)
    }
}

impl LaunchBounds {
    /// Whether a directive about clusters is written.
    pub(super) fn uses_clusters(&self) -> bool {
        self.required_cluster.is_some() || self.explicit_cluster || self.max_cluster_rank.is_some()
    }
}
