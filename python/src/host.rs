//! Computes attention on host memory.
#![allow(unsafe_code, reason = "slices over the memory of the caller's tensors")]

use std::ptr::NonNull;
use std::sync::Arc;

use cpu::{CallingThread, CpuPlan, Element, Executor, Input, Pool, attention_with_on, kept};
use half::{bf16, f16};
use problem::{DType, DTypes, ElementType, Elements, Operand, OperandMap, OperandSpec, Problem, Tensor};
use pyo3::prelude::*;

use crate::error::Error;
use crate::features::{self, Features};
use crate::interrupt::Interruptible;
use crate::openmp::Team;
use crate::tensor::{Described, Terms, band_and_score, problem_of};

/// Computes attention of tensors on the host into `out`, and the log-sum-exp into `lse` if that is given (the
/// address of `batch * heads_q * seq_q` floats). If `threads` is given, the caller is PyTorch, and at most
/// that many of its own threads compute. `features` are those of the call other than its tensors and terms.
/// Releases the interpreter during the computation.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, dtype, terms, threads=None, features=None))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn attention_cpu(
    py: Python<'_>,
    q: Described,
    k: Described,
    v: Described,
    out: Described,
    lse: Option<usize>,
    dtype: &str,
    terms: Terms,
    threads: Option<usize>,
    features: Option<features::Described>,
) -> Result<(), Error> {
    let dtypes: DTypes = dtype.parse()?;
    let terms = band_and_score(terms)?;
    let stated = features.as_ref().map(Features::new).transpose()?;
    let problem = problem_of([&q, &k, &v, &out], dtypes, terms, stated.as_ref())?.with_lse(lse.is_some());
    if problem.is_empty() {
        return Ok(());
    }
    let others = features.map_or_else(Vec::new, |features| features::operands(&features, &problem));
    let addresses = Addresses { q: q.0, k: k.0, v: v.0, out: out.0, lse, others };
    let plan = kept::chosen(&problem, threads.unwrap_or_else(cpu::threads)).plan;
    let threads = Threads::new(py, plan.threads, threads);
    py.detach(|| {
        let executor = Interruptible::new(threads.executor());
        let computed = match dtypes.out {
            DType::F16 => addresses.run::<f16>(&problem, &executor, &plan),
            DType::Bf16 => addresses.run::<bf16>(&problem, &executor, &plan),
            DType::F32 => addresses.run::<f32>(&problem, &executor, &plan),
            DType::E4m3 | DType::E5m2 => Err(Error::DType(format!("invalid value '{dtypes}' for dtype"))),
        };
        executor.exception().map_or(computed, |exception| Err(exception.into()))
    })
}

/// The threads that compute a call.
pub enum Threads {
    Caller,
    Team(Team),
    Pool(Arc<Pool>),
}

impl Threads {
    /// The threads of a call that wants so many: PyTorch's own if PyTorch has given their number, else those
    /// of the shared pool, else the calling thread. The interpreter must be held: then no other thread can
    /// fork while threads are started, and no child inherits half of a pool.
    pub fn new(_py: Python<'_>, wanted: usize, of_torch: Option<usize>) -> Threads {
        if wanted == 1 {
            return Threads::Caller;
        }
        let team = of_torch.and_then(Team::of_caller);
        let pool = || Pool::shared().map_or(Threads::Caller, Threads::Pool);
        team.map_or_else(pool, Threads::Team)
    }

    pub fn executor(&self) -> &dyn Executor {
        match self {
            Threads::Caller => &CallingThread,
            Threads::Team(team) => team,
            Threads::Pool(pool) => &**pool,
        }
    }
}

/// The addresses of element (0, 0, 0, 0) of each tensor.
struct Addresses {
    q: usize,
    k: usize,
    v: usize,
    out: usize,
    lse: Option<usize>,
    /// The other inputs with their addresses.
    others: Vec<(OperandSpec, usize)>,
}

impl Addresses {
    /// Computes into an output of type `T`.
    fn run<T: Element>(
        &self,
        problem: &Problem,
        executor: &dyn Executor,
        plan: &CpuPlan,
    ) -> Result<(), Error> {
        let input = |tensor, address| -> Result<Input<'_>, Error> {
            let dtype = problem.dtypes.of(tensor);
            let (start, elements) = range(problem, tensor, address)?;
            // SAFETY: the package describes a tensor whose storage it has measured and keeps alive during the
            // call, and the range is that tensor's by its shape and strides; `range` checks alignment and
            // null. Writing to an input from another Python thread meanwhile is a race of the caller's, as
            // with any NumPy function; the gaps between its rows may be written.
            Ok(unsafe { Input::from_raw_parts(dtype.into(), start, elements) })
        };
        let mut inputs = OperandMap::default();
        for (tensor, address) in [(Tensor::Q, self.q), (Tensor::K, self.k), (Tensor::V, self.v)] {
            inputs.insert(tensor.into(), input(tensor, address)?);
        }
        let mut copies = Vec::new();
        for &(spec, address) in &self.others {
            match spec.operand {
                Operand::Table(_) => drop(inputs.insert(spec.operand, table(spec, address)?)),
                operand => copies.push((operand, Copied::new(problem, spec, address)?)),
            }
        }
        inputs.extend(copies.iter().map(|(operand, copy)| (*operand, copy.input())));
        let (start, elements) = range(problem, Tensor::Out, self.out)?;
        // SAFETY: the conditions are those of the inputs. The package has just allocated `out`, so nothing
        // else refers to its memory.
        let out = unsafe { std::slice::from_raw_parts_mut(start.cast::<T>().as_ptr(), elements) };
        let rows = problem.lse_len();
        let lse = match self.lse {
            None => None,
            // SAFETY: the conditions are those of `out`. The package allocates that many floats.
            Some(address) => Some(unsafe {
                std::slice::from_raw_parts_mut(aligned::<f32>("lse", address)?.as_ptr(), rows)
            }),
        };
        Ok(attention_with_on(executor, problem, &inputs, out, lse, plan)?)
    }
}

