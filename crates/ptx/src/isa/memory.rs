//! Loads, stores, prefetches and cache policies (PTX ISA, "Data Movement and Conversion Instructions").

use smallvec::smallvec;

use super::requirement::{BASE, all, need, scope, when};
use super::signature::{POLICY, address, optional, read, value, write};
use super::syntax::{Start, Syntax, names, start};
use crate::verify::rules::{constant, ensure, range};
use crate::{Requirement, Signature, Slot, SlotKind, Space, Type};

/// Ordering of a load, store or atomic (PTX ISA, "Memory Consistency Model").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MemSem {
    /// No modifier, or `.weak` (loads and stores: weak; atomics: relaxed).
    #[default]
    Default,
    /// `.weak`, written in the text.
    Weak,
    Volatile,
    Relaxed,
    Acquire,
    Release,
    AcqRel,
    /// `.mmio.relaxed.sys`.
    Mmio,
}

impl MemSem {
    /// Every ordering that has a spelling, without the leading dot.
    pub const NAMES: &'static [(MemSem, &'static str)] = &[
        (MemSem::Weak, "weak"),
        (MemSem::Volatile, "volatile"),
        (MemSem::Relaxed, "relaxed"),
        (MemSem::Acquire, "acquire"),
        (MemSem::Release, "release"),
        (MemSem::AcqRel, "acq_rel"),
        (MemSem::Mmio, "mmio.relaxed"),
    ];
}

/// `.cta`, `.cluster`, `.gpu`, `.sys` (`membar.gl` is `Gpu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum Scope {
    Cta,
    Cluster,
    Gpu,
    Sys,
}

/// Cache operator of loads (`ca cg cs lu cv`) and stores (`wb cg cs wt`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum CacheOp {
    Ca,
    Cg,
    Cs,
    Lu,
    Cv,
    Wb,
    Wt,
}

/// Eviction priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum Eviction {
    Normal,
    Unchanged,
    First,
    Last,
    NoAllocate,
}

/// Modifiers of `ld` and `st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Memory {
    /// State space.
    pub space: Space,
    /// Element type.
    pub ty: Type,
    /// Elements per access: 1, 2, 4 or 8.
    pub vector: u8,
    /// Ordering.
    pub sem: MemSem,
    /// Scope, for relaxed, acquire and release.
    pub scope: Option<Scope>,
    /// Cache operator.
    pub cache: Option<CacheOp>,
    /// `.nc` (loads from global): the texture path, for data that no thread writes during the kernel.
    pub non_coherent: bool,
    /// `.L1::evict_…`.
    pub l1: Option<Eviction>,
    /// `.L2::evict_…`.
    pub l2: Option<Eviction>,
    /// `.L2::64B`, `.L2::128B`, `.L2::256B`: prefetch size in bytes.
    pub l2_prefetch: Option<u16>,
    /// `.L2::cache_hint`: a 64-bit cache policy follows as the last operand.
    pub cache_hint: bool,
    /// Whether `.unified` is written.
    pub unified: bool,
    /// `ldu`, the older name of a read-only load.
    pub ldu: bool,
}

impl Memory {
    /// A plain access of one element.
    pub const fn plain(space: Space, ty: Type) -> Memory {
        Memory {
            space,
            ty,
            vector: 1,
            sem: MemSem::Default,
            scope: None,
            cache: None,
            non_coherent: false,
            l1: None,
            l2: None,
            l2_prefetch: None,
            cache_hint: false,
            unified: false,
            ldu: false,
        }
    }

    /// A plain access of a vector of `vector` elements.
    pub const fn vector(space: Space, ty: Type, vector: u8) -> Memory {
        let mut m = Memory::plain(space, ty);
        m.vector = vector;
        m
    }

    /// Bytes per thread.
    pub const fn bytes(&self) -> u32 {
        self.ty.bytes() * self.vector as u32
    }
}

/// Level of a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum PrefetchLevel {
    L1,
    L2,
    /// `.L2::evict_last`
    L2EvictLast,
    /// `.L2::evict_normal`
    L2EvictNormal,
    /// `prefetchu.L1`
    UniformL1,
    /// `.tensormap`
    TensorMap,
}

/// `createpolicy.fractional.L2::primary{.L2::secondary}.b64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CreatePolicy {
    /// Priority of the primary fraction.
    pub primary: Eviction,
    /// Priority of the remaining fraction.
    pub secondary: Option<Eviction>,
}

names! {
    Scope { Cta = "cta", Cluster = "cluster", Gpu = "gpu", Sys = "sys" }
    CacheOp { Ca = "ca", Cg = "cg", Cs = "cs", Lu = "lu", Cv = "cv", Wb = "wb", Wt = "wt" }
    Eviction {
        Normal = "evict_normal", Unchanged = "evict_unchanged", First = "evict_first", Last = "evict_last",
        NoAllocate = "no_allocate",
    }
}

start! {
    Memory = Memory::plain(Space::Generic, Type::B32);
    CreatePolicy = CreatePolicy { primary: Eviction::Normal, secondary: None };
}

impl Start for PrefetchLevel {
    const START: PrefetchLevel = PrefetchLevel::L1;
}

