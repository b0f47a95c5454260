//! Attention on tensors in host memory: upload, compute, download.

use cpu::{Element, Elements, ElementsMut};
use driver::{DeviceSlice, PoolBuffer, Stream, bytes_of, bytes_of_mut};
use kernels::{LengthArray, Operand};
use problem::{Operands, Problem, ProblemError, TableData, Tensor};

use super::{Gpu, Prepared};
use crate::AttentionError;

/// Computes on slices that cover the span of the problem's strides. `lse` has one element per output row.
pub(crate) fn attend<T: Element>(
    gpu: &Gpu,
    problem: &Problem,
    inputs: [Elements<'_>; 3],
    operands: &Operands<'_>,
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let prepared = gpu.prepare(problem, None)?;
    gpu.on_stream(|stream| {
        let others = others(operands);
        attend_on(gpu, stream, (&prepared, problem), inputs, &others, out, lse)
    })
}

/// The operands beside Q, K and V, as bytes.
fn others<'a>(operands: &Operands<'a>) -> Vec<(Operand, &'a [u8])> {
    let lengths = &operands.lengths;
    let arrays = LengthArray::ALL.into_iter().map(|array| {
        let values = match array {
            LengthArray::CumulativeQ => lengths.cumulative_q,
            LengthArray::CumulativeKv => lengths.cumulative_kv,
            LengthArray::UsedQ => lengths.used_q,
            LengthArray::UsedKv => lengths.used_kv,
            LengthArray::LeftPad => lengths.left_pad,
        };
        (Operand::Lengths(array), bytes_of(values))
    });
    let given = arrays.chain([(Operand::Sinks, bytes_of(operands.sinks))]);
    let given = given.filter(|(_, bytes)| !bytes.is_empty());
    let tables = (0..=u8::MAX).zip(operands.tables).map(|(i, data)| {
        let bytes = match data {
            TableData::F32(x) => bytes_of(x),
            TableData::F16(x) => bytes_of(x),
            TableData::Bf16(x) => bytes_of(x),
            TableData::I32(x) => bytes_of(x),
            TableData::U8(x) => bytes_of(x),
        };
        (Operand::Table(i), bytes)
    });
    let scales = &operands.scales;
    let factors = [(Tensor::Q, scales.q), (Tensor::K, scales.k), (Tensor::V, scales.v)];
    let factors = factors.into_iter().filter(|(_, factors)| !factors.is_empty());
    let factors = factors.map(|(tensor, factors)| (Operand::Descale(tensor), bytes_of(factors)));
    given.chain(tables).chain(factors).collect()
}

fn attend_on<T: Element>(
    gpu: &Gpu,
    stream: &Stream,
    (prepared, problem): (&Prepared, &Problem),
    [q, k, v]: [Elements<'_>; 3],
    others: &[(Operand, &[u8])],
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let pool = gpu.pool()?;
    let upload_bytes = |bytes: &[u8]| -> Result<PoolBuffer, AttentionError> {
        let buffer = pool.allocate(stream, bytes.len())?;
        stream.upload(buffer.slice(), bytes)?;
        Ok(buffer)
    };
    let upload =
        |tensor: Tensor, data: Elements<'_>| upload_bytes(bytes(data.range(0, span(problem, tensor)?)));
    let (q, k, v) = (upload(Tensor::Q, q)?, upload(Tensor::K, k)?, upload(Tensor::V, v)?);
    let elements = span(problem, Tensor::Out)?;
    let out = &mut out[..elements];
    // The elements between the output rows, and rows of no sequence, must keep their values, so they are
    // uploaded first.
    let even = problem.lengths.is_even();
    let dense = even && problem.extents(Tensor::Out).iter().product::<usize>() == elements;
    let device_out =
        if dense { pool.allocate(stream, size_of_val(out))? } else { upload(Tensor::Out, T::elements(out))? };
    let device_lse = match &lse {
        Some(lse) if even => Some(pool.allocate(stream, size_of_val(&**lse))?),
        Some(lse) => Some(upload_bytes(bytes_of(lse))?),
        None => None,
    };
    let lse_slice = device_lse.as_ref().map(PoolBuffer::slice);
    let buffers: Vec<PoolBuffer> =
        others.iter().map(|(_, bytes)| upload_bytes(bytes)).collect::<Result<_, _>>()?;
    let others: Vec<(Operand, DeviceSlice<'_>)> =
        others.iter().zip(&buffers).map(|((operand, _), buffer)| (*operand, buffer.slice())).collect();
    let tensors = [q.slice(), k.slice(), v.slice(), device_out.slice()];
    prepared.enqueue_with(stream, tensors, lse_slice, &others)?;
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

fn bytes(data: Elements<'_>) -> &[u8] {
    match data {
        Elements::F32(data) => bytes_of(data),
        Elements::F16(data) => bytes_of(data),
        Elements::Bf16(data) => bytes_of(data),
        Elements::E4m3(data) => bytemuck::cast_slice(data),
        Elements::E5m2(data) => bytemuck::cast_slice(data),
    }
}

fn download<T: Element>(stream: &Stream, from: &PoolBuffer, to: &mut [T]) -> Result<(), AttentionError> {
    let to = match T::elements_mut(to) {
        ElementsMut::F32(data) => bytes_of_mut(data),
        ElementsMut::F16(data) => bytes_of_mut(data),
        ElementsMut::Bf16(data) => bytes_of_mut(data),
        ElementsMut::E4m3(data) => bytemuck::cast_slice_mut(data),
        ElementsMut::E5m2(data) => bytemuck::cast_slice_mut(data),
    };
    Ok(stream.download(from.slice(), to)?)
}
