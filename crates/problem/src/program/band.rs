//! Extracts the bounds of a band from the comparisons of positions in a mask program.

use super::{BinaryOp, Comparison, Expr, Id, Input, Op, Program, Programs, Type, UnaryOp};
use crate::{Band, Corner, Problem};

/// A sum of positions and a constant: `query · q + key · k + query_length · q_len + key_length · k_len +
/// rest`.
#[derive(Clone, Copy, Debug, Default)]
struct Affine {
    query: i64,
    key: i64,
    query_length: i64,
    key_length: i64,
    rest: i64,
}

impl Affine {
    fn constant(rest: i64) -> Affine {
        Affine { rest, ..Affine::default() }
    }

    fn plus(self, other: Affine, factor: i64) -> Affine {
        Affine {
            query: self.query + factor * other.query,
            key: self.key + factor * other.key,
            query_length: self.query_length + factor * other.query_length,
            key_length: self.key_length + factor * other.key_length,
            rest: self.rest + factor * other.rest,
        }
    }

    fn as_constant(self) -> Option<i64> {
        let Affine { query: 0, key: 0, query_length: 0, key_length: 0, rest } = self else { return None };
        Some(rest)
    }
}

/// A bound of a band, as a condition `key ≤ level + n` or `key ≥ level − n`.
#[derive(Clone, Copy, Debug)]
enum BandBound {
    After(Corner, u32),
    Before(Corner, u32),
}

impl Programs {
    /// The problem's band with the bounds that the mask program contains, and the mask without them.
    ///
    /// A mask is split into the parts that `&` joins. A part that compares the query with the key, such as
    /// `q >= k` or `q - k < 128`, becomes a bound. Kernels do not visit keys outside the band. Parts that no
    /// band can express stay in the mask.
    pub fn split_band(&self, problem: &Problem) -> (Band, Option<Program>) {
        let mut band = problem.band;
        let Some(mask) = &self.mask else { return (band, None) };
        let even = problem.lengths.is_even();
        let mut rest: Option<Expr> = None;
        for part in mask.conjuncts() {
            let bound = mask.bound(part, &self.ints, problem, even);
            if bound.is_some_and(|bound| narrow(&mut band, bound)) {
                continue;
            }
            let part = mask.expr(part);
            rest = Some(match rest {
                None => part,
                Some(others) => others & part,
            });
        }
        // Parts of a valid program are a valid program.
        let rest = rest.and_then(|expr| Program::new(&expr).ok());
        (band, rest)
    }
}

/// Adds a bound to a band. Returns false if one band cannot express both.
fn narrow(band: &mut Band, bound: BandBound) -> bool {
    let (BandBound::After(corner, keys) | BandBound::Before(corner, keys)) = bound;
    if !band.is_full() && band.corner != corner {
        return false;
    }
    let side = match bound {
        BandBound::After(..) => &mut band.after,
        BandBound::Before(..) => &mut band.before,
    };
    *side = Some(side.map_or(keys, |known| known.min(keys)));
    band.corner = corner;
    true
}

impl Program {
    /// The truth values that `&` joins into the result.
    fn conjuncts(&self) -> Vec<Id> {
        let mut found = Vec::new();
        let mut left = vec![self.ops.len() - 1];
        while let Some(id) = left.pop() {
            match self.ops[id] {
                Op::Binary(BinaryOp::And, a, b) if self.types[id] == Type::Bool => left.extend([b, a]),
                Op::Bool(true) => {}
                _ => found.push(id),
            }
        }
        found
    }

