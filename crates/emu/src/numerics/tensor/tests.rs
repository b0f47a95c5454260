//! Compares the fast path with the reference, the reference with sums computed by hand, and the layouts with
//! PTX's tables.

use super::*;

const RULES: [TensorRules; 6] = [
    TensorRules::Ampere,
    TensorRules::Ada,
    TensorRules::Hopper,
    TensorRules::HopperAsync,
    TensorRules::Blackwell,
    TensorRules::RtxBlackwell,
];

fn kind(m: usize, k: usize, a: Input, b: Input, accumulator: Accumulator) -> MmaKind {
    MmaKind::new(Shape { m, n: 8, k }, a, b, accumulator).unwrap()
}

fn floating() -> impl Iterator<Item = MmaKind> {
    MmaKind::all().into_iter().filter(|k| matches!(k.accumulator(), Accumulator::F16 | Accumulator::F32))
}

#[test]
fn fast_and_reference_agree_bit_for_bit() {
    let mut compared = 0;
    for kind in floating() {
        for rules in RULES {
            if kind.check(rules).is_err() {
                continue;
            }
            for distribution in Distribution::ALL {
                for seed in 0..10 {
                    let f = random_fragment(kind, distribution, seed);
                    let mut fast = vec![[0; 32]; kind.registers()[2]];
                    let mut slow = fast.clone();
                    mma(kind, rules, &f.a, &f.b, &f.c, &mut fast).unwrap();
                    reference::mma(kind, rules, [&f.a, &f.b, &f.c], &mut slow);
                    assert_eq!(fast, slow, "{kind:?} {rules:?} {distribution:?} seed {seed}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 5_000, "{compared}");
}

/// One infinite or NaN element leaves most of D finite.
#[test]
fn one_element_that_is_not_finite_changes_its_row_or_column() {
    for kind in floating() {
        for rules in RULES.into_iter().filter(|rules| kind.check(*rules).is_ok()) {
            for (seed, all_ones) in (0..24).zip([false, true].into_iter().cycle()) {
                let mut f = random_fragment(kind, Distribution::Normal, seed);
                let accumulator = reference::accumulator_format(kind.accumulator());
                let (registers, format) = match seed / 2 % 3 {
                    0 => (&mut f.a, decode::format(kind.a())),
                    1 => (&mut f.b, decode::format(kind.b())),
                    _ => (&mut f.c, accumulator),
                };
                let bits = if all_ones { format.canonical_nan() } else { format.infinity() } as u32;
                // A tf32 is in the high bits of its register, the first of several elements in the low bits.
                let (shift, width) = match format.sign_bit() + 1 {
                    19 => (13, 19),
                    width => (0, width),
                };
                let register = seed as usize % registers.len();
                let word = &mut registers[register][seed as usize];
                let mask = (u64::from(u32::MAX) >> (32 - width)) as u32;
                *word = *word & !(mask << shift) | bits << shift;
                let mut fast = vec![[0; 32]; kind.registers()[2]];
                let mut slow = fast.clone();
                mma(kind, rules, &f.a, &f.b, &f.c, &mut fast).unwrap();
                reference::mma(kind, rules, [&f.a, &f.b, &f.c], &mut slow);
                assert_eq!(fast, slow, "{kind:?} {rules:?} seed {seed}");
                let words = fast.as_flattened();
                let magnitudes = words.iter().map(|word| word & accumulator.canonical_nan() as u32);
                let finite = magnitudes.filter(|bits| *bits < accumulator.infinity() as u32).count();
                assert!(finite >= words.len() / 2, "{kind:?} {rules:?} seed {seed}: {finite} are finite");
            }
        }
    }
}

/// D[0][0] of an f16 `mma` with the given row of A and column of B.
fn dot(kind: MmaKind, rules: TensorRules, a: &[f32], b: &[f32], c: f32) -> f32 {
    let [na, nb, nc] = kind.registers();
    let (mut ra, mut rb, mut rc) = (vec![[0; 32]; na], vec![[0; 32]; nb], vec![[0; 32]; nc]);
    let half = |x: f32| u32::from(half::f16::from_f32(x).to_bits());
    for (k, (&x, &y)) in a.iter().zip(b).enumerate() {
        let (register, lane) = layout::locate_a(kind.shape(), 2, 0, k);
        ra[register][lane] |= half(x) << (16 * (k % 2));
        let (register, lane) = layout::locate_b(2, k, 0);
        rb[register][lane] |= half(y) << (16 * (k % 2));
    }
    rc[0][0] = c.to_bits();
    let mut d = rc.clone();
    mma(kind, rules, &ra, &rb, &rc, &mut d).unwrap();
    f32::from_bits(d[0][0])
}

#[test]
fn kept_bits_and_chaining_tell_the_architectures_apart() {
    let k8 = kind(16, 8, Input::F16, Input::F16, Accumulator::F32);
    let k16 = kind(16, 16, Input::F16, Input::F16, Accumulator::F32);
    // 1 − 2^-25: the small term is kept with 25 bits and truncated with 24.
    let (a, b) = ([1.0, -(2f32.powi(-12))], [1.0, 2f32.powi(-13)]);
    assert_eq!(dot(k8, TensorRules::Ampere, &a, &b, 0.0), 1.0);
    assert_eq!(dot(k8, TensorRules::Hopper, &a, &b, 0.0), 1.0 - 2f32.powi(-24));
    // 2^15·2^15 and its negative cancel. Both in one sum with the 1, they align the 1 below the bits that are
    // kept.
    let mut a = [0.0; 16];
    (a[0], a[8], a[15]) = (32768.0, -32768.0, 1.0);
    let b = [32768.0, 0., 0., 0., 0., 0., 0., 0., 32768.0, 0., 0., 0., 0., 0., 0., 1.0];
    assert_eq!(dot(k16, TensorRules::Ampere, &a, &b, 0.0), 0.0);
    assert_eq!(dot(k16, TensorRules::Hopper, &a, &b, 0.0), 0.0, "2^0 lies below 2^(30-25)");
    assert_eq!(dot(k16, TensorRules::Hopper, &[2048.0, -2048.0, 1.0], &[1.0, 1.0, 1.0], 0.5), 1.5);
}

#[test]
fn results_are_truncated_not_rounded() {
    let k8 = kind(16, 8, Input::F16, Input::F16, Accumulator::F32);
    // 2 − 2^-24 + …: the nearest f32 is 2; rounding toward zero gives the number below.
    let result = dot(k8, TensorRules::Hopper, &[1.0, -(2f32.powi(-12))], &[2.0, 2f32.powi(-12)], 0.0);
    assert_eq!(result, 2.0 - 2f32.powi(-23));
    assert_eq!(dot(k8, TensorRules::Hopper, &[1.0], &[-0.0], -0.0).to_bits(), 0, "a zero sum is +0");
    assert_eq!(dot(k8, TensorRules::Hopper, &[f32::INFINITY], &[0.0], 1.0).to_bits(), 0x7FFF_FFFF);
    assert_eq!(dot(k8, TensorRules::Hopper, &[f32::INFINITY], &[-1.0], 1.0), f32::NEG_INFINITY);
    assert_eq!(dot(k8, TensorRules::Hopper, &[1.0], &[65504.0], f32::MAX), f32::MAX);
}

/// D[0][0] for the given element bits of A's row and B's column. All other elements are zero.
fn dot_bits(kind: MmaKind, rules: TensorRules, pairs: &[(u32, u32)], c: u32) -> u32 {
    let [na, nb, nc] = kind.registers();
    let (mut a, mut b, mut rc) = (vec![[0; 32]; na], vec![[0; 32]; nb], vec![[0; 32]; nc]);
    let (ea, eb) = (kind.a().per_register(), kind.b().per_register());
    for (k, &(x, y)) in pairs.iter().enumerate() {
        let (register, lane) = layout::locate_a(kind.shape(), ea, 0, k);
        a[register][lane] |= x << (k % ea * 32 / ea);
        let (register, lane) = layout::locate_b(eb, k, 0);
        b[register][lane] |= y << (k % eb * 32 / eb);
    }
    rc[0][0] = c;
    let mut d = rc.clone();
    mma(kind, rules, &a, &b, &rc, &mut d).unwrap();
    d[0][0]
}

/// Cases found with random fragments on an H200. Simpler rules give results that differ by one unit or
/// completely.
#[test]
fn results_seen_on_an_h200() {
    let run = |k, input, accumulator, pairs: &[(u32, u32)], c| {
        dot_bits(kind(16, k, input, input, accumulator), TensorRules::Hopper, pairs, c)
    };
    use Accumulator::{F16 as H, F32 as S};
    // A product with a zero factor takes no part in the alignment, however large the other factor is.
    let pairs = [(0x8760_BCE1, 0), (0, 0x6378_A370), (0x74F0_062A, 0x9858_ACFD), (0xC34C_EFDE, 0)];
    assert_eq!(run(4, Input::Tf32, S, &pairs[..2], 0x1045_E88B), 0x1045_E88B);
    let pairs = [(0x8B5A, 0x8000), (0x7AE7, 0x8000), (0x7233, 0x0359), (0x51E3, 0x8000)];
    let rest = [(0x094F, 0x2375), (0x83D8, 0), (0x0A7F, 0x9380), (0x8A22, 0x8000)];
    assert_eq!(run(8, Input::F16, S, &[pairs, rest].concat(), 0xBC2F_2B33), 0x3F23_494F);
    // With C = 0 the alignment goes below −126, but not below −133.
    let pairs =
        [(0x9A6C_3753, 0x9906_5664), (0x0730_829D, 0xAD45_1AD3), (0xAF5F_1282, 0), (0x003A_AA28, 1 << 31)];
    assert_eq!(run(4, Input::Tf32, S, &pairs, 0), 0);
    let pairs = [(0x1B6E_A229, 0x0D6A_6C9D), (0xA35A_7576, 0x0F1B_DD85), (0x984B_2BA0, 0x9C2B_D70F)];
    assert_eq!(run(8, Input::Tf32, S, &pairs, 0), 1);
    // A negative sum that rounds to zero is +0, in f16 as in f32.
    assert_eq!(run(8, Input::F16, H, &[(0x986D, 0x0013)], 0), 0);
}

/// A product of small integers is exact under all rules, so the test checks only the layouts.
#[test]
fn small_integers_multiply_exactly_in_every_layout() {
    for kind in MmaKind::all().into_iter().filter(|kind| kind.a().bits() > 1) {
        let shape = kind.shape();
        let a_of = |row: usize, k: usize| (row * 3 + k * 5) % 4;
        let b_of = |k: usize, column: usize| (k * 7 + column) % 3;
        let expected = |row, column| (0..shape.k).map(|k| a_of(row, k) * b_of(k, column)).sum::<usize>();
        let small = |input: Input, x: usize| match input {
            Input::S8 | Input::U8 | Input::Bits(_) => x as u64,
            Input::F64 => (x as f64).to_bits(),
            Input::Tf32 => u64::from((x as f32).to_bits()),
            _ => super::super::round::Exact { negative: false, magnitude: x as u128, exponent: 0 }
                .round_to(decode::format(input), super::super::round::Rounding::Zero),
        };
        let [na, nb, nc] = kind.registers();
        let (mut a, mut b) = (vec![[0u64; 32]; na], vec![[0u64; 32]; nb]);
        for k in 0..shape.k {
            for row in 0..shape.m {
                let e = kind.a().per_register();
                let (register, lane) = layout::locate_a(shape, e, row, k);
                a[register][lane] |= small(kind.a(), a_of(row, k)) << (k % e * kind.a().bits() % 64);
            }
            for column in 0..shape.n {
                let e = kind.b().per_register();
                let (register, lane) = layout::locate_b(e, k, column);
                b[register][lane] |= small(kind.b(), b_of(k, column)) << (k % e * kind.b().bits() % 64);
            }
        }
        let narrow = |v: &[[u64; 32]]| v.iter().map(|r| r.map(|x| x as u32)).collect::<Vec<_>>();
        let (c, mut d) = (vec![[0; 32]; nc], vec![[0; 32]; nc]);
        let mut d64 = vec![[0; 32]; nc];
        if kind.accumulator() == Accumulator::F64 {
            mma_f64(kind, TensorRules::Hopper, &a, &b, &vec![[0; 32]; nc], &mut d64).unwrap();
        } else {
            mma(kind, TensorRules::Hopper, &narrow(&a), &narrow(&b), &c, &mut d).unwrap();
        }
        for register in 0..nc {
            for lane in 0..32 {
                let wanted = |row, column| expected(row, column) as f64;
                let (row, column) = (lane / 4 + 8 * (register / 2), lane % 4 * 2 + register % 2);
                match kind.accumulator() {
                    Accumulator::F64 => {
                        assert_eq!(f64::from_bits(d64[register][lane]), wanted(row, column), "{kind:?}");
                    }
                    Accumulator::F32 => {
                        let found = f64::from(f32::from_bits(d[register][lane]));
                        assert_eq!(found, wanted(row, column), "{kind:?} row {row} column {column}");
                    }
                    Accumulator::S32 { .. } => {
                        assert_eq!(f64::from(d[register][lane] as i32), wanted(row, column), "{kind:?}");
                    }
                    Accumulator::F16 => {
                        let low = half::f16::from_bits(d[register][lane] as u16).to_f64();
                        assert_eq!(low, wanted(lane / 4 + 8 * register, lane % 4 * 2), "{kind:?}");
                        let high = half::f16::from_bits((d[register][lane] >> 16) as u16).to_f64();
                        assert_eq!(high, wanted(lane / 4 + 8 * register, lane % 4 * 2 + 1), "{kind:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn integer_sums_wrap_or_saturate() {
    for (saturate, expected) in [(false, i32::MIN + 32 * 127 * 127 - 1), (true, i32::MAX)] {
        let kind = kind(16, 32, Input::S8, Input::S8, Accumulator::S32 { saturate });
        let full = [0x7F7F_7F7F; 32];
        let mut d = [[0; 32]; 4];
        mma(kind, TensorRules::Ampere, &[full; 4], &[full; 2], &[[i32::MAX as u32; 32]; 4], &mut d).unwrap();
        assert_eq!(d[3][31] as i32, expected);
    }
    let mixed = kind(8, 16, Input::U8, Input::S8, Accumulator::S32 { saturate: false });
    let mut d = [[0; 32]; 2];
    mma(mixed, TensorRules::Ampere, &[[u32::MAX; 32]], &[[u32::MAX; 32]], &[[0; 32]; 2], &mut d).unwrap();
    assert_eq!(d[0][0] as i32, -255 * 16);
}

#[test]
fn bits_are_combined_and_counted() {
    for (product, expected) in [(BitProduct::And, 3), (BitProduct::Xor, 123)] {
        let bits = Input::Bits(product);
        for (m, k) in [(8, 128), (16, 128), (16, 256)] {
            let kind = kind(m, k, bits, bits, Accumulator::S32 { saturate: false });
            let [na, nb, nc] = kind.registers();
            let (mut a, mut b) = (vec![[0; 32]; na], vec![[0; 32]; nb]);
            // Row 3 of A has ones in the first 64 k. Column 5 of B has 1, 2, 32 and 30 ones in the four runs
            // of 32 k. And: 1 + 2 ones. Xor: 31 + 30 + 32 + 30 ones.
            for (place, word) in [(0, !0), (1, !0)] {
                let (register, lane) = layout::locate_a(kind.shape(), 32, 3, 32 * place);
                a[register][lane] = word;
            }
            for (place, word) in [(0, 1u32), (1, 3), (2, !0), (3, 0xFFFF_FFFC)] {
                let (register, lane) = layout::locate_b(32, 32 * place, 5);
                b[register][lane] = word;
            }
            let mut d = vec![[0; 32]; nc];
            mma(kind, TensorRules::Ampere, &a, &b, &vec![[7; 32]; nc], &mut d).unwrap();
            let (register, lane) = layout::locate_c(3, 5);
            assert_eq!(d[register][lane], 7 + expected, "{kind:?}");
        }
    }
}

#[test]
fn impossible_kinds_and_operands_are_refused() {
    assert!(MmaKind::new(Shape { m: 16, n: 8, k: 16 }, Input::F16, Input::Bf16, Accumulator::F32).is_err());
    assert!(MmaKind::new(Shape { m: 16, n: 8, k: 16 }, Input::Bf16, Input::Bf16, Accumulator::F16).is_err());
    let fp8 = kind(16, 32, Input::E4m3, Input::E5m2, Accumulator::F32);
    assert!(fp8.check(TensorRules::Ampere).is_err());
    let error = mma(fp8, TensorRules::Ada, &[[0; 32]; 3], &[[0; 32]; 2], &[[0; 32]; 4], &mut [[0; 32]; 4]);
    assert_eq!(
        error,
        Err(OperandError { kind: fp8, operand: 'a', expected: 4, found: 3 }.into()),
        "three registers of A instead of four"
    );
}
