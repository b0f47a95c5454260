//! Expressions of score and mask programs, built with Rust's operators.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use super::{BinaryOp, Comparison, Id, Input, Op, Program, ProgramError, Type, UnaryOp};

/// An expression of positions, tables and parameters, and, in a score program, of the score.
///
/// Integers become floats where the other argument is a float. Types are checked by [`Program::new`].
#[derive(Clone)]
pub struct Expr(Arc<Node>);

/// An operation and its arguments. No function on nodes recurses: the depth of an expression has no limit,
/// but the stack has one.
struct Node {
    kind: Kind,
    arguments: Vec<Expr>,
}

#[derive(Clone)]
enum Kind {
    /// An input, a constant, or another operation without arguments.
    Leaf(Op),
    Load {
        table: u32,
        float: bool,
    },
    Unary(UnaryOp),
    Binary(BinaryOp),
    Compare(Comparison),
    Select,
}

impl Drop for Node {
    fn drop(&mut self) {
        let mut left = std::mem::take(&mut self.arguments);
        while let Some(expr) = left.pop() {
            if let Some(mut node) = Arc::into_inner(expr.0) {
                left.append(&mut node.arguments);
            }
        }
    }
}

/// Shows the text of the program, or why the expression is none.
impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Program::new(self) {
            Ok(program) => write!(f, "Expr({program})"),
            Err(error) => write!(f, "Expr(invalid: {error})"),
        }
    }
}

impl Expr {
    fn new(kind: Kind, arguments: Vec<Expr>) -> Expr {
        Expr(Arc::new(Node { kind, arguments }))
    }

    /// Whether this is the constant 1.
    pub(super) fn is_one(&self) -> bool {
        matches!(self.0.kind, Kind::Leaf(Op::Float(bits)) if bits == 1f32.to_bits())
    }

    /// Identifies the node while the expression exists.
    fn address(&self) -> *const Node {
        Arc::as_ptr(&self.0)
    }

    /// Calls `of` once for each node of the expression, arguments first and from left to right.
    fn each_node<E>(&self, mut of: impl FnMut(&Expr) -> Result<(), E>) -> Result<(), E> {
        let mut done = HashSet::new();
        let mut left = vec![(self, false)];
        while let Some((expr, arguments_done)) = left.pop() {
            if done.contains(&expr.address()) {
                continue;
            }
            if arguments_done {
                of(expr)?;
                done.insert(expr.address());
            } else {
                left.push((expr, true));
                left.extend(expr.0.arguments.iter().rev().map(|argument| (argument, false)));
            }
        }
        Ok(())
    }

    /// A position or a parameter.
    pub fn input(input: Input) -> Expr {
        Expr::leaf(Op::Input(input))
    }

    fn leaf(op: Op) -> Expr {
        Expr::new(Kind::Leaf(op), Vec::new())
    }

    /// The element of table `table` at the indices. `float` says whether the table holds floats.
    pub fn load(table: u32, float: bool, index: impl IntoIterator<Item = Expr>) -> Expr {
        Expr::new(Kind::Load { table, float }, index.into_iter().collect())
    }

    /// An operation on one value.
    #[must_use]
    pub fn unary(self, op: UnaryOp) -> Expr {
        Expr::new(Kind::Unary(op), vec![self])
    }

    /// An operation on two values.
    #[must_use]
    pub fn binary(self, op: BinaryOp, other: impl Into<Expr>) -> Expr {
        Expr::new(Kind::Binary(op), vec![self, other.into()])
    }

    /// A comparison.
    #[must_use]
    pub fn compare(self, op: Comparison, other: impl Into<Expr>) -> Expr {
        Expr::new(Kind::Compare(op), vec![self, other.into()])
    }

    /// `yes` if this truth value is true, else `no`.
    #[must_use]
    pub fn select(self, yes: impl Into<Expr>, no: impl Into<Expr>) -> Expr {
        Expr::new(Kind::Select, vec![self, yes.into(), no.into()])
    }

    /// The expression with `input` replaced by `other`.
    #[must_use]
    pub fn replace(&self, input: Input, other: &Expr) -> Expr {
        // By address, so that shared subexpressions stay shared.
        let mut replaced: HashMap<*const Node, Expr> = HashMap::new();
        let Ok(()) = self.each_node(|expr| {
            let node = &*expr.0;
            let new = match &node.kind {
                Kind::Leaf(Op::Input(known)) if *known == input => other.clone(),
                Kind::Leaf(_) => expr.clone(),
                kind => {
                    let of = |argument: &Expr| replaced[&argument.address()].clone();
                    Expr::new(kind.clone(), node.arguments.iter().map(of).collect())
                }
            };
            replaced.insert(expr.address(), new);
            Ok::<(), Infallible>(())
        });
        replaced[&self.address()].clone()
    }

    /// `|x|`.
    #[must_use]
    pub fn abs(self) -> Expr {
        self.unary(UnaryOp::Abs)
    }

