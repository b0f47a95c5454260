//! What tasks find on parts of the keys, and how it becomes an output.

use problem::{Problem, Strides};

use crate::output::OutputRows;

/// Unfinished rows: for each row and part the sum of its weights, what was subtracted in their exponents, and O before
/// normalisation.
pub(crate) struct Parts<'a> {
    rows: OutputRows<'a, f32>,
}

/// Numbers of a part of a row beside O.
const HEAD: usize = 2;

/// f32 numbers that the unfinished rows of a problem take.
pub(crate) fn room(problem: &Problem, parts: usize) -> Vec<f32> {
    vec![0.0; problem.batch * problem.heads_q * problem.seq_q * parts * (HEAD + problem.head_dim_v)]
}

impl<'a> Parts<'a> {
    /// Takes over [`room`] for as many parts.
    pub(crate) fn new(problem: &Problem, parts: usize, room: &'a mut [f32]) -> Parts<'a> {
        let len = (HEAD + problem.head_dim_v) as i64;
        let strides = Strides { batch: len * parts as i64, head: len, row: 0 };
        Parts { rows: OutputRows::new(room, 0, strides, len as usize) }
    }

    /// Keeps what was found on one part of the `row`-th row of all.
    ///
    /// # Safety
    /// No two calls with the same row and part at once.
    #[allow(unsafe_code)] // each part of a row is written by the one task that computes it
    pub(crate) unsafe fn keep(&self, row: usize, part: usize, out: &[f32], shift: f32, sum: f32) {
        // SAFETY: the caller's promise.
        let kept = unsafe { self.rows.row(row, part, 0) };
        kept[..HEAD].copy_from_slice(&[shift, sum]);
        kept[HEAD..].copy_from_slice(out);
    }
}

/// Puts the parts of one row together, in the first one: its shift, and the sum of its weights.
pub(crate) fn join(row: &mut [f32], parts: usize) -> (&[f32], f32, f32) {
    let (first, others) = row.split_at_mut(row.len() / parts);
    for other in others.chunks_exact(first.len()) {
        // Without mass a part has no shift, and its O means nothing.
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
