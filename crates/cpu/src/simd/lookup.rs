//! 64 codes of 8-bit floats to f32 at a time (AVX-512 VBMI): both bytes of a bf16 number, which every code
//! is, are looked up in tables of 128 bytes.
#![allow(unsafe_code)] // intrinsics, called from code compiled for them

use std::arch::x86_64::*;

use super::codes::number;

/// The high and the low bytes of the bf16 numbers of all magnitudes.
#[repr(align(64))]
pub(super) struct Table([[u8; 64]; 4]);

pub(super) const E4M3: Table = Table::new::<3, 7, 0x7f>();
pub(super) const E5M2: Table = Table::new::<2, 15, 0x7c>();

impl Table {
    const fn new<const FRACTION: u32, const BIAS: u32, const SPECIAL: u32>() -> Table {
        let (mut bytes, mut code) = ([[0; 64]; 4], 0);
        while code < 128 {
            let [.., low, high] = number::<FRACTION, BIAS, SPECIAL>(code as u8).to_bits().to_le_bytes();
            bytes[code / 64][code % 64] = high;
            bytes[2 + code / 64][code % 64] = low;
            code += 1;
        }
        Table(bytes)
    }
}

/// The order of the codes before the look-up. Words of two looked-up bytes are then in such an order that the
/// even words of a quarter, and the odd ones, are neighbours in the row.
const ORDER: [u8; 64] = {
    let (mut order, mut at) = ([0; 64], 0);
    while at < 64 {
        let (quarter, vector, lane) = (at / 16, at / 8 % 2 * 2 + at % 2, at % 8 / 2);
        order[at] = (16 * vector + 4 * quarter + lane) as u8;
        at += 1;
    }
    order
};

/// The numbers of 64 codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn widen(codes: &[u8; 64], table: &Table) -> [__m512; 4] {
    let [high_0, high_1, low_0, low_1] = &table.0;
    // SAFETY: arrays of 64 bytes.
    let load = |bytes: &[u8; 64]| unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    let codes = _mm512_permutexvar_epi8(load(&ORDER), load(codes));
    // The index has 7 bits: the sign is no part of it.
    let low = _mm512_permutex2var_epi8(load(low_0), codes, load(low_1));
    let high = _mm512_permutex2var_epi8(load(high_0), codes, load(high_1));
    const A_OR_B_AND_C: i32 = 0xf8;
    let high = _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(high, codes, _mm512_set1_epi8(-128));
    let [first, last] = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
    let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
        _mm512_castsi512_ps(_mm512_and_si512(first, odd)),
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(last)),
        _mm512_castsi512_ps(_mm512_and_si512(last, odd)),
    ]
}
