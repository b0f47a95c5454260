//! Compares rounding with the CPU, checks that directed modes bracket the exact result, and checks special
//! cases against values computed by hand.

use super::compare::{Comparison, Property, compare, test};
use super::lanes::{F32Op, Packed, PackedOp, f32_op, pack, packed_op, unpack};
use super::*;
use crate::numerics::Lanes32;

/// Bit patterns with all exponents. Every fourth pattern is a special value.
struct Patterns(u64);

impl Patterns {
    fn next(&mut self, format: Format) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bits = (self.0 ^ self.0 >> 29) & (u64::MAX >> (63 - format.sign_bit()));
        let sign = bits & 1 << format.sign_bit();
        match self.0 >> 58 {
            0 => sign,
            1 => sign | format.infinity(),
            2 => sign | format.max_finite(),
            3 => sign | 1,
            4 => sign | format.canonical_nan(),
            5..=20 => sign | (format.bias() as u64) << format.fraction_bits | bits & 7,
            _ => bits,
        }
    }
}

const RN: Rounding = Rounding::NearestEven;

fn same_f64(found: u64, expected: f64) -> bool {
    if expected.is_nan() { found == 0xFFF8_0000_0000_0000 } else { found == expected.to_bits() }
}

#[test]
fn nearest_even_is_the_cpu_s_in_f64_and_f32() {
    let mut p = Patterns(1);
    for _ in 0..60_000 {
        let o = [0; 3].map(|_| p.next(Format::F64));
        let [a, b, c] = o.map(f64::from_bits);
        let f = |op| arithmetic(op, Format::F64, RN, Modifiers::NONE, o);
        assert!(same_f64(f(Operation::Add), a + b), "{a:e} + {b:e}");
        assert!(same_f64(f(Operation::Sub), a - b), "{a:e} - {b:e}");
        assert!(same_f64(f(Operation::Mul), a * b), "{a:e} * {b:e}");
        assert!(same_f64(f(Operation::Div), a / b), "{a:e} / {b:e}");
        assert!(same_f64(f(Operation::Fma), a.mul_add(b, c)), "{a:e} * {b:e} + {c:e}");
        assert!(same_f64(f(Operation::Sqrt), a.sqrt()), "sqrt {a:e}");
        assert!(same_f64(f(Operation::Rcp), 1.0 / a), "1 / {a:e}");

        let o = o.map(|_| p.next(Format::F32));
        let [a, b, c] = o.map(|bits| f32::from_bits(bits as u32));
        let same = |found: u64, x: f32| found as u32 == if x.is_nan() { 0x7FFF_FFFF } else { x.to_bits() };
        let f = |op| arithmetic(op, Format::F32, RN, Modifiers::NONE, o);
        assert!(same(f(Operation::Add), a + b));
        assert!(same(f(Operation::Div), a / b));
        assert!(same(f(Operation::Fma), a.mul_add(b, c)));
        assert!(same(f(Operation::Sqrt), a.sqrt()));
    }
}

/// Checks down ≤ exact ≤ up: both are equal or neighbours, and rounding toward zero gives the one with the
/// smaller magnitude.
#[test]
fn directed_modes_bracket_the_exact_result() {
    let mut p = Patterns(7);
    for i in 0..40_000 {
        let format = if i % 2 == 0 { Format::F64 } else { Format::F32 };
        let o = [0; 3].map(|_| p.next(format));
        for op in [Operation::Add, Operation::Mul, Operation::Fma, Operation::Div, Operation::Sqrt] {
            let [down, up, zero, near] = [Rounding::Down, Rounding::Up, Rounding::Zero, RN]
                .map(|mode| arithmetic(op, format, mode, Modifiers::NONE, o));
            if near == nan(format) {
                assert_eq!([down, up, zero], [near; 3]);
                continue;
            }
            let [kd, ku, kn] = [down, up, near].map(|bits| order_key(format, bits));
            let zero_of_cancellation = ku - kd == 1 && down & format.canonical_nan() == 0;
            assert!(kd == ku || ku - kd == 1, "{op:?} {o:x?}");
            assert!(kn == kd || kn == ku);
            if !zero_of_cancellation {
                let negative = down >> format.sign_bit() == 1;
                assert_eq!(zero, if negative { up } else { down }, "{op:?} {o:x?}");
            }
            let exact_in_both = kd == ku;
            assert!(!exact_in_both || near == down);
        }
    }
}

