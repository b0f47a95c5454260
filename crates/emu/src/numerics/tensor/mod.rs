//! `mma.sync` bit for bit: D = A·B + C over the fragments of one warp (PTX ISA, "Matrix multiply-accumulate
//! operation using mma instruction").
//!
//! A tensor core does not round after each addition. It multiplies exactly and aligns the products and C to
//! the largest exponent among them. It truncates each toward zero to a few bits below that exponent, adds
//! exactly and rounds once: toward zero for f32, to nearest even for f16. Zeros take no part in the
//! alignment, and a zero sum is +0. NaN results are 0x7FFFFFFF or 0x7FFF. The number of products in one such
//! sum and the number of bits kept depend on the architecture: see [`TensorRules`] and [`recipe`].
//!
//! Sources: Fasi et al. (PeerJ CS 7:e330, 2021), Khattak and Mikaitis (arXiv 2512.07004), MMA-Sim (arXiv
//! 2511.10909), the machine code of each target, and, for Hopper, comparison with an H200. The rules of the
//! other architectures have not been compared with hardware here.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod decode;
mod fast;
mod infinite;
mod integer;
mod kind;
mod layout;
mod random;
pub mod recipe;
pub mod reference;
#[cfg(test)]
mod tests;
pub mod wmma;

pub use kind::{Accumulator, BitProduct, Input, MmaKind, Shape, TensorRules, UnsupportedMma};
pub use random::{Distribution, Fragment, Fragment64, random_fragment, random_fragment_f64, random_sums};

use super::{Lanes32, Lanes64};

/// The number of registers passed to an [`mma`] does not match its kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?} takes {expected} registers in operand {operand}, got {found}")]
pub struct OperandError {
    /// The instruction.
    pub kind: MmaKind,
    /// `a`, `b`, `c` or `d`.
    pub operand: char,
    /// Number of registers that the fragment layout needs.
    pub expected: usize,
    /// Number of registers given.
    pub found: usize,
}

/// Why an `mma` was not executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MmaError {
    /// The number of registers is wrong.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// The architecture, or an `mma` on registers of this width, does not support this kind.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedMma),
}

/// Executes one `mma.sync` on 32-bit registers: every kind except f64.
///
/// # Errors
/// The number of registers does not match the fragment, the kind is f64, or `rules` does not have the kind.
pub fn mma(
    kind: MmaKind,
    rules: TensorRules,
    a: &[Lanes32],
    b: &[Lanes32],
    c: &[Lanes32],
    d: &mut [Lanes32],
) -> Result<(), MmaError> {
    check_counts(kind, [a.len(), b.len(), c.len(), d.len()])?;
    kind.check(rules)?;
    match kind.accumulator() {
        Accumulator::S32 { .. } if kind.a().bits() == 1 => integer::mma_bits(kind, a, b, c, d),
        Accumulator::S32 { .. } => integer::mma(kind, a, b, c, d),
        Accumulator::F64 => return Err(UnsupportedMma { kind, rules }.into()),
        Accumulator::F16 | Accumulator::F32 => fast::mma(kind, rules, [a, b, c], d),
    }
    Ok(())
}

/// Executes one `mma.sync` on f64 fragments: a chain of fused multiply-adds in the order of k. Each is
/// rounded to nearest even.
///
/// # Errors
/// The number of registers does not match the fragment, the kind is not f64, or `rules` does not have the
/// shape.
pub fn mma_f64(
    kind: MmaKind,
    rules: TensorRules,
    a: &[Lanes64],
    b: &[Lanes64],
    c: &[Lanes64],
    d: &mut [Lanes64],
) -> Result<(), MmaError> {
    check_counts(kind, [a.len(), b.len(), c.len(), d.len()])?;
    kind.check(rules)?;
    if kind.accumulator() != Accumulator::F64 {
        return Err(UnsupportedMma { kind, rules }.into());
    }
    pulp::Arch::new().dispatch(FusedChain { shape: kind.shape(), a, b, c, d });
    Ok(())
}

/// A struct rather than a closure, so that its body is certain to be compiled with hardware multiply-adds.
struct FusedChain<'a> {
    shape: Shape,
    a: &'a [Lanes64],
    b: &'a [Lanes64],
    c: &'a [Lanes64],
    d: &'a mut [Lanes64],
}

impl pulp::WithSimd for FusedChain<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let Self { shape, a, b, c, d } = self;
        for (register, (c, d)) in c.iter().zip(d).enumerate() {
            for (lane, (c, d)) in c.iter().zip(d).enumerate() {
                let (row, column) = layout::accumulator(shape, register, lane);
                let mut sum = f64::from_bits(*c);
                for k in 0..shape.k {
                    let (ra, la) = layout::locate_a(shape, 1, row, k);
                    let (rb, lb) = layout::locate_b(1, k, column);
                    sum = fma_f64(f64::from_bits(a[ra][la]), f64::from_bits(b[rb][lb]), sum);
                }
                *d = sum.to_bits();
            }
        }
    }
}

/// One step of DMMA. A NaN operand is returned as a quiet NaN. B's NaN takes precedence over the sum's, and
/// that over A's (measured on an H200).
#[inline(always)]
fn fma_f64(a: f64, b: f64, sum: f64) -> f64 {
    let result = a.mul_add(b, sum);
    if !result.is_nan() {
        return result;
    }
    let given = [b, sum, a].into_iter().find(|x| x.is_nan());
    f64::from_bits(given.map_or(F64_NAN, |x| x.to_bits() | F64_QUIET))
}

/// The bit that distinguishes a quiet NaN from a signalling one.
const F64_QUIET: u64 = 1 << 51;

/// The NaN that DMMA produces when no operand is NaN.
const F64_NAN: u64 = super::float::nan(super::round::Format::F64);

fn check_counts(kind: MmaKind, found: [usize; 4]) -> Result<(), OperandError> {
    let [a, b, c] = kind.registers();
    for ((operand, expected), found) in ['a', 'b', 'c', 'd'].into_iter().zip([a, b, c, c]).zip(found) {
        if expected != found {
            return Err(OperandError { kind, operand, expected, found });
        }
    }
    Ok(())
}
