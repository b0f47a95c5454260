//! The rows of a problem's outputs, and where they lie in the buffers of a kernel.

use std::collections::HashMap;
use std::ops::Range;

use judge::inputs::rows_of;
use judge::outputs::dense_rows;
use judge::values::Inputs;
use problem::{Layout, Operand, OperandMap, Problem, Sequence, Tensor};

use crate::launchfile::{Bound, Role};

/// The rows that belong to a sequence, in the order batch entry, head, row. None if the kernel has no
/// problem.
#[derive(Debug, Default)]
pub(super) struct OutputRows {
    /// The index of each row of O among all its rows.
    pub dense: Vec<usize>,
    /// The index of each row of O in the LSE.
    pub lse: Vec<usize>,
    /// The elements of each row, for each output tensor.
    pub elements: OperandMap<Vec<Range<usize>>>,
    /// By the number of a buffer, the bytes that the kernel must write: those of the output tensors and, with
    /// uneven lengths, those of the LSE. With even lengths, all of the LSE must be written.
    pub must_write: HashMap<usize, Vec<Range<usize>>>,
}

impl OutputRows {
    pub(super) fn of(bound: &Bound, inputs: Option<&Inputs>) -> OutputRows {
        let Some((problem, inputs)) = bound.problem.as_ref().zip(inputs) else {
            return OutputRows::default();
        };
        let sequences = inputs.sequences(problem);
        let (dense, pass) = (dense_rows(problem, &sequences), problem.pass.kind());
        let lse: Vec<usize> = dense.iter().map(|&row| lse_row(bound, problem, row)).collect();
        let outputs = problem.tensors().iter().filter(|tensor| tensor.is_output(pass));
        let elements = outputs.map(|&tensor| (tensor.into(), row_ranges(problem, tensor, &sequences)));
        let elements: OperandMap<Vec<Range<usize>>> = elements.collect();
        let at = |operand| bound.roles.iter().position(|&role| role == Role::Operand(operand));
        let of_tensors = elements.iter().filter_map(|(operand, ranges)| {
            let Operand::Tensor(tensor) = operand else { return None };
            Some((at(operand)?, in_bytes(ranges.clone(), problem.dtypes.of(tensor).bytes())))
        });
        let uneven = problem.pass.lse() && !problem.lengths.is_even();
        let of_lse = at(Operand::Lse).filter(|_| uneven).map(|index| {
            let rows = lse.iter().map(|&row| row..row + 1);
            (index, in_bytes(rows.collect(), 4))
        });
        let must_write = of_tensors.chain(of_lse).collect();
        OutputRows { dense, lse, elements, must_write }
    }
}

/// The index of a row in the LSE.
fn lse_row(bound: &Bound, problem: &Problem, row: usize) -> usize {
    let [_, heads, rows, _] = problem.extents(Tensor::Out);
    match bound.lse_layout {
        Layout::Bhsd => row,
        Layout::Bshd => {
            let (batch, head) = (row / rows / heads, row / rows % heads);
            (batch * rows + row % rows) * heads + head
        }
    }
}

/// The elements of each row of a tensor that belongs to a sequence, in the order (batch entry, head, row).
fn row_ranges(problem: &Problem, tensor: Tensor, sequences: &[Sequence]) -> Vec<Range<usize>> {
    let origin = problem.span(tensor).map_or(0, |(_, origin)| origin) as i64;
    let ([_, heads, _, dim], strides) = (problem.extents(tensor), problem.strides(tensor));
    rows_of(sequences, tensor, heads)
        .map(|(span, head, row)| {
            let start = (origin + strides.offset(span.batch, head, span.start + row)) as usize;
            start..start + dim
        })
        .collect()
}

/// Ranges of elements as ranges of bytes, adjacent ones joined.
fn in_bytes(mut elements: Vec<Range<usize>>, bytes: usize) -> Vec<Range<usize>> {
    elements.sort_by_key(|range| range.start);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for range in elements {
        let (start, end) = (range.start * bytes, range.end * bytes);
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
