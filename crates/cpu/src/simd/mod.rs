//! The processor's vectors as seen by the kernels: a vector of f32, a dozen operations, and entry points that
//! are compiled for the instruction set.

mod codes;
mod compiled;
mod gemm;
mod pairs;
mod portable;
mod portable_pairs;
mod portable_tiles;
mod tiles;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bw;
#[cfg(target_arch = "x86_64")]
mod avx512vbmi;
#[cfg(target_arch = "x86_64")]
mod avx512vnni;
#[cfg(target_arch = "x86_64")]
mod lookup;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use problem::{DType, E4m3, E5m2, Problem};
use serde::{Deserialize, Serialize};

pub(crate) use codes::{codes, largest_finite};
pub(crate) use gemm::{Added, Columns, Fresh, Lhs, Part, Product, Rows, gemm, gemm_part};
pub(crate) use pairs::{Columnwise, Extent, Pairs, RowNorms};
pub(crate) use portable::Portable;
pub(crate) use portable_pairs::PortablePairs;
pub(crate) use portable_tiles::PortableTiles;
pub(crate) use tiles::{CHUNK, HasTiles, Magnitudes, Tiles};

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use {amx::Amx, avx2::Avx2, avx512::Avx512, avx512vnni::Avx512Vnni};

use crate::backward;
use crate::computed::computed_type;
use crate::programs::{Compiled, Loads, Operation, Region, Values};
use crate::tile::Step;
use crate::{Element, Elements};

/// Instruction sets that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isa {
    /// [`Isa::Avx512`], with 16-bit inputs multiplied as tiles of bf16 (AMX-BF16, on Linux). An f16 number is
    /// a sum of two bf16 numbers.
    Amx,
    /// [`Isa::Avx512`], with 16-bit inputs multiplied as 16-bit integers (AVX-512 VNNI, BW and VL).
    Avx512Vnni,
    /// AVX-512 F, 16 lanes.
    Avx512,
    /// AVX2 and FMA, 8 lanes.
    Avx2,
    /// NEON of AArch64, 4 lanes.
    Neon,
    /// Plain Rust; available everywhere.
    Portable,
    /// The integer arithmetic of [`Isa::Avx512Vnni`] in plain Rust. Slow, for tests.
    PortableIntegers,
    /// The arithmetic of [`Isa::Amx`] in plain Rust. Slow, for tests.
    PortableTerms,
}

/// Lanes of the widest vector.
pub(crate) const MAX_LANES: usize = 16;

