//! Which modifiers loads, stores, atomics and copies take together.

use crate::{Atomic, AtomicOp, CacheOp, CpAsync, MemSem, Memory, Op, PrefetchLevel, Space, Type};

use super::modifiers::{ensure, one_of};

pub(super) fn check(op: &Op) -> Result<(), String> {
    match *op {
        Op::Ld(m) => load(&m),
        Op::St(m) => store(&m),
        Op::Atom(a) => atomic("atom", &a),
        Op::Red(a) => {
            let returns = matches!(a.op, AtomicOp::Exch | AtomicOp::Cas);
            ensure(!returns, || format!("red has no .{}, whose purpose is the result", a.op.name()))?;
            ensure(!matches!(a.sem, MemSem::Acquire | MemSem::AcqRel), || {
                "red takes .relaxed or .release: it reads nothing that could acquire".into()
            })?;
            atomic("red", &a)
        }
        Op::Prefetch(space, level) => prefetch(space, level),
        Op::CpAsync(copy) => async_copy(&copy),
        _ => Ok(()),
    }
}

fn load(m: &Memory) -> Result<(), String> {
    access("ld", m)?;
    ensure(!matches!(m.sem, MemSem::Release | MemSem::AcqRel), || "a load cannot release".into())?;
    ensure(!matches!(m.cache, Some(CacheOp::Wb | CacheOp::Wt)), || "ld takes .ca .cg .cs .lu .cv".into())?;
    ensure(!m.non_coherent || m.space == Space::Global, || ".nc loads from .global only".into())?;
    ensure(!m.non_coherent || matches!(m.sem, MemSem::Default | MemSem::Weak), || {
        "an .nc load is weak: it takes no ordering".into()
    })?;
    ensure(!m.ldu || matches!(m.space, Space::Global | Space::Generic), || "ldu loads from .global".into())
}

fn store(m: &Memory) -> Result<(), String> {
    access("st", m)?;
    ensure(!matches!(m.sem, MemSem::Acquire | MemSem::AcqRel), || "a store cannot acquire".into())?;
    ensure(m.space != Space::Const, || ".const cannot be written".into())?;
    ensure(!m.non_coherent && !m.ldu && !m.unified, || "st takes no .nc and no .unified".into())?;
    ensure(m.l2_prefetch.is_none(), || "st takes no prefetch size".into())?;
    ensure(!matches!(m.cache, Some(CacheOp::Ca | CacheOp::Lu | CacheOp::Cv)), || {
        "st takes .wb .cg .cs .wt".into()
    })
}

fn access(name: &str, m: &Memory) -> Result<(), String> {
    ensure(m.ty.bits() >= 8 && MEMORY_TYPES.contains(&m.ty), || format!("{name} has no type .{}", m.ty))?;
    ensure(matches!(m.vector, 1 | 2 | 4 | 8), || format!("{name} has no .v{}", m.vector))?;
    ensure(m.bytes() <= 32 && (m.vector < 8 || m.ty.bits() == 32), || {
        format!(
            "{name}.v{}.{} moves {} bytes; 16 are the most (32 from and to .global)",
            m.vector,
            m.ty,
            m.bytes()
        )
    })?;
    ensure(m.bytes() <= 16 || matches!(m.space, Space::Global | Space::Generic), || {
        format!("{name} of 32 bytes accesses .global only")
    })?;
    let scoped = matches!(m.sem, MemSem::Relaxed | MemSem::Acquire | MemSem::Release | MemSem::Mmio);
    ensure(scoped == m.scope.is_some(), || {
        if scoped {
            "an ordered access must say its scope"
        } else {
            "a scope needs .relaxed, .acquire or .release"
        }
        .into()
    })?;
    let weak = matches!(m.sem, MemSem::Default | MemSem::Weak);
    let shareable = !matches!(m.space, Space::Local | Space::Const | Space::Param);
    ensure(weak || shareable, || {
        format!("an access to {} is weak: no other thread sees it", m.space.suffix())
    })?;
    ensure(weak || m.cache.is_none(), || "a cache operator is for weak accesses".into())?;
    let evicts = m.l1.is_some() || m.l2.is_some();
    ensure(!(evicts && m.cache.is_some()), || "a cache operator excludes eviction priorities".into())?;
    let global = matches!(m.space, Space::Global | Space::Generic);
    ensure(global || !(evicts || m.cache_hint || m.l2_prefetch.is_some()), || {
        format!("L1 and L2 modifiers are for .global, not for {}", m.space.suffix())
    })?;
    ensure(matches!(m.l2_prefetch, None | Some(64 | 128 | 256)), || {
        "the prefetch size is 64B, 128B or 256B".into()
    })
}