    /// The bound of the band that a comparison states, if any.
    fn bound(&self, id: Id, ints: &[i32], problem: &Problem, even: bool) -> Option<BandBound> {
        let Op::Compare(op, a, b) = self.ops[id] else { return None };
        if self.types[a] != Type::Int {
            return None;
        }
        let (a, b) = (self.affine(a, ints)?, self.affine(b, ints)?);
        // Every comparison is written as `sum ≥ 0`.
        let sum = match op {
            Comparison::Ge => a.plus(b, -1),
            Comparison::Gt => a.plus(b, -1).plus(Affine::constant(1), -1),
            Comparison::Le => b.plus(a, -1),
            Comparison::Lt => b.plus(a, -1).plus(Affine::constant(1), -1),
            Comparison::Eq | Comparison::Ne => return None,
        };
        // `q − k + n ≥ 0` is `k ≤ q + n`; `k − q + n ≥ 0` is `k ≥ q − n`.
        let is_after = match (sum.query, sum.key) {
            (1, -1) => true,
            (-1, 1) => false,
            _ => return None,
        };
        let sign = if is_after { 1 } else { -1 };
        let (corner, rest) = match (sum.key_length * sign, sum.query_length * sign) {
            (0, 0) => (Corner::TopLeft, sum.rest),
            (1, -1) => (Corner::BottomRight, sum.rest),
            _ => return None,
        };
        // The two corners coincide if the lengths are equal.
        let equal = even && problem.seq_q == problem.seq_kv;
        let corner = if equal { Corner::BottomRight } else { corner };
        let keys = u32::try_from(rest).ok()?;
        Some(if is_after { BandBound::After(corner, keys) } else { BandBound::Before(corner, keys) })
    }

    /// An integer operation as an affine sum of positions, with the values of the parameters inserted.
    fn affine(&self, id: Id, ints: &[i32]) -> Option<Affine> {
        Some(match self.ops[id] {
            Op::Int(x) => Affine::constant(x.into()),
            Op::Input(Input::Query) => Affine { query: 1, ..Affine::default() },
            Op::Input(Input::Key) => Affine { key: 1, ..Affine::default() },
            Op::Input(Input::QueryLength) => Affine { query_length: 1, ..Affine::default() },
            Op::Input(Input::KeyLength) => Affine { key_length: 1, ..Affine::default() },
            Op::Input(Input::IntParameter(i)) => Affine::constant((*ints.get(i as usize)?).into()),
            Op::Unary(UnaryOp::Neg, a) => Affine::default().plus(self.affine(a, ints)?, -1),
            Op::Binary(BinaryOp::Add, a, b) => self.affine(a, ints)?.plus(self.affine(b, ints)?, 1),
            Op::Binary(BinaryOp::Sub, a, b) => self.affine(a, ints)?.plus(self.affine(b, ints)?, -1),
            Op::Binary(BinaryOp::Mul, a, b) => {
                let (a, b) = (self.affine(a, ints)?, self.affine(b, ints)?);
                match (a.as_constant(), b.as_constant()) {
                    (Some(factor), _) => Affine::default().plus(b, factor),
                    (_, Some(factor)) => Affine::default().plus(a, factor),
                    _ => return None,
                }
            }
            _ => return None,
        })
    }

    /// Converts an operation back to an expression.
    fn expr(&self, root: Id) -> Expr {
        let mut exprs: Vec<Expr> = Vec::with_capacity(root + 1);
        for op in &self.ops[..=root] {
            let of = |id: &Id| exprs[*id].clone();
            let expr = match op {
                Op::Input(input) => Expr::input(*input),
                Op::Float(bits) => Expr::from(f32::from_bits(*bits)),
                Op::Int(x) => Expr::from(*x),
                Op::Bool(x) => Expr::from(*x),
                Op::Load { table, float, index } => Expr::load(*table, *float, index.iter().map(of)),
                Op::Unary(op, a) => of(a).unary(*op),
                Op::Binary(op, a, b) => of(a).binary(*op, of(b)),
                Op::Compare(op, a, b) => of(a).compare(*op, of(b)),
                Op::Select(a, b, c) => of(a).select(of(b), of(c)),
            };
            exprs.push(expr);
        }
        exprs.swap_remove(root)
    }
}
