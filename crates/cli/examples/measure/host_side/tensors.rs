//! A problem's tensors on the device, and the checks of its results.

use std::sync::Arc;

use driver::{Buffer, Context, DeviceSlice, Stream};
use flashcore::gpu::Prepared;
use judge::inputs::{Style, draw};
use judge::outputs::ErrorFigures;
use judge::outputs::References;
use judge::values::{Inputs, Values};
use problem::{Operand, Problem, Tensor};

use super::{Outcome, ensure};

/// Initial pattern of outputs: NaN in every type.
const POISON: u8 = 0xff;

/// The tensors of a problem on the device, `shift` bytes after the start of their buffers.
pub struct Tensors {
    pub problem: Problem,
    pub inputs: Inputs,
    buffers: Vec<Buffer>,
    shift: usize,
}

/// The bytes of the output and the LSE.
#[derive(Clone, Debug, PartialEq)]
pub struct Result {
    pub out: Vec<u8>,
    pub lse: Vec<u8>,
}

impl Tensors {
    pub fn new(context: &Arc<Context>, problem: &Problem, seed: u64, shift: usize) -> Outcome<Tensors> {
        let inputs = draw(problem, Style::Normal, seed);
        Tensors::of(context, problem, inputs, shift)
    }

    pub fn of(context: &Arc<Context>, problem: &Problem, inputs: Inputs, shift: usize) -> Outcome<Tensors> {
        let elements = problem.span(Tensor::Out).map_or(0, |(elements, _)| elements);
        let rows = problem.batch * problem.heads_q * problem.seq_q;
        let mut contents =
            [Operand::Q, Operand::K, Operand::V].map(|operand| inputs[operand].to_bytes()).to_vec();
        contents.extend([vec![POISON; elements * problem.dtypes.out.bytes()], vec![POISON; 4 * rows]]);
        let buffers = contents.iter().map(|data| -> Outcome<Buffer> {
            let mut buffer = Buffer::new(context, data.len() + 2 * shift)?;
            buffer.upload(&[vec![POISON; shift], data.clone()].concat())?;
            Ok(buffer)
        });
        let buffers = buffers.collect::<Outcome<Vec<Buffer>>>()?;
        Ok(Tensors { problem: problem.clone(), inputs, buffers, shift })
    }

    /// The slices of q, k, v, out and lse.
    pub fn slices(&self) -> Outcome<[DeviceSlice<'_>; 5]> {
        let parts = self.buffers.iter().enumerate().map(|(i, buffer)| {
            // The LSE has elements of four bytes.
            let shift = if i == 4 { self.shift.next_multiple_of(4) } else { self.shift };
            let bytes = buffer.bytes() - 2 * self.shift;
            buffer.slice().part(shift, bytes).ok_or("a shift of more than the buffer's room")
        });
        let parts = parts.collect::<std::result::Result<Vec<_>, _>>()?;
        parts.try_into().map_err(|_| "five buffers".into())
    }

    /// Fills the outputs with NaN, so that unwritten elements are found.
    pub fn poison(&self, stream: &Stream) -> Outcome {
        let [.., out, lse] = self.slices()?;
        stream.fill(out, POISON)?;
        Ok(stream.fill(lse, POISON)?)
    }

    pub fn enqueue(
        &self,
        prepared: &Prepared,
        stream: &Stream,
    ) -> std::result::Result<(), flashcore::AttentionError> {
        let [q, k, v, out, lse] = self.slices().map_err(|error| flashcore::AttentionError::Unsupported {
            argument: "problem",
            value: error.to_string(),
            accepted: "a smaller one".to_owned(),
        })?;
        prepared.enqueue(stream, q, k, v, out, Some(lse))
    }

    pub fn download(&self, stream: &Stream) -> Outcome<Result> {
        let [.., out, lse] = self.slices()?;
        let mut result = Result { out: vec![0; out.bytes()], lse: vec![0; lse.bytes()] };
        stream.download(out, &mut result.out)?;
        stream.download(lse, &mut result.lse)?;
        Ok(result)
    }

    /// Fills the outputs with NaN, computes, and downloads the result.
    pub fn compute(&self, prepared: &Prepared, stream: &Stream) -> Outcome<Result> {
        self.poison(stream)?;
        self.enqueue(prepared, stream)?;
        self.download(stream)
    }

    /// Compares a result with the oracle, and checks that nothing outside the rows was written.
    pub fn judge(&self, result: &Result) -> Outcome<ErrorFigures> {
        let problem = &self.problem;
        let out = Values::from_bytes(problem.dtypes.out, &result.out);
        let [batches, heads, rows, dim] = problem.extents(Tensor::Out);
        let origin = problem.span(Tensor::Out).map_or(0, |(_, origin)| origin) as i64;
        let mut dense = Vec::new();
        let mut written = vec![false; out.len()];
        for batch in 0..batches {
            for (head, row) in (0..heads).flat_map(|head| (0..rows).map(move |row| (head, row))) {
                let start = (origin + problem.out.offset(batch, head, row)) as usize;
                written[start..start + dim].fill(true);
                dense.extend((start..start + dim).map(|i| f64::from(out.get(i).unwrap_or(f32::NAN))));
            }
        }
        let bytes = problem.dtypes.out.bytes();
        let beside = written.iter().zip(result.out.chunks_exact(bytes)).filter(|(written, _)| !**written);
        let touched = beside.filter(|(_, bytes)| bytes.iter().any(|&b| b != POISON)).count();
        ensure(touched == 0, || format!("{touched} elements between the rows were written"))?;
        let lse = Values::from_bytes(problem::DType::F32, &result.lse);
        let lse: Vec<f64> = (0..lse.len()).filter_map(|i| lse.get(i)).map(f64::from).collect();
        let figures = References::of(problem, &self.inputs)?.judge(&dense, Some(&lse));
        let reasons = figures.reasons();
        ensure(reasons.is_empty(), || reasons.join("; "))?;
        Ok(figures)
    }
}
