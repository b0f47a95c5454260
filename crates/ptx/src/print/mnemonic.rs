//! The mnemonic of each operation with its modifiers, in the order of the PTX ISA.

use std::fmt::{self, Display, Formatter};

use crate::*;

impl Display for Op {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Op::Unary(op, ty, mods) => arith(f, op.name(), ty, mods),
            Op::Binary(op, ty, mods) => arith(f, op.name(), ty, mods),
            Op::Ternary(op, ty, mods) => arith(f, op.name(), ty, mods),
            Op::Carry(op, ty) => write!(f, "{}.{ty}", op.name()),
            Op::Setp { cmp, combine, ty, ftz } => {
                write!(f, "setp.{}{}{}.{ty}", cmp.name(), combined(combine), flag(ftz, ".ftz"))
            }
            Op::Set { cmp, combine, to, ty, ftz } => {
                write!(f, "set.{}{}{}.{to}.{ty}", cmp.name(), combined(combine), flag(ftz, ".ftz"))
            }
            Op::Selp(ty) => write!(f, "selp.{ty}"),
            Op::Slct { ty, cond, ftz } => write!(f, "slct{}.{ty}.{cond}", flag(ftz, ".ftz")),
            Op::Testp(op, ty) => write!(f, "testp.{}.{ty}", op.name()),
            Op::Lop3(combine) => write!(f, "lop3{}.b32", combined(combine)),
            Op::Shf(direction, mode) => write!(f, "shf.{}.{}.b32", direction.name(), mode.name()),
            Op::Bfe(ty) => write!(f, "bfe.{ty}"),
            Op::Bfi(ty) => write!(f, "bfi.{ty}"),
            Op::Prmt(mode) => write!(f, "prmt.b32{}", mode.suffix()),
            Op::Bmsk(mode) => write!(f, "bmsk.{}.b32", mode.name()),
            Op::Szext(mode, ty) => write!(f, "szext.{}.{ty}", mode.name()),
            Op::Fns => f.write_str("fns.b32"),
            Op::Dp4a(a, b) => write!(f, "dp4a.{a}.{b}"),
            Op::Dp2a(half, a, b) => write!(f, "dp2a.{}.{a}.{b}", half.name()),
            Op::Mov(ty) => write!(f, "mov.{ty}"),
            Op::Cvt(cvt) => write!(f, "{cvt}"),
            Op::CvtPack { to, from, chained } => {
                write!(f, "cvt.pack.sat.{to}.{from}{}", flag(chained, ".b32"))
            }
            Op::Cvta { space, to_space, ty } => {
                write!(f, "cvta{}{}.{ty}", flag(to_space, ".to"), space.suffix())
            }
            Op::Isspacep(space) => write!(f, "isspacep{}", space.suffix()),
            Op::Mapa { space, ty } => write!(f, "mapa{}.{ty}", space.suffix()),
            Op::Getctarank { space, ty } => write!(f, "getctarank{}.{ty}", space.suffix()),
            Op::Ld(m) => memory(f, if m.ldu { "ldu" } else { "ld" }, &m),
            Op::St(m) => memory(f, "st", &m),
            Op::Atom(a) => atomic(f, "atom", &a),
            Op::Red(a) => atomic(f, "red", &a),
            Op::Prefetch(space, level) => prefetch(f, space, level),
            Op::Discard(space) => write!(f, "discard{}.L2", space.suffix()),
            Op::CreatePolicy(policy) => {
                write!(f, "createpolicy.fractional.L2::{}", policy.primary.name())?;
                if let Some(secondary) = policy.secondary {
                    write!(f, ".L2::{}", secondary.name())?;
                }
                f.write_str(".b64")
            }
            Op::CpAsync(copy) => {
                let shared = if copy.shared_cta { ".shared::cta" } else { ".shared" };
                write!(f, "cp.async.{}{shared}.global", copy.cache.name())?;
                f.write_str(flag(copy.cache_hint, ".L2::cache_hint"))?;
                bytes(f, copy.l2_prefetch)
            }
            Op::CpAsyncCommitGroup => f.write_str("cp.async.commit_group"),
            Op::CpAsyncWaitGroup => f.write_str("cp.async.wait_group"),
            Op::CpAsyncWaitAll => f.write_str("cp.async.wait_all"),
            Op::CpAsyncMbarrierArrive { noinc, space } => {
                write!(f, "cp.async.mbarrier.arrive{}{}.b64", flag(noinc, ".noinc"), space.suffix())
            }
            Op::CpAsyncBulk(BulkCopy { route, multicast, cache_hint }) => {
                f.write_str("cp.async.bulk")?;
                bulk(f, route, "")?;
                f.write_str(flag(multicast, ".multicast::cluster"))?;
                f.write_str(flag(cache_hint, ".L2::cache_hint"))
            }
            Op::CpReduceAsyncBulk(BulkReduce { route, op, ty, noftz, cache_hint }) => {
                f.write_str("cp.reduce.async.bulk")?;
                bulk(f, route, "")?;
                f.write_str(flag(cache_hint, ".L2::cache_hint"))?;
                write!(f, ".{}{}.{ty}", op.name(), flag(noftz, ".noftz"))
            }
            Op::CpAsyncBulkTensor(BulkTensor { route, dims, multicast, cache_hint }) => {
                write!(f, "cp.async.bulk.tensor.{dims}d")?;
                bulk(f, route, "")?;
                f.write_str(flag(multicast, ".multicast::cluster"))?;
                f.write_str(flag(cache_hint, ".L2::cache_hint"))
            }
            Op::CpReduceAsyncBulkTensor(BulkTensorReduce { dims, op, cache_hint }) => {
                write!(f, "cp.reduce.async.bulk.tensor.{dims}d")?;
                bulk(f, BulkRoute::CtaToGlobal, op.name())?;
                f.write_str(flag(cache_hint, ".L2::cache_hint"))
            }
            Op::CpAsyncBulkPrefetch { cache_hint } => {
                write!(f, "cp.async.bulk.prefetch.L2.global{}", flag(cache_hint, ".L2::cache_hint"))
            }
            Op::CpAsyncBulkPrefetchTensor { dims, cache_hint } => {
                let hint = flag(cache_hint, ".L2::cache_hint");
                write!(f, "cp.async.bulk.prefetch.tensor.{dims}d.L2.global{hint}")
            }
            Op::CpAsyncBulkCommitGroup => f.write_str("cp.async.bulk.commit_group"),
            Op::CpAsyncBulkWaitGroup { read } => {
                write!(f, "cp.async.bulk.wait_group{}", flag(read, ".read"))
            }
            Op::StAsync(StAsync { space, vector, ty }) => {
                write!(f, "st.async{}.mbarrier::complete_tx::bytes", space.suffix())?;
                if vector > 1 {
                    write!(f, ".v{vector}")?;
                }
                write!(f, ".{ty}")
            }
            Op::RedAsync(RedAsync { space, op, ty }) => {
                let space = space.suffix();
                write!(f, "red.async.relaxed.cluster{space}.mbarrier::complete_tx::bytes.{}.{ty}", op.name())
            }
            Op::Ldmatrix(m) => matrix(f, "ldmatrix", &m),
            Op::Stmatrix(m) => matrix(f, "stmatrix", &m),
            Op::Movmatrix => f.write_str("movmatrix.sync.aligned.m8n8.trans.b16"),
            Op::Mma(mma) => write!(f, "{mma}"),
            Op::WmmaLoad(m) => fragment(f, "load", &m),
            Op::WmmaStore(m) => fragment(f, "store", &m),
            Op::Wmma(wmma) => write!(f, "{wmma}"),
            Op::Wgmma(wgmma) => write!(f, "{wgmma}"),
            Op::WgmmaFence => f.write_str("wgmma.fence.sync.aligned"),
            Op::WgmmaCommitGroup => f.write_str("wgmma.commit_group.sync.aligned"),
            Op::WgmmaWaitGroup => f.write_str("wgmma.wait_group.sync.aligned"),
            Op::Shfl(mode) => write!(f, "shfl.sync.{}.b32", mode.name()),
            Op::Vote(mode) => {
                write!(
                    f,
                    "vote.sync.{}.{}",
                    mode.name(),
                    if mode == VoteMode::Ballot { "b32" } else { "pred" }
                )
            }
            Op::Match(mode, ty) => write!(f, "match.{}.sync.{ty}", mode.name()),
            Op::Redux { op, ty, abs, nan } => {
                write!(f, "redux.sync.{}{}{}.{ty}", op.name(), flag(abs, ".abs"), flag(nan, ".NaN"))
            }
            Op::Activemask => f.write_str("activemask.b32"),
            Op::Elect => f.write_str("elect.sync"),
            Op::Bar { kind, aligned } => barrier(f, kind, aligned),
            Op::BarWarpSync => f.write_str("bar.warp.sync"),
            Op::BarrierCluster(barrier) => f.write_str(barrier.name()),
            Op::Membar(scope) => {
                write!(f, "membar.{}", if scope == Scope::Gpu { "gl" } else { scope.name() })
            }
            Op::Fence(sem, scope) => write!(f, "fence.{}.{}", sem.name(), scope.name()),
            Op::FenceProxy(fence) => write!(f, "fence.proxy.{}", fence.name()),
            Op::FenceMbarrierInit => f.write_str("fence.mbarrier_init.release.cluster"),
            Op::FenceTensormap(sem, scope) => {
                write!(f, "fence.proxy.tensormap::generic.{}.{}", sem.name(), scope.name())
            }
            Op::Mbarrier(m) => mbarrier(f, &m),
            Op::Bra { uni } => write!(f, "bra{}", flag(uni, ".uni")),
            Op::BrxIdx { uni } => write!(f, "brx.idx{}", flag(uni, ".uni")),
            Op::Call { uni } => write!(f, "call{}", flag(uni, ".uni")),
            Op::Ret { uni } => write!(f, "ret{}", flag(uni, ".uni")),
            Op::Exit => f.write_str("exit"),
            Op::Trap => f.write_str("trap"),
            Op::Brkpt => f.write_str("brkpt"),
            Op::Nanosleep => f.write_str("nanosleep.u32"),
            Op::Pmevent => f.write_str("pmevent"),
            Op::Setmaxnreg(change) => write!(f, "setmaxnreg.{}.sync.aligned.u32", change.name()),
            Op::Griddepcontrol(action) => write!(f, "griddepcontrol.{}", action.name()),
        }
    }
}

