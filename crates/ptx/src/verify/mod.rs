//! The verifier: a pass over a module that returns [`Verified`], or every [`Violation`] that it found.
//!
//! The verifier checks what can be known without running the module. The emulator checks the rest. A module
//! that passes has these properties.
//!
//! **Module.** The module's `.version` supports the target, and both support everything that the module uses
//! ([`Requirement`]). No two variables share a name, and no two functions, except that declarations of a
//! function may precede its definition. Declarations agree with the definition in the sizes of parameters and
//! results.
//!
//! **Variables.** Alignments are powers of two. Dimensions other than a leading `[]` are not 0. `[]` needs
//! `.extern` or an initialiser. The size fits the state space (static shared memory of a function 48 KiB,
//! local memory 512 KiB, constants 64 KiB). Only `.global` and `.const` variables are initialised. An
//! initialiser is not longer than its variable and contains no address of an undeclared name.
//!
//! **Functions.** Kernels return nothing, have a body and are not `.noreturn`. Their parameters are `.param`s
//! of together at most 4352 bytes (32764 from `.version` 8.1 on). Launch bounds are not 0. A CTA has at most
//! 1024 threads, a cluster at most 16 CTAs. `.maxntid` excludes `.reqntid`. Names of registers, labels and
//! variables are unique in the function. Every label that is used is placed exactly once.
//!
//! **Operands.** Their number and kinds are those of [`Op::signature`](crate::Op::signature). A register is
//! as wide as the instruction's type, or wider in `ld`, `st` and `cvt`. The type of a register agrees with
//! the instruction's type: integers with integers and with `.bN`, floats with the same float and with `.bN`,
//! `.bN` with everything. A guard is a predicate. Results are registers or `_`. A floating-point immediate
//! stands for a float or for bits. An integer immediate fits its width. A vector has the number of elements
//! that the type, the fragment or the packed width requires. Only `mov` packs, on one side.
//!
//! **Addresses.** A base register is 64 bits wide, or 32 for `.shared`, `.local`, `.const` and `.param`. A
//! symbol is in the space that the instruction names. If base and offset are known, the access is aligned to
//! its size and ends inside the variable. A bulk copy is aligned to 16 bytes, a box of a tensor to 128. The
//! address of a tensor map has no offset.
//!
//! **Modifiers.** The operation supports the type and the combination of modifiers: roundings, `.ftz`,
//! `.sat`, comparisons, conversions, orderings with their scopes, cache operators, matrix shapes. The rules
//! are in the row of each instruction (`isa`).
//!
//! **Constants.** Barrier indices are 0 to 15, and barriers count whole warps. `cp.async` copies 4, 8 or 16
//! bytes (`.cg` 16) and reads no more than that. `lop3` tables have 8 bits. `setmaxnreg` takes 24 to 256 in
//! steps of 8. The number of groups to wait for is not negative. A member mask is not 0. The scales of
//! `wgmma` are 1 or -1, its transpositions 0 or 1. Bulk copies move multiples of 16 bytes.
//!
//! **Warpgroups.** If a kernel that uses `wgmma` or `setmaxnreg` has launch bounds, these allow at least one
//! warpgroup, 128 threads.
//!
//! **CTA pairs.** All instructions of tensor memory of a function name the same `.cta_group`.
//!
//! **Calls.** The callee is declared and is not a kernel. The numbers and sizes of arguments and results
//! agree.
//!
//! **Definitions.** A register that is read was written on at least one path from the entry. A guarded write
//! counts. Code that compilers emit passes this rule. The emulator reports a read that is undefined only on
//! some paths, because it knows the path that was taken.

mod calls;
mod declarations;
mod flow;
mod operands;
pub(crate) mod rules;
mod symbols;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::{Body, Function, Instruction, Module, Name, Statement, quote};

use symbols::Symbols;

/// The kind of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// The target or the `.version` does not support something that the module uses.
    Target,
    /// The declaration of a variable, parameter, register or function is invalid.
    Declaration,
    /// A launch bound is out of range.
    LaunchBounds,
    /// A name is not declared, or names the wrong kind of thing.
    Symbol,
    /// A label that is used is not placed, or is placed twice.
    Label,
    /// The number of operands is wrong.
    Arity,
    /// An operand has the wrong kind.
    Operand,
    /// A register or immediate has the wrong type or width.
    Type,
    /// A vector or fragment has the wrong number of elements.
    Vector,
    /// An access is known to be misaligned or outside its variable.
    Address,
    /// The operation does not support a type or modifier.
    Modifier,
    /// A constant is outside its range.
    Constant,
    /// A call does not match its callee.
    Call,
    /// A register is read that no path has written.
    Undefined,
}

impl Rule {
    /// The name in messages and filetests.
    pub const fn name(self) -> &'static str {
        match self {
            Rule::Target => "target",
            Rule::Declaration => "declaration",
            Rule::LaunchBounds => "launch-bounds",
            Rule::Symbol => "symbol",
            Rule::Label => "label",
            Rule::Arity => "arity",
            Rule::Operand => "operand",
            Rule::Type => "type",
            Rule::Vector => "vector",
            Rule::Address => "address",
            Rule::Modifier => "modifier",
            Rule::Constant => "constant",
            Rule::Call => "call",
            Rule::Undefined => "undefined",
        }
    }
}

