//! The inner loops of standard attention and of its gradients, compiled for the vector instructions of the
//! processor, without fused multiply-adds: the bits of a sum do not depend on the instructions. In the
//! forward pass, a vector holds the query rows of a block, and each row is summed in the order of the
//! dimensions, or of the keys.

use std::ops::{Add, Mul};

use pulp::{Arch, Simd, WithSimd};

use crate::LANES;

/// Number of keys whose sums are computed in parallel, so that an addition does not wait for the previous
/// one.
const KEYS: usize = 4;

/// Number of columns of the values whose sums stay in registers, for the same reason.
const COLUMNS: usize = 4;

/// Number of keys whose weights stay in the first cache for all columns.
const BLOCK: usize = 128;

/// A number of the loops.
pub(crate) trait Real: Copy + Default + Add<Output = Self> + Mul<Output = Self> {}

impl<T: Copy + Default + Add<Output = T> + Mul<Output = T>> Real for T {}

/// For each key, dense rows of as many numbers as `query` has, the products with the rows of the block.
pub(crate) fn dot_products<R: Real>(query: &[[R; LANES]], keys: &[R]) -> Vec<[R; LANES]> {
    let mut sums = vec![[R::default(); LANES]; keys.len() / query.len().max(1)];
    Arch::new().dispatch(Dots { query, keys, sums: &mut sums });
    sums
}

/// Adds the values of keys times their weights to `acc`, which has as many elements as a row of `values`.
pub(crate) fn add_weighted<R: Real>(acc: &mut [[R; LANES]], weights: &[[R; LANES]], values: &[R]) {
    Arch::new().dispatch(Weighted { acc, weights, values });
}

/// The sum of the products of two rows of equal length, and the sum of their squares. Each is the sum of
/// eight sums, of every eighth product.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> [f64; 2] {
    Arch::new().dispatch(Dot { a, b })
}

/// Adds to the sums of a row of a gradient: to the values `factor` times the row, to the variances `variance`
/// times its squares, and the squares and the number of the terms.
pub(crate) fn add_row(sums: [&mut [f64]; 4], [factor, variance]: [f64; 2], row: &[f64]) {
    Arch::new().dispatch(AddRow { sums, factor, variance, row });
}

struct Dot<'a> {
    a: &'a [f64],
    b: &'a [f64],
}

impl WithSimd for Dot<'_> {
    type Output = [f64; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> [f64; 2] {
        let ((a, rest_of_a), (b, rest_of_b)) = (self.a.as_chunks::<8>(), self.b.as_chunks::<8>());
        let (mut sums, mut squares) = ([0.0; 8], [0.0; 8]);
        for (a, b) in a.iter().zip(b) {
            for lane in 0..8 {
                let product = a[lane] * b[lane];
                sums[lane] += product;
                squares[lane] += product * product;
            }
        }
        for (lane, (a, b)) in rest_of_a.iter().zip(rest_of_b).enumerate() {
            let product = a * b;
            sums[lane] += product;
            squares[lane] += product * product;
        }
        [sums.iter().sum(), squares.iter().sum()]
    }
}

struct AddRow<'a> {
    sums: [&'a mut [f64]; 4],
    factor: f64,
    variance: f64,
    row: &'a [f64],
}

impl WithSimd for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let AddRow { sums: [values, variances, squares, terms], factor, variance, row } = self;
        let sums = values.iter_mut().zip(variances).zip(squares.iter_mut().zip(terms));
        for (((value, sum_of_variances), (squares, terms)), &x) in sums.zip(row) {
            let term = factor * x;
            *value += term;
            *sum_of_variances += variance * x * x;
            *squares += term * term;
            *terms += 1.0;
        }
    }
}

/// The arguments are a struct: unlike a closure, its method is certain to be compiled for the chosen
/// instructions.
struct Dots<'a, R> {
    query: &'a [[R; LANES]],
    keys: &'a [R],
    sums: &'a mut [[R; LANES]],
}

