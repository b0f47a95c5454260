//! f16 products with f32 sums in the registers of AVX-512. The sums are those of [`super::fast`]: a vector
//! holds the 16 rows of a column of D, and a product is f32, scaled to the unit of the sum and truncated by
//! one conversion.
//!
//! An exponent is kept where f32 has it, with the bias of f32. That of a product has the bias twice.

use pulp::x86::V4;
use pulp::{cast, f32x16, u32x16};

use super::super::Lanes32;

/// Columns that are computed together, so that they share the loads of A.
const TOGETHER: usize = 4;

const FRACTION_BITS: u32 = 23;
const BIAS: u32 = 127;
/// The bits of an exponent, and their position.
const FIELD: u32 = 0xff << FRACTION_BITS;
/// The exponent of subnormal f16.
const LEAST: u32 = (BIAS - 14) << FRACTION_BITS;
/// A sum whose largest exponent is below −96 has no product except zeros, and C alone.
const ALONE: u32 = (2 * BIAS - 96) << FRACTION_BITS;

/// Rounds toward zero, without exceptions.
const TRUNCATED: i32 = 0x03 | 0x08;

/// A for each k: the values of 16 rows, and their exponents, 0 for a zero.
struct Left<const K: usize> {
    values: [f32x16; K],
    exponents: [u32x16; K],
}

/// B in its registers: for k = 8·r + 2·p + h, column c is element 4·c + p of array 2·r + h.
struct Right<const ARRAYS: usize> {
    values: [[f32; 32]; ARRAYS],
    exponents: [[u32; 32]; ARRAYS],
}

/// D for `K` products in sums of `CHUNK` products, of which `kept` fraction bits are kept; `ARRAYS` is K / 4.
/// `None` if a number or a sum is not finite, or if a sum does not fit 32 bits.
#[inline(always)]
pub(super) fn mma<const K: usize, const ARRAYS: usize, const CHUNK: usize>(
    simd: V4,
    kept: u32,
    [a, b, c]: [&[Lanes32]; 3],
    d: &mut [Lanes32],
) -> Option<()> {
    let ([c0, c1, c2, c3], [d0, d1, d2, d3]) = (c, d) else { return None };
    let (left, largest_of_a) = decode_left::<K>(simd, a);
    let (right, largest_of_b) = decode_right::<ARRAYS>(simd, b);
    let (mut even, mut odd) = (columns(simd, c0, c2), columns(simd, c1, c3));
    let mut largest = simd.max_u32x16(largest_of_a, largest_of_b);
    let mut overflow = simd.splat_u32x16(0);
    for (sums, first) in [(&mut even, 0), (&mut odd, 1)] {
        for start in (0..K).step_by(CHUNK) {
            for sum in sums.iter() {
                largest = simd.max_u32x16(largest, simd.and_u32x16(*sum, simd.splat_u32x16(FIELD)));
            }
            add_products::<K, ARRAYS, CHUNK>(
                simd,
                kept,
                (&left, &right),
                sums,
                (first, start),
                &mut overflow,
            );
        }
        for sum in sums.iter() {
            largest = simd.max_u32x16(largest, simd.and_u32x16(*sum, simd.splat_u32x16(FIELD)));
        }
    }
    let finite = simd.cmp_lt_u32x16(largest, simd.splat_u32x16(FIELD));
    let fits = simd.cmp_ge_i32x16(cast(overflow), simd.splat_i32x16(0));
    if finite.0 & fits.0 != u16::MAX {
        return None;
    }
    store_columns(simd, even, d0, d2);
    store_columns(simd, odd, d1, d3);
    Some(())
}

