//! AMX: tiles of bf16, multiplied and summed in f32 at sixteen times the rate of FMAs (Intel SDM, volume 1, chapter 18).
#![allow(unsafe_code)] // instructions; an `Amx` exists only where `detect` found them and the kernel lets us use them

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::avx512bw::{LANES, load};
use super::{Avx512, Simd};
use crate::element::Elements;
use crate::terms::{DEPTH, TILE};
use crate::tile::{self, Panel, Step};

/// Proof that the processor has AMX-TILE and AMX-BF16, AVX-512 BW and VL, and all of [`Avx512`], and that this process may use
/// tiles.
#[derive(Clone, Copy)]
pub(crate) struct Amx(Avx512);

/// Words of a row of a tile.
const WORDS: usize = DEPTH / 2;

// SAFETY of every call: `self` is proof of the instructions.
impl Amx {
    pub(crate) fn detect() -> Option<Amx> {
        static AMX: OnceLock<Option<Amx>> = OnceLock::new();
        *AMX.get_or_init(|| {
            let vectors = Avx512::detect()?;
            let short = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
            // AMX-BF16 and AMX-TILE; a processor with AVX-512 has this leaf.
            let tiles = __cpuid_count(7, 0).edx & (1 << 22 | 1 << 24) == 1 << 22 | 1 << 24;
            (short && tiles && is_permitted()).then_some(Amx(vectors))
        })
    }

    /// Its vectors.
    pub(crate) fn vectors(self) -> Avx512 {
        self.0
    }

    /// The largest magnitude of some rows; NaN if one is.
    pub(crate) fn largest<'a>(self, rows: impl Iterator<Item = Elements<'a>>) -> f32 {
        unsafe { largest(rows) }
    }

    /// Rows as `terms` terms, of the opposite sign if `negate`, `words` a row, each term of a row filled up with zeros.
    pub(crate) fn terms<'a>(
        self,
        rows: impl Iterator<Item = Elements<'a>>,
        terms: usize,
        negate: bool,
        to: &mut [f32],
        words: usize,
    ) {
        unsafe { row_terms(rows, terms, negate, to, words) }
    }

    /// Rows as `terms` matrices of terms, `dim` words a row: those of one row and the next are pairs, and zeros fill up what has no
    /// elements.
    pub(crate) fn row_pairs<'a>(
        self,
        rows: impl Iterator<Item = Elements<'a>>,
        terms: usize,
        to: &mut [f32],
        dim: usize,
    ) {
        unsafe { row_pairs(rows, terms, to, dim) }
    }

    /// Does something with tiles ready for [`Amx::step`].
    pub(crate) fn within<R>(self, work: impl FnOnce() -> R) -> R {
        /// Tiles in use make switches of threads dearer.
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
            }
        }
        let whole = Shapes::WHOLE;
        unsafe { asm!("ldtilecfg [{}]", in(reg) &whole, options(readonly, nostack, preserves_flags)) }
        let _release = Release;
        work()
    }

    /// As [`Simd::products`]: `rounds` times products of tiles, in the order of the kernel's.
    pub(crate) fn products(self, rounds: usize) -> f64 {
        const PRODUCTS: usize = 4;
        self.within(|| {
            for _ in 0..rounds {
                // SAFETY: `self` is proof of the instructions; tiles are all that changes.
                unsafe {
                    asm!(
                        "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                        "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nomem, nostack, preserves_flags),
                    );
                }
            }
        });
        (2 * TILE * TILE * DEPTH * PRODUCTS * rounds) as f64
    }

    /// Runs `step` on words that are pairs of terms. Only within [`Amx::within`].
    pub(crate) fn step(self, step: Step<'_>, terms: usize) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<const TERMS: usize, const VECTORS: usize>(s: Avx512, step: Step<'_>) {
            run_step::<TERMS, VECTORS>(s, step);
        }
        // SAFETY: as above.
        unsafe {
            match (terms, step.panel.width / LANES) {
                (1, 2) => compiled::<1, 2>(self.0, step),
                (1, _) => compiled::<1, 1>(self.0, step),
                (_, 2) => compiled::<2, 2>(self.0, step),
                _ => compiled::<2, 1>(self.0, step),
            }
        }
    }
}

