//! Quantisation of Q, K and V to 8-bit floats: the options, and the arithmetic that CPU and GPU share.

use crate::{DType, Problem, ProblemError, ScaleLayout, Tensor};

/// How a tensor is quantised.
///
/// The factor of a block of rows is its largest finite magnitude divided by the largest number of the type,
/// so that this element becomes that number. A block of zeros has factor 1. NaN stays NaN, and infinities
/// become the largest number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// `E4m3` or `E5m2`.
    pub dtype: DType,
    /// Rows that share a factor: 64 or 128. `None` means one factor per KV head; Q's factors are shared by
    /// the query heads of a KV head.
    pub rows: Option<u32>,
    /// Rotates rows of Q and K by a Hadamard matrix with random signs, which this seed determines. The
    /// rotation spreads outliers over the head dim. It must be the same for Q and K: it is orthogonal, so it
    /// does not change their products. Its blocks have the size of the largest power of two that divides the
    /// head dim.
    pub hadamard: Option<u64>,
    /// Subtracts the [mean](crate::Mean) of the head's keys from each key, before the rotation. Every logit
    /// of a row changes by the same number, which does not affect the softmax; the LSE changes by that
    /// number. All rows of the head count. The mean is rounded to f32, and this rounding does not affect the
    /// softmax either. A column that contains a NaN, or infinities of both signs, becomes NaN in all rows of
    /// the head. A column with infinities of one sign becomes NaN in their rows, and infinite in the others.
    pub smooth_keys: bool,
}

impl Quantization {
    /// One factor per KV head, without rotation and smoothing.
    pub const fn per_head(dtype: DType) -> Quantization {
        Quantization { dtype, rows: None, hadamard: None, smooth_keys: false }
    }

    /// Rejects options that do not fit a tensor of a problem. Problems with lengths are rejected too, because
    /// the rows of a packed tensor belong to sequences that only the arrays of a call define.
    ///
    /// # Errors
    /// [`ProblemError::Quantization`], and what [`Problem::check`] returns.
    pub fn check(&self, problem: &Problem, tensor: Tensor) -> Result<(), ProblemError> {
        problem.check()?;
        let refuse =
            |option, value: String, accepted| Err(ProblemError::Quantization { option, value, accepted });
        if !self.dtype.is_fp8() {
            return refuse("dtype", self.dtype.to_string(), "e4m3 or e5m2");
        }
        if tensor == Tensor::Out {
            return refuse("tensor", "out".to_owned(), "q, k or v");
        }
        if let Some(rows) = self.rows.filter(|rows| ![64, 128].contains(rows)) {
            return refuse("rows", rows.to_string(), "64, 128, or one factor per KV head");
        }
        if !problem.lengths.is_even() {
            return refuse("lengths", "uneven".to_owned(), "equal lengths");
        }
        if problem.storage.pages().is_some() {
            return refuse("storage", "pages".to_owned(), "keys and values in rows");
        }
        let score = &problem.score;
        let changes = score.softcap.is_some() || score.sink || problem.programs.score.is_some();
        if self.smooth_keys && (changes || problem.pass.lse()) {
            let accepted = "false with a softcap, sinks, a score program or an LSE, which see the mean";
            return refuse("smooth_keys", "true".to_owned(), accepted);
        }
        Ok(())
    }

    /// The layout of a tensor's factors, dense.
    pub const fn layout(&self, problem: &Problem, tensor: Tensor) -> ScaleLayout {
        let [_, _, rows, _] = problem.extents(tensor);
        match self.rows {
            None => ScaleLayout::per_head(problem.heads_kv),
            Some(of_block) => ScaleLayout::per_block(problem.heads_kv, rows, of_block),
        }
    }

    /// The rotation of a tensor's rows; `None` if they keep their directions.
    pub fn rotation(&self, problem: &Problem, tensor: Tensor) -> Option<Rotation> {
        let [.., dim] = problem.extents(tensor);
        self.hadamard.filter(|_| tensor != Tensor::V).map(|seed| Rotation::new(seed, dim))
    }

