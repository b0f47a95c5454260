//! The verifier: a pass over a module that yields [`Verified`], or every [`Violation`] it found.
//!
//! The verifier checks what can be known without running the module; the emulator checks the rest. A module
//! that passes has these properties.
//!
//! **Module.** The module's `.version` knows the target, and both offer everything that the module uses
//! ([`Requirement`]). No two variables share a name, nor two functions, except that declarations of a
//! function may precede its definition and agree with it in the sizes of its parameters and results.
//!
//! **Variables.** Alignments are powers of two. Dimensions other than a leading `[]` are not 0, `[]` needs
//! `.extern` or an initialiser, the size fits the state space (static shared memory of a function 48 KiB,
//! local memory 512 KiB, constants 64 KiB), only `.global` and `.const` variables are initialised, with no
//! more bytes than their size and no address of an undeclared name.
//!
//! **Functions.** Kernels return nothing, have a body and take `.param`s, together at most 4352 bytes (32764
//! from `.version` 8.1). Launch bounds are not 0; a CTA has at most 1024 threads, a cluster at most 16 CTAs;
//! `.maxntid` excludes `.reqntid`. Names of registers, labels and variables are unique in the function; every
//! label that is used is placed exactly once.
//!
//! **Operands.** Their number and kind are those of [`Op::signature`](crate::Op::signature). A register is as
//! wide as the instruction's type (or wider, in `ld`, `st` and `cvt`), and its type agrees with it: integers
//! with integers and with `.bN`, floats with the same float and with `.bN`, `.bN` with everything. A guard is
//! a predicate. Results are registers or `_`. A floating-point immediate stands for a float or for bits; an
//! integer immediate fits its width. Vectors have as many elements as the type, the fragment or the packed
//! width says; only `mov` packs, on one side.
//!
//! **Addresses.** A base register is 64 bits wide, or 32 for `.shared`, `.local`, `.const` and `.param`. A
//! symbol lies in the space that the instruction names. Where base and offset are known, the access is
//! aligned to its size and ends inside the variable; a bulk copy is aligned to 16 bytes, a box of a tensor to
//! 128. A tensor map's address has no offset.
//!
//! **Modifiers.** The operation has the type and takes the combination of modifiers: roundings, `.ftz`,
//! `.sat`, comparisons, conversions, orderings with their scopes, cache operators, matrix shapes. The rules
//! stand in the row of each instruction (`isa`).
//!
//! **Constants.** Barriers are 0 to 15 and count whole warps; `cp.async` copies 4, 8 or 16 bytes (`.cg` 16)
//! and reads no more; `lop3` tables are 8 bits; `setmaxnreg` takes 24 to 256 in steps of 8; the number of
//! groups to wait for is not negative; a member mask is not 0. The scales of `wgmma` are 1 or -1, its
//! transpositions 0 or 1. Bulk copies move multiples of 16 bytes.
//!
//! **Warpgroups.** A kernel that uses `wgmma` or `setmaxnreg` has launch bounds, if any, of at least one
//! warpgroup, 128 threads.
//!
//! **Calls.** The callee is declared and not a kernel; the numbers and sizes of arguments and results agree.
//!
//! **Definitions.** A register that is read was written on at least one path from the entry; a guarded write
//! counts. Code that compilers emit passes this rule. The emulator finds a read that only some paths leave
//! undefined, because it knows the path taken.

mod calls;
mod declarations;
mod flow;
mod operands;
pub(crate) mod rules;
mod symbols;

use std::fmt;
use std::ops::Deref;

use crate::{Body, Function, Instruction, Module, Name, Statement, quote};

use symbols::Symbols;

/// The kind of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// The module's target or `.version` lacks something.
    Target,
    /// A variable, parameter, register or function is declared wrongly.
    Declaration,
    /// A launch bound is out of range.
    LaunchBounds,
    /// A name is not declared, or stands for the wrong kind of thing.
    Symbol,
    /// A label is placed nowhere or twice.
    Label,
    /// Wrong number of operands.
    Arity,
    /// An operand of the wrong kind.
    Operand,
    /// A register or immediate of the wrong type or width.
    Type,
    /// A vector or fragment with the wrong number of elements.
    Vector,
    /// An access that is known to be misaligned or outside its variable.
    Address,
    /// A type or modifier that the operation does not take.
    Modifier,
    /// A constant outside its range.
    Constant,
    /// A call that does not fit its callee.
    Call,
    /// A read of a register that no path has written.
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
    /// The line of the instruction, from 1, see [`Instruction::line`]; 0 outside instructions.
    pub line: u32,
    /// The function, for a violation inside one.
    pub function: Option<Name>,
    /// The text of the instruction, for a violation of one.
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

/// Violations that a message shows.
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
/// and it cannot be changed: an edit goes through [`Verified::into_module`] and the verifier again.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified(Module);

impl Verified {
    /// The module, which may be changed and is no longer known to be legal.
    pub fn into_module(self) -> Module {
        self.0
    }

    /// The module as a driver compiles it for a device of compute capability `sm` (times ten): code for an
    /// older architecture becomes code of the device's. `None` where the device does not run the module. A
    /// later target and a later `.version` offer what the earlier ones did, so the module stays verified.
    #[must_use]
    pub fn for_device(mut self, sm: u32) -> Option<Verified> {
        if !self.0.target.runs_on(sm) {
            return None;
        }
        self.0.target.sm = sm;
        self.0.version = self.0.version.max(self.0.target.minimum_version());
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
    /// Checks every invariant above.
    ///
    /// # Errors
    /// All violations, in the order of the text.
    pub fn verify(self) -> Result<Verified, Violations> {
        self.check()?;
        Ok(Verified(self))
    }

    /// What [`Module::verify`] checks, for code that needs no [`Verified`].
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

    /// Takes the module for verified without a check. It is the only way around the verifier, and it is for
    /// code that shows the emulator an ill-formed kernel on purpose: mutants, fuzzing and the emulator's
    /// tests. The emulator accepts every module and reports what it does not define. No such module may go to
    /// a GPU.
    pub fn assume_verified(self) -> Verified {
        Verified(self)
    }
}

/// The violations found so far, and the function that is being checked.
#[derive(Default)]
struct Report {
    found: Vec<Violation>,
    function: Option<Name>,
}

impl Report {
    /// A violation outside instructions.
    fn declare(&mut self, rule: Rule, message: impl Into<String>) {
        let function = self.function.clone();
        self.found.push(Violation { rule, line: 0, function, instruction: None, message: message.into() });
    }

    /// A violation of an instruction.
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

/// The rule that an instruction breaks, and a message.
pub(crate) type Fault = (Rule, String);

pub(crate) fn fault<T>(rule: Rule, message: impl Into<String>) -> Result<T, Fault> {
    Err((rule, message.into()))
}

/// Checks each instruction alone, then definitions before uses. The second needs operands that passed the
/// first.
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