/// Whether this process may use tiles: Linux wants to be asked, once (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// What LDTILECFG reads: the shapes of the eight tiles.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// All of 16 rows of 64 bytes.
    const WHOLE: Shapes = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut tile = 0;
        while tile < 8 {
            (row_bytes[tile], rows[tile]) = (64, TILE as u8);
            tile += 1;
        }
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };
}

/// Keys whose logits and weights stay in the first cache until they are used. A multiple of [`DEPTH`].
pub(crate) const CHUNK: usize = 64;

/// [`tile::run_step`] on terms.
#[inline(always)]
fn run_step<const TERMS: usize, const VECTORS: usize>(s: Avx512, step: Step<'_>) {
    let Step { panel, block, scale, weights, tile } = step;
    let width = VECTORS * LANES;
    let (logits, weights) = weights.split_at_mut(CHUNK * width);
    let (depth, dim) = (block.k.ld / TERMS, block.dim_v.next_multiple_of(TILE));
    let of_values = dim * block.v.ld;
    for first in (0..block.keys.len()).step_by(CHUNK) {
        let keys = (block.keys.len() - first).min(CHUNK);
        let k =
            Tall { data: &block.k.data[first * block.k.ld..], ld: block.k.ld, tiles: keys.div_ceil(TILE) };
        // All of them: logits are exact products, as in f32.
        let steps = products::<TERMS>(2 * (TERMS - 1)).flat_map(|(key, query)| {
            (0..depth).step_by(WORDS).map(move |at| [key * depth + at, (query * depth + at) * width])
        });
        multiply::<VECTORS>(k, &panel.q, logits, Sums::Fresh, tile.rows, steps);
        let logits = &mut logits[..keys * width];
        let (start, end) = (block.keys.start + first, block.keys.start + first + keys);
        if start < panel.by_all.start || panel.by_all.end < end {
            tile::mask::<_, VECTORS>(s, panel, start, logits);
        }
        let max = tile::maximum::<_, VECTORS>(s, logits);
        tile::raise_maximum(s, panel, scale, max);
        let pairs = keys.next_multiple_of(DEPTH) / 2;
        let weights = &mut weights[..TERMS * pairs * width];
        weigh::<TERMS, VECTORS>(s, panel, scale, logits, weights);
        let v = Tall { data: &block.v.data[first / 2..], ld: block.v.ld, tiles: dim / TILE };
        // But for the low terms of both.
        let steps = products::<TERMS>(TERMS - 1).flat_map(|(value, weight)| {
            (0..pairs).step_by(WORDS).map(move |at| [value * of_values + at, (weight * pairs + at) * width])
        });
        multiply::<VECTORS>(v, weights, &mut panel.out, Sums::Added, tile.rows, steps);
    }
}

/// Pairs of terms (i, j) with i + j ≤ `most`, small products first.
#[inline(always)]
fn products<const TERMS: usize>(most: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let of_order = |order: usize| (0..=order).map(move |i| (i, order - i));
    (0..=most).rev().flat_map(of_order).filter(|&(i, j)| i < TERMS && j < TERMS)
}

/// The logits of a panel's keys to weights, `TERMS` matrices of pairs along the keys, zeros after the last; adds the weights to the
/// panel's sum.
#[inline(always)]
fn weigh<const TERMS: usize, const VECTORS: usize>(
    s: Avx512,
    panel: &mut Panel,
    scale: f32,
    logits: &[f32],
    weights: &mut [f32],
) {
    let width = VECTORS * LANES;
    let (keys, matrix) = (logits.len() / width, weights.len() / TERMS);
    let mut lanes = Lanes::<VECTORS> {
        scale: s.splat(scale),
        minus_shift: std::array::from_fn(|v| s.sub(s.splat(0.0), s.load(&panel.shift[v * LANES..]))),
        sum: [s.splat(0.0); VECTORS],
    };
    let mut terms = weights.chunks_exact_mut(matrix);
    let mut terms: [&mut [f32]; TERMS] = std::array::from_fn(|_| terms.next().unwrap_or_default());
    let mut rows = logits.chunks_exact(2 * width);
    for (pair, logits) in rows.by_ref().enumerate() {
        let (first, second) = logits.split_at(width);
        lanes.weigh_pair(s, first, Some(second), &mut terms, pair * width);
    }
    if let [_, ..] = rows.remainder() {
        lanes.weigh_pair(s, rows.remainder(), None, &mut terms, keys / 2 * width);
    }
    for term in terms {
        term[keys.div_ceil(2) * width..].fill(0.0);
    }
    for (v, &sum) in lanes.sum.iter().enumerate() {
        let total = &mut panel.sum[v * LANES..];
        s.store(s.add(s.load(total), sum), total);
    }
}

