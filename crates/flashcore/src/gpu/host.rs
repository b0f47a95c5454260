//! Attention on tensors in host memory: upload, compute, download.

use cpu::{Element, Elements, ElementsMut};
use driver::{PoolBuffer, Stream, bytes_of, bytes_of_mut};
use problem::{Problem, ProblemError, Tensor};

use super::{Gpu, Prepared};
use crate::AttentionError;

/// Computes on slices that cover the span of the problem's strides. `lse` has one element per output row.
pub(crate) fn attend<T: Element>(
    gpu: &Gpu,
    problem: &Problem,
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let prepared = gpu.prepare(problem, None)?;
    gpu.on_stream(|stream| attend_on(gpu, stream, &prepared, problem, [q, k, v], out, lse))
}

fn attend_on<T: Element>(
    gpu: &Gpu,
    stream: &Stream,
    prepared: &Prepared,
    problem: &Problem,
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let pool = gpu.pool()?;
    let upload = |tensor: Tensor, data: &[T]| -> Result<PoolBuffer, AttentionError> {
        let bytes = bytes(&data[..span(problem, tensor)?]);
        let buffer = pool.allocate(stream, bytes.len())?;
        stream.upload(buffer.slice(), bytes)?;
        Ok(buffer)
    };
    let (q, k, v) = (upload(Tensor::Q, q)?, upload(Tensor::K, k)?, upload(Tensor::V, v)?);
    let elements = span(problem, Tensor::Out)?;
    let out = &mut out[..elements];
    // The elements between the output rows must keep their values, so they are uploaded first.
    let dense = problem.extents(Tensor::Out).iter().product::<usize>() == elements;
    let device_out = if dense { pool.allocate(stream, size_of_val(out))? } else { upload(Tensor::Out, out)? };
    let device_lse = match &lse {
        Some(lse) => Some(pool.allocate(stream, size_of_val(&**lse))?),
        None => None,
    };
    let lse_slice = device_lse.as_ref().map(PoolBuffer::slice);
    prepared.enqueue(stream, q.slice(), k.slice(), v.slice(), device_out.slice(), lse_slice)?;
    download(stream, &device_out, out)?;
    if let (Some(host), Some(device)) = (lse, &device_lse) {
        stream.download(device.slice(), bytes_of_mut(host))?;
    }
    Ok(())
}

fn span(problem: &Problem, tensor: Tensor) -> Result<usize, AttentionError> {
    let (elements, _) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: tensor.name() })?;
    Ok(elements)
}

fn bytes<T: Element>(data: &[T]) -> &[u8] {
    match T::elements(data) {
        Elements::F32(data) => bytes_of(data),
        Elements::F16(data) => bytes_of(data),
        Elements::Bf16(data) => bytes_of(data),
    }
}

fn download<T: Element>(stream: &Stream, from: &PoolBuffer, to: &mut [T]) -> Result<(), AttentionError> {
    let to = match T::elements_mut(to) {
        ElementsMut::F32(data) => bytes_of_mut(data),
        ElementsMut::F16(data) => bytes_of_mut(data),
        ElementsMut::Bf16(data) => bytes_of_mut(data),
    };
    Ok(stream.download(from.slice(), to)?)
}
