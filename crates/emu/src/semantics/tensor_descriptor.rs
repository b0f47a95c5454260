//! The instruction descriptor of `tcgen05.mma` (PTX ISA, "Instruction descriptor"): types, shape and
//! negation of a product.

use ptx::{CtaGroup, ScaleVector, TensorKind, TensorProduct};

use crate::numerics::tensor::{Accumulator, Input, MmaKind, Shape, TensorRules};

/// How the elements of A or B lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// The elements of an [`Input`], one after the other.
    Plain,
    /// Floats of 6 or 4 bits, 16 of them at the start of each 16 bytes: exponent and fraction bits.
    Padded(u32, u32),
}

/// The format of the scales of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleFormat {
    Ue4m3,
    Ue8m0,
}

/// Scales of blocks: their number in a row of A or a column of B, their format, and the bytes of the words
/// that hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockScales {
    pub count: usize,
    pub format: ScaleFormat,
    pub a_byte: u32,
    pub b_byte: u32,
}

/// A product as the descriptor and the instruction state it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded {
    /// The product of 16 rows and 8 columns into which it is split.
    pub kind: MmaKind,
    pub rules: TensorRules,
    /// Rows of D in all CTAs, and columns.
    pub m: usize,
    pub n: usize,
    pub storage: [Storage; 2],
    pub negate: [bool; 2],
    /// Whether A is M-major and B is N-major.
    pub transposed: [bool; 2],
    pub scales: Option<BlockScales>,
}

const FLOATS: [(u32, Input, Storage); 5] = [
    (0, Input::E4m3, Storage::Plain),
    (1, Input::E5m2, Storage::Plain),
    (3, Input::E4m3, Storage::Padded(2, 3)),
    (4, Input::E4m3, Storage::Padded(3, 2)),
    (5, Input::E4m3, Storage::Padded(2, 1)),
];

impl Decoded {
    /// Whether the elements of A have 4 or 6 bits of a byte.
    pub fn is_padded(&self) -> bool {
        matches!(self.storage[0], Storage::Padded(..))
    }

    /// Decodes a descriptor. `Err` says what is wrong.
    pub fn new(product: &TensorProduct, bits: u32) -> Result<Decoded, String> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        if field(2, 1) != 0 {
            return Err("the instruction descriptor states a sparse A".into());
        }
        let (m, n) = ((field(24, 5) << 4) as usize, (field(17, 6) << 3) as usize);
        let types = [field(7, 3), field(10, 3)];
        let kind = product.kind;
        let [a, b] = [0, 1].map(|i| element(kind, types[i]));
        let (Some(a), Some(b)) = (a, b) else {
            return Err(format!("{} has no types {} and {}", kind.name(), types[0], types[1]));
        };
        let sums = match (kind, field(4, 2)) {
            _ if kind.has_block_scales() => Accumulator::F32,
            (TensorKind::F16 | TensorKind::F8f6f4, 0) => Accumulator::F16,
            (TensorKind::F16 | TensorKind::Tf32 | TensorKind::F8f6f4, 1) => Accumulator::F32,
            (TensorKind::I8, 2) => Accumulator::S32 { saturate: field(3, 1) == 1 },
            (_, ty) => return Err(format!("{} has no D of type {ty}", kind.name())),
        };
        check_shape(product, m, n)?;
        let k = 256 / a.0.bits();
        let made = MmaKind::new(Shape { m: 16, n: 8, k }, a.0, b.0, sums);
        let made = made.map_err(|_| format!("{} does not multiply these types", kind.name()))?;
        Ok(Decoded {
            kind: made,
            rules: TensorRules::RtxBlackwell,
            m,
            n,
            storage: [a.1, b.1],
            negate: [field(13, 1) == 1, field(14, 1) == 1],
            transposed: [field(15, 1) == 1, field(16, 1) == 1],
            scales: block_scales(product, bits)?,
        })
    }

    /// Whether A and B are floats of 4 bits, two to a byte.
    pub fn is_packed(&self, kind: TensorKind) -> bool {
        matches!(kind, TensorKind::Mxf4 | TensorKind::Mxf4nvf4)
    }
}

/// The type of A or B and its storage.
fn element(kind: TensorKind, code: u32) -> Option<(Input, Storage)> {
    let plain = |input| Some((input, Storage::Plain));
    match (kind, code) {
        (TensorKind::F16, 0) => plain(Input::F16),
        (TensorKind::F16, 1) => plain(Input::Bf16),
        (TensorKind::Tf32, 2) => plain(Input::Tf32),
        (TensorKind::I8, 0) => plain(Input::U8),
        (TensorKind::I8, 1) => plain(Input::S8),
        (TensorKind::F8f6f4 | TensorKind::Mxf8f6f4, _) => {
            FLOATS.iter().find(|(known, ..)| *known == code).map(|(_, input, storage)| (*input, *storage))
        }
        (TensorKind::Mxf4 | TensorKind::Mxf4nvf4, 1) => plain(Input::E4m3),
        _ => None,
    }
}

