//! The `mma.sync` kinds that exist: shapes, element types, and the architectures that support them.

/// M, N and K of one warp-wide product: A is M×K, B is K×N, C and D are M×N.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of A and D.
    pub m: usize,
    /// Columns of B and D.
    pub n: usize,
    /// Products in one dot product.
    pub k: usize,
}

/// Element type of A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// f32 of which the tensor core reads the upper 19 bits.
    Tf32,
    /// fp8, 4 exponent bits.
    E4m3,
    /// fp8, 5 exponent bits.
    E5m2,
    /// Signed bytes.
    S8,
    /// Unsigned bytes.
    U8,
    /// IEEE binary64.
    F64,
    /// Single bits.
    Bits(BitProduct),
}

/// The operation that multiplies single bits. The ones of the product are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BitProduct {
    /// `.xor.popc`
    Xor,
    /// `.and.popc`
    And,
}

impl Input {
    /// Width of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::Tf32 => 32,
            Self::E4m3 | Self::E5m2 | Self::S8 | Self::U8 => 8,
            Self::F64 => 64,
            Self::Bits(_) => 1,
        }
    }

    /// Elements in one register (f64 registers have 64 bits, all others 32).
    pub const fn per_register(self) -> usize {
        match self {
            Self::F64 => 1,
            _ => 32 / self.bits(),
        }
    }
}

/// Element type of C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// IEEE binary16, two to a register.
    F16,
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// 32-bit integers: wrapping, or clamped at both ends with `.satfinite`.
    S32 {
        /// `.satfinite`.
        saturate: bool,
    },
}

/// The architecture whose tensor-core arithmetic is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorRules {
    /// sm_80, sm_86, sm_87: 24 bits kept, at most 8 f16 products in one sum.
    Ampere,
    /// sm_89: like Ampere, and fp8 with 13 bits.
    Ada,
    /// sm_90: 25 bits kept, 16 f16 products in one sum; fp8 `mma.sync` runs as f16.
    Hopper,
    /// `wgmma` of sm_90a: like Hopper, but fp8 is native, with 32 products in one sum and 13 bits (MMA-Sim;
    /// not re-measured here).
    HopperAsync,
    /// sm_100, sm_103: like Hopper. fp8 `mma.sync` also runs as f16.
    Blackwell,
    /// sm_120, sm_121: 25 bits kept; fp8 is native with 32 products in one sum (MMA-Sim; not re-measured
    /// here).
    RtxBlackwell,
}

impl TensorRules {
    /// The rules of compute capability `sm` (80 for sm_80); `None` if it lacks the `mma.sync` of sm_80.
    pub const fn of_sm(sm: u32) -> Option<Self> {
        match sm {
            80..=88 => Some(Self::Ampere),
            89 => Some(Self::Ada),
            90..=99 => Some(Self::Hopper),
            100..=119 => Some(Self::Blackwell),
            120..=129 => Some(Self::RtxBlackwell),
            _ => None,
        }
    }
}

/// A dense `mma.sync` that PTX defines. [`MmaKind::new`] rejects all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaKind {
    shape: Shape,
    a: Input,
    b: Input,
    accumulator: Accumulator,
}

/// The `mma.sync` does not exist, or not on this architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?} does not exist on {rules:?} (PTX ISA, mma.sync: shapes and types by target)")]
pub struct UnsupportedMma {
    /// The requested kind.
    pub kind: MmaKind,
    /// The architecture. If none was named, Hopper, which supports the most kinds.
    pub rules: TensorRules,
}

