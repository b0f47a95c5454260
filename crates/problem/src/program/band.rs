//! Extracts the bounds of a band from the comparisons of positions in a mask program.

use super::{BinaryOp, Comparison, Expr, Id, Input, Op, Program, Programs, Type, UnaryOp};
use crate::{Band, Corner, Problem};

/// A sum of positions and a constant: `query · q + key · k + query_length · q_len + key_length · k_len +
/// rest`. The value of an operation is that sum without wrap-around, at all positions of the problem.
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

    /// `self + factor · other`, unless a coefficient overflows.
    fn plus(self, other: Affine, factor: i64) -> Option<Affine> {
        let add = |a: i64, b: i64| a.checked_add(factor.checked_mul(b)?);
        Some(Affine {
            query: add(self.query, other.query)?,
            key: add(self.key, other.key)?,
            query_length: add(self.query_length, other.query_length)?,
            key_length: add(self.key_length, other.key_length)?,
            rest: add(self.rest, other.rest)?,
        })
    }

    fn as_constant(self) -> Option<i64> {
        let Affine { query: 0, key: 0, query_length: 0, key_length: 0, rest } = self else { return None };
        Some(rest)
    }

    /// Whether the sum is a 32-bit integer at all positions of the problem. Integers of programs wrap: an
    /// operation has another value where its sum is none.
    fn fits(self, problem: &Problem) -> bool {
        let (mut low, mut high) = (i128::from(self.rest), i128::from(self.rest));
        for (coefficient, most) in [
            (self.query, problem.seq_q.saturating_sub(1)),
            (self.key, problem.seq_kv.saturating_sub(1)),
            (self.query_length, problem.seq_q),
            (self.key_length, problem.seq_kv),
        ] {
            let reach = i128::from(coefficient).saturating_mul(most as i128);
            low = low.saturating_add(reach.min(0));
            high = high.saturating_add(reach.max(0));
        }
        i128::from(i32::MIN) <= low && high <= i128::from(i32::MAX)
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
        let (sums, exprs) = (mask.sums(&self.ints, problem), mask.exprs());
        let mut rest: Option<Expr> = None;
        for part in mask.conjuncts() {
            let bound = mask.bound(part, &sums, problem, even);
            if bound.is_some_and(|bound| narrow(&mut band, bound)) {
                continue;
            }
            let part = exprs[part].clone();
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
    let (corner, before, after) = match bound {
        BandBound::After(corner, keys) => (corner, None, Some(keys)),
        BandBound::Before(corner, keys) => (corner, Some(keys), None),
    };
    let both = band.intersection(Band { corner, before, after });
    *band = both.unwrap_or(*band);
    both.is_some()
}

impl Program {
    /// The truth values that `&` joins into the result, each once.
    fn conjuncts(&self) -> Vec<Id> {
        let mut found = Vec::new();
        let mut seen = vec![false; self.ops.len()];
        let mut left = vec![self.ops.len() - 1];
        while let Some(id) = left.pop() {
            if std::mem::replace(&mut seen[id], true) {
                continue;
            }
            match self.ops[id] {
                Op::Binary(BinaryOp::And, a, b) if self.types[id] == Type::Bool => left.extend([b, a]),
                Op::Bool(true) => {}
                _ => found.push(id),
            }
        }
        found
    }

    /// The bound of the band that a comparison states, if any. `sums` are those of [`Program::sums`].
    fn bound(&self, id: Id, sums: &[Option<Affine>], problem: &Problem, even: bool) -> Option<BandBound> {
        let Op::Compare(op, a, b) = self.ops[id] else { return None };
        if self.types[a] != Type::Int {
            return None;
        }
        let (a, b) = (sums[a]?, sums[b]?);
        // Every comparison is written as `sum ≥ 0`.
        let sum = match op {
            Comparison::Ge => a.plus(b, -1)?,
            Comparison::Gt => a.plus(b, -1)?.plus(Affine::constant(1), -1)?,
            Comparison::Le => b.plus(a, -1)?,
            Comparison::Lt => b.plus(a, -1)?.plus(Affine::constant(1), -1)?,
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

    /// Each operation as a sum of positions, with the values of the parameters inserted. `None` for an
    /// operation that is not such a sum, or that can wrap at a position of the problem.
    fn sums(&self, ints: &[i32], problem: &Problem) -> Vec<Option<Affine>> {
        let mut found = Vec::with_capacity(self.ops.len());
        for op in &self.ops {
            found.push(affine(op, &found, ints).filter(|sum| sum.fits(problem)));
        }
        found
    }

    /// Converts all operations back to expressions.
    pub(super) fn exprs(&self) -> Vec<Expr> {
        let mut exprs: Vec<Expr> = Vec::with_capacity(self.ops.len());
        for op in &self.ops {
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
        exprs
    }
}

/// An operation as a sum of positions, given the sums of all earlier operations.
fn affine(op: &Op, found: &[Option<Affine>], ints: &[i32]) -> Option<Affine> {
    let none = Affine::default();
    match *op {
        Op::Int(x) => Some(Affine::constant(x.into())),
        Op::Input(Input::Query) => Some(Affine { query: 1, ..none }),
        Op::Input(Input::Key) => Some(Affine { key: 1, ..none }),
        Op::Input(Input::QueryLength) => Some(Affine { query_length: 1, ..none }),
        Op::Input(Input::KeyLength) => Some(Affine { key_length: 1, ..none }),
        Op::Input(Input::IntParameter(i)) => Some(Affine::constant((*ints.get(i as usize)?).into())),
        Op::Unary(UnaryOp::Neg, a) => none.plus(found[a]?, -1),
        Op::Binary(BinaryOp::Add, a, b) => found[a]?.plus(found[b]?, 1),
        Op::Binary(BinaryOp::Sub, a, b) => found[a]?.plus(found[b]?, -1),
        Op::Binary(BinaryOp::Mul, a, b) => {
            let (a, b) = (found[a]?, found[b]?);
            match (a.as_constant(), b.as_constant()) {
                (Some(factor), _) => none.plus(b, factor),
                (_, Some(factor)) => none.plus(a, factor),
                _ => None,
            }
        }
        _ => None,
    }
}
