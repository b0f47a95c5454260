//! Ridge regression: least squares with a penalty on the weights, for a few dozen features.

/// A fit of `y ≈ features · weights`, with the residuals by which it is judged.
#[derive(Clone, Debug, PartialEq)]
pub struct Ridge<const N: usize> {
    weights: [f64; N],
    /// The residual of each row, computed as if the row had not been part of the fit.
    pub left_out: Vec<f64>,
}

impl<const N: usize> Ridge<N> {
    /// Fits rows of features and values. The first feature, which is the constant 1, has no penalty.
    pub fn fit(rows: &[([f64; N], f64)], penalty: f64) -> Ridge<N> {
        let mut normal = [[0.0; N]; N];
        let mut right = [0.0; N];
        for (features, y) in rows {
            for (i, x) in features.iter().enumerate() {
                right[i] += x * y;
                for (sum, other) in normal[i].iter_mut().zip(features) {
                    *sum += x * other;
                }
            }
        }
        for (i, row) in normal.iter_mut().enumerate() {
            row[i] += if i == 0 { 1e-6 } else { penalty };
        }
        let inverse = inverse(normal);
        let weights = times(&inverse, &right);
        // A row's leverage says how strongly the row influences the fit at its own position.
        let left_out = rows.iter().map(|(features, y)| {
            let leverage = dot(features, &times(&inverse, features));
            (y - dot(features, &weights)) / (1.0 - leverage).max(0.05)
        });
        let left_out = left_out.collect();
        Ridge { weights, left_out }
    }

    /// The value for some features.
    pub fn at(&self, features: &[f64; N]) -> f64 {
        dot(features, &self.weights)
    }
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn times<const N: usize>(matrix: &[[f64; N]; N], vector: &[f64; N]) -> [f64; N] {
    std::array::from_fn(|i| dot(&matrix[i], vector))
}

/// The inverse of a positive definite matrix, by Gauss and Jordan. Such a matrix needs no pivots.
fn inverse<const N: usize>(mut matrix: [[f64; N]; N]) -> [[f64; N]; N] {
    let mut inverse: [[f64; N]; N] = std::array::from_fn(|i| std::array::from_fn(|j| f64::from(i == j)));
    for pivot in 0..N {
        let scale = 1.0 / matrix[pivot][pivot];
        for j in 0..N {
            matrix[pivot][j] *= scale;
            inverse[pivot][j] *= scale;
        }
        let rows = (matrix[pivot], inverse[pivot]);
        for i in (0..N).filter(|&i| i != pivot) {
            let factor = matrix[i][pivot];
            for j in 0..N {
                matrix[i][j] -= factor * rows.0[j];
                inverse[i][j] -= factor * rows.1[j];
            }
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of y = 2 + 3 a - b with an alternating disturbance.
    fn rows(count: usize, disturbance: f64) -> Vec<([f64; 3], f64)> {
        let row = |i: usize| {
            let (a, b) = ((i * 7 % 5) as f64, (i * 3 % 4) as f64);
            ([1.0, a, b], 2.0 + 3.0 * a - b + if i.is_multiple_of(2) { disturbance } else { -disturbance })
        };
        (0..count).map(row).collect()
    }

    #[test]
    fn a_law_is_found_and_residuals_are_those_of_new_rows() {
        let fit = Ridge::fit(&rows(40, 0.0), 1e-9);
        assert!((fit.at(&[1.0, 2.0, 5.0]) - 3.0).abs() < 1e-4 && fit.left_out.iter().all(|r| r.abs() < 1e-4));
        let all = rows(20, 0.3);
        let fit = Ridge::fit(&all, 0.5);
        for (i, left_out) in fit.left_out.iter().enumerate() {
            let others: Vec<_> =
                all.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, row)| *row).collect();
            let without = all[i].1 - Ridge::fit(&others, 0.5).at(&all[i].0);
            assert!((left_out - without).abs() < 1e-4, "{left_out} {without}");
        }
    }

    #[test]
    fn features_without_variation_have_no_weight() {
        let rows: Vec<([f64; 3], f64)> = (0..8).map(|i| ([1.0, 0.0, i as f64], i as f64)).collect();
        let fit = Ridge::fit(&rows, 1.0);
        assert!((fit.at(&[1.0, 9.0, 3.0]) - fit.at(&[1.0, 0.0, 3.0])).abs() < 1e-9);
        assert_eq!(Ridge::<3>::fit(&[], 1.0).at(&[1.0, 1.0, 1.0]), 0.0);
    }
}