/// What weights of a panel's lanes are made with, and their sums.
struct Lanes<const VECTORS: usize> {
    scale: __m512,
    minus_shift: [__m512; VECTORS],
    sum: [__m512; VECTORS],
}

impl<const VECTORS: usize> Lanes<VECTORS> {
    /// The logits of a key and the next, if there is one, to pairs of each of the terms, `at` words from their beginning.
    #[inline(always)]
    fn weigh_pair<const TERMS: usize>(
        &mut self,
        s: Avx512,
        first: &[f32],
        second: Option<&[f32]>,
        terms: &mut [&mut [f32]; TERMS],
        at: usize,
    ) {
        for v in 0..VECTORS {
            let mut rest = [s.splat(0.0); 2];
            for (rest, logits) in rest.iter_mut().zip([Some(first), second]) {
                if let Some(logits) = logits {
                    *rest = s.exp2(s.fma(s.load(&logits[v * LANES..]), self.scale, self.minus_shift[v]));
                }
            }
            self.sum[v] = s.add(self.sum[v], s.add(rest[0], rest[1]));
            for term in terms.iter_mut() {
                // SAFETY: the `Avx512` is proof of the instructions.
                let word = unsafe { split_pair(&mut rest) };
                s.store(word, &mut term[at + v * LANES..]);
            }
        }
    }
}

/// The nearest bf16 numbers of two vectors, ties away from zero, as pairs. What they lack is left.
#[inline]
#[target_feature(enable = "avx512f")]
fn split_pair(rest: &mut [__m512; 2]) -> __m512 {
    let upper = _mm512_set1_epi32(0xffff_0000u32.cast_signed());
    let [first, second] = rest.each_mut().map(|rest| {
        let rounded = _mm512_add_epi32(_mm512_castps_si512(*rest), _mm512_set1_epi32(0x8000));
        *rest = _mm512_sub_ps(*rest, _mm512_castsi512_ps(_mm512_and_si512(rounded, upper)));
        rounded
    });
    let mut pair = _mm512_srli_epi32::<16>(first);
    // pair | (second & upper). From intrinsics the compiler makes VPERMT2W, which is three times the work.
    // SAFETY: registers only.
    unsafe {
        asm!(
            "vpternlogd {pair}, {second}, {upper}, 0xf8",
            pair = inout(zmm_reg) pair, second = in(zmm_reg) second, upper = in(zmm_reg) upper,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    _mm512_castsi512_ps(pair)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn largest<'a>(rows: impl Iterator<Item = Elements<'a>>) -> f32 {
    let mut largest = _mm512_setzero_si512();
    for row in rows {
        for at in (0..row.len()).step_by(LANES) {
            // Magnitudes are ordered as their bits are, NaN above all.
            let bits = _mm512_castps_si512(_mm512_abs_ps(load(row, at)));
            largest = _mm512_max_epu32(largest, bits);
        }
    }
    f32::from_bits(_mm512_reduce_max_epu32(largest))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row_terms<'a>(
    rows: impl Iterator<Item = Elements<'a>>,
    terms: usize,
    negate: bool,
    to: &mut [f32],
    words: usize,
) {
    let sign = _mm512_set1_epi16(if negate { i16::MIN } else { 0 });
    let depth = words / terms;
    for (row, to) in rows.zip(to.chunks_exact_mut(words)) {
        for at in (0..depth).step_by(WORDS) {
            let pairs = match row {
                Elements::Bf16(row) => [load_pairs(row, 2 * at), _mm512_setzero_si512()],
                _ => two_terms(row, 2 * at),
            };
            for (to, pairs) in to.chunks_exact_mut(depth).zip(pairs) {
                let pairs = _mm512_xor_si512(pairs, sign);
                // SAFETY: a vector of words.
                unsafe { _mm512_storeu_si512(to[at..][..WORDS].as_mut_ptr().cast(), pairs) };
            }
        }
    }
}

/// Elements `at..` of a row, [`DEPTH`] of them, zeros after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_pairs(from: &[bf16], at: usize) -> __m512i {
    let from = from.get(at..).unwrap_or_default();
    let mask = if from.len() < DEPTH { !(!0 << from.len()) } else { !0 };
    // SAFETY: the mask hides what does not exist.
    unsafe { _mm512_maskz_loadu_epi16(mask, from.as_ptr().cast()) }
}

/// The two terms of the same.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn two_terms(from: Elements<'_>, at: usize) -> [__m512i; 2] {
    let mut halves = [[_mm256_setzero_si256(); 2]; 2];
    for (half, at) in [at, at + LANES].into_iter().enumerate() {
        // As if they were first elements of pairs.
        let mut rest = [load(from, at), _mm512_setzero_ps()];
        for term in &mut halves {
            term[half] = _mm512_cvtepi32_epi16(_mm512_castps_si512(split_pair(&mut rest)));
        }
    }
    halves.map(|[low, high]| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row_pairs<'a>(mut rows: impl Iterator<Item = Elements<'a>>, terms: usize, to: &mut [f32], dim: usize) {
    let term = to.len() / terms;
    for row in (0..term).step_by(dim) {
        let pair = [rows.next(), rows.next()];
        for at in (0..dim).step_by(LANES) {
            let mut rest = pair.map(|row| row.map_or(_mm512_setzero_ps(), |row| load(row, at)));
            for to in to.chunks_exact_mut(term) {
                let word = split_pair(&mut rest);
                // SAFETY: a vector of words.
                unsafe { _mm512_storeu_ps(to[row + at..][..LANES].as_mut_ptr(), word) };
            }
        }
    }
}

/// A matrix of words with whole tiles of rows, `ld` words from row to row.
#[derive(Clone, Copy)]
struct Tall<'a> {
    data: &'a [f32],
    ld: usize,
    tiles: usize,
}