impl Isa {
    /// Every instruction set except [`Isa::PORTABLE`], fastest first.
    pub const ALL: [Isa; 6] = [Isa::Amx, Isa::Avx512Vnni, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// Plain Rust with the arithmetic of instructions that a processor may lack, so that tests of that
    /// arithmetic run on every machine. A plan uses these only on request.
    pub const PORTABLE: [Isa; 2] = [Isa::PortableIntegers, Isa::PortableTerms];

    /// Whether this processor supports the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Amx::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Avx512Vnni::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().is_some(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect().is_some(),
            Isa::Portable | Isa::PortableIntegers | Isa::PortableTerms => true,
            #[allow(unreachable_patterns)] // the sets of the other architecture
            _ => false,
        }
    }

    /// The instruction sets that this processor supports, fastest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest instruction set that this processor supports.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Whether the instruction set has its own arithmetic for this problem. Otherwise it computes like
    /// [`Isa::wide`].
    pub fn is_for(self, problem: &Problem) -> bool {
        let rows = problem.seq_q >= self.panel_rows();
        match self {
            // With few rows, converting K and V is most of the work.
            Isa::Amx | Isa::Avx512Vnni | Isa::PortableIntegers | Isa::PortableTerms => {
                // There is no error bound for capped logits and for scores that a program changes.
                let is_plain = problem.score.softcap.is_none() && problem.programs.score.is_none();
                rows && computed_type(problem) != DType::F32 && is_plain
            }
            Isa::Avx512 | Isa::Avx2 | Isa::Neon | Isa::Portable => true,
        }
    }

    /// The instruction set that is used, with f32, when this one's own arithmetic is not accurate enough for
    /// a head.
    pub const fn wide(self) -> Isa {
        match self {
            Isa::Amx | Isa::Avx512Vnni => Isa::Avx512,
            Isa::PortableIntegers | Isa::PortableTerms => Isa::Portable,
            isa => isa,
        }
    }

    /// Whether the lanes may be along the head dim.
    pub const fn has_dims(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Avx2 | Isa::Neon | Isa::Portable)
    }

    /// Number of query rows per vector, or per tile with AMX.
    pub const fn lanes(self) -> usize {
        match self {
            Isa::Amx | Isa::Avx512Vnni | Isa::Avx512 | Isa::PortableIntegers | Isa::PortableTerms => 16,
            Isa::Avx2 => 8,
            Isa::Neon | Isa::Portable => 4,
        }
    }

    /// Vectors and rows of the widest register tile, which the default plans use. With AMX, the rows are
    /// tiles.
    pub const fn tile(self) -> (usize, usize) {
        match self {
            Isa::Amx | Isa::PortableTerms => (2, 2),
            Isa::Avx512Vnni | Isa::Avx512 | Isa::Neon | Isa::PortableIntegers => (4, 6),
            Isa::Avx2 => (2, 6),
            Isa::Portable => (2, 5),
        }
    }

    /// Maximum number of rows of a register tile that is `vectors` vectors wide, given the number of
    /// registers.
    pub const fn tile_rows(self, vectors: usize) -> usize {
        match (self, vectors) {
            (Isa::Avx512Vnni | Isa::Avx512 | Isa::Neon | Isa::PortableIntegers, 1 | 2) | (Isa::Avx2, 1) => 12,
            (Isa::Avx512Vnni | Isa::Avx512 | Isa::Neon | Isa::PortableIntegers, 3) | (Isa::Portable, 1) => 8,
            _ => self.tile().1,
        }
    }

    /// Maximum number of query rows of a register tile.
    pub const fn panel_rows(self) -> usize {
        self.tile().0 * self.lanes()
    }

    /// The name used on the command line and in evidence rows.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
            Isa::PortableIntegers => "portableintegers",
            Isa::PortableTerms => "portableterms",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A processor's vectors of f32. A value of an implementing type exists only if the processor has the
