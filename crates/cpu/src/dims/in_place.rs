//! A step on elements of K and V that lie where the caller has them: at strides or in pages. They are widened
//! in registers, and each row is asked for before it is needed, V while the logits are computed and the next
//! block's K while the values are added.
#![allow(unsafe_code)] // bounds are asserted once a tile, not once a multiplication

use std::ops::Range;

use problem::{Problem, Tensor};

use super::{Keys, ValueRows, run_with};
use crate::arithmetic::HeadRows;
use crate::simd::{Rows, Simd};
use crate::tile::Step;
use crate::view::{Any, View};
use crate::{Element, Elements, Isa};

/// Most keys of a block that is read in place. The places of their rows, and of the rows that are prefetched,
/// take little of the L1 cache: with tables four times as large, steps took 20 % longer.
pub(crate) const MOST_KEYS: usize = 64;

/// Whether a few rows of a problem can be computed on keys and values in place.
pub(crate) fn is_in_place(problem: &Problem, isa: Isa) -> bool {
    let whole = |dim: usize| dim > 0 && dim.is_multiple_of(isa.lanes());
    let one_type = problem.dtypes.of(Tensor::K) == problem.dtypes.of(Tensor::V);
    let is_compiled = !matches!(isa, Isa::Portable);
    is_compiled
        && one_type
        && whole(problem.head_dim)
        && whole(problem.head_dim_v)
        && problem.programs.mask.is_none()
}

/// Rows of K and of V from a block's first key on, to the last key that the task reads.
#[derive(Clone, Copy)]
pub(crate) struct InPlace<'a> {
    pub k: HeadRows<'a>,
    pub v: HeadRows<'a>,
}

impl<'a> InPlace<'a> {
    /// `None` if the rows must be widened to memory: elements of K and V of two types, or rows that are not
    /// whole vectors of `lanes` elements. Also if they need not be widened: dense rows of f32.
    pub(crate) fn new(k: HeadRows<'a>, v: HeadRows<'a>, lanes: usize) -> Option<Self> {
        let whole = [k, v].iter().all(|rows| rows.view.dim() > 0 && rows.view.dim() % lanes == 0);
        let dense = |rows: &HeadRows<'a>| {
            let HeadRows { view, batch, head, range } = rows;
            matches!(view.dense_rows(*batch, *head, range.start, range.len()), Some(Elements::F32(_)))
        };
        let is_widened = ![k, v].iter().all(dense);
        (whole && is_widened && k.view.dtype() == v.view.dtype()).then_some(InPlace { k, v })
    }

    /// Whether elements have 8 bits.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.k.view, Any::E4m3(_) | Any::E5m2(_))
    }
}

/// [`super::run_step`] for rows in place.
#[inline(always)]
pub(super) fn run_step<S: Simd>(s: S, step: Step<'_>, rows: InPlace<'_>) {
    let InPlace { k, v } = rows;
    match (k.view, v.view) {
        (Any::F32(of_k), Any::F32(of_v)) => run_of(s, step, (of_k, k), (of_v, v)),
        (Any::F16(of_k), Any::F16(of_v)) => run_of(s, step, (of_k, k), (of_v, v)),
        (Any::Bf16(of_k), Any::Bf16(of_v)) => run_of(s, step, (of_k, k), (of_v, v)),
        _ => run_bytes(s, step, rows),
    }
}

/// [`super::run_step`] for rows of 8-bit elements in place.
#[inline(always)]
pub(crate) fn run_bytes<S: Simd>(s: S, step: Step<'_>, InPlace { k, v }: InPlace<'_>) {
    match (k.view, v.view) {
        (Any::E4m3(of_k), Any::E4m3(of_v)) => run_of(s, step, (of_k, k), (of_v, v)),
        (Any::E5m2(of_k), Any::E5m2(of_v)) => run_of(s, step, (of_k, k), (of_v, v)),
        _ => unreachable!("`InPlace::new` takes one type"),
    }
}

#[inline(always)]
fn run_of<'a, S: Simd, T: Element>(
    s: S,
    step: Step<'_>,
    (of_k, k): (View<'a, T>, HeadRows<'a>),
    (of_v, v): (View<'a, T>, HeadRows<'a>),
) {
    let keys = step.block.keys.len();
    let none = [std::ptr::null(); MOST_KEYS];
    let (mut k_rows, mut v_rows, mut next_rows) = (none, none, none);
    of_k.starts(k.batch, k.head, k.range.start, &mut k_rows[..keys]);
    of_v.starts(v.batch, v.head, v.range.start, &mut v_rows[..keys]);
    let next = (k.range.len() - keys).min(keys);
    of_k.starts(k.batch, k.head, k.range.start + keys, &mut next_rows[..next]);
    let [of_k, of_v] = [of_k.dim(), of_v.dim()];
    // SAFETY: the places of rows of `of_k` and `of_v` elements, which outlive the step.
    let [k, v, next] = unsafe {
        [
            Lines::new(&k_rows[..keys], of_k),
            Lines::new(&v_rows[..keys], of_v),
            Lines::new(&next_rows[..next], of_k),
        ]
    };
    run_with(s, step, (Ahead { rows: k, ahead: v }, of_k), Ahead { rows: v, ahead: next });
}

/// Where rows of `dim` elements begin.
#[derive(Clone, Copy)]
struct Lines<'r, T> {
    starts: &'r [*const T],
    dim: usize,
}

