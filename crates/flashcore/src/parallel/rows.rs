//! Tensors whose rows are sent: each row has the elements of all batch entries and heads.

use std::ops::Range;

use problem::{Element, Strides};

use super::GroupError;
use super::collectives::expect;
use crate::gpu::bytes_mut;
use crate::{AttentionError, TensorView};

/// A tensor `[row, batch, head, dim]`.
#[derive(Clone, Debug)]
pub(super) struct RowTensor<T> {
    data: Vec<T>,
    batch: usize,
    heads: usize,
    dim: usize,
}

impl<T: Element> RowTensor<T> {
    /// Zeros, of `[row, batch, head, dim]`.
    pub fn zeros(extents: [usize; 4]) -> RowTensor<T> {
        RowTensor::filled(extents, T::from_f32(0.0))
    }

    pub fn filled([rows, batch, heads, dim]: [usize; 4], value: T) -> RowTensor<T> {
        RowTensor { data: vec![value; rows * batch * heads * dim], batch, heads, dim }
    }

    /// A copy of some heads of a view.
    pub fn of(x: &TensorView<'_, T>, of: Range<usize>) -> RowTensor<T> {
        let [batch, _, rows, dim] = x.shape;
        let mut copy = RowTensor::zeros([rows, batch, of.len(), dim]);
        for row in 0..rows {
            for b in 0..batch {
                for (i, head) in of.clone().enumerate() {
                    copy.row_mut(row, b, i).copy_from_slice(x.row(b, head, row));
                }
            }
        }
        copy
    }

    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.width()).unwrap_or(0)
    }

    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Elements of a row.
    fn width(&self) -> usize {
        self.batch * self.heads * self.dim
    }

    pub fn row(&self, row: usize, batch: usize, head: usize) -> &[T] {
        &self.data[((row * self.batch + batch) * self.heads + head) * self.dim..][..self.dim]
    }

    pub fn row_mut(&mut self, row: usize, batch: usize, head: usize) -> &mut [T] {
        &mut self.data[((row * self.batch + batch) * self.heads + head) * self.dim..][..self.dim]
    }

    /// The extents of a tensor `[row, batch, head, dim]` with other numbers of rows and heads.
    pub fn extents(&self, rows: usize, heads: usize) -> [usize; 4] {
        [rows, self.batch, heads, self.dim]
    }

    pub fn all(&self) -> &[T] {
        &self.data
    }

    /// A copy of some rows of some heads.
    pub fn part(&self, rows: Range<usize>, heads: Range<usize>) -> RowTensor<T> {
        let mut data = Vec::with_capacity(rows.len() * self.batch * heads.len() * self.dim);
        for row in rows {
            for batch in 0..self.batch {
                heads.clone().for_each(|head| data.extend_from_slice(self.row(row, batch, head)));
            }
        }
        RowTensor { data, heads: heads.len(), ..*self }
    }

    /// The elements of some rows.
    pub fn slice(&self, rows: Range<usize>) -> &[T] {
        &self.data[rows.start * self.width()..rows.end * self.width()]
    }

    pub fn slice_mut(&mut self, rows: Range<usize>) -> &mut [T] {
        let width = self.width();
        &mut self.data[rows.start * width..rows.end * width]
    }

    /// Some rows of some heads, as `[batch, head, row, dim]`.
    pub fn view(&self, rows: Range<usize>, heads: Range<usize>) -> Result<TensorView<'_, T>, AttentionError> {
        let (row, head) = (self.width() as i64, self.dim as i64);
        let strides = Strides { batch: head * self.heads as i64, head, row };
        let data = self.slice(rows.clone()).get(heads.start * self.dim..).unwrap_or(&[]);
        TensorView::strided(data, [self.batch, heads.len(), rows.len(), self.dim], strides)
    }

    /// A copy of some rows of some heads, with the dimensions `[batch, head, row, dim]`.
    pub fn dense(&self, rows: Range<usize>, heads: Range<usize>) -> Vec<T> {
        let mut dense = Vec::with_capacity(self.batch * heads.len() * rows.len() * self.dim);
        for batch in 0..self.batch {
            for head in heads.clone() {
                rows.clone().for_each(|row| dense.extend_from_slice(self.row(row, batch, head)));
            }
        }
        dense
    }

    /// Calls `with` for each row from `first` on and each head from `head` on, with the row of `dense`,
    /// `[batch, head, row, dim]` of `heads` heads.
    pub fn each_row<U>(
        &mut self,
        [first, head]: [usize; 2],
        dense: &[U],
        heads: usize,
        mut with: impl FnMut(&mut [T], &[U], [usize; 3]),
    ) {
        let rows = dense.len().checked_div(self.batch * heads * self.dim).unwrap_or(0);
        for (i, part) in dense.chunks_exact(self.dim).enumerate() {
            let (batch, h, row) = (i / rows / heads, i / rows % heads, i % rows);
            with(self.row_mut(first + row, batch, head + h), part, [first + row, batch, head + h]);
        }
    }
}

impl RowTensor<f32> {
    /// Adds the elements of some rows of some heads, `[row, batch, head, dim]`.
    pub fn add(&mut self, rows: Range<usize>, heads: Range<usize>, parts: &[f32]) {
        let mut parts = parts.chunks_exact(self.dim);
        for row in rows {
            for batch in 0..self.batch {
                for (head, part) in heads.clone().zip(&mut parts) {
                    self.row_mut(row, batch, head).iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
            }
        }
    }
}

/// The elements of a message of `from`.
pub(super) fn from_bytes<T: Element>(
    message: &[u8],
    elements: usize,
    from: usize,
) -> Result<Vec<T>, GroupError> {
    let mut data = vec![T::from_f32(0.0); elements];
    write_bytes(&mut data, message, from)?;
    Ok(data)
}

/// Writes a message of `from` to elements.
pub(super) fn write_bytes<T: Element>(to: &mut [T], message: &[u8], from: usize) -> Result<(), GroupError> {
    let to = bytes_mut(T::elements_mut(to));
    expect(message, to.len(), from)?;
    to.copy_from_slice(message);
    Ok(())
}
