//! Attention on GPU memory, on the caller's stream.
#![allow(unsafe_code, reason = "addresses and streams that Python hands over")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use driver::{CubinCache, DeviceInfo, DeviceSlice, Stream};
use flashcore::gpu::{Gpu, Prepared};
use problem::{Band, DType, DTypes, OperandSpec, Problem, Score, Tensor};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;
use crate::features::{self, Features};
use crate::tensor::{Described, Terms, band_and_score, problem_of};

type Four<T> = (T, T, T, T);

/// A tensor in its own order of dimensions: address, shape, strides in elements.
type Handed = (u64, Four<usize>, Four<i64>);

/// The key of the cache of calls. A call with known shapes and strides skips all checks.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    shapes: [Four<usize>; 4],
    strides: [Four<i64>; 4],
    heads: usize,
    dtypes: DTypes,
    band: Band,
    /// Bits of the factor on Q Kᵀ and of the cap on the logits.
    score: (Option<u32>, Option<u32>),
    features: Option<Features>,
    lse: bool,
    ordinal: i32,
}

/// The prepared kernel of a call and everything else that the call needs, except the addresses.
#[derive(Clone)]
struct Known {
    gpu: Arc<Gpu>,
    prepared: Arc<Prepared>,
    problem: Arc<Problem>,
    /// For each of q, k, v and out, in bytes: the distance from the start of its memory to element (0, 0, 0,
    /// 0), and the length of its memory.
    memory: [(u64, usize); 4],
    /// Length of the LSE, bytes.
    lse: usize,
}

/// Largest number of cached calls. A full cache is emptied; the compiled kernels stay with the [`Gpu`].
const MOST: usize = 1024;

static KNOWN: LazyLock<Mutex<HashMap<Key, Known>>> = LazyLock::new(Mutex::default);

/// Enqueues attention of 4-D tensors on a stream of device `ordinal`. The axis `heads` of the tensors is 1 or
/// 2, and the sequence is the other one of the two. `out` has q's shape, with v's head dim. `lse` is the
/// address of `batch * heads_q * seq_q` floats. Returns at once. The first call for a problem compiles a
/// kernel.
///
/// Returns 0 if the call was enqueued. Otherwise nothing was done, and the result has a bit for each of q
/// (1), k (2) and v (4) whose last dimension is not contiguous: the caller must copy that tensor.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, heads, dtypes, terms, ordinal, stream, features=None))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn enqueue(
    py: Python<'_>,
    q: Handed,
    k: Handed,
    v: Handed,
    out: (u64, Four<i64>),
    lse: Option<u64>,
    heads: usize,
    dtypes: u32,
    terms: Terms,
    ordinal: i32,
    stream: u64,
    features: Option<features::Described>,
) -> Result<u32, Error> {
    let stated = features.as_ref().map(Features::new).transpose()?;
    let dtypes = dtypes_of(dtypes)?;
    let key = Key::new([&q, &k, &v], out.1, heads, dtypes, terms, stated, lse.is_some(), ordinal)?;
    // Checked before the lock, because in a forked process another thread of the parent may have held the
    // lock.
    driver::process::check()?;
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
    let known = match known {
        Some(known) => known,
        None => {
            let strided = key.strided();
            if strided != 0 {
                return Ok(strided);
            }
            let problem = key.problem()?;
            if problem.is_empty() {
                return Ok(0);
            }
            let known = py.detach(|| Known::new(&key, &problem))?;
            let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= MOST {
                all.clear();
            }
            all.insert(key, known.clone());
            known
        }
    };
    // A launch blocks while the stream's queue is full. A Python callback in that queue needs the
    // interpreter.
    let others = features.map_or_else(Vec::new, |features| features::operands(&features, &known.problem));
    py.detach(|| known.enqueue([q.0, k.0, v.0, out.0], lse, &others, stream))?;
    Ok(0)
}

/// The element types of a code: four bits for each of q, k, v and out, the lowest for q, with the place of
/// the type in [`DType::ALL`]; then a bit for products in tf32. An integer is the cheapest argument that
/// Python can look up and pass.
fn dtypes_of(code: u32) -> Result<DTypes, Error> {
    let of = |tensor: u32| DType::ALL.get((code >> (4 * tensor) & 15) as usize).copied();
    match (of(0), of(1), of(2), of(3), code >> 16) {
        (Some(q), Some(k), Some(v), Some(out), tf32 @ (0 | 1)) => {
            Ok(DTypes { q, k, v, out, tf32: tf32 == 1 })
        }
        _ => {
            let expected = "four digits from 0 to 4 (f16, bf16, f32, e4m3, e5m2), for q, k, v and out, after \
                            a digit 1 for products in tf32";
            Err(Error::DType(format!("invalid value '{code:#x}' for dtypes: expected {expected}")))
        }
    }
}

