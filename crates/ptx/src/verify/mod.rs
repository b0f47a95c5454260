//! The verifier: a pass that looks at a module and yields [`Verified`], or every [`Violation`] it found.
//!
//! It checks what can be known without running; the emulator checks the rest. A module that passes holds these
//! invariants.
//!
//! **Module.** The target is known to the module's `.version`, and both offer everything that is used
//! ([`Requirement`]). No two variables share a name, nor two functions, except that declarations of a function may
//! precede its definition and agree with it in the sizes of its parameters and results.
//!
//! **Variables.** Alignments are powers of two and no smaller than the element's. Dimensions other than a leading `[]`
//! are not 0, `[]` needs `.extern` or an initialiser, the size fits the state space (static shared memory of a function
//! 48 KiB, local memory 512 KiB, constants 64 KiB), and nothing but `.global` and `.const` is initialised, with no more
//! bytes than there is room and no address of something unknown.
//!
//! **Functions.** Kernels return nothing, have a body and take `.param`s, together at most 4352 bytes (32764 from
//! `.version` 8.1). Launch bounds are not 0; a CTA has at most 1024 threads, a cluster at most 16 CTAs; `.maxntid` excludes
//! `.reqntid`. Names of registers, labels and variables are unique in the function; every label that is used stands at
//! exactly one place.
//!
//! **Operands.** Their number and kind are those of [`Op::signature`](crate::Op::signature). A register is as wide as
//! the instruction's type (or wider, in `ld`, `st` and `cvt`), and its type agrees with it: integers with integers and
//! with `.bN`, floats with the same float and with `.bN`, `.bN` with everything. A guard is a predicate. Results are
//! registers or `_`. Floating-point immediates stand where floats or bits are taken, integers fit their width. Vectors
//! have as many elements as the type, the fragment or the packed width says; only `mov` packs, on one side at a time.
//!
//! **Addresses.** A base register is 64 bits wide, or 32 for `.shared`, `.local`, `.const` and `.param`. A symbol lies in the space that the
//! instruction names. Where base and offset are known, the access is aligned to its size and ends inside the variable; a bulk copy
//! is aligned to 16 bytes, a box of a tensor to 128. A tensor map's address has no offset.
//!
//! **Modifiers.** The operation has the type and takes the modifiers, alone and together: roundings, `.ftz`, `.sat`,
//! comparisons, conversions, orderings with their scopes, cache operators, matrix shapes.
//!
//! **Constants.** Barriers are 0 to 15 and count whole warps; `cp.async` copies 4, 8 or 16 bytes (`.cg` 16) and reads no more than that;
//! `lop3` tables are 8 bits; `setmaxnreg` takes 24 to 256 in steps of 8; groups to wait for are not negative; a member mask is not 0. The scales
//! of `wgmma` are 1 or -1, its transpositions 0 or 1. Bulk copies move multiples of 16 bytes.
//!
//! **Warpgroups.** A kernel that uses `wgmma` or `setmaxnreg` has launch bounds, if any, that hold a warpgroup of 128 threads.
//!
//! **Calls.** The callee is declared, is no kernel, and takes and returns as many values of the same sizes.
//!
//! **Definitions.** A register that is read was written on at least one path from the entry (a guarded write counts):
//! code that compilers emit passes, a register that no path could have written does not. Reads that only some paths
//! leave undefined are found by the emulator, which knows the paths taken.

mod async_modifiers;
mod calls;
mod constants;
mod declarations;
mod flow;
mod memory_modifiers;
mod modifiers;
mod operands;
mod requirement;
mod symbols;
mod tensor_modifiers;
mod wgmma_modifiers;
mod wmma_modifiers;

use std::fmt;

use crate::{Body, Function, Instruction, Module, Name, Statement};

pub use requirement::Requirement;
use symbols::Symbols;

/// Which invariant does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// The module's target or `.version` lacks something.
    Target,
    /// A variable, parameter, register or function is declared wrongly.
    Declaration,
    /// A launch bound is out of range.
    LaunchBounds,
    /// A name means nothing, or not what is needed here.
    Symbol,
    /// A label is missing, or stands twice.
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
    /// A constant out of its range.
    Constant,
    /// A call that does not fit its callee.
    Call,
    /// A register read that no path has written.
    Undefined,
}

impl Rule {
    /// Its name in messages and filetests.
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

/// One invariant that does not hold, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// Line of the instruction, see [`Instruction::line`]; 0 outside instructions.
    pub line: u32,
    /// The function it is in, if it is in one.
    pub function: Option<Name>,
    /// The instruction's text, if it is about one.
    pub instruction: Option<String>,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{}: {}", self.rule.name(), self.message)?;
        match (&self.instruction, &self.function) {
            (Some(instruction), _) => write!(f, ", in `{instruction}`"),
            (None, Some(function)) => write!(f, ", in {function}"),
            (None, None) => Ok(()),
        }
    }
}

/// Everything the verifier found, in the order of the text; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violations(pub Vec<Violation>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, violation) in self.0.iter().enumerate() {
            write!(f, "{}{violation}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Violations {}

/// A module that was verified.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'m> {
    module: &'m Module,
    requirement: Requirement,
}

impl<'m> Verified<'m> {
    /// The module.
    pub fn module(&self) -> &'m Module {
        self.module
    }

    /// The least target and `.version` that would do.
    pub fn requirement(&self) -> Requirement {
        self.requirement
    }
}

impl Module {
    /// Checks every invariant above.
    ///
    /// # Errors
    /// All violations, in the order of the text.
    pub fn verify(&self) -> Result<Verified<'_>, Violations> {
        let mut report = Report::default();
        let symbols = declarations::module(self, &mut report);
        for function in self.functions() {
            report.function = Some(function.name.clone());
            declarations::function(self, function, &mut report);
            if let Some(body) = &function.body {
                check_body(self, function, body, &symbols, &mut report);
            }
        }
        if report.found.is_empty() {
            Ok(Verified { module: self, requirement: self.requirement() })
        } else {
            Err(Violations(report.found))
        }
    }
}

/// What was found so far, and where the pass is.
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

/// What is wrong with an instruction.
type Fault = (Rule, String);

fn fault<T>(rule: Rule, message: impl Into<String>) -> Result<T, Fault> {
    Err((rule, message.into()))
}

/// Each instruction alone, then all together. The flow of definitions is followed only where the operands are sound.
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
    modifiers::check(&inst.op).map_err(|message| (Rule::Modifier, message))?;
    operands::check(body, inst, scope)?;
    constants::check(inst)?;
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