/// What a product of matrices does with C.
#[derive(Clone, Copy, PartialEq)]
enum Sums {
    Fresh,
    Added,
}

/// Tiles of A and B whose product is summed: where those of A's first rows and of B's first columns begin, in words.
type Place = [usize; 2];

/// C = Σ A · B, or C += Σ A · B, over the tiles at `steps`; B and C are dense and `VECTORS` vectors wide. `tall` tiles of A are
/// multiplied at a time, two at most, with two of B.
#[inline(always)]
fn multiply<const VECTORS: usize>(
    a: Tall<'_>,
    b: &[f32],
    c: &mut [f32],
    mut sums: Sums,
    tall: usize,
    mut steps: impl Iterator<Item = Place>,
) {
    /// Steps in one go: all products of two terms of 192 numbers.
    const STEPS: usize = 24;
    let width = VECTORS * LANES;
    assert!(a.tiles * TILE * width <= c.len());
    loop {
        let mut places = [[0; 2]; STEPS];
        let mut count = 0;
        for (place, [at_a, at_b]) in places.iter_mut().zip(steps.by_ref()) {
            assert!(a.tiles == 0 || at_a + (a.tiles * TILE - 1) * a.ld + WORDS <= a.data.len());
            assert!(at_b + WORDS * width <= b.len());
            *place = [at_a * size_of::<f32>(), at_b * size_of::<f32>()];
            count += 1;
        }
        if count == 0 {
            return;
        }
        for row in (0..a.tiles).step_by(tall.min(2)) {
            let rows = (a.tiles - row).min(tall).min(2);
            for vector in (0..VECTORS).step_by(2) {
                let tiles = Tiles {
                    a: a.data.as_ptr().wrapping_add(row * TILE * a.ld),
                    lda: a.ld * size_of::<f32>(),
                    b: b.as_ptr().wrapping_add(vector * LANES),
                    c: c.as_mut_ptr().wrapping_add(row * TILE * width + vector * LANES),
                    ld: width * size_of::<f32>(),
                    places: &places[..count],
                };
                // SAFETY: the assertions cover every tile.
                unsafe { tiles.multiply(rows, (VECTORS - vector).min(2), sums) };
            }
        }
        sums = Sums::Added;
    }
}

/// One or two tiles of A's rows, one or two of B's columns; distances from row to row in bytes.
struct Tiles<'a> {
    a: *const f32,
    lda: usize,
    b: *const f32,
    c: *mut f32,
    ld: usize,
    /// In bytes; not empty.
    places: &'a [Place],
}

