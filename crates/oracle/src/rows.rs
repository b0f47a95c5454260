//! Rows of an input tensor in a slice.

use problem::{Elements, Operand, Operands, Problem, Strides, Tensor};

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
    /// The rows of a tensor of checked inputs. A tensor without elements may be missing.
    pub(crate) fn new(problem: &Problem, tensor: Tensor, inputs: &Operands<'a>) -> Self {
        let data = inputs.get(Operand::Tensor(tensor)).copied().unwrap_or(Elements::F32(&[]));
        let origin = problem.span(tensor).map_or(0, |(_, origin)| origin);
        let [.., dim] = problem.extents(tensor);
        Rows { data, origin, strides: problem.strides(tensor), dim }
    }

    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> Elements<'a> {
        let start = (self.origin as i64 + self.strides.offset(batch, head, row)) as usize;
        self.data.range(start, start + self.dim)
    }
}
