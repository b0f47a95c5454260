//! Merging results of attention over different keys.

use cpu::Element;

use crate::AttentionError;
use crate::error::refused;

/// A result of attention over some of the keys: rows of O, and one LSE (natural logarithm) for each row.
pub type PartialResult<'a, T> = (&'a [T], &'a [f32]);

/// Merges results of the same query rows over different keys: `out` and `lse` become those of attention over
/// all of the keys. `dim` is the length of a row. Sums are f32 in the order of the parts, and are rounded
/// once. A part whose LSE is −∞ saw no key, and its row is not read. A row without keys in any part is 0, its
/// LSE −∞. A sink may be in at most one of the parts.
///
/// ```
/// let (all, none) = ([1.0f32, 2.0], [f32::NAN; 2]);
/// let (mut out, mut lse) = ([0.0f32; 2], [0.0f32; 1]);
/// let parts: [(&[f32], &[f32]); 3] = [(&all, &[0.5]), (&none, &[f32::NEG_INFINITY]), (&[3.0, 0.0], &[0.5])];
/// flashcore::merge_states(&parts, 2, &mut out, &mut lse)?;
/// assert_eq!(out, [2.0, 1.0]);
/// assert!((lse[0] - (0.5 + 2f32.ln())).abs() < 1e-6);
/// # Ok::<(), flashcore::AttentionError>(())
/// ```
///
/// # Errors
/// When a slice has not as many elements as `lse` has rows.
pub fn merge_states<T: Element>(
    parts: &[PartialResult<'_, T>],
    dim: usize,
    out: &mut [T],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    let rows = lse.len();
    let elements = rows.saturating_mul(dim);
    let check = |argument: &'static str, len: usize, needed: usize| {
        let (value, expected) = (len.to_string(), format!("{needed}, for {rows} rows of {dim} elements"));
        let wrong = refused(argument, "number of elements", value, expected);
        if len == needed { Ok(()) } else { Err(wrong) }
    };
    check("out", out.len(), elements)?;
    for (rows_of_part, lse_of_part) in parts {
        check("a part's rows", rows_of_part.len(), elements)?;
        check("a part's lse", lse_of_part.len(), rows)?;
    }
    merge_rows(parts, dim, out, lse, |row| row);
    Ok(())
}

/// [`merge_states`] on slices of the right lengths. The LSE of row `i` is element `lse_of_row(i)`.
pub(crate) fn merge_rows<T: Element>(
    parts: &[PartialResult<'_, T>],
    dim: usize,
    out: &mut [T],
    lse: &mut [f32],
    lse_of_row: impl Fn(usize) -> usize,
) {
    let mut sums = vec![0.0f32; dim];
    for row in 0..lse.len() {
        let at = lse_of_row(row);
        let largest = parts.iter().map(|(_, lse)| lse[at]).fold(f32::NEG_INFINITY, nan_or_max);
        sums.fill(0.0);
        let mut total = 0.0;
        for (values, lse) in parts.iter().filter(|(_, lse)| lse[at] != f32::NEG_INFINITY) {
            let weight = if lse[at] == largest { 1.0 } else { (lse[at] - largest).exp() };
            total += weight;
            for (sum, value) in sums.iter_mut().zip(&values[row * dim..][..dim]) {
                *sum += weight * value.to_f32();
            }
        }
        lse[at] = if total == 0.0 { f32::NEG_INFINITY } else { largest + total.ln() };
        let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
        T::narrow_scaled(&sums, factor, &mut out[row * dim..][..dim]);
    }
}

/// The larger number; NaN if one of them is NaN.
pub(crate) fn nan_or_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Band, Layout, Problem};

    /// Attention over keys that are cut at any places is the merged attention over the pieces.
    #[test]
    fn pieces_merge_to_the_whole() {
        let (heads, rows, keys, dim) = (2, 3, 11, 8);
        let number = |seed: usize| move |i: usize| ((i * 37 + seed * 101) % 64) as f32 / 16.0 - 2.0;
        let fill = |seed, rows: usize| (0..rows * heads * dim).map(number(seed)).collect::<Vec<f32>>();
        let (q, k, v) = (fill(1, rows), fill(2, keys), fill(3, keys));
        let attend = |from: usize, to: usize| {
            let mut problem = Problem::new(1, heads, rows, dim, crate::DType::F32).with_band(Band::FULL);
            problem.seq_kv = to - from;
            let problem = problem.with_layout(Layout::Bshd).with_lse(true);
            let (mut out, mut lse) = (vec![0.0; rows * heads * dim], vec![0.0; rows * heads]);
            let [k, v] = [&k, &v].map(|x| &x[from * heads * dim..to * heads * dim]);
            let plan = cpu::CpuPlan::for_problem(&problem);
            cpu::attention(&problem, &q, k, v, &mut out, Some(&mut lse), &plan).unwrap();
            // Rows of O are `[row, head]`, those of the LSE `[head, row]`.
            let lse = (0..rows * heads).map(|i| lse[i % heads * rows + i / heads]).collect::<Vec<f32>>();
            (out, lse)
        };
        let (whole, whole_lse) = attend(0, keys);
        for cuts in [vec![0, 11], vec![0, 5, 11], vec![0, 1, 1, 4, 10, 11]] {
            let pieces: Vec<_> = cuts.windows(2).map(|cut| attend(cut[0], cut[1])).collect();
            let parts: Vec<_> = pieces.iter().map(|(out, lse)| (&out[..], &lse[..])).collect();
            let (mut out, mut lse) = (vec![0.0f32; whole.len()], vec![0.0; whole_lse.len()]);
            merge_states(&parts, dim, &mut out, &mut lse).unwrap();
            let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
            assert!(out.iter().zip(&whole).all(near), "{cuts:?}: {out:?} {whole:?}");
            assert!(lse.iter().zip(&whole_lse).all(near), "{cuts:?}: {lse:?} {whole_lse:?}");
        }
    }

    #[test]
    fn rows_without_keys_are_zeros_and_slices_are_checked() {
        let (mut out, mut lse) = ([1.0f32; 4], [1.0f32; 2]);
        let none = [f32::NEG_INFINITY, f32::NAN];
        merge_states(&[(&[f32::NAN, f32::NAN, 1.0, 1.0], &none)], 2, &mut out, &mut lse).unwrap();
        assert_eq!((&out[..2], lse[0]), (&[0.0, 0.0][..], f32::NEG_INFINITY));
        assert!(out[2].is_nan() && lse[1].is_nan());
        merge_states(&[], 2, &mut out, &mut lse).unwrap();
        assert_eq!((out, lse), ([0.0; 4], [f32::NEG_INFINITY; 2]));
        let short = merge_states(&[(&[1.0; 3], &[0.0; 2])], 2, &mut out, &mut lse).unwrap_err().to_string();
        assert!(short.contains("'3' for the number of elements of a part's rows: expected 4"), "{short}");
    }
}
