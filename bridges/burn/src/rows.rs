//! The calls of FlashCore on tensors of `Flex`.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, TensorData};
use flashcore::{Attention, AttentionError, Element, Output, Strides, TensorView};

use crate::AttentionModuleOptions;

/// FlashCore's name of a type of floats.
pub(crate) fn element(dtype: DType) -> Option<flashcore::DType> {
    match dtype {
        DType::F32 => Some(flashcore::DType::F32),
        DType::F16 => Some(flashcore::DType::F16),
        DType::BF16 => Some(flashcore::DType::Bf16),
        _ => None,
    }
}

/// Computes with the element type of `$dtype` as `$element`.
macro_rules! by_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $element = half::f16;
                $body
            }
            DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}

/// The tensor, copied if its rows are not contiguous or lie backwards.
pub(crate) fn with_dense_rows(tensor: FlexTensor) -> FlexTensor {
    let (strides, shape) = (tensor.layout().strides(), tensor.layout().shape().dims::<4>());
    let is_backwards = strides.iter().any(|&stride| stride < 0);
    if is_backwards || shape[3] > 1 && strides[3] != 1 { tensor.to_contiguous() } else { tensor }
}

/// The rows of a tensor whose whole storage is `data`.
fn view<'a, T>(tensor: &FlexTensor, data: &'a [T]) -> Result<TensorView<'a, T>, AttentionError> {
    let layout = tensor.layout();
    let stride = |dimension: usize| layout.strides()[dimension] as i64;
    let strides = Strides { batch: stride(0), head: stride(1), row: stride(2) };
    TensorView::strided(data.get(layout.start_offset()..).unwrap_or(&[]), layout.shape().dims::<4>(), strides)
}

fn call<'a, T: Element>(
    [q, k, v]: [TensorView<'a, T>; 3],
    options: AttentionModuleOptions,
) -> Attention<'a, T> {
    let mut call = flashcore::attention(q, k, v).device(flashcore::Device::Cpu);
    if options.is_causal {
        call = call.causal();
    }
    if let Some(scale) = options.scale {
        call = call.scale(scale as f32);
    }
    match options.softcap {
        Some(softcap) => call.softcap(softcap as f32),
        None => call,
    }
}

/// O, and the LSE `[batch, head, row]`.
pub(crate) fn forward(
    [q, k, v]: [&FlexTensor; 3],
    options: AttentionModuleOptions,
) -> Result<(FlexTensor, Vec<f32>), AttentionError> {
    by_element!(q.dtype(), T => {
        let views = [view::<T>(q, q.storage())?, view(k, k.storage())?, view(v, v.storage())?];
        let Output { data, shape, lse } = call(views, options).run()?;
        Ok((FlexTensor::from_data(TensorData::new(data, shape)), lse))
    })
}

/// dQ, dK and dV.
pub(crate) fn backward(
    [q, k, v]: [&FlexTensor; 3],
    out: &FlexTensor,
    lse: &[f32],
    d_out: &FlexTensor,
    options: AttentionModuleOptions,
) -> Result<[FlexTensor; 3], AttentionError> {
    by_element!(q.dtype(), T => {
        let views = [view::<T>(q, q.storage())?, view(k, k.storage())?, view(v, v.storage())?];
        let results = [view::<T>(out, out.storage())?, view(d_out, d_out.storage())?];
        let gradients = call(views, options).backward(results[0], lse, results[1])?;
        let shaped = |data: Vec<T>, tensor: &FlexTensor| {
            FlexTensor::from_data(TensorData::new(data, tensor.layout().shape().clone()))
        };
        Ok([shaped(gradients.dq, q), shaped(gradients.dk, k), shaped(gradients.dv, v)])
    })
}