/// The levels of `prefetch`; `prefetchu` has `.L1` only.
const LEVELS: &[(PrefetchLevel, &str)] = &[
    (PrefetchLevel::L1, "L1"),
    (PrefetchLevel::L2, "L2"),
    (PrefetchLevel::L2EvictLast, "L2::evict_last"),
    (PrefetchLevel::L2EvictNormal, "L2::evict_normal"),
    (PrefetchLevel::TensorMap, "tensormap"),
];

instructions! { ($) memory memory_list

    /// `d, [a]`, then a cache policy with `cache_hint`; `d` is a vector when `vector` > 1. PTX ISA, "ld",
    /// "ld.global.nc", "ldu".
    Ld(access: Memory) => {
        text: |m| { m.name(&mut access.ldu, &[(false, "ld"), (true, "ldu")])?; modifiers(m, access) },
        operands: {
            let mut s: Signature = smallvec![write(element(&access)), address(access.space)];
            s.extend(policy(access.cache_hint));
            s
        },
        accepts: load(&access),
        needs: access_requirement(&access),
        accesses: |_position| Some(access.bytes()),
    }

    /// `[a], b`, then a cache policy with `cache_hint`. PTX ISA, "st".
    St(access: Memory) => {
        text: |m| { m.head("st")?; modifiers(m, access) },
        operands: {
            let mut s: Signature = smallvec![address(access.space), read(element(&access))];
            s.extend(policy(access.cache_hint));
            s
        },
        accepts: store(&access),
        needs: access_requirement(&access),
        accesses: |_position| Some(access.bytes()),
    }

    /// `[a]`. PTX ISA, "prefetch, prefetchu".
    Prefetch(space: Space, level: PrefetchLevel) => {
        text: |m| {
            let mut uniform = *level == PrefetchLevel::UniformL1;
            m.name(&mut uniform, &[(false, "prefetch"), (true, "prefetchu")])?;
            if uniform {
                *level = PrefetchLevel::UniformL1;
                return m.word("L1");
            }
            m.space(space)?;
            m.one(level, "a cache level such as `.L2`", LEVELS)
        },
        operands: smallvec![address(space)],
        accepts: prefetch(space, level),
        needs: match level {
            PrefetchLevel::L2EvictLast | PrefetchLevel::L2EvictNormal => need(74, 80),
            PrefetchLevel::TensorMap => need(80, 90),
            PrefetchLevel::L1 | PrefetchLevel::L2 | PrefetchLevel::UniformL1 => BASE,
        },
    }

    /// `[a], 128`: discards an L2 line of 128 bytes without writing it back. PTX ISA, "discard".
    Discard(space: Space) => {
        text: |m| { m.head("discard")?; m.space(space)?; m.word("L2") },
        operands: smallvec![address(space), read(SlotKind::Constant)],
        needs: need(74, 80),
        check: |inst| range("the bytes of discard", constant(inst, 1), 128, 128),
    }

    /// `policy, primary-fraction?`. PTX ISA, "createpolicy".
    CreatePolicy(policy: CreatePolicy) => {
        text: |m| {
            m.head("createpolicy.fractional")?;
            let mut primary = Some(policy.primary);
            m.eviction(&mut primary, "L2::")?;
            match primary {
                Some(primary) => policy.primary = primary,
                None => m.refuse("`createpolicy` needs a priority such as `.L2::evict_last`")?,
            }
            m.eviction(&mut policy.secondary, "L2::")?;
            m.word("b64")
        },
        operands: smallvec![write(value(Type::B64)), optional(value(Type::F32))],
        needs: need(74, 80),
    }
}

/// The cache policy of an instruction with `.L2::cache_hint`.
pub(super) fn policy(hint: bool) -> Option<Slot> {
    hint.then(|| read(POLICY))
}

fn modifiers<S: Syntax>(m: &mut S, access: &mut Memory) -> Result<(), S::Stop> {
    m.ordering(&mut access.sem, &mut access.scope)?;
    m.space(&mut access.space)?;
    m.maybe(&mut access.cache, CacheOp::NAMES)?;
    m.flag(&mut access.non_coherent, "nc")?;
    m.eviction(&mut access.l1, "L1::")?;
    m.eviction(&mut access.l2, "L2::")?;
    m.cache_hint(&mut access.cache_hint)?;
    m.l2_prefetch(&mut access.l2_prefetch)?;
    m.vector(&mut access.vector)?;
    m.ty(&mut access.ty)?;
    m.flag(&mut access.unified, "unified")
}

/// The value that is loaded or stored.
fn element(access: &Memory) -> SlotKind {
    match access.vector {
        0 | 1 => SlotKind::Wide(access.ty),
        elements => SlotKind::WideVector(access.ty, elements.into()),
    }
}

fn access_requirement(m: &Memory) -> Requirement {
    all([
        scope(m.scope),
        when(m.l1.is_some(), need(74, 75)),
        when(m.l2.is_some(), need(88, 100)),
        when(m.space == Space::SharedCluster, need(78, 90)),
        when(m.sem == MemSem::Mmio, need(82, 75)),
        when(m.ty == Type::B128, need(83, 75)),
        when(m.bytes() > 16, need(88, 100)),
        when(m.unified, need(80, 90)),
        when(m.cache_hint, need(74, 80)),
        when(m.l2_prefetch.is_some(), need(74, 75)),
        when(m.l2_prefetch == Some(256), need(74, 80)),
    ])
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
            "{name}.v{}.{} moves {} bytes; at most 16 are accepted (32 from and to .global)",
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
            "an ordered access needs a scope"
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
