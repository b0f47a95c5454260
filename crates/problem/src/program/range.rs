//! Bounds of integer values, derived from the bounds of positions.

use super::{BinaryOp, Comparison, Id, Input, Op, Program, Type, UnaryOp};
use crate::Problem;

/// The smallest and the largest value that an integer can have. Truth values are 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The smallest value.
    pub low: i64,
    /// The largest value.
    pub high: i64,
    /// Whether the value is an input position itself, not computed from one.
    pub position: bool,
}

impl Range {
    /// Every 32-bit integer.
    pub const ALL: Range = Range { low: i32::MIN as i64, high: i32::MAX as i64, position: false };

    /// Either truth value.
    const EITHER: Range = Range { low: 0, high: 1, position: false };

    /// Whether all values are indices of `extent` elements.
    pub const fn is_within(&self, extent: usize) -> bool {
        self.low >= 0 && self.high < extent as i64
    }

    /// The range of a computed value. If a bound exceeds 32 bits, the value may wrap, and the range is
    /// unlimited.
    fn computed(low: i64, high: i64) -> Range {
        if low < Range::ALL.low || high > Range::ALL.high {
            return Range::ALL;
        }
        Range { low, high, position: false }
    }
}

impl Program {
    /// The range of each operation's value over all scores of the problem. Floats have an unlimited range.
    pub fn ranges(&self, problem: &Problem) -> Vec<Range> {
        let mut found: Vec<Range> = Vec::with_capacity(self.ops.len());
        for (id, op) in self.ops.iter().enumerate() {
            let range = match *op {
                Op::Input(input) => position(input, problem),
                _ => self.range(id, &found),
            };
            found.push(range);
        }
        found
    }

    /// The range of an operation's value, given the ranges `found` of all earlier operations. Floats, inputs
    /// and table elements have an unlimited range.
    pub fn range(&self, id: Id, found: &[Range]) -> Range {
        let result = self.types[id];
        let of = |a: Id| found.get(a).copied().unwrap_or(Range::ALL);
        match self.ops[id] {
            Op::Bool(x) => truth(x),
            Op::Compare(op, a, b) if self.types[a] != Type::Float => compare(op, of(a), of(b)),
            Op::Unary(UnaryOp::Not, a) if result == Type::Bool => {
                Range { low: 1 - of(a).high, high: 1 - of(a).low, position: false }
            }
            Op::Binary(op, a, b) if result == Type::Bool => join(op, of(a), of(b)),
            Op::Unary(UnaryOp::ToInt, a) if self.types[a] == Type::Bool => of(a),
            Op::Select(a, b, _) if of(a).low == 1 => Range { position: false, ..of(b) },
            Op::Select(a, _, c) if of(a).high == 0 => Range { position: false, ..of(c) },
            Op::Select(_, b, c) => Range::computed(of(b).low.min(of(c).low), of(b).high.max(of(c).high)),
            _ if result == Type::Bool => Range::EITHER,
            _ if result == Type::Float => Range::ALL,
            Op::Int(x) => Range::computed(x.into(), x.into()),
            Op::Unary(op, a) => unary(op, of(a)),
            Op::Binary(op, a, b) => binary(op, of(a), of(b)),
            _ => Range::ALL,
        }
    }
}

fn truth(x: bool) -> Range {
    Range { low: x.into(), high: x.into(), position: false }
}

/// The range of a comparison of integers or truth values.
fn compare(op: Comparison, a: Range, b: Range) -> Range {
    let one = |yes: bool, no: bool| {
        if yes || no { truth(yes) } else { Range::EITHER }
    };
    let equal = a.low == a.high && b.low == b.high && a.low == b.low;
    let apart = a.high < b.low || b.high < a.low;
    match op {
        Comparison::Eq => one(equal, apart),
        Comparison::Ne => one(apart, equal),
        Comparison::Lt => one(a.high < b.low, a.low >= b.high),
        Comparison::Le => one(a.high <= b.low, a.low > b.high),
        Comparison::Gt => one(a.low > b.high, a.high <= b.low),
        Comparison::Ge => one(a.low >= b.high, a.high < b.low),
    }
}

/// The range of an operator that joins two truth values.
fn join(op: BinaryOp, a: Range, b: Range) -> Range {
    let (low, high) = match op {
        BinaryOp::And => (a.low.min(b.low), a.high.min(b.high)),
        BinaryOp::Or => (a.low.max(b.low), a.high.max(b.high)),
        _ if a.low == a.high && b.low == b.high => ((a.low ^ b.low), (a.low ^ b.low)),
        _ => (0, 1),
    };
    Range { low, high, position: false }
}

fn position(input: Input, problem: &Problem) -> Range {
    let index = |extent: usize| Range { low: 0, high: (extent as i64 - 1).max(0), position: true };
    let length =
        |longest: usize, even: bool| Range::computed(if even { longest as i64 } else { 0 }, longest as i64);
    let lengths = problem.lengths;
    match input {
        Input::Query => index(problem.seq_q),
        Input::Key => index(problem.seq_kv),
        Input::Batch => index(problem.batch),
        Input::Head => index(problem.heads_q),
        Input::QueryLength => length(problem.seq_q, lengths.q.is_even()),
        Input::KeyLength => length(problem.seq_kv, lengths.kv.is_even() && !lengths.left_padded),
        Input::IntParameter(_) | Input::Score | Input::FloatParameter(_) => Range::ALL,
    }
}

fn unary(op: UnaryOp, a: Range) -> Range {
    match op {
        UnaryOp::Neg => Range::computed(-a.high, -a.low),
        UnaryOp::Abs if a.low >= 0 => Range { position: false, ..a },
        UnaryOp::Abs => Range::computed(0, a.high.max(-a.low)),
        _ => Range::ALL,
    }
}

fn binary(op: BinaryOp, a: Range, b: Range) -> Range {
    match op {
        BinaryOp::Add => Range::computed(a.low + b.low, a.high + b.high),
        BinaryOp::Sub => Range::computed(a.low - b.high, a.high - b.low),
        BinaryOp::Mul => {
            let products = [a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high];
            let [first, ..] = products;
            let low = products.into_iter().fold(first, i64::min);
            Range::computed(low, products.into_iter().fold(first, i64::max))
        }
        BinaryOp::Div if b.low >= 1 => {
            let ends = [a.low.div_euclid(b.low), a.low.div_euclid(b.high)];
            let tops = [a.high.div_euclid(b.low), a.high.div_euclid(b.high)];
            Range::computed(ends[0].min(ends[1]), tops[0].max(tops[1]))
        }
        BinaryOp::Rem if b.low >= 1 => Range::computed(0, b.high - 1),
        BinaryOp::Min => Range::computed(a.low.min(b.low), a.high.min(b.high)),
        BinaryOp::Max => Range::computed(a.low.max(b.low), a.high.max(b.high)),
        BinaryOp::And if a.low >= 0 && b.low >= 0 => Range::computed(0, a.high.min(b.high)),
        BinaryOp::Shr if a.low >= 0 => Range::computed(0, a.high),
        _ => Range::ALL,
    }
}
