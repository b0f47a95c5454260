//! Typed registers, sources and pointers.

use std::marker::PhantomData;
use std::ops::Not;

use crate::operand::{Base, Guard, Imm, Operand, Reg};
use crate::{Address, Space, Type};

mod sealed {
    pub trait Sealed {}
}

/// A typed virtual register. Registers are mutable, as in PTX: a handle names a register and not a value.
pub trait Value: Copy + sealed::Sealed + Into<Src<Self>> {
    /// The type in the declaration of the register.
    const TYPE: Type;
    /// The index of the register.
    fn reg(self) -> Reg;
    #[doc(hidden)]
    fn from_reg(reg: Reg) -> Self;
}

/// An integer register. The operation determines the signedness, as in PTX.
pub trait Int: Value {
    /// The signed type of this width.
    const SIGNED: Type;
    /// The unsigned type of this width.
    const UNSIGNED: Type;
}

/// A floating-point register.
pub trait Float: Value {}

macro_rules! registers {
    ($($(#[$doc:meta])* $name:ident: $ty:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(Reg);

        impl sealed::Sealed for $name {}

        impl Value for $name {
            const TYPE: Type = Type::$ty;
            fn reg(self) -> Reg { self.0 }
            fn from_reg(reg: Reg) -> $name { $name(reg) }
        }

        impl From<$name> for Src<$name> {
            fn from(value: $name) -> Src<$name> { Src(Operand::Reg(value.0), PhantomData) }
        }
    )*};
}

registers! {
    /// 16 bits: an integer or one f16/bf16.
    R16: B16,
    /// 32 bits: an integer, a pair of f16/bf16, or an address in shared memory.
    R32: B32,
    /// 64 bits: an integer or an address.
    R64: B64,
    /// An f32.
    F32: F32,
    /// An f64.
    F64: F64,
    /// A predicate. `!p` is its negation, for positions that accept a guard.
    Pred: Pred,
}

impl Int for R16 {
    const SIGNED: Type = Type::S16;
    const UNSIGNED: Type = Type::U16;
}
impl Int for R32 {
    const SIGNED: Type = Type::S32;
    const UNSIGNED: Type = Type::U32;
}
impl Int for R64 {
    const SIGNED: Type = Type::S64;
    const UNSIGNED: Type = Type::U64;
}
impl Float for F32 {}
impl Float for F64 {}

impl From<Pred> for Guard {
    fn from(pred: Pred) -> Guard {
        Guard { reg: pred.0, negated: false }
    }
}

impl Not for Pred {
    type Output = Guard;
    fn not(self) -> Guard {
        Guard { reg: self.0, negated: true }
    }
}

impl Not for Guard {
    type Output = Guard;
    fn not(self) -> Guard {
        Guard { reg: self.reg, negated: !self.negated }
    }
}

impl From<Guard> for Operand {
    fn from(guard: Guard) -> Operand {
        if guard.negated { Operand::Not(guard.reg) } else { Operand::Reg(guard.reg) }
    }
}

/// A source for register type `V`: a register or an immediate.
#[derive(Clone, Debug)]
pub struct Src<V>(pub(super) Operand, PhantomData<V>);

impl<V> Src<V> {
    pub(super) fn imm(imm: Imm) -> Src<V> {
        Src(Operand::Imm(imm), PhantomData)
    }
}

impl<V> From<Src<V>> for Operand {
    fn from(src: Src<V>) -> Operand {
        src.0
    }
}

macro_rules! integer_immediates {
    ($($reg:ident: $($int:ty),*);* $(;)?) => {$($(
        impl From<$int> for Src<$reg> {
            fn from(value: $int) -> Src<$reg> { Src::imm(Imm::Int(value as i64)) }
        }
    )*)*};
}

// A u64 above i64::MAX keeps its bits: an immediate has no signedness.
integer_immediates! {
    R16: i32, u16, i16;
    R32: i32, u32;
    R64: i32, u32, i64, u64;
}

impl From<bool> for Src<Pred> {
    fn from(value: bool) -> Src<Pred> {
        Src::imm(Imm::Int(value.into()))
    }
}

impl From<f32> for Src<F32> {
    fn from(value: f32) -> Src<F32> {
        Src::imm(Imm::F32(value.to_bits()))
    }
}

impl From<f64> for Src<F64> {
    fn from(value: f64) -> Src<F64> {
        Src::imm(Imm::F64(value.to_bits()))
    }
}

/// An address with its state space: a base register and a constant offset in bytes.
pub trait Pointer: Copy {
    /// The state space.
    const SPACE: Space;
    /// The address as an operand.
    fn address(self) -> Address;
    /// The address plus `bytes` bytes.
    #[must_use]
    fn at(self, bytes: i64) -> Self;
}

/// An address in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Global {
    /// The base register.
    pub base: R64,
    /// Offset from the base in bytes.
    pub offset: i64,
}

/// An address in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shared {
    /// The base register.
    pub base: R32,
    /// Offset from the base in bytes.
    pub offset: i64,
}

impl Pointer for Global {
    const SPACE: Space = Space::Global;
    fn address(self) -> Address {
        Address { base: Base::Reg(self.base.0), offset: self.offset }
    }
    fn at(self, bytes: i64) -> Global {
        Global { offset: self.offset + bytes, ..self }
    }
}

impl Pointer for Shared {
    const SPACE: Space = Space::Shared;
    fn address(self) -> Address {
        Address { base: Base::Reg(self.base.0), offset: self.offset }
    }
    fn at(self, bytes: i64) -> Shared {
        Shared { offset: self.offset + bytes, ..self }
    }
}

/// An address in shared memory of any CTA of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterShared {
    /// The base register.
    pub base: R32,
    /// Offset from the base in bytes.
    pub offset: i64,
}

impl Pointer for ClusterShared {
    const SPACE: Space = Space::SharedCluster;
    fn address(self) -> Address {
        Address { base: Base::Reg(self.base.0), offset: self.offset }
    }
    fn at(self, bytes: i64) -> ClusterShared {
        ClusterShared { offset: self.offset + bytes, ..self }
    }
}

/// An address of the own CTA is an address of the cluster.
impl From<Shared> for ClusterShared {
    fn from(own: Shared) -> ClusterShared {
        ClusterShared { base: own.base, offset: own.offset }
    }
}

/// An address in shared memory, of the own CTA or of any CTA of the cluster.
pub trait SharedPointer: Pointer + sealed::Sealed {}

impl sealed::Sealed for Shared {}
impl sealed::Sealed for ClusterShared {}
impl SharedPointer for Shared {}
impl SharedPointer for ClusterShared {}

/// The generic address of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMapPtr {
    /// The address, a multiple of 64 bytes.
    pub base: R64,
}

impl From<R64> for Global {
    fn from(base: R64) -> Global {
        Global { base, offset: 0 }
    }
}

impl From<R32> for Shared {
    fn from(base: R32) -> Shared {
        Shared { base, offset: 0 }
    }
}

/// An address in the thread's private memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Local {
    /// The base register.
    pub base: R64,
    /// Offset from the base in bytes.
    pub offset: i64,
}

impl Pointer for Local {
    const SPACE: Space = Space::Local;
    fn address(self) -> Address {
        Address { base: Base::Reg(self.base.0), offset: self.offset }
    }
    fn at(self, bytes: i64) -> Local {
        Local { offset: self.offset + bytes, ..self }
    }
}
