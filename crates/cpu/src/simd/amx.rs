//! AMX: tiles of bf16, multiplied and summed in f32 at sixteen times the rate of FMAs (Intel SDM, volume 1,
//! chapter 18).
//!
//! TDPBF16PS treats subnormal inputs as 0 and flushes subnormal results to 0, regardless of MXCSR.
#![allow(unsafe_code)] // instructions; an `Amx` exists only where `detect` found them and the kernel lets us use them

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::sync::OnceLock;

use half::bf16;

use super::Avx512;
use super::avx512bw::{LANES, load};
use super::tiles::{self, HasTiles, Magnitudes, Place, Sums, Tall, WORDS};
use crate::Elements;
use crate::terms::{DEPTH, TILE};
use crate::tile::Step;
use crate::view::ElementRows;

/// A token: it exists only if the processor has AMX-TILE and AMX-BF16, AVX-512 BW and VL, and everything of
/// [`Avx512`], and if this process may use tiles.
#[derive(Clone, Copy)]
pub(crate) struct Amx(Avx512);

/// A token: it exists only while this thread's tiles are configured, within [`HasTiles::within`]. Like
/// [`Amx`], it implies the instructions. It stays on its thread.
#[derive(Clone, Copy)]
pub(crate) struct AmxTiles<'a> {
    amx: Amx,
    within: PhantomData<(&'a (), *const ())>,
}

impl Amx {
    pub(crate) fn detect() -> Option<Amx> {
        static AMX: OnceLock<Option<Amx>> = OnceLock::new();
        *AMX.get_or_init(|| {
            let vectors = Avx512::detect()?;
            let short = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
            // AMX-BF16 and AMX-TILE. Every processor with AVX-512 has this leaf.
            let tiles = __cpuid_count(7, 0).edx & (1 << 22 | 1 << 24) == 1 << 22 | 1 << 24;
            (short && tiles && is_permitted()).then_some(Amx(vectors))
        })
    }

    /// Like [`Simd::products`]: `rounds` products of tiles, in the order of the kernel.
    pub(crate) fn products(self, rounds: usize) -> f64 {
        const PRODUCTS: usize = 4;
        self.within(|_| {
            for _ in 0..rounds {
                // SAFETY: within this closure, the processor has the instructions and the tiles are
                // configured; only tiles change.
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
}

impl HasTiles for Amx {
    type Tiles<'a> = AmxTiles<'a>;
    type Vectors = Avx512;

    fn vectors(self) -> Avx512 {
        self.0
    }

    fn magnitudes<'a>(self, rows: impl ElementRows<'a>) -> Magnitudes {
        // SAFETY: `self` implies the instructions.
        unsafe { magnitudes(rows) }
    }

    fn within<R>(self, work: impl for<'a> FnOnce(AmxTiles<'a>) -> R) -> R {
        /// Releases the tiles, also when `work` panics. Tiles in use slow down context switches.
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                // SAFETY: a `Release` exists only if the instructions do. The tiles lose their contents.
                unsafe {
                    asm!(
                        "tilerelease",
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nomem, nostack, preserves_flags),
                    );
                }
            }
        }
        let whole = Shapes::WHOLE;
        // SAFETY: `self` implies the instructions; `whole` is a valid configuration. All tiles become 0.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) &whole,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack, preserves_flags),
            );
        }
        let _release = Release;
        work(AmxTiles { amx: self, within: PhantomData })
    }
}

// SAFETY of every block below: `self` implies the instructions and configured tiles.
impl tiles::Tiles for AmxTiles<'_> {
    type Vectors = Avx512;

    #[inline(always)]
    fn vectors(self) -> Avx512 {
        self.amx.0
    }

    fn terms<'a>(self, rows: impl ElementRows<'a>, terms: usize, negate: bool, to: &mut [f32], words: usize) {
        unsafe { row_terms(rows, terms, negate, to, words) }
    }

    fn row_pairs<'a>(self, rows: impl ElementRows<'a>, terms: usize, to: &mut [f32], dim: usize) {
        unsafe { row_pairs(rows, terms, to, dim) }
    }

    #[inline(always)]
    fn split_pair(self, rest: &mut [__m512; 2]) -> __m512 {
        unsafe { split_pair(rest) }
    }

    #[inline(always)]
    fn multiply<const VECTORS: usize>(
        self,
        a: Tall<'_>,
        b: &[f32],
        c: &mut [f32],
        sums: Sums,
        tall: usize,
        steps: impl Iterator<Item = Place>,
    ) {
        unsafe { multiply::<VECTORS>(a, b, c, sums, tall, steps) }
    }

    fn step(self, step: Step<'_>, terms: usize) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn compiled<const TERMS: usize, const VECTORS: usize>(t: AmxTiles<'_>, step: Step<'_>) {
            tiles::run_step::<_, TERMS, VECTORS>(t, step);
        }
        unsafe {
            match (terms, step.panel.width / LANES) {
                (1, 2) => compiled::<1, 2>(self, step),
                (1, _) => compiled::<1, 1>(self, step),
                (_, 2) => compiled::<2, 2>(self, step),
                _ => compiled::<2, 1>(self, step),
            }
        }
    }
}

