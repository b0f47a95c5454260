//! The tensor core's sum, element by element and in plain integers. It is slow, and easy to check against the
//! papers. The fast path must give the same bits. Elements with an infinite operand or sum are always
//! computed here.

use super::super::Lanes32;
use super::super::round::{Decoded, Exact, Format, Rounding};
use super::recipe::{LEAST_ALIGNMENT, Order, Recipe};
use super::{Accumulator, Input, MmaKind, TensorRules, decode, layout};

/// A term of a dot product: value = significand · 2^(exponent − fraction bits of its format). The exponent is
/// that of the format's leading bit, also for subnormals.
#[derive(Clone, Copy)]
enum Term {
    Nan,
    Infinity { negative: bool },
    Finite { significand: i64, fraction_bits: u32, exponent: i32 },
}

fn term(format: Format, bits: u64) -> Term {
    match format.decode(bits) {
        Decoded::Nan => Term::Nan,
        Decoded::Infinity { negative } => Term::Infinity { negative },
        Decoded::Finite(Exact { negative, magnitude, exponent }) => {
            let magnitude = magnitude as i64;
            let fraction_bits = format.fraction_bits;
            let significand = if negative { -magnitude } else { magnitude };
            Term::Finite { significand, fraction_bits, exponent: exponent + fraction_bits as i32 }
        }
    }
}

fn product(a: Term, b: Term) -> Term {
    match (a, b) {
        (Term::Nan, _) | (_, Term::Nan) => Term::Nan,
        (Term::Infinity { negative: x }, Term::Infinity { negative: y }) => {
            Term::Infinity { negative: x ^ y }
        }
        (Term::Infinity { negative }, Term::Finite { significand, .. })
        | (Term::Finite { significand, .. }, Term::Infinity { negative }) => match significand {
            0 => Term::Nan,
            s => Term::Infinity { negative: negative ^ (s < 0) },
        },
        (
            Term::Finite { significand: x, fraction_bits: fx, exponent: ex },
            Term::Finite { significand: y, fraction_bits: fy, exponent: ey },
        ) => Term::Finite { significand: x * y, fraction_bits: fx + fy, exponent: ex + ey },
    }
}

/// The result format of one fused sum, its rounding, and the number of f32 fraction bits that it drops.
fn output(accumulator: Accumulator, recipe: &Recipe) -> (Format, Rounding, u32) {
    match accumulator {
        Accumulator::F16 => (Format::F16, Rounding::NearestEven, 0),
        _ => {
            let dropped = Format::F32.fraction_bits - recipe.output_fraction;
            (Format { fraction_bits: recipe.output_fraction, ..Format::F32 }, Rounding::Zero, dropped)
        }
    }
}

/// The result of one fused sum, as bits of the accumulator type.
fn fused_sum(terms: &[Term], recipe: &Recipe, accumulator: Accumulator) -> u32 {
    let (format, rounding, dropped) = output(accumulator, recipe);
    let (mut nan, mut infinities) = (false, [false; 2]);
    let mut largest = LEAST_ALIGNMENT;
    for term in terms {
        match *term {
            Term::Nan => nan = true,
            Term::Infinity { negative } => infinities[usize::from(negative)] = true,
            // Zeros take no part in the alignment, whatever the exponent of the other factor (observed on an
            // H200).
            Term::Finite { significand: 0, .. } => {}
            Term::Finite { exponent, .. } => largest = largest.max(exponent),
        }
    }
    match (nan, infinities) {
        (true, _) | (_, [true, true]) => {
            return (format.canonical_nan() << dropped) as u32 | ((1 << dropped) - 1);
        }
        (_, [true, false]) => return (format.infinity() << dropped) as u32,
        (_, [false, true]) => return ((format.infinity() | 1 << format.sign_bit()) << dropped) as u32,
        (false, [false, false]) => {}
    }
    let kept = recipe.fraction_bits as i32;
    let mut sum = 0i64;
    for term in terms {
        if let Term::Finite { significand, fraction_bits, exponent } = *term
            && significand != 0
        {
            // Truncates toward zero to units of 2^(largest − kept).
            let shift = (largest - kept) - (exponent - fraction_bits as i32);
            let magnitude = significand.abs();
            let aligned = if shift <= 0 { magnitude << -shift } else { magnitude >> shift.min(63) };
            sum += aligned * significand.signum();
        }
    }
    let exact = Exact::from_signed(i128::from(sum), largest - kept);
    let bits = exact.round_to(format, rounding);
    // Beyond the largest f32 the hardware returns infinity, although it truncates otherwise.
    let overflowed = rounding == Rounding::Zero
        && (127 - exact.magnitude.leading_zeros() as i32 + exact.exponent) > Format::F32.bias()
        && exact.magnitude != 0;
    let bits =
        if overflowed { format.infinity() | u64::from(exact.negative) << format.sign_bit() } else { bits };
    // A negative sum that rounds to zero gives +0.
    let bits = if bits == 1 << format.sign_bit() { 0 } else { bits };
    (bits << dropped) as u32
}

