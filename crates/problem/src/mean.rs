//! The mean of the rows of a head, in an order of sums that CPU and GPU share.

/// Elements of the strands of a part, at most.
const ELEMENTS: usize = 4096;
/// Strands have rows whose elements are counted in multiples of this.
const UNIT: usize = 16;
/// Rows of a part, at least.
const ROWS: usize = 256;

/// The mean of the rows of a head, column by column.
///
/// Sums are in f32. The rows are divided into [`parts`](Mean::parts) of neighbours. In a part, strand `s`
/// adds rows `s`, `s + strands`, `s + 2 · strands` and so on; the part then adds its strands in order, and
/// the head adds its parts in order. Every implementation adds in this order, so that results agree to the
/// last bit.
///
/// Elements are multiplied by a [power of two](Mean::scale) before they are added, which keeps sums of finite
/// elements finite. A column with a NaN, or with infinities of both signs, has the mean NaN; a column with
/// infinities of one sign has this infinity as its mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mean {
    rows: usize,
    dim: usize,
}

impl Mean {
    /// Parts of a head, at most.
    pub const PARTS: usize = 32;

    /// The mean of `rows` rows with `dim` elements.
    pub const fn new(rows: usize, dim: usize) -> Mean {
        Mean { rows, dim }
    }

    /// Rows of a part; the last part may have fewer.
    pub fn part(&self) -> usize {
        self.rows.div_ceil(Mean::PARTS).max(ROWS)
    }

    /// Parts of the head; 1 without rows.
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part()).max(1)
    }

    /// Strands of a part.
    pub fn strands(&self) -> usize {
        (ELEMENTS / self.dim.next_multiple_of(UNIT).max(UNIT)).max(1)
    }

    /// The multiplier of elements: a power of two, at most half of the reciprocal of the number of rows.
    pub fn scale(&self) -> f32 {
        (2.0 * self.rows.max(1).next_power_of_two() as f32).recip()
    }

    /// The multiplier of the sum of multiplied elements.
    pub fn factor(&self) -> f32 {
        self.scale().recip() / self.rows.max(1) as f32
    }

    /// The mean of the rows of a head, which `all` contains one after the other.
    pub fn of(&self, all: &[f32]) -> Vec<f32> {
        let parts = all.chunks((self.part() * self.dim).max(1));
        self.of_parts(parts.map(|part| {
            let mut strands = self.no_rows();
            part.chunks(strands.len().max(1)).for_each(|rows| self.add(&mut strands, rows));
            strands
        }))
    }

    /// The strands of a part before any row is added.
    pub fn no_rows(&self) -> Vec<f32> {
        vec![0.0; self.strands() * self.dim]
    }

    /// Adds the next rows of a part to its strands: as many as there are strands, or the last ones.
    pub fn add(&self, strands: &mut [f32], rows: &[f32]) {
        let scale = self.scale();
        strands.iter_mut().zip(rows).for_each(|(sum, x)| *sum += x * scale);
    }

    /// The mean, from the strands of all parts in their order.
    pub fn of_parts(&self, parts: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
        let add = |sums: &mut [f32], row: &[f32]| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        let mut total = vec![0.0; self.dim];
        for strands in parts {
            let mut sums = vec![0.0; self.dim];
            strands.chunks_exact(self.dim.max(1)).for_each(|strand| add(&mut sums, strand));
            add(&mut total, &sums);
        }
        total.iter().map(|sum| sum * self.factor()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws around a mean that differs from column to column.
    fn draws(rows: usize, dim: usize) -> Vec<f32> {
        let mut state = 7u64;
        let next = |i: usize| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 40) as f32 / (1u32 << 24) as f32 + (i % dim) as f32 / 3.0
        };
        (0..rows * dim).map(next).collect()
    }

    /// The error is at most a rounding error for each sum that an element enters.
    #[test]
    fn means_are_those_of_f64() {
        for (rows, dim) in [(1, 16), (3, 48), (255, 128), (257, 80), (1000, 576), (9000, 64), (70, 5)] {
            let (all, mean) = (draws(rows, dim), Mean::new(rows, dim));
            let depth = mean.part().div_ceil(mean.strands()) + mean.strands() + mean.parts() + 2;
            for (column, &found) in mean.of(&all).iter().enumerate() {
                let of_column = || all.iter().skip(column).step_by(dim).map(|&x| f64::from(x));
                let (sum, size): (f64, f64) = (of_column().sum(), of_column().map(f64::abs).sum());
                let bound = depth as f64 * f64::from(f32::EPSILON) / 2.0 * size / rows as f64;
                let off = (f64::from(found) - sum / rows as f64).abs();
                assert!(off <= bound, "{rows} × {dim}, column {column}: off by {off:e}, bound {bound:e}");
            }
        }
    }

    #[test]
    fn large_numbers_do_not_overflow_and_infinities_stay() {
        let (rows, dim) = (1000, 16);
        let mut all = vec![3.4e38f32; rows * dim];
        (all[1], all[2], all[3], all[dim + 3]) = (f32::NAN, f32::INFINITY, f32::INFINITY, f32::NEG_INFINITY);
        let mean = Mean::new(rows, dim).of(&all);
        assert!((mean[0] / 3.4e38 - 1.0).abs() < 1e-5, "{}", mean[0]);
        assert!(mean[1].is_nan() && mean[2] == f32::INFINITY && mean[3].is_nan());
    }

    #[test]
    fn no_rows_have_the_mean_0() {
        let mean = Mean::new(0, 16);
        assert_eq!((mean.parts(), mean.of(&[])), (1, vec![0.0; 16]));
        assert!(Mean::new(0, 0).of(&[]).is_empty());
        let large = Mean::new(1 << 30, 128);
        assert_eq!((large.parts(), large.part(), large.factor()), (32, 1 << 25, 2.0));
    }
}
