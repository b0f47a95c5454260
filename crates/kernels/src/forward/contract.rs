//! Parts of the launch contract that all forward families share: buffers, strides and scale.

use attend::{After, KeyBand, Rescale, Softcap, Tanh};
use problem::{Band, Corner, DType, Problem, Strides, Tensor};
use ptx::{Builder, Element, Global, Half, R32, R64, TensorMapPtr};
use tile::{SwizzledTile, TensorRows};

use crate::Symptom;
use crate::contract::{Contract, origin};
use crate::error::accept;
use crate::genes::Gene;
use crate::genes::Turn::To;
use crate::{Baked, Dims, PlanError};

/// Strides of a tensor map must be below this number of bytes (CUDA Driver API, `cuTensorMapEncodeTiled`).
pub(crate) const STRIDE_LIMIT: i64 = 1 << 40;

/// Whether all four tensors have one 16-bit type.
pub(crate) fn is_half(problem: &Problem) -> bool {
    matches!(problem.dtypes.one(), Some(DType::F16 | DType::Bf16))
}

/// The element type of O. The plan's check has rejected f32.
pub(crate) fn half(dims: impl Into<Dims>) -> Half {
    if dims.into().dtypes.out == DType::Bf16 { Half::Bf16 } else { Half::F16 }
}

/// The type of O, if it has 16 bits.
pub(crate) fn out_half(dims: impl Into<Dims>) -> Option<Half> {
    match dims.into().dtypes.out {
        DType::F16 => Some(Half::F16),
        DType::Bf16 => Some(Half::Bf16),
        DType::F32 | DType::E4m3 | DType::E5m2 => None,
    }
}

/// The largest threshold of [`Rescale::Beyond`] for probabilities of a type. In f16 and e4m3 it follows from
/// the range of the type. For bf16 it is a choice: the former limit of f16 for all types, which no search
/// exceeds. The range of bf16 would allow 60, which `wgmma` accepts (`largest_threshold` there).
const fn most_beyond(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => Rescale::MOST_IN_F16,
        DType::Bf16 | DType::F32 => 15,
        DType::E4m3 | DType::E5m2 => Rescale::MOST_IN_E4M3,
    }
}

/// Rejects thresholds with which probabilities leave the range of their type.
pub(crate) fn check_rescale(rescale: Rescale, dtype: DType) -> Result<(), PlanError> {
    let Rescale::Beyond(threshold) = rescale else { return Ok(()) };
    let most = most_beyond(dtype);
    accept("rescale.beyond", threshold.into(), threshold <= most, &format!("0 to {most} in {dtype}"))
}

/// The nearest setting that [`check_rescale`] accepts.
pub(crate) fn rescale_within(rescale: Rescale, dtype: DType) -> Rescale {
    match rescale {
        Rescale::Always => Rescale::Always,
        Rescale::Beyond(threshold) => Rescale::Beyond(threshold.min(most_beyond(dtype))),
    }
}

/// The canonical band for which kernels are emitted: without bounds that exclude no key, and aligned to the
/// bottom right if all lengths are equal. Problems whose bands differ only in the sizes of bounds share one
/// kernel.
pub(crate) fn band(problem: &Problem) -> Band {
    if !problem.lengths.is_even() {
        return problem.band.simplified_up_to(problem.seq_q, problem.seq_kv);
    }
    let band = problem.band.simplified(problem.seq_q, problem.seq_kv);
    if problem.seq_q == problem.seq_kv { band.aligned(Corner::BottomRight) } else { band }
}

/// Declares the band in a kernel. The sizes of its bounds are launch parameters.
pub(crate) fn declare_band(k: &mut Builder, contract: &mut Contract<'_>, problem: &Problem) -> KeyBand {
    let Band { corner, before, after } = band(problem);
    KeyBand {
        corner,
        before: before.map(|before| contract.u32(k, "keys_before", before)),
        after: after.map(|after| match after {
            0 => After::Diagonal,
            _ => After::Keys(contract.u32(k, "keys_after", after)),
        }),
        indexes_tables: !problem.programs.is_empty(),
    }
}

/// The largest scale of usual logits: the code for wider ones takes an instruction more for each score.
/// Scales of normalised queries and keys stay below 100.
const USUAL_SCALE: f32 = 128.0;
/// The largest softcap of usual logits. Up to it, the error of [`Tanh::Exp2`] is below 2^-16 after the cap.
const USUAL_CAP: f32 = 64.0;

/// Whether logits may be so large that the exponent must not have their factor ([`Softcap`]).
pub(crate) fn is_wide(problem: &Problem) -> bool {
    match problem.score.softcap {
        Some(cap) => cap > USUAL_CAP,
        None => problem.softmax_scale().abs() > USUAL_SCALE,
    }
}

