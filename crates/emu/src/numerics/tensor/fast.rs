//! The tensor core's sum over 16 rows at once. Gives the bits of [`super::reference`] for finite operands and hands
//! every other fragment to it.
//!
//! A column of D is computed as vectors over its 16 rows, one element of B broadcast at a time, in two passes: the
//! largest exponent, then the aligned and truncated products, summed in i32. Significands have at most 11 bits, so
//! a product shifted to 25 fraction bits stays below 2^27 and 16 of them below 2^31.

use super::super::Lanes32;
use super::super::round::{Decoded, Format, Rounding};
use super::recipe::{Order, Recipe};
use super::{Accumulator, Input, MmaKind, TensorRules, decode, reference};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const MAX_K: usize = 32;
/// Products whose aligned sum is sure to fit an i32.
const RUN: usize = 16;

/// A or B in the order of execution: `[k][row or column]`, as signed significand and exponent.
struct Side<const W: usize> {
    significand: [[i32; W]; MAX_K],
    exponent: [[i32; W]; MAX_K],
}

/// C or a partial sum, by column: `[column][row]`, as signed 24-bit significand and exponent.
struct Sums {
    significand: [[i32; ROWS]; COLUMNS],
    exponent: [[i32; ROWS]; COLUMNS],
}

/// D of a floating-point kind with f16 or f32 accumulators, whose operands have been checked.
pub fn mma(
    kind: MmaKind,
    rules: TensorRules,
    a: &[Lanes32],
    b: &[Lanes32],
    c: &[Lanes32],
    d: &mut [Lanes32],
) {
    let finished = pulp::Arch::new().dispatch(
        #[inline(always)]
        || finite(kind, &Recipe::new(kind, rules), a, b, c, d),
    );
    if finished.is_none() {
        reference::mma(kind, rules, a, b, c, d);
    }
}

/// `None` as soon as an operand or a sum is not finite.
#[inline(always)]
fn finite(
    kind: MmaKind,
    recipe: &Recipe,
    a: &[Lanes32],
    b: &[Lanes32],
    c: &[Lanes32],
    d: &mut [Lanes32],
) -> Option<()> {
    let (rows, columns) = gather(kind, recipe, a, b);
    let side_a = decode_side(decode::format(recipe.operand(kind.a())), kind.shape().k, &rows)?;
    let side_b = decode_side(decode::format(recipe.operand(kind.b())), kind.shape().k, &columns)?;
    let given = gather_sums(kind.accumulator(), c);
    let mut bits = match recipe.order {
        Order::Natural => given,
        Order::SplitPairs => [[0; ROWS]; COLUMNS],
    };
    for start in (0..kind.shape().k).step_by(recipe.chunk) {
        let sums = decode_sums(kind.accumulator(), &bits)?;
        let steps = start..start + recipe.chunk;
        let fraction = product_fraction(kind, recipe);
        for (column, bits) in bits.iter_mut().enumerate() {
            let (total, largest) =
                column_sum(recipe, fraction, &side_a, &side_b, &sums, column, steps.clone());
            match kind.accumulator() {
                Accumulator::F16 => *bits = to_f16(&total, &largest, recipe),
                _ => *bits = to_f32(&total, &largest, recipe),
            }
        }
    }
    if recipe.order == Order::SplitPairs {
        for (sum, given) in bits.as_flattened_mut().iter_mut().zip(given.as_flattened()) {
            *sum = reference::add_rounded(kind.accumulator(), *given, *sum);
        }
    }
    scatter(kind.accumulator(), &bits, d);
    Some(())
}

/// Fraction bits of a product's significand.
fn product_fraction(kind: MmaKind, recipe: &Recipe) -> u32 {
    [kind.a(), kind.b()].map(|input| decode::format(recipe.operand(input)).fraction_bits).iter().sum()
}

type Rows = [[u32; ROWS]; MAX_K];
type Columns = [[u32; COLUMNS]; MAX_K];

