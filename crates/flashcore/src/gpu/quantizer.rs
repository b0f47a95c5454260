//! Quantisation of tensors in device memory.

use driver::{DeviceSlice, Expect, Stream};
use kernels::{BufferKind, quantize};
use problem::{Operand, Problem, Quantization, Tensor};

use super::Gpu;
use super::launches::{Launches, check_slice};
use super::loaded::{Code, Key};
use crate::AttentionError;

/// Bytes that the kernels load and store at once. Inputs and codes must begin at multiples of this.
const CHUNK: u64 = 16;

/// The kernels that quantise one tensor of a problem, loaded on a device. Any thread may use them.
#[derive(Debug)]
pub struct Quantizer {
    buffers: [BufferKind; 3],
    launches: Launches,
}

impl Gpu {
    /// Kernels that quantise Q, K or V of a problem to 8-bit floats with descale factors, ready to launch.
    /// Codes and factors are those of [`crate::quantize`] to the last bit. Kernels stay loaded: a call with
    /// another length, batch, stride or seed emits no kernel. Where keys are smoothed, two more kernels
    /// compute the means of K, in memory of the library's own.
    ///
    /// # Errors
    /// When the options do not fit the tensor ([`Quantization::check`]), when the kernels do not support the
    /// tensor or the device (older than sm_89, a head dim that is no multiple of 16, rows that do not begin
    /// at multiples of 16 bytes), or when the driver fails.
    pub fn prepare_quantization(
        &self,
        problem: &Problem,
        tensor: Tensor,
        options: &Quantization,
    ) -> Result<Quantizer, AttentionError> {
        let (code, contracts) = quantize::bind(problem, tensor, options, &self.arch)?;
        let key = Key {
            code: Code::Quantization(code),
            expect: contracts.steps.iter().map(|step| Expect::of(&step.launch)).collect(),
        };
        let buffers =
            [Operand::Tensor(tensor).into(), BufferKind::Codes(tensor), Operand::Descale(tensor).into()];
        let emit = || quantize::emit(problem, tensor, options, &self.arch);
        let launches = Launches::new((&self.context, &self.kernels), &buffers, contracts, key, emit)?;
        Ok(Quantizer { buffers, launches })
    }
}

impl Quantizer {
    /// Enqueues the quantisation on the stream and returns. The call does not wait, and it may be captured in
    /// a graph, under the conditions of [`Prepared::enqueue`](super::Prepared::enqueue).
    ///
    /// `from` begins at the tensor's lowest element in memory and covers the span of the problem's strides.
    /// `codes` are dense `[batch, heads, rows, dim]`, one byte each. `factors` are dense f32 as
    /// [`Quantization::layout`] says.
    ///
    /// # Errors
    /// When a slice is too short, when `from` or `codes` do not begin at a multiple of 16 bytes or `factors`
    /// at a multiple of 4, when the stream belongs to another device, or when the driver fails.
    pub fn enqueue(
        &self,
        stream: &Stream,
        from: DeviceSlice<'_>,
        codes: DeviceSlice<'_>,
        factors: DeviceSlice<'_>,
    ) -> Result<(), AttentionError> {
        let slices = [from, codes, factors];
        let accepted = [CHUNK, CHUNK, size_of::<f32>() as u64];
        for (i, &needed) in self.launches.needed().iter().enumerate() {
            check_slice(self.buffers[i], needed, accepted[i], slices[i])?;
        }
        self.launches.enqueue(stream.into(), |index| slices[index])
    }
}
