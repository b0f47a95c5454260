//! The instruction set, one file per group of instructions.
//!
//! A group file describes each of its instructions once, in one row of an [`instructions!`] table: the
//! variant of [`Op`] with its documentation, the mnemonic with its modifiers, the operands, the accepted
//! combinations of types and modifiers, and the target and `.version` that the instruction needs. The types
//! of the modifiers and the tables that the rows refer to stand in the same file. The printer, the parser and
//! the verifier read the rows and have no list of instructions of their own. The typed methods of
//! [`Builder`](crate::Builder) emit [`Op`]s and cover the instructions that kernels use.
//!
//! A row has these parts, in this order:
//!
//! | part | value |
//! |---|---|
//! | `text` | the mnemonic with its modifiers, as a walk over a [`Syntax`](syntax::Syntax) |
//! | `operands` | the [`Signature`] |
//! | `accepts` | `Err` with a reason for types and modifiers that the PTX ISA does not combine; optional |
//! | `needs` | the [`Requirement`]; optional, [`Requirement::BASE`] when missing |
//! | `check` | rules about the operands beyond their kinds, such as ranges of constants; optional |
//! | `accesses` | bytes accessed at the address in an operand position; optional, for rules about alignment |
//!
//! A row without `text` or `operands` does not compile.

pub(crate) mod requirement;
pub(crate) mod signature;
pub(crate) mod syntax;

use syntax::names;

/// A part of a row, or its default if the row does not have the part.
macro_rules! given_or {
    ($given:expr; $default:expr) => {
        $given
    };
    (; $default:expr) => {
        $default
    };
}