fn flag(on: bool, text: &'static str) -> &'static str {
    if on { text } else { "" }
}

fn combined(combine: Option<BoolOp>) -> &'static str {
    match combine {
        None => "",
        Some(BoolOp::And) => ".and",
        Some(BoolOp::Or) => ".or",
        Some(BoolOp::Xor) => ".xor",
    }
}

/// `bar` is `barrier….aligned` in fewer letters.
fn barrier(f: &mut Formatter<'_>, kind: BarKind, aligned: bool) -> fmt::Result {
    let (reduction, ty) = match kind {
        BarKind::Sync | BarKind::Arrive => ("", ""),
        BarKind::RedPopc => (".popc", ".u32"),
        BarKind::RedAnd => (".and", ".pred"),
        BarKind::RedOr => (".or", ".pred"),
    };
    write!(f, "{}.{}{reduction}{ty}", if aligned { "bar" } else { "barrier" }, kind.name())
}

fn mbarrier(f: &mut Formatter<'_>, m: &Mbarrier) -> fmt::Result {
    write!(f, "mbarrier.{}", m.op.name())?;
    if m.says_ordering() {
        ordering(f, m.sem, Some(m.scope))?;
    }
    write!(f, "{}.b64", m.space.suffix())
}

/// Destination, source, the operation of a tensor reduction, and how the end is told.
fn bulk(f: &mut Formatter<'_>, route: BulkRoute, reduction: &str) -> fmt::Result {
    for space in [route.destination(), route.source()] {
        f.write_str(if space == Space::Shared { ".shared::cta" } else { space.suffix() })?;
    }
    if !reduction.is_empty() {
        write!(f, ".{reduction}")?;
    }
    f.write_str(if route.has_mbarrier() { ".mbarrier::complete_tx::bytes" } else { ".bulk_group" })
}

