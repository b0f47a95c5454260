//! Sequence lengths that differ between batch entries.

use serde::{Deserialize, Serialize};

use crate::{LengthArray, Operands, Problem, ProblemError};

/// How the rows of one side (queries, or keys and values) are distributed over the batch entries.
///
/// Without either field, every batch entry has all rows of the tensor. The array values are operands of a
/// call ([`Operands`](crate::Operands)): they lie in device memory, and kernels do not depend on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SideLengths {
    /// Number of rows of a packed tensor, in which the sequences of all batch entries follow each other
    /// without padding: extents `[1, heads, packed, dim]`. An array of `batch + 1` cumulative lengths
    /// (`cu_seqlens`) gives the first row of each sequence and the end of the last. The batch stride is not
    /// used. `None` means that the tensor is not packed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<usize>,
    /// Whether an array of `batch` lengths (`seqused`) limits each sequence to its first rows.
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
    /// Whether an array of `batch` numbers (`leftpad_k`) gives the padding rows before the first key of each
    /// sequence. The padding rows count towards the used length, as in FlashAttention-3, but are not keys.
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

/// The rows of one batch entry in one tensor: rows `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The tensor's batch index: 0 if the tensor is packed.
    pub batch: usize,
    /// The first row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
}

/// The rows of one batch entry in all tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Rows of Q and O.
    pub q: Span,
    /// Rows of K and V.
    pub kv: Span,
}

impl Problem {
    /// The rows of each batch entry.
    ///
    /// Values outside the tensor are clamped, as in the kernels: with `n` rows in the tensor, a cumulative
    /// length becomes `min(max(c, 0), n)`, and a length becomes `min(max(length, 0), seq, rows left)`.
    ///
    /// # Errors
    /// [`ProblemError::Lengths`] if an array has the wrong number of elements.
    pub fn sequences(&self, inputs: &Operands<'_>) -> Result<Vec<Sequence>, ProblemError> {
        for array in LengthArray::ALL {
            let (len, expected) = (inputs.lengths(array).len(), array.len(self).unwrap_or(0));
            if len != expected {
                return Err(ProblemError::Lengths { argument: array.name(), len, expected });
            }
        }
        let Lengths { q, kv, left_padded } = self.lengths;
        let [of_q, of_kv] = sides(inputs);
        let left_pad = inputs.lengths(LengthArray::LeftPad);
        let of_batch = |b: usize| {
            let rows_q = span(b, q, self.seq_q, of_q);
            let mut rows_kv = span(b, kv, self.seq_kv, of_kv);
            if left_padded {
                let padding = cut(left_pad[b], rows_kv.len);
                rows_kv.start += padding;
                rows_kv.len -= padding;
            }
            Sequence { q: rows_q, kv: rows_kv }
        };
        Ok((0..self.batch).map(of_batch).collect())
    }
}

impl Problem {
    /// Rejects lengths that are certainly mistakes: cumulative lengths that descend, lengths that exceed the
    /// tensor or the longest sequence, padding that exceeds its sequence, negative lengths, and, in a page
    /// table, entries that a sequence needs and that are no pages. This check is for values that the host can
    /// read; [`Problem::sequences`] and [`Pages::page`](crate::Pages::page) clamp all other values.
    ///
    /// # Errors
    /// [`ProblemError::Length`], [`ProblemError::Page`], and the errors of [`Problem::sequences`].
    pub fn check_length_values(&self, inputs: &Operands<'_>) -> Result<(), ProblemError> {
        self.sequences(inputs)?;
        let Lengths { q, kv, .. } = self.lengths;
        for (array, side, seq) in
            [(LengthArray::CumulativeQ, q, self.seq_q), (LengthArray::CumulativeKv, kv, self.seq_kv)]
        {
            check_cumulative(array.name(), inputs.lengths(array), side.packed.unwrap_or(0), seq)?;
        }
        for (array, most) in [
            (LengthArray::UsedQ, self.seq_q),
            (LengthArray::UsedKv, self.seq_kv),
            (LengthArray::LeftPad, self.seq_kv),
        ] {
            let (argument, lengths) = (array.name(), inputs.lengths(array));
            let fits = |&value: &i32| usize::try_from(value).is_ok_and(|n| n <= most);
            if let Some(index) = lengths.iter().position(|value| !fits(value)) {
                let (value, expected) = (lengths[index].to_string(), format!("0 to {most}"));
                return Err(ProblemError::Length { argument, index, value, expected });
            }
        }
        for (index, &value) in inputs.lengths(LengthArray::LeftPad).iter().enumerate() {
            let rows = span(index, kv, self.seq_kv, sides(inputs)[1]).len;
            if value as usize > rows {
                let expected = format!("0 to {rows}, the rows of the sequence, which include the padding");
                let value = value.to_string();
                return Err(ProblemError::Length { argument: "leftpad_k", index, value, expected });
            }
        }
        self.score.check_values(inputs)?;
        self.check_page_table(inputs)
    }
}