/// Element bits of A and B, transposed so that a row of the result holds all rows (columns) of one k.
#[inline(always)]
fn gather(kind: MmaKind, recipe: &Recipe, a: &[Lanes32], b: &[Lanes32]) -> (Rows, Columns) {
    let mut rows = [[0; ROWS]; MAX_K];
    let mut columns = [[0; COLUMNS]; MAX_K];
    let (ea, eb) = (kind.a().per_register(), kind.b().per_register());
    for i in 0..kind.shape().k {
        let k = recipe.k_at(i);
        let place = k / ea % 4;
        for half in 0..2 {
            let register = &a[k / (4 * ea) * 2 + half];
            for group in 0..8 {
                let bits = decode::element(kind.a(), register[4 * group + place], k);
                rows[i][8 * half + group] = decode::widen(recipe, kind.a(), bits);
            }
        }
        let register = &b[k / (4 * eb)];
        for group in 0..8 {
            let bits = decode::element(kind.b(), register[4 * group + k / eb % 4], k);
            columns[i][group] = decode::widen(recipe, kind.b(), bits);
        }
    }
    (rows, columns)
}

/// Splits bits into signed significand and exponent; `None` if one of the first `k` rows holds NaN or infinity.
#[inline(always)]
fn decode_side<const W: usize>(format: Format, k: usize, bits: &[[u32; W]; MAX_K]) -> Option<Side<W>> {
    let mut side = Side { significand: [[0; W]; MAX_K], exponent: [[0; W]; MAX_K] };
    let mut special = false;
    for i in 0..k {
        for j in 0..W {
            let x = bits[i][j];
            let part = split(format, x);
            side.significand[i][j] = part.significand;
            side.exponent[i][j] = part.exponent;
            special |= x & format.canonical_nan() as u32 >= format.infinity() as u32;
        }
    }
    (!special).then_some(side)
}

struct Part {
    significand: i32,
    exponent: i32,
}

#[inline(always)]
fn split(format: Format, bits: u32) -> Part {
    let fraction_bits = format.fraction_bits;
    let field = bits >> fraction_bits & ((1 << format.exponent_bits) - 1);
    let magnitude = bits & ((1 << fraction_bits) - 1) | u32::from(field != 0) << fraction_bits;
    let sign = -((bits >> format.sign_bit() & 1) as i32);
    Part { significand: (magnitude as i32 ^ sign) - sign, exponent: field.max(1) as i32 - format.bias() }
}

#[inline(always)]
fn gather_sums(accumulator: Accumulator, c: &[Lanes32]) -> [[u32; ROWS]; COLUMNS] {
    let mut bits = [[0; ROWS]; COLUMNS];
    for (column, bits) in bits.iter_mut().enumerate() {
        for (row, bits) in bits.iter_mut().enumerate() {
            *bits = reference::read_accumulator(accumulator, c, row, column);
        }
    }
    bits
}

#[inline(always)]
fn scatter(accumulator: Accumulator, bits: &[[u32; ROWS]; COLUMNS], d: &mut [Lanes32]) {
    for (column, bits) in bits.iter().enumerate() {
        for (row, &bits) in bits.iter().enumerate() {
            reference::write_accumulator(accumulator, d, row, column, bits);
        }
    }
}

/// Partial sums as 24-bit significands, whatever their format.
#[inline(always)]
fn decode_sums(accumulator: Accumulator, bits: &[[u32; ROWS]; COLUMNS]) -> Option<Sums> {
    let format = match accumulator {
        Accumulator::F16 => Format::F16,
        _ => Format::F32,
    };
    let widen = Format::F32.fraction_bits - format.fraction_bits;
    let mut sums = Sums { significand: [[0; ROWS]; COLUMNS], exponent: [[0; ROWS]; COLUMNS] };
    let mut special = false;
    for column in 0..COLUMNS {
        for row in 0..ROWS {
            let x = bits[column][row];
            let part = split(format, x);
            sums.significand[column][row] = part.significand << widen;
            sums.exponent[column][row] = part.exponent;
            special |= x & format.canonical_nan() as u32 >= format.infinity() as u32;
        }
    }
    (!special).then_some(sums)
}

