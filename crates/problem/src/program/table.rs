//! The tables that programs read.

use serde::{Deserialize, Serialize};

use super::{Id, Range};
use crate::ElementType;

/// A table that programs read: its shape and where its elements lie. Its contents are an operand of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Table {
    /// Type of the elements: `f32`, `f16`, `bf16`, `i32` or `u8`.
    pub dtype: ElementType,
    /// Number of elements in each dimension, 1 to 4 dimensions.
    pub extents: Vec<usize>,
    /// Distance in elements between neighbours in each dimension. Not negative; 0 broadcasts.
    pub strides: Vec<i64>,
}

impl Table {
    /// The largest number of dimensions.
    pub const MOST_DIMENSIONS: usize = 4;

    /// A dense table, the last dimension contiguous.
    pub fn dense(dtype: ElementType, extents: &[usize]) -> Table {
        let mut strides = vec![1i64; extents.len()];
        for i in (0..extents.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1].saturating_mul(i64::try_from(extents[i + 1]).unwrap_or(i64::MAX));
        }
        Table { dtype, extents: extents.to_vec(), strides }
    }

    /// Number of elements from the first one to the last, including gaps.
    pub fn span(&self) -> usize {
        let reach = |(&extent, &stride): (&usize, &i64)| (extent as i64 - 1).saturating_mul(stride);
        self.extents.iter().zip(&self.strides).map(reach).fold(1i64, i64::saturating_add) as usize
    }

    /// The offset of the element at the indices from the first element. Each index is clamped to its extent.
    pub fn offset(&self, index: impl IntoIterator<Item = i64>) -> usize {
        let at = |((i, &extent), &stride): ((i64, &usize), &i64)| i.clamp(0, extent as i64 - 1) * stride;
        index.into_iter().zip(&self.extents).zip(&self.strides).map(at).sum::<i64>() as usize
    }

    /// The gradient of this table: f32, dense. A dimension whose stride is 0 has one element, the sum over
    /// the dimension.
    #[must_use]
    pub fn gradient(&self) -> Table {
        let extent = |(&extent, &stride): (&usize, &i64)| if stride == 0 { extent.min(1) } else { extent };
        let extents: Vec<usize> = self.extents.iter().zip(&self.strides).map(extent).collect();
        Table::dense(ElementType::F32, &extents)
    }

    /// Rejects a table that no kernel can read.
    ///
    /// # Errors
    /// The reason, and what is accepted.
    pub fn check(&self) -> Result<(), String> {
        let dimensions = self.extents.len();
        if !(1..=Table::MOST_DIMENSIONS).contains(&dimensions) {
            let most = Table::MOST_DIMENSIONS;
            return Err(format!("invalid value '{dimensions}' for its dimensions: expected 1 to {most}"));
        }
        if self.strides.len() != dimensions {
            let given = self.strides.len();
            return Err(format!(
                "invalid value '{given}' for the number of strides: expected {dimensions}, one for each dimension"
            ));
        }
        if matches!(self.dtype, ElementType::E4m3 | ElementType::E5m2) {
            return Err(format!("elements of {}; expected f32, f16, bf16, i32 or u8", self.dtype));
        }
        if self.extents.contains(&0) || self.extents.iter().any(|&extent| extent > i32::MAX as usize) {
            return Err(format!("extents {:?}; expected 1 to 2^31 - 1 each", self.extents));
        }
        let most = 1i64 << 58;
        if self.strides.iter().any(|stride| !(0..most).contains(stride)) || self.span() as i64 > most {
            return Err(format!(
                "strides {:?}; expected strides of 0 or more, spanning at most 2^58 elements",
                self.strides
            ));
        }
        Ok(())
    }

    /// Rejects a read with the wrong number of indices or the wrong element type, and an index that consists
    /// of a position alone and can lie outside the table.
    pub(super) fn check_read(
        &self,
        number: u32,
        float: bool,
        index: &[Id],
        ranges: &[Range],
    ) -> Result<(), String> {
        if index.len() != self.extents.len() {
            return Err(format!(
                "t{number} has {} dimensions and is read with {} indices",
                self.extents.len(),
                index.len()
            ));
        }
        if float != self.dtype.is_float() {
            let name = if float { "integers" } else { "floats" };
            return Err(format!("t{number} holds {name}, which the program reads as another type"));
        }
        for (dimension, (&id, &extent)) in index.iter().zip(&self.extents).enumerate() {
            let range = &ranges[id];
            if range.position && (range.low < 0 || range.high >= extent as i64) {
                return Err(format!(
                    "it reads t{number} at {} to {} in dimension {dimension}, which has {extent} elements",
                    range.low, range.high
                ));
            }
        }
        Ok(())
    }
}
