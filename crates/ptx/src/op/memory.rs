use crate::{Space, Type};

/// Ordering of a load, store or atomic (PTX ISA, "Memory Consistency Model").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MemSem {
    /// Nothing written, or `.weak` (loads and stores: weak; atomics: relaxed).
    #[default]
    Default,
    /// `.weak`, written out.
    Weak,
    Volatile,
    Relaxed,
    Acquire,
    Release,
    AcqRel,
    /// `.mmio.relaxed.sys`.
    Mmio,
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
    /// `.nc` (loads from global): the texture path, for data that no one writes meanwhile.
    pub non_coherent: bool,
    /// `.L1::evict_…`.
    pub l1: Option<Eviction>,
    /// `.L2::evict_…`.
    pub l2: Option<Eviction>,
    /// `.L2::64B`, `.L2::128B`, `.L2::256B`: prefetch size in bytes.
    pub l2_prefetch: Option<u16>,
    /// `.L2::cache_hint`: a 64-bit cache policy follows as last operand.
    pub cache_hint: bool,
    /// `.unified` is written.
    pub unified: bool,
    /// `ldu`, the older spelling of a read-only load.
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

/// What an atomic does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum AtomicOp {
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Add,
    Inc,
    Dec,
    Min,
    Max,
}

/// Modifiers of `atom` and `red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Atomic {
    /// What it does.
    pub op: AtomicOp,
    /// State space.
    pub space: Space,
    /// Element type.
    pub ty: Type,
    /// Elements per access: 1, 2, 4 or 8.
    pub vector: u8,
    /// Ordering.
    pub sem: MemSem,
    /// Scope; none written means gpu.
    pub scope: Option<Scope>,
    /// `.noftz` (f16, bf16).
    pub noftz: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
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
    /// Priority of the rest.
    pub secondary: Option<Eviction>,
}
