//! Gradients of PyTorch's tensors: the tensors are read here, memory for the results is allocated, and the
//! call is made.

use problem::ElementType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call::{Call, DescribedFeatures, Place, TF32, Terms, code_of};
use crate::eager::Made;
use crate::error::Error;
use crate::torch::{Seen, Torch, quiet};

/// The tensors of a backward pass. `saved` are q, k, v, O and the LSE, and `into` is memory for the gradients
/// of q, k and v, each of them `None` or a tensor.
pub struct Given<'a, 'py> {
    pub d_out: &'a Bound<'py, PyAny>,
    pub d_lse: Option<&'a Bound<'py, PyAny>>,
    pub saved: [Bound<'py, PyAny>; 5],
    pub into: [Bound<'py, PyAny>; 3],
    /// The dimension of the heads, 1 or 2.
    pub heads: usize,
}

/// The gradients of q, k and v. `options` say whether each run must return equal bits, and whether the
/// gradients are set to 0 first. `others` are the addresses of the sinks' gradient and of those of tables.
pub fn compute<'py>(
    torch: &Torch,
    given: &Given<'_, 'py>,
    terms: Terms,
    options: (bool, bool),
    features: Option<DescribedFeatures>,
    others: (Option<u64>, Vec<(u8, u64)>),
) -> Made<'py> {
    let py = given.d_out.py();
    let mut reading = Reading { py, torch, device: None, held: Vec::with_capacity(12) };
    let Some(ready) = reading.ready(given, terms, options, features, others) else { return Ok(None) };
    let (call, place, gradients) = ready;
    match call.run(py, place) {
        Ok(()) => Ok(Some(PyTuple::new(py, gradients)?.into_any())),
        Err(error @ Error::Python(_)) => Err(error),
        Err(_) => Ok(None),
    }
}

type Ready<'py> = (Call, Place, [Bound<'py, PyAny>; 3]);

struct Reading<'a, 'py> {
    py: Python<'py>,
    torch: &'a Torch,
    device: Option<(i32, i32)>,
    /// Storages of the tensors: another thread may give a tensor a new one during the call.
    held: Vec<Bound<'py, PyAny>>,
}

impl<'py> Reading<'_, 'py> {
    /// `None` if a tensor is none that is read here, or does not fit the others: Python code names it.
    fn ready(
        &mut self,
        given: &Given<'_, 'py>,
        terms: Terms,
        (deterministic, clear): (bool, bool),
        features: Option<DescribedFeatures>,
        (d_sinks, d_tables): (Option<u64>, Vec<(u8, u64)>),
    ) -> Option<Ready<'py>> {
        let (heads, [q, k, v, out, lse]) = (given.heads, &given.saved);
        quiet(!matches!(heads, 1 | 2))?;
        self.torch.is_quiet(self.py)?;
        let (q, k, v) = (self.rows(q)?, self.rows(k)?, self.rows(v)?);
        let (out, d_out) = (self.rows(out)?, self.rows(given.d_out)?);
        let (device, dtype, [batch, ..]) = (self.device?, q.seen.dtype, q.seen.shape);
        quiet([&k, &v, &out, &d_out].iter().any(|rows| rows.seen.dtype != dtype))?;
        quiet(out.seen.shape != d_out.seen.shape)?;
        let of_lse = [batch, q.seen.shape[heads], q.seen.shape[3 - heads]];
        let lse = self.floats(lse, of_lse)?;
        let d_lse = match given.d_lse {
            None => None,
            Some(d_lse) => Some(self.floats(d_lse, of_lse)?),
        };
        let place = self.torch.place(self.py, device)?;
        let tf32 = if self.torch.tf32(self.py, device, dtype)? { TF32 } else { 0 };
        let [into_q, into_k, into_v] = &given.into;
        let results = [self.result(&q, into_q)?, self.result(&k, into_k)?, self.result(&v, into_v)?];
        if clear {
            for result in &results {
                result.tensor.call_method0(intern!(self.py, "zero_")).ok()?;
            }
        }
        let (q, k, v) = (q.seen.handed(), k.seen.handed(), v.seen.handed());
        let address_and_strides = |rows: &Read<'_>| (rows.seen.address, rows.seen.handed().2);
        let code = code_of(dtype)? | tf32;
        let mut call = Call::new([&q, &k, &v], address_and_strides(&out), heads, code, terms).ok()?;
        if let Some(features) = features {
            call.add(features).ok()?;
        }
        call.add_lse(lse.seen.address).ok()?;
        let d_lse = d_lse.map(|d_lse| d_lse.seen.address);
        let described = results.each_ref().map(address_and_strides);
        let all = (deterministic, address_and_strides(&d_out), d_lse, described, d_sinks, d_tables);
        call.add_gradients(heads, all).ok()?;
        Some((call, place, results.map(|result| result.tensor)))
    }

    /// A tensor, or its copy, that a test of its description accepts.
    fn read(&mut self, tensor: &Bound<'py, PyAny>, accepts: impl Fn(&Seen) -> bool) -> Option<Read<'py>> {
        let mut tensor = tensor.clone();
        let mut seen = self.torch.see(&tensor, &mut self.held)?;
        if !accepts(&seen) {
            tensor = tensor.call_method0(intern!(self.py, "contiguous")).ok()?;
            seen = self.torch.see(&tensor, &mut self.held)?;
        }
        quiet(!accepts(&seen) || *self.device.get_or_insert(seen.device) != seen.device)?;
        Some(Read { tensor, seen })
    }

    /// A tensor of four dimensions whose last one is contiguous.
    fn rows(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Read<'py>> {
        self.read(tensor, Seen::has_rows).filter(|rows| rows.seen.dimensions == 4)
    }

    /// Dense elements in float32, of three dimensions.
    fn floats(&mut self, tensor: &Bound<'py, PyAny>, shape: [usize; 3]) -> Option<Read<'py>> {
        let fits = |seen: &Seen| seen.dtype == ElementType::F32 && seen.dimensions == 3;
        let read = self.read(tensor, Seen::is_dense)?;
        (fits(&read.seen) && read.seen.shape[..3] == shape).then_some(read)
    }

    /// Memory for the gradient of a tensor.
    fn result(&mut self, of: &Read<'py>, into: &Bound<'py, PyAny>) -> Option<Read<'py>> {
        let (tensor, seen) = if into.is_none() {
            let tensor = self.torch.functions.empty_like.bind(self.py).call1((&of.tensor,)).ok()?;
            let seen = self.torch.describe(&tensor)?;
            (tensor, seen)
        } else {
            (into.clone(), self.torch.see(into, &mut self.held)?)
        };
        let fits = (seen.dtype, seen.shape, seen.device) == (of.seen.dtype, of.seen.shape, of.seen.device);
        (fits && seen.dimensions == 4 && seen.has_rows()).then_some(Read { tensor, seen })
    }
}

/// A tensor and its description.
struct Read<'py> {
    tensor: Bound<'py, PyAny>,
    seen: Seen,
}
