//! Evaluates a program for one score.

use super::{BinaryOp, Comparison, Id, Input, Op, Program, Programs, Type, UnaryOp};
use crate::Elements;

/// A value of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A number.
    Float(f64),
    /// An integer.
    Int(i32),
    /// A truth value.
    Bool(bool),
}

impl Value {
    /// The number; NaN for another type.
    pub const fn float(self) -> f64 {
        match self {
            Value::Float(x) => x,
            Value::Int(_) | Value::Bool(_) => f64::NAN,
        }
    }

    /// The integer; 1 for true, and 0 for false and for a float.
    pub const fn int(self) -> i32 {
        match self {
            Value::Int(x) => x,
            Value::Bool(x) => x as i32,
            Value::Float(_) => 0,
        }
    }

    /// The truth value; false for another type.
    pub const fn is_true(self) -> bool {
        matches!(self, Value::Bool(true))
    }
}

/// The position of a score, with the lengths of its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// The logit after the scale and the softcap.
    pub score: f64,
    /// The query's position in its sequence.
    pub query: usize,
    /// The key's position in its sequence.
    pub key: usize,
    /// The batch entry.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// Number of queries of the sequence.
    pub query_length: usize,
    /// Number of keys of the sequence.
    pub key_length: usize,
}

/// The precision of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f64.
    Exact,
    /// Each result is rounded to f32.
    Single,
}

impl Program {
    /// Evaluates the program at a point. `values` is scratch memory that calls can reuse.
    ///
    /// A table that is missing or too short reads as 0. `Problem::check` rejects missing tables, and the
    /// caller rejects short ones.
    pub fn evaluate(
        &self,
        programs: &Programs,
        tables: &[Elements<'_>],
        point: &Point,
        precision: Precision,
        values: &mut Vec<Value>,
    ) -> Value {
        values.clear();
        for id in 0..self.ops.len() {
            values.push(self.step(id, programs, tables, point, precision, values));
        }
        values[values.len() - 1]
    }

    /// The program in the row of a point, whose key and score do not matter. Tables are as for
    /// [`Program::evaluate`].
    pub fn in_row<'a>(
        &'a self,
        programs: &'a Programs,
        tables: &'a [Elements<'a>],
        point: Point,
        precision: Precision,
    ) -> InRow<'a> {
        let mut varies = vec![false; self.ops.len()];
        for (id, op) in self.ops.iter().enumerate() {
            let of_key = matches!(op, Op::Input(Input::Key | Input::Score));
            varies[id] = of_key || op.reads().iter().any(|&read| varies[read]);
        }
        let mut values = Vec::with_capacity(self.ops.len());
        self.evaluate(programs, tables, &point, precision, &mut values);
        let varying = (0..self.ops.len()).filter(|&id| varies[id]).collect();
        InRow { program: self, programs, tables, point, precision, values, varying }
    }

    /// The result of an operation, whose arguments are in `values`.
    #[inline]
    fn step(
        &self,
        id: Id,
        programs: &Programs,
        tables: &[Elements<'_>],
        point: &Point,
        precision: Precision,
        values: &[Value],
    ) -> Value {
        let value = match &self.ops[id] {
            Op::Input(input) => read(*input, programs, point),
            Op::Float(bits) => Value::Float(f64::from(f32::from_bits(*bits))),
            Op::Int(x) => Value::Int(*x),
            Op::Bool(x) => Value::Bool(*x),
            Op::Load { table, index, .. } => {
                let number = *table as usize;
                let at = programs.tables[number].offset(index.iter().map(|&id| i64::from(values[id].int())));
                tables.get(number).map_or(Value::Int(0), |data| element(data, at))
            }
            Op::Unary(op, a) => unary(*op, values[*a]),
            Op::Binary(op, a, b) => binary(*op, values[*a], values[*b]),
            Op::Compare(op, a, b) => Value::Bool(compare(*op, values[*a], values[*b])),
            Op::Select(a, b, c) => values[if values[*a].is_true() { *b } else { *c }],
        };
        match (value, precision) {
            (Value::Float(x), Precision::Single) => Value::Float(f64::from(x as f32)),
            (value, _) => value,
        }
    }
}

/// A program in one row of scores. Operations that depend on neither the key nor the score were computed when
/// it was made.
#[derive(Clone, Debug)]
pub struct InRow<'a> {
    program: &'a Program,
    programs: &'a Programs,
    tables: &'a [Elements<'a>],
    point: Point,
    precision: Precision,
    /// The results of the operations.
    values: Vec<Value>,
    /// The operations that depend on the key or the score, in order.
    varying: Vec<Id>,
}

impl InRow<'_> {
    /// Evaluates the program for a key and a logit after the scale and the softcap.
    pub fn evaluate(&mut self, key: usize, score: f64) -> Value {
        let InRow { program, programs, tables, point, precision, values, varying } = self;
        (point.key, point.score) = (key, score);
        for &id in varying.iter() {
            values[id] = program.step(id, programs, tables, point, *precision, values);
        }
        values[values.len() - 1]
    }
}

