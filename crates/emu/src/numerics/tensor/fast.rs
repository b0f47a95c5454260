//! The tensor core's sum, 16 rows at a time. For finite operands the results equal those of
//! [`super::reference`]. An element of D depends on a row of A, a column of B and an element of C. With a NaN
//! among these the element is NaN, and with an infinity it is computed by that module.
//!
//! A column of D is computed as vectors over its 16 rows, with one element of B broadcast at a time. The
//! first pass finds the largest exponent. The second pass sums the aligned and truncated products in i32.
//! Significands have at most 11 bits. A product shifted to 25 fraction bits therefore stays below 2^27, and a
//! sum of 16 products below 2^31. Where exponents have at most 5 bits, f32 holds each product exactly: it is
//! scaled by a power of two and truncated by one conversion.
//!
//! Exponents are added with wrapping operations: the overflow checks of test builds would keep their loops
//! from being vectorised. The encoding leaves room for every exponent of the formats.

use std::ops::Range;

use bytemuck::Pod;
use pulp::Simd;

use super::super::Lanes32;
use super::super::float::lanes::{narrow, widen};
use super::super::round::Format;
#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::infinite::{Class, infinite_sum, mark, replace};
use super::recipe::{COLUMNS, LEAST_ALIGNMENT, Order, ROWS, Recipe};
use super::{Accumulator, Input, MmaKind, TensorRules, decode, reference};

/// The number of products whose aligned sum always fits an i32.
const RUN: usize = 16;

/// Encoding of exponents: `shift` makes them positive, and `zero` stands for a zero, below all exponents that
/// matter.
#[derive(Clone, Copy)]
struct Exponents {
    shift: i32,
    zero: u32,
}

/// Exponents of A and B.
const FACTOR: Exponents = Exponents { shift: 512, zero: 0 };
/// Exponents of products (at most −385 with a zero factor) and of C.
const SUM: Exponents =
    Exponents { shift: 2 * FACTOR.shift, zero: (2 * FACTOR.shift + LEAST_ALIGNMENT) as u32 };

/// A or B in the order of execution: `[k][row or column]`. value = ±magnitude · 2^(exponent − fraction bits).
/// `LONG` is `K`, or 0 if exponents have at most 5 bits: values stand for signs and magnitudes then.
struct Side<const LONG: usize, const K: usize, const W: usize> {
    /// Infinities and NaNs are as if the exponent were an ordinary one.
    value: [[f32; W]; K],
    /// All bits are set for a negative value.
    sign: [[u32; W]; LONG],
    magnitude: [[u32; W]; LONG],
    /// Exponent of the format's leading bit, also for subnormals, encoded as in [`Exponents`].
    exponent: [[u32; W]; K],
    /// The largest bits, without the sign, of each row or column.
    largest: [u32; W],
    format: Format,
}

impl<const LONG: usize, const K: usize, const W: usize> Side<LONG, K, W> {
    #[inline(always)]
    fn is_finite(&self) -> bool {
        let infinity = self.format.infinity() as u32;
        self.largest.iter().all(|&largest| largest < infinity)
    }

    /// The class of each row or column.
    fn classes(&self) -> [Class; W] {
        self.largest.map(|largest| Class::of(self.format, largest))
    }
}

/// C or a partial sum: `[column][row]`, with 24-bit magnitudes.
type Sums = Side<COLUMNS, COLUMNS, ROWS>;

/// D of a floating-point kind with f16 or f32 accumulators. The operands have been checked.
pub fn mma(kind: MmaKind, rules: TensorRules, [a, b, c]: [&[Lanes32]; 3], d: &mut [Lanes32]) {
    let recipe = Recipe::new(kind, rules);
    let finished = pulp::Arch::new().dispatch(Finite { kind, recipe, a, b, c, d: &mut *d });
    if finished.is_none() {
        reference::mma(kind, rules, [a, b, c], d);
    }
}

/// The arguments as a struct: unlike a closure, its body is certain to be compiled for the chosen vector
/// instructions.
struct Finite<'a> {
    kind: MmaKind,
    recipe: Recipe,
    a: &'a [Lanes32],
    b: &'a [Lanes32],
    c: &'a [Lanes32],
    d: &'a mut [Lanes32],
}