impl MmaKind {
    /// Makes a kind if PTX defines the shape for the types (PTX ISA, table of `mma.sync` shapes).
    ///
    /// # Errors
    /// PTX does not define the combination.
    pub fn new(shape: Shape, a: Input, b: Input, accumulator: Accumulator) -> Result<Self, UnsupportedMma> {
        let kind = Self { shape, a, b, accumulator };
        let dims = (shape.m, shape.n, shape.k);
        let exists = match (class(a), class(b)) {
            (Class::F16, Class::F16) => {
                matches!(accumulator, Accumulator::F16 | Accumulator::F32) && matches!(dims, (16, 8, 8 | 16))
            }
            (Class::Bf16, Class::Bf16) => accumulator == Accumulator::F32 && matches!(dims, (16, 8, 8 | 16)),
            (Class::Tf32, Class::Tf32) => accumulator == Accumulator::F32 && matches!(dims, (16, 8, 4 | 8)),
            (Class::Fp8, Class::Fp8) => {
                matches!(accumulator, Accumulator::F16 | Accumulator::F32) && matches!(dims, (16, 8, 16 | 32))
            }
            (Class::Byte, Class::Byte) => {
                matches!(accumulator, Accumulator::S32 { .. })
                    && matches!(dims, (8, 8, 16) | (16, 8, 16 | 32))
            }
            (Class::Bits, Class::Bits) => {
                a == b
                    && accumulator == Accumulator::S32 { saturate: false }
                    && matches!(dims, (8, 8, 128) | (16, 8, 128 | 256))
            }
            (Class::F64, Class::F64) => {
                accumulator == Accumulator::F64 && matches!(dims, (8, 8, 4) | (16, 8, 4 | 8 | 16))
            }
            _ => false,
        };
        if exists { Ok(kind) } else { Err(UnsupportedMma { kind, rules: TensorRules::Hopper }) }
    }

    /// All kinds that exist, for tests.
    pub fn all() -> Vec<Self> {
        use Accumulator as Acc;
        use Input::{Bf16, Bits, E4m3, E5m2, F16, F64, S8, Tf32, U8};
        let bits = [Bits(BitProduct::Xor), Bits(BitProduct::And)];
        let inputs = [F16, Bf16, Tf32, E4m3, E5m2, S8, U8, F64, bits[0], bits[1]];
        let sums = [Acc::F16, Acc::F32, Acc::F64, Acc::S32 { saturate: false }, Acc::S32 { saturate: true }];
        let mut kinds = Vec::new();
        for (m, k) in [(8, 4), (8, 16), (16, 4), (16, 8), (16, 16), (16, 32), (8, 128), (16, 128), (16, 256)]
        {
            for a in inputs {
                for b in inputs {
                    kinds.extend(sums.iter().filter_map(|&s| Self::new(Shape { m, n: 8, k }, a, b, s).ok()));
                }
            }
        }
        kinds
    }

    /// Whether the target of `rules` has this instruction.
    ///
    /// # Errors
    /// The target lacks the instruction: fp8 before sm_89, f64 with 16 rows before sm_90.
    pub fn check(self, rules: TensorRules) -> Result<(), UnsupportedMma> {
        let early = matches!(rules, TensorRules::Ampere | TensorRules::Ada);
        let missing = match class(self.a) {
            Class::Fp8 => rules == TensorRules::Ampere,
            Class::F64 => early && self.shape.m == 16,
            Class::F16 | Class::Bf16 | Class::Tf32 | Class::Byte | Class::Bits => false,
        };
        if missing { Err(UnsupportedMma { kind: self, rules }) } else { Ok(()) }
    }

    /// The shape M×N×K.
    pub const fn shape(self) -> Shape {
        self.shape
    }

    /// Element type of A.
    pub const fn a(self) -> Input {
        self.a
    }

    /// Element type of B.
    pub const fn b(self) -> Input {
        self.b
    }

    /// Element type of C and D.
    pub const fn accumulator(self) -> Accumulator {
        self.accumulator
    }

    /// Registers that a lane holds of A, of B and of C. D has as many as C.
    pub const fn registers(self) -> [usize; 3] {
        let Shape { m, n, k } = self.shape;
        let c = match self.accumulator {
            Accumulator::F16 => m * n / 64,
            Accumulator::F32 | Accumulator::F64 | Accumulator::S32 { .. } => m * n / 32,
        };
        [m * k / 32 / self.a.per_register(), k * n / 32 / self.b.per_register(), c]
    }
}

/// Groups of element types. A and B must be in the same group.
#[derive(PartialEq, Eq)]
enum Class {
    F16,
    Bf16,
    Tf32,
    Fp8,
    Byte,
    F64,
    Bits,
}

const fn class(input: Input) -> Class {
    match input {
        Input::F16 => Class::F16,
        Input::Bf16 => Class::Bf16,
        Input::Tf32 => Class::Tf32,
        Input::E4m3 | Input::E5m2 => Class::Fp8,
        Input::S8 | Input::U8 => Class::Byte,
        Input::F64 => Class::F64,
        Input::Bits(_) => Class::Bits,
    }
}