/// Whether this process may use tiles. Linux requires a request once per process
/// (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes none of our memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The operand of LDTILECFG: the shapes of the eight tiles.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// All tiles have 16 rows of 64 bytes.
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

/// The nearest bf16 numbers of two vectors, ties away from zero, as pairs. The remainders are left in `rest`.
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
    // pair | (second & upper). From intrinsics the compiler makes VPERMT2W, which takes three times as many
    // operations.
    // SAFETY: only registers change.
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
fn magnitudes<'a>(rows: impl ElementRows<'a>) -> Magnitudes {
    let (mut least, mut largest) = (_mm512_set1_epi32(-1), _mm512_setzero_si512());
    for row in rows {
        for at in (0..row.len()).step_by(LANES) {
            let bits = _mm512_castps_si512(_mm512_abs_ps(load(row, at)));
            least = _mm512_min_epu32(least, _mm512_sub_epi32(bits, _mm512_set1_epi32(1)));
            largest = _mm512_max_epu32(largest, bits);
        }
    }
    Magnitudes::of_bits(_mm512_reduce_min_epu32(least), _mm512_reduce_max_epu32(largest))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row_terms<'a>(rows: impl ElementRows<'a>, terms: usize, negate: bool, to: &mut [f32], words: usize) {
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
                // SAFETY: the slice holds a vector of words.
                unsafe { _mm512_storeu_si512(to[at..][..WORDS].as_mut_ptr().cast(), pairs) };
            }
        }
    }
}

/// [`DEPTH`] elements of a row from `at` on, with zeros after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_pairs(from: &[bf16], at: usize) -> __m512i {
    let from = from.get(at..).unwrap_or_default();
    let mask = if from.len() < DEPTH { !(!0 << from.len()) } else { !0 };
    // SAFETY: the mask excludes elements that do not exist.
    unsafe { _mm512_maskz_loadu_epi16(mask, from.as_ptr().cast()) }
}

/// The two terms of [`DEPTH`] elements of a row from `at` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn two_terms(from: Elements<'_>, at: usize) -> [__m512i; 2] {
    let mut halves = [[_mm256_setzero_si256(); 2]; 2];
    for (half, at) in [at, at + LANES].into_iter().enumerate() {
        // The elements are split as if they were first elements of pairs.
        let mut rest = [load(from, at), _mm512_setzero_ps()];
        for term in &mut halves {
            term[half] = _mm512_cvtepi32_epi16(_mm512_castps_si512(split_pair(&mut rest)));
        }
    }
    halves.map(|[low, high]| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row_pairs<'a>(mut rows: impl ElementRows<'a>, terms: usize, to: &mut [f32], dim: usize) {
    let term = to.len() / terms;
    for row in (0..term).step_by(dim) {
        let pair = [rows.next(), rows.next()];
        for at in (0..dim).step_by(LANES) {
            let mut rest = pair.map(|row| row.map_or(_mm512_setzero_ps(), |row| load(row, at)));
            for to in to.chunks_exact_mut(term) {
                let word = split_pair(&mut rest);
                // SAFETY: the slice holds a vector of words.
                unsafe { _mm512_storeu_ps(to[row + at..][..LANES].as_mut_ptr(), word) };
            }
        }
    }
}

/// [`tiles::Tiles::multiply`], compiled for AMX.
///
/// # Safety
/// The tiles must be configured.
#[inline(always)]
unsafe fn multiply<const VECTORS: usize>(
    a: Tall<'_>,
    b: &[f32],
    c: &mut [f32],
    mut sums: Sums,
    tall: usize,
    mut steps: impl Iterator<Item = Place>,
) {
    /// Number of steps per call: enough for all products of two terms of 192 numbers.
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
                // SAFETY: the assertions cover every tile; the tiles are configured by the caller's
                // guarantee.
                unsafe { tiles.multiply(rows, (VECTORS - vector).min(2), sums) };
            }
        }
        sums = Sums::Added;
    }
}

/// One or two tiles of rows of A and one or two of columns of B. Distances from row to row are in bytes.
struct Tiles<'a> {
    a: *const f32,
    lda: usize,
    b: *const f32,
    c: *mut f32,
    ld: usize,
    /// Offsets in bytes; not empty.
    places: &'a [Place],
}

/// Sums are in tiles 0 to 3, row by row; A in 4 and 5, B in 6 and 7. `x` is the address of a tile of A, `x2`
/// of the tile below, `y` of a tile of B.
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
    /// All tiles of A, B and C must exist, and the tile registers must be configured.
    #[inline(always)]
    unsafe fn multiply(self, rows: usize, columns: usize, sums: Sums) {
        // SAFETY: by the caller's guarantee.
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