impl pulp::WithSimd for Finite<'_> {
    /// `None` for a shape that is not computed here.
    type Output = Option<()>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let inputs = [self.kind.a(), self.kind.b()].map(|input| decode::format(self.recipe.operand(input)));
        let short = inputs.iter().all(|format| format.exponent_bits <= 5);
        #[cfg(target_arch = "x86_64")]
        if let Some(avx) = (&simd as &dyn std::any::Any).downcast_ref::<pulp::x86::V4>()
            && (self.kind.a(), self.kind.accumulator()) == (Input::F16, Accumulator::F32)
        {
            let (kept, given) = (self.recipe.fraction_bits, [self.a, self.b, self.c]);
            let done = match (self.kind.shape().k, self.recipe.chunk) {
                (8, 8) => avx512::mma::<8, 2, 8>(*avx, kept, given, self.d),
                (16, 8) => avx512::mma::<16, 4, 8>(*avx, kept, given, self.d),
                (16, 16) => avx512::mma::<16, 4, 16>(*avx, kept, given, self.d),
                _ => None,
            };
            if done.is_some() {
                return done;
            }
        }
        match (short, self.kind.a().per_register(), self.kind.shape().k, self.recipe.chunk) {
            (true, 2, 8, 8) => self.run::<S, 0, 2, 8, 8>(simd),
            (true, 2, 16, 8) => self.run::<S, 0, 2, 16, 8>(simd),
            (true, 2, 16, 16) => self.run::<S, 0, 2, 16, 16>(simd),
            (true, 4, 16, 8) => self.run::<S, 0, 4, 16, 8>(simd),
            (true, 4, 16, 16) => self.run::<S, 0, 4, 16, 16>(simd),
            (true, 4, 32, 16) => self.run::<S, 0, 4, 32, 16>(simd),
            (true, 4, 32, 32) => self.run::<S, 0, 4, 32, 32>(simd),
            (false, 2, 8, 8) => self.run::<S, 8, 2, 8, 8>(simd),
            (false, 2, 16, 8) => self.run::<S, 16, 2, 16, 8>(simd),
            (false, 2, 16, 16) => self.run::<S, 16, 2, 16, 16>(simd),
            (false, 1, 4, 4) => self.run::<S, 4, 1, 4, 4>(simd),
            (false, 1, 8, 4) => self.run::<S, 8, 1, 8, 4>(simd),
            (false, 1, 8, 8) => self.run::<S, 8, 1, 8, 8>(simd),
            _ => None,
        }
    }
}

impl Finite<'_> {
    /// Runs with `E` elements per operand register, `K` products per dot product and `CHUNK` products per
    /// fused sum.
    #[inline(always)]
    fn run<S: Simd, const LONG: usize, const E: usize, const K: usize, const CHUNK: usize>(
        self,
        simd: S,
    ) -> Option<()> {
        let Self { kind, recipe, a, b, c, d } = self;
        let (rows, columns) = gather::<E, K>(kind, &recipe, a, b);
        let [fa, fb] = [kind.a(), kind.b()].map(|input| decode::format(recipe.operand(input)));
        // A is shifted so that a product with the largest exponent has all the bits that are kept.
        let side_a = decode_side::<LONG, _, _>(
            fa,
            recipe.fraction_bits - fa.fraction_bits - fb.fraction_bits,
            FACTOR,
            &rows,
        );
        let side_b = decode_side::<LONG, _, _>(fb, 0, FACTOR, &columns);
        let given = gather_sums(kind.accumulator(), c);
        let mut bits = match recipe.order {
            Order::Natural => given,
            Order::SplitPairs => [[0; ROWS]; COLUMNS],
        };
        // The elements that have a sum which is not finite. Numbers that are not finite are computed with as
        // if they were, and the elements that depend on them are replaced at the end.
        let mut open = [[false; ROWS]; COLUMNS];
        let mut finite = side_a.is_finite() && side_b.is_finite();
        for start in (0..K).step_by(CHUNK) {
            let sums = decode_sums(kind.accumulator(), &bits);
            if !sums.is_finite() {
                finite = false;
                mark(kind.accumulator(), &bits, &mut open);
            }
            for (column, bits) in bits.iter_mut().enumerate() {
                if kind.accumulator() == Accumulator::F32
                    && let Some(column) = short_column::<S, LONG, K, CHUNK>(
                        simd,
                        &recipe,
                        (&side_a, &side_b),
                        &sums,
                        column,
                        start,
                    )
                {
                    *bits = column;
                    continue;
                }
                let (total, largest) =
                    column_sum::<S, LONG, K, CHUNK>(simd, &recipe, &side_a, &side_b, &sums, column, start);
                *bits = match kind.accumulator() {
                    Accumulator::F16 => to_f16(&total, &largest, &recipe),
                    _ => to_f32(&total, &largest, &recipe),
                };
            }
        }
        if recipe.order == Order::SplitPairs {
            add_rounded(kind.accumulator(), bits.as_flattened_mut(), given.as_flattened());
        }
        if !finite {
            let of_element = |row: usize, column: usize| {
                let products = (0..K).map(|k| (rows[k][row], columns[k][column]));
                infinite_sum([fa, fb], products, given[column][row])
            };
            let classes = (side_a.classes(), side_b.classes());
            replace((kind, recipe), [a, b, c], classes, (&given, &open), of_element, &mut bits);
        }
        scatter(kind.accumulator(), &bits, d);
        Some(())
    }
}

