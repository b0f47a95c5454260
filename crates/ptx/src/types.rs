//! The types and the state spaces of PTX.

use std::fmt;

/// A PTX type: the fundamental types, and the packed and alternate formats that only some instructions name
/// (PTX ISA, "Fundamental Types" and "Alternate Floating-Point Data Formats").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the variants are the ISA's own type names")]
pub enum Type {
    Pred,
    B1,
    B8,
    B16,
    B32,
    B64,
    B128,
    U2,
    U4,
    U8,
    U16,
    U32,
    U64,
    S2,
    S4,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F32x2,
    F64,
    E4m3,
    E5m2,
    E4m3x2,
    E5m2x2,
    U16x2,
    S16x2,
}

impl Type {
    /// Every type.
    pub const ALL: [Type; 33] = [
        Type::Pred,
        Type::B1,
        Type::B8,
        Type::B16,
        Type::B32,
        Type::B64,
        Type::B128,
        Type::U2,
        Type::U4,
        Type::U8,
        Type::U16,
        Type::U32,
        Type::U64,
        Type::S2,
        Type::S4,
        Type::S8,
        Type::S16,
        Type::S32,
        Type::S64,
        Type::F16,
        Type::F16x2,
        Type::Bf16,
        Type::Bf16x2,
        Type::Tf32,
        Type::F32,
        Type::F32x2,
        Type::F64,
        Type::E4m3,
        Type::E5m2,
        Type::E4m3x2,
        Type::E5m2x2,
        Type::U16x2,
        Type::S16x2,
    ];

    /// Width in bits; 1 for a predicate.
    pub const fn bits(self) -> u32 {
        match self {
            Type::Pred | Type::B1 => 1,
            Type::U2 | Type::S2 => 2,
            Type::U4 | Type::S4 => 4,
            Type::B8 | Type::U8 | Type::S8 | Type::E4m3 | Type::E5m2 => 8,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 | Type::E4m3x2 | Type::E5m2x2 => 16,
            Type::B32
            | Type::U32
            | Type::S32
            | Type::F16x2
            | Type::Bf16x2
            | Type::Tf32
            | Type::F32
            | Type::U16x2
            | Type::S16x2 => 32,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 | Type::F32x2 => 64,
            Type::B128 => 128,
        }
    }

    /// The untyped `.bN` with this width in bits; `.b32` when no such type exists.
    pub const fn bits_of(bits: u32) -> Type {
        match bits {
            1 => Type::B1,
            8 => Type::B8,
            16 => Type::B16,
            64 => Type::B64,
            128 => Type::B128,
            _ => Type::B32,
        }
    }

    /// Size in memory in bytes; 0 for predicates and for types smaller than a byte.
    pub const fn bytes(self) -> u32 {
        self.bits() / 8
    }

    /// Whether the type is a signed integer.
    pub const fn is_signed(self) -> bool {
        matches!(self, Type::S2 | Type::S4 | Type::S8 | Type::S16 | Type::S32 | Type::S64 | Type::S16x2)
    }

    /// Whether the type is a signed or unsigned integer (packed pairs included).
    pub const fn is_integer(self) -> bool {
        self.is_signed()
            || matches!(
                self,
                Type::U2 | Type::U4 | Type::U8 | Type::U16 | Type::U32 | Type::U64 | Type::U16x2
            )
    }

    /// Whether the type is an untyped `.bN`.
    pub const fn is_bits(self) -> bool {
        matches!(self, Type::B1 | Type::B8 | Type::B16 | Type::B32 | Type::B64 | Type::B128)
    }

    /// Whether the type is a floating-point format (packed and alternate formats included).
    pub const fn is_float(self) -> bool {
        !self.is_bits() && !self.is_integer() && !matches!(self, Type::Pred)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A state space that an address can point into. Parameters of a kernel and of device functions share
/// `Param`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// No space named: a generic address, resolved by its value.
    Generic,
    /// Device memory, seen by all threads.
    Global,
    /// Shared memory of the executing CTA (`.shared`, `.shared::cta`).
    Shared,
    /// Shared memory of any CTA of the cluster (`.shared::cluster`).
    SharedCluster,
    /// Private memory of a thread.
    Local,
    /// Read-only constant memory.
    Const,
    /// Parameters of kernels and functions.
    Param,
}

impl Space {
    /// The suffix in PTX text with its leading dot; empty for generic addresses.
    pub const fn suffix(self) -> &'static str {
        match self {
            Space::Generic => "",
            Space::Global => ".global",
            Space::Shared => ".shared",
            Space::SharedCluster => ".shared::cluster",
            Space::Local => ".local",
            Space::Const => ".const",
            Space::Param => ".param",
        }
    }
}