/// A table of the programs.
fn table<'a>(spec: OperandSpec, address: usize) -> Result<Input<'a>, Error> {
    let OperandSpec { operand, dtype, elements } = spec;
    let start = match elements {
        0 => NonNull::<u64>::dangling().cast(), // an empty table may have no memory
        _ => aligned_to(dtype.bytes(), operand.name(), address)?,
    };
    // SAFETY: the package describes a tensor whose memory has these elements and keeps it alive during the
    // call; `aligned_to` checks alignment and null. The elements are numbers, of which every bit pattern is
    // valid. Writing to them meanwhile is a race of the caller's.
    Ok(unsafe { Input::from_raw_parts(dtype, start, elements) })
}

/// A copy of an array of lengths, sinks or factors. They are short, and what is checked in a copy stays as it
/// is when another thread writes to the tensor.
enum Copied {
    Ints(Vec<i32>),
    Floats(Vec<f32>),
}

impl Copied {
    fn new(problem: &Problem, spec: OperandSpec, address: usize) -> Result<Copied, Error> {
        let all = 0..spec.elements;
        Ok(match (spec.operand, spec.dtype) {
            (Operand::Descale(tensor), _) => {
                Copied::Floats(copied(spec, address, problem.scale_positions(tensor))?)
            }
            (_, ElementType::I32) => Copied::Ints(copied(spec, address, all)?),
            _ => Copied::Floats(copied(spec, address, all)?),
        })
    }

    fn input(&self) -> Input<'_> {
        match self {
            Copied::Ints(copy) => Input::from(Elements::from(copy)),
            Copied::Floats(copy) => Input::from(Elements::from(copy)),
        }
    }
}

/// A copy of the elements of an operand at some positions; other elements are not read, and 0 in the copy.
fn copied<T: Copy + Default>(
    spec: OperandSpec,
    address: usize,
    positions: impl IntoIterator<Item = usize>,
) -> Result<Vec<T>, Error> {
    let mut copy = vec![T::default(); spec.elements];
    if spec.elements == 0 {
        return Ok(copy);
    }
    let start = aligned::<T>(spec.operand.name(), address)?;
    for at in positions {
        // SAFETY: the package describes a tensor with elements at these positions and keeps it alive during
        // the call; `aligned` checks alignment and null. `T` is a type of numbers, of which every bit pattern
        // is valid.
        copy[at] = unsafe { start.add(at).read() };
    }
    Ok(copy)
}

/// The address of a tensor's lowest element in memory, and the number of elements up to its highest one.
pub fn range(problem: &Problem, tensor: Tensor, address: usize) -> Result<(NonNull<u8>, usize), Error> {
    let size = problem.dtypes.of(tensor).bytes();
    let too_large = || Error::Argument(format!("{tensor:?} reaches further than can be addressed"));
    let (elements, origin) = problem.span(tensor).ok_or_else(too_large)?;
    if elements == 0 {
        return Ok((NonNull::dangling(), 0)); // an empty tensor may have no memory
    }
    let start = origin.checked_mul(size).and_then(|bytes| address.checked_sub(bytes));
    Ok((aligned_to(size, tensor.name(), start.ok_or_else(too_large)?)?, elements))
}

pub fn aligned<T>(name: &str, address: usize) -> Result<NonNull<T>, Error> {
    aligned_to(align_of::<T>(), name, address).map(NonNull::cast)
}

fn aligned_to(alignment: usize, name: &str, address: usize) -> Result<NonNull<u8>, Error> {
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
    start.filter(|_| address.is_multiple_of(alignment)).ok_or_else(|| {
        let message = format!(
            "invalid value '{address:#x}' for the address of {name}: expected a multiple of {alignment} bytes"
        );
        Error::Argument(message)
    })
}

/// The instruction sets of this CPU, best first, and the number of threads that share a call. Starts no
/// threads.
#[pyfunction]
pub fn describe_cpu() -> (Vec<&'static str>, usize) {
    let mut sets: Vec<&str> = cpu::Isa::available().into_iter().map(cpu::Isa::name).collect();
    let best = cpu::Isa::best().name();
    sets.sort_by_key(|&name| name != best);
    (sets, cpu::threads())
}
