//! Bounds of a mask program's values over a tile: interval analysis in registers.
//!
//! A value that depends on the query alone, or on the key alone, has exact bounds: its minimum and maximum
//! over the tile's rows or columns. Bounds of other values follow from the bounds of their operands. A truth
//! value has the bounds 0 and 1.

use problem::program::{BinaryOp, Comparison, Id, Op, Range, UnaryOp};
use ptx::{Builder, CmpOp, R32};

use super::emit::{Division, Value, binary};
use super::lower::{Node, ProgramCode, ValuePlace};
use super::program::Scope;

/// A lower and an upper bound of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub low: R32,
    pub high: R32,
    is_truth: bool,
}

impl Bounds {
    /// The bounds of an integer or a truth value; `None` for other values.
    fn of_value(k: &mut Builder, value: Value) -> Option<Bounds> {
        let (value, is_truth) = match value {
            Value::Int(x) => (x, false),
            Value::Bool(x) => (k.selp(1, 0, x), true),
            Value::Float(_) | Value::At(_) => return None,
        };
        Some(Bounds { low: value, high: value, is_truth })
    }

    fn truth(low: R32, high: R32) -> Bounds {
        Bounds { low, high, is_truth: true }
    }

    /// The bounds of an unknown truth value.
    fn either(k: &mut Builder) -> Bounds {
        Bounds::truth(k.mov(0), k.mov(1))
    }

    /// Extends the bounds to the values of all lanes.
    fn over_lanes(self, k: &mut Builder) -> Bounds {
        let Bounds { mut low, mut high, is_truth } = self;
        for distance in [16, 8, 4, 2, 1] {
            let (other_low, other_high) = (k.shfl_xor(low, distance), k.shfl_xor(high, distance));
            (low, high) = (k.min_s(low, other_low), k.max_s(high, other_high));
        }
        Bounds { low, high, is_truth }
    }

    /// The bounds of the union of two sets of values of one node.
    fn with(self, k: &mut Builder, other: Bounds) -> Bounds {
        Bounds { low: k.min_s(self.low, other.low), high: k.max_s(self.high, other.high), ..self }
    }
}

/// The bounds of each node, if known.
pub(super) type BoundsOf = Vec<Option<Bounds>>;

