//! AVX512-FP16 and VNNI: 16-bit factors, at twice the rate of f32.
#![allow(unsafe_code)] // intrinsics; an `Avx512Fp16` exists only where `detect` found the instructions

use std::arch::asm;
use std::arch::x86_64::*;

use super::gemm::{Init, Product, Rows, gemm};
use super::{Avx512, Extent, Narrow, Simd};
use crate::element::Elements;
use crate::tile::{self, Panel, Step};

/// Proof that the processor has AVX512-FP16, VNNI, BW and VL, and all of [`Avx512`].
#[derive(Clone, Copy)]
pub(crate) struct Avx512Fp16(());

impl Avx512Fp16 {
    pub(crate) fn detect(_: Avx512) -> Option<Avx512Fp16> {
        let narrow = is_x86_feature_detected!("avx512fp16") && is_x86_feature_detected!("avx512vnni");
        let short = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        (narrow && short).then_some(Avx512Fp16(()))
    }
}

/// Elements are pairs of 16-bit integers, their products' sums 32-bit ones, which are stored as f32.
#[derive(Clone, Copy)]
struct Pairs(Avx512Fp16);

// SAFETY of both blocks: the `Avx512Fp16` is proof of the instructions.
impl Product<Avx512> for Pairs {
    #[inline(always)]
    fn add(self, _: Avx512, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { add_products(a, b, c) }
    }
    #[inline(always)]
    fn finish(self, _: Avx512, sum: __m512) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(sum)) }
    }
}

