//! Products with block scales (PTX ISA, "Block Scaling"). The products of a row and a column are added
//! exactly, as far as f64 holds them, and the sum with D is rounded toward zero. How many bits the hardware
//! keeps has not been measured here.

use ptx::TensorProduct;

use super::super::Env;
use super::super::units::LANES;
use super::super::warp::Warp;
use super::access::{Area, Issue};
use super::operands::Row;
use super::product::{Part, ROWS, Target};
use crate::numerics::tensor::Input;
use crate::semantics::tensor_descriptor::{BlockScales, Decoded, scale_value, small_float};

/// Rows whose scales are in one column of tensor memory.
const QUARTER: usize = 32;

/// The scales of the rows of A and the columns of B in a CTA.
pub(super) struct Scales {
    stated: BlockScales,
    rank: usize,
    a: (usize, usize),
    b: (usize, usize),
}

impl Env<'_> {
    /// Checks the accesses to the scales of `rows` rows and `n` columns.
    pub(super) fn read_scales(
        &mut self,
        warp: &Warp,
        issue: &Issue,
        stated: BlockScales,
        (rank, rows, n): (usize, usize, usize),
    ) -> Option<Scales> {
        let inst = issue.inst;
        let slots = self.facts.context.program.slots(inst);
        let a = self.tensor_address(warp, inst.signal, issue.lane);
        let b = self.tensor_address(warp, (slots[0], i64::from(inst.target as i32)), issue.lane);
        for (column, count) in [(a.1, rows), (b.1, n)] {
            let columns = column..column + count.div_ceil(QUARTER);
            if !self.touch_area(issue, &Area { rank, lanes: 0..LANES, columns }, false) {
                return None;
            }
        }
        Some(Scales { stated, rank, a, b })
    }

    /// The scales of row `row` of A, or column `row` of B, for the lanes of a quarter of tensor memory.
    fn scales_of(
        &self,
        scales: &Scales,
        (column, byte): (usize, u32),
        quarter: usize,
        row: usize,
    ) -> Vec<f64> {
        let word = self.tensors.word(scales.rank, QUARTER * quarter + row % QUARTER, column + row / QUARTER);
        let value = |i: usize| scale_value(scales.stated.format, (word >> (8 * (byte as usize + i))) as u8);
        (0..scales.stated.count).map(value).collect()
    }

    pub(super) fn scaled_part(
        &mut self,
        (product, decoded): (&TensorProduct, &Decoded),
        (a, b): (&[Row], &[Row]),
        part: &Part,
        target: &Target,
        scales: &Scales,
    ) {
        let values = |row: &Row, input: Input| values(row, input, decoded.is_packed(product.kind));
        let a: Vec<Vec<f64>> = a.iter().map(|row| values(row, decoded.kind.a())).collect();
        let b: Vec<Vec<f64>> = b.iter().map(|row| values(row, decoded.kind.b())).collect();
        let BlockScales { count, a_byte, b_byte, .. } = scales.stated;
        let block = a.first().map_or(1, Vec::len) / count;
        for (row, left) in a.iter().enumerate() {
            let lane = part.lanes[row / ROWS] + row % ROWS;
            if target.keeps(lane) {
                continue;
            }
            let left_scales = self.scales_of(scales, (scales.a.1, a_byte), lane / QUARTER, row);
            for (at, n) in part.n.clone().enumerate() {
                let right_scales = self.scales_of(scales, (scales.b.1, b_byte), lane / QUARTER, n);
                let blocks = left.chunks_exact(block).zip(b[n].chunks_exact(block));
                let sum: f64 = blocks
                    .zip(left_scales.iter().zip(&right_scales))
                    .map(|((x, y), (sx, sy))| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() * sx * sy)
                    .sum();
                let word = self.tensors.word(target.rank, lane, target.column + at);
                let before = if target.adds { f64::from(f32::from_bits(word)) } else { 0.0 };
                self.tensors.set_word(
                    target.rank,
                    lane,
                    target.column + at,
                    toward_zero(before + sum).to_bits(),
                );
            }
        }
    }
}

/// The values of 32 bytes of K.
fn values(row: &Row, input: Input, packed: bool) -> Vec<f64> {
    let bytes = row.iter().flat_map(|word| word.to_le_bytes());
    match input {
        _ if packed => bytes.flat_map(|b| [b & 15, b >> 4]).map(|b| small_float(b.into(), 2, 1)).collect(),
        Input::E5m2 => bytes.map(|b| half::f16::from_bits(u16::from(b) << 8).to_f64()).collect(),
        _ => bytes.map(e4m3).collect(),
    }
}

fn e4m3(bits: u8) -> f64 {
    if bits & 0x7f == 0x7f { f64::NAN } else { small_float(bits.into(), 4, 3) }
}

/// The nearest f32 that is not larger in magnitude.
fn toward_zero(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest).abs() > value.abs() && nearest.is_finite() {
        f32::from_bits(nearest.to_bits() - 1)
    } else {
        nearest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_bytes() {
        let row = [0x3830_2820, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(values(&row, Input::E4m3, false)[..4], [0.125, 0.25, 0.5, 1.0]);
        assert_eq!(values(&[0x0000_0042; 8], Input::E4m3, true)[..2], [1.0, 2.0]);
        assert_eq!(values(&[0x3c; 8], Input::E5m2, false)[0], 1.0);
        assert_eq!(toward_zero(1.0 + f64::EPSILON), 1.0);
        assert_eq!(toward_zero(-0.999_999_999), -f32::from_bits(1.0f32.to_bits() - 1));
    }
}