/// The per-row and per-column nodes whose bounds determine the bounds of the mask.
pub(super) fn leaves(code: &ProgramCode, place: ValuePlace) -> Vec<Id> {
    let mut found = Vec::new();
    let mut left: Vec<Id> = code.mask.into_iter().collect();
    while let Some(id) = left.pop() {
        if code.places[id] != ValuePlace::Element {
            if code.places[id] == place {
                found.push(id);
            }
            continue;
        }
        left.extend(operands(code, id));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The operands of a node; for an element of a table, the indices.
fn operands(code: &ProgramCode, id: Id) -> Vec<Id> {
    match &code.nodes[id] {
        Node::Op(op) => op.reads(),
        Node::Reciprocal(a) => vec![*a],
        Node::Load { parts, .. } => parts.iter().flat_map(|&part| operands(code, part)).collect(),
        Node::Address { indices, .. } => indices.iter().map(|index| index.value).collect(),
        Node::Staged(_) => Vec::new(),
    }
}

/// The bounds of `leaves` over all lanes and over the positions that `positions` sets one after another.
pub(super) fn of_leaves(
    k: &mut Builder,
    at: &mut Scope,
    leaves: &[Id],
    positions: u32,
    set: impl Fn(&mut Builder, &mut Scope, u32),
) -> BoundsOf {
    let mut found: BoundsOf = vec![None; at.row.len()];
    for position in 0..positions {
        set(k, at, position);
        for &leaf in leaves {
            let value = at.value(k, leaf);
            let Some(own) = Bounds::of_value(k, value) else { continue };
            found[leaf] = Some(match found[leaf] {
                None => own,
                Some(known) => known.with(k, own),
            });
        }
    }
    found.iter().map(|bounds| bounds.map(|bounds| bounds.over_lanes(k))).collect()
}

/// Computes the bounds of nodes over a tile.
pub(super) struct TileBounds<'a, 'b> {
    pub code: &'a ProgramCode,
    pub at: &'a mut Scope<'b>,
    /// The bounds of the leaves, and the bounds computed so far.
    pub known: BoundsOf,
}

impl TileBounds<'_, '_> {
    /// The bounds of a node; `None` if they are unknown.
    pub fn of(&mut self, k: &mut Builder, id: Id) -> Option<Bounds> {
        if self.known[id].is_some() {
            return self.known[id];
        }
        self.known[id] = match self.code.places[id] {
            ValuePlace::Once => {
                let value = self.at.value(k, id);
                Bounds::of_value(k, value)
            }
            ValuePlace::Row | ValuePlace::Column => None,
            ValuePlace::Element => match &self.code.nodes[id] {
                Node::Op(op) => self.operation(k, id, op),
                Node::Load { table, .. } => self.element(k, id, *table),
                Node::Reciprocal(_) | Node::Address { .. } | Node::Staged(_) => None,
            },
        };
        self.known[id]
    }

    fn operation(&mut self, k: &mut Builder, id: Id, op: &Op) -> Option<Bounds> {
        match *op {
            Op::Compare(op, a, b) => Some(match self.of(k, a).zip(self.of(k, b)) {
                Some((a, b)) => compare(k, op, a, b),
                None => Bounds::either(k),
            }),
            Op::Unary(UnaryOp::Not, a) => {
                let a = self.of(k, a)?;
                let not = |k: &mut Builder, x: R32| if a.is_truth { k.xor(x, 1) } else { k.not(x) };
                Some(Bounds { low: not(k, a.high), high: not(k, a.low), ..a })
            }
            Op::Unary(UnaryOp::ToInt, a) => {
                let a = self.of(k, a)?;
                Some(Bounds { is_truth: false, ..a })
            }
            Op::Binary(op, a, b) if op == BinaryOp::And || op == BinaryOp::Or || op == BinaryOp::Xor => {
                let (a, b) = (self.of(k, a)?, self.of(k, b)?);
                if !a.is_truth {
                    return None;
                }
                Some(match op {
                    BinaryOp::And => Bounds::truth(k.min_s(a.low, b.low), k.min_s(a.high, b.high)),
                    BinaryOp::Or => Bounds::truth(k.max_s(a.low, b.low), k.max_s(a.high, b.high)),
                    _ => Bounds::either(k),
                })
            }
            Op::Select(c, a, b) => {
                let (c, a, b) = (self.of(k, c)?, self.of(k, a)?, self.of(k, b)?);
                let (always, never) = (k.setp_s(CmpOp::Eq, c.low, 1), k.setp_s(CmpOp::Eq, c.high, 0));
                let either = a.with(k, b);
                let pick = |k: &mut Builder, a: R32, b: R32, either: R32| {
                    let known = k.selp(b, either, never);
                    k.selp(a, known, always)
                };
                let low = pick(k, a.low, b.low, either.low);
                Some(Bounds { low, high: pick(k, a.high, b.high, either.high), ..a })
            }
            // Integers wrap. Bounds follow from the operands' bounds only for an operation that cannot
            // overflow.
            _ if !self.code.fits(id) => None,
            Op::Unary(op, a) => {
                let a = self.of(k, a)?;
                let zero: R32 = k.mov(0);
                let (minus_low, minus_high) = (k.sub(zero, a.low), k.sub(zero, a.high));
                let (low, high) = match op {
                    UnaryOp::Neg => (minus_high, minus_low),
                    UnaryOp::Abs => {
                        let low = k.max_s(a.low, minus_high);
                        (k.max_s(low, 0), k.max_s(a.high, minus_low))
                    }
                    _ => return None,
                };
                Some(Bounds { low, high, is_truth: false })
            }
            Op::Binary(op, a, b) => self.arithmetic(k, op, [a, b]),
            _ => None,
        }
    }

    /// The bounds of a sum, a difference, a product, a quotient, a remainder, a minimum or a maximum.
    fn arithmetic(&mut self, k: &mut Builder, op: BinaryOp, [a, b]: [Id; 2]) -> Option<Bounds> {
        let division = Division { natural: self.code.is_natural(a), by: self.code.constant(b) };
        let (a, b) = (self.of(k, a)?, self.of(k, b)?);
        let of_positive = division.by.is_some_and(|by| by > 0);
        let (low, high) = match op {
            BinaryOp::Add => (k.add(a.low, b.low), k.add(a.high, b.high)),
            BinaryOp::Sub => (k.sub(a.low, b.high), k.sub(a.high, b.low)),
            BinaryOp::Min => (k.min_s(a.low, b.low), k.min_s(a.high, b.high)),
            BinaryOp::Max => (k.max_s(a.low, b.low), k.max_s(a.high, b.high)),
            BinaryOp::Mul => {
                let ends = [(a.low, b.low), (a.low, b.high), (a.high, b.low), (a.high, b.high)];
                let [first, rest @ ..] = ends.map(|(a, b)| k.mul(a, b));
                let low = rest.iter().fold(first, |low, &end| k.min_s(low, end));
                (low, rest.iter().fold(first, |high, &end| k.max_s(high, end)))
            }
            BinaryOp::Div if of_positive => {
                let quotient = |k: &mut Builder, x| {
                    binary(k, BinaryOp::Div, Value::Int(x), Value::Int(b.low), division).int()
                };
                (quotient(k, a.low), quotient(k, a.high))
            }
            BinaryOp::Rem if of_positive => (k.mov(0), k.sub(b.low, 1)),
            _ => return None,
        };
        Some(Bounds { low, high, is_truth: false })
    }

    /// The bounds of a table element, if the whole tile reads a single element: a mask of coarse blocks.
    fn element(&mut self, k: &mut Builder, id: Id, table: usize) -> Option<Bounds> {
        let Node::Load { parts, .. } = &self.code.nodes[id] else { return None };
        let indices = parts.iter().flat_map(|&part| match &self.code.nodes[part] {
            Node::Address { indices, .. } => indices.as_slice(),
            _ => &[],
        });
        let mut at = Vec::new();
        let mut one = None;
        for index in indices {
            let bounds = self.of(k, index.value)?;
            let equal = k.setp_s(CmpOp::Eq, bounds.low, bounds.high);
            one = Some(one.map_or(equal, |one| k.and_pred(one, equal)));
            at.push((index.dimension, bounds.low));
        }
        let value = self.at.element(k, table, &at);
        let Value::Int(value) = value else { return None };
        let one = one?;
        let Range { low, high, .. } = Range::ALL;
        let (low, high) = (k.selp(value, low as i32, one), k.selp(value, high as i32, one));
        Some(Bounds { low, high, is_truth: false })
    }
}

/// The bounds of a comparison.
fn compare(k: &mut Builder, op: Comparison, a: Bounds, b: Bounds) -> Bounds {
    let mut both = |op, a, b, c, d| {
        let first = k.setp_s(op, a, b);
        let both = k.setp_s_and(op, c, d, first);
        k.selp(1, 0, both)
    };
    match op {
        // All comparisons have one result if one range lies below the other.
        Comparison::Eq | Comparison::Ne => {
            let always = both(CmpOp::Le, a.high, b.low, b.high, a.low);
            let possible = both(CmpOp::Le, a.low, b.high, b.low, a.high);
            if op == Comparison::Eq {
                return Bounds::truth(always, possible);
            }
            Bounds::truth(k.xor(possible, 1), k.xor(always, 1))
        }
        Comparison::Lt => ordered(k, CmpOp::Lt, a, b),
        Comparison::Le => ordered(k, CmpOp::Le, a, b),
        Comparison::Gt => ordered(k, CmpOp::Lt, b, a),
        Comparison::Ge => ordered(k, CmpOp::Le, b, a),
    }
}

/// The bounds of `a < b` or `a ≤ b`.
fn ordered(k: &mut Builder, op: CmpOp, a: Bounds, b: Bounds) -> Bounds {
    let (always, possible) = (k.setp_s(op, a.high, b.low), k.setp_s(op, a.low, b.high));
    Bounds::truth(k.selp(1, 0, always), k.selp(1, 0, possible))
}
