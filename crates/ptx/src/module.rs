//! The data model of a PTX module: variables, functions, bodies and instructions.

use std::str::FromStr;

use smallvec::SmallVec;

use crate::operand::{Guard, Name, Operand};
use crate::{Op, Space, Type};

/// `.version major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "self-evident")]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// The suffix of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TargetSuffix {
    /// `sm_80`: runs on this architecture and later ones.
    None,
    /// `sm_90a`: architecture-specific features; runs on this architecture only.
    ArchSpecific,
    /// `sm_100f`: features of a family; runs on the family only.
    Family,
}

/// `.target sm_NN[a|f]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// Compute capability times ten: 80 for sm_80.
    pub sm: u32,
    /// The suffix.
    pub suffix: TargetSuffix,
}

impl Target {
    /// The architectures of NVIDIA's GPUs from Maxwell on, without `sm_`.
    pub const KNOWN: [&str; 34] = [
        "50", "52", "53", "60", "61", "62", "70", "72", "75", "80", "86", "87", "88", "89", "90", "90a",
        "100", "100a", "100f", "101", "101a", "101f", "103", "103a", "103f", "110", "110a", "110f", "120",
        "120a", "120f", "121", "121a", "121f",
    ];

    /// `sm_NN` without a suffix.
    pub const fn sm(sm: u32) -> Target {
        Target { sm, suffix: TargetSuffix::None }
    }

    /// `sm_NNa`: with architecture-specific features.
    pub const fn sm_a(sm: u32) -> Target {
        Target { sm, suffix: TargetSuffix::ArchSpecific }
    }

    /// The target with all features of devices of compute capability `sm` (times ten): `sm_90a` and its like
    /// where the architecture has features of its own.
    pub const fn of_device(sm: u32) -> Target {
        // The features of later architectures (`tcgen05`) have no semantics in the emulator.
        if sm == 90 { Target::sm_a(sm) } else { Target::sm(sm) }
    }

    /// Whether a device of compute capability `sm` (times ten) runs code for this target (PTX ISA,
    /// ".target").
    pub const fn runs_on(self, sm: u32) -> bool {
        match self.suffix {
            TargetSuffix::None => sm >= self.sm,
            TargetSuffix::ArchSpecific => sm == self.sm,
            TargetSuffix::Family => sm >= self.sm && sm / 10 == self.sm / 10,
        }
    }
}

/// A text that is not the name of a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{0}' for a target: expected a name such as `sm_80` or `sm_90a`")]
pub struct UnknownTarget(String);

impl FromStr for Target {
    type Err = UnknownTarget;

    /// Accepts `sm_90a`, and `90a` without the prefix.
    fn from_str(text: &str) -> Result<Target, UnknownTarget> {
        let name = text.strip_prefix("sm_").unwrap_or(text);
        let (number, suffix) = match name.as_bytes().last() {
            Some(b'a') => (&name[..name.len() - 1], TargetSuffix::ArchSpecific),
            Some(b'f') => (&name[..name.len() - 1], TargetSuffix::Family),
            _ => (name, TargetSuffix::None),
        };
        let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        match number.parse() {
            Ok(sm) if digits => Ok(Target { sm, suffix }),
            _ => Err(UnknownTarget(text.to_owned())),
        }
    }
}

/// A PTX module (PTX ISA, "Directives"). Addresses are always 64 bits; debugging sections are dropped.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// `.version`.
    pub version: Version,
    /// `.target`.
    pub target: Target,
    /// Variables and functions in the order of the text.
    pub items: Vec<Item>,
}

impl Module {
    /// The module with the items of another module for the same target after its own, and new line numbers.
    #[must_use]
    pub fn joined_with(mut self, other: Module) -> Module {
        self.version = self.version.max(other.version);
        self.items.extend(other.items);
        self.number_lines();
        self
    }

    /// The functions, declarations included.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.items.iter().filter_map(|item| match item {
            Item::Function(f) => Some(f),
            Item::Variable(_) => None,
        })
    }

    /// The module-scope variables.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.items.iter().filter_map(|item| match item {
            Item::Variable(v) => Some(v),
            Item::Function(_) => None,
        })
    }

    /// The kernels that have a body.
    pub fn entries(&self) -> impl Iterator<Item = &Function> {
        self.functions().filter(|f| f.kind == FunctionKind::Entry && f.body.is_some())
    }

    /// The instructions of all functions in the order of the text.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.functions().flat_map(Function::instructions)
    }

    /// The function with this name that has a body.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions().find(|f| &*f.name == name && f.body.is_some())
    }
}

/// A declaration at module scope.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "self-evident")]
pub enum Item {
    Variable(Variable),
    Function(Function),
}

/// `.visible`, `.extern`, `.weak`, `.common`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum Linkage {
    Private,
    Visible,
    Extern,
    Weak,
    Common,
}

/// The initial value of a variable; the rest of the variable is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Initializer {
    /// Bytes in little-endian order.
    Bytes(Vec<u8>),
    /// Addresses of other variables plus offsets, 8 bytes each.
    Addresses(Vec<(Name, i64)>),
}