/// Element bits of A and B. A row of the result holds the elements of all rows (columns) for one k.
#[inline(always)]
fn gather<const E: usize, const K: usize>(
    kind: MmaKind,
    recipe: &Recipe,
    a: &[Lanes32],
    b: &[Lanes32],
) -> ([[u32; ROWS]; K], [[u32; COLUMNS]; K]) {
    let mut rows = [[0; ROWS]; K];
    let mut columns = [[0; COLUMNS]; K];
    // A register of each of four lanes holds `E` elements, so four lanes hold 4·E consecutive elements in k.
    for run in 0..K / (4 * E) {
        let (upper, lower, right) = (transpose(&a[2 * run]), transpose(&a[2 * run + 1]), transpose(&b[run]));
        for offset in 0..4 * E {
            let k = 4 * E * run + offset;
            let (place, shift) = (offset / E, 32 / E * (offset % E));
            let at = match recipe.order {
                Order::Natural => k,
                Order::SplitPairs => k % 4 / 2 * (K / 2) + k / 4 * 2 + k % 2,
            };
            for group in 0..8 {
                rows[at][group] = upper[place][group] >> shift;
                rows[at][8 + group] = lower[place][group] >> shift;
                columns[at][group] = right[place][group] >> shift;
            }
        }
    }
    finish_elements::<E, _, _>(kind.a(), recipe, &mut rows);
    finish_elements::<E, _, _>(kind.b(), recipe, &mut columns);
    (rows, columns)
}

/// A register indexed by the lane's position in its group, then by group.
#[inline(always)]
fn transpose(register: &Lanes32) -> [[u32; 8]; 4] {
    let mut by_place = [[0; 8]; 4];
    for (group, places) in register.as_chunks::<4>().0.iter().enumerate() {
        for place in 0..4 {
            by_place[place][group] = places[place];
        }
    }
    by_place
}

/// Clears the bits outside the element in its register and converts the element to the multiplier's format.
#[inline(always)]
fn finish_elements<const E: usize, const K: usize, const W: usize>(
    input: Input,
    recipe: &Recipe,
    bits: &mut [[u32; W]; K],
) {
    let (shift, mask) = if E == 1 { (13, u32::MAX) } else { (0, (1 << (32 / E)) - 1) };
    bits.as_flattened_mut().iter_mut().for_each(|x| *x = *x >> shift & mask);
    if recipe.order == Order::SplitPairs {
        bits.as_flattened_mut().iter_mut().for_each(|x| *x = decode::widen(recipe, input, *x));
    }
}