    /// The hyperbolic tangent.
    #[must_use]
    pub fn tanh(self) -> Expr {
        self.unary(UnaryOp::Tanh)
    }

    /// `2^x`.
    #[must_use]
    pub fn exp2(self) -> Expr {
        self.unary(UnaryOp::Exp2)
    }

    /// The smaller of two values.
    #[must_use]
    pub fn min(self, other: impl Into<Expr>) -> Expr {
        self.binary(BinaryOp::Min, other)
    }

    /// The larger of two values.
    #[must_use]
    pub fn max(self, other: impl Into<Expr>) -> Expr {
        self.binary(BinaryOp::Max, other)
    }
}

macro_rules! comparisons {
    ($($(#[$doc:meta])* $name:ident $op:ident),* $(,)?) => {
        impl Expr {
            $($(#[$doc])* #[must_use] pub fn $name(self, other: impl Into<Expr>) -> Expr {
                self.compare(Comparison::$op, other)
            })*
        }
    };
}
comparisons! {
    /// Whether the values are equal.
    eq Eq,
    /// Whether the values differ.
    ne Ne,
    /// Whether this value is smaller.
    lt Lt,
    /// Whether this value is smaller or equal.
    le Le,
    /// Whether this value is larger.
    gt Gt,
    /// Whether this value is larger or equal.
    ge Ge,
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident),* $(,)?) => {
        $(impl<T: Into<Expr>> std::ops::$trait<T> for Expr {
            type Output = Expr;

            fn $method(self, other: T) -> Expr {
                self.binary(BinaryOp::$op, other)
            }
        })*
    };
}
operators! {
    Add add Add, Sub sub Sub, Mul mul Mul, Div div Div, Rem rem Rem, BitAnd bitand And, BitOr bitor Or,
    BitXor bitxor Xor, Shl shl Shl, Shr shr Shr,
}

impl std::ops::Neg for Expr {
    type Output = Expr;

    fn neg(self) -> Expr {
        self.unary(UnaryOp::Neg)
    }
}

impl std::ops::Not for Expr {
    type Output = Expr;

    fn not(self) -> Expr {
        self.unary(UnaryOp::Not)
    }
}

impl From<f32> for Expr {
    fn from(x: f32) -> Expr {
        Expr::leaf(Op::Float(x.to_bits()))
    }
}

impl From<i32> for Expr {
    fn from(x: i32) -> Expr {
        Expr::leaf(Op::Int(x))
    }
}

impl From<bool> for Expr {
    fn from(x: bool) -> Expr {
        Expr::leaf(Op::Bool(x))
    }
}

impl Program {
    /// Builds the program of an expression: checks the types and merges equal subexpressions.
    ///
    /// # Errors
    /// [`ProgramError::Types`] if an operation has arguments of the wrong type, and
    /// [`ProgramError::TooLong`] for more than [`Program::MOST_OPS`] operations.
    pub fn new(expr: &Expr) -> Result<Program, ProgramError> {
        let mut flat = Flat::default();
        let root = flat.visit(expr)?;
        Ok(flat.into_program(root))
    }
}

/// A program under construction.
#[derive(Default)]
struct Flat {
    ops: Vec<Op>,
    types: Vec<Type>,
    known: HashMap<Op, Id>,
    /// Visited nodes, by address: an expression may share nodes.
    visited: HashMap<*const Node, Id>,
}

impl Flat {
    fn visit(&mut self, root: &Expr) -> Result<Id, ProgramError> {
        root.each_node(|expr| {
            let arguments: Vec<Id> = expr.0.arguments.iter().map(|a| self.visited[&a.address()]).collect();
            let id = self.node(&expr.0.kind, &arguments)?;
            self.visited.insert(expr.address(), id);
            Ok(())
        })?;
        Ok(self.visited[&root.address()])
    }

    fn node(&mut self, kind: &Kind, arguments: &[Id]) -> Result<Id, ProgramError> {
        match (kind, arguments) {
            (Kind::Leaf(op), _) => self.push(op.clone(), leaf_type(op)),
            (&Kind::Load { table, float }, index) => {
                for &id in index {
                    self.expect(id, Type::Int, "an index of a table", "an int")?;
                }
                let result = if float { Type::Float } else { Type::Int };
                self.push(Op::Load { table, float, index: index.to_vec() }, result)
            }
            (&Kind::Unary(op), &[a]) => self.unary(op, a),
            (&Kind::Binary(op), &[a, b]) => self.binary(op, a, b),
            (&Kind::Compare(op), &[a, b]) => {
                let (a, b) = self.same_type(a, b, "a comparison")?;
                self.push(Op::Compare(op, a, b), Type::Bool)
            }
            (Kind::Select, &[a, b, c]) => {
                self.expect(a, Type::Bool, "the condition of select", "a bool")?;
                let (b, c) = self.same_type(b, c, "select")?;
                self.push(Op::Select(a, b, c), self.types[b])
            }
            // The constructors of `Expr` give each operation its number of arguments.
            _ => unreachable!("an operation with {} arguments", arguments.len()),
        }
    }