/// The shapes of the PTX ISA, "Matrix shape".
fn check_shape(product: &TensorProduct, m: usize, n: usize) -> Result<(), String> {
    let rows: &[usize] = match (product.group, product.stationary) {
        (CtaGroup::One, true) => &[32, 64, 128],
        (CtaGroup::One, false) if product.kind.has_block_scales() => &[128],
        (CtaGroup::One, false) => &[64, 128],
        (CtaGroup::Two, _) => &[128, 256],
    };
    let step = match (product.group, product.stationary, m) {
        (_, true, _) => return columns_of_stationary(rows, m, n),
        (CtaGroup::Two, ..) => {
            if product.kind.has_block_scales() {
                16
            } else {
                32
            }
        }
        (CtaGroup::One, _, 64) if product.kind != TensorKind::I8 => 8,
        (CtaGroup::One, ..) if product.kind.has_block_scales() => 8,
        (CtaGroup::One, ..) => 16,
    };
    let integer = product.kind == TensorKind::I8 && !n.is_multiple_of(16) && !matches!(n, 8 | 24);
    if rows.contains(&m) && (step.min(8)..=256).contains(&n) && n.is_multiple_of(step) && !integer {
        return Ok(());
    }
    Err(format!(
        "the shape M{m} N{n} does not exist: expected M of {rows:?} and N up to 256 in steps of {step}"
    ))
}

fn columns_of_stationary(rows: &[usize], m: usize, n: usize) -> Result<(), String> {
    if rows.contains(&m) && matches!(n, 64 | 128 | 256) {
        return Ok(());
    }
    Err(format!(
        "the shape M{m} N{n} does not exist with .ws: expected M of {rows:?} and N of 64, 128 or 256"
    ))
}

fn block_scales(product: &TensorProduct, bits: u32) -> Result<Option<BlockScales>, String> {
    if !product.kind.has_block_scales() {
        return Ok(None);
    }
    if bits >> 31 == 1 {
        return Err("K of 96 is that of sm_103".into());
    }
    let count = match (product.kind, product.scales) {
        (TensorKind::Mxf8f6f4, _) => 1,
        (_, Some(ScaleVector::Four | ScaleVector::Block16)) => 4,
        _ => 2,
    };
    let format = if bits >> 23 & 1 == 1 { ScaleFormat::Ue8m0 } else { ScaleFormat::Ue4m3 };
    if format == ScaleFormat::Ue4m3 && count != 4 {
        return Err(format!("{} with {count} scales of K takes scales of ue8m0", product.kind.name()));
    }
    let (a_byte, b_byte) = (bits >> 29 & 3, bits >> 4 & 3);
    if [a_byte, b_byte].iter().any(|byte| byte % count as u32 != 0) {
        return Err(format!("a scale factor ID of {a_byte} or {b_byte} with {count} scales of K"));
    }
    Ok(Some(BlockScales { count, format, a_byte, b_byte }))
}

/// The value of a float with so many exponent and fraction bits that has no infinities or NaNs.
pub(crate) fn small_float(bits: u32, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
    let magnitude = match exponent {
        0 => fraction * f64::from(1 - bias).exp2(),
        _ => (1.0 + fraction) * f64::from(exponent - bias).exp2(),
    };
    if bits >> (exponent_bits + fraction_bits) & 1 == 1 { -magnitude } else { magnitude }
}

/// The e4m3 bits of a float with so many exponent and fraction bits. Each has exactly one value of e4m3.
pub(crate) fn as_e4m3(bits: u32, exponent_bits: u32, fraction_bits: u32) -> u8 {
    let value = small_float(bits, exponent_bits, fraction_bits);
    let same = |code: &u8| {
        let found = small_float(u32::from(*code), 4, 3);
        found == value && found.is_sign_negative() == value.is_sign_negative()
    };
    (0..=u8::MAX).find(same).unwrap_or(0)
}

/// The value of a scale.
pub(crate) fn scale_value(format: ScaleFormat, bits: u8) -> f64 {
    match format {
        ScaleFormat::Ue8m0 if bits == 0xff => f64::NAN,
        ScaleFormat::Ue8m0 => f64::from(i32::from(bits) - 127).exp2(),
        ScaleFormat::Ue4m3 if bits & 0x7f == 0x7f => f64::NAN,
        ScaleFormat::Ue4m3 => small_float(u32::from(bits & 0x7f), 4, 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_their_values() {
        assert_eq!([0, 1, 2, 3, 7, 15].map(|b| small_float(b, 2, 1)), [0.0, 0.5, 1.0, 1.5, 6.0, -6.0]);
        assert_eq!([1, 31, 63].map(|b| small_float(b, 2, 3)), [0.125, 7.5, -7.5]);
        assert_eq!([1, 31].map(|b| small_float(b, 3, 2)), [0.0625, 28.0]);
        for (exponent, fraction) in [(2, 3), (3, 2), (2, 1)] {
            for bits in 0..1 << (1 + exponent + fraction) {
                let code = as_e4m3(bits, exponent, fraction);
                assert_eq!(small_float(u32::from(code), 4, 3), small_float(bits, exponent, fraction));
            }
        }
    }

    #[test]
    fn a_descriptor_of_triton() {
        // M128 N64, f16, f32 sums, N-major B, as Triton emits it.
        let product = TensorProduct {
            group: CtaGroup::One,
            kind: TensorKind::F16,
            stationary: false,
            a_in_tensor_memory: false,
            masks_lanes: false,
            scales: None,
        };
        let decoded = Decoded::new(&product, 135_331_856).expect("a product");
        assert_eq!((decoded.m, decoded.n, decoded.transposed), (128, 64, [false, true]));
        assert_eq!(decoded.kind.accumulator(), Accumulator::F32);
        assert!(Decoded::new(&product, 135_331_856 | 4).is_err());
    }
}