fn precision(p: Precision) -> &'static str {
    match p {
        Precision::Unspecified => "",
        Precision::Approx => ".approx",
        Precision::Full => ".full",
        Precision::Rounded(rounding) => match rounding {
            Rounding::Rn => ".rn",
            Rounding::Rz => ".rz",
            Rounding::Rm => ".rm",
            Rounding::Rp => ".rp",
        },
    }
}

fn arith(f: &mut Formatter<'_>, name: &str, ty: Type, mods: FloatMods) -> fmt::Result {
    write!(f, "{name}{}{}", precision(mods.precision), flag(mods.ftz, ".ftz"))?;
    write!(f, "{}{}", flag(mods.nan, ".NaN"), flag(mods.xorsign_abs, ".xorsign.abs"))?;
    write!(f, "{}{}.{ty}", flag(mods.sat, ".sat"), flag(mods.relu, ".relu"))
}

impl Display for Cvt {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rounding = match self.rounding {
            None => "",
            Some(CvtRounding::Float(r)) => precision(Precision::Rounded(r)),
            Some(CvtRounding::Integer(Rounding::Rn)) => ".rni",
            Some(CvtRounding::Integer(Rounding::Rz)) => ".rzi",
            Some(CvtRounding::Integer(Rounding::Rm)) => ".rmi",
            Some(CvtRounding::Integer(Rounding::Rp)) => ".rpi",
            Some(CvtRounding::Rna) => ".rna",
        };
        let (sat, satfinite) = match self.saturation {
            CvtSaturation::None => ("", ""),
            CvtSaturation::Sat => (".sat", ""),
            CvtSaturation::SatFinite => ("", ".satfinite"),
        };
        let (ftz, relu) = (flag(self.ftz, ".ftz"), flag(self.relu, ".relu"));
        // tf32 writes `.relu` before `.satfinite`, fp8 after it.
        let (first, second) = if self.to == Type::Tf32 { (relu, satfinite) } else { (satfinite, relu) };
        write!(f, "cvt{rounding}{ftz}{sat}{first}{second}.{}.{}", self.to, self.from)
    }
}

