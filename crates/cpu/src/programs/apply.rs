//! Operations on lines of words. Each loop is over slices of equal length, so that it is vectorised.

use problem::program::{BinaryOp, Comparison, Id, Op, Type, UnaryOp};

use crate::simd::{MAX_LANES, Simd};
use crate::softcap;

/// The words that an operation reads.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub data: &'a [f32],
    /// Where the first line begins.
    pub start: usize,
    /// Words from line to line.
    pub step: isize,
    /// Whether a line has a single word that applies to all positions.
    pub is_scalar: bool,
}

impl<'a> Operand<'a> {
    /// Whether lines of `width` words follow each other without gaps, or are all a single word.
    #[inline(always)]
    fn is_flat(&self, width: usize) -> bool {
        self.step == if self.is_scalar { 0 } else { width as isize }
    }

    #[inline(always)]
    pub(super) fn line(&self, line: usize, width: usize) -> &'a [f32] {
        &self.data[self.at(line)..][..width]
    }

    #[inline(always)]
    pub(super) fn scalar(&self, line: usize) -> f32 {
        self.data[self.at(line)]
    }

    #[inline(always)]
    fn at(&self, line: usize) -> usize {
        self.start.wrapping_add_signed(self.step * line as isize)
    }
}

/// A word with all bits set for true, and none for false.
#[inline(always)]
pub(super) fn truth(x: bool) -> f32 {
    f32::from_bits(if x { u32::MAX } else { 0 })
}

#[inline(always)]
fn int(x: f32) -> i32 {
    x.to_bits() as i32
}

#[inline(always)]
fn word(x: i32) -> f32 {
    f32::from_bits(x as u32)
}

#[inline(always)]
fn map(a: Operand<'_>, to: &mut [f32], width: usize, f: impl Fn(f32) -> f32 + Copy) {
    let width = if a.is_flat(width) { to.len() } else { width };
    for (line, to) in to.chunks_exact_mut(width).enumerate() {
        if a.is_scalar {
            to.fill(f(a.scalar(line)));
        } else {
            to.iter_mut().zip(a.line(line, width)).for_each(|(to, &a)| *to = f(a));
        }
    }
}

#[inline(always)]
fn map2(a: Operand<'_>, b: Operand<'_>, to: &mut [f32], width: usize, f: impl Fn(f32, f32) -> f32 + Copy) {
    let width = if a.is_flat(width) && b.is_flat(width) { to.len() } else { width };
    for (line, to) in to.chunks_exact_mut(width).enumerate() {
        match (a.is_scalar, b.is_scalar) {
            (false, false) => {
                let both = a.line(line, width).iter().zip(b.line(line, width));
                to.iter_mut().zip(both).for_each(|(to, (&a, &b))| *to = f(a, b));
            }
            (false, true) => {
                let b = b.scalar(line);
                to.iter_mut().zip(a.line(line, width)).for_each(|(to, &a)| *to = f(a, b));
            }
            (true, false) => {
                let a = a.scalar(line);
                to.iter_mut().zip(b.line(line, width)).for_each(|(to, &b)| *to = f(a, b));
            }
            (true, true) => to.fill(f(a.scalar(line), b.scalar(line))),
        }
    }
}

