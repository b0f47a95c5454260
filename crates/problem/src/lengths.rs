//! Sequence lengths that differ between batch entries.

use serde::{Deserialize, Serialize};

use crate::{Problem, ProblemError};

/// How the rows of one side, the queries or the keys and values, belong to batch entries.
///
/// Without either field, every batch entry has all rows of the tensor. The values of the arrays are operands
/// of a call ([`Operands`](crate::Operands)); they lie on the device and never change the code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SideLengths {
    /// The sequences of all batch entries follow each other in a tensor of this many rows, without padding:
    /// extents `[1, heads, packed, dim]`. An array of `batch + 1` cumulative lengths (`cu_seqlens`) gives the
    /// first row of each sequence and the end of the last. The batch stride is not used. `None` means that
    /// each batch entry has rows of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<usize>,
    /// An array of `batch` lengths (`seqused`) gives the number of rows that are used of each sequence, from
    /// its first row on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub used: bool,
}

impl SideLengths {
    /// Whether every batch entry has all rows.
    pub const fn is_even(self) -> bool {
        self.packed.is_none() && !self.used
    }
}

/// The lengths of a problem. `Problem::seq_q` and `Problem::seq_kv` are upper bounds where lengths differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lengths {
    /// Lengths of the queries and the output.
    #[serde(default, skip_serializing_if = "is_default")]
    pub q: SideLengths,
    /// Lengths of the keys and values.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv: SideLengths,
    /// An array of `batch` numbers of padding rows before the first key of each sequence (`leftpad_k`).
    /// These rows count in the used length, as in FlashAttention-3, but are not keys.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_padded: bool,
}

fn is_default(side: &SideLengths) -> bool {
    *side == SideLengths::default()
}

impl Lengths {
    /// Every batch entry has all rows of its tensors.
    pub const EVEN: Lengths = Lengths {
        q: SideLengths { packed: None, used: false },
        kv: SideLengths { packed: None, used: false },
        left_padded: false,
    };

    /// Whether every batch entry has all rows of its tensors.
    pub const fn is_even(&self) -> bool {
        self.q.is_even() && self.kv.is_even() && !self.left_padded
    }
}

/// The rows of one batch entry on one side: `start..start + len` of the tensor's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The tensor's batch index: 0 if the tensor is packed.
    pub batch: usize,
    /// The first row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
}

/// The rows of one batch entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Rows of Q and O.
    pub q: Span,
    /// Rows of K and V.
    pub kv: Span,
}

/// Values of the arrays of lengths. An array that the problem does not have is empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct LengthValues<'a> {
    /// `batch + 1` cumulative lengths of packed queries.
    pub cumulative_q: &'a [i32],
    /// `batch + 1` cumulative lengths of packed keys.
    pub cumulative_kv: &'a [i32],
    /// `batch` used lengths of the queries.
    pub used_q: &'a [i32],
    /// `batch` used lengths of the keys.
    pub used_kv: &'a [i32],
    /// `batch` numbers of padding rows before the first key.
    pub left_pad: &'a [i32],
}

impl Problem {
    /// The rows of each batch entry.
    ///
    /// Values that reach outside a tensor are cut to it, as kernels cut them: with `n` rows in the tensor,
    /// a cumulative length becomes `min(max(c, 0), n)`, and a length `min(max(length, 0), seq, rows left)`.
    ///
    /// # Errors
    /// [`ProblemError::Lengths`] if an array has the wrong number of elements.
    pub fn sequences(&self, values: &LengthValues<'_>) -> Result<Vec<Sequence>, ProblemError> {
        let Lengths { q, kv, left_padded } = self.lengths;
        let batch = self.batch;
        for (argument, array, expected) in [
            ("cu_seqlens_q", values.cumulative_q, if q.packed.is_some() { batch + 1 } else { 0 }),
            ("cu_seqlens_k", values.cumulative_kv, if kv.packed.is_some() { batch + 1 } else { 0 }),
            ("seqused_q", values.used_q, if q.used { batch } else { 0 }),
            ("seqused_k", values.used_kv, if kv.used { batch } else { 0 }),
            ("leftpad_k", values.left_pad, if left_padded { batch } else { 0 }),
        ] {
            if array.len() != expected {
                return Err(ProblemError::Lengths { argument, len: array.len(), expected });
            }
        }
        let of_batch = |b: usize| {
            let rows_q = span(b, q, self.seq_q, values.cumulative_q, values.used_q);
            let mut rows_kv = span(b, kv, self.seq_kv, values.cumulative_kv, values.used_kv);
            if left_padded {
                let padding = cut(values.left_pad[b], rows_kv.len);
                rows_kv.start += padding;
                rows_kv.len -= padding;
            }
            Sequence { q: rows_q, kv: rows_kv }
        };
        Ok((0..batch).map(of_batch).collect())
    }
}

/// The rows of batch entry `b` on one side.
fn span(b: usize, side: SideLengths, seq: usize, cumulative: &[i32], used: &[i32]) -> Span {
    let (batch, start, len) = match side.packed {
        None => (b, 0, seq),
        Some(rows) => {
            let start = cut(cumulative[b], rows);
            (0, start, cut(cumulative[b + 1], rows).saturating_sub(start).min(seq))
        }
    };
    Span { batch, start, len: if side.used { cut(used[b], len) } else { len } }
}

/// `n` cut to `0..=limit`.
fn cut(n: i32, limit: usize) -> usize {
    usize::try_from(n).unwrap_or(0).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn values_outside_the_tensor_are_cut() {
        let mut p = Problem::new(3, 1, 8, 16, DType::F16);
        p.lengths.q = SideLengths { packed: Some(20), used: true };
        p.lengths.kv.used = true;
        p.lengths.left_padded = true;
        let values = LengthValues {
            cumulative_q: &[-4, 5, 19, 1000],
            used_q: &[7, 100, -1],
            used_kv: &[3, 9, 0],
            left_pad: &[1, 100, -1],
            ..LengthValues::default()
        };
        let spans: Vec<_> = p.sequences(&values).unwrap();
        let q: Vec<_> = spans.iter().map(|s| (s.q.start, s.q.len)).collect();
        let kv: Vec<_> = spans.iter().map(|s| (s.kv.batch, s.kv.start, s.kv.len)).collect();
        assert_eq!(q, [(0, 5), (5, 8), (19, 0)]);
        assert_eq!(kv, [(0, 1, 2), (1, 8, 0), (2, 0, 0)]);
        let short = LengthValues { used_q: &[1], ..values };
        let refused = p.sequences(&short).unwrap_err().to_string();
        assert_eq!(refused, "invalid value '1' for the number of elements of seqused_q: expected 3");
    }
}
