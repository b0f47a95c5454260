//! Kernels that quantise Q, K or V to 8-bit floats with descale factors.
//!
//! Codes and factors are equal to those of the CPU to the last bit. A CTA that holds all rows of a factor in
//! registers reads them once, and so does a cluster of CTAs if several heads share the factor. Otherwise a
//! first kernel finds the largest magnitudes and a second kernel reads the tensor again. Where keys are
//! smoothed, two kernels compute the means of K first, which reads K once more.

mod code;
mod kernels;
mod place;
mod smooth;
mod units;

pub use code::QuantizationCode;

use problem::{Problem, Quantization, Tensor};

use crate::error::accept;
use crate::forward::contract::misaligned;
use crate::program::Contracts;
use crate::{Arch, KernelError, PlanError, Program, draft};
use code::{Passes, ROTATING, THREADS, UNIT};
use place::Sizes;

/// The name of the generator in errors.
const NAME: &str = "quantize";

/// Emits the kernels that quantise a tensor of a problem. The tensor is read with its strides. The codes are
/// dense `[batch, heads, rows, dim]`, the factors dense as [`Quantization::layout`] says.
///
/// # Errors
/// When the options do not fit the tensor ([`Quantization::check`]), and when the kernels do not support the
/// tensor or the architecture.
pub fn emit(
    problem: &Problem,
    tensor: Tensor,
    options: &Quantization,
    arch: &Arch,
) -> Result<Program, KernelError> {
    let code = code(problem, tensor, options, arch)?;
    draft::emit(kernels::drafts(&code, problem, options, arch))
        .map_err(|violations| KernelError::Generator { family: NAME, violations })
}

/// The properties on which the code of a tensor's quantisation depends, and the launch contracts, without the
/// code itself. Code that was emitted for an equal [`QuantizationCode`] runs with these contracts.
///
/// # Errors
/// As [`emit`].
pub fn bind(
    problem: &Problem,
    tensor: Tensor,
    options: &Quantization,
    arch: &Arch,
) -> Result<(QuantizationCode, Contracts), KernelError> {
    let code = code(problem, tensor, options, arch)?;
    Ok((code, draft::contracts(kernels::drafts(&code, problem, options, arch))))
}

/// The code for a tensor, which is checked first.
fn code(
    problem: &Problem,
    tensor: Tensor,
    options: &Quantization,
    arch: &Arch,
) -> Result<QuantizationCode, KernelError> {
    options.check(problem, tensor)?;
    check(problem, tensor, arch)?;
    let [batch, heads, rows, dim] = problem.extents(tensor);
    let rotated = options.rotation(problem, tensor).is_some();
    let two = QuantizationCode {
        tensor,
        from: problem.dtypes.of(tensor),
        to: options.dtype,
        dim: dim as u32,
        rotated,
        smoothed: options.smooth_keys && tensor == Tensor::K,
        threads: if rotated { ROTATING } else { THREADS },
        passes: Passes::Two { grouped: heads > problem.heads_kv, block: options.rows },
        flat: batch.max(problem.heads_kv) as u64 > Arch::GRID_YZ,
    };
    let of_factor = options.rows.map_or(rows, |block| rows.min(block as usize)) as u32;
    let group = (heads / problem.heads_kv) as u32;
    let code = two.held(of_factor, group, arch.sm >= 90).unwrap_or(two.fitted());
    Sizes::new(&code, problem, options).grid().check("CTAs (parts of the rows · heads_kv · batch)")?;
    if code.smoothed {
        let of_sums = code.of_sums();
        Sizes::of_sums(&of_sums, problem).grid().check("CTAs that add keys (parts · heads_kv · batch)")?;
    }
    Ok(code)
}

/// Rejects what the kernels do not support.
fn check(problem: &Problem, tensor: Tensor, arch: &Arch) -> Result<(), PlanError> {
    let [_, heads, rows, dim] = problem.extents(tensor);
    let refuse = |what: String, value: String, accepted: &str| {
        Err(PlanError::unsupported(NAME, what, value, accepted))
    };
    let rounds = arch.multiplies_fp8();
    accept("sm", arch.sm.into(), rounds, "89 and later, which round to 8-bit floats")?;
    let from = problem.dtypes.of(tensor);
    if from.is_fp8() {
        let accepted = "f16, bf16 or f32";
        return Err(PlanError::DType { family: NAME, dtype: problem.dtypes, accepted });
    }
    let what = if tensor == Tensor::V { "head_dim_v" } else { "head_dim" };
    let fits = dim.is_multiple_of(UNIT as usize) && dim <= 576;
    accept(what, dim as u64, fits, "multiples of 16 up to 576, as the kernels store 16 codes at once")?;
    let elements = 16 / from.bytes() as u32;
    if let Some((stride, value)) = misaligned(problem, tensor, elements) {
        let accepted = format!("a multiple of {elements} elements, as the kernels load 16 bytes at once");
        return refuse(format!("the {stride} of {}", tensor.name()), value.to_string(), &accepted);
    }
    // Rows of a group are counted in 31 bits, and so are the CTAs of a head.
    let group = heads / problem.heads_kv;
    let rows_of_group = rows as u64 * group as u64;
    let what = if tensor == Tensor::Q { "seq_q · group size" } else { "seq_kv" };
    accept(what, rows_of_group, rows_of_group < 1 << 30, "below 2^30")
}
