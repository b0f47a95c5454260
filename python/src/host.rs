//! The threads and the addresses of calls on host memory.

use std::ptr::NonNull;
use std::sync::Arc;

use cpu::{CallingThread, Executor, Pool};
use problem::{Problem, Tensor};
use pyo3::prelude::*;

use crate::error::Error;
use crate::openmp::Team;

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