    /// The descale factor of a block of rows, and the multiplier that turns its elements into codes. `most`
    /// is the largest finite magnitude before the elements are multiplied by `norm`.
    pub fn factor(&self, most: f32, norm: f32) -> [f32; 2] {
        let factor = most * norm / self.dtype.largest();
        // Below the normal numbers, the quotient has lost bits, and its reciprocal may be infinite.
        let factor = if factor >= f32::MIN_POSITIVE { factor } else { 1.0 };
        [factor, norm / factor]
    }
}

/// An orthogonal matrix: a diagonal of random signs, then a Hadamard matrix for each block of columns, then a
/// factor that normalises the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// A bit for each column, 32 to a word, the lowest first: whether its sign is negative.
    signs: Vec<u32>,
    block: usize,
}

impl Rotation {
    /// The rotation of rows with `dim` elements.
    pub fn new(seed: u64, dim: usize) -> Rotation {
        let mut state = seed;
        // SplitMix64 (Steele, Lea and Flood, 2014).
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        };
        let mut signs = vec![0; dim.div_ceil(32)];
        for column in 0..dim {
            signs[column / 32] |= (next() as u32 & 1) << (column % 32);
        }
        Rotation { signs, block: 1 << dim.trailing_zeros() }
    }

    /// Columns of a Hadamard matrix: the largest power of two that divides the number of elements of a row.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// The factor that normalises the Hadamard matrices.
    pub fn norm(&self) -> f32 {
        (self.block as f32).sqrt().recip()
    }

    /// A bit for each column, 32 to a word, the lowest first: whether its sign is negative.
    pub fn signs(&self) -> &[u32] {
        &self.signs
    }

    /// Rotates a row, without the factor [`Rotation::norm`].
    pub fn apply(&self, row: &mut [f32]) {
        self.flip(row);
        self.mix(row);
    }

    /// The first part of the rotation: changes the signs of columns.
    pub fn flip(&self, row: &mut [f32]) {
        for (column, x) in row.iter_mut().enumerate() {
            if self.signs[column / 32] >> (column % 32) & 1 == 1 {
                *x = -*x;
            }
        }
    }

    /// The second part of the rotation: multiplies blocks of columns by a Hadamard matrix. Sums are in f32,
    /// neighbours first; every implementation adds in this order, so that results agree to the last bit.
    pub fn mix(&self, row: &mut [f32]) {
        for block in row.chunks_exact_mut(self.block) {
            let mut half = 1;
            while half < self.block {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (a, b) = pair.split_at_mut(half);
                    for (a, b) in a.iter_mut().zip(b) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_orthogonal_and_has_both_signs() {
        for dim in [16, 48, 128, 80] {
            let rotation = Rotation::new(7, dim);
            let norm = rotation.norm();
            let column = |i: usize| {
                let mut row = vec![0.0; dim];
                row[i] = 1.0;
                rotation.apply(&mut row);
                row.iter().map(|x| x * norm).collect::<Vec<f32>>()
            };
            let columns: Vec<Vec<f32>> = (0..dim).map(column).collect();
            for (i, a) in columns.iter().enumerate() {
                for (j, b) in columns.iter().enumerate() {
                    let dot: f32 = a.iter().zip(b).map(|(x, y)| x * y).sum();
                    assert!((dot - f32::from(i == j)).abs() < 1e-5, "{dim}: {i} · {j} = {dot}");
                }
            }
            let negative: u32 = rotation.signs().iter().map(|word| word.count_ones()).sum();
            assert!((1..dim as u32).contains(&negative), "{dim}");
            assert_ne!(rotation.signs(), Rotation::new(8, dim).signs());
        }
    }

    #[test]
    fn a_factor_and_its_multiplier_never_lose_the_elements() {
        for dtype in [DType::E4m3, DType::E5m2] {
            let options = Quantization::per_head(dtype);
            assert_eq!(options.factor(0.0, 1.0), [1.0, 1.0]);
            assert_eq!(options.factor(2.0 * dtype.largest(), 1.0), [2.0, 0.5]);
            for most in [f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), 1.0, 3.3e-37] {
                for norm in [1.0, Rotation::new(0, 512).norm()] {
                    let [factor, multiplier] = options.factor(most, norm);
                    assert!(factor.is_normal() && multiplier.is_normal(), "{most} {norm}");
                    assert!(multiplier * most <= dtype.largest() * 1.0001, "{most} {norm}");
                }
            }
        }
    }
}
