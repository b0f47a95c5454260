//! Attention on tensors in host memory: upload, compute, download.

use cpu::{Element, Elements, ElementsMut};
use driver::{DeviceSlice, PoolBuffer, Stream, bytes_of, bytes_of_mut};
use problem::{Operand, OperandMap, Operands, Problem, ProblemError, Tensor};

use super::{Gpu, Prepared};
use crate::AttentionError;

/// Computes on slices that cover the span of the problem's strides. `lse` has one element per output row.
pub(crate) fn attend<T: Element>(
    gpu: &Gpu,
    problem: &Problem,
    inputs: &Operands<'_>,
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let prepared = gpu.prepare(problem, None)?;
    gpu.on_stream(|stream| attend_on(gpu, stream, (&prepared, problem), inputs, out, lse))
}

fn attend_on<T: Element>(
    gpu: &Gpu,
    stream: &Stream,
    (prepared, problem): (&Prepared, &Problem),
    inputs: &Operands<'_>,
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let pool = gpu.pool()?;
    let upload = |bytes: &[u8]| -> Result<PoolBuffer, AttentionError> {
        let buffer = pool.allocate(stream, bytes.len())?;
        stream.upload(buffer.slice(), bytes)?;
        Ok(buffer)
    };
    // Slices may be longer than their operands.
    let used = |(operand, elements): (Operand, &Elements<'_>)| {
        let needed = problem.operand(operand).map_or(0, |spec| spec.elements);
        Ok((operand, upload(elements.range(0, needed).bytes())?))
    };
    let inputs = inputs.iter().map(used).collect::<Result<OperandMap<PoolBuffer>, AttentionError>>()?;
    let elements = span(problem, Tensor::Out)?;
    let out = &mut out[..elements];
    // The elements between the output rows, and rows of no sequence, must keep their values, so they are
    // uploaded first.
    let even = problem.lengths.is_even();
    let dense = even && problem.extents(Tensor::Out).iter().product::<usize>() == elements;
    let device_out =
        if dense { pool.allocate(stream, size_of_val(out))? } else { upload(T::elements(out).bytes())? };
    let device_lse = match &lse {
        Some(lse) if even => Some(pool.allocate(stream, size_of_val(&**lse))?),
        Some(lse) => Some(upload(bytes_of(lse))?),
        None => None,
    };
    let lse_slice = device_lse.as_ref().map(PoolBuffer::slice);
    let slice = |operand| inputs.get(operand).map_or(DeviceSlice::EMPTY, PoolBuffer::slice);
    let others = inputs.iter().filter(|(operand, _)| !matches!(operand, Operand::Tensor(_)));
    let others: Vec<_> = others.map(|(operand, buffer)| (operand, buffer.slice())).collect();
    let tensors = [slice(Operand::Q), slice(Operand::K), slice(Operand::V), device_out.slice()];
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
