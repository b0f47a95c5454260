//! The derivative of a score program, by its score and by the float tables that it reads.
//!
//! Reverse differentiation of expressions: from the result back to the first operation, each operation gives
//! its arguments their shares of the derivative. Positions, integers and truth values have no derivative; a
//! comparison that decides a `select` passes nothing on, nor does a conversion to an integer. Where a
//! derivative does not exist, it is PyTorch's: that of `abs` at 0 is 0, that of `int` is 0 (so `floor` and
//! rounding have a slope of 0), and `min` and `max` of equal arguments give half to each.

use super::{BinaryOp, Expr, Id, Input, Op, Program, ProgramError, UnaryOp};

/// The derivative of a score program.
#[derive(Clone, Debug, PartialEq)]
pub struct Derivative {
    /// By the score: a factor on the gradient of the logit. `None` if the program does not read the score.
    pub score: Option<Program>,
    /// By the elements of float tables, one entry per read.
    pub reads: Vec<TableRead>,
}

/// A read of a float table, and the derivative by the element that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct TableRead {
    /// Index in [`Programs::tables`](super::Programs::tables).
    pub table: u32,
    /// The indices, one program per dimension. Each index is clamped to the extent of its dimension.
    pub index: Vec<Program>,
    /// The derivative by the element: a factor on the gradient of the logit.
    pub factor: Program,
}

impl Program {
    /// The derivative of a program whose result is a float.
    ///
    /// # Errors
    /// [`ProgramError::TooLong`].
    pub fn derivative(&self) -> Result<Derivative, ProgramError> {
        let exprs = self.exprs();
        let depends = self.depends_on_floats();
        let mut adjoints: Vec<Option<Expr>> = vec![None; exprs.len()];
        if let Some(result) = adjoints.last_mut() {
            *result = Some(Expr::from(1.0));
        }
        let mut derivative = Derivative { score: None, reads: Vec::new() };
        for id in (0..exprs.len()).rev() {
            let Some(adjoint) = adjoints[id].take().filter(|_| depends[id]) else { continue };
            match &self.ops()[id] {
                Op::Input(Input::Score) => derivative.score = Some(Program::new(&adjoint)?),
                Op::Load { table, float: true, index } => {
                    let index = index.iter().map(|&id| Program::new(&exprs[id])).collect::<Result<_, _>>()?;
                    derivative.reads.push(TableRead {
                        table: *table,
                        index,
                        factor: Program::new(&adjoint)?,
                    });
                }
                op => {
                    for (argument, share) in shares(op, &exprs, id, &adjoint) {
                        let sum = match adjoints[argument].take() {
                            None => share,
                            Some(sum) => sum + share,
                        };
                        adjoints[argument] = Some(sum);
                    }
                }
            }
        }
        derivative.reads.reverse();
        Ok(derivative)
    }

    /// For each operation, whether its value depends on the score or on an element of a float table.
    fn depends_on_floats(&self) -> Vec<bool> {
        let mut depends: Vec<bool> = Vec::with_capacity(self.ops().len());
        for op in self.ops() {
            let own = matches!(op, Op::Input(Input::Score) | Op::Load { float: true, .. });
            depends.push(own || op.reads().iter().any(|&id| depends[id]));
        }
        depends
    }
}

