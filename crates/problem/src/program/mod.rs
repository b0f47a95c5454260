//! Programs for scores and masks: one expression that the oracle, the CPU kernels and the GPU generators all
//! read.
//!
//! A [`Program`] is a list of operations in the order of evaluation, without common subexpressions. Build one
//! from an [`Expr`], which has Rust's operators, or from text ([`Program::from_str`](std::str::FromStr)).

mod band;
mod derive;
mod eval;
mod expr;
pub mod library;
mod range;
mod table;
mod text;

use serde::{Deserialize, Serialize};

use crate::{Problem, ProblemError};

pub use derive::{Derivative, TableRead};
pub use eval::{InRow, Point, Precision, Value};
pub use expr::Expr;
pub use range::Range;
pub use table::Table;

/// The type of an operation's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// A number: f32 in kernels.
    Float,
    /// A 32-bit signed integer; arithmetic wraps.
    Int,
    /// True or false.
    Bool,
}

impl Type {
    const fn name(self) -> &'static str {
        match self {
            Type::Float => "float",
            Type::Int => "int",
            Type::Bool => "bool",
        }
    }

    /// The name with its article.
    const fn one(self) -> &'static str {
        match self {
            Type::Float => "a float",
            Type::Int => "an int",
            Type::Bool => "a bool",
        }
    }
}

/// Index of an operation in its [`Program`]. An operation reads earlier operations only.
pub type Id = usize;

/// An input of a program: a part of the score's position, or a parameter of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Input {
    /// The logit after the scale and the softcap. Only score programs can read it.
    Score,
    /// The position of the query in its sequence, from 0.
    Query,
    /// The position of the key in its sequence, from 0.
    Key,
    /// The batch entry.
    Batch,
    /// The query head.
    Head,
    /// The number of queries of the sequence.
    QueryLength,
    /// The number of keys of the sequence.
    KeyLength,
    /// A number given at launch: an element of [`Programs::floats`].
    FloatParameter(u32),
    /// An integer given at launch: an element of [`Programs::ints`].
    IntParameter(u32),
}

impl Input {
    const fn result(self) -> Type {
        match self {
            Input::Score | Input::FloatParameter(_) => Type::Float,
            _ => Type::Int,
        }
    }
}

/// Operations on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnaryOp {
    /// `−x`.
    Neg,
    /// `|x|`.
    Abs,
    /// Logical negation of a truth value, or bitwise complement of an integer.
    Not,
    /// `2^x`.
    Exp2,
    /// The logarithm to base 2.
    Log2,
    /// The hyperbolic tangent.
    Tanh,
    /// The square root.
    Sqrt,
    /// An integer or a truth value (0 or 1) as a float, rounded to the nearest.
    ToFloat,
    /// A float rounded towards zero, or a truth value as 0 or 1.
    ToInt,
}

/// Operations on two values of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BinaryOp {
    /// Sum.
    Add,
    /// Difference.
    Sub,
    /// Product.
    Mul,
    /// Quotient of floats, or of integers. Integers round towards −∞ as in Python and give 0 if the divisor
    /// is 0.
    Div,
    /// Remainder `a − b · (a / b)` of integers. Has the sign of `b` as in Python, and is 0 if `b` is 0.
    Rem,
    /// The smaller.
    Min,
    /// The larger.
    Max,
    /// Conjunction of truth values, or of bits.
    And,
    /// Disjunction of truth values, or of bits.
    Or,
    /// Exclusive disjunction of truth values, or of bits.
    Xor,
    /// Shift of an integer to the left. The result is 0 for shifts beyond 31 bits.
    Shl,
    /// Arithmetic shift of an integer to the right. The result is 0 or −1 for shifts beyond 31 bits.
    Shr,
}