/// Splits bits into sign, magnitude · 2^`up` and exponent, or into value and exponent if the exponents are
/// short.
#[inline(always)]
fn decode_side<const LONG: usize, const K: usize, const W: usize>(
    format: Format,
    up: u32,
    exponents: Exponents,
    bits: &[[u32; W]; K],
) -> Side<LONG, K, W> {
    let (value, zeros, exponent) = ([[0.0; W]; K], [[0; W]; LONG], [[0; W]; K]);
    let mut side = Side { value, sign: zeros, magnitude: zeros, exponent, largest: [0; W], format };
    let all = format.canonical_nan() as u32;
    let hidden = 1 << format.fraction_bits;
    // As a subnormal or normal f32, the bits of a number are that number times a power of two.
    let (wider, rescale) = (23 - format.fraction_bits, power_of_two(127 - format.bias()) as f32);
    for (i, bits) in bits.iter().enumerate() {
        for (j, &x) in bits.iter().enumerate() {
            let field = (x & all) >> format.fraction_bits;
            let exponent = field.max(1).wrapping_add((exponents.shift - format.bias()) as u32);
            side.exponent[i][j] = if x & all == 0 { exponents.zero } else { exponent };
            if LONG == 0 {
                let value = f32::from_bits((x & all) << wider) * rescale;
                side.value[i][j] = f32::from_bits(value.to_bits() | (x >> format.sign_bit() & 1) << 31);
            } else {
                let magnitude = x & (hidden - 1) | if field != 0 { hidden } else { 0 };
                side.magnitude[i][j] = magnitude << up;
                side.sign[i][j] = (x >> format.sign_bit() & 1).wrapping_neg();
            }
            side.largest[j] = side.largest[j].max(x & all);
        }
    }
    side
}

#[inline(always)]
fn gather_sums(accumulator: Accumulator, c: &[Lanes32]) -> [[u32; ROWS]; COLUMNS] {
    let mut bits = [[0; ROWS]; COLUMNS];
    for (index, register) in c.iter().enumerate() {
        let by_place = transpose(register);
        for place in 0..4 {
            for group in 0..8 {
                let word = by_place[place][group];
                match accumulator {
                    Accumulator::F16 => {
                        bits[2 * place][8 * (index & 1) + group] = word & 0xFFFF;
                        bits[2 * place + 1][8 * (index & 1) + group] = word >> 16;
                    }
                    _ => bits[2 * place + index % 2][8 * (index / 2 % 2) + group] = word,
                }
            }
        }
    }
    bits
}

#[inline(always)]
fn scatter(accumulator: Accumulator, bits: &[[u32; ROWS]; COLUMNS], d: &mut [Lanes32]) {
    for (index, register) in d.iter_mut().enumerate() {
        for (group, places) in register.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for (place, word) in places.iter_mut().enumerate() {
                *word = match accumulator {
                    Accumulator::F16 => {
                        let row = 8 * (index & 1) + group;
                        bits[2 * place][row] | bits[2 * place + 1][row] << 16
                    }
                    _ => bits[2 * place + index % 2][8 * (index / 2 % 2) + group],
                };
            }
        }
    }
}

/// Adds `given` to `sums`, rounding to nearest even, as FADD or HADD2 does.
#[inline(always)]
fn add_rounded(accumulator: Accumulator, sums: &mut [u32], given: &[u32]) {
    for (sum, &given) in sums.iter_mut().zip(given) {
        *sum = match accumulator {
            // The sum of two f16 has at most 51 bits and is exact in f64.
            Accumulator::F16 => narrow::<10, 5>(widen::<10>(given) + widen::<10>(*sum)),
            _ => {
                let sum = f32::from_bits(given) + f32::from_bits(*sum);
                if sum.is_nan() { 0x7FFF_FFFF } else { sum.to_bits() }
            }
        };
    }
}

/// Partial sums as 24-bit significands, for either format.
#[inline(always)]
fn decode_sums(accumulator: Accumulator, bits: &[[u32; ROWS]; COLUMNS]) -> Sums {
    match accumulator {
        Accumulator::F16 => decode_side::<COLUMNS, _, _>(
            Format::F16,
            Format::F32.fraction_bits - Format::F16.fraction_bits,
            SUM,
            bits,
        ),
        _ => decode_side::<COLUMNS, _, _>(Format::F32, 0, SUM, bits),
    }
}

/// The largest exponent of the products and of C in one column.
#[inline(always)]
fn largest_of<S: Simd, const LONG: usize, const K: usize, const CHUNK: usize>(
    simd: S,
    a: &Side<LONG, K, ROWS>,
    b: &Side<LONG, K, COLUMNS>,
    c: &Sums,
    column: usize,
    start: usize,
) -> [u32; ROWS] {
    let mut largest = c.exponent[column];
    for (block, largest) in S::as_mut_simd_u32s(&mut largest).0.iter_mut().enumerate() {
        for k in start..start + CHUNK {
            let exponent = S::as_simd_u32s(&a.exponent[k]).0[block];
            let exponent = simd.add_u32s(exponent, simd.splat_u32s(b.exponent[k][column]));
            *largest = simd.max_u32s(*largest, exponent);
        }
    }
    largest
}