impl<'r, T> Lines<'r, T> {
    /// # Safety
    /// From each place on, `dim` elements are initialised and not written for `'r`.
    unsafe fn new(starts: &'r [*const T], dim: usize) -> Self {
        Lines { starts, dim }
    }

    /// `count` elements of a row from `at` on.
    #[inline(always)]
    fn part(self, row: usize, at: usize, count: usize) -> &'r [T] {
        assert!(at + count <= self.dim);
        // SAFETY: inside the row, by the assertion and the contract of `new`.
        unsafe { std::slice::from_raw_parts(self.starts[row].add(at), count) }
    }
}

/// Rows of elements. While row `i` is read, row `i` of `ahead` is prefetched.
#[derive(Clone, Copy)]
struct Ahead<'r, T> {
    rows: Lines<'r, T>,
    ahead: Lines<'r, T>,
}

impl<S: Simd, T: Element> Keys<S> for Ahead<'_, T> {
    #[inline(always)]
    unsafe fn line(self, s: S, row: usize, at: usize) -> S::V {
        debug_assert!(row < self.rows.starts.len() && at + S::LANES <= self.rows.dim);
        // SAFETY: by the trait's contract, the vector lies in an existing row, and by that of `Lines::new`,
        // the row is readable.
        s.load_wide(unsafe {
            std::slice::from_raw_parts(self.rows.starts.get_unchecked(row).add(at), S::LANES)
        })
    }

    #[inline(always)]
    unsafe fn four(self, s: S, row: usize, at: usize) -> [S::V; 4] {
        debug_assert!(row < self.rows.starts.len() && at + 4 * S::LANES <= self.rows.dim);
        // SAFETY: as in `line`.
        s.load_four(unsafe {
            std::slice::from_raw_parts(self.rows.starts.get_unchecked(row).add(at), 4 * S::LANES)
        })
    }

    #[inline(always)]
    fn touch(self, s: S, row: usize) {
        if row < self.ahead.starts.len() {
            s.prefetch(self.ahead.part(row, 0, self.ahead.dim));
        }
    }
}

impl<S: Simd, T: Element> ValueRows<S> for Ahead<'_, T> {
    #[inline(always)]
    fn add(
        self,
        s: S,
        p: Rows<'_>,
        keys: Range<usize>,
        out: &mut [f32],
        [rows, dim]: [usize; 2],
        _: [usize; 2],
    ) {
        let wide = S::MAX_VECTORS * S::LANES;
        let mut at = 0;
        while at < dim {
            let is_wide = at + wide <= dim;
            let mut row = 0;
            while row < rows {
                let place = ([row, at], dim);
                let keys = keys.clone();
                row += match (rows - row, is_wide, S::MAX_VECTORS) {
                    (4.., true, 4) => tile::<S, T, 4, 4>(s, self, p, keys, out, place),
                    (2.., true, 4) => tile::<S, T, 2, 4>(s, self, p, keys, out, place),
                    (_, true, 4) => tile::<S, T, 1, 4>(s, self, p, keys, out, place),
                    (4.., true, 2) => tile::<S, T, 4, 2>(s, self, p, keys, out, place),
                    (2.., true, 2) => tile::<S, T, 2, 2>(s, self, p, keys, out, place),
                    (_, true, 2) => tile::<S, T, 1, 2>(s, self, p, keys, out, place),
                    (4.., ..) => tile::<S, T, 4, 1>(s, self, p, keys, out, place),
                    (2.., ..) => tile::<S, T, 2, 1>(s, self, p, keys, out, place),
                    _ => tile::<S, T, 1, 1>(s, self, p, keys, out, place),
                };
            }
            at += if is_wide && [2, 4].contains(&S::MAX_VECTORS) { wide } else { S::LANES };
        }
    }
}

/// Adds to `ROWS × VECTORS` vectors of O from row `row` and column `at` on. Rows of O are `dim` elements
/// apart. Returns `ROWS`.
#[inline(always)]
fn tile<S: Simd, T: Element, const ROWS: usize, const VECTORS: usize>(
    s: S,
    v: Ahead<'_, T>,
    p: Rows<'_>,
    keys: Range<usize>,
    out: &mut [f32],
    ([row, at], dim): ([usize; 2], usize),
) -> usize {
    let (first, count) = (row * p.ld, keys.len());
    assert!(count == 0 || first + (ROWS - 1) * p.ld + count <= p.data.len());
    let mut acc = [[s.splat(0.0); VECTORS]; ROWS];
    let columns = VECTORS * S::LANES;
    for (i, key) in keys.enumerate() {
        // Not all columns at once: a core waits for few lines at a time.
        if first == 0 && key < v.ahead.starts.len() && at + columns <= v.ahead.dim {
            s.prefetch(v.ahead.part(key, at, columns));
        }
        let row = v.rows.part(key, at, columns);
        let mut line = [s.splat(0.0); VECTORS];
        if S::FOUR && VECTORS == 4 {
            line.copy_from_slice(&s.load_four(row));
        } else {
            for (c, line) in line.iter_mut().enumerate() {
                *line = s.load_wide(&row[c * S::LANES..]);
            }
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row `row + r` of P has `count` weights, by the assertion.
            let x = s.splat(unsafe { *p.data.get_unchecked(first + r * p.ld + i) });
            for (acc, &line) in acc.iter_mut().zip(&line) {
                *acc = s.fma(x, line, *acc);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (c, &acc) in acc.iter().enumerate() {
            let to = &mut out[(row + r) * dim + at + c * S::LANES..][..S::LANES];
            s.store(s.add(s.load(to), acc), to);
        }
    }
    ROWS
}
