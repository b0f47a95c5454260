//! How each architecture divides a dot product into fused sums.

use super::{Accumulator, Input, MmaKind, TensorRules};

/// Rows and columns of D of one product of a warp.
pub(super) const ROWS: usize = 16;
pub(super) const COLUMNS: usize = 8;

/// The lowest exponent to which a sum is aligned. It applies when C is zero and every product is smaller.
/// Measured on an H200 with bf16 and tf32, the only inputs that reach it: of −127 to −136, only this value
/// gives every bit.
pub const LEAST_ALIGNMENT: i32 = -133;

/// The order of arithmetic of one `mma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Products in one fused sum. Each sum takes the result of the previous one as its C.
    pub chunk: usize,
    /// Bits kept below the largest exponent of a sum.
    pub fraction_bits: u32,
    /// Fraction bits of the f32 result of a sum: 23, except for Ada's fp8. Unused for f16 results.
    pub output_fraction: u32,
    /// The order of the K products.
    pub order: Order,
}

/// The products of each chunk, and the point at which C is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of k. C is in the first sum.
    Natural,
    /// fp8 multiplied as f16. Of every four consecutive elements in k, the first two go to the first sum and
    /// the other two to the second sum. The chain starts from zero, and an ordinary rounded addition adds C
    /// at the end. (Machine code for sm_90 and sm_100: F2FP.F16.UNPACK_B of low and high halves, HMMA twice,
    /// FADD or HADD2.)
    SplitPairs,
}

impl Recipe {
    /// The recipe of a floating-point `kind` with 16- or 32-bit accumulators.
    pub fn new(kind: MmaKind, rules: TensorRules) -> Self {
        let k = kind.shape().k;
        let fp8 = matches!(kind.a(), Input::E4m3 | Input::E5m2);
        // Before Hopper, a full 32-byte row of operands takes two steps: k16 of 16-bit types, k8 of tf32, k32
        // of fp8.
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

    /// The format in which an operand enters the multiplier.
    pub fn operand(&self, input: Input) -> Input {
        match self.order {
            Order::Natural => input,
            Order::SplitPairs => Input::F16,
        }
    }
}
