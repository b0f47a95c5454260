//! Measures the peak rates of a core with loops that only multiply in registers or only read. No kernel of
//! this crate multiplies or reads faster on the same core, so a problem's work divided by these rates is a
//! lower bound of the time.

use std::hint::black_box;

use crate::Isa;
use crate::simd::{self, Simd};

/// Number of independent sums: more than a latency of four or five cycles times two FMAs per cycle, and few
/// enough for the registers.
const CHAINS: usize = 12;

/// Executes `rounds` times about a dozen multiply-adds in registers on the calling thread. Returns the number
/// of floating-point operations. With [`Isa::Avx512Vnni`], operations on 16-bit integers count as
/// floating-point operations. Returns 0 if the processor does not support the instructions.
pub fn products(isa: Isa, rounds: usize) -> f64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => simd::Amx::detect().map_or(0.0, |s| s.products(rounds)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => simd::Avx512Vnni::detect().map_or(0.0, |s| s.products(rounds)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => simd::Avx512::detect().map_or(0.0, |s| s.products(rounds)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => simd::Avx2::detect().map_or(0.0, |s| s.products(rounds)),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => simd::Neon::detect().map_or(0.0, |s| s.products(rounds)),
        Isa::Portable => simd::Portable::<4>.products(rounds),
        #[allow(unreachable_patterns)] // the sets of the other architecture
        _ => 0.0,
    }
}

/// Reads all of `from` once on the calling thread, with the widest vectors of this processor.
pub fn read(from: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(s) = simd::Avx512::detect() {
        return s.read(from);
    } else if let Some(s) = simd::Avx2::detect() {
        return s.read(from);
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(s) = simd::Neon::detect() {
        return s.read(from);
    }
    simd::Portable::<4>.read(from);
}

/// The loop of [`Simd::products`], to be compiled for the instruction set.
#[inline(always)]
pub(crate) fn chains<S: Simd>(s: S, rounds: usize) -> f64 {
    accumulate(s, |a, b, sum| s.fma(a, b, sum), rounds)
}

/// Sums by an instruction with three vector operands. Each counts as two operations per lane.
#[inline(always)]
pub(crate) fn accumulate<S: Simd>(s: S, product: impl Fn(S::V, S::V, S::V) -> S::V, rounds: usize) -> f64 {
    // The compiler does not know the values, and each sum differs, so no sum is optimised away.
    let (a, b) = (s.splat(black_box(1e-9)), s.splat(black_box(1e-9)));
    let mut sums: [S::V; CHAINS] = std::array::from_fn(|chain| s.splat(black_box(chain as f32)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = product(a, b, *sum);
        }
    }
    keep(s, sums);
    (2 * S::LANES * CHAINS * rounds) as f64
}

/// The loop of [`Simd::read`], to be compiled for the instruction set.
#[inline(always)]
pub(crate) fn sum<S: Simd>(s: S, from: &[f32]) {
    const SUMS: usize = 8;
    let mut sums = [s.splat(0.0); SUMS];
    for line in from.chunks_exact(SUMS * S::LANES) {
        for (part, sum) in line.chunks_exact(S::LANES).zip(&mut sums) {
            *sum = s.add(*sum, s.load(part));
        }
    }
    keep(s, sums);
}

#[inline(always)]
fn keep<S: Simd, const N: usize>(s: S, sums: [S::V; N]) {
    let total = sums.into_iter().fold(s.splat(0.0), |total, sum| s.add(total, sum));
    let mut lanes = [0.0; 16];
    s.store(total, &mut lanes);
    black_box(lanes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_counted_where_there_are_instructions() {
        for isa in Isa::ALL {
            let [few, many] = [10, 1000].map(|rounds| products(isa, rounds));
            assert_eq!(few > 0.0, isa.is_available(), "{isa}");
            assert_eq!(many, 100.0 * few, "{isa}");
        }
        assert_eq!(products(Isa::Portable, 1), 2.0 * 4.0 * CHAINS as f64);
        read(&[1.0; 1000]);
        read(&[]);
    }
}