/// instructions (it comes from `detect`), so the methods are safe.
///
/// Methods are `#[inline(always)]`. They are fast only when inlined into [`Simd::step`], which is compiled
/// for the instruction set.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// f32 lanes of a vector.
    const LANES: usize;
    /// Vectors side by side in the widest register tile.
    const MAX_VECTORS: usize;
    /// Whether steps of few rows are compiled for elements in place. Plain Rust has no such steps, which
    /// would take half as long again to compile.
    const IN_PLACE: bool;
    /// Whether [`Simd::load_four`] takes less time than four times [`Simd::load_wide`].
    const FOUR: bool = false;
    /// Maximum number of rows of the register tile with one, two, three and four vectors.
    const TILE_ROWS: [usize; 4];
    /// The vector.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// The first [`Simd::LANES`] elements of `from`.
    fn load(self, from: &[f32]) -> Self::V;
    /// Writes the first [`Simd::LANES`] elements of `to`.
    fn store(self, v: Self::V, to: &mut [f32]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, fused if the processor has the instruction.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The maximum, lane by lane. Either value if a lane of `a` or `b` is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { yes } else { no }`, lane by lane. `no` if either is NaN.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Whether `a < b` in any lane.
    fn any_lt(self, a: Self::V, b: Self::V) -> bool;
    /// 2^t for t ≤ 127. The relative error is below 2·2⁻²³ for results that are normal numbers (t ≥ −126).
    /// Smaller results have an absolute error of at most 2⁻¹²⁶. −∞ gives 0, NaN gives NaN.
    fn exp2(self, t: Self::V) -> Self::V;

    /// The sums of the lanes of `ROWS · KEYS` vectors, as one vector. `ROWS · KEYS` must be [`Simd::LANES`].
    fn sum_each<const ROWS: usize, const KEYS: usize>(self, of: &[[Self::V; KEYS]; ROWS]) -> Self::V;

    /// Runs `step` with `VECTORS` vectors per panel, compiled for the instruction set.
    fn step<const VECTORS: usize>(self, step: Step<'_>);

    /// Runs `step` with the lanes along the head dim, compiled for the instruction set.
    fn step_dims(self, step: Step<'_>);

    /// Computes a stage of a tile of the backward pass, compiled for the instruction set.
    fn backward(self, stage: backward::TileStep<'_>);

    /// Evaluates a region of a program, compiled for the instruction set.
    fn evaluate(self, program: &Compiled<'_>, values: &mut Values, region: Region<'_>);

    /// Evaluates one operation of a program, compiled for the instruction set. [`Simd::evaluate`] calls it at
    /// two places. Inlined at both, its many loops would take twice as long to compile.
    fn compute(self, operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]);

    /// Executes `rounds` times a dozen multiply-adds in registers, compiled for the instruction set. Returns
    /// the number of floating-point operations.
    fn products(self, rounds: usize) -> f64;

    /// Reads all of `from`, compiled for the instruction set.
    fn read(self, from: &[f32]);

    /// The first [`Simd::LANES`] elements of `from` as f32.
    #[inline(always)]
    fn load_wide<T: Element>(self, from: &[T]) -> Self::V {
        let mut wide = [0.0; MAX_LANES];
        widen_plain(T::elements(&from[..Self::LANES]), &mut wide);
        self.load(&wide)
    }

    /// The first 4 · [`Simd::LANES`] elements of `from` as f32.
    #[inline(always)]
    fn load_four<T: Element>(self, from: &[T]) -> [Self::V; 4] {
        let mut wide = [self.splat(0.0); 4];
        for (i, wide) in wide.iter_mut().enumerate() {
            *wide = self.load_wide(&from[i * Self::LANES..]);
        }
        wide
    }

    /// Asks for the cache lines of elements that are read soon.
    #[inline(always)]
    fn prefetch<T: Element>(self, _: &[T]) {}

    /// Widens `from` into `to`, which has the same length as `from`.
    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    /// Widens `from` into `to`, which has the same length as `from`.
    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        widen_bf16_plain(from, to);
    }

    /// Widens `from` into `to`, which has the same length as `from`.
    fn widen_e4m3(self, from: &[E4m3], to: &mut [f32]) {
        codes::widen_e4m3(from, to);
    }

    /// Widens `from` into `to`, which has the same length as `from`.
    fn widen_e5m2(self, from: &[E5m2], to: &mut [f32]) {
        codes::widen_e5m2(from, to);
    }

    /// Rounds `factor · from` into `to`, which has the same length as `from`.
    fn narrow_scaled<T: Element>(self, from: &[f32], factor: f32, to: &mut [T]) {
        T::narrow_scaled(from, factor, to);
    }

    /// Transposes the `rows × cols` matrix `from` (row-major, `from_ld` numbers from row to row) into `to`
    /// (`to_ld`).
    fn transpose(self, from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize);
}

/// 2^r − 1 = r · q(r) for r in [−1/2, 1/2]: a relative minimax fit of degree 5 with p(0) = 1, error below
/// 1.6·2⁻²⁴ (Lawson iteration in f64; coefficients rounded to f32).
#[allow(clippy::approx_constant)] // fitted: it is near ln 2 and need not be it
const EXP2_NEAREST: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];

/// Horner's rule for `1 + r·q(r)`.
#[inline(always)]
fn exp2_polynomial<S: Simd>(s: S, r: S::V, c: &[f32; 5]) -> S::V {
    let mut p = s.splat(c[4]);
    p = s.fma(p, r, s.splat(c[3]));
    p = s.fma(p, r, s.splat(c[2]));
    p = s.fma(p, r, s.splat(c[1]));
    p = s.fma(p, r, s.splat(c[0]));
    s.fma(p, r, s.splat(1.0))
}

/// 2^t without an instruction for exponents: t + 1.5·2²³ + 127 has round(t) + 127 in its lowest bits. Shifted
/// left by 23, these bits are the float 2^round(t). `exponent` shifts the bits of each lane left by 23.
#[inline(always)]
fn exp2_by_shift<S: Simd>(s: S, t: S::V, exponent: impl FnOnce(S::V) -> S::V) -> S::V {
    const MAGIC: f32 = 12_582_912.0 + 127.0;
    let shifted = s.add(t, s.splat(MAGIC));
    let r = s.sub(t, s.sub(shifted, s.splat(MAGIC)));
    let p = exp2_polynomial(s, r, &EXP2_NEAREST);
    // The factors are multiplied, instead of adding exponents, so that NaN gives NaN. Below −126 the shifted
    // bits are meaningless.
    let power = s.mul(p, exponent(shifted));
    s.select_lt(t, s.splat(-126.0), s.splat(0.0), power)
}

/// Widens `from` into `to`, which has the same length as `from`.
pub(crate) fn widen<S: Simd>(s: S, from: Elements<'_>, to: &mut [f32]) {
    match from {
        Elements::F32(from) => to.copy_from_slice(from),
        Elements::F16(from) => s.widen_f16(from, to),
        Elements::Bf16(from) => s.widen_bf16(from, to),
        Elements::E4m3(from) => s.widen_e4m3(from, to),
        Elements::E5m2(from) => s.widen_e5m2(from, to),
        Elements::I32(_) | Elements::U8(_) => from.widen(to),
    }
}

/// Widens `from` into the first elements of `to` by loops that vectorise, for the instruction set of the
/// caller.
#[inline(always)]
fn widen_plain(from: Elements<'_>, to: &mut [f32]) {
    match from {
        Elements::F32(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
        Elements::F16(from) => codes::widen_f16(from, to),
        Elements::Bf16(from) => widen_bf16_plain(from, to),
        Elements::E4m3(from) => codes::widen_e4m3(from, to),
        Elements::E5m2(from) => codes::widen_e5m2(from, to),
        Elements::I32(_) | Elements::U8(_) => from.widen(&mut to[..from.len()]),
    }
}

/// A bfloat16 is the upper half of an f32. This loop vectorises. A loop with `bf16::to_f32`, which quiets
/// signalling NaNs, does not; later arithmetic quiets them anyway.
#[inline(always)]
fn widen_bf16_plain(from: &[bf16], to: &mut [f32]) {
    for (wide, narrow) in to.iter_mut().zip(from) {
        *wide = f32::from_bits(u32::from(narrow.to_bits()) << 16);
    }
}

/// Transposition element by element.
#[inline(always)]
fn transpose_plain(from: &[f32], from_ld: usize, to: &mut [f32], to_ld: usize, rows: usize, cols: usize) {
    for row in 0..rows {
        let line = &from[row * from_ld..][..cols];
        for (col, &x) in line.iter().enumerate() {
            to[col * to_ld + row] = x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest relative error of `exp2` over [−126, 127] in units of 2⁻²³. Also checks the special
    /// values.
    fn exp2_error<S: Simd>(s: S) -> f64 {
        let mut buffer = vec![0.0f32; S::LANES];
        let mut exp2 = |t: f32| {
            s.store(s.exp2(s.splat(t)), &mut buffer);
            buffer[0]
        };
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!((exp2(f32::NEG_INFINITY), exp2(-1000.0), exp2(-1e30)), (0.0, 0.0, 0.0));
        assert!(exp2(f32::NAN).is_nan() && exp2(f32::from_bits(0xffc1_2345)).is_nan());
        assert!((f64::from(exp2(-130.0)) - 2f64.powi(-130)).abs() <= 2f64.powi(-126));
        (0..2_000_000).fold(0.0, |worst: f64, i| {
            let t = -126.0 + 253.0 * (i as f32 / 2e6);
            let exact = f64::from(t).exp2();
            worst.max(((f64::from(exp2(t)) - exact) / exact).abs() * 2f64.powi(23))
        })
    }

    #[test]
    fn exp2_keeps_its_bound() {
        let mut errors = vec![exp2_error(Portable::<4>)];
        #[cfg(target_arch = "x86_64")]
        {
            errors.extend(Avx2::detect().map(exp2_error));
            errors.extend(Avx512::detect().map(exp2_error));
        }
        #[cfg(target_arch = "aarch64")]
        errors.extend(Neon::detect().map(exp2_error));
        assert!(errors.iter().all(|&e| e < 2.0), "{errors:?} units of 2^-23");
    }

    /// Each number of 16 and 8 bits, in every lane.
    fn loads_every_number<S: Simd>(s: S) {
        fn check<S: Simd, T: Element>(s: S, numbers: &[T]) {
            let same = |lanes: S::V, line: &[T]| {
                let mut wide = vec![0.0; S::LANES];
                s.store(lanes, &mut wide);
                for (wide, number) in wide.iter().zip(line) {
                    let expected = number.to_f32();
                    let same = wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan();
                    assert!(same, "{}: {wide}, expected {expected}", T::DTYPE.name());
                }
            };
            numbers.windows(S::LANES).for_each(|line| same(s.load_wide(line), line));
            for lines in numbers.windows(4 * S::LANES) {
                let four = s.load_four(lines);
                four.into_iter().zip(lines.chunks(S::LANES)).for_each(|(wide, line)| same(wide, line));
            }
        }
        let all = || 0..=u16::MAX;
        let codes = || (0..=255u8).chain(0..=255);
        check(s, &all().map(f16::from_bits).collect::<Vec<_>>());
        check(s, &all().map(bf16::from_bits).collect::<Vec<_>>());
        check(s, &codes().map(E4m3::from_bits).collect::<Vec<_>>());
        check(s, &codes().map(E5m2::from_bits).collect::<Vec<_>>());
        check(s, &[0.5f32, -1.0, f32::INFINITY, 1e-40].repeat(8));
    }

    #[test]
    fn vectors_of_every_type_are_widened_exactly() {
        loads_every_number(Portable::<4>);
        #[cfg(target_arch = "x86_64")]
        {
            Avx2::detect().into_iter().for_each(loads_every_number);
            Avx512::detect().into_iter().for_each(loads_every_number);
            Avx512::detect_bytes().into_iter().for_each(loads_every_number);
        }
        #[cfg(target_arch = "aarch64")]
        Neon::detect().into_iter().for_each(loads_every_number);
    }

    #[test]
    fn panels_are_as_wide_as_their_register_tile() {
        fn same<S: Simd>(_: S, isa: Isa) -> bool {
            // Plain Rust computes with lower tiles than their plans have.
            let is_portable = Isa::PORTABLE.contains(&isa);
            (S::LANES, S::MAX_VECTORS) == (isa.lanes(), isa.tile().0)
                && (1..=S::MAX_VECTORS)
                    .all(|vectors| is_portable || S::TILE_ROWS[vectors - 1] == isa.tile_rows(vectors))
        }
        assert!(same(Portable::<4>, Isa::Portable) && same(Portable::<16>, Isa::PortableIntegers));
        #[cfg(target_arch = "x86_64")]
        {
            assert!(Avx2::detect().is_none_or(|s| same(s, Isa::Avx2)));
            assert!(Avx512::detect().is_none_or(|s| same(s, Isa::Avx512) && same(s, Isa::Avx512Vnni)));
        }
        #[cfg(target_arch = "aarch64")]
        assert!(Neon::detect().is_none_or(|s| same(s, Isa::Neon)));
        assert!(Isa::ALL.into_iter().all(|isa| isa.panel_rows() <= crate::tile::MAX_WIDTH));
    }

    #[test]
    fn sums_of_lanes() {
        fn sums<S: Simd, const ROWS: usize, const KEYS: usize>(s: S) {
            let numbers: Vec<f32> = (0..S::LANES * S::LANES).map(|i| (i * i % 251) as f32).collect();
            let vectors = std::array::from_fn(|r| {
                std::array::from_fn(|k| s.load(&numbers[(r * KEYS + k) * S::LANES..]))
            });
            let mut got = vec![0.0; S::LANES];
            s.store(s.sum_each::<ROWS, KEYS>(&vectors), &mut got);
            let want: Vec<f32> = numbers.chunks(S::LANES).map(|numbers| numbers.iter().sum()).collect();
            assert_eq!(got, want);
        }
        sums::<_, 2, 2>(Portable::<4>);
        sums::<_, 4, 4>(Portable::<16>);
        #[cfg(target_arch = "x86_64")]
        {
            Avx2::detect().into_iter().for_each(|s| {
                sums::<_, 4, 2>(s);
                sums::<_, 1, 8>(s);
            });
            Avx512::detect().into_iter().for_each(|s| {
                sums::<_, 4, 4>(s);
                sums::<_, 2, 8>(s);
            });
        }
        #[cfg(target_arch = "aarch64")]
        Neon::detect().into_iter().for_each(sums::<_, 1, 4>);
    }

    #[test]
    fn transposes_of_every_shape() {
        fn check<S: Simd>(s: S) {
            for (rows, cols) in [(1, 1), (16, 16), (17, 5), (64, 40), (5, 70), (48, 33), (0, 40), (0, 5)] {
                let (from_ld, to_ld) = (cols + 3, rows + 2);
                let from: Vec<f32> = (0..rows * from_ld).map(|i| i as f32).collect();
                let mut to = vec![-1.0; cols * to_ld];
                s.transpose(&from, from_ld, &mut to, to_ld, rows, cols);
                for (i, &x) in to.iter().enumerate() {
                    let (col, row) = (i / to_ld, i % to_ld);
                    let want = if row < rows { from[row * from_ld + col] } else { -1.0 };
                    assert_eq!(x, want, "({row}, {col}) of {rows} x {cols}");
                }
            }
        }
        check(Portable::<4>);
        #[cfg(target_arch = "x86_64")]
        {
            Avx2::detect().into_iter().for_each(check);
            Avx512::detect().into_iter().for_each(check);
        }
        #[cfg(target_arch = "aarch64")]
        Neon::detect().into_iter().for_each(check);
    }

    /// The features that a file of this folder is compiled for, and the features that its `detect` checks.
    fn features_of(file: &str) -> [Vec<String>; 2] {
        let path = format!("{}/src/simd/{file}.rs", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        ["target_feature(enable = \"", "_feature_detected!(\""].map(|before| {
            let lists = text.split(before).skip(1).filter_map(|rest| rest.split('"').next());
            lists.flat_map(|list| list.split(',')).map(str::to_owned).collect()
        })
    }

    /// Functions compiled for an instruction set are called with a token of that set. The `detect` functions
    /// behind a token must check all features that the functions are compiled for.
    #[test]
    fn proofs_cover_what_functions_are_compiled_for() {
        // Each file, with the files whose `detect` has checked its features: its own, and those that its
        // `detect` calls.
        let proofs = [
            ("avx2", vec!["avx2"]),
            ("avx512", vec!["avx512", "avx2"]),
            ("avx512vnni", vec!["avx512vnni", "avx512", "avx2"]),
            ("amx", vec!["amx", "avx512", "avx2"]),
            ("neon", vec!["neon"]),
            ("codes", vec!["codes"]),
            ("avx512vbmi", vec!["avx512vbmi", "avx512", "avx2"]),
            ("lookup", vec!["avx512vbmi", "avx512", "avx2"]),
        ];
        let found = |proofs: &[&str]| -> Vec<String> {
            proofs.iter().flat_map(|file| features_of(file)[1].clone()).collect()
        };
        for (file, proofs) in &proofs {
            let found = found(proofs);
            assert!(!found.is_empty(), "{file}");
            for feature in &features_of(file)[0] {
                assert!(found.contains(feature), "{file}.rs is compiled for {feature}, which no proof finds");
            }
        }
        // Functions that two sets share are compiled for the features that both have. Those of AVX2 are also
        // called with AVX-512.
        for proofs in [&proofs[2].1, &proofs[3].1] {
            let found = found(proofs);
            assert!(features_of("avx512bw")[0].iter().all(|feature| found.contains(feature)), "{proofs:?}");
        }
        let known: Vec<&str> = proofs.iter().map(|(file, _)| *file).chain(["avx512bw"]).collect();
        for entry in std::fs::read_dir(format!("{}/src/simd", env!("CARGO_MANIFEST_DIR"))).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let file = name.trim_end_matches(".rs");
            // This file contains the strings that are searched for.
            let plain = file == "mod" || features_of(file)[0].is_empty();
            assert!(plain || known.contains(&file), "{file}.rs has no proof in this test");
        }
    }
}