/// Comparisons of two values of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Comparison {
    /// Equal.
    Eq,
    /// Not equal. True if an argument is NaN.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// A position or a parameter.
    Input(Input),
    /// A constant float, as the bits of an f32.
    Float(u32),
    /// A constant integer.
    Int(i32),
    /// A constant truth value.
    Bool(bool),
    /// The element of a table at these indices. Each index is clamped to the extent of its dimension.
    Load {
        /// Index in [`Programs::tables`].
        table: u32,
        /// Whether the table's elements are floats.
        float: bool,
        /// One integer operation per dimension.
        index: Vec<Id>,
    },
    /// An operation on one value.
    Unary(UnaryOp, Id),
    /// An operation on two values.
    Binary(BinaryOp, Id, Id),
    /// A comparison.
    Compare(Comparison, Id, Id),
    /// `Select(condition, yes, no)`: `yes` if the condition is true, else `no`.
    Select(Id, Id, Id),
}

impl Op {
    /// The operations that are arguments of this operation.
    pub fn reads(&self) -> Vec<Id> {
        match self {
            Op::Input(_) | Op::Float(_) | Op::Int(_) | Op::Bool(_) => Vec::new(),
            Op::Load { index, .. } => index.clone(),
            Op::Unary(_, a) => vec![*a],
            Op::Binary(_, a, b) | Op::Compare(_, a, b) => vec![*a, *b],
            Op::Select(a, b, c) => vec![*a, *b, *c],
        }
    }
}

impl Op {
    /// The operation with its arguments renumbered by `number`.
    fn renumbered(self, number: &[Id]) -> Op {
        match self {
            Op::Load { table, float, index } => {
                Op::Load { table, float, index: index.into_iter().map(|id| number[id]).collect() }
            }
            Op::Unary(op, a) => Op::Unary(op, number[a]),
            Op::Binary(op, a, b) => Op::Binary(op, number[a], number[b]),
            Op::Compare(op, a, b) => Op::Compare(op, number[a], number[b]),
            Op::Select(a, b, c) => Op::Select(number[a], number[b], number[c]),
            other => other,
        }
    }
}

/// An expression as a list of operations in the order of evaluation; the last one is the result. Each
/// operation occurs once and is read by a later one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Program {
    ops: Vec<Op>,
    types: Vec<Type>,
}

/// Why an expression is not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An operation has arguments of the wrong type.
    #[error("{operation} takes {accepted}, not {given}")]
    Types {
        /// The operation.
        operation: String,
        /// The types it takes.
        accepted: &'static str,
        /// The types it was given.
        given: String,
    },
    /// The text is not an expression.
    #[error("invalid program '{text}': at column {column}: expected {expected}")]
    Syntax {
        /// The text.
        text: String,
        /// Column from 1.
        column: usize,
        /// The text that is accepted at that column.
        expected: String,
    },
    /// The program has too many operations.
    #[error("the program has {operations} operations: expected at most {}", Program::MOST_OPS)]
    TooLong {
        /// Number of operations.
        operations: usize,
    },
}

impl Program {
    /// The largest number of operations.
    pub const MOST_OPS: usize = 4096;

    /// The operations in the order of evaluation.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The type of each operation's result.
    pub fn types(&self) -> &[Type] {
        &self.types
    }

    /// The type of the program's result.
    pub fn result(&self) -> Type {
        self.types[self.types.len() - 1]
    }

    /// Whether any operation satisfies the predicate.
    pub fn any(&self, predicate: impl Fn(&Op) -> bool) -> bool {
        self.ops.iter().any(predicate)
    }

    /// For each operation, whether its value depends on the score, on the query and on the key.
    pub fn dependences(&self) -> Vec<Dependence> {
        let mut found: Vec<Dependence> = Vec::with_capacity(self.ops.len());
        for op in &self.ops {
            let mut own = Dependence {
                score: *op == Op::Input(Input::Score),
                query: *op == Op::Input(Input::Query),
                key: *op == Op::Input(Input::Key),
            };
            for id in op.reads() {
                own.score |= found[id].score;
                own.query |= found[id].query;
                own.key |= found[id].key;
            }
            found.push(own);
        }
        found
    }
}

/// The parts of a score's position on which a value depends. Batch entry and head are constant within a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Dependence {
    /// On the score.
    pub score: bool,
    /// On the query.
    pub query: bool,
    /// On the key.
    pub key: bool,
}