/// D of a floating-point kind with f16 or f32 accumulators. The operands have been checked.
pub fn mma(kind: MmaKind, rules: TensorRules, [a, b, c]: [&[Lanes32]; 3], d: &mut [Lanes32]) {
    let mut elements = Elements::new(kind, Recipe::new(kind, rules), a, b, c);
    for row in 0..kind.shape().m {
        for column in 0..kind.shape().n {
            write_accumulator(kind.accumulator(), d, row, column, elements.get(row, column));
        }
    }
}

/// Computes elements of D.
pub(super) struct Elements<'a> {
    kind: MmaKind,
    recipe: Recipe,
    /// The decoded elements of A by row, and of B by column; k varies fastest.
    rows: Vec<Term>,
    columns: Vec<Term>,
    c: &'a [Lanes32],
    /// One buffer for all sums: with an allocation per sum, threads that share the allocator's lock spend ten
    /// times as long there as on the arithmetic.
    terms: Vec<Term>,
}

impl<'a> Elements<'a> {
    pub fn new(
        kind: MmaKind,
        recipe: Recipe,
        a: &[Lanes32],
        b: &[Lanes32],
        c: &'a [Lanes32],
    ) -> Elements<'a> {
        let shape = kind.shape();
        let [ea, eb] = [kind.a(), kind.b()].map(|input| input.per_register());
        let rows = factors(&recipe, kind.a(), [shape.m, shape.k], |row, k| {
            let (register, lane) = layout::locate_a(shape, ea, row, k);
            a[register][lane]
        });
        let columns = factors(&recipe, kind.b(), [shape.n, shape.k], |column, k| {
            let (register, lane) = layout::locate_b(eb, k, column);
            b[register][lane]
        });
        Elements { kind, recipe, rows, columns, c, terms: Vec::with_capacity(1 + recipe.chunk) }
    }

    /// The bits of one element of D.
    pub fn get(&mut self, row: usize, column: usize) -> u32 {
        let Self { kind, recipe, rows, columns, c, terms } = self;
        let depth = kind.shape().k;
        let c_bits = read_accumulator(kind.accumulator(), c, row, column);
        let mut sum = match recipe.order {
            Order::Natural => c_bits,
            Order::SplitPairs => 0,
        };
        for start in (0..depth).step_by(recipe.chunk) {
            terms.clear();
            terms.push(term(accumulator_format(kind.accumulator()), u64::from(sum)));
            for i in start..start + recipe.chunk {
                let k = recipe.k_at(i);
                terms.push(product(rows[row * depth + k], columns[column * depth + k]));
            }
            sum = fused_sum(terms, recipe, kind.accumulator());
        }
        match recipe.order {
            Order::Natural => sum,
            Order::SplitPairs => add_rounded(kind.accumulator(), c_bits, sum),
        }
    }
}

/// The decoded elements of A or B: `depth` values of k for each of `lines` rows or columns.
fn factors(
    recipe: &Recipe,
    input: Input,
    [lines, depth]: [usize; 2],
    register: impl Fn(usize, usize) -> u32,
) -> Vec<Term> {
    let format = decode::format(recipe.operand(input));
    let places = (0..lines).flat_map(|line| (0..depth).map(move |k| (line, k)));
    places
        .map(|(line, k)| {
            let bits = decode::widen(recipe, input, decode::element(input, register(line, k), k));
            term(format, u64::from(bits))
        })
        .collect()
}

pub(super) fn accumulator_format(accumulator: Accumulator) -> Format {
    match accumulator {
        Accumulator::F16 => Format::F16,
        _ => Format::F32,
    }
}

/// One ordinary addition, rounded to nearest even, as FADD or HADD2 does it.
fn add_rounded(accumulator: Accumulator, x: u32, y: u32) -> u32 {
    match accumulator {
        Accumulator::F16 => {
            // The sum of two f16 is exact in f32, so it is rounded only once.
            let [x, y] = [x, y].map(|bits| half::f16::from_bits(bits as u16).to_f32());
            let sum = half::f16::from_f32(x + y);
            if sum.is_nan() { 0x7FFF } else { u32::from(sum.to_bits()) }
        }
        _ => {
            let sum = f32::from_bits(x) + f32::from_bits(y);
            if sum.is_nan() { 0x7FFF_FFFF } else { sum.to_bits() }
        }
    }
}

fn read_accumulator(accumulator: Accumulator, c: &[Lanes32], row: usize, column: usize) -> u32 {
    match accumulator {
        Accumulator::F16 => {
            let (register, lane) = layout::locate_c_half(row, column);
            c[register][lane] >> (16 * (column % 2)) & 0xFFFF
        }
        _ => {
            let (register, lane) = layout::locate_c(row, column);
            c[register][lane]
        }
    }
}

fn write_accumulator(accumulator: Accumulator, d: &mut [Lanes32], row: usize, column: usize, bits: u32) {
    match accumulator {
        Accumulator::F16 => {
            let (register, lane) = layout::locate_c_half(row, column);
            let shift = 16 * (column % 2);
            let word = &mut d[register][lane];
            *word = *word & !(0xFFFF << shift) | bits << shift;
        }
        _ => {
            let (register, lane) = layout::locate_c(row, column);
            d[register][lane] = bits;
        }
    }
}
