//! Rows of an input tensor in a slice.

use problem::{Elements, Problem, ProblemError, Strides, Tensor};

use crate::OracleError;

/// A slice and the positions of a tensor's rows in it.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    data: Elements<'a>,
    /// Index of element (0, 0, 0, 0).
    origin: usize,
    strides: Strides,
    /// Number of elements of a row.
    dim: usize,
}

impl<'a> Rows<'a> {
    /// Rejects a slice of another type, and one that is too short for the tensor.
    pub(crate) fn new(problem: &Problem, tensor: Tensor, data: Elements<'a>) -> Result<Self, OracleError> {
        let name = tensor.name();
        let (slices, problems) = (data.dtype(), problem.dtypes.of(tensor));
        if slices != problems {
            return Err(OracleError::DType { tensor: name, slices, problem: problems });
        }
        let (needed, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: name })?;
        if data.len() < needed {
            return Err(OracleError::BufferTooShort { tensor: name, len: data.len(), needed });
        }
        let [.., dim] = problem.extents(tensor);
        Ok(Rows { data, origin, strides: problem.strides(tensor), dim })
    }

    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> Elements<'a> {
        let start = (self.origin as i64 + self.strides.offset(batch, head, row)) as usize;
        self.data.range(start, start + self.dim)
    }
}