#[test]
fn a_directed_sum_keeps_what_is_far_below() {
    let o = [1f64.to_bits(), 1e-300f64.to_bits(), 0];
    let f = |mode| f64::from_bits(arithmetic(Operation::Add, Format::F64, mode, Modifiers::NONE, o));
    assert_eq!((f(Rounding::Up), f(Rounding::Down)), (1.0 + f64::EPSILON, 1.0));
    let o = [1f64.to_bits(), (-1e-300f64).to_bits(), 0];
    let f = |mode| f64::from_bits(arithmetic(Operation::Add, Format::F64, mode, Modifiers::NONE, o));
    assert_eq!((f(Rounding::Up), f(Rounding::Zero)), (1.0, 1.0 - f64::EPSILON / 2.0));
    let cancelled = [1f64.to_bits(), (-1f64).to_bits(), 0];
    let minus_zero = arithmetic(Operation::Add, Format::F64, Rounding::Down, Modifiers::NONE, cancelled);
    assert_eq!(minus_zero, (-0.0f64).to_bits());
}

#[test]
fn modifiers_flush_saturate_and_clip() {
    let run = |m, a: f32, b: f32| {
        let o = [u64::from(a.to_bits()), u64::from(b.to_bits()), 0];
        f32::from_bits(arithmetic(Operation::Mul, Format::F32, RN, m, o) as u32)
    };
    let ftz = Modifiers { ftz: true, ..Modifiers::NONE };
    let sat = Modifiers { sat: true, ..Modifiers::NONE };
    let relu = Modifiers { relu: true, ..Modifiers::NONE };
    assert_eq!(run(ftz, 1e-40, 1e30), 0.0);
    assert_eq!(run(ftz, -1e-20, 1e-20).to_bits(), 0x8000_0000);
    assert_eq!(run(Modifiers::NONE, 1e-40, 1e30), f32::from_bits(1e-40f32.to_bits()) * 1e30);
    assert_eq!(
        [run(sat, 3.0, 2.0), run(sat, 3.0, -2.0), run(sat, f32::NAN, 1.0), run(sat, 0.5, 0.5)],
        [1., 0., 0., 0.25]
    );
    assert_eq!(run(relu, -3.0, 2.0).to_bits(), 0);
    assert_eq!(run(relu, f32::NAN, 2.0).to_bits(), 0x7FFF_FFFF);
}

#[test]
fn minimum_and_maximum_know_nan_and_zeros() {
    let f = |which, m, a: f32, b: f32| {
        f32::from_bits(extremum(which, Format::F32, m, u64::from(a.to_bits()), u64::from(b.to_bits())) as u32)
    };
    let plain = ExtremumModifiers::default();
    let keep_nan = ExtremumModifiers { nan: true, ..plain };
    let xorsign = ExtremumModifiers { xorsign_abs: true, ..plain };
    assert_eq!(f(Extremum::Min, plain, 0.0, -0.0).to_bits(), 0x8000_0000);
    assert_eq!(f(Extremum::Max, plain, -0.0, 0.0).to_bits(), 0);
    assert_eq!(f(Extremum::Max, plain, f32::NAN, -3.0), -3.0);
    assert_eq!(f(Extremum::Max, keep_nan, f32::NAN, -3.0).to_bits(), 0x7FFF_FFFF);
    assert_eq!(f(Extremum::Max, xorsign, -5.0, 2.0), -5.0);
    assert_eq!(f(Extremum::Max, xorsign, -5.0, -2.0), 5.0);
    assert_eq!(f(Extremum::Min, plain, f32::NAN, f32::NAN).to_bits(), 0x7FFF_FFFF);
}