/// The exact sum of the aligned terms of one column, in units of 2^(largest exponent − kept bits).
#[inline(always)]
fn column_sum(
    recipe: &Recipe,
    fraction: u32,
    a: &Side<ROWS>,
    b: &Side<COLUMNS>,
    c: &Sums,
    column: usize,
    steps: std::ops::Range<usize>,
) -> ([f64; ROWS], [i32; ROWS]) {
    let mut largest = c.exponent[column];
    for k in steps.clone() {
        let eb = b.exponent[k][column];
        for row in 0..ROWS {
            largest[row] = largest[row].max(a.exponent[k][row] + eb);
        }
    }
    // C has 23 fraction bits: 2 more, and recipes with fewer than 25 shift further.
    let extra = 25 - recipe.fraction_bits as i32;
    let mut total = [0f64; ROWS];
    for row in 0..ROWS {
        let shift = largest[row] - c.exponent[column][row] + extra;
        total[row] = f64::from(truncate(c.significand[column][row], 2, shift));
    }
    let up = recipe.fraction_bits - fraction;
    for run in steps.clone().step_by(RUN) {
        let mut sum = [0i32; ROWS];
        for k in run..(run + RUN).min(steps.end) {
            let (sb, eb) = (b.significand[k][column], b.exponent[k][column]);
            for row in 0..ROWS {
                let shift = largest[row] - (a.exponent[k][row] + eb);
                sum[row] = sum[row].wrapping_add(truncate(a.significand[k][row] * sb, up, shift));
            }
        }
        for row in 0..ROWS {
            total[row] += f64::from(sum[row]);
        }
    }
    (total, largest)
}

/// `value · 2^(up − down)` toward zero; the widened value must fit 31 bits.
#[inline(always)]
fn truncate(value: i32, up: u32, down: i32) -> i32 {
    let sign = value >> 31;
    let magnitude = (value.unsigned_abs() << up) >> (down.min(31) as u32 & 31);
    (magnitude as i32 ^ sign) - sign
}

/// 2^`exponent` for a normal f64.
#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Rounds `total · 2^(largest − kept)` toward zero to f32 (or to the shorter fraction of Ada's fp8).
#[inline(always)]
fn to_f32(total: &[f64; ROWS], largest: &[i32; ROWS], recipe: &Recipe) -> [u32; ROWS] {
    // The unit of subnormals is dealt with by an integer truncation, that of normals by clearing low bits.
    let unit = Format::F32.min_exponent() - recipe.output_fraction as i32;
    let mask = !((1u64 << (52 - recipe.output_fraction)) - 1);
    let mut bits = [0; ROWS];
    for row in 0..ROWS {
        let units = (total[row] * power_of_two(largest[row] - recipe.fraction_bits as i32 - unit)).trunc();
        let kept = f64::from_bits(units.to_bits() & mask) * power_of_two(unit);
        // Adding zero turns −0, left by a truncated negative, into the +0 of an integer sum.
        bits[row] = ((kept + 0.0) as f32).to_bits();
    }
    bits
}

/// Rounds to nearest even f16.
#[inline(always)]
fn to_f16(total: &[f64; ROWS], largest: &[i32; ROWS], recipe: &Recipe) -> [u32; ROWS] {
    let mut bits = [0; ROWS];
    for row in 0..ROWS {
        let value = total[row] * power_of_two(largest[row] - recipe.fraction_bits as i32);
        if let Decoded::Finite(exact) = Format::F64.decode(value.to_bits()) {
            bits[row] = exact.round_to(Format::F16, Rounding::NearestEven) as u32;
        }
    }
    bits
}

// The i32 sums rely on 11-bit significands at most.
const _: () = assert!(Format::F16.fraction_bits <= 10 && Format::TF32.fraction_bits <= 10);
const _: () = assert!(Input::F16.bits() * RUN == 256);
