//! Emits PTX for single operations of programs. Floats are f32 with approximate functions: `exp2` and `log2`
//! within two units in the last place, reciprocals and square roots within one. Subnormal operands of these
//! functions count as zero.

use problem::program::{BinaryOp, Comparison, UnaryOp};
use ptx::{Builder, CmpOp, F32, Global, Pred, R32, Rounding};
use tile::divide;

/// A value in registers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Float(F32),
    Int(R32),
    Bool(Pred),
    At(Global),
}

/// A program's types are checked when the program is built.
const TYPED: &str = "programs are typed";

impl Value {
    pub fn float(self) -> F32 {
        let Value::Float(x) = self else { unreachable!("{TYPED}") };
        x
    }

    pub fn int(self) -> R32 {
        let Value::Int(x) = self else { unreachable!("{TYPED}") };
        x
    }

    pub fn bool(self) -> Pred {
        let Value::Bool(x) = self else { unreachable!("{TYPED}") };
        x
    }

    pub fn at(self) -> Global {
        let Value::At(x) = self else { unreachable!("{TYPED}") };
        x
    }
}

/// Facts about an integer division that are known when the kernel is emitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// The dividend is never negative.
    pub natural: bool,
    /// The divisor, if it is a constant.
    pub by: Option<i32>,
}

pub(super) fn truth(k: &mut Builder, value: bool) -> Pred {
    let bit: R32 = k.mov(u32::from(value));
    k.setp_u(CmpOp::Ne, bit, 0)
}

pub(super) fn unary(k: &mut Builder, op: UnaryOp, value: Value) -> Value {
    match (op, value) {
        (UnaryOp::Neg, Value::Float(x)) => Value::Float(k.neg(x)),
        (UnaryOp::Abs, Value::Float(x)) => Value::Float(k.abs(x)),
        (UnaryOp::Exp2, x) => Value::Float(k.ex2(x.float())),
        (UnaryOp::Log2, x) => Value::Float(k.lg2(x.float())),
        (UnaryOp::Sqrt, x) => Value::Float(k.sqrt_approx(x.float())),
        (UnaryOp::Tanh, x) => Value::Float(tanh(k, x.float())),
        (UnaryOp::Neg, x) => Value::Int(negative(k, x.int())),
        (UnaryOp::Abs, x) => {
            let (x, minus) = (x.int(), negative(k, x.int()));
            Value::Int(k.max_s(x, minus))
        }
        (UnaryOp::Not, Value::Bool(x)) => Value::Bool(k.not_pred(x)),
        (UnaryOp::Not, x) => Value::Int(k.not(x.int())),
        (UnaryOp::ToFloat, Value::Bool(x)) => Value::Float(k.selp(1.0f32, 0.0f32, x)),
        (UnaryOp::ToFloat, x) => Value::Float(k.s32_to_f32(x.int())),
        (UnaryOp::ToInt, Value::Float(x)) => Value::Int(k.f32_to_s32(Rounding::Rz, x)),
        (UnaryOp::ToInt, x) => Value::Int(bit(k, x)),
    }
}

/// `1 − 2 / (exp2(2 · log2 e · x) + 1)`, as for [`crate::Softcap`].
fn tanh(k: &mut Builder, x: F32) -> F32 {
    let doubled = k.mul(x, 2.0 * std::f32::consts::LOG2_E);
    let power = k.ex2(doubled);
    let above = k.add(power, 1.0f32);
    let inverse = k.rcp(above);
    k.mad(inverse, -2.0f32, 1.0f32)
}

fn negative(k: &mut Builder, x: R32) -> R32 {
    let zero: R32 = k.mov(0);
    k.sub(zero, x)
}

/// An integer, or a truth value as 0 or 1.
fn bit(k: &mut Builder, value: Value) -> R32 {
    match value {
        Value::Bool(x) => k.selp(1, 0, x),
        other => other.int(),
    }
}