#[test]
fn comparisons_order_zeros_and_nan() {
    let f = |c, a: f32, b: f32| compare(c, Format::F32, false, a.to_bits().into(), b.to_bits().into());
    assert!(f(Comparison::Eq, 0.0, -0.0) && !f(Comparison::Lt, -0.0, 0.0));
    assert!(f(Comparison::Lt, -2.0, -1.0) && f(Comparison::Ge, 1.0, f32::NEG_INFINITY));
    for (ordered, unordered) in [(Comparison::Eq, Comparison::Equ), (Comparison::Ne, Comparison::Neu)] {
        assert!(!f(ordered, f32::NAN, 1.0) && f(unordered, f32::NAN, 1.0));
    }
    assert!(f(Comparison::Nan, f32::NAN, 1.0) && f(Comparison::Num, 2.0, 1.0));
    let tiny = u64::from(1e-40f32.to_bits());
    assert!(
        compare(Comparison::Eq, Format::F32, true, tiny, 0)
            && compare(Comparison::Gt, Format::F32, false, tiny, 0)
    );
    assert!(test(Property::Subnormal, Format::F32, tiny) && test(Property::Normal, Format::F32, 0));
    assert!(!test(Property::Finite, Format::F32, Format::F32.infinity()));
    assert_eq!(copysign(Format::F32, 0x8000_0000, 0x3F80_0000), 0xBF80_0000);
}

#[test]
fn whole_registers_agree_with_scalars() {
    let mut p = Patterns(3);
    let ops = [
        (F32Op::Add, Operation::Add, RN, false),
        (F32Op::Sub, Operation::Sub, RN, false),
        (F32Op::Mul, Operation::Mul, RN, false),
        (F32Op::Fma, Operation::Fma, RN, false),
        (F32Op::FmaSat, Operation::Fma, RN, true),
        (F32Op::FmaDown, Operation::Fma, Rounding::Down, false),
    ];
    for round in 0..2000u32 {
        let [a, b, c] = [0; 3].map(|_| std::array::from_fn(|_| p.next(Format::F32) as u32));
        let ftz = round % 2 == 1;
        let active = round.wrapping_mul(0x9E37_79B9);
        let word = |lane: usize| [a, b, c].map(|x: Lanes32| u64::from(x[lane]));
        for (op, scalar, rounding, sat) in ops {
            let mut d = [7; 32];
            f32_op(op, ftz, active, &mut d, [&a, &b, &c]);
            for (lane, &found) in d.iter().enumerate() {
                let m = Modifiers { ftz, sat, ..Modifiers::NONE };
                let on = arithmetic(scalar, Format::F32, rounding, m, word(lane)) as u32;
                assert_eq!(found, if active >> lane & 1 == 1 { on } else { 7 }, "{op:?} {:x?}", word(lane));
            }
        }
        for (op, which) in [(F32Op::Min, Extremum::Min), (F32Op::Max, Extremum::Max)] {
            let mut d = [0; 32];
            f32_op(op, ftz, u32::MAX, &mut d, [&a, &b, &c]);
            for (lane, &found) in d.iter().enumerate() {
                let m = ExtremumModifiers { ftz, ..ExtremumModifiers::default() };
                let [x, y, _] = word(lane);
                assert_eq!(found, extremum(which, Format::F32, m, x, y) as u32, "{op:?} {x:x} {y:x}");
            }
        }
    }
}

