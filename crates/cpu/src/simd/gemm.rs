//! C (+)= A · B for a panel: B and C are a few vectors wide, and A is read one number at a time.
#![allow(unsafe_code)] // bounds are asserted once a call, not once a multiplication

use super::Simd;

/// The position of element (row, k) of A.
///
/// # Safety
/// [`Lhs::index`] must not decrease as `row` or `k` grows, and a value's methods must always return the same
/// results: [`gemm_part`] checks the largest index only.
pub(crate) unsafe trait Lhs: Copy {
    /// The elements.
    fn data(&self) -> &[f32];
    /// Index of element (row, k).
    fn index(&self, row: usize, k: usize) -> usize;
}

/// A row-major matrix, `ld` elements from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub data: &'a [f32],
    pub ld: usize,
}

/// A column-major matrix, `ld` elements from column to column.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    pub data: &'a [f32],
    pub ld: usize,
}

// SAFETY: `ld` is fixed, and the index grows with `row` and `k`.
unsafe impl Lhs for Rows<'_> {
    #[inline(always)]
    fn data(&self) -> &[f32] {
        self.data
    }
    #[inline(always)]
    fn index(&self, row: usize, k: usize) -> usize {
        row * self.ld + k
    }
}

// SAFETY: as for `Rows`.
unsafe impl Lhs for Columns<'_> {
    #[inline(always)]
    fn data(&self) -> &[f32] {
        self.data
    }
    #[inline(always)]
    fn index(&self, row: usize, k: usize) -> usize {
        k * self.ld + row
    }
}

/// The operation that multiplies and adds, and the final step for the sums. Sums start at zero.
pub(crate) trait Product<S: Simd>: Copy {
    /// `a · b + sum`
    fn add(self, s: S, a: S::V, b: S::V, sum: S::V) -> S::V;
    /// The new value of vector `v` of a row of C, whose value was `old`.
    fn finish(self, s: S, sum: S::V, old: S::V, v: usize) -> S::V;
}

/// C = A · B in f32.
#[derive(Clone, Copy)]
pub(crate) struct Fresh;

/// C += A · B in f32. A · B is summed separately: one chain of additions through all blocks of keys would
/// have a larger error.
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

/// C = A · B, or what `product` makes of the sums. A and C have `m` rows, B has `k` rows. B and C are dense
/// and `VECTORS` vectors wide. Register tiles have at most `tall` rows.
#[inline(always)]
pub(crate) fn gemm<S: Simd, P: Product<S>, A: Lhs, const VECTORS: usize>(
    s: S,
    product: P,
    a: A,
    b: &[f32],
    c: &mut [f32],
    [m, k]: [usize; 2],
    tall: usize,
) {
    let width = VECTORS * S::LANES;
    gemm_part::<S, P, A, VECTORS>(s, product, a, Part { from: b, ld: width }, (c, width), [m, k], tall);
}

/// Some columns of a row-major matrix, `ld` elements from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub from: &'a [f32],
    pub ld: usize,
}

/// Like [`gemm`], for `VECTORS` vectors of the columns of a wider B and C. The rows of C are `ldc` elements
/// apart.
#[inline(always)]
pub(crate) fn gemm_part<S: Simd, P: Product<S>, A: Lhs, const VECTORS: usize>(
    s: S,
    product: P,
    a: A,
    b: Part<'_>,
    (c, ldc): (&mut [f32], usize),
    [m, k]: [usize; 2],
    tall: usize,
) {
    let width = VECTORS * S::LANES;
    assert!(m == 0 || k == 0 || a.index(m - 1, k - 1) < a.data().len());
    assert!(k == 0 || (k - 1) * b.ld + width <= b.from.len());
    assert!(m == 0 || (m - 1) * ldc + width <= c.len());
    let tall = tall.clamp(1, S::TILE_ROWS[VECTORS - 1]);
    let mut row = 0;
    while row < m {
        let rows = (m - row).min(tall);
        // Of the heights above 8, only 12 is compiled. The remaining rows follow in the next tile.
        let rows = if (9..12).contains(&rows) { 8 } else { rows };
        let c = (&mut c[row * ldc..], ldc);
        macro_rules! tile_of {
            ($($height:literal)*) => {
                match rows {
                    // A height that no tile has is not compiled.
                    $($height if S::TILE_ROWS[VECTORS - 1] >= $height => {
                        tile::<S, P, A, $height, VECTORS>(s, product, a, b, c, row, k)
                    })*
                    _ => tile::<S, P, A, 1, VECTORS>(s, product, a, b, c, row, k),
                }
            };
        }
        // SAFETY: the assertions cover every index below (m, k) of the three matrices.
        unsafe { tile_of!(12 8 7 6 5 4 3 2) };
        row += rows;
    }
}

/// Computes `ROWS × VECTORS` vectors of C in registers. C begins with row `row` of A.
///
/// # Safety
/// `row + ROWS` rows of A, `ROWS` of C and `k` rows of B must exist.
#[inline(always)]
unsafe fn tile<S: Simd, P: Product<S>, A: Lhs, const ROWS: usize, const VECTORS: usize>(
    s: S,
    product: P,
    a: A,
    b: Part<'_>,
    (c, ldc): (&mut [f32], usize),
    row: usize,
    k: usize,
) {
    let (a_data, c) = (a.data().as_ptr(), c.as_mut_ptr());
    // SAFETY: by the caller's guarantee, for this and the loads and stores below.
    let at = |p: *const f32, i: usize| unsafe { std::slice::from_raw_parts(p.add(i), S::LANES) };
    let mut acc = [[s.splat(0.0); VECTORS]; ROWS];
    let (mut b, ldb) = (b.from.as_ptr(), b.ld);
    for kk in 0..k {
        let mut line = [s.splat(0.0); VECTORS];
        for (v, line) in line.iter_mut().enumerate() {
            *line = s.load(at(b, v * S::LANES));
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row + r is below m, and kk is below k.
            let x = s.splat(unsafe { *a_data.add(a.index(row + r, kk)) });
            for (acc, &line) in acc.iter_mut().zip(&line) {
                *acc = product.add(s, x, line, *acc);
            }
        }
        // After the last row, the pointer is past the end of B and is not read.
        b = b.wrapping_add(ldb);
    }
    for (r, acc) in acc.iter().enumerate() {
        for (v, &acc) in acc.iter().enumerate() {
            // SAFETY: the vector is in row r of this tile of C.
            let to = unsafe { std::slice::from_raw_parts_mut(c.add(r * ldc + v * S::LANES), S::LANES) };
            s.store(product.finish(s, acc, s.load(to), v), to);
        }
    }
}