/// One column of D as f32, if a sum of this length fits an i32 and each result is a normal number or zero.
#[inline(always)]
fn short_column<S: Simd, const LONG: usize, const K: usize, const CHUNK: usize>(
    simd: S,
    recipe: &Recipe,
    (a, b): (&Side<LONG, K, ROWS>, &Side<LONG, K, COLUMNS>),
    c: &Sums,
    column: usize,
    start: usize,
) -> Option<[u32; ROWS]> {
    if CHUNK > RUN / 2 {
        return None;
    }
    let largest = largest_of::<S, LONG, K, CHUNK>(simd, a, b, c, column, start);
    let sum = sum_of(simd, recipe, (a, b), &largest, column, start..start + CHUNK);
    let splat = |x: u32| simd.splat_u32s(x);
    // The units 2^-126 and 2^95: a sum of 32 bits in such a unit is a normal number or zero.
    let least = SUM.shift as u32 + recipe.fraction_bits - 126;
    let most = least + 126 + 95;
    let kept = !((1 << (Format::F32.fraction_bits - recipe.output_fraction)) - 1);
    let mut bits = [0; ROWS];
    let mut outside = splat(0);
    for (block, bits) in S::as_mut_simd_u32s(&mut bits).0.iter_mut().enumerate() {
        let of = |rows: &[u32; ROWS]| S::as_simd_u32s(rows).0[block];
        let (largest, sign) = (of(&largest), of(&c.sign[column]));
        // C has 23 fraction bits, a sum at most 25.
        let down =
            simd.add_u32s(simd.sub_u32s(largest, of(&c.exponent[column])), splat(25 - recipe.fraction_bits));
        let given = simd.wrapping_dyn_shl_u32s(of(&c.magnitude[column]), splat(2));
        let given = simd.wrapping_dyn_shr_u32s(given, simd.min_u32s(down, splat(31)));
        let given = simd.sub_u32s(simd.xor_u32s(given, sign), sign);
        let total = simd.add_u32s(of(&sum), given);
        let negative = simd.sub_u32s(splat(0), simd.wrapping_dyn_shr_u32s(total, splat(31)));
        let size = simd.sub_u32s(simd.xor_u32s(total, negative), negative);
        // The conversion rounds to nearest: where it rounds up, the number before is the truncated one.
        let number = converted(simd, size);
        let up = simd.greater_than_u32s(truncated(simd, number), size);
        let number =
            simd.sub_u32s(simd.transmute_u32s_f32s(number), simd.select_u32s(up, splat(1), splat(0)));
        let number = simd.transmute_f32s_u32s(simd.and_u32s(number, splat(kept)));
        let unit = simd.min_u32s(simd.max_u32s(largest, splat(least)), splat(most));
        let field = simd.sub_u32s(unit, splat(least - 1));
        let unit_value = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(field, splat(23)));
        let value = simd.transmute_u32s_f32s(simd.mul_f32s(number, unit_value));
        *bits = simd.or_u32s(value, simd.and_u32s(negative, splat(1 << 31)));
        outside = simd.or_u32s(outside, simd.min_u32s(simd.xor_u32s(unit, largest), size));
    }
    let outside: &[u32] = bytemuck::cast_slice(std::slice::from_ref(&outside));
    (outside.iter().fold(0, |any, x| any | x) == 0).then_some(bits)
}

/// The exact sum of the aligned terms of one column, in units of 2^(largest exponent − kept bits).
#[inline(always)]
fn column_sum<S: Simd, const LONG: usize, const K: usize, const CHUNK: usize>(
    simd: S,
    recipe: &Recipe,
    a: &Side<LONG, K, ROWS>,
    b: &Side<LONG, K, COLUMNS>,
    c: &Sums,
    column: usize,
    start: usize,
) -> ([f64; ROWS], [u32; ROWS]) {
    let largest = largest_of::<S, LONG, K, CHUNK>(simd, a, b, c, column, start);
    // C has 23 fraction bits. It is shifted left by 2, and recipes with fewer than 25 bits shift right by
    // `extra`.
    let extra = 25 - recipe.fraction_bits;
    let mut total = [0f64; ROWS];
    for row in 0..ROWS {
        let down = largest[row].wrapping_sub(c.exponent[column][row]).wrapping_add(extra).min(31);
        let magnitude = c.magnitude[column][row] << 2 >> down;
        total[row] = f64::from((magnitude ^ c.sign[column][row]).wrapping_sub(c.sign[column][row]) as i32);
    }
    for run in (start..start + CHUNK).step_by(RUN) {
        let sum = sum_of(simd, recipe, (a, b), &largest, column, run..run + CHUNK.min(RUN));
        for row in 0..ROWS {
            total[row] += f64::from(sum[row] as i32);
        }
    }
    (total, largest)
}