/// Declares the softcap in a kernel, and the factor of wide logits. Factors are launch parameters. After a
/// score program, the program multiplies wide logits.
pub(crate) fn declare_softcap(
    k: &mut Builder,
    contract: &mut Contract<'_>,
    problem: &Problem,
    tanh: Tanh,
) -> Option<Softcap> {
    let wide = is_wide(problem) && problem.programs.score.is_none();
    let scale = f64::from(problem.softmax_scale()).abs();
    let Some(cap) = problem.score.softcap.map(f64::from) else {
        let factor = (scale * std::f64::consts::LOG2_E) as f32;
        let declare =
            || Softcap { factor: contract.f32(k, "wide_scale_log2e", factor), tanh: None, cap: None };
        return wide.then(declare);
    };
    let factor = tanh.argument_factor() * scale / cap;
    Some(Softcap {
        factor: contract.f32(k, "softcap_factor", factor as f32),
        tanh: Some(tanh),
        cap: wide.then(|| contract.f32(k, "softcap_log2e", (cap * std::f64::consts::LOG2_E) as f32)),
    })
}

/// The instructions of the softcap for problems without measurements.
pub(crate) fn default_tanh(problem: &Problem) -> Tanh {
    match problem.dtypes.weights() {
        DType::Bf16 | DType::E4m3 if problem.score.softcap.is_some() => Tanh::Approx,
        _ => Tanh::Exp2,
    }
}

/// The gene of the softcap's instructions, which has no effect without a cap.
pub(crate) fn tanh_gene(problem: &Problem) -> Gene {
    let values: &[&str] = if problem.score.softcap.is_some() { &["exp2", "approx"] } else { &[] };
    Gene::new("tanh").searched(values.iter().copied()).curing(&[(Symptom::Mufu, To("approx"))])
}

/// The maximum lengths of a family, such that sums of positions and bounds of a band stay below 2³¹.
pub(crate) fn most_rows(problem: &Problem) -> (usize, &'static str) {
    match band(problem) {
        Band { before: None, after: None | Some(0), .. } => (1 << 30, "up to 2^30"),
        _ => (1 << 29, "up to 2^29 with a window"),
    }
}

/// A stride of a tensor in bytes; 0 if the extent is 1, so that the stride is never used.
pub(crate) fn stepped(problem: &Problem, tensor: Tensor, extent: usize, stride: i64) -> i64 {
    if extent > 1 { stride.wrapping_mul(problem.dtypes.of(tensor).bytes() as i64) } else { 0 }
}

/// The first of a tensor's row strides (by name) that is not a multiple of `elements`, or else its origin if
/// that is not a multiple. Strides of an extent of 1 are ignored.
pub(crate) fn misaligned(problem: &Problem, tensor: Tensor, elements: u32) -> Option<(&'static str, i64)> {
    let ([batch, heads, rows, _], strides) = (problem.extents(tensor), problem.strides(tensor));
    let origin = problem.span(tensor).map_or(0, |(_, origin)| origin as i64);
    [
        ("batch stride", batch, strides.batch),
        ("head stride", heads, strides.head),
        ("row stride", rows, strides.row),
        ("origin", 2, origin),
    ]
    .into_iter()
    .find(|&(_, extent, stride)| extent > 1 && stride % i64::from(elements) != 0)
    .map(|(what, _, stride)| (what, stride))
}

/// Strides in bytes of a tensor's batch entries and heads, in parameters named after the tensor.
pub(crate) fn declare_head_strides(
    k: &mut Builder,
    contract: &mut Contract<'_>,
    problem: &Problem,
    tensor: Tensor,
) -> [R64; 2] {
    let ([batches, heads, ..], Strides { batch, head, .. }) =
        (problem.extents(tensor), problem.strides(tensor));
    [("batch", batches, batch), ("head", heads, head)].map(|(of, extent, stride)| {
        contract.i64(k, &format!("{}_{of}_bytes", tensor.name()), stepped(problem, tensor, extent, stride))
    })
}

/// The tensor map with which a kernel loads or stores tiles of a tensor.
pub(crate) fn declare_map(
    k: &mut Builder,
    contract: &mut Contract<'_>,
    problem: &Problem,
    (tensor, tile): (Tensor, SwizzledTile),
) -> TensorMapPtr {
    contract.tensor_map(k, tensor, |buffer| tile.map(&tensor_rows(problem, tensor, buffer)))
}

/// The address of a row of the output, from the output's pointer and the bytes between its batch entries and
/// between its heads.
pub(crate) fn row_of_output(k: &mut Builder, baked: &Baked, out: (Global, [R64; 2]), at: [R32; 3]) -> Global {
    row_of_tensor(k, (out, baked.row_bytes(Tensor::Out)), at)
}

/// The address of a row of a tensor, from the tensor's pointer and the bytes between its batch entries,
/// between its heads and between its rows.
pub(crate) fn row_of_tensor(
    k: &mut Builder,
    ((start, [batch_bytes, head_bytes]), row_bytes): ((Global, [R64; 2]), i64),
    at: [R32; 3],
) -> Global {
    let [batch, head, position] = at.map(|n| k.zext(n));
    let to = k.mad(batch, batch_bytes, start.base);
    let to = k.mad(head, head_bytes, to);
    Global { base: k.mad(position, row_bytes, to), offset: start.offset }
}

