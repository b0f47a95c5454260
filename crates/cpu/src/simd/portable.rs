//! Vectors in plain Rust, for processors without a specialised module and as an independent implementation in
//! tests.

use super::{Simd, exp2_by_shift, transpose_plain};
use crate::backward;
use crate::dims;
use crate::peak;
use crate::programs::{self, Compiled, Loads, Operation, Region, Values};
use crate::tile::{self, Step};

/// Vectors of plain Rust. Compilers for every 64-bit processor can vectorise 4 lanes. 16 lanes have the
/// layout of AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Portable<const LANES: usize = 4>;

type V<const LANES: usize> = [f32; LANES];

#[inline(always)]
pub(super) fn map2<const LANES: usize>(a: V<LANES>, b: V<LANES>, f: impl Fn(f32, f32) -> f32) -> V<LANES> {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl<const LANES: usize> Simd for Portable<LANES> {
    const LANES: usize = LANES;
    const MAX_VECTORS: usize = if LANES == 16 { 4 } else { 2 };
    const IN_PLACE: bool = false;
    const TILE_ROWS: [usize; 4] = if LANES == 16 { [2, 2, 2, 2] } else { [8, 5, 0, 0] };
    type V = V<LANES>;

    #[inline(always)]
    fn splat(self, x: f32) -> V<LANES> {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> V<LANES> {
        std::array::from_fn(|i| from[..LANES][i])
    }
    #[inline(always)]
    fn store(self, v: V<LANES>, to: &mut [f32]) {
        to[..LANES].copy_from_slice(&v);
    }
    #[inline(always)]
    fn add(self, a: V<LANES>, b: V<LANES>) -> V<LANES> {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V<LANES>, b: V<LANES>) -> V<LANES> {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V<LANES>, b: V<LANES>) -> V<LANES> {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V<LANES>, b: V<LANES>) -> V<LANES> {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V<LANES>, b: V<LANES>, c: V<LANES>) -> V<LANES> {
        // `mul_add` is not used: without an FMA instruction it is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: V<LANES>, b: V<LANES>) -> V<LANES> {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn select_lt(self, a: V<LANES>, b: V<LANES>, yes: V<LANES>, no: V<LANES>) -> V<LANES> {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn any_lt(self, a: V<LANES>, b: V<LANES>) -> bool {
        (0..LANES).any(|i| a[i] < b[i])
    }
    #[inline(always)]
    fn exp2(self, t: V<LANES>) -> V<LANES> {
        exp2_by_shift(self, t, |v| v.map(|x| f32::from_bits(x.to_bits() << 23)))
    }
    #[inline(always)]
    fn sum_each<const ROWS: usize, const KEYS: usize>(self, of: &[[V<LANES>; KEYS]; ROWS]) -> V<LANES> {
        std::array::from_fn(|i| of[i / KEYS][i % KEYS].iter().sum())
    }

    fn step<const VECTORS: usize>(self, step: Step<'_>) {
        tile::run_step::<Self, VECTORS>(self, step);
    }

    fn step_dims(self, step: Step<'_>) {
        dims::run_step(self, step);
    }

    fn backward(self, stage: backward::TileStep<'_>) {
        backward::run(self, stage);
    }

    fn evaluate(self, program: &Compiled<'_>, values: &mut Values, region: Region<'_>) {
        programs::evaluate(self, program, values, region);
    }

    fn compute(self, operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]) {
        compute(operation, loads, to);
    }

    fn products(self, rounds: usize) -> f64 {
        peak::chains(self, rounds)
    }

    fn read(self, from: &[f32]) {
        peak::sum(self, from);
    }

    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
        transpose_plain(from, from_ld, to, to_ld, rows, cols);
    }
}

/// Evaluates one operation of a program. The result of a word does not depend on the number of lanes, so one
/// function serves all.
fn compute(operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]) {
    programs::compute(Portable::<4>, operation, loads, to);
}
