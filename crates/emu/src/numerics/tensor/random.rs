//! Random fragments for comparing two implementations of `mma`.

use super::super::round::{Exact, Format, Rounding};
use super::super::{Lanes32, Lanes64};
use super::{Accumulator, Input, MmaKind, decode};

/// The distribution of a fragment's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Distribution {
    /// Uniform bit patterns: all exponents, subnormals, NaN and infinity.
    Bits,
    /// Standard normal values, as in attention.
    Normal,
    /// Finite values with exponents over the whole range of the format, including subnormals and zeros.
    WideExponents,
    /// Products and C that nearly cancel.
    Cancellation,
    /// Results near the smallest normal and subnormal numbers of the accumulator.
    Underflow,
    /// Mostly finite values, mixed with zeros of both signs, the extremes, infinities and NaN.
    Specials,
}

impl Distribution {
    /// Every distribution.
    pub const ALL: [Self; 6] =
        [Self::Bits, Self::Normal, Self::WideExponents, Self::Cancellation, Self::Underflow, Self::Specials];
}

/// Operands of one `mma` in 32-bit registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Registers of A.
    pub a: Vec<Lanes32>,
    /// Registers of B.
    pub b: Vec<Lanes32>,
    /// Registers of C.
    pub c: Vec<Lanes32>,
}

/// Operands of one f64 `mma`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment64 {
    /// Registers of A.
    pub a: Vec<Lanes64>,
    /// Registers of B.
    pub b: Vec<Lanes64>,
    /// Registers of C.
    pub c: Vec<Lanes64>,
}

/// A fragment of `kind`; the same seed gives the same fragment on every machine.
pub fn random_fragment(kind: MmaKind, distribution: Distribution, seed: u64) -> Fragment {
    let mut source = Source::new(kind, distribution, seed);
    let [a, b, c] = kind.registers();
    let a = registers(a, || source.input_register(kind.a()));
    let b = registers(b, || source.input_register(kind.b()));
    source.factors = false;
    Fragment { a, b, c: registers(c, || source.accumulator_register(kind.accumulator())) }
}

/// The sums C of a fragment alone.
pub fn random_sums(kind: MmaKind, distribution: Distribution, seed: u64) -> Vec<Lanes32> {
    let mut source = Source { factors: false, ..Source::new(kind, distribution, seed) };
    registers(kind.registers()[2], || source.accumulator_register(kind.accumulator()))
}

/// A fragment of an f64 `kind`.
pub fn random_fragment_f64(kind: MmaKind, distribution: Distribution, seed: u64) -> Fragment64 {
    let mut source = Source::new(kind, distribution, seed);
    let [a, b, c] = kind.registers();
    let [a, b, c] = [(a, true), (b, true), (c, false)].map(|(count, factors)| {
        source.factors = factors;
        (0..count).map(|_| std::array::from_fn(|_| source.value(Format::F64))).collect()
    });
    Fragment64 { a, b, c }
}

fn registers(count: usize, mut draw: impl FnMut() -> u32) -> Vec<Lanes32> {
    (0..count).map(|_| std::array::from_fn(|_| draw())).collect()
}

/// SplitMix64 (Steele et al., OOPSLA 2014), and the distributions on top of it.
struct Source {
    state: u64,
    distribution: Distribution,
    /// The binade around which [`Distribution::Cancellation`] draws values. It is chosen per fragment.
    center: i32,
    /// Exponent of the accumulator's smallest normal number.
    smallest: i32,
    /// Whether factors (A and B) or sums (C) are drawn.
    factors: bool,
}

