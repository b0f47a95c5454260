//! Results of tasks on parts of the keys (split-KV), and their merge into an output.

use problem::{Problem, Strides};

use crate::output::OutputRows;

/// Unfinished rows. For each row and part: the shift that was subtracted in the exponents, the sum of the
/// weights, and O before normalisation.
pub(crate) struct Parts<'a> {
    rows: OutputRows<'a, f32>,
}

/// Numbers of a part of a row in addition to O: shift and sum.
const HEAD: usize = 2;

/// The buffer for the unfinished rows of a problem.
pub(crate) fn room(problem: &Problem, parts: usize) -> Vec<f32> {
    vec![0.0; problem.lse_len() * parts * (HEAD + problem.head_dim_v)]
}

impl<'a> Parts<'a> {
    /// Takes over [`room`] for `parts` parts.
    pub(crate) fn new(problem: &Problem, parts: usize, room: &'a mut [f32]) -> Parts<'a> {
        let len = (HEAD + problem.head_dim_v) as i64;
        let strides = Strides { batch: len * parts as i64, head: len, row: 0 };
        Parts { rows: OutputRows::new(room, 0, strides, len as usize) }
    }

    /// Stores the result of one part of row `row`.
    ///
    /// # Safety
    /// No two concurrent calls with the same row and part.
    #[allow(unsafe_code)] // each part of a row is written by the one task that computes it
    pub(crate) unsafe fn keep(&self, row: usize, part: usize, out: &[f32], shift: f32, sum: f32) {
        // SAFETY: by the caller's guarantee.
        let kept = unsafe { self.rows.row(row, part, 0) };
        kept[..HEAD].copy_from_slice(&[shift, sum]);
        kept[HEAD..].copy_from_slice(out);
    }
}

/// Merges the parts of one row into the first part. Returns O before normalisation, the shift and the sum of
/// the weights.
pub(crate) fn join(row: &mut [f32], parts: usize) -> (&[f32], f32, f32) {
    let (first, others) = row.split_at_mut(row.len() / parts);
    for other in others.chunks_exact(first.len()) {
        // A part without mass has no shift, and its O has no meaning.
        if other[1] == 0.0 {
            continue;
        }
        if first[1] == 0.0 {
            first.copy_from_slice(other);
            continue;
        }
        let shift = first[0].max(other[0]);
        let [ours, theirs] = [first[0], other[0]].map(|x| f64::from(x - shift).exp2() as f32);
        first[0] = shift;
        for (x, y) in first[1..].iter_mut().zip(&other[1..]) {
            *x = *x * ours + y * theirs;
        }
    }
    (&first[HEAD..], first[0], first[1])
}
