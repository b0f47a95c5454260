//! How each architecture cuts a dot product into fused sums.

use super::{Accumulator, Input, MmaKind, TensorRules};

/// The lowest exponent to which a sum is aligned, reached when C is zero and every product is smaller. Measured on an
/// H200 with bf16 and tf32, the only inputs to go so low: of −127 to −136 this one alone gives every bit.
pub const LEAST_ALIGNMENT: i32 = -133;

/// The order of arithmetic of one `mma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Products in one fused sum; sums are chained, each taking the one before as its C.
    pub chunk: usize,
    /// Bits kept below the largest exponent of a sum.
    pub fraction_bits: u32,
    /// Fraction bits of the f32 result of a sum; 23 except for Ada's fp8. Unused for f16 results.
    pub output_fraction: u32,
    /// Which of the K products come first.
    pub order: Order,
}

/// Which products a chunk takes, and when C joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of k, C in the first sum.
    Natural,
    /// fp8 run as f16: of every four neighbours in k the first two go to the first sum, the other two to the
    /// second; the chain starts from zero and C is added at the end by an ordinary rounded addition.
    /// (Machine code for sm_90 and sm_100: F2FP.F16.UNPACK_B of low and high halves, HMMA twice, FADD or HADD2.)
    SplitPairs,
}

impl Recipe {
    /// The recipe of a floating-point `kind` with 16- or 32-bit accumulators.
    pub fn new(kind: MmaKind, rules: TensorRules) -> Self {
        let k = kind.shape().k;
        let fp8 = matches!(kind.a(), Input::E4m3 | Input::E5m2);
        // A full 32-byte row of operands takes two steps before Hopper: k16 of 16 bits, k8 of tf32, k32 of fp8.
        let halves = kind.a().bits() * k == 256;
        let stepped = if halves { k / 2 } else { k };
        match rules {
            TensorRules::Ada if fp8 => Self {
                chunk: stepped,
                fraction_bits: 13,
                output_fraction: if kind.accumulator() == Accumulator::F32 { 13 } else { 23 },
                order: Order::Natural,
            },
            TensorRules::HopperAsync if fp8 => Self {
                chunk: k,
                fraction_bits: 13,
                output_fraction: if kind.accumulator() == Accumulator::F32 { 13 } else { 23 },
                order: Order::Natural,
            },
            TensorRules::Ampere | TensorRules::Ada => {
                Self { chunk: stepped, fraction_bits: 24, output_fraction: 23, order: Order::Natural }
            }
            TensorRules::Hopper | TensorRules::Blackwell if fp8 => {
                Self { chunk: k / 2, fraction_bits: 25, output_fraction: 23, order: Order::SplitPairs }
            }
            TensorRules::Hopper
            | TensorRules::HopperAsync
            | TensorRules::Blackwell
            | TensorRules::RtxBlackwell => {
                Self { chunk: k, fraction_bits: 25, output_fraction: 23, order: Order::Natural }
            }
        }
    }

    /// The k of the `i`-th product in order of execution.
    pub fn k_at(&self, i: usize) -> usize {
        match self.order {
            Order::Natural => i,
            Order::SplitPairs => {
                let (sum, j) = (i / self.chunk, i % self.chunk);
                j / 2 * 4 + sum * 2 + j % 2
            }
        }
    }

    /// The format in which A or B enters the multiplier.
    pub fn operand(&self, input: Input) -> Input {
        match self.order {
            Order::Natural => input,
            Order::SplitPairs => Input::F16,
        }
    }
}