/// Sums in tiles 0 to 3, row by row; A in 4 and 5, B in 6 and 7. `x` is where a tile of A is, `x2` the one below, `y` one of B.
macro_rules! multiply {
    ($tiles:ident, $sums:ident: $($zero:literal)*; $($load:literal)*; $($step:literal)*; $($end:literal)*) => {
        match $sums {
            Sums::Fresh => multiply!($tiles: $($zero)*; $($step)*; $($end)*),
            Sums::Added => multiply!($tiles: $($load)*; $($step)*; $($end)*),
        }
    };
    ($tiles:ident: $($begin:literal)*; $($step:literal)*; $($end:literal)*) => {
        asm!(
            $($begin,)*
            "2:",
            "mov {x}, qword ptr [{place}]",
            "mov {y}, qword ptr [{place} + 8]",
            "add {x}, {a}",
            "add {y}, {b}",
            "lea {x2}, [{x} + {below}]",
            $($step,)*
            "add {place}, 16",
            "dec {count}",
            "jnz 2b",
            $($end,)*
            "/* {c2} */",
            a = in(reg) $tiles.a, b = in(reg) $tiles.b, lda = in(reg) $tiles.lda, ld = in(reg) $tiles.ld,
            below = in(reg) $tiles.lda * TILE,
            c = in(reg) $tiles.c, c2 = in(reg) $tiles.c.wrapping_byte_add($tiles.ld * TILE),
            place = inout(reg) $tiles.places.as_ptr() => _, count = inout(reg) $tiles.places.len() => _,
            x = out(reg) _, x2 = out(reg) _, y = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl Tiles<'_> {
    /// # Safety
    /// All tiles of A, B and C must exist, and the tiles be ready.
    #[inline(always)]
    unsafe fn multiply(self, rows: usize, columns: usize, sums: Sums) {
        // SAFETY: the caller's promise.
        unsafe {
            match (rows, columns) {
                (2, 2) => multiply!(self, sums:
                    "tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3";
                    "tileloadd tmm0, [{c} + {ld}*1]" "tileloadd tmm1, [{c} + {ld}*1 + 64]"
                    "tileloadd tmm2, [{c2} + {ld}*1]" "tileloadd tmm3, [{c2} + {ld}*1 + 64]";
                    "tileloadd tmm4, [{x} + {lda}*1]" "tileloadd tmm6, [{y} + {ld}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{y} + {ld}*1 + 64]" "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{x2} + {lda}*1]" "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7";
                    "tilestored [{c} + {ld}*1], tmm0" "tilestored [{c} + {ld}*1 + 64], tmm1"
                    "tilestored [{c2} + {ld}*1], tmm2" "tilestored [{c2} + {ld}*1 + 64], tmm3"),
                (2, _) => multiply!(self, sums:
                    "tilezero tmm0" "tilezero tmm2";
                    "tileloadd tmm0, [{c} + {ld}*1]" "tileloadd tmm2, [{c2} + {ld}*1]";
                    "tileloadd tmm4, [{x} + {lda}*1]" "tileloadd tmm6, [{y} + {ld}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{x2} + {lda}*1]" "tdpbf16ps tmm2, tmm5, tmm6";
                    "tilestored [{c} + {ld}*1], tmm0" "tilestored [{c2} + {ld}*1], tmm2"),
                (_, 2) => multiply!(self, sums:
                    "tilezero tmm0" "tilezero tmm1";
                    "tileloadd tmm0, [{c} + {ld}*1]" "tileloadd tmm1, [{c} + {ld}*1 + 64]";
                    "tileloadd tmm4, [{x} + {lda}*1]" "tileloadd tmm6, [{y} + {ld}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{y} + {ld}*1 + 64]" "tdpbf16ps tmm1, tmm4, tmm7";
                    "tilestored [{c} + {ld}*1], tmm0" "tilestored [{c} + {ld}*1 + 64], tmm1"),
                _ => multiply!(self, sums:
                    "tilezero tmm0";
                    "tileloadd tmm0, [{c} + {ld}*1]";
                    "tileloadd tmm4, [{x} + {lda}*1]" "tileloadd tmm6, [{y} + {ld}*1]"
                    "tdpbf16ps tmm0, tmm4, tmm6";
                    "tilestored [{c} + {ld}*1], tmm0"),
            }
        }
    }
}
