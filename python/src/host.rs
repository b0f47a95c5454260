//! Attention on memory of the host.
#![allow(unsafe_code, reason = "slices over the memory of the caller's tensors")]

use std::sync::OnceLock;

use cpu::{CpuPlan, Element};
use half::{bf16, f16};
use problem::{DType, Mask, Problem, Tensor};
use pyo3::prelude::*;

use crate::error::Error;
use crate::tensor::{Described, problem_of};

/// The process in which the module was loaded.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Notes the process. A child made by `fork` inherits the thread pool's bookkeeping but none of its threads.
pub fn remember_process() {
    PROCESS.get_or_init(std::process::id);
}

/// The plan for `problem`; in a forked child it stays on the calling thread, since waiting for the pool would hang.
fn plan(problem: &Problem) -> CpuPlan {
    let plan = CpuPlan::for_problem(problem);
    if PROCESS.get() == Some(&std::process::id()) { plan } else { CpuPlan { threads: 1, ..plan } }
}

/// Computes attention of tensors on the host into `out` and, where given, the log-sum-exp into `lse` (address of
/// `batch * heads_q * seq_q` floats). Releases the interpreter meanwhile.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, dtype, causal, scale))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn attention_cpu(
    py: Python<'_>,
    q: Described,
    k: Described,
    v: Described,
    out: Described,
    lse: Option<usize>,
    dtype: &str,
    causal: bool,
    scale: Option<f32>,
) -> Result<(), Error> {
    let dtype: DType = dtype.parse()?;
    let mask = if causal { Mask::Causal } else { Mask::None };
    let problem = problem_of([&q, &k, &v, &out], dtype, mask, scale)?;
    let addresses = Addresses { q: q.0, k: k.0, v: v.0, out: out.0, lse };
    py.detach(|| match dtype {
        DType::F16 => addresses.run::<f16>(&problem),
        DType::Bf16 => addresses.run::<bf16>(&problem),
        DType::F32 => addresses.run::<f32>(&problem),
    })
}

/// Where the tensors' elements (0, 0, 0, 0) are.
struct Addresses {
    q: usize,
    k: usize,
    v: usize,
    out: usize,
    lse: Option<usize>,
}

impl Addresses {
    fn run<T: Element>(&self, problem: &Problem) -> Result<(), Error> {
        let input = |tensor, address| -> Result<&[T], Error> {
            let (start, elements) = range::<T>(problem, tensor, address)?;
            // SAFETY: the package describes a tensor that it keeps alive during the call, and the range is that
            // tensor's by its shape and strides; it is aligned and not null. Writing to an input from another Python
            // thread meanwhile is a race of the caller's, as with any NumPy function.
            Ok(unsafe { std::slice::from_raw_parts(start, elements) })
        };
        let (q, k, v) = (input(Tensor::Q, self.q)?, input(Tensor::K, self.k)?, input(Tensor::V, self.v)?);
        let (start, elements) = range::<T>(problem, Tensor::Out, self.out)?;
        // SAFETY: as above; the package has just allocated it, so nothing else refers to it.
        let out = unsafe { std::slice::from_raw_parts_mut(start.cast_mut(), elements) };
        let rows = problem.batch * problem.heads_q * problem.seq_q;
        let lse = match self.lse {
            None => None,
            // SAFETY: as for `out`; the package allocates that many floats.
            Some(address) => Some(unsafe {
                std::slice::from_raw_parts_mut(aligned::<f32>("lse", address)?.cast_mut(), rows)
            }),
        };
        Ok(cpu::attention(problem, q, k, v, out, lse, &plan(problem))?)
    }
}

/// The lowest element of a tensor in memory and how many elements there are up to its highest.
fn range<T>(problem: &Problem, tensor: Tensor, address: usize) -> Result<(*const T, usize), Error> {
    let too_large = || Error::Argument(format!("{tensor:?} reaches further than can be addressed"));
    let (elements, origin) = problem.span(tensor).ok_or_else(too_large)?;
    if elements == 0 {
        return Ok((std::ptr::NonNull::dangling().as_ptr(), 0)); // an empty tensor may have no memory
    }
    let start = origin.checked_mul(size_of::<T>()).and_then(|bytes| address.checked_sub(bytes));
    Ok((aligned::<T>(tensor.name(), start.ok_or_else(too_large)?)?, elements))
}

fn aligned<T>(name: &str, address: usize) -> Result<*const T, Error> {
    if address == 0 || !address.is_multiple_of(align_of::<T>()) {
        let message =
            format!("{name} is at address {address:#x}; it must be a multiple of {}", align_of::<T>());
        return Err(Error::Argument(message));
    }
    Ok(std::ptr::with_exposed_provenance(address))
}

/// The instruction sets that this processor has, best first, and the threads that share a call.
#[pyfunction]
pub fn describe_cpu() -> (Vec<&'static str>, usize) {
    let mut sets: Vec<&str> = cpu::Isa::available().into_iter().map(cpu::Isa::name).collect();
    let best = cpu::Isa::best().name();
    sets.sort_by_key(|&name| name != best);
    (sets, CpuPlan::for_problem(&Problem::mission()).threads)
}
