//! Integer instructions, one lane at a time. Values are passed as `u64`, zero-extended from the type's width.

pub mod arithmetic;
pub mod bits;
pub mod packed;

/// An integer type of PTX. An untyped `.bN` operand is represented by the unsigned type of that width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntType {
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
}

impl IntType {
    /// Every type.
    pub const ALL: [Self; 8] =
        [Self::U8, Self::S8, Self::U16, Self::S16, Self::U32, Self::S32, Self::U64, Self::S64];

    /// Width in bits.
    pub const fn bits(self) -> u32 {
        match self {
            Self::U8 | Self::S8 => 8,
            Self::U16 | Self::S16 => 16,
            Self::U32 | Self::S32 => 32,
            Self::U64 | Self::S64 => 64,
        }
    }

    /// Whether the type has a sign.
    pub const fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    /// Smallest and largest value.
    pub const fn range(self) -> (i128, i128) {
        let bits = self.bits();
        if self.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
    }

    /// The number that the low bits of `bits` represent.
    #[inline]
    pub const fn read(self, bits: u64) -> i128 {
        let unused = 64 - self.bits();
        if self.is_signed() {
            (((bits << unused) as i64) >> unused) as i128
        } else {
            (bits << unused >> unused) as i128
        }
    }

    /// The low bits of `value`, zero-extended, so that arithmetic wraps.
    #[inline]
    pub const fn write(self, value: i128) -> u64 {
        let unused = 64 - self.bits();
        (value as u64) << unused >> unused
    }

    /// The nearest value in range: `.sat`.
    pub fn saturate(self, value: i128) -> u64 {
        let (low, high) = self.range();
        self.write(value.clamp(low, high))
    }
}
