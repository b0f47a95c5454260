use problem::{Problem, ProblemError, Strides, Tensor};

use crate::{CpuError, Element};

/// Returns the index of element (0, 0, 0, 0) in a buffer of `len` elements. An error if the buffer is too
/// short for `tensor`.
pub(crate) fn origin(problem: &Problem, tensor: Tensor, len: usize) -> Result<usize, CpuError> {
    let (needed, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: tensor.name() })?;
    if len < needed {
        return Err(CpuError::BufferTooShort { tensor: tensor.name(), len, needed });
    }
    Ok(origin)
}

/// An input tensor: the buffer that holds it, and the positions of its rows.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    data: &'a [T],
    origin: usize,
    strides: Strides,
    /// Number of elements of a row.
    pub dim: usize,
}

impl<'a, T> View<'a, T> {
    fn new(problem: &Problem, tensor: Tensor, data: &'a [T]) -> Result<Self, CpuError> {
        let origin = origin(problem, tensor, data.len())?;
        let [.., dim] = problem.extents(tensor);
        Ok(View { data, origin, strides: problem.strides(tensor), dim })
    }

    fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        (self.origin as i64 + self.strides.offset(batch, head, row)) as usize
    }

    /// One row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> &'a [T] {
        &self.data[self.start(batch, head, row)..][..self.dim]
    }

    /// `count` rows as one slice, if they are contiguous in memory.
    pub(crate) fn dense_rows(
        &self,
        batch: usize,
        head: usize,
        first: usize,
        count: usize,
    ) -> Option<&'a [T]> {
        (self.strides.row == self.dim as i64)
            .then(|| &self.data[self.start(batch, head, first)..][..count * self.dim])
    }
}

/// The three inputs of a problem, checked against it.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a, T> {
    pub q: View<'a, T>,
    pub k: View<'a, T>,
    pub v: View<'a, T>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Rejects an invalid problem, slices of another type, and buffers that are too short.
    pub(crate) fn check(problem: &Problem, q: &'a [T], k: &'a [T], v: &'a [T]) -> Result<Self, CpuError> {
        problem.check()?;
        if T::DTYPE != problem.dtype {
            return Err(CpuError::DType { slices: T::DTYPE, problem: problem.dtype });
        }
        Ok(Inputs {
            q: View::new(problem, Tensor::Q, q)?,
            k: View::new(problem, Tensor::K, k)?,
            v: View::new(problem, Tensor::V, v)?,
        })
    }
}