pub(super) fn binary(k: &mut Builder, op: BinaryOp, a: Value, b: Value, division: Division) -> Value {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(match op {
            BinaryOp::Add => k.add(a, b),
            BinaryOp::Sub => k.sub(a, b),
            BinaryOp::Mul => k.mul(a, b),
            BinaryOp::Min => k.min(a, b),
            BinaryOp::Max => k.max(a, b),
            _ => unreachable!("{TYPED}"),
        }),
        (Value::Bool(a), Value::Bool(b)) => Value::Bool(match op {
            BinaryOp::And => k.and_pred(a, b),
            BinaryOp::Or => k.or_pred(a, b),
            _ => k.xor_pred(a, b),
        }),
        (a, b) => {
            let (a, b) = (a.int(), b.int());
            Value::Int(match op {
                BinaryOp::Add => k.add(a, b),
                BinaryOp::Sub => k.sub(a, b),
                BinaryOp::Mul => k.mul(a, b),
                BinaryOp::Div => floor(k, a, b, division)[0],
                BinaryOp::Rem => floor(k, a, b, division)[1],
                BinaryOp::Min => k.min_s(a, b),
                BinaryOp::Max => k.max_s(a, b),
                BinaryOp::And => k.and(a, b),
                BinaryOp::Or => k.or(a, b),
                BinaryOp::Xor => k.xor(a, b),
                // Distances of 32 and more, negative ones among them as unsigned numbers, shift all bits out
                // (PTX ISA, "shl", "shr").
                BinaryOp::Shl => k.shl(a, b),
                BinaryOp::Shr => k.shr_s(a, b),
            })
        }
    }
}

/// Quotient, rounded towards −∞, and remainder; both 0 if the divisor is 0.
fn floor(k: &mut Builder, a: R32, b: R32, division: Division) -> [R32; 2] {
    if let Some(by) = division.by.and_then(|by| u32::try_from(by).ok()).filter(|&by| by > 0) {
        if by.is_power_of_two() {
            return [k.shr_s(a, by.trailing_zeros()), k.and(a, by - 1)];
        }
        if division.natural {
            let quotient = divide(k, a, by);
            let whole = k.mul(quotient, by);
            return [quotient, k.sub(a, whole)];
        }
    }
    let none = k.setp_s(CmpOp::Eq, b, 0);
    let by: R32 = k.selp(1, b, none);
    let toward_zero = k.div_s(a, by);
    let whole = k.mul(toward_zero, by);
    let rest = k.sub(a, whole);
    let signs = k.xor(rest, by);
    let differ = k.setp_s(CmpOp::Lt, signs, 0);
    let lower = k.setp_s_and(CmpOp::Ne, rest, 0, differ);
    let (quotient, remainder) = (k.sub(toward_zero, 1), k.add(rest, by));
    let (quotient, remainder) = (k.selp(quotient, toward_zero, lower), k.selp(remainder, rest, lower));
    [k.selp(0, quotient, none), k.selp(0, remainder, none)]
}

pub(super) fn compare(k: &mut Builder, op: Comparison, a: Value, b: Value) -> Pred {
    if let (Value::Float(a), Value::Float(b)) = (a, b) {
        let op = match op {
            Comparison::Eq => CmpOp::Eq,
            // `Neu` is true if an argument is NaN.
            Comparison::Ne => CmpOp::Neu,
            Comparison::Lt => CmpOp::Lt,
            Comparison::Le => CmpOp::Le,
            Comparison::Gt => CmpOp::Gt,
            Comparison::Ge => CmpOp::Ge,
        };
        return k.setp_f(op, a, b);
    }
    let op = match op {
        Comparison::Eq => CmpOp::Eq,
        Comparison::Ne => CmpOp::Ne,
        Comparison::Lt => CmpOp::Lt,
        Comparison::Le => CmpOp::Le,
        Comparison::Gt => CmpOp::Gt,
        Comparison::Ge => CmpOp::Ge,
    };
    let (a, b) = (bit(k, a), bit(k, b));
    k.setp_s(op, a, b)
}

pub(super) fn select(k: &mut Builder, condition: Pred, yes: Value, no: Value) -> Value {
    match (yes, no) {
        (Value::Float(yes), no) => Value::Float(k.selp(yes, no.float(), condition)),
        (Value::Bool(yes), no) => {
            let other = k.not_pred(condition);
            let (yes, no) = (k.and_pred(condition, yes), k.and_pred(other, no.bool()));
            Value::Bool(k.or_pred(yes, no))
        }
        (yes, no) => Value::Int(k.selp(yes.int(), no.int(), condition)),
    }
}