fn bytes(f: &mut Formatter<'_>, size: Option<u16>) -> fmt::Result {
    size.map_or(Ok(()), |n| write!(f, ".L2::{n}B"))
}

fn ordering(f: &mut Formatter<'_>, sem: MemSem, scope: Option<Scope>) -> fmt::Result {
    f.write_str(match sem {
        MemSem::Default => "",
        MemSem::Weak => ".weak",
        MemSem::Volatile => ".volatile",
        MemSem::Relaxed => ".relaxed",
        MemSem::Acquire => ".acquire",
        MemSem::Release => ".release",
        MemSem::AcqRel => ".acq_rel",
        MemSem::Mmio => ".mmio.relaxed",
    })?;
    scope.map_or(Ok(()), |scope| write!(f, ".{}", scope.name()))
}

fn memory(f: &mut Formatter<'_>, name: &str, m: &Memory) -> fmt::Result {
    f.write_str(name)?;
    ordering(f, m.sem, m.scope)?;
    f.write_str(m.space.suffix())?;
    if let Some(cache) = m.cache {
        write!(f, ".{}", cache.name())?;
    }
    f.write_str(flag(m.non_coherent, ".nc"))?;
    if let Some(eviction) = m.l1 {
        write!(f, ".L1::{}", eviction.name())?;
    }
    if let Some(eviction) = m.l2 {
        write!(f, ".L2::{}", eviction.name())?;
    }
    f.write_str(flag(m.cache_hint, ".L2::cache_hint"))?;
    bytes(f, m.l2_prefetch)?;
    if m.vector > 1 {
        write!(f, ".v{}", m.vector)?;
    }
    write!(f, ".{}{}", m.ty, flag(m.unified, ".unified"))
}

