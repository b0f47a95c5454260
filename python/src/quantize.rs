//! Quantisation to 8-bit floats, of tensors on the host and on a GPU.
#![allow(unsafe_code, reason = "slices over the memory of the caller's tensors, and streams")]

use cpu::{Input, quantize_into};
use driver::{DeviceSlice, Stream};
use flashcore::gpu::Gpu;
use problem::{DType, Problem, ProblemError, Quantization, Tensor};
use pyo3::prelude::*;

use crate::error::Error;
use crate::host::{Threads, aligned, range};
use crate::interrupt::Interruptible;
use crate::tensor::{Described, strides};

/// Name of the 8-bit type, rows that share a factor (0: all), the seed of the rotation, and whether keys are
/// smoothed.
type Options = (String, u32, Option<u64>, bool);

/// A tensor of a problem, and how it is quantised.
struct Call {
    problem: Problem,
    tensor: Tensor,
    options: Quantization,
}

impl Call {
    fn new(
        name: &str,
        described: &Described,
        heads_kv: usize,
        dtype: &str,
        (to, rows, hadamard, smooth_keys): Options,
    ) -> Result<Call, Error> {
        let &(_, [batch, heads, rows_of_head, dim], _) = described;
        let of_tensor = strides(name, described)?;
        let dtype: DType = dtype.parse()?;
        let problem = Problem::new(batch, heads, rows_of_head, dim, dtype);
        let (tensor, problem) = match name {
            "q" => (Tensor::Q, Problem { heads_kv, q: of_tensor, ..problem }),
            "k" => (Tensor::K, Problem { k: of_tensor, ..problem }),
            "v" => (Tensor::V, Problem { v: of_tensor, ..problem }),
            _ => return Err(Error::invalid("the name of a tensor", name, "q, k or v")),
        };
        let rows = (rows > 0).then_some(rows);
        let options = Quantization { dtype: to.parse()?, rows, hadamard, smooth_keys };
        options.check(&problem, tensor)?;
        Ok(Call { problem, tensor, options })
    }

    /// The numbers of codes and of factors.
    fn results(&self) -> [usize; 2] {
        cpu::quantized_lengths(&self.problem, self.tensor, &self.options)
    }
}

/// Quantises a tensor on the host. `to` are the addresses of the codes, dense `[batch, head, sequence, dim]`,
/// and of the factors, dense as [`Quantization::layout`] says. If `threads` is given, the caller is PyTorch,
/// and at most that many of its own threads compute. Releases the interpreter during the computation.
#[pyfunction]
#[pyo3(signature = (name, tensor, heads_kv, dtype, options, to, threads=None))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn quantize_cpu(
    py: Python<'_>,
    name: &str,
    tensor: Described,
    heads_kv: usize,
    dtype: &str,
    options: Options,
    to: (usize, usize),
    threads: Option<usize>,
) -> Result<(), Error> {
    let call = Call::new(name, &tensor, heads_kv, dtype, options)?;
    let (start, elements) = range(&call.problem, call.tensor, tensor.0)?;
    // SAFETY: the package describes a tensor whose storage it has measured and keeps alive during the call,
    // and the range is that tensor's by its shape and strides; `range` checks alignment and null.
    let input = unsafe { Input::from_raw_parts(call.problem.dtypes.of(call.tensor).into(), start, elements) };
    let [codes, factors] = call.results();
    let (to_codes, to_factors) = (aligned::<u8>("codes", to.0)?, aligned::<f32>("factors", to.1)?);
    // SAFETY: the package has just allocated that many codes and factors, so nothing else refers to them.
    let (to_codes, to_factors) = unsafe {
        (
            std::slice::from_raw_parts_mut(to_codes.as_ptr(), codes),
            std::slice::from_raw_parts_mut(to_factors.as_ptr(), factors),
        )
    };
    let threads = Threads::new(py, threads.unwrap_or_else(cpu::threads), threads);
    py.detach(|| {
        let executor = Interruptible::new(threads.executor());
        let to = (to_codes, to_factors);
        let done = quantize_into(&executor, &call.problem, call.tensor, input, &call.options, to);
        if let Some(exception) = executor.exception() {
            return Err(exception.into());
        }
        Ok(done?)
    })
}

/// Enqueues the quantisation of a tensor in the memory of device `ordinal` on a stream, and returns. `to` are
/// the addresses of codes and factors, as for [`quantize_cpu`]. The first call for a kind of tensor compiles
/// a kernel.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn quantize_gpu(
    py: Python<'_>,
    name: &str,
    tensor: Described,
    heads_kv: usize,
    dtype: &str,
    options: Options,
    to: (u64, u64),
    ordinal: i32,
    stream: u64,
) -> Result<(), Error> {
    driver::process::check()?;
    let call = Call::new(name, &tensor, heads_kv, dtype, options)?;
    let too_large = || ProblemError::TooLarge { tensor: call.tensor.name() };
    let (elements, origin) = call.problem.span(call.tensor).ok_or_else(too_large)?;
    let size = call.problem.dtypes.of(call.tensor).bytes();
    let first = (tensor.0 as u64).wrapping_sub((origin * size) as u64);
    let [codes, factors] = call.results();
    py.detach(|| {
        let gpu = Gpu::open(ordinal)?;
        let quantizer = gpu.prepare_quantization(&call.problem, call.tensor, &call.options)?;
        // SAFETY: PyTorch owns the memory, and the package keeps the tensors until the call is enqueued.
        // PyTorch's allocator orders a later reuse of the memory on the stream.
        let [from, to_codes, to_factors] = unsafe {
            [(first, elements * size), (to.0, codes), (to.1, factors * size_of::<f32>())]
                .map(|(address, bytes)| DeviceSlice::from_raw(address, bytes))
        };
        // SAFETY: this is PyTorch's current stream on the device. PyTorch never destroys a current stream.
        let stream = unsafe { Stream::from_raw(gpu.context(), stream) };
        Ok(quantizer.enqueue(&stream, from, to_codes, to_factors)?)
    })
}
