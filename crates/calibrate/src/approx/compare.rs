//! Compares the results of two machines in units of the last place.

use std::collections::BTreeMap;

use emu::numerics::float::lanes::Packed;
use serde::Serialize;

use super::Subject;

/// The comparison of an instruction's results on a machine and in the emulator.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Agreement {
    pub instruction: String,
    /// Number of results compared. A packed result counts once.
    pub results: u64,
    /// Number of results with different bits.
    pub differing: u64,
    /// Number of these where just one result is NaN.
    pub nan: u64,
    /// The largest distance, in units of the last place.
    pub most_ulps: u64,
    /// Number of results by distance, machine minus emulator. Distances beyond ±16 count at ±17.
    pub histogram: BTreeMap<i64, u64>,
    /// The first differing result.
    pub first: Option<Mismatch>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    pub input: String,
    pub machine: String,
    pub emulated: String,
}

impl Agreement {
    /// Compares the results for all inputs.
    pub fn of(subject: Subject, inputs: &[u32], machine: &[u32], emulated: &[u32]) -> Agreement {
        let mut agreement = Agreement { instruction: subject.name(), ..Agreement::default() };
        for ((&input, &have), &want) in inputs.iter().zip(machine).zip(emulated) {
            agreement.results += 1;
            let apart = if have == want { Some(0) } else { distance(subject, have, want) };
            match apart {
                Some(ulps) => {
                    agreement.most_ulps = agreement.most_ulps.max(ulps.unsigned_abs());
                    *agreement.histogram.entry(ulps.clamp(-17, 17)).or_default() += 1;
                }
                None => agreement.nan += 1,
            }
            if have != want {
                agreement.differing += 1;
                let hex = |x: u32| format!("{x:08x}");
                let mismatch = || Mismatch { input: hex(input), machine: hex(have), emulated: hex(want) };
                agreement.first.get_or_insert_with(mismatch);
            }
        }
        agreement
    }
}

/// The larger distance of two packed results, or the distance of a single one. `None` where just one is NaN,
/// or both are NaN with different bits.
fn distance(subject: Subject, have: u32, want: u32) -> Option<i64> {
    let half = |bits: u32, format| match format {
        Packed::F16x2 => half::f16::from_bits(bits as u16).to_f32().is_nan(),
        Packed::Bf16x2 => half::bf16::from_bits(bits as u16).to_f32().is_nan(),
    };
    match subject {
        Subject::Half { format, .. } => {
            let mut worst = 0;
            for shift in [0, 16] {
                let [a, b] = [have, want].map(|x| x >> shift & 0xffff);
                if a != b && (half(a, format) || half(b, format)) {
                    return None;
                }
                let apart = ordered(a << 16, 16) - ordered(b << 16, 16);
                worst = if apart.abs() > i64::abs(worst) { apart } else { worst };
            }
            Some(worst)
        }
        Subject::F32 { .. } | Subject::Div { .. } => ulps(have, want),
    }
}

/// Units of the last place from `b` to `a`, both f32 bit patterns; `None` for NaN.
pub fn ulps(a: u32, b: u32) -> Option<i64> {
    let nan = |x: u32| f32::from_bits(x).is_nan();
    if nan(a) || nan(b) { None } else { Some(ordered(a, 0) - ordered(b, 0)) }
}

/// A number that grows with the value of the bit pattern. −0 is one below +0.
fn ordered(bits: u32, shift: u32) -> i64 {
    let magnitude = i64::from((bits & 0x7fff_ffff) >> shift);
    if bits >> 31 == 1 { -magnitude - 1 } else { magnitude }
}

#[cfg(test)]
mod tests {
    use emu::numerics::approx::{Function, PackedFunction};

    use super::*;

    #[test]
    fn distances() {
        let bits = f32::to_bits;
        assert_eq!(ulps(bits(1.0), bits(1.0f32.next_up())), Some(-1));
        assert_eq!(ulps(0, 0x8000_0000), Some(1));
        assert_eq!(ulps(bits(f32::INFINITY), bits(f32::MAX)), Some(1));
        assert_eq!(ulps(bits(f32::NAN), 0), None);
        let subject = Subject::F32 { function: Function::Rcp, ftz: true };
        let agreement = Agreement::of(subject, &[1, 2, 3], &[5, 9, 7], &[5, 6, 0x7fff_ffff]);
        assert_eq!((agreement.differing, agreement.nan, agreement.most_ulps), (2, 1, 3));
        assert_eq!(agreement.histogram, [(0, 1), (3, 1)].into());
        let packed = Subject::Half { function: PackedFunction::Ex2, format: Packed::F16x2 };
        let agreement = Agreement::of(packed, &[0], &[0x3c00_3c05], &[0x3c01_3c00]);
        assert_eq!((agreement.most_ulps, agreement.histogram), (5, [(5, 1)].into()));
    }
}
