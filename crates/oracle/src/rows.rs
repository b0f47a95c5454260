//! Rows of an input tensor in a slice.

use problem::{Problem, ProblemError, Strides, Tensor};

use crate::OracleError;

/// A slice and the positions of a tensor's rows in it.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    /// Index of element (0, 0, 0, 0).
    origin: usize,
    strides: Strides,
    /// Number of elements of a row.
    dim: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Rejects a slice that is too short for the tensor.
    pub(crate) fn new(problem: &Problem, tensor: Tensor, data: &'a [T]) -> Result<Self, OracleError> {
        let name = tensor.name();
        let (needed, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: name })?;
        if data.len() < needed {
            return Err(OracleError::BufferTooShort { tensor: name, len: data.len(), needed });
        }
        let [.., dim] = problem.extents(tensor);
        Ok(Rows { data, origin, strides: problem.strides(tensor), dim })
    }

    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> &'a [T] {
        let start = (self.origin as i64 + self.strides.offset(batch, head, row)) as usize;
        &self.data[start..start + self.dim]
    }
}