#[test]
fn packed_halves_round_once() {
    let mut p = Patterns(11);
    for (packed, format) in [(Packed::F16x2, Format::F16), (Packed::Bf16x2, Format::BF16)] {
        for _ in 0..400 {
            let mut draw = || std::array::from_fn(|_| p.next(format) as u32 | (p.next(format) as u32) << 16);
            let [a, b, c]: [Lanes32; 3] = [draw(), draw(), draw()];
            let relu = Modifiers { relu: true, ..Modifiers::NONE };
            for (op, scalar, m) in [
                (PackedOp::Add, Operation::Add, Modifiers::NONE),
                (PackedOp::Sub, Operation::Sub, Modifiers::NONE),
                (PackedOp::Mul, Operation::Mul, Modifiers::NONE),
                (PackedOp::Fma, Operation::Fma, Modifiers::NONE),
                (PackedOp::FmaRelu, Operation::Fma, relu),
            ] {
                let mut d = [0; 32];
                packed_op(packed, op, u32::MAX, &mut d, [&a, &b, &c]);
                for lane in 0..32 {
                    let words = [a[lane], b[lane], c[lane]];
                    let expected = halves(words, |o| arithmetic(scalar, format, RN, m, o));
                    assert_eq!(d[lane], expected, "{packed:?} {op:?} {words:x?}");
                }
            }
            for (op, which) in [(PackedOp::Min, Extremum::Min), (PackedOp::Max, Extremum::Max)] {
                let mut d = [0; 32];
                packed_op(packed, op, u32::MAX, &mut d, [&a, &b, &c]);
                for lane in 0..32 {
                    let expected = halves([a[lane], b[lane]], |[x, y]| {
                        extremum(which, format, ExtremumModifiers::default(), x, y)
                    });
                    assert_eq!(d[lane], expected, "{packed:?} {op:?} {:x} {:x}", a[lane], b[lane]);
                }
            }
        }
    }
}

#[test]
fn packing_a_register_is_cvt_on_each_lane() {
    use crate::numerics::convert::{Conversion, FloatType, NumberType, pack_pair};
    let mut p = Patterns(17);
    for (packed, to) in [(Packed::F16x2, FloatType::F16), (Packed::Bf16x2, FloatType::Bf16)] {
        let scalar = Conversion::new(NumberType::Float(to), NumberType::Float(FloatType::F32));
        for _ in 0..2_000 {
            let [a, b]: [Lanes32; 2] = [0; 2].map(|_| std::array::from_fn(|_| p.next(Format::F32) as u32));
            let mut d = [0; 32];
            pack(packed, u32::MAX, &mut d, [&a, &b]);
            for lane in 0..32 {
                assert_eq!(
                    d[lane],
                    pack_pair(&scalar, a[lane], b[lane]),
                    "{packed:?} {:x} {:x}",
                    a[lane],
                    b[lane]
                );
            }
        }
    }
}

#[test]
fn unpacking_a_register_is_cvt_on_each_lane() {
    use crate::numerics::convert::{Conversion, FloatType, NumberType};
    for (packed, from) in [(Packed::F16x2, FloatType::F16), (Packed::Bf16x2, FloatType::Bf16)] {
        let scalar = Conversion::new(NumberType::Float(FloatType::F32), NumberType::Float(from));
        for first in (0..=0xFFFF).step_by(32) {
            // The upper half is not part of the operand.
            let a: Lanes32 = std::array::from_fn(|lane| 0xABCD_0000 | (first + lane as u32));
            let mut d = [7; 32];
            unpack(packed, 0x7FFF_FFFF, &mut d, &a);
            assert_eq!(d[31], 7);
            for lane in 0..31 {
                assert_eq!(
                    u64::from(d[lane]),
                    scalar.apply(u64::from(a[lane] & 0xFFFF)),
                    "{packed:?} {:x}",
                    a[lane]
                );
            }
        }
    }
}

/// Uses near cancellation and values near powers of two, where rounding down differs most from rounding to
/// nearest.
#[test]
fn rounding_down_is_exact_where_terms_cancel() {
    let mut p = Patterns(23);
    for _ in 0..3_000 {
        let [a, b]: [Lanes32; 2] =
            [0; 2].map(|_| std::array::from_fn(|_| p.next(Format::F32) as u32 & 0x83FF_FFFF | 0x3C00_0000));
        let c: Lanes32 = std::array::from_fn(|l| {
            let product = f32::from_bits(a[l]) * f32::from_bits(b[l]);
            (-product).to_bits().wrapping_add(p.next(Format::F32) as u32 % 3).wrapping_sub(1)
        });
        let mut d = [0; 32];
        f32_op(F32Op::FmaDown, false, !0, &mut d, [&a, &b, &c]);
        for lane in 0..32 {
            let words = [a, b, c].map(|x| u64::from(x[lane]));
            let exact = arithmetic(Operation::Fma, Format::F32, Rounding::Down, Modifiers::NONE, words);
            assert_eq!(u64::from(d[lane]), exact, "{words:x?}");
        }
    }
}