/// A variable in some state space, at module or function scope (`.param` variables of a call included).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Linkage; `Private` inside functions.
    pub linkage: Linkage,
    /// State space.
    pub space: Space,
    /// Alignment in bytes; the size of the element when not written.
    pub align: u32,
    /// Element type.
    pub ty: Type,
    /// `.v2` or `.v4`: elements per vector; 1 otherwise.
    pub vector: u32,
    /// The name.
    pub name: Name,
    /// Array extents in elements: empty for a scalar; a leading 0 for `[]`, which is dynamic shared memory
    /// when `extern`.
    pub dims: Vec<u64>,
    /// Initial value.
    pub init: Option<Initializer>,
}

impl Variable {
    /// Size in bytes; 0 for an array of unknown length.
    pub fn bytes(&self) -> u64 {
        let element = u64::from(self.ty.bytes()) * u64::from(self.vector);
        self.dims.iter().fold(element, |bytes, &n| bytes.saturating_mul(n))
    }
}

/// Kernel or device function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum FunctionKind {
    Entry,
    Func,
}

/// A parameter of a kernel or function, or a return value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// `.param` for kernels; functions may also take and return registers (then the name is in
    /// [`Body::registers`]).
    pub space: ParamSpace,
    /// Alignment in bytes; the size of the type when not written.
    pub align: u32,
    /// Element type.
    pub ty: Type,
    /// The name.
    pub name: Name,
    /// Elements of an array (a struct passed by value is `.b8 name[N]`); `None` for a scalar.
    pub elements: Option<u32>,
    /// `.ptr .space .align N` of a kernel parameter: space and alignment in bytes of the memory that the
    /// pointer points to.
    pub pointer: Option<(Space, u32)>,
}

pub use self::param_space::ParamSpace;
mod param_space {
    /// The state space of a parameter.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum ParamSpace {
        /// `.param`.
        Param,
        /// `.reg`, for device functions only.
        Reg,
    }
}

impl Param {
    /// Size in bytes.
    pub fn bytes(&self) -> u32 {
        self.ty.bytes().saturating_mul(self.elements.unwrap_or(1))
    }
}

/// Performance directives of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchBounds {
    /// `.maxntid x, y, z`.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid x, y, z`.
    pub required_threads: Option<[u32; 3]>,
    /// `.minnctapersm n`.
    pub min_ctas_per_sm: Option<u32>,
    /// `.maxnreg n`.
    pub max_registers: Option<u32>,
    /// `.reqnctapercluster x, y, z`.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`.
    pub explicit_cluster: bool,
    /// `.maxclusterrank n`.
    pub max_cluster_rank: Option<u32>,
    /// `.noreturn`.
    pub no_return: bool,
}

impl LaunchBounds {
    /// Maximum number of threads of a CTA.
    pub(crate) const MOST_THREADS: i64 = 1024;
}

/// `.entry` or `.func`.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Kernel or device function.
    pub kind: FunctionKind,
    /// Linkage.
    pub linkage: Linkage,
    /// The name.
    pub name: Name,
    /// Return values; empty for kernels.
    pub returns: Vec<Param>,
    /// Parameters in order.
    pub params: Vec<Param>,
    /// Performance directives.
    pub bounds: LaunchBounds,
    /// The body; `None` for a declaration.
    pub body: Option<Body>,
}

impl Function {
    /// The number of parameters and return values that are registers. These are the first of the body's
    /// registers, in order.
    pub fn register_params(&self) -> usize {
        self.returns.iter().chain(&self.params).filter(|param| param.space == ParamSpace::Reg).count()
    }

    /// The instructions in order; none for a declaration.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.body.iter().flat_map(|body| &body.statements).filter_map(|statement| match statement {
            Statement::Inst(instruction) => Some(instruction),
            Statement::Label(_) | Statement::Pragma(_) => None,
        })
    }
}

/// A declared virtual register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// The name, with its `%` if there is one.
    pub name: Name,
    /// The type of the register.
    pub ty: Type,
}

/// The body of a function. The parser flattens nested scopes and renames declarations that would clash.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Body {
    /// Registers, indexed by [`Reg`](crate::Reg). Return values and parameters that are registers come first.
    pub registers: Vec<Register>,
    /// Names of labels, indexed by [`Label`](crate::Label).
    pub labels: Vec<Name>,
    /// Variables of the function: shared, local, and the `.param` space of its calls.
    pub variables: Vec<Variable>,
    /// The statements in order.
    pub statements: Vec<Statement>,
}

/// One statement of a body.
#[derive(Clone, Debug, PartialEq)]
pub enum Statement {
    /// The target of a branch.
    Label(crate::Label),
    /// An instruction.
    Inst(Instruction),
    /// `.pragma "…";`
    Pragma(Name),
}

/// An instruction: an operation ([`Op`]), its operands in the order of the ISA, and a guard.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// `@p` or `@!p`.
    pub guard: Option<Guard>,
    /// Operation and modifiers.
    pub op: Op,
    /// Operands, results first.
    pub operands: SmallVec<[Operand; 4]>,
    /// The line in the PTX text, from 1; 0 for a built instruction before [`Module::number_lines`].
    pub line: u32,
}

/// Two instructions are equal when guard, operation and operands are equal. The line is not compared.
impl PartialEq for Instruction {
    fn eq(&self, other: &Instruction) -> bool {
        (&self.guard, &self.op, &self.operands) == (&other.guard, &other.op, &other.operands)
    }
}
