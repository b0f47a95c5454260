//! Whether a module is one that the PTX ISA allows, as far as that can be told without running it. Passing yields a
//! [`Verified`], so whoever runs or measures a module can ask for one.
//!
//! What holds of a verified module, by [`Rule`]:
//!
//! - **Operands.** Each instruction has as many operands as its [`Signature`](crate::Signature) says, each of the kind
//!   that its position takes: a register, constant, special register, symbol, vector of the right length, address,
//!   label or list. Constants stand for sources only. Special registers are read by `mov` and `cvt`, addresses taken by
//!   `mov` and `cvta`. `_` stands for results that may be dropped, `!p` where a predicate may be negated. A cache policy
//!   is there exactly when `.L2::cache_hint` is. Tensor-core fragments have the registers of their shape.
//! - **Types.** A register has the width of its position, and a type that agrees with it: untyped bits with all, signed
//!   with unsigned integers, a float with itself, a predicate with predicates. `ld`, `st` and `cvt` take wider
//!   registers for integers and bits. Addresses are 64-bit registers, 32-bit ones too in the spaces that fit. Guards
//!   are predicates. Integer constants do not stand for floats, nor the reverse.
//! - **Modifiers.** Type, rounding, flags, cache operators, ordering, scope, space, vector length, shape and comparison
//!   of an instruction go together.
//! - **Immediates.** Constants fit their position: the width of its type, the sizes of `cp.async`, sixteen barriers,
//!   thread counts in whole warps, the 8 bits of `lop3`'s table, 32-bit offsets.
//! - **Alignment.** An access at a constant offset into a variable or parameter lies inside it and on a multiple of its
//!   own size, where the variable is so aligned. Alignments are powers of two.
//! - **Definitions.** No register is read that nothing can have written: on some way from the entry there is a write.
//!   (On *every* way would refuse what compilers emit; the emulator watches each read as it runs.)
//! - **Labels.** Each label of a branch is placed, once, in the same function.
//! - **Symbols.** Each name used is declared, once, and lies in the space that the instruction names. Initialisers fit
//!   their variables, which lie in global or constant memory. Arrays without a length are external shared memory.
//! - **Calls.** The callee is declared; the numbers of arguments and results are its own, and so are their sizes.
//! - **Bounds.** Bounds of a launch are positive, within 1024 threads a CTA, and on kernels only; kernels return
//!   nothing; static shared memory is at most 48 KiB and parameters are at most 32764 bytes.
//! - **Target** and **Version.** `.target` and `.version` know every instruction, and `.version` knows the target. The
//!   error says what would be needed.

mod constants;
mod features;
mod flow;
mod forms;
mod modifiers;
mod module;
mod operands;

use std::fmt::{self, Display, Formatter};

use crate::{Module, Name};

/// A module that holds the invariants above.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'m>(&'m Module);

impl<'m> Verified<'m> {
    /// The module.
    pub fn module(self) -> &'m Module {
        self.0
    }
}

/// Kind of an invariant; see `Verified`'s module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "described one by one in the documentation of the module")]
pub enum Rule {
    Operands,
    Types,
    Modifiers,
    Immediates,
    Alignment,
    Definitions,
    Labels,
    Symbols,
    Calls,
    Bounds,
    Target,
    Version,
}

impl Rule {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Rule::Operands => "operands",
            Rule::Types => "types",
            Rule::Modifiers => "modifiers",
            Rule::Immediates => "immediates",
            Rule::Alignment => "alignment",
            Rule::Definitions => "definitions",
            Rule::Labels => "labels",
            Rule::Symbols => "symbols",
            Rule::Calls => "calls",
            Rule::Bounds => "bounds",
            Rule::Target => "target",
            Rule::Version => "version",
        }
    }
}

/// One invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyError {
    /// Line of the text, from 1; 0 for what is not an instruction, and for modules that were built.
    pub line: u32,
    /// The function, if any.
    pub function: Option<Name>,
    /// The instruction or declaration as PTX text.
    pub instruction: String,
    /// The invariant.
    pub rule: Rule,
    /// What is wrong and what would be accepted.
    pub message: String,
}

impl Display for VerifyError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "[{}] `{}` ", self.rule.name(), self.instruction)?;
        if let Some(function) = &self.function {
            write!(f, "in `{function}` ")?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for VerifyError {}

/// What is wrong with a module, at least one thing; the first hundred.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|e| e.to_string()).collect::<Vec<_>>().join("\n"))]
pub struct VerifyErrors(pub Vec<VerifyError>);

/// Errors kept; more help nobody.
const MAX_ERRORS: usize = 100;

impl Module {
    /// Checks the invariants.
    ///
    /// # Errors
    /// With those that do not hold.
    pub fn verify(&self) -> Result<Verified<'_>, VerifyErrors> {
        let mut errors = Vec::new();
        module::check(self, &mut errors);
        if errors.is_empty() { Ok(Verified(self)) } else { Err(VerifyErrors(errors)) }
    }
}