/// The arguments of an operation and their shares of its derivative `adjoint`.
fn shares(op: &Op, exprs: &[Expr], id: Id, adjoint: &Expr) -> Vec<(Id, Expr)> {
    let of = |id: Id| exprs[id].clone();
    let whole = || adjoint.clone();
    match *op {
        Op::Unary(op, a) => {
            let (x, y) = (of(a), of(id));
            let share = match op {
                UnaryOp::Neg => -whole(),
                UnaryOp::Abs => x.clone().gt(0.0).select(whole(), x.lt(0.0).select(-whole(), 0.0)),
                UnaryOp::Exp2 => times(whole(), y * std::f32::consts::LN_2),
                UnaryOp::Log2 => whole() / (x * std::f32::consts::LN_2),
                UnaryOp::Tanh => times(whole(), -(y.clone() * y) + 1.0),
                UnaryOp::Sqrt => whole() / (y * 2.0),
                // The result or the argument is no float.
                UnaryOp::Not | UnaryOp::ToFloat | UnaryOp::ToInt => return Vec::new(),
            };
            vec![(a, share)]
        }
        Op::Binary(op, a, b) => {
            let (x, y) = (of(a), of(b));
            // The share of the first argument of `min` (`is_less`) or `max`.
            let first = |is_less: Expr| {
                let half = times(whole(), Expr::from(0.5));
                is_less.select(whole(), x.clone().eq(y.clone()).select(half, 0.0))
            };
            let [of_a, of_b] = match op {
                BinaryOp::Add => [whole(), whole()],
                BinaryOp::Sub => [whole(), -whole()],
                BinaryOp::Mul => [times(whole(), y), times(whole(), x)],
                BinaryOp::Div => {
                    let quotient = of(id);
                    [whole() / y.clone(), -(times(whole(), quotient) / y)]
                }
                BinaryOp::Min => [first(x.clone().lt(y.clone())), first(y.clone().lt(x.clone()))],
                BinaryOp::Max => [first(x.clone().gt(y.clone())), first(y.clone().gt(x.clone()))],
                // Operations on integers and truth values.
                BinaryOp::Rem
                | BinaryOp::And
                | BinaryOp::Or
                | BinaryOp::Xor
                | BinaryOp::Shl
                | BinaryOp::Shr => return Vec::new(),
            };
            vec![(a, of_a), (b, of_b)]
        }
        Op::Select(condition, a, b) => {
            let condition = of(condition);
            vec![(a, condition.clone().select(whole(), 0.0)), (b, condition.select(0.0, whole()))]
        }
        Op::Input(_) | Op::Float(_) | Op::Int(_) | Op::Bool(_) | Op::Load { .. } | Op::Compare(..) => {
            Vec::new()
        }
    }
}

/// The product, without a factor of 1.
fn times(a: Expr, b: Expr) -> Expr {
    if a.is_one() { b } else { a * b }
}

#[cfg(test)]
mod tests {
    use super::super::library;
    use super::*;

    fn of(text: &str) -> Derivative {
        text.parse::<Program>().unwrap().derivative().unwrap()
    }

    #[test]
    fn linear_programs_have_constant_derivatives() {
        let bias = of("s + t0[b, h, q, k]");
        assert_eq!(bias.score, Some("1.0".parse().unwrap()));
        let [read] = &bias.reads[..] else { panic!("{bias:?}") };
        let index: Vec<String> = read.index.iter().map(Program::to_string).collect();
        assert_eq!(
            (read.table, index.join(" "), read.factor.to_string()),
            (0, "b h q k".into(), "1.0".into())
        );
        let alibi = Program::new(&library::alibi(1)).unwrap().derivative().unwrap();
        assert_eq!(alibi.reads.len(), 1);
        assert_eq!(alibi.score, Some("1.0".parse().unwrap()));
        assert_eq!(of("f0 * float(q - k)"), Derivative { score: None, reads: Vec::new() });
    }

    /// As in PyTorch: a conversion to an integer passes nothing on, and the rest of the program has its
    /// share.
    #[test]
    fn conversions_to_integers_pass_nothing_on() {
        for text in ["float(int(s))", "t0[h, int(s)]", "t0[int(t1[h])]"] {
            let derivative = of(text);
            assert_eq!(derivative.score, None, "{text}");
            assert!(derivative.reads.iter().all(|read| read.table == 0), "{text}");
        }
        assert_eq!(of("s - float(int(s))").score, Some("1.0".parse().unwrap()));
        let t5 = Program::new(&library::t5_bias(0, 32, 128, true)).unwrap();
        assert_eq!(t5.derivative().unwrap().reads.len(), 1);
    }
}