impl Source {
    fn new(kind: MmaKind, distribution: Distribution, seed: u64) -> Self {
        let smallest = match kind.accumulator() {
            Accumulator::F16 => Format::F16.min_exponent(),
            Accumulator::F32 | Accumulator::S32 { .. } => Format::F32.min_exponent(),
            Accumulator::F64 => Format::F64.min_exponent(),
        };
        let state = seed.wrapping_mul(0xD134_2543_DE82_EF95);
        let mut source = Self { state, distribution, center: 0, smallest, factors: true };
        source.center = (source.next() % 9) as i32 - 4;
        source
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn input_register(&mut self, input: Input) -> u32 {
        match input {
            Input::F16 | Input::Bf16 => self.packed(decode::format(input), 16),
            Input::E4m3 | Input::E5m2 => self.packed(decode::format(input), 8),
            // The low 13 bits must have no effect; random bits test that.
            Input::Tf32 => (self.value(Format::TF32) as u32) << 13 | (self.next() & 0x1FFF) as u32,
            Input::S8 | Input::U8 | Input::F64 | Input::Bits(_) => self.next() as u32,
        }
    }

    fn accumulator_register(&mut self, accumulator: Accumulator) -> u32 {
        match accumulator {
            Accumulator::F16 => self.packed(Format::F16, 16),
            Accumulator::F32 => self.value(Format::F32) as u32,
            Accumulator::S32 { .. } => self.integer(),
            Accumulator::F64 => 0,
        }
    }

    fn packed(&mut self, format: Format, bits: u32) -> u32 {
        (0..32 / bits).fold(0, |word, i| word | (self.value(format) as u32) << (bits * i))
    }

    /// Small sums, and sums near both ends of the range.
    fn integer(&mut self) -> u32 {
        let bits = self.next();
        let small = (bits >> 40) as u32;
        match bits % 4 {
            0 => (bits >> 32) as u32,
            1 => i32::MAX as u32 - small,
            2 => i32::MIN as u32 + small,
            _ => small,
        }
    }

    fn value(&mut self, format: Format) -> u64 {
        let all = (1u64 << format.sign_bit() << 1).wrapping_sub(1);
        match self.distribution {
            Distribution::Bits => self.next() & all,
            Distribution::Normal => self.normal(format),
            Distribution::WideExponents => self.finite(format),
            Distribution::Cancellation => self.near_center(format),
            Distribution::Underflow => self.small(format),
            Distribution::Specials => self.special(format),
        }
    }

    /// The sum of twelve uniform numbers minus six (Irwin–Hall): close to N(0, 1), and equal on every
    /// machine.
    fn normal(&mut self, format: Format) -> u64 {
        let sum: i64 = (0..12).map(|_| (self.next() >> 40) as i64).sum();
        Exact::from_signed(i128::from(sum - (6 << 24)), -24).round_to(format, Rounding::NearestEven)
    }

    fn finite(&mut self, format: Format) -> u64 {
        let bits = self.next();
        let magnitude = (bits >> 1) % (format.max_finite() + 1);
        if bits & 0xF000_0000_0000_0000 == 0 {
            (bits & 1) << format.sign_bit()
        } else {
            self.signed(format, magnitude)
        }
    }

    fn signed(&mut self, format: Format, magnitude: u64) -> u64 {
        magnitude | (self.next() & 1) << format.sign_bit()
    }

    /// Powers of two near one binade, changed by a few units in the last place, with random signs.
    fn near_center(&mut self, format: Format) -> u64 {
        let bits = self.next();
        let binade = self.center + (bits % 3) as i32 - 1;
        let field = (format.bias() + binade).max(1) as u64;
        let magnitude = (field << format.fraction_bits) + (bits >> 8) % 3 * (bits >> 16 & 1);
        self.signed(format, magnitude.min(format.max_finite()))
    }

    /// Factors whose products are near the accumulator's smallest numbers, and sums that are subnormal or
    /// zero.
    fn small(&mut self, format: Format) -> u64 {
        let bits = self.next();
        if !self.factors {
            let subnormal = bits >> 8 & ((1 << format.fraction_bits) - 1);
            return if bits & 3 == 0 { self.signed(format, 0) } else { self.signed(format, subnormal) };
        }
        let binade = self.smallest / 2 - (bits % 8) as i32;
        let field = (format.bias() + binade).max(0) as u64;
        let fraction = bits >> 8 & ((1 << format.fraction_bits) - 1);
        self.signed(format, field << format.fraction_bits | fraction)
    }

    fn special(&mut self, format: Format) -> u64 {
        let draw = self.next();
        let magnitude = match draw % 96 {
            0 => format.canonical_nan(),
            1 | 2 => format.infinity(),
            3..=12 => 0,
            13..=16 => format.max_finite(),
            17..=20 => 1,
            21..=24 => (1 << format.fraction_bits) - 1,
            25..=28 => 1 << format.fraction_bits,
            _ => return self.finite(format),
        };
        self.signed(format, magnitude)
    }
}