fn atomic(f: &mut Formatter<'_>, name: &str, a: &Atomic) -> fmt::Result {
    f.write_str(name)?;
    ordering(f, a.sem, a.scope)?;
    write!(f, "{}.{}{}", a.space.suffix(), a.op.name(), flag(a.noftz, ".noftz"))?;
    f.write_str(flag(a.cache_hint, ".L2::cache_hint"))?;
    if a.vector > 1 {
        write!(f, ".v{}", a.vector)?;
    }
    write!(f, ".{}", a.ty)
}

fn prefetch(f: &mut Formatter<'_>, space: Space, level: PrefetchLevel) -> fmt::Result {
    let space = space.suffix();
    match level {
        PrefetchLevel::L1 => write!(f, "prefetch{space}.L1"),
        PrefetchLevel::L2 => write!(f, "prefetch{space}.L2"),
        PrefetchLevel::L2EvictLast => write!(f, "prefetch{space}.L2::evict_last"),
        PrefetchLevel::L2EvictNormal => write!(f, "prefetch{space}.L2::evict_normal"),
        PrefetchLevel::UniformL1 => f.write_str("prefetchu.L1"),
        PrefetchLevel::TensorMap => write!(f, "prefetch{space}.tensormap"),
    }
}

fn matrix(f: &mut Formatter<'_>, name: &str, m: &MatrixAccess) -> fmt::Result {
    let (shape, trans) = (m.shape.name(), flag(m.trans, ".trans"));
    write!(f, "{name}.sync.aligned.{shape}.x{}{trans}{}.{}", m.count, m.space.suffix(), m.ty)
}

impl Display for MmaShape {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "m{}n{}k{}", self.m, self.n, self.k)
    }
}

impl Display for Mma {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "mma.sync.aligned{}.{}", flag(self.kind_f8f6f4, ".kind::f8f6f4"), self.shape)?;
        write!(f, ".{}.{}", self.a_order.name(), self.b_order.name())?;
        write!(f, "{}.{}.{}.{}.{}", flag(self.satfinite, ".satfinite"), self.d, self.a, self.b, self.c)?;
        self.bits.map_or(Ok(()), |op| write!(f, ".{}.popc", op.name()))
    }
}

fn fragment(f: &mut Formatter<'_>, name: &str, m: &WmmaAccess) -> fmt::Result {
    let matrix = match (m.matrix, name) {
        (WmmaMatrix::A, _) => "a",
        (WmmaMatrix::B, _) => "b",
        (WmmaMatrix::Accumulator, "load") => "c",
        (WmmaMatrix::Accumulator, _) => "d",
    };
    write!(f, "wmma.{name}.{matrix}.sync.aligned.{}.{}{}.{}", m.order.name(), m.shape, m.space.suffix(), m.ty)
}

impl Display for Wmma {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("wmma.mma")?;
        if let Some(op) = self.bits {
            write!(f, ".{}.popc", op.name())?;
        }
        write!(f, ".sync.aligned.{}.{}.{}", self.a_order.name(), self.b_order.name(), self.shape)?;
        f.write_str(self.rounding.map_or("", |r| precision(Precision::Rounded(r))))?;
        if (self.a, self.b) == (Type::F16, Type::F16) {
            write!(f, ".{}.{}", self.d, self.c)?;
        } else {
            write!(f, ".{}.{}.{}.{}", self.d, self.a, self.b, self.c)?;
        }
        f.write_str(flag(self.satfinite, ".satfinite"))
    }
}

impl Display for Wgmma {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Wgmma { shape, d, a, b, .. } = self;
        write!(f, "wgmma.mma_async.sync.aligned.{shape}.{d}.{a}.{b}")?;
        // Bits are multiplied in one way only, which is written all the same.
        f.write_str(flag(*a == Type::B1, ".and.popc"))?;
        f.write_str(flag(self.satfinite, ".satfinite"))
    }
}