/// Defines the instructions of a group. `$list` becomes a macro that passes the group's variants on, see
/// [`define!`].
macro_rules! instructions {
    (($d:tt) $group:ident $list:ident $(
        $(#[$doc:meta])*
        $variant:ident $(( $($part:ident : $part_ty:ty),* $(,)? ))?
            $({ $($(#[$field_doc:meta])* $field:ident : $field_ty:ty),* $(,)? })?
        => {
            text: |$m:ident| $text:expr,
            operands: $operands:expr
            $(, accepts: $accepts:expr)?
            $(, needs: $needs:expr)?
            $(, check: |$inst:ident| $check:expr)?
            $(, accesses: |$position:ident| $accesses:expr)?
            $(,)?
        }
    )*) => {
        macro_rules! $list {
            ([$d next:ident $d($d rest:ident)*] $d($d done:tt)*) => {
                $d next! { [$d($d rest)*] $d($d done)* $group { $(
                    $(#[$doc])*
                    $variant $(( $($part_ty),* ))? $({ $($(#[$field_doc])* $field: $field_ty),* })?,
                )* } }
            };
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn text<S: crate::isa::syntax::Syntax>(
            op: &mut crate::Op,
            syntax: &mut S,
        ) -> Result<(), S::Stop> {
            match op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => {
                    let $m = syntax;
                    $text
                })*
                _ => Ok(()),
            }
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn operands(op: &crate::Op) -> crate::Signature {
            match *op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => $operands,)*
                _ => crate::Signature::new(),
            }
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn accepts(op: &crate::Op) -> Result<(), String> {
            match *op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => {
                    given_or!($($accepts)?; Ok(()))
                })*
                _ => Ok(()),
            }
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn needs(op: &crate::Op) -> crate::Requirement {
            match *op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => {
                    given_or!($($needs)?; crate::Requirement::BASE)
                })*
                _ => crate::Requirement::BASE,
            }
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn check(instruction: &crate::Instruction) -> Result<(), crate::verify::Fault> {
            match instruction.op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => {
                    given_or!($({ let $inst = instruction; $check })?; Ok(()))
                })*
                _ => Ok(()),
            }
        }

        #[allow(unused_variables, reason = "a row uses the fields that it needs")]
        pub(super) fn accesses(op: &crate::Op, operand: usize) -> Option<u32> {
            match *op {
                $(crate::Op::$variant $(( $($part),* ))? $({ $($field),* })? => {
                    given_or!($({ let $position = operand; $accesses })?; None)
                })*
                _ => None,
            }
        }
    };
}

#[macro_use]
mod arith;
#[macro_use]
mod compare;
#[macro_use]
mod logic;
#[macro_use]
mod convert;
#[macro_use]
mod address;
#[macro_use]
mod memory;
#[macro_use]
mod atomic;
#[macro_use]
mod async_copy;
#[macro_use]
mod bulk;
#[macro_use]
mod matrix;
#[macro_use]
mod mma;
#[macro_use]
mod wmma;
#[macro_use]
mod wgmma;
#[macro_use]
mod tcgen05;
#[macro_use]
mod warp;
#[macro_use]
mod barrier;
#[macro_use]
mod mbarrier;
#[macro_use]
mod launch;
#[macro_use]
mod tensormap;
#[macro_use]
mod control;

pub use arith::*;
pub use async_copy::*;
pub use atomic::*;
pub use barrier::*;
pub use bulk::*;
pub use compare::*;
pub use control::*;
pub use convert::*;
pub use launch::*;
pub use logic::*;
pub use matrix::*;
pub use mbarrier::*;
pub use memory::*;
pub use mma::*;
pub use tcgen05::*;
pub use tensormap::*;
pub use warp::*;
pub use wgmma::*;
pub use wmma::*;

use crate::{Instruction, Requirement, Signature, Space, Type};

/// Defines [`Op`] from the variants of all groups, and the functions that find the row of an operation.
macro_rules! define {
    ([] $($group:ident { $(
        $(#[$doc:meta])*
        $variant:ident $(( $($part:ty),* ))? $({ $($(#[$field_doc:meta])* $field:ident : $field_ty:ty),* })?,
    )* })*) => {
        /// An operation with all its modifiers.
        ///
        /// The documentation of each variant gives the operands in the order of the PTX ISA: `d` is a result,
        /// `[x]` an address, `?` marks an operand that may be left out, and the quoted name is the section of
        /// the PTX ISA.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op { $($(
            $(#[$doc])*
            $variant $(( $($part),* ))? $({ $($(#[$field_doc])* $field: $field_ty),* })?,
        )*)* }

        impl Op {
            /// The operands, in the order of the PTX ISA.
            pub fn signature(&self) -> Signature {
                match self { $($(Op::$variant { .. } => $group::operands(self),)*)* }
            }

            /// The target and the `.version` that the operation needs with these modifiers.
            pub fn requirement(&self) -> Requirement {
                match self { $($(Op::$variant { .. } => $group::needs(self),)*)* }
            }

            /// Checks types and modifiers; `Err` says what is wrong and what is accepted.
            pub(crate) fn check_modifiers(&self) -> Result<(), String> {
                match self { $($(Op::$variant { .. } => $group::accepts(self),)*)* }
            }

            /// Bytes that the operation accesses at the address in this operand position, if the size is
            /// known.
            pub(crate) fn accessed_bytes(&self, position: usize) -> Option<u32> {
                match self { $($(Op::$variant { .. } => $group::accesses(self, position),)*)* }
            }

            /// Walks over the mnemonic and the modifiers, see [`Syntax`](syntax::Syntax).
            pub(crate) fn text<S: syntax::Syntax>(&mut self, syntax: &mut S) -> Result<(), S::Stop> {
                match self { $($(Op::$variant { .. } => $group::text(self, syntax),)*)* }
            }

            /// One operation of each variant, whose fields the parser then sets.
            pub(crate) fn prototypes() -> impl Iterator<Item = Op> {
                use syntax::Start;
                [$($(
                    Op::$variant
                        $(( $(<$part as Start>::START),* ))?
                        $({ $($field: <$field_ty as Start>::START),* })?,
                )*)*]
                .into_iter()
            }
        }

        impl Instruction {
            /// Checks rules about operands that the operand kinds do not express.
            pub(crate) fn check_operands(&self) -> Result<(), crate::verify::Fault> {
                match self.op { $($(Op::$variant { .. } => $group::check(self),)*)* }
            }
        }
    };
}

arith_list! { [
    compare_list logic_list convert_list address_list memory_list atomic_list async_copy_list bulk_list
    matrix_list mma_list wmma_list wgmma_list tcgen05_list warp_list barrier_list mbarrier_list launch_list
    tensormap_list control_list define
] }

names! {
    Type {
        Pred = "pred", B1 = "b1", B8 = "b8", B16 = "b16", B32 = "b32", B64 = "b64", B128 = "b128", U2 = "u2",
        U4 = "u4",
        U8 = "u8", U16 = "u16", U32 = "u32", U64 = "u64", S2 = "s2", S4 = "s4", S8 = "s8", S16 = "s16",
        S32 = "s32",
        S64 = "s64", F16 = "f16", F16x2 = "f16x2", Bf16 = "bf16", Bf16x2 = "bf16x2", Tf32 = "tf32",
        F32 = "f32",
        F32x2 = "f32x2", F64 = "f64", E4m3 = "e4m3", E5m2 = "e5m2", E4m3x2 = "e4m3x2", E5m2x2 = "e5m2x2",
        U16x2 = "u16x2", S16x2 = "s16x2",
    }
}

/// State spaces as modifiers. The printer writes the first spelling of a space; the parser accepts all.
pub(crate) const SPACES: &[(Space, &str)] = &[
    (Space::Global, "global"),
    (Space::Shared, "shared"),
    (Space::Shared, "shared::cta"),
    (Space::SharedCluster, "shared::cluster"),
    (Space::Local, "local"),
    (Space::Const, "const"),
    (Space::Param, "param"),
    (Space::Param, "param::entry"),
    (Space::Param, "param::func"),
];

/// `.v2`, `.v4`, `.v8`: elements of a vector access.
pub(crate) const VECTORS: &[(u8, &str)] = &[(2, "v2"), (4, "v4"), (8, "v8")];

/// How an error describes the operand of `wait_group`.
pub(crate) const PENDING_GROUPS: &str = "the groups that may stay in flight";

/// Packed 16-bit integers.
pub(crate) const fn is_pair(ty: Type) -> bool {
    matches!(ty, Type::U16x2 | Type::S16x2)
}

/// bf16, alone or as a pair.
pub(crate) const fn is_bf16(ty: Type) -> bool {
    matches!(ty, Type::Bf16 | Type::Bf16x2)
}

/// A 16-bit float, alone or as a pair.
pub(crate) const fn is_half(ty: Type) -> bool {
    is_bf16(ty) || matches!(ty, Type::F16 | Type::F16x2)
}

impl Instruction {
    /// The requirement of the instruction, special registers among its operands included.
    pub fn requirement(&self) -> Requirement {
        let own = self.op.requirement().and(mbarrier::arrival_count(self));
        self.operands.iter().fold(own, |all, operand| match operand {
            crate::Operand::Special(register) => all.and(requirement::special(*register)),
            _ => all,
        })
    }
}
