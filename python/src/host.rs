//! Attention on memory of the host.
#![allow(unsafe_code, reason = "slices over the memory of the caller's tensors")]

use std::sync::{Arc, Mutex, PoisonError};

use cpu::{CpuPlan, Element};
use half::{bf16, f16};
use problem::{DType, Problem, Tensor};
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::tensor::{Described, is_empty, mask_of, problem_of};

/// The threads that share calls, and the process that they live in.
static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// The threads of this process; none where the system gives none. A child made by `fork` inherits the pool without its threads,
/// so it makes its own. Ask with the interpreter held: then no other thread can fork while this one holds the lock.
fn pool(_py: Python<'_>) -> Option<Arc<ThreadPool>> {
    let process = std::process::id();
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, pool)) = &*pool
        && *owner == process
    {
        return Some(pool.clone());
    }
    let own = Arc::new(ThreadPoolBuilder::new().build().ok()?);
    // Dropped, the parent's pool would wait for its threads.
    std::mem::forget(pool.replace((process, own.clone())));
    Some(own)
}

/// Computes attention of tensors on the host into `out` and, where given, the log-sum-exp into `lse` (address of
/// `batch * heads_q * seq_q` floats), on at most `threads` threads. Releases the interpreter meanwhile.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, dtype, mask, scale, threads=None))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn attention_cpu(
    py: Python<'_>,
    q: Described,
    k: Described,
    v: Described,
    out: Described,
    lse: Option<usize>,
    dtype: &str,
    mask: u8,
    scale: Option<f32>,
    threads: Option<usize>,
) -> Result<(), Error> {
    let dtype: DType = dtype.parse()?;
    let mask = mask_of(mask)?;
    let problem = problem_of([&q, &k, &v, &out], dtype, mask, scale)?;
    if is_empty(&problem) {
        return Ok(());
    }
    let addresses = Addresses { q: q.0, k: k.0, v: v.0, out: out.0, lse };
    let threads = Threads { pool: pool(py), most: threads.unwrap_or(usize::MAX).max(1) };
    py.detach(|| match dtype {
        DType::F16 => addresses.run::<f16>(&problem, &threads),
        DType::Bf16 => addresses.run::<bf16>(&problem, &threads),
        DType::F32 => addresses.run::<f32>(&problem, &threads),
    })
}

/// Who computes.
struct Threads {
    pool: Option<Arc<ThreadPool>>,
    most: usize,
}

impl Threads {
    /// The plan for a problem, and the pool if more than the calling thread takes part.
    fn plan(&self, problem: &Problem) -> (CpuPlan, Option<&ThreadPool>) {
        let plan = CpuPlan::for_problem(problem);
        let most = if self.pool.is_some() { self.most } else { 1 };
        let plan = CpuPlan { threads: plan.threads.min(most), ..plan };
        let pool = self.pool.as_deref().filter(|_| plan.threads > 1);
        (plan, pool)
    }
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
    fn run<T: Element>(&self, problem: &Problem, threads: &Threads) -> Result<(), Error> {
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
        let (plan, pool) = threads.plan(problem);
        let compute = move || cpu::attention(problem, q, k, v, out, lse, &plan);
        match pool {
            Some(pool) => pool.install(compute)?,
            None => compute()?,
        }
        Ok(())
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
pub fn describe_cpu(py: Python<'_>) -> (Vec<&'static str>, usize) {
    let mut sets: Vec<&str> = cpu::Isa::available().into_iter().map(cpu::Isa::name).collect();
    let best = cpu::Isa::best().name();
    sets.sort_by_key(|&name| name != best);
    (sets, pool(py).map_or(1, |pool| pool.current_num_threads()))
}