impl Key {
    #[expect(clippy::too_many_arguments, reason = "those of `enqueue`")]
    fn new(
        [q, k, v]: [&Handed; 3],
        out: Four<i64>,
        heads: usize,
        dtypes: DTypes,
        terms: Terms,
        features: Option<Features>,
        lse: bool,
        ordinal: i32,
    ) -> Result<Key, Error> {
        let (band, score) = band_and_score(terms)?;
        Ok(Key {
            shapes: [q.1, k.1, v.1, (q.1.0, q.1.1, q.1.2, v.1.3)],
            strides: [q.2, k.2, v.2, out],
            heads,
            dtypes,
            band,
            score: (score.scale.map(f32::to_bits), score.softcap.map(f32::to_bits)),
            features,
            lse,
            ordinal,
        })
    }

    /// A bit for each input whose last dimension is not contiguous.
    fn strided(&self) -> u32 {
        let of = |bit: usize| {
            let (shape, strides) = (self.shapes[bit], self.strides[bit]);
            let empty = [shape.0, shape.1, shape.2, shape.3].contains(&0);
            u32::from(!empty && shape.3 > 1 && strides.3 != 1) << bit
        };
        of(0) | of(1) | of(2)
    }

    fn problem(&self) -> Result<Problem, Error> {
        let described = |i: usize| -> Described {
            let ((b, x, y, d), (sb, sx, sy, sd)) = (self.shapes[i], self.strides[i]);
            if self.heads == 1 {
                (0, [b, x, y, d], [sb, sx, sy, sd])
            } else {
                (0, [b, y, x, d], [sb, sy, sx, sd])
            }
        };
        let all = [described(0), described(1), described(2), described(3)];
        let (scale, softcap) = self.score;
        let score =
            Score { scale: scale.map(f32::from_bits), softcap: softcap.map(f32::from_bits), sink: false };
        let terms = (self.band, score);
        Ok(problem_of(all.each_ref(), self.dtypes, terms, self.features.as_ref())?.with_lse(self.lse))
    }
}

impl Known {
    fn new(key: &Key, problem: &Problem) -> Result<Known, Error> {
        let gpu = Gpu::open(key.ordinal)?;
        let prepared = gpu.prepare(problem, None)?;
        let memory = Tensor::FORWARD.map(|tensor| {
            let size = problem.dtypes.of(tensor).bytes();
            let (elements, origin) = problem.span(tensor).unwrap_or_default(); // `problem_of` has checked it
            ((origin * size) as u64, elements * size)
        });
        let lse = problem.lse_len() * size_of::<f32>();
        Ok(Known { gpu, prepared, problem: Arc::new(problem.clone()), memory, lse })
    }

    fn enqueue(
        &self,
        addresses: [u64; 4],
        lse: Option<u64>,
        others: &[(OperandSpec, usize)],
        stream: u64,
    ) -> Result<(), Error> {
        let slice = |tensor: usize| {
            let (below, bytes) = self.memory[tensor];
            // SAFETY: PyTorch owns the memory, and the package keeps the tensors until the call is enqueued.
            // PyTorch's allocator orders a later reuse of the memory on the stream.
            unsafe { DeviceSlice::from_raw(addresses[tensor].wrapping_sub(below), bytes) }
        };
        // SAFETY: the conditions are those of the tensors above.
        let lse = lse.map(|address| unsafe { DeviceSlice::from_raw(address, self.lse) });
        // SAFETY: this is PyTorch's current stream on the device. PyTorch never destroys a current stream.
        let stream = unsafe { Stream::from_raw(self.gpu.context(), stream) };
        let tensors = [slice(0), slice(1), slice(2), slice(3)];
        let other = |&(spec, address): &(OperandSpec, usize)| {
            // SAFETY: the conditions are those of the tensors above.
            (spec.operand, unsafe { DeviceSlice::from_raw(address as u64, spec.bytes()) })
        };
        let others: Vec<_> = others.iter().map(other).collect();
        Ok(self.prepared.enqueue_with(&stream, tensors, lse, &others)?)
    }
}

/// The plan that a call of [`enqueue`] with such tensors uses, why it was chosen, and the registers and local
/// memory that the driver's compiler gave it.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, heads, dtypes, terms, ordinal, features=None))]
#[expect(clippy::too_many_arguments, reason = "those of `enqueue`")]
pub fn explain<'py>(
    py: Python<'py>,
    q: Handed,
    k: Handed,
    v: Handed,
    out: Four<i64>,
    heads: usize,
    dtypes: u32,
    terms: Terms,
    ordinal: i32,
    features: Option<features::Described>,
) -> Result<Bound<'py, PyDict>, Error> {
    let features = features.as_ref().map(Features::new).transpose()?;
    let key = Key::new([&q, &k, &v], out, heads, dtypes_of(dtypes)?, terms, features, false, ordinal)?;
    let problem = key.problem()?;
    let (gpu, prepared) = py.detach(|| -> Result<_, Error> {
        let gpu = Gpu::open(ordinal)?;
        let prepared = gpu.prepare(&problem, None)?;
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
