//! Integer `mma`: exact sums of products of bytes or bits in 32 bits.

use super::super::Lanes32;
use super::{Accumulator, BitProduct, Input, MmaKind, decode, layout};

/// D of an s8/u8 kind. The operands have been checked. `.satfinite` clamps the exact sum once. Without it the
/// sum wraps (PTX ISA: "accumulator wraps").
pub fn mma(kind: MmaKind, a: &[Lanes32], b: &[Lanes32], c: &[Lanes32], d: &mut [Lanes32]) {
    let shape = kind.shape();
    let mut matrix_a = [[0i32; 16]; 32];
    let mut matrix_b = [[0i32; 8]; 32];
    for (k, (rows, columns)) in matrix_a.iter_mut().zip(&mut matrix_b).enumerate().take(shape.k) {
        for (row, slot) in rows.iter_mut().enumerate().take(shape.m) {
            let (register, lane) = layout::locate_a(shape, 4, row, k);
            *slot = byte(kind.a(), a[register][lane], k);
        }
        for (column, slot) in columns.iter_mut().enumerate() {
            let (register, lane) = layout::locate_b(4, k, column);
            *slot = byte(kind.b(), b[register][lane], k);
        }
    }
    let saturate = matches!(kind.accumulator(), Accumulator::S32 { saturate: true });
    for column in 0..shape.n {
        // At most 32 products of 16 bits: every partial sum fits 32 bits.
        let mut sums = [0i32; 16];
        for (rows, columns) in matrix_a.iter().zip(&matrix_b).take(shape.k) {
            for (sum, factor) in sums.iter_mut().zip(rows) {
                *sum += factor * columns[column];
            }
        }
        for (row, &sum) in sums.iter().enumerate().take(shape.m) {
            let (register, lane) = layout::locate_c(row, column);
            let start = c[register][lane] as i32;
            let result = if saturate { start.saturating_add(sum) } else { start.wrapping_add(sum) };
            d[register][lane] = result as u32;
        }
    }
}

/// D of a single-bit kind. The operands have been checked. A register holds 32 consecutive elements in k.
pub fn mma_bits(kind: MmaKind, a: &[Lanes32], b: &[Lanes32], c: &[Lanes32], d: &mut [Lanes32]) {
    let shape = kind.shape();
    for row in 0..shape.m {
        for column in 0..shape.n {
            let ones = (0..shape.k).step_by(32).map(|k| {
                let (register, lane) = layout::locate_a(shape, 32, row, k);
                let x = a[register][lane];
                let (register, lane) = layout::locate_b(32, k, column);
                let y = b[register][lane];
                let product = match kind.a() {
                    Input::Bits(BitProduct::And) => x & y,
                    _ => x ^ y,
                };
                product.count_ones()
            });
            let (register, lane) = layout::locate_c(row, column);
            d[register][lane] = c[register][lane].wrapping_add(ones.sum());
        }
    }
}

fn byte(input: Input, register: u32, k: usize) -> i32 {
    let bits = decode::element(input, register, k);
    match input {
        Input::S8 => i32::from(bits as u8 as i8),
        _ => bits as i32,
    }
}
