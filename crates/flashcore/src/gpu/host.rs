//! Attention on tensors in host memory: upload, compute, download.

use driver::{DeviceSlice, PoolBuffer, Stream, bytes_of_mut};
use problem::{Elements, ElementsMut, Operand, OperandMap, OperandSpec, Operands, Problem};

use super::{Gpu, Prepared};
use crate::AttentionError;

/// Computes a pass on slices that cover the spans of the problem's operands.
pub(crate) fn attend(
    gpu: &Gpu,
    problem: &Problem,
    inputs: &Operands<'_>,
    outputs: OperandMap<ElementsMut<'_>>,
) -> Result<(), AttentionError> {
    let prepared = gpu.prepare(problem, None)?;
    gpu.on_stream(|stream| attend_on(gpu, stream, (&prepared, problem), inputs, outputs))
}

fn attend_on(
    gpu: &Gpu,
    stream: &Stream,
    (prepared, problem): (&Prepared, &Problem),
    inputs: &Operands<'_>,
    mut outputs: OperandMap<ElementsMut<'_>>,
) -> Result<(), AttentionError> {
    let pool = gpu.pool()?;
    let upload = |bytes: &[u8]| -> Result<PoolBuffer, AttentionError> {
        let buffer = pool.allocate(stream, bytes.len())?;
        stream.upload(buffer.slice(), bytes)?;
        Ok(buffer)
    };
    let mut buffers = Vec::with_capacity(8);
    let mut results = Vec::with_capacity(4);
    for spec in problem.operands() {
        // Slices may be longer than their operands.
        if spec.operand.is_output(problem.pass.kind()) {
            let missing = AttentionError::OperandWanted { operand: spec.operand.name(), wanted: true };
            let output = bytes_mut(outputs.remove(spec.operand).ok_or(missing)?);
            let host = &mut output[..spec.bytes()];
            // The elements between rows, and rows of no sequence, must keep their values.
            let all = writes_all(problem, spec);
            buffers.push(if all { pool.allocate(stream, host.len())? } else { upload(host)? });
            results.push((buffers.len() - 1, host));
        } else {
            let input = inputs.get(spec.operand).copied().unwrap_or(Elements::F32(&[]));
            buffers.push(upload(input.range(0, spec.elements).bytes())?);
        }
    }
    let slices: Vec<DeviceSlice<'_>> = buffers.iter().map(PoolBuffer::slice).collect();
    prepared.launch(stream.into(), |operand| slices[operand])?;
    for (index, host) in results {
        stream.download(slices[index], host)?;
    }
    Ok(())
}

/// Whether a launch writes each element of an output from the lowest to the highest.
fn writes_all(problem: &Problem, spec: OperandSpec) -> bool {
    let has_gaps = match spec.operand {
        Operand::Tensor(tensor) => problem.extents(tensor).iter().product::<usize>() != spec.elements,
        _ => false,
    };
    problem.lengths.is_even() && !problem.is_empty() && !has_gaps
}

/// The elements as bytes, in the byte order of this machine.
pub(crate) fn bytes_mut(elements: ElementsMut<'_>) -> &mut [u8] {
    match elements {
        ElementsMut::F32(data) => bytes_of_mut(data),
        ElementsMut::F16(data) => bytes_of_mut(data),
        ElementsMut::Bf16(data) => bytes_of_mut(data),
        ElementsMut::E4m3(data) => bytemuck::cast_slice_mut(data),
        ElementsMut::E5m2(data) => bytemuck::cast_slice_mut(data),
    }
}