/// Adds `CHUNK` products from `start` on to the columns `first`, `first` + 2, and so on.
#[inline(always)]
fn add_products<const K: usize, const ARRAYS: usize, const CHUNK: usize>(
    simd: V4,
    kept: u32,
    (left, right): (&Left<K>, &Right<ARRAYS>),
    sums: &mut [u32x16; TOGETHER],
    (first, start): (usize, usize),
    overflow: &mut u32x16,
) {
    let splat = |x: u32| simd.splat_u32x16(x);
    let of_right = |k: usize, column: usize| (k / 8 * 2 + k % 2, 4 * (2 * column + first) + k % 8 / 2);
    let mut largest = [splat(BIAS << FRACTION_BITS); TOGETHER];
    for (sum, largest) in sums.iter().zip(&mut largest) {
        *largest = simd.wrapping_add_u32x16(simd.and_u32x16(*sum, splat(FIELD)), *largest);
    }
    for k in start..start + CHUNK {
        for (column, largest) in largest.iter_mut().enumerate() {
            let (array, at) = of_right(k, column);
            let exponent = simd.wrapping_add_u32x16(left.exponents[k], splat(right.exponents[array][at]));
            *largest = simd.max_u32x16(*largest, exponent);
        }
    }
    // 2^(kept bits − largest exponent).
    let top = splat((3 * BIAS + kept) << FRACTION_BITS);
    let (mut scale, mut totals) = ([simd.splat_f32x16(0.0); TOGETHER], [splat(0); TOGETHER]);
    for column in 0..TOGETHER {
        scale[column] = cast(simd.wrapping_sub_u32x16(top, largest[column]));
        totals[column] = truncated(simd, simd.mul_f32x16(cast(sums[column]), scale[column]));
    }
    // Only 16 products and C may need more than 32 bits: half of them do not.
    for half in (start..start + CHUNK).step_by(8) {
        let mut part = [splat(0); TOGETHER];
        for k in half..half + 8 {
            for (column, part) in part.iter_mut().enumerate() {
                let (array, at) = of_right(k, column);
                let product = simd.mul_f32x16(left.values[k], simd.splat_f32x16(right.values[array][at]));
                let aligned = truncated(simd, simd.mul_f32x16(product, scale[column]));
                *part = simd.wrapping_add_u32x16(*part, aligned);
            }
        }
        for (total, part) in totals.iter_mut().zip(part) {
            let sum = simd.wrapping_add_u32x16(*total, part);
            if CHUNK > 8 {
                let differs = simd.and_u32x16(simd.xor_u32x16(sum, *total), simd.xor_u32x16(sum, part));
                *overflow = simd.or_u32x16(*overflow, differs);
            }
            *total = sum;
        }
    }
    for column in 0..TOGETHER {
        let unit = simd.wrapping_sub_u32x16(largest[column], splat((BIAS + kept) << FRACTION_BITS));
        let number: f32x16 = cast(simd.avx512f._mm512_cvt_roundepi32_ps::<TRUNCATED>(cast(totals[column])));
        let sum = simd.mul_f32x16(number, cast(unit));
        // Adding zero turns −0 into +0, the zero of a sum.
        let alone = simd.add_f32x16(cast(sums[column]), simd.splat_f32x16(0.0));
        let is_alone = simd.cmp_lt_u32x16(largest[column], splat(ALONE));
        sums[column] = cast(simd.select_f32x16(is_alone, alone, sum));
    }
}

#[inline(always)]
fn truncated(simd: V4, numbers: f32x16) -> u32x16 {
    cast(simd.convert_f32x16_to_i32x16(numbers))
}

/// A by k, and the largest exponents.
#[inline(always)]
fn decode_left<const K: usize>(simd: V4, a: &[Lanes32]) -> (Left<K>, u32x16) {
    let mut left = Left { values: [simd.splat_f32x16(0.0); K], exponents: [simd.splat_u32x16(0); K] };
    let mut largest = simd.splat_u32x16(0);
    for (eight, registers) in a.as_chunks::<2>().0.iter().enumerate() {
        for (pair, words) in columns(simd, &registers[0], &registers[1]).into_iter().enumerate() {
            for (half, value) in halves(simd, words).into_iter().enumerate() {
                let k = 8 * eight + 2 * pair + half;
                let field = simd.and_u32x16(cast(value), simd.splat_u32x16(FIELD));
                largest = simd.max_u32x16(largest, field);
                (left.values[k], left.exponents[k]) = (value, exponents(simd, value, field));
            }
        }
    }
    (left, largest)
}