fn read(input: Input, programs: &Programs, point: &Point) -> Value {
    let int = |x: usize| Value::Int(x as i32);
    match input {
        Input::Score => Value::Float(point.score),
        Input::Query => int(point.query),
        Input::Key => int(point.key),
        Input::Batch => int(point.batch),
        Input::Head => int(point.head),
        Input::QueryLength => int(point.query_length),
        Input::KeyLength => int(point.key_length),
        Input::FloatParameter(i) => Value::Float(f64::from(programs.floats[i as usize])),
        Input::IntParameter(i) => Value::Int(programs.ints[i as usize]),
    }
}

fn element(data: &Elements<'_>, at: usize) -> Value {
    match data {
        Elements::F32(x) => Value::Float(x.get(at).map_or(0.0, |&x| x.into())),
        Elements::F16(x) => Value::Float(x.get(at).map_or(0.0, |x| x.to_f64())),
        Elements::Bf16(x) => Value::Float(x.get(at).map_or(0.0, |x| x.to_f64())),
        Elements::I32(x) => Value::Int(x.get(at).copied().unwrap_or(0)),
        Elements::U8(x) => Value::Int(x.get(at).copied().unwrap_or(0).into()),
        Elements::E4m3(_) | Elements::E5m2(_) => Value::Float(f64::NAN), // `Table::check` refuses these types
    }
}

fn unary(op: UnaryOp, value: Value) -> Value {
    match (op, value) {
        (UnaryOp::Neg, Value::Float(x)) => Value::Float(-x),
        (UnaryOp::Abs, Value::Float(x)) => Value::Float(x.abs()),
        (UnaryOp::Exp2, Value::Float(x)) => Value::Float(x.exp2()),
        (UnaryOp::Log2, Value::Float(x)) => Value::Float(x.log2()),
        (UnaryOp::Tanh, Value::Float(x)) => Value::Float(x.tanh()),
        (UnaryOp::Sqrt, Value::Float(x)) => Value::Float(x.sqrt()),
        (UnaryOp::ToInt, Value::Float(x)) => Value::Int(x as i32),
        (UnaryOp::Neg, Value::Int(x)) => Value::Int(x.wrapping_neg()),
        (UnaryOp::Abs, Value::Int(x)) => Value::Int(x.wrapping_abs()),
        (UnaryOp::Not, Value::Int(x)) => Value::Int(!x),
        (UnaryOp::Not, Value::Bool(x)) => Value::Bool(!x),
        (UnaryOp::ToInt, x) => Value::Int(x.int()),
        (UnaryOp::ToFloat, x) => Value::Float(x.int().into()),
        _ => Value::Float(f64::NAN),
    }
}

fn binary(op: BinaryOp, a: Value, b: Value) -> Value {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(match op {
            BinaryOp::Add => a + b,
            BinaryOp::Sub => a - b,
            BinaryOp::Mul => a * b,
            BinaryOp::Div => a / b,
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            _ => f64::NAN,
        }),
        (Value::Bool(a), Value::Bool(b)) => Value::Bool(match op {
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            _ => a ^ b,
        }),
        (a, b) => {
            let (a, b) = (a.int(), b.int());
            let quotient = if b == 0 { 0 } else { i64::from(a).div_euclid(i64::from(b)) };
            // Rounds towards −∞, also for a negative divisor.
            let floor =
                if b < 0 && i64::from(b) * quotient != i64::from(a) { quotient - 1 } else { quotient };
            Value::Int(match op {
                BinaryOp::Add => a.wrapping_add(b),
                BinaryOp::Sub => a.wrapping_sub(b),
                BinaryOp::Mul => a.wrapping_mul(b),
                BinaryOp::Div => floor as i32,
                BinaryOp::Rem if b == 0 => 0,
                BinaryOp::Rem => a.wrapping_sub(b.wrapping_mul(floor as i32)),
                BinaryOp::Min => a.min(b),
                BinaryOp::Max => a.max(b),
                BinaryOp::And => a & b,
                BinaryOp::Or => a | b,
                BinaryOp::Xor => a ^ b,
                BinaryOp::Shl if !(0..32).contains(&b) => 0,
                BinaryOp::Shl => a << b,
                BinaryOp::Shr => a >> (b as u32).min(31),
            })
        }
    }
}

fn compare(op: Comparison, a: Value, b: Value) -> bool {
    let order = match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.partial_cmp(&b),
        (a, b) => Some(a.int().cmp(&b.int())),
    };
    match op {
        Comparison::Eq => order.is_some_and(|o| o.is_eq()),
        Comparison::Ne => order.is_none_or(|o| o.is_ne()),
        Comparison::Lt => order.is_some_and(|o| o.is_lt()),
        Comparison::Le => order.is_some_and(|o| o.is_le()),
        Comparison::Gt => order.is_some_and(|o| o.is_gt()),
        Comparison::Ge => order.is_some_and(|o| o.is_ge()),
    }
}

impl Type {
    /// The type of a value.
    pub const fn of(value: Value) -> Type {
        match value {
            Value::Float(_) => Type::Float,
            Value::Int(_) => Type::Int,
            Value::Bool(_) => Type::Bool,
        }
    }
}
