//! Describes mnemonics as data, which the printer and the parser both read.
//!
//! The `text` part of an instruction's row names the parts of the mnemonic once, in the order in which the
//! PTX ISA writes them. The printer walks over the parts and writes the value of each field. The parser walks
//! over the same parts and sets each field from the modifiers of the text. The parser accepts modifiers in
//! any order, because compilers of different versions order some modifiers differently. Only types keep their
//! order.

use crate::{Eviction, MemSem, MmaShape, Scope, Space, Type};

use super::{SPACES, VECTORS};

/// A walk over the parts of a mnemonic.
///
/// A table of names pairs values with spellings. A spelling of several modifiers contains dots
/// (`arrive.expect_tx`); the parser prefers the spelling with the most modifiers. If a value has several
/// spellings, the printer writes the first.
pub(crate) trait Syntax {
    /// Why a walk ends early.
    type Stop;

    /// The name of the instruction, which may include modifiers (`cp.async.bulk`). Always the first part.
    fn name<T: Copy + PartialEq>(
        &mut self,
        value: &mut T,
        names: &[(T, &'static str)],
    ) -> Result<(), Self::Stop>;

    /// A required modifier. `what` describes the modifier in an error.
    fn one<T: Copy + PartialEq>(
        &mut self,
        value: &mut T,
        what: &str,
        names: &[(T, &str)],
    ) -> Result<(), Self::Stop>;

    /// An optional modifier.
    fn maybe<T: Copy + PartialEq>(
        &mut self,
        value: &mut Option<T>,
        names: &[(T, &str)],
    ) -> Result<(), Self::Stop>;

    /// A fixed, required modifier.
    fn word(&mut self, word: &str) -> Result<(), Self::Stop>;

    /// A type.
    fn ty(&mut self, ty: &mut Type) -> Result<(), Self::Stop>;

    /// A shape such as `m16n8k16`.
    fn shape(&mut self, shape: &mut MmaShape) -> Result<(), Self::Stop>;

    /// An eviction priority after the prefix of a cache level: `L1::evict_first`.
    fn eviction(&mut self, priority: &mut Option<Eviction>, level: &str) -> Result<(), Self::Stop>;

    /// Whether the text has a modifier that has no effect and is therefore not printed. Always false when
    /// printing.
    fn redundant(&mut self, word: &str) -> bool;

    /// Number of types that the text still has; `None` when printing.
    fn types_left(&self) -> Option<usize>;

    /// Ends the parse with a message. Does nothing when printing.
    fn refuse(&mut self, message: impl Into<String>) -> Result<(), Self::Stop>;

    /// Ends the parse at the first modifier that begins with one of the prefixes. Does nothing when printing.
    fn unsupported(&mut self, prefixes: &[&str], why: &str) -> Result<(), Self::Stop>;

    /// `.sync`, which warp instructions must have since sm_70.
    fn sync(&mut self) -> Result<(), Self::Stop>;

    /// A name that has no other spelling.
    fn head(&mut self, name: &'static str) -> Result<(), Self::Stop> {
        self.name(&mut (), &[((), name)])
    }

    /// An optional modifier; `absent` is the value when the modifier is missing.
    fn optional<T: Copy + PartialEq>(
        &mut self,
        value: &mut T,
        absent: T,
        names: &[(T, &str)],
    ) -> Result<(), Self::Stop> {
        let mut written = (*value != absent).then_some(*value);
        self.maybe(&mut written, names)?;
        *value = written.unwrap_or(absent);
        Ok(())
    }

    /// A modifier whose presence sets `value`.
    fn flag(&mut self, value: &mut bool, word: &str) -> Result<(), Self::Stop> {
        self.optional(value, false, &[(true, word)])
    }

    /// The state space; generic when none is written.
    fn space(&mut self, space: &mut Space) -> Result<(), Self::Stop> {
        self.optional(space, Space::Generic, SPACES)
    }

    /// `.v2`, `.v4` or `.v8`; one element when none is written.
    fn vector(&mut self, elements: &mut u8) -> Result<(), Self::Stop> {
        self.optional(elements, 1, VECTORS)
    }

    /// `.L2::64B`, `.L2::128B` or `.L2::256B`: a prefetch size in bytes.
    fn l2_prefetch(&mut self, bytes: &mut Option<u16>) -> Result<(), Self::Stop> {
        self.maybe(bytes, &[(64, "L2::64B"), (128, "L2::128B"), (256, "L2::256B")])
    }

    /// `.L2::cache_hint`: a cache policy follows as the last operand.
    fn cache_hint(&mut self, hint: &mut bool) -> Result<(), Self::Stop> {
        self.flag(hint, "L2::cache_hint")
    }

    /// A memory ordering with its scope.
    fn ordering(&mut self, sem: &mut MemSem, scope: &mut Option<Scope>) -> Result<(), Self::Stop> {
        self.optional(sem, MemSem::Default, MemSem::NAMES)?;
        self.maybe(scope, Scope::NAMES)
    }

    /// `.sync.aligned`.
    fn aligned(&mut self) -> Result<(), Self::Stop> {
        self.word("sync")?;
        self.word("aligned")
    }
}

/// Defines the spellings of an enum's values, in one list for the printer, the parser and callers.
macro_rules! names {
    ($($ty:ident { $($variant:ident = $name:literal),* $(,)? })*) => { $(
        impl $ty {
            /// Every value with its spelling in PTX text, without the leading dot.
            pub const NAMES: &'static [($ty, &'static str)] = &[$(($ty::$variant, $name)),*];

            /// The spelling in PTX text, without the leading dot.
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name),* }
            }

            /// The value with this spelling.
            pub fn from_name(name: &str) -> Option<$ty> {
                Self::NAMES.iter().find(|(_, spelling)| *spelling == name).map(|&(value, _)| value)
            }
        }

        impl crate::isa::syntax::Start for $ty {
            const START: $ty = $ty::NAMES[0].0;
        }
    )* };
}
pub(crate) use names;

/// The value of a field before the parser has read it.
pub(crate) trait Start {
    const START: Self;
}

/// Implements [`Start`] for types.
macro_rules! start {
    ($($ty:ty = $value:expr;)*) => { $(
        impl crate::isa::syntax::Start for $ty {
            const START: $ty = $value;
        }
    )* };
}
pub(crate) use start;

impl<T> Start for Option<T> {
    const START: Option<T> = None;
}

start! {
    bool = false;
    u8 = 1;
    Space = Space::Generic;
}