/// `c` + the sums of the products of pairs. As an intrinsic the compiler makes two instructions of it, VPMADDWD and
/// VPADDD, for their shorter latency; here the rate counts.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_products(a: __m512, b: __m512, mut c: __m512) -> __m512 {
    // SAFETY: registers only.
    unsafe {
        asm!(
            "vpdpwssd {c}, {a}, {b}",
            c = inout(zmm_reg) c, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    c
}

/// f32 lanes of a vector.
const LANES: usize = Avx512::LANES;

/// Products that follow each other in an f16 sum, and such sums that are added to each other before f32 takes over.
/// Together they bound a sum's error (`docs/notes/cpu-kernels.md`) and its size ([`crate::narrow`]).
const CHAIN: usize = 16;
const CHAINS: usize = 2;

impl Narrow for Avx512Fp16 {
    // P V adds 32 lanes at a time.
    const LANES: usize = 32;

    fn extent(self, rows: Elements<'_>, dim: usize) -> Extent {
        // SAFETY here and below: `self` is proof of the instructions.
        unsafe { extent(rows, dim) }
    }

    fn integers(self, row: Elements<'_>, factor: f32, to: &mut [f32]) {
        unsafe { integers(row, factor, to) }
    }

    fn halves(self, row: Elements<'_>, factor: f32, to: &mut [f32]) {
        unsafe { halves(row, factor, to) }
    }

    fn step(self, step: Step<'_>) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx512fp16")]
        fn compiled<const VECTORS: usize, const HALVES: usize>(s: Avx512, narrow: Avx512Fp16, step: Step<'_>) {
            run_step::<VECTORS, HALVES>(s, narrow, step);
        }
        match step.panel.width {
            64 => unsafe { compiled::<4, 2>(Avx512::with(self), self, step) },
            _ => unsafe { compiled::<2, 1>(Avx512::with(self), self, step) },
        }
    }
}

/// [`tile::run_step`] with logits from integers and weights in f16. `VECTORS` f32 vectors are `HALVES` of f16.
#[inline(always)]
fn run_step<const VECTORS: usize, const HALVES: usize>(s: Avx512, narrow: Avx512Fp16, step: Step<'_>) {
    let Step { panel, block, scale, weights } = step;
    let keys = block.keys.len();
    let width = VECTORS * LANES;
    let weights = &mut weights[..keys * width];
    gemm::<Avx512, _, _, VECTORS>(s, Pairs(narrow), block.k, &panel.q, weights, [keys, block.k.ld], Init::Zero);
    if block.keys.start < panel.by_all.start || panel.by_all.end < block.keys.end {
        tile::mask::<Avx512, VECTORS>(s, panel, block.keys.start, weights);
    }
    tile::raise_maximum::<Avx512, VECTORS>(s, panel, scale, weights);
    exponentiate::<VECTORS>(s, panel, scale, weights);
    accumulate::<HALVES>(block.v, weights, &mut panel.out, [block.dim_v, keys]);
}

/// Logits to f16 weights, in place: a row of weights takes half the room, and lies where rows already read were.
#[inline(always)]
fn exponentiate<const VECTORS: usize>(s: Avx512, panel: &mut Panel, scale: f32, logits: &mut [f32]) {
    let scale = s.splat(scale);
    let mut minus_shift = [s.splat(0.0); VECTORS];
    let mut sum = minus_shift;
    for v in 0..VECTORS {
        minus_shift[v] = s.sub(s.splat(0.0), s.load(&panel.shift[v * LANES..]));
        sum[v] = s.load(&panel.sum[v * LANES..]);
    }
    let rows = logits.len() / (VECTORS * LANES);
    let logits = logits.as_mut_ptr();
    for row in 0..rows {
        for v in 0..VECTORS {
            let at = row * VECTORS + v;
            // SAFETY: vector `at` of the logits, and below it the half vector `at` of the weights.
            let logit = unsafe { _mm512_loadu_ps(logits.add(at * LANES)) };
            let weight = s.exp2(s.fma(logit, scale, minus_shift[v]));
            sum[v] = s.add(sum[v], weight);
            unsafe {
                let half = _mm256_castph_si256(_mm512_cvtxps_ph(weight));
                _mm256_storeu_si256(logits.add(at * LANES / 2).cast(), half);
            }
        }
    }
    for (v, &sum) in sum.iter().enumerate() {
        s.store(sum, &mut panel.sum[v * LANES..]);
    }
}

/// O += P V. `v` holds `keys` rows of `dim` f16 numbers in `ld` words, `weights` `keys` rows of f16.
#[inline(always)]
fn accumulate<const HALVES: usize>(v: Rows<'_>, weights: &[f32], out: &mut [f32], [dim, keys]: [usize; 2]) {
    assert!(dim <= 2 * v.ld && keys * v.ld <= v.data.len() && keys * HALVES * LANES <= weights.len());
    assert!(dim * HALVES * 2 * LANES <= out.len());
    let mut row = 0;
    while row < dim {
        // 6 · 2 sums of a chain, as many of chains, 2 vectors of weights: 26 of 32 registers.
        let rows = (dim - row).min(6);
        // SAFETY: the assertions cover rows × keys of V, and rows `row..row + rows` of O.
        unsafe {
            let v_row = v.data.as_ptr().cast::<u16>().add(row);
            let tile = Tile { v: v_row, ld: 2 * v.ld, weights: weights.as_ptr().cast() };
            let out = out.as_mut_ptr().add(row * HALVES * 2 * LANES);
            match rows {
                6 => tile.accumulate::<6, HALVES>(keys, out),
                5 => tile.accumulate::<5, HALVES>(keys, out),
                4 => tile.accumulate::<4, HALVES>(keys, out),
                3 => tile.accumulate::<3, HALVES>(keys, out),
                2 => tile.accumulate::<2, HALVES>(keys, out),
                _ => tile.accumulate::<1, HALVES>(keys, out),
            }
        }
        row += rows;
    }
}

/// Some rows of Oᵀ: where their V and the weights are.
#[derive(Clone, Copy)]
struct Tile {
    v: *const u16,
    ld: usize,
    weights: *const u16,
}

type Sums<const ROWS: usize, const HALVES: usize> = [[__m512h; HALVES]; ROWS];

// SAFETY of every block below: the promise of `accumulate`'s caller.
impl Tile {
    /// # Safety
    /// `ROWS` numbers from `v` on in each of `keys` rows, `keys` rows of weights and `ROWS` rows of `out` must exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
    unsafe fn accumulate<const ROWS: usize, const HALVES: usize>(mut self, keys: usize, out: *mut f32) {
        for _ in 0..keys / (CHAIN * CHAINS) {
            unsafe {
                let mut sums = self.chain::<ROWS, HALVES>(CHAIN);
                for _ in 1..CHAINS {
                    sums = add(sums, self.chain::<ROWS, HALVES>(CHAIN));
                }
                drain(sums, out);
            }
        }
        let mut left = keys % (CHAIN * CHAINS);
        while left > 0 {
            let length = left.min(CHAIN);
            unsafe { drain(self.chain::<ROWS, HALVES>(length), out) };
            left -= length;
        }
    }

    /// The f16 sums over the next `length` keys.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
    unsafe fn chain<const ROWS: usize, const HALVES: usize>(&mut self, length: usize) -> Sums<ROWS, HALVES> {
        unsafe {
            let mut sums = [[_mm512_setzero_ph(); HALVES]; ROWS];
            for _ in 0..length {
                let mut line = [_mm512_setzero_ph(); HALVES];
                for (half, line) in line.iter_mut().enumerate() {
                    *line = _mm512_castsi512_ph(_mm512_loadu_si512(self.weights.add(half * 2 * LANES).cast()));
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (sum, &line) in sums.iter_mut().zip(&line) {
                        *sum = add_product(*sum, line, self.v.add(row));
                    }
                }
                self.v = self.v.add(self.ld);
                self.weights = self.weights.add(HALVES * 2 * LANES);
            }
            sums
        }
    }
}

/// `sum + line · v`. The compiler would broadcast `v` by a shuffle, on the port of every other multiplication; as an
/// operand it costs nothing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
unsafe fn add_product(mut sum: __m512h, line: __m512h, v: *const u16) -> __m512h {
    // SAFETY: reads one number, which the caller promises.
    unsafe {
        asm!(
            "vfmadd231ph {sum}, {line}, word ptr [{v}]{{1to32}}",
            sum = inout(zmm_reg) sum, line = in(zmm_reg) line, v = in(reg) v,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    sum
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
fn add<const ROWS: usize, const HALVES: usize>(
    mut a: Sums<ROWS, HALVES>,
    b: Sums<ROWS, HALVES>,
) -> Sums<ROWS, HALVES> {
    for (a, b) in a.iter_mut().zip(&b) {
        for (a, &b) in a.iter_mut().zip(b) {
            *a = _mm512_add_ph(*a, b);
        }
    }
    a
}

/// Adds f16 sums to rows of f32. They go through memory, because a conversion from there needs no shuffle.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
unsafe fn drain<const ROWS: usize, const HALVES: usize>(sums: Sums<ROWS, HALVES>, mut out: *mut f32) {
    for sums in &sums {
        for sum in sums {
            let (lower, upper): (__m512, __m512);
            // SAFETY: reads the sum; the caller promises the rows of `out`.
            unsafe {
                asm!(
                    "vcvtph2psx {lower}, ymmword ptr [{sum}]",
                    "vcvtph2psx {upper}, ymmword ptr [{sum} + 32]",
                    lower = out(zmm_reg) lower, upper = out(zmm_reg) upper, sum = in(reg) sum,
                    options(pure, readonly, nostack, preserves_flags),
                );
                for wide in [lower, upper] {
                    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), wide));
                    out = out.add(LANES);
                }
            }
        }
    }
}

/// Calls `each` with the numbers as f32, 16 at a time: where they start, how many they are (16 but for the last), and
/// they, followed by zeros.
#[inline(always)]
fn vectors(from: Elements<'_>, each: impl FnMut(usize, usize, __m512)) {
    // SAFETY: masks hide what does not exist; only functions with the instructions call this one.
    unsafe {
        match from {
            Elements::F32(from) => {
                let load = |at, mask| _mm512_maskz_loadu_ps(mask, from.as_ptr().add(at));
                chunks(from.len(), load, each);
            }
            Elements::F16(from) => {
                let load = |at, mask| _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.as_ptr().add(at).cast()));
                chunks(from.len(), load, each);
            }
            Elements::Bf16(from) => {
                let load = |at, mask| {
                    let halves = _mm256_maskz_loadu_epi16(mask, from.as_ptr().add(at).cast());
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
                };
                chunks(from.len(), load, each);
            }
        }
    }
}