/// Like [`map`], on vectors.
#[inline(always)]
fn map_vectors<S: Simd>(s: S, a: Operand<'_>, to: &mut [f32], width: usize, f: impl Fn(S::V) -> S::V + Copy) {
    map(a, to, width, |x| x);
    let mut whole = to.chunks_exact_mut(S::LANES);
    for to in &mut whole {
        s.store(f(s.load(to)), to);
    }
    let to = whole.into_remainder();
    if !to.is_empty() {
        let mut lanes = [0.0; MAX_LANES];
        lanes[..to.len()].copy_from_slice(to);
        let result = f(s.load(&lanes));
        s.store(result, &mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

#[inline(always)]
pub(super) fn copy(a: Operand<'_>, to: &mut [f32], width: usize) {
    map(a, to, width, |x| x);
}

/// A sum, a difference or a negation of integers that grows by `step` from word to word. Word `origin` is
/// computed from the operands' values `of`.
pub(super) fn ramp(op: &Op, of: impl Fn(Id) -> i32, (origin, step): (usize, i32), to: &mut [f32]) {
    let value = match *op {
        Op::Unary(_, a) => of(a).wrapping_neg(),
        Op::Binary(BinaryOp::Sub, a, b) => of(a).wrapping_sub(of(b)),
        Op::Binary(_, a, b) => of(a).wrapping_add(of(b)),
        _ => 0,
    };
    let first = value.wrapping_sub(step.wrapping_mul(origin as i32));
    for (i, to) in to.iter_mut().enumerate() {
        *to = word(first.wrapping_add(step.wrapping_mul(i as i32)));
    }
}

#[inline(always)]
pub(super) fn unary<S: Simd>(s: S, op: UnaryOp, of: Type, a: Operand<'_>, to: &mut [f32], width: usize) {
    match (op, of) {
        (UnaryOp::Neg, Type::Float) => map(a, to, width, |x| -x),
        (UnaryOp::Neg, _) => map(a, to, width, |x| word(int(x).wrapping_neg())),
        (UnaryOp::Abs, Type::Float) => map(a, to, width, f32::abs),
        (UnaryOp::Abs, _) => map(a, to, width, |x| word(int(x).wrapping_abs())),
        (UnaryOp::Not, _) => map(a, to, width, |x| word(!int(x))),
        (UnaryOp::Exp2, _) => map_vectors(s, a, to, width, |x| exp2(s, x)),
        (UnaryOp::Log2, _) => map(a, to, width, log2),
        (UnaryOp::Tanh, _) => map_vectors(s, a, to, width, |x| softcap::tanh(s, x)),
        (UnaryOp::Sqrt, _) => map(a, to, width, f32::sqrt),
        (UnaryOp::ToFloat, Type::Bool) => map(a, to, width, |x| (int(x) & 1) as f32),
        (UnaryOp::ToFloat, _) => map(a, to, width, |x| int(x) as f32),
        (UnaryOp::ToInt, Type::Bool) => map(a, to, width, |x| word(int(x) & 1)),
        (UnaryOp::ToInt, _) => map(a, to, width, |x| word(x as i32)),
    }
}

#[inline(always)]
pub(super) fn binary(op: BinaryOp, of: Type, a: Operand<'_>, b: Operand<'_>, to: &mut [f32], width: usize) {
    match (op, of) {
        (BinaryOp::Add, Type::Float) => map2(a, b, to, width, |a, b| a + b),
        (BinaryOp::Sub, Type::Float) => map2(a, b, to, width, |a, b| a - b),
        (BinaryOp::Mul, Type::Float) => map2(a, b, to, width, |a, b| a * b),
        (BinaryOp::Div, Type::Float) => map2(a, b, to, width, |a, b| a / b),
        (BinaryOp::Min, Type::Float) => map2(a, b, to, width, f32::min),
        (BinaryOp::Max, Type::Float) => map2(a, b, to, width, f32::max),
        (BinaryOp::Add, _) => map2(a, b, to, width, |a, b| word(int(a).wrapping_add(int(b)))),
        (BinaryOp::Sub, _) => map2(a, b, to, width, |a, b| word(int(a).wrapping_sub(int(b)))),
        (BinaryOp::Mul, _) => map2(a, b, to, width, |a, b| word(int(a).wrapping_mul(int(b)))),
        (BinaryOp::Div, _) => map2(a, b, to, width, |a, b| word(floor_quotient(int(a), int(b)))),
        (BinaryOp::Rem, _) => map2(a, b, to, width, |a, b| word(floor_remainder(int(a), int(b)))),
        (BinaryOp::Min, _) => map2(a, b, to, width, |a, b| word(int(a).min(int(b)))),
        (BinaryOp::Max, _) => map2(a, b, to, width, |a, b| word(int(a).max(int(b)))),
        (BinaryOp::And, _) => map2(a, b, to, width, |a, b| word(int(a) & int(b))),
        (BinaryOp::Or, _) => map2(a, b, to, width, |a, b| word(int(a) | int(b))),
        (BinaryOp::Xor, _) => map2(a, b, to, width, |a, b| word(int(a) ^ int(b))),
        (BinaryOp::Shl, _) => map2(a, b, to, width, |a, b| {
            let bits = int(b) as u32;
            word(if bits < 32 { int(a) << bits } else { 0 })
        }),
        (BinaryOp::Shr, _) => map2(a, b, to, width, |a, b| word(int(a) >> (int(b) as u32).min(31))),
    }
}

/// The quotient rounded towards −∞; 0 if the divisor is 0.
#[inline(always)]
fn floor_quotient(a: i32, b: i32) -> i32 {
    if b == 0 {
        return 0;
    }
    let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
    if rest != 0 && (rest < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// The remainder with the sign of the divisor; 0 if the divisor is 0.
#[inline(always)]
fn floor_remainder(a: i32, b: i32) -> i32 {
    if b == 0 { 0 } else { a.wrapping_sub(b.wrapping_mul(floor_quotient(a, b))) }
}

/// Compares each integer with 0.
pub(super) fn compare_with_zero(op: Comparison, words: &mut [f32]) {
    let mut each = |compare: fn(&i32, &i32) -> bool| {
        words.iter_mut().for_each(|x| *x = truth(compare(&int(*x), &0)));
    };
    match op {
        Comparison::Eq => each(i32::eq),
        Comparison::Ne => each(i32::ne),
        Comparison::Lt => each(i32::lt),
        Comparison::Le => each(i32::le),
        Comparison::Gt => each(i32::gt),
        Comparison::Ge => each(i32::ge),
    }
}

#[inline(always)]
pub(super) fn compare(
    op: Comparison,
    of: Type,
    a: Operand<'_>,
    b: Operand<'_>,
    to: &mut [f32],
    width: usize,
) {
    match (op, of) {
        (Comparison::Eq, Type::Float) => map2(a, b, to, width, |a, b| truth(a == b)),
        (Comparison::Ne, Type::Float) => map2(a, b, to, width, |a, b| truth(a != b)),
        (Comparison::Lt, Type::Float) => map2(a, b, to, width, |a, b| truth(a < b)),
        (Comparison::Le, Type::Float) => map2(a, b, to, width, |a, b| truth(a <= b)),
        (Comparison::Gt, Type::Float) => map2(a, b, to, width, |a, b| truth(a > b)),
        (Comparison::Ge, Type::Float) => map2(a, b, to, width, |a, b| truth(a >= b)),
        // True is −1 as an integer, so the order of truth values is the opposite of the order of their
        // integers.
        (Comparison::Lt, Type::Bool) | (Comparison::Gt, Type::Int) => {
            map2(a, b, to, width, |a, b| truth(int(a) > int(b)));
        }
        (Comparison::Le, Type::Bool) | (Comparison::Ge, Type::Int) => {
            map2(a, b, to, width, |a, b| truth(int(a) >= int(b)));
        }
        (Comparison::Gt, Type::Bool) | (Comparison::Lt, Type::Int) => {
            map2(a, b, to, width, |a, b| truth(int(a) < int(b)));
        }
        (Comparison::Ge, Type::Bool) | (Comparison::Le, Type::Int) => {
            map2(a, b, to, width, |a, b| truth(int(a) <= int(b)));
        }
        (Comparison::Eq, _) => map2(a, b, to, width, |a, b| truth(int(a) == int(b))),
        (Comparison::Ne, _) => map2(a, b, to, width, |a, b| truth(int(a) != int(b))),
    }
}

/// The second operand where the first is true, else the third.
#[inline(always)]
pub(super) fn select([a, b, c]: [Operand<'_>; 3], to: &mut [f32], width: usize) {
    map(c, to, width, |x| x);
    let width = if a.is_flat(width) && b.is_flat(width) { to.len() } else { width };
    for (line, to) in to.chunks_exact_mut(width).enumerate() {
        let mixed = |condition: f32, yes: f32, no: f32| {
            let condition = condition.to_bits();
            f32::from_bits(yes.to_bits() & condition | no.to_bits() & !condition)
        };
        match (a.is_scalar, b.is_scalar) {
            (true, _) if int(a.scalar(line)) == 0 => {}
            (true, true) => to.fill(b.scalar(line)),
            (true, false) => to.copy_from_slice(b.line(line, width)),
            (false, true) => {
                let b = b.scalar(line);
                to.iter_mut().zip(a.line(line, width)).for_each(|(to, &a)| *to = mixed(a, b, *to));
            }
            (false, false) => {
                let both = a.line(line, width).iter().zip(b.line(line, width));
                to.iter_mut().zip(both).for_each(|(to, (&a, &b))| *to = mixed(a, b, *to));
            }
        }
    }
}

/// 2^x for every x. Results below 2⁻¹²⁶ have an absolute error of at most 2⁻¹²⁶.
#[inline(always)]
fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let (limit, large) = (s.splat(126.0), s.splat(127.0));
    let moved = s.sub(x, s.splat(64.0));
    let t = s.select_lt(limit, x, s.select_lt(large, moved, large, moved), x);
    let power = s.exp2(t);
    s.select_lt(limit, x, s.mul(power, s.splat(2f32.powi(64))), power)
}

/// log₂ x with a relative error of a few 2⁻²³, exact for powers of two. With s = (m − 1)/(m + 1) for the
/// significand m in [√½, √2), ln m = 2 · artanh s = 2 · (s + s³/3 + s⁵/5 + …).
#[inline(always)]
fn log2(x: f32) -> f32 {
    const SERIES: [f32; 5] = [2.885_39, 0.961_796_7, 0.577_078, 0.412_198_6, 0.320_598_9];
    let is_small = x < f32::MIN_POSITIVE;
    let (normal, offset) = if is_small { (x * 8_388_608.0, -23.0) } else { (x, 0.0) };
    let bits = int(normal);
    let exponent = bits.wrapping_sub(int(std::f32::consts::FRAC_1_SQRT_2)) >> 23;
    let m = word(bits.wrapping_sub(exponent << 23));
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let [a, b, c, d, e] = SERIES;
    let of_m = s * (a + square * (b + square * (c + square * (d + square * e))));
    let finite = exponent as f32 + offset + of_m;
    let positive = if x < f32::INFINITY { finite } else { x };
    if x > 0.0 {
        positive
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn logarithms_keep_their_bound() {
        for (x, expected) in [
            (0.0, f32::NEG_INFINITY),
            (-0.0, f32::NEG_INFINITY),
            (f32::INFINITY, f32::INFINITY),
            (1.0, 0.0),
            (8.0, 3.0),
            (2f32.powi(-140), -140.0),
        ] {
            assert_eq!(log2(x), expected, "{x}");
        }
        assert!(log2(-1.0).is_nan() && log2(f32::NAN).is_nan());
        for i in 1..1_000_000u32 {
            let x = f32::from_bits(i * 2100 + 1);
            let exact = f64::from(x).log2();
            let bound = exact.abs().max(1e-30) * 4.0 * f64::from(f32::EPSILON);
            assert!((f64::from(log2(x)) - exact).abs() <= bound, "{x}: {} not {exact}", log2(x));
        }
    }

    #[test]
    fn powers_have_the_whole_range() {
        let s = Portable::<4>;
        let of = |x: f32| exp2(s, s.splat(x))[0];
        assert_eq!(
            (of(0.0), of(127.0), of(128.0), of(1e30)),
            (1.0, 2f32.powi(127), f32::INFINITY, f32::INFINITY)
        );
        assert_eq!((of(f32::NEG_INFINITY), of(f32::INFINITY)), (0.0, f32::INFINITY));
        assert!(of(f32::NAN).is_nan());
        assert!((of(127.7) / 2f32.powf(127.7) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn quotients_are_rounded_down() {
        let of = |a, b| (floor_quotient(a, b), floor_remainder(a, b));
        assert_eq!([of(7, 2), of(-7, 2), of(7, -2), of(-7, -2)], [(3, 1), (-4, 1), (-4, -1), (3, -1)]);
        assert_eq!([of(5, 0), of(i32::MIN, -1), of(6, 3)], [(0, 0), (i32::MIN, 0), (2, 0)]);
    }
}