/// The programs of a problem, with their parameters and tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Programs {
    /// Computes the logit for the softmax from the scaled and capped score.
    #[serde(default, rename = "score_program", skip_serializing_if = "Option::is_none")]
    pub score: Option<Program>,
    /// Decides which scores a row sees, in addition to the band.
    #[serde(default, rename = "mask_program", skip_serializing_if = "Option::is_none")]
    pub mask: Option<Program>,
    /// The values of float parameters.
    #[serde(default, rename = "program_floats", skip_serializing_if = "Vec::is_empty")]
    pub floats: Vec<f32>,
    /// The values of integer parameters.
    #[serde(default, rename = "program_ints", skip_serializing_if = "Vec::is_empty")]
    pub ints: Vec<i32>,
    /// The tables. Their contents are operands of each call.
    #[serde(default, rename = "program_tables", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<Table>,
}

impl Programs {
    /// The largest number of tables.
    pub const MOST_TABLES: usize = 8;

    /// Whether there is neither a score nor a mask program.
    pub const fn is_empty(&self) -> bool {
        self.score.is_none() && self.mask.is_none()
    }

    /// The programs that are present.
    pub fn all(&self) -> impl Iterator<Item = &Program> {
        self.score.iter().chain(&self.mask)
    }

    /// Rejects programs of the wrong type, programs that read a missing parameter or table, and programs that
    /// read a table at a position outside its extents.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        let refuse = |what, reason: String| Err(ProblemError::Program { what, reason });
        let (count, most) = (self.tables.len(), Programs::MOST_TABLES);
        if count > most {
            return Err(ProblemError::Tables { count, most });
        }
        let most = i32::MAX as usize;
        let positions = [
            ("batch", problem.batch),
            ("heads_q", problem.heads_q),
            ("seq_q", problem.seq_q),
            ("seq_kv", problem.seq_kv),
        ];
        for (what, program, result) in [("score", &self.score, Type::Float), ("mask", &self.mask, Type::Bool)]
        {
            let Some(program) = program else { continue };
            if let Some((argument, value)) = positions.iter().find(|(_, value)| *value > most) {
                let reason = format!(
                    "invalid value '{value}' for {argument}: expected at most 2^31 - 1, since positions of programs are 32-bit integers"
                );
                return refuse(what, reason);
            }
            if program.result() != result {
                let (given, wanted) = (program.result().one(), result.one());
                return refuse(what, format!("its result is {given}; expected {wanted}"));
            }
            if result == Type::Bool && program.any(|op| *op == Op::Input(Input::Score)) {
                return refuse(what, "a mask cannot read the score".to_owned());
            }
            let ranges = program.ranges(problem);
            for op in program.ops() {
                match *op {
                    Op::Input(Input::FloatParameter(i)) if i as usize >= self.floats.len() => {
                        return refuse(what, missing("float parameter", 'f', i, self.floats.len()));
                    }
                    Op::Input(Input::IntParameter(i)) if i as usize >= self.ints.len() => {
                        return refuse(what, missing("integer parameter", 'i', i, self.ints.len()));
                    }
                    Op::Load { table, float, ref index } => {
                        let Some(known) = self.tables.get(table as usize) else {
                            let name = if float { 't' } else { 'n' };
                            return refuse(what, missing("table", name, table, self.tables.len()));
                        };
                        known.check_read(table, float, index, &ranges).or_else(|why| refuse(what, why))?;
                    }
                    _ => {}
                }
            }
        }
        self.tables
            .iter()
            .enumerate()
            .try_for_each(|(i, table)| table.check().or_else(|why| refuse("tables", format!("t{i}: {why}"))))
    }
}

impl Programs {
    /// The programs with an extent of 1 in place of each empty dimension of a table. A call without rows
    /// reads no table, and is checked as a call with one row.
    #[must_use]
    pub fn with_one_element(&self) -> Programs {
        let mut programs = self.clone();
        for table in &mut programs.tables {
            table.extents.iter_mut().for_each(|extent| *extent = (*extent).max(1));
        }
        programs
    }
}

/// Why a program is rejected that reads parameter or table `number`, of which `count` were given.
fn missing(kind: &str, letter: char, number: u32, count: usize) -> String {
    let given = if count == 1 { "1 was".to_owned() } else { format!("{count} were") };
    format!("the program reads {kind} {number} ({letter}{number}), but {given} given")
}