/// B, and the largest exponents.
#[inline(always)]
fn decode_right<const ARRAYS: usize>(simd: V4, b: &[Lanes32]) -> (Right<ARRAYS>, u32x16) {
    let mut right = Right { values: [[0.0; 32]; ARRAYS], exponents: [[0; 32]; ARRAYS] };
    let mut largest = simd.splat_u32x16(0);
    for (register, words) in b.iter().enumerate() {
        for (part, words) in parts(words).into_iter().enumerate() {
            for (half, value) in halves(simd, words).into_iter().enumerate() {
                let field = simd.and_u32x16(cast(value), simd.splat_u32x16(FIELD));
                largest = simd.max_u32x16(largest, field);
                let array = 2 * register + half;
                right.values[array].as_chunks_mut::<16>().0[part] = cast(value);
                right.exponents[array].as_chunks_mut::<16>().0[part] = cast(exponents(simd, value, field));
            }
        }
    }
    (right, largest)
}

/// The low and the high halves of words, as f32.
#[inline(always)]
fn halves(simd: V4, words: u32x16) -> [f32x16; 2] {
    let low = cast(simd.convert_u32x16_to_u16x16(words));
    let high = cast(simd.convert_u32x16_to_u16x16(simd.shr_const_u32x16::<16>(words)));
    [cast(simd.avx512f._mm512_cvtph_ps(low)), cast(simd.avx512f._mm512_cvtph_ps(high))]
}

/// The exponents of f16 values with these exponents as f32; 0 for a zero.
#[inline(always)]
fn exponents(simd: V4, value: f32x16, field: u32x16) -> u32x16 {
    let is_zero = simd.cmp_eq_f32x16(value, simd.splat_f32x16(0.0));
    simd.select_u32x16(is_zero, simd.splat_u32x16(0), simd.max_u32x16(field, simd.splat_u32x16(LEAST)))
}

#[inline(always)]
fn parts(register: &Lanes32) -> [u32x16; 2] {
    let [low, high] = register.as_chunks::<16>().0 else { unreachable!("32 lanes are two vectors") };
    [cast(*low), cast(*high)]
}

/// Two registers that hold rows 0 to 7 and 8 to 15, with four words of a row in consecutive lanes: each of
/// these words for all rows.
#[inline(always)]
fn columns(simd: V4, upper: &Lanes32, lower: &Lanes32) -> [u32x16; 4] {
    let ([a, b], [c, d]) = (parts(upper), parts(lower));
    let [a, b] = [transpose_words(simd, a), transpose_words(simd, b)];
    transpose_blocks(simd, [a, b, transpose_words(simd, c), transpose_words(simd, d)])
}

/// The reverse of [`columns`].
#[inline(always)]
fn store_columns(simd: V4, columns: [u32x16; 4], upper: &mut Lanes32, lower: &mut Lanes32) {
    let rows = transpose_blocks(simd, columns);
    for (register, rows) in [upper, lower].into_iter().zip(rows.as_chunks::<2>().0) {
        for (to, from) in register.as_chunks_mut::<16>().0.iter_mut().zip(rows) {
            *to = cast(transpose_words(simd, *from));
        }
    }
}

/// Transposes the four rows of four words that a vector holds.
#[inline(always)]
fn transpose_words(simd: V4, rows: u32x16) -> u32x16 {
    let order = u32x16(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    cast(simd.avx512f._mm512_permutexvar_epi32(cast(order), cast(rows)))
}

/// Transposes four vectors of four blocks of four words.
#[inline(always)]
fn transpose_blocks(simd: V4, [a, b, c, d]: [u32x16; 4]) -> [u32x16; 4] {
    /// The low or the high blocks of both; the even or the odd blocks of both.
    const LOW: i32 = 0x44;
    const HIGH: i32 = 0xee;
    const EVEN: i32 = 0x88;
    const ODD: i32 = 0xdd;
    let (ab, cd) = (shuffle::<LOW>(simd, a, b), shuffle::<LOW>(simd, c, d));
    let (ab_high, cd_high) = (shuffle::<HIGH>(simd, a, b), shuffle::<HIGH>(simd, c, d));
    [
        shuffle::<EVEN>(simd, ab, cd),
        shuffle::<ODD>(simd, ab, cd),
        shuffle::<EVEN>(simd, ab_high, cd_high),
        shuffle::<ODD>(simd, ab_high, cd_high),
    ]
}

/// Blocks of four words of both vectors. A closure would be compiled without AVX-512, and would call the
/// instruction as a function.
#[inline(always)]
fn shuffle<const ORDER: i32>(simd: V4, a: u32x16, b: u32x16) -> u32x16 {
    cast(simd.avx512f._mm512_shuffle_i32x4::<ORDER>(cast(a), cast(b)))
}
