//! GPUs: the plan of a call, and what the driver lists.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

use driver::{CubinCache, DeviceInfo};
use flashcore::gpu::Gpu;
use flashcore::raw::{self, Queue};
use problem::{DTypes, Gradients, Layout, Pass, Problem, Programs, Table};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{Call, Handed, Terms, program, table_type, types_of};
use crate::error::Error;

/// The plan that a call of [`attend`](crate::call::attend) with such tensors uses, why it was chosen, and the
/// registers and local memory that the driver's compiler gave it.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "those of `attend`")]
pub fn explain<'py>(
    py: Python<'py>,
    q: Handed,
    k: Handed,
    v: Handed,
    out: (i64, i64, i64, i64),
    heads: usize,
    dtypes: u32,
    terms: Terms,
    ordinal: i32,
) -> Result<Bound<'py, PyDict>, Error> {
    // O is not there yet; PyTorch aligns what it allocates.
    let call = Call::new([&q, &k, &v], (0, out), heads, dtypes, terms)?;
    let (gpu, prepared) = py.detach(|| -> Result<_, Error> {
        let gpu = Gpu::open(ordinal)?;
        let queue = Queue::Stream { gpu: &gpu, handle: 0 };
        let ready = raw::prepare(queue, &call.operands, &call.options)?;
        let none = || Error::invalid("the shape of q", "no rows", "rows, for which a kernel is launched");
        let prepared = ready.prepared().cloned().ok_or_else(none)?;
        Ok((gpu, prepared))
    })?;
    let resources = prepared.resources();
    let told = PyDict::new(py);
    told.set_item("device", &gpu.info().name)?;
    told.set_item("plan", serde_json::to_string(prepared.plan()).unwrap_or_default())?;
    told.set_item("choice", format!("{:?}", prepared.choice()).to_lowercase())?;
    told.set_item("why", prepared.why())?;
    told.set_item("registers", resources.registers)?;
    told.set_item("local_bytes", resources.local)?;
    let fallbacks: Vec<String> = prepared.fallbacks().iter().map(|f| f.reason.to_string()).collect();
    told.set_item("fallbacks", fallbacks)?;
    Ok(told)
}

/// The facts by which a GPU has kernels for the gradients of a call: the head dims of Q and V, the code of
/// the types as in `attend`, the texts of the score and the mask program with the numbers of their float and
/// integer parameters, the codes of the types of the tables with the numbers of their dimensions, whether
/// there are sinks, whether their gradient is wanted, bits for the tables whose gradients are wanted, and
/// whether each run must return equal bits.
type Differentiated =
    ((usize, usize), u32, (String, String), (usize, usize), Vec<(u8, usize)>, (bool, bool), u8, bool);

/// Largest number of kinds of calls whose gradients are known. With more, all are forgotten.
const MOST: usize = 1024;

/// Why a GPU, or without an ordinal the CPU, computes no gradients of such calls; `None` if it does. Compiles
/// nothing. The answer is remembered: each call that autograd records asks.
#[pyfunction]
pub fn lacks_gradients(
    py: Python<'_>,
    ordinal: Option<i32>,
    call: Differentiated,
) -> Result<Option<String>, Error> {
    type Known = HashMap<(Option<i32>, Differentiated), Option<String>>;
    // The interpreter is held while this is locked, so that no other thread can fork meanwhile.
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (ordinal, call);
    if let Some(reason) = known().get(&key) {
        return Ok(reason.clone());
    }
    let reason = find_lack(py, ordinal, key.1.clone())?;
    let mut known = known();
    if known.len() >= MOST {
        known.clear();
    }
    known.insert(key, reason.clone());
    Ok(reason)
}

fn find_lack(py: Python<'_>, ordinal: Option<i32>, call: Differentiated) -> Result<Option<String>, Error> {
    let (dims, dtypes, (score, mask), (floats, ints), tables, (sink, of_sinks), of_tables, deterministic) =
        call;
    let (dim, dim_v) = dims;
    let (score, mask) = (program(&score)?, program(&mask)?);
    let Some(ordinal) = ordinal else {
        let derivative = score.map(|score| score.derivative()).transpose();
        return Ok(derivative.err().map(|error| format!("the score program: {error}")));
    };
    let wants = Gradients { sinks: of_sinks, tables: of_tables };
    let (dtypes, tf32) = types_of(dtypes)?;
    let [q, k, v, out] = dtypes;
    // One score, and tables of a few elements: lengths decide nothing.
    let mut problem = Problem::new(1, 1, 1, dim, DTypes { q, k, v, out, tf32 });
    (problem.head_dim_v, problem.score.sink) = (dim_v, sink);
    problem.programs = Programs {
        score,
        mask,
        floats: vec![1.0; floats],
        ints: vec![1; ints],
        tables: tables
            .into_iter()
            .map(|(code, dims)| {
                let (extents, strides) = (vec![2; dims], vec![1; dims]);
                Ok(Table { dtype: table_type(code)?, extents, strides })
            })
            .collect::<Result<_, Error>>()?,
    };
    let pass = Pass::Backward { deterministic, d_lse: false, wants };
    let problem = problem.with_layout(Layout::Bhsd).with_pass(pass);
    py.detach(|| {
        let gpu = Gpu::open(ordinal)?;
        Ok(kernels::Plan::default_for(&problem, gpu.arch()).err().map(|error| error.to_string()))
    })
}

/// The GPUs that the driver lists, one line each.
#[pyfunction]
pub fn describe_gpus(py: Python<'_>) -> Result<Vec<String>, Error> {
    let line = |d: &DeviceInfo| {
        format!("{}: {}, sm_{}, {} SMs, CUDA driver {}", d.ordinal, d.name, d.sm(), d.sms, d.compiler())
    };
    Ok(py.detach(driver::devices)?.iter().map(line).collect())
}

/// The cache folder of compiled kernels. `None` if the system names no cache folder.
#[pyfunction]
pub fn cache_folder() -> Option<PathBuf> {
    CubinCache::of_environment().folder().map(Path::to_owned)
}

/// Raises an error if attention cannot be computed on the device.
#[pyfunction]
pub fn check_gpu(py: Python<'_>, ordinal: i32) -> Result<(), Error> {
    py.detach(|| Gpu::open(ordinal))?;
    Ok(())
}