/// The sum of at most [`RUN`] products, each shifted to the largest exponent and truncated toward zero.
#[inline(always)]
fn sum_of<S: Simd, const LONG: usize, const K: usize>(
    simd: S,
    recipe: &Recipe,
    (a, b): (&Side<LONG, K, ROWS>, &Side<LONG, K, COLUMNS>),
    largest: &[u32; ROWS],
    column: usize,
    steps: Range<usize>,
) -> [u32; ROWS] {
    if LONG == 0 {
        short_products(simd, recipe, a, b, largest, column, steps)
    } else {
        products(simd, a, b, largest, column, steps)
    }
}

/// [`sum_of`] for every format.
#[inline(always)]
fn products<S: Simd, const LONG: usize, const K: usize>(
    simd: S,
    a: &Side<LONG, K, ROWS>,
    b: &Side<LONG, K, COLUMNS>,
    largest: &[u32; ROWS],
    column: usize,
    steps: Range<usize>,
) -> [u32; ROWS] {
    let mut sum = [0; ROWS];
    let largest = S::as_simd_u32s(largest).0;
    for (block, sum) in S::as_mut_simd_u32s(&mut sum).0.iter_mut().enumerate() {
        for k in steps.clone() {
            let [magnitude, exponent, sign] =
                [&a.magnitude[k], &a.exponent[k], &a.sign[k]].map(|rows| S::as_simd_u32s(rows).0[block]);
            let room = simd.sub_u32s(largest[block], simd.splat_u32s(b.exponent[k][column]));
            let down = simd.min_u32s(simd.sub_u32s(room, exponent), simd.splat_u32s(31));
            let product = simd.mul_u32s(magnitude, simd.splat_u32s(b.magnitude[k][column]));
            let aligned = simd.wrapping_dyn_shr_u32s(product, down);
            let sign = simd.xor_u32s(sign, simd.splat_u32s(b.sign[k][column]));
            *sum = simd.add_u32s(*sum, simd.sub_u32s(simd.xor_u32s(aligned, sign), sign));
        }
    }
    sum
}

/// [`sum_of`] for numbers whose exponents have at most 5 bits.
#[inline(always)]
fn short_products<S: Simd, const LONG: usize, const K: usize>(
    simd: S,
    recipe: &Recipe,
    a: &Side<LONG, K, ROWS>,
    b: &Side<LONG, K, COLUMNS>,
    largest: &[u32; ROWS],
    column: usize,
    steps: Range<usize>,
) -> [u32; ROWS] {
    let mut sum = [0; ROWS];
    // The exponent field of the f32 2^(kept bits − largest exponent). Beyond its bounds, all products are
    // zero or far below the unit.
    let field = 127 + recipe.fraction_bits + SUM.shift as u32;
    let largest = S::as_simd_u32s(largest).0;
    for (block, sum) in S::as_mut_simd_u32s(&mut sum).0.iter_mut().enumerate() {
        let within = simd.max_u32s(largest[block], simd.splat_u32s(field - 247));
        let within = simd.min_u32s(within, simd.splat_u32s(field - 7));
        let scale = simd.sub_u32s(simd.splat_u32s(field), within);
        let scale = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(scale, simd.splat_u32s(23)));
        for k in steps.clone() {
            let row = S::as_simd_f32s(&a.value[k]).0[block];
            let product = simd.mul_f32s(row, simd.splat_f32s(b.value[k][column]));
            *sum = simd.add_u32s(*sum, truncated(simd, simd.mul_f32s(product, scale)));
        }
    }
    sum
}