/// The address of the LSE of a row, from the LSE's pointer and the number of rows of a head. For packed
/// queries, `batch` is 0 and `position` is the row of the packed tensor.
pub(crate) fn lse_of_row(
    k: &mut Builder,
    baked: &Baked,
    (lse, seq_q): (Global, R32),
    [batch, head, position]: [R32; 3],
) -> Global {
    let before = k.mad(batch, baked.heads_q as u32, head);
    let index = k.mul_wide_u(before, seq_q);
    let position = k.zext(position);
    let index = k.add(index, position);
    Global { base: k.mad(index, 4, lse.base), offset: lse.offset }
}

/// The factor of the softmax input in the exponent. The input lies between −1 and 1 if logits are capped, and
/// is the logit itself after a score program. Wide logits have been multiplied.
fn softmax_factor(problem: &Problem) -> f64 {
    if is_wide(problem) {
        return 1.0;
    }
    let scale = match problem.programs.score {
        Some(_) => 1.0,
        None => problem.score.softcap.unwrap_or(problem.softmax_scale().abs()),
    };
    f64::from(scale) * std::f64::consts::LOG2_E
}

/// `|scale| · log2 e`, `softcap · log2 e` with a softcap, `log2 e` after a score program, or 1 for wide
/// logits. 1 for a scale of 0, in which case the kernel sets Q to zero.
pub(crate) fn factor_or_one(problem: &Problem) -> f32 {
    let factor = softmax_factor(problem);
    if factor == 0.0 { 1.0 } else { factor as f32 }
}

/// Like [`factor_or_one`], but a scale of 0 gives a factor so small that all scores have equal weight, while
/// masked scores stay −∞.
pub(crate) fn factor_or_least(problem: &Problem) -> f32 {
    (softmax_factor(problem) as f32).max(f32::MIN_POSITIVE)
}

/// The extents of a tensor, in which batch entries or heads with stride 0 count as one.
pub(crate) fn distinct_extents(problem: &Problem, tensor: Tensor) -> [usize; 4] {
    let ([batch, heads, rows, columns], strides) = (problem.extents(tensor), problem.strides(tensor));
    let distinct = |extent: usize, stride: i64| if stride == 0 { 1 } else { extent };
    [distinct(batch, strides.batch), distinct(heads, strides.head), rows, columns]
}

/// A tensor in the form that tensor maps describe. Batch entries or heads with stride 0 count as one.
fn tensor_rows(problem: &Problem, tensor: Tensor, buffer: usize) -> TensorRows {
    let ([batch, heads, rows, _], strides) = (problem.extents(tensor), problem.strides(tensor));
    let dtype = problem.dtypes.of(tensor);
    // The stride of an extent of 1 is not used, so any stride that a map accepts is correct.
    let bytes = |extent: usize, stride: i64| {
        if extent > 1 && stride != 0 { dtype.bytes() as u64 * stride as u64 } else { 16 }
    };
    TensorRows {
        buffer,
        offset: origin(problem, tensor),
        element: match dtype {
            DType::E4m3 | DType::E5m2 => Element::U8,
            DType::Bf16 => Element::Bf16,
            DType::F16 | DType::F32 => Element::F16,
        },
        extents: distinct_extents(problem, tensor).map(|n| n as u64),
        strides: [bytes(batch, strides.batch), bytes(heads, strides.head), bytes(rows, strides.row)],
    }
}

/// Checks that tensor maps can describe Q, K and V.
pub(crate) fn check_tensor_maps(problem: &Problem, family: &'static str) -> Result<(), PlanError> {
    [Tensor::Q, Tensor::K, Tensor::V]
        .into_iter()
        .try_for_each(|tensor| check_tensor_map(problem, tensor, family))
}

/// Checks that a tensor map can describe a tensor.
pub(crate) fn check_tensor_map(
    problem: &Problem,
    tensor: Tensor,
    family: &'static str,
) -> Result<(), PlanError> {
    let ([batch, heads, rows, _], strides) = (problem.extents(tensor), problem.strides(tensor));
    let element = problem.dtypes.of(tensor).bytes() as i64;
    let (unit, power) = (16 / element, 40 - element.ilog2());
    for (what, extent, stride, least) in [
        ("batch stride", batch, strides.batch, 0),
        ("head stride", heads, strides.head, 0),
        ("row stride", rows, strides.row, unit),
    ] {
        if extent > 1 && (stride % unit != 0 || !(least..STRIDE_LIMIT / element).contains(&stride)) {
            let what = format!("{} {what}", tensor.name());
            let accepted =
                format!("multiples of {unit} from {least} to 2^{power} elements, as tensor maps need");
            return Err(PlanError::unsupported(family, what, stride, accepted));
        }
    }
    Ok(())
}