#[inline(always)]
fn chunks(
    len: usize,
    load: impl Fn(usize, __mmask16) -> __m512,
    mut each: impl FnMut(usize, usize, __m512),
) {
    let whole = len / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        each(at, LANES, load(at, !0));
    }
    if whole < len {
        each(whole, len - whole, load(whole, !(!0 << (len - whole))));
    }
}

/// Of the rows of `dim` numbers that `rows` consists of.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
fn extent(rows: Elements<'_>, dim: usize) -> Extent {
    let mut max = _mm512_setzero_ps();
    let mut norm = 0u32;
    for row in 0..rows.len() / dim {
        let mut squares = _mm512_setzero_ps();
        vectors(rows.slice(row * dim, dim), |_, _, x| {
            max = _mm512_max_ps(max, _mm512_abs_ps(x));
            squares = _mm512_fmadd_ps(x, x, squares);
        });
        // Sums of squares are ordered as their bits are, NaN above all.
        norm = norm.max(_mm512_reduce_add_ps(squares).abs().to_bits());
    }
    Extent { max: _mm512_reduce_max_ps(max), norm_squared: f32::from_bits(norm) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
fn integers(row: Elements<'_>, factor: f32, to: &mut [f32]) {
    let factor = _mm512_set1_ps(factor);
    vectors(row, |at, count, x| {
        let integers = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, factor)));
        store_words(integers, &mut to[at / 2..], count);
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
fn halves(row: Elements<'_>, factor: f32, to: &mut [f32]) {
    let factor = _mm512_set1_ps(factor);
    vectors(row, |at, count, x| {
        let halves = _mm256_castph_si256(_mm512_cvtxps_ph(_mm512_mul_ps(x, factor)));
        store_words(halves, &mut to[at / 2..], count);
    });
}

/// Stores the words of the first `count` 16-bit numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16")]
fn store_words(numbers: __m256i, to: &mut [f32], count: usize) {
    let to = &mut to[..count.div_ceil(2)];
    // SAFETY: as many words as `to` has.
    unsafe {
        if count == LANES {
            return _mm256_storeu_si256(to.as_mut_ptr().cast(), numbers);
        }
        _mm256_mask_storeu_epi32(to.as_mut_ptr().cast(), !(!0u32 << to.len()) as __mmask8, numbers);
    }
}