/// Numbers below 2^31, truncated toward zero, as the bits of i32. The conversion of the language also
/// saturates, which takes three times as long.
#[inline(always)]
fn truncated<S: Simd>(simd: S, numbers: S::f32s) -> S::u32s {
    #[cfg(target_arch = "x86_64")]
    {
        let simd: &dyn std::any::Any = &simd;
        if let Some(avx) = simd.downcast_ref::<pulp::x86::V4>() {
            return bytemuck::cast(avx.convert_f32x16_to_i32x16(bytemuck::cast(numbers)));
        }
        if let Some(avx) = simd.downcast_ref::<pulp::x86::V3>() {
            return bytemuck::cast(avx.convert_f32x8_to_i32x8(bytemuck::cast(numbers)));
        }
    }
    each_lane(numbers, simd.splat_u32s(0), |number: f32| number as i32)
}

/// Numbers below 2^31 as floats, to nearest even.
#[inline(always)]
fn converted<S: Simd>(simd: S, numbers: S::u32s) -> S::f32s {
    each_lane(numbers, simd.splat_f32s(0.0), |number: i32| number as f32)
}

/// Converts each lane of a vector; `to` has the type of the result.
#[inline(always)]
fn each_lane<A: Pod, B: Pod, From: Pod, To: Pod>(from: A, mut to: B, convert: impl Fn(From) -> To) -> B {
    let lanes: &mut [To] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut to));
    let numbers: &[From] = bytemuck::cast_slice(std::slice::from_ref(&from));
    lanes.iter_mut().zip(numbers).for_each(|(lane, number)| *lane = convert(*number));
    to
}

/// Exponent of the unit in which a sum with this largest exponent (encoded) is counted.
#[inline(always)]
fn unit_exponent(largest: u32, recipe: &Recipe) -> i32 {
    (largest as i32).wrapping_sub(SUM.shift.wrapping_add(recipe.fraction_bits as i32))
}

/// 2^`exponent` for a normal f64.
#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits((exponent.wrapping_add(1023) as u64) << 52)
}

/// Rounds `total · 2^(largest − kept)` toward zero to f32, or to the shorter fraction of Ada's fp8 sums.
#[inline(always)]
fn to_f32(total: &[f64; ROWS], largest: &[u32; ROWS], recipe: &Recipe) -> [u32; ROWS] {
    let mask = !((1u64 << (52 - recipe.output_fraction)) - 1);
    let mut bits = [0; ROWS];
    // Totals have at most 32 bits: with such a unit, each is a normal number, or zero.
    let (least, most) = (Format::F32.min_exponent(), 95);
    let mut normal = true;
    for row in 0..ROWS {
        let unit = unit_exponent(largest[row], recipe);
        normal &= (unit >= least) & (unit <= most) | (total[row] == 0.0);
    }
    if normal {
        for row in 0..ROWS {
            let unit = unit_exponent(largest[row], recipe).clamp(least, most);
            let field = unit.wrapping_add(Format::F32.bias());
            let kept = f64::from_bits(total[row].to_bits() & mask) as f32;
            bits[row] = (kept * f32::from_bits((field as u32) << 23)).to_bits();
        }
        return bits;
    }
    // Subnormals are truncated as integers, normal numbers by clearing low bits.
    let unit = least - recipe.output_fraction as i32;
    for row in 0..ROWS {
        let units =
            (total[row] * power_of_two(unit_exponent(largest[row], recipe).wrapping_sub(unit))).trunc();
        let kept = f64::from_bits(units.to_bits() & mask) * power_of_two(unit);
        // Adding zero turns −0, left by a truncated negative value, into +0, the zero of an integer sum.
        bits[row] = ((kept + 0.0) as f32).to_bits();
    }
    bits
}

/// Rounds to f16, to nearest even. A zero result is +0.
#[inline(always)]
fn to_f16(total: &[f64; ROWS], largest: &[u32; ROWS], recipe: &Recipe) -> [u32; ROWS] {
    let mut bits = [0; ROWS];
    for row in 0..ROWS {
        let rounded = narrow::<10, 5>(total[row] * power_of_two(unit_exponent(largest[row], recipe)));
        bits[row] = if rounded & 0x7FFF == 0 { 0 } else { rounded };
    }
    bits
}

// The i32 sums require significands of at most 11 bits.
const _: () = assert!(Format::F16.fraction_bits <= 10 && Format::TF32.fraction_bits <= 10);
const _: () = assert!(Input::F16.bits() * RUN == 256);