/// Rejects cumulative lengths that are negative, descend, exceed `rows` or differ by more than `longest`.
fn check_cumulative(
    argument: &'static str,
    cumulative: &[i32],
    rows: usize,
    longest: usize,
) -> Result<(), ProblemError> {
    let mut before = None;
    for (index, &value) in cumulative.iter().enumerate() {
        let least = before.unwrap_or(0);
        let most = before.map_or(rows, |before: i32| rows.min(before as usize + longest));
        if value < least || value as usize > most {
            let expected = match before {
                Some(before) if value < before => format!("at least the element before it, {before}"),
                Some(before) if value as usize <= rows => {
                    let bound = argument.replace("cu_seqlens", "max_seqlen");
                    format!("at most {most}: the element before it ({before}) plus {bound} ({longest})")
                }
                _ => format!("0 to {rows}, the rows of the tensor"),
            };
            let value = value.to_string();
            return Err(ProblemError::Length { argument, index, value, expected });
        }
        before = Some(value);
    }
    Ok(())
}

/// The cumulative and the used lengths of the queries and of the keys.
fn sides<'a>(inputs: &Operands<'a>) -> [[&'a [i32]; 2]; 2] {
    let q = [LengthArray::CumulativeQ, LengthArray::UsedQ];
    let kv = [LengthArray::CumulativeKv, LengthArray::UsedKv];
    [q, kv].map(|side| side.map(|array| inputs.lengths(array)))
}

/// The rows of batch entry `b` on one side.
fn span(b: usize, side: SideLengths, seq: usize, [cumulative, used]: [&[i32]; 2]) -> Span {
    let (batch, start, len) = match side.packed {
        None => (b, 0, seq),
        Some(rows) => {
            let start = cut(cumulative[b], rows);
            (0, start, cut(cumulative[b + 1], rows).saturating_sub(start).min(seq))
        }
    };
    Span { batch, start, len: if side.used { cut(used[b], len) } else { len } }
}

/// Clamps `n` to `0..=limit`.
fn cut(n: i32, limit: usize) -> usize {
    usize::try_from(n).unwrap_or(0).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Elements, Operand};

    #[test]
    fn values_outside_the_tensor_are_cut() {
        let mut p = Problem::new(3, 1, 8, 16, DType::F16);
        p.lengths.q = SideLengths { packed: Some(20), used: true };
        p.lengths.kv.used = true;
        p.lengths.left_padded = true;
        let of = |array, elements: &'static [i32]| (Operand::Lengths(array), Elements::I32(elements));
        let values: Operands<'_> = [
            of(LengthArray::CumulativeQ, &[-4, 5, 19, 1000]),
            of(LengthArray::UsedQ, &[7, 100, -1]),
            of(LengthArray::UsedKv, &[3, 9, 0]),
            of(LengthArray::LeftPad, &[1, 100, -1]),
        ]
        .into_iter()
        .collect();
        let spans: Vec<_> = p.sequences(&values).unwrap();
        let q: Vec<_> = spans.iter().map(|s| (s.q.start, s.q.len)).collect();
        let kv: Vec<_> = spans.iter().map(|s| (s.kv.batch, s.kv.start, s.kv.len)).collect();
        assert_eq!(q, [(0, 5), (5, 8), (19, 0)]);
        assert_eq!(kv, [(0, 1, 2), (1, 8, 0), (2, 0, 0)]);
        let refused = |values: &Operands<'_>| p.check_length_values(values).unwrap_err().to_string();
        let told = refused(&values);
        assert_eq!(told, "invalid value '-4' for cu_seqlens_q[0]: expected 0 to 20, the rows of the tensor");
        let with = |values: &Operands<'static>, array, elements: &'static [i32]| {
            values.clone().with(Operand::Lengths(array), elements)
        };
        let values = with(&values, LengthArray::UsedQ, &[7, 8, 0]);
        let values = with(&values, LengthArray::LeftPad, &[1, 2, 0]);
        for (cumulative_q, used_kv, told) in [
            (
                &[0, 5, 4, 9],
                &[3, 8, 0],
                "'4' for cu_seqlens_q[2]: expected at least the element before it, 5",
            ),
            (&[0, 5, 13, 21], &[3, 8, 0], "'21' for cu_seqlens_q[3]: expected 0 to 20, the rows"),
            (&[0, 5, 14, 20], &[3, 8, 0], "'14' for cu_seqlens_q[2]: expected at most 13: the element"),
            (&[0, 5, 13, 20], &[3, 9, 0], "'9' for seqused_k[1]: expected 0 to 8"),
            (&[0, 5, 13, 20], &[3, 8, -1], "'-1' for seqused_k[2]: expected 0 to 8"),
        ] {
            let wrong = with(&values, LengthArray::CumulativeQ, cumulative_q);
            let wrong = with(&wrong, LengthArray::UsedKv, used_kv);
            assert!(refused(&wrong).starts_with(&format!("invalid value {told}")), "{}", refused(&wrong));
        }
        let right = with(&values, LengthArray::CumulativeQ, &[0, 5, 13, 20]);
        let padded = with(&right, LengthArray::LeftPad, &[0, 6, 0]);
        let told = refused(&with(&padded, LengthArray::UsedKv, &[3, 3, 0]));
        let rows = "expected 0 to 3, the rows of the sequence, which include the padding";
        assert_eq!(told, format!("invalid value '6' for leftpad_k[1]: {rows}"));
        p.check_length_values(&with(&right, LengthArray::UsedKv, &[3, 8, 0])).unwrap();
        let refused = p.sequences(&with(&right, LengthArray::UsedQ, &[1])).unwrap_err().to_string();
        assert_eq!(refused, "invalid value '1' for the number of elements of seqused_q: expected 3");
    }
}
