//! The operands of a call other than Q, K and V, in host memory.

use half::{bf16, f16};

use crate::{LengthValues, ScaleValues, TableType};

/// The operands of a problem other than Q, K and V. An operand that the problem does not have is empty. `T`
/// is how tables are given.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, T = TableData<'a>> {
    /// Arrays of lengths.
    pub lengths: LengthValues<'a>,
    /// Descale factors of 8-bit inputs ([`Problem::scales`](crate::Problem::scales)).
    pub scales: ScaleValues<'a>,
    /// A logit per query head ([`Score::sink`](crate::Score::sink)).
    pub sinks: &'a [f32],
    /// The contents of the programs' tables, in the order of [`Programs::tables`](crate::Programs::tables).
    /// Each one covers the span of the table's strides, beginning with its first element.
    pub tables: &'a [T],
}

impl<T> Default for Operands<'_, T> {
    fn default() -> Self {
        let (lengths, scales) = (LengthValues::default(), ScaleValues::default());
        Operands { lengths, scales, sinks: &[], tables: &[] }
    }
}

impl<'a, T> Operands<'a, T> {
    /// The operands with other tables.
    pub const fn with_tables<U>(self, tables: &'a [U]) -> Operands<'a, U> {
        let Operands { lengths, scales, sinks, .. } = self;
        Operands { lengths, scales, sinks, tables }
    }
}

/// The elements of a table.
#[derive(Clone, Copy, Debug)]
pub enum TableData<'a> {
    /// 32-bit floating point.
    F32(&'a [f32]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// 32-bit signed integers.
    I32(&'a [i32]),
    /// Bytes; a boolean mask holds 0 or 1.
    U8(&'a [u8]),
}

macro_rules! conversions {
    ($($element:ty => $table:expr),* $(,)?) => {
        $(impl<'a> From<&'a [$element]> for TableData<'a> {
            fn from(elements: &'a [$element]) -> TableData<'a> {
                $table(elements)
            }
        }

        impl<'a> From<&'a Vec<$element>> for TableData<'a> {
            fn from(elements: &'a Vec<$element>) -> TableData<'a> {
                elements.as_slice().into()
            }
        }

        impl<'a, const N: usize> From<&'a [$element; N]> for TableData<'a> {
            fn from(elements: &'a [$element; N]) -> TableData<'a> {
                elements.as_slice().into()
            }
        })*
    };
}
conversions! {
    f32 => TableData::F32,
    f16 => TableData::F16,
    bf16 => TableData::Bf16,
    i32 => TableData::I32,
    u8 => TableData::U8,
    bool => truths,
}

/// Bytes with 1 for true and 0 for false.
fn truths(elements: &[bool]) -> TableData<'_> {
    TableData::U8(bytemuck::cast_slice(elements))
}

impl TableData<'_> {
    /// Type of the elements.
    pub const fn dtype(&self) -> TableType {
        match self {
            TableData::F32(_) => TableType::F32,
            TableData::F16(_) => TableType::F16,
            TableData::Bf16(_) => TableType::Bf16,
            TableData::I32(_) => TableType::I32,
            TableData::U8(_) => TableType::U8,
        }
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            TableData::F32(x) => x.len(),
            TableData::F16(x) => x.len(),
            TableData::Bf16(x) => x.len(),
            TableData::I32(x) => x.len(),
            TableData::U8(x) => x.len(),
        }
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