/// One violation and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The line of the instruction, from 1, see [`Instruction::line`]; 0 for a violation that belongs to no
    /// instruction.
    pub line: u32,
    /// The function that contains the violation, if any.
    pub function: Option<Name>,
    /// The text of the instruction, if the violation belongs to one.
    pub instruction: Option<String>,
    /// What is wrong and what is accepted.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{}: {}", self.rule.name(), quote::words(&self.message))?;
        match (&self.instruction, &self.function) {
            (Some(instruction), _) => write!(f, ", in `{}`", quote::cut(instruction)),
            (None, Some(function)) => write!(f, ", in {}", quote::cut(function)),
            (None, None) => Ok(()),
        }
    }
}

/// Maximum number of violations that a message shows.
const SHOWN: usize = 10;

/// All violations of a module, in the order of the text; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violations(pub Vec<Violation>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, violation) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{violation}", if i == 0 { "" } else { "\n" })?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl std::error::Error for Violations {}

/// A module that passed the verifier, as a [`Kernel`](crate::Kernel) needs it. [`Module::verify`] makes one,
/// and it cannot be changed: an edit goes through [`Verified::into_module`] and the verifier again. A clone
/// shares the module, so that all kernels of a program have one.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified(Arc<Module>);

impl Verified {
    /// The module, which may be changed and is no longer known to be legal.
    pub fn into_module(self) -> Module {
        Arc::unwrap_or_clone(self.0)
    }

    /// The module as a driver compiles it for a device of compute capability `sm` (times ten): code for an
    /// older architecture becomes code for the device's architecture. `None` if the device does not run the
    /// module. The result is verified, because a later target and a later `.version` support everything that
    /// earlier ones support.
    #[must_use]
    pub fn for_device(mut self, sm: u32) -> Option<Verified> {
        if !self.0.target.runs_on(sm) {
            return None;
        }
        let module = Arc::make_mut(&mut self.0);
        module.target.sm = sm;
        module.version = module.version.max(module.target.minimum_version());
        Some(self)
    }
}

impl Deref for Verified {
    type Target = Module;

    fn deref(&self) -> &Module {
        &self.0
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Module {
    /// Checks the module against all rules in the documentation of the verifier.
    ///
    /// # Errors
    /// All violations, in the order of the text.
    pub fn verify(self) -> Result<Verified, Violations> {
        self.check()?;
        Ok(Verified(self.into()))
    }

    /// Runs the checks of [`Module::verify`], for code that needs no [`Verified`].
    ///
    /// # Errors
    /// All violations, in the order of the text.
    pub fn check(&self) -> Result<(), Violations> {
        let mut report = Report::default();
        let symbols = declarations::module(self, &mut report);
        for function in self.functions() {
            report.function = Some(function.name.clone());
            declarations::function(self, function, &mut report);
            if let Some(body) = &function.body {
                check_body(self, function, body, &symbols, &mut report);
            }
        }
        if report.found.is_empty() { Ok(()) } else { Err(Violations(report.found)) }
    }

    /// Treats the module as verified without a check. This is the only way around the verifier. It is for
    /// code that shows an ill-formed kernel to the emulator on purpose: mutants, fuzzing and the emulator's
    /// tests. The emulator accepts every module and reports undefined behaviour. Such a module must never run
    /// on a GPU.
    pub fn assume_verified(self) -> Verified {
        Verified(self.into())
    }
}

/// The violations found so far, and the function that is being checked.
#[derive(Default)]
struct Report {
    found: Vec<Violation>,
    function: Option<Name>,
}

impl Report {
    /// Adds a violation that belongs to no instruction.
    fn declare(&mut self, rule: Rule, message: impl Into<String>) {
        let function = self.function.clone();
        self.found.push(Violation { rule, line: 0, function, instruction: None, message: message.into() });
    }

    /// Adds a violation of an instruction.
    fn instruction(&mut self, body: &Body, inst: &Instruction, (rule, message): Fault) {
        self.found.push(Violation {
            rule,
            line: inst.line,
            function: self.function.clone(),
            instruction: Some(inst.display(body).to_string()),
            message,
        });
    }
}

/// The rule that an instruction breaks, and the message.
pub(crate) type Fault = (Rule, String);

pub(crate) fn fault<T>(rule: Rule, message: impl Into<String>) -> Result<T, Fault> {
    Err((rule, message.into()))
}

/// Checks each instruction alone, then definitions before uses. The second check needs operands that passed
/// the first.
fn check_body(module: &Module, function: &Function, body: &Body, symbols: &Symbols<'_>, report: &mut Report) {
    let before = report.found.len();
    let scope = symbols.enter(function, body);
    for statement in &body.statements {
        let Statement::Inst(inst) = statement else { continue };
        if let Err(found) = check_instruction(module, body, inst, &scope) {
            report.instruction(body, inst, found);
        }
    }
    if report.found.len() == before {
        flow::check(function, body, report);
    }
}

fn check_instruction(
    module: &Module,
    body: &Body,
    inst: &Instruction,
    scope: &symbols::Scope<'_>,
) -> Result<(), Fault> {
    inst.op.check_modifiers().map_err(|message| (Rule::Modifier, message))?;
    operands::check(body, inst, scope)?;
    inst.check_operands()?;
    calls::check(inst, body, scope)?;
    let needs = inst.requirement();
    if !needs.met_by(module.target) || needs.version > module.version {
        return fault(
            Rule::Target,
            format!("needs {needs}; the module is for {} and .version {}", module.target, module.version),
        );
    }
    Ok(())
}