    fn unary(&mut self, op: UnaryOp, a: Id) -> Result<Id, ProgramError> {
        let given = self.types[a];
        let (accepted, result) = match op {
            UnaryOp::Neg | UnaryOp::Abs => ("a float or an int", (given != Type::Bool).then_some(given)),
            UnaryOp::Not => ("an int or a bool", (given != Type::Float).then_some(given)),
            UnaryOp::Exp2 | UnaryOp::Log2 | UnaryOp::Tanh | UnaryOp::Sqrt => {
                let a = self.float(a)?;
                return self.push(Op::Unary(op, a), Type::Float);
            }
            UnaryOp::ToFloat if given == Type::Float => return Ok(a),
            UnaryOp::ToFloat => ("", Some(Type::Float)),
            UnaryOp::ToInt if given == Type::Int => return Ok(a),
            UnaryOp::ToInt => ("", Some(Type::Int)),
        };
        let refused = || ProgramError::Types {
            operation: op.name().to_owned(),
            accepted,
            given: given.name().to_owned(),
        };
        let result = result.ok_or_else(refused)?;
        self.push(Op::Unary(op, a), result)
    }

    fn binary(&mut self, op: BinaryOp, a: Id, b: Id) -> Result<Id, ProgramError> {
        let (a, b) = self.same_type(a, b, op.name())?;
        let given = self.types[a];
        let (accepted, fits) = match op {
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Min | BinaryOp::Max => {
                ("floats or ints", given != Type::Bool)
            }
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => ("ints or bools", given != Type::Float),
            BinaryOp::Rem | BinaryOp::Shl | BinaryOp::Shr => ("ints", given == Type::Int),
        };
        if !fits {
            let (operation, given) = (op.name().to_owned(), given.name().to_owned());
            return Err(ProgramError::Types { operation, accepted, given });
        }
        self.push(Op::Binary(op, a, b), given)
    }

    /// Converts both values to one type: an integer becomes a float if the other value is a float.
    fn same_type(&mut self, a: Id, b: Id, operation: &str) -> Result<(Id, Id), ProgramError> {
        match (self.types[a], self.types[b]) {
            (x, y) if x == y => Ok((a, b)),
            (Type::Float, Type::Int) => Ok((a, self.float(b)?)),
            (Type::Int, Type::Float) => Ok((self.float(a)?, b)),
            (x, y) => Err(ProgramError::Types {
                operation: operation.to_owned(),
                accepted: "two values of one type",
                given: format!("{} and {}", x.one(), y.one()),
            }),
        }
    }

    fn float(&mut self, a: Id) -> Result<Id, ProgramError> {
        match (self.types[a], &self.ops[a]) {
            (Type::Float, _) => Ok(a),
            (Type::Int, &Op::Int(x)) => self.push(Op::Float((x as f32).to_bits()), Type::Float),
            _ => self.push(Op::Unary(UnaryOp::ToFloat, a), Type::Float),
        }
    }

    fn expect(&self, id: Id, wanted: Type, what: &str, accepted: &'static str) -> Result<(), ProgramError> {
        let given = self.types[id];
        if given == wanted {
            return Ok(());
        }
        Err(ProgramError::Types { operation: what.to_owned(), accepted, given: given.name().to_owned() })
    }

    /// The operations on which `root` depends, with `root` last.
    fn into_program(self, root: Id) -> Program {
        let mut needed = vec![false; root + 1];
        needed[root] = true;
        for id in (0..=root).rev() {
            if needed[id] {
                for read in self.ops[id].reads() {
                    needed[read] = true;
                }
            }
        }
        let mut renumbered = vec![0; root + 1];
        let (mut ops, mut types) = (Vec::new(), Vec::new());
        for (id, (op, result)) in self.ops.into_iter().zip(self.types).take(root + 1).enumerate() {
            if needed[id] {
                renumbered[id] = ops.len();
                ops.push(op.renumbered(&renumbered));
                types.push(result);
            }
        }
        Program { ops, types }
    }

    fn push(&mut self, op: Op, result: Type) -> Result<Id, ProgramError> {
        if let Some(&id) = self.known.get(&op) {
            return Ok(id);
        }
        if self.ops.len() == Program::MOST_OPS {
            return Err(ProgramError::TooLong { operations: Program::MOST_OPS + 1 });
        }
        let id = self.ops.len();
        self.ops.push(op.clone());
        self.types.push(result);
        self.known.insert(op, id);
        Ok(id)
    }
}

const fn leaf_type(op: &Op) -> Type {
    match op {
        Op::Input(input) => input.result(),
        Op::Float(_) => Type::Float,
        Op::Bool(_) => Type::Bool,
        _ => Type::Int,
    }
}
