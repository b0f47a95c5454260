//! C (+)= A · B for a panel: B and C are a few vectors wide, A is read one number at a time.
#![allow(unsafe_code)] // bounds are asserted once a call, not once a multiplication

use super::Simd;

/// Where element (row, k) of A is.
pub(crate) trait Lhs: Copy {
    /// The elements.
    fn data(&self) -> &[f32];
    /// Index of element (row, k).
    fn index(&self, row: usize, k: usize) -> usize;
}

/// A row-major, `ld` elements from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub data: &'a [f32],
    pub ld: usize,
}

/// A column-major, `ld` elements from column to column.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    pub data: &'a [f32],
    pub ld: usize,
}

impl Lhs for Rows<'_> {
    #[inline(always)]
    fn data(&self) -> &[f32] {
        self.data
    }
    #[inline(always)]
    fn index(&self, row: usize, k: usize) -> usize {
        row * self.ld + k
    }
}

impl Lhs for Columns<'_> {
    #[inline(always)]
    fn data(&self) -> &[f32] {
        self.data
    }
    #[inline(always)]
    fn index(&self, row: usize, k: usize) -> usize {
        k * self.ld + row
    }
}

/// What a multiplication is, and what becomes of the sums, which start at zero.
pub(crate) trait Product<S: Simd>: Copy {
    /// `a · b + sum`
    fn add(self, s: S, a: S::V, b: S::V, sum: S::V) -> S::V;
    /// What C becomes in vector `v` of a row, where it is `old`.
    fn finish(self, s: S, sum: S::V, old: S::V, v: usize) -> S::V;
}

/// C = A · B in f32.
#[derive(Clone, Copy)]
pub(crate) struct Fresh;

/// C += A · B in f32. A · B is summed for itself: one chain through all blocks of keys would err more.
#[derive(Clone, Copy)]
pub(crate) struct Added;

impl<S: Simd> Product<S> for Fresh {
    #[inline(always)]
    fn add(self, s: S, a: S::V, b: S::V, sum: S::V) -> S::V {
        s.fma(a, b, sum)
    }
    #[inline(always)]
    fn finish(self, _: S, sum: S::V, _: S::V, _: usize) -> S::V {
        sum
    }
}

impl<S: Simd> Product<S> for Added {
    #[inline(always)]
    fn add(self, s: S, a: S::V, b: S::V, sum: S::V) -> S::V {
        s.fma(a, b, sum)
    }
    #[inline(always)]
    fn finish(self, s: S, sum: S::V, old: S::V, _: usize) -> S::V {
        s.add(old, sum)
    }
}

/// C = A · B, or what `product` makes of it, with `m` rows of A and C and `k` rows of B; B and C are `VECTORS` vectors wide and dense.
#[inline(always)]
pub(crate) fn gemm<S: Simd, P: Product<S>, A: Lhs, const VECTORS: usize>(
    s: S,
    product: P,
    a: A,
    b: &[f32],
    c: &mut [f32],
    [m, k]: [usize; 2],
) {
    let width = VECTORS * S::LANES;
    assert!(m == 0 || k == 0 || a.index(m - 1, k - 1) < a.data().len());
    assert!(k * width <= b.len() && m * width <= c.len());
    let tall = if VECTORS == S::MAX_VECTORS { S::WIDE_ROWS } else { 8 };
    let mut row = 0;
    while row < m {
        let rows = (m - row).min(tall);
        // SAFETY: the assertions cover every index below (m, k) of the three matrices.
        unsafe {
            match rows {
                8 if tall >= 8 => tile::<S, P, A, 8, VECTORS>(s, product, a, b, c, row, k),
                7 if tall >= 7 => tile::<S, P, A, 7, VECTORS>(s, product, a, b, c, row, k),
                6 => tile::<S, P, A, 6, VECTORS>(s, product, a, b, c, row, k),
                5 => tile::<S, P, A, 5, VECTORS>(s, product, a, b, c, row, k),
                4 => tile::<S, P, A, 4, VECTORS>(s, product, a, b, c, row, k),
                3 => tile::<S, P, A, 3, VECTORS>(s, product, a, b, c, row, k),
                2 => tile::<S, P, A, 2, VECTORS>(s, product, a, b, c, row, k),
                _ => tile::<S, P, A, 1, VECTORS>(s, product, a, b, c, row, k),
            }
        }
        row += rows;
    }
}

/// `ROWS × VECTORS` vectors of C, held in registers.
///
/// # Safety
/// `row + ROWS` rows of A and C and `k` rows of B must exist.
#[inline(always)]
unsafe fn tile<S: Simd, P: Product<S>, A: Lhs, const ROWS: usize, const VECTORS: usize>(
    s: S,
    product: P,
    a: A,
    b: &[f32],
    c: &mut [f32],
    row: usize,
    k: usize,
) {
    let width = VECTORS * S::LANES;
    let (a_data, c) = (a.data().as_ptr(), c[row * width..].as_mut_ptr());
    // SAFETY: the caller's promise, for this and the loads and stores below.
    let at = |p: *const f32, i: usize| unsafe { std::slice::from_raw_parts(p.add(i), S::LANES) };
    let mut acc = [[s.splat(0.0); VECTORS]; ROWS];
    let mut b = b.as_ptr();
    for kk in 0..k {
        let mut line = [s.splat(0.0); VECTORS];
        for (v, line) in line.iter_mut().enumerate() {
            *line = s.load(at(b, v * S::LANES));
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row + r is below m and kk below k.
            let x = s.splat(unsafe { *a_data.add(a.index(row + r, kk)) });
            for (acc, &line) in acc.iter_mut().zip(&line) {
                *acc = product.add(s, x, line, *acc);
            }
        }
        // SAFETY: at most one past the end of B.
        b = unsafe { b.add(width) };
    }
    for (r, acc) in acc.iter().enumerate() {
        for (v, &acc) in acc.iter().enumerate() {
            // SAFETY: row r of this tile of C.
            let to = unsafe { std::slice::from_raw_parts_mut(c.add(r * width + v * S::LANES), S::LANES) };
            s.store(product.finish(s, acc, s.load(to), v), to);
        }
    }
}