impl<R: Real> WithSimd for Dots<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let dim = self.query.len();
        if dim == 0 {
            return;
        }
        for (keys, sums) in self.keys.chunks(KEYS * dim).zip(self.sums.chunks_mut(KEYS)) {
            match sums {
                [s0, s1, s2, s3] => {
                    let (first, second) = keys.split_at(2 * dim);
                    let ((k0, k1), (k2, k3)) = (first.split_at(dim), second.split_at(dim));
                    // Local variables stay in registers. The compiler would have to assume that memory
                    // overlaps the query.
                    let [mut a, mut b, mut c, mut d] = [[R::default(); LANES]; KEYS];
                    for ((((q, &x0), &x1), &x2), &x3) in self.query.iter().zip(k0).zip(k1).zip(k2).zip(k3) {
                        for lane in 0..LANES {
                            a[lane] = a[lane] + q[lane] * x0;
                            b[lane] = b[lane] + q[lane] * x1;
                            c[lane] = c[lane] + q[lane] * x2;
                            d[lane] = d[lane] + q[lane] * x3;
                        }
                    }
                    (*s0, *s1, *s2, *s3) = (a, b, c, d);
                }
                sums => {
                    for (key, sum) in keys.chunks_exact(dim).zip(sums) {
                        for (q, &x) in self.query.iter().zip(key) {
                            for lane in 0..LANES {
                                sum[lane] = sum[lane] + q[lane] * x;
                            }
                        }
                    }
                }
            }
        }
    }
}

struct Weighted<'a, R> {
    acc: &'a mut [[R; LANES]],
    weights: &'a [[R; LANES]],
    values: &'a [R],
}

impl<R: Real> WithSimd for Weighted<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let dim = self.acc.len();
        if dim == 0 {
            return;
        }
        for (weights, values) in self.weights.chunks(BLOCK).zip(self.values.chunks(BLOCK * dim)) {
            let mut column = 0;
            for acc in self.acc.chunks_mut(COLUMNS) {
                match acc {
                    [s0, s1, s2, s3] => {
                        let [mut a, mut b, mut c, mut d] = [*s0, *s1, *s2, *s3];
                        for (weight, row) in weights.iter().zip(values.chunks_exact(dim)) {
                            let [x0, x1, x2, x3] = row[column..column + COLUMNS] else { break };
                            for lane in 0..LANES {
                                a[lane] = a[lane] + weight[lane] * x0;
                                b[lane] = b[lane] + weight[lane] * x1;
                                c[lane] = c[lane] + weight[lane] * x2;
                                d[lane] = d[lane] + weight[lane] * x3;
                            }
                        }
                        (*s0, *s1, *s2, *s3) = (a, b, c, d);
                    }
                    acc => {
                        for (weight, row) in weights.iter().zip(values.chunks_exact(dim)) {
                            for (acc, &x) in acc.iter_mut().zip(&row[column..]) {
                                for lane in 0..LANES {
                                    acc[lane] = acc[lane] + weight[lane] * x;
                                }
                            }
                        }
                    }
                }
                column += COLUMNS;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums have the same bits as loops in order, for every number of keys, also those that are not a
    /// multiple of [`KEYS`].
    #[test]
    fn sums_are_made_in_order() {
        let number = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 333.0 - 1.5;
        for keys in (0..10).chain([131]) {
            let (dim, wide) = (5, 7);
            let query: Vec<[f32; LANES]> =
                (0..dim).map(|d| std::array::from_fn(|lane| number(d * LANES + lane))).collect();
            let rows: Vec<f32> = (0..keys * dim).map(number).collect();
            let found = dot_products(&query, &rows);
            for (key, sums) in found.iter().enumerate() {
                for (lane, &sum) in sums.iter().enumerate() {
                    let terms = (0..dim).map(|d| query[d][lane] * rows[key * dim + d]);
                    assert_eq!(sum, terms.fold(0.0, |sum, term| sum + term));
                }
            }
            let values: Vec<f32> = (0..keys * wide).map(|i| number(i + 5)).collect();
            let mut acc = vec![[0.25f32; LANES]; wide];
            add_weighted(&mut acc, &found, &values);
            for (d, acc) in acc.iter().enumerate() {
                for (lane, &sum) in acc.iter().enumerate() {
                    let terms = (0..keys).map(|key| found[key][lane] * values[key * wide + d]);
                    assert_eq!(sum, terms.fold(0.25, |sum, term| sum + term));
                }
            }
        }
    }
}