const MEMORY_TYPES: [Type; 15] = [
    Type::B8,
    Type::B16,
    Type::B32,
    Type::B64,
    Type::B128,
    Type::U8,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S8,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F32,
    Type::F64,
];

fn atomic(name: &str, a: &Atomic) -> Result<(), String> {
    use Type::{B16, B32, B64, B128, Bf16, Bf16x2, F16, F16x2, F32, F64, S32, S64, U32, U64};
    let what = format!("{name}.{}", a.op.name());
    let types: &[Type] = match a.op {
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => &[B32, B64],
        AtomicOp::Exch => &[B32, B64, B128],
        AtomicOp::Cas => &[B16, B32, B64, B128],
        AtomicOp::Add => &[U32, S32, U64, F32, F64, F16, F16x2, Bf16, Bf16x2],
        AtomicOp::Inc | AtomicOp::Dec => &[U32],
        AtomicOp::Min | AtomicOp::Max if a.vector > 1 => &[F16, F16x2, Bf16, Bf16x2],
        AtomicOp::Min | AtomicOp::Max => &[U32, S32, U64, S64],
    };
    one_of(&what, a.ty, types)?;
    let global = matches!(a.space, Space::Global | Space::Generic);
    let shared = matches!(a.space, Space::Shared | Space::SharedCluster);
    ensure(global || shared, || format!("{what} works on .global and .shared, not on {}", a.space.suffix()))?;
    let half = matches!(a.ty, F16 | F16x2 | Bf16 | Bf16x2);
    ensure(a.noftz == half, || {
        if half { format!("{what}.{} must say .noftz", a.ty) } else { ".noftz is for 16-bit floats".into() }
    })?;
    let sem = matches!(
        a.sem,
        MemSem::Default | MemSem::Relaxed | MemSem::Acquire | MemSem::Release | MemSem::AcqRel
    );
    ensure(sem, || format!("{what} takes .relaxed, .acquire, .release or .acq_rel"))?;
    let vector = match (a.vector, a.ty) {
        (1, _) => true,
        (2 | 4, F32) | (2 | 4 | 8, F16 | Bf16) | (2 | 4, F16x2 | Bf16x2) => a.space == Space::Global,
        _ => false,
    };
    ensure(vector, || {
        format!("{what} has no .v{} of .{} there; vectors are for floats in .global", a.vector, a.ty)
    })?;
    ensure(!a.cache_hint || global, || "a cache policy is for .global".into())
}

fn prefetch(space: Space, level: PrefetchLevel) -> Result<(), String> {
    let holds = match level {
        PrefetchLevel::L1 | PrefetchLevel::L2 => {
            matches!(space, Space::Generic | Space::Global | Space::Local)
        }
        PrefetchLevel::L2EvictLast | PrefetchLevel::L2EvictNormal => space == Space::Global,
        PrefetchLevel::UniformL1 => space == Space::Generic,
        PrefetchLevel::TensorMap => matches!(space, Space::Generic | Space::Const | Space::Param),
    };
    ensure(holds, || format!("that prefetch does not take {}", space.suffix()))
}

fn async_copy(copy: &CpAsync) -> Result<(), String> {
    ensure(matches!(copy.cache, CacheOp::Ca | CacheOp::Cg), || "cp.async takes .ca or .cg".into())?;
    ensure(matches!(copy.l2_prefetch, None | Some(64 | 128 | 256)), || {
        "the prefetch size is 64B, 128B or 256B".into()
    })
}
