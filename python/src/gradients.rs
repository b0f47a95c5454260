//! Gradients of PyTorch's tensors: the tensors are read here, memory for the results is allocated, and the
//! call is made.

use problem::{ElementType, LengthArray};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call::{Call, DescribedFeatures, Place, TF32, Terms, code_of, table_code};
use crate::error::Error;
use crate::torch::{Seen, Torch, quiet};

/// The tensors of a backward pass. `saved` are q, k, v, O and the LSE, and `into` is memory for the gradients
/// of q, k and v, each of them `None` or a tensor.
pub struct Given<'a, 'py> {
    pub d_out: &'a Bound<'py, PyAny>,
    pub d_lse: Option<&'a Bound<'py, PyAny>>,
    pub saved: [Bound<'py, PyAny>; 5],
    pub into: [Bound<'py, PyAny>; 3],
    /// The dimension of the heads, 1 or 2, in tensors of four dimensions. Those of three have no batch
    /// entries.
    pub heads: usize,
}

/// The gradients of q, k and v. `options` say whether each run must return equal bits, and whether the
/// gradients are set to 0 first. `others` are the addresses of the sinks' gradient and of those of tables.
pub fn compute<'py>(
    torch: &Torch,
    given: &Given<'_, 'py>,
    terms: Terms,
    options: (bool, bool),
    features: Option<&Bound<'py, PyTuple>>,
    others: (Option<u64>, Vec<(u8, u64)>),
) -> Result<Option<[Bound<'py, PyAny>; 3]>, Error> {
    let py = given.d_out.py();
    let mut reading = Reading { py, torch, device: None, held: Vec::with_capacity(12) };
    let Some(ready) = reading.ready(given, terms, options, features, others) else { return Ok(None) };
    let (call, place, gradients) = ready;
    match call.run(py, place) {
        Ok(()) => Ok(Some(gradients)),
        Err(error @ Error::Python(_)) => Err(error),
        Err(_) => Ok(None),
    }
}

type Ready<'py> = (Call, Place, [Bound<'py, PyAny>; 3]);

/// Places in the tuple `flashcore_attn._features.Features`.
mod place {
    pub const LENGTHS: usize = 0;
    pub const SINK: usize = 4;
    pub const SCORE: usize = 5;
    pub const TABLES: usize = 9;
    pub const SCALES: usize = 10;
    pub const PAGES: usize = 12;
    pub const TEMPERATURE: usize = 15;
    pub const BEFORE: usize = 16;
    pub const DROPOUT: usize = 17;
}

struct Reading<'a, 'py> {
    py: Python<'py>,
    torch: &'a Torch,
    device: Option<(i32, i32)>,
    /// Storages of the tensors: another thread may give a tensor a new one during the call.
    held: Vec<Bound<'py, PyAny>>,
}

/// A tensor and its description, with a dimension for batch entries.
struct Read<'py> {
    tensor: Bound<'py, PyAny>,
    seen: Seen,
    /// Whether the tensor has no such dimension.
    packed: bool,
}

impl<'py> Reading<'_, 'py> {
    /// `None` if a tensor is none that is read here, or does not fit the others: Python code names it.
    fn ready(
        &mut self,
        given: &Given<'_, 'py>,
        terms: Terms,
        (deterministic, clear): (bool, bool),
        features: Option<&Bound<'py, PyTuple>>,
        (d_sinks, d_tables): (Option<u64>, Vec<(u8, u64)>),
    ) -> Option<Ready<'py>> {
        let (heads, [q, k, v, out, lse]) = (given.heads, &given.saved);
        quiet(!matches!(heads, 1 | 2))?;
        self.torch.is_quiet(self.py)?;
        let (q, k, v) = (self.rows(q)?, self.rows(k)?, self.rows(v)?);
        let (out, d_out) = (self.rows(out)?, self.rows(given.d_out)?);
        let (device, dtype, [batch, ..]) = (self.device?, q.seen.dtype, q.seen.shape);
        let all = [&q, &k, &v, &out, &d_out];
        quiet(all.iter().any(|read| read.seen.dtype != dtype || read.packed && heads != 2))?;
        quiet((out.seen.shape, out.packed) != (d_out.seen.shape, d_out.packed))?;
        let of_lse = [batch, q.seen.shape[heads], q.seen.shape[3 - heads]];
        let lse = self.floats(lse, of_lse, q.packed)?;
        let d_lse = match given.d_lse {
            None => None,
            Some(d_lse) => Some(self.floats(d_lse, of_lse, q.packed)?),
        };
        let features = match features {
            None => None,
            Some(features) => Some(self.features(features, of_lse[1])?),
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
        let [q, k, v] = [&q, &k, &v].map(|read| read.seen.handed());
        let address_and_strides = |read: &Read<'_>| (read.seen.address, read.seen.handed().2);
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

    /// A tensor, or its copy, that a test of its description accepts; with so many dimensions, or without
    /// that of batch entries.
    fn read(
        &mut self,
        tensor: &Bound<'py, PyAny>,
        dimensions: usize,
        accepts: impl Fn(&Seen) -> bool,
    ) -> Option<Read<'py>> {
        let mut tensor = tensor.clone();
        let mut seen = self.see(&tensor)?;
        if !accepts(&seen) {
            tensor = tensor.call_method0(intern!(self.py, "contiguous")).ok()?;
            seen = self.see(&tensor)?;
        }
        let packed = seen.dimensions != dimensions;
        accepts(&seen).then_some(Read { tensor, seen: seen.with_entries(dimensions)?, packed })
    }

    /// A tensor on the device of the first one.
    fn see(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Seen> {
        let seen = self.torch.see(tensor, &mut self.held)?;
        (*self.device.get_or_insert(seen.device) == seen.device).then_some(seen)
    }

    /// A tensor whose last dimension is contiguous.
    fn rows(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Read<'py>> {
        self.read(tensor, 4, Seen::has_rows)
    }

    /// Dense elements in float32, of three dimensions.
    fn floats(&mut self, tensor: &Bound<'py, PyAny>, shape: [usize; 3], packed: bool) -> Option<Read<'py>> {
        let read = self.read(tensor, 3, Seen::is_dense)?;
        quiet(read.seen.dtype != ElementType::F32 || read.packed != packed)?;
        (read.seen.shape[..3] == shape).then_some(read)
    }

    /// Memory for the gradient of a tensor.
    fn result(&mut self, of: &Read<'py>, into: &Bound<'py, PyAny>) -> Option<Read<'py>> {
        let (tensor, seen) = if into.is_none() {
            let tensor = self.torch.functions.empty_like.bind(self.py).call1((&of.tensor,)).ok()?;
            let seen = self.torch.describe(&tensor)?;
            (tensor, seen)
        } else {
            (into.clone(), self.see(into)?)
        };
        quiet((seen.dimensions == 3) != of.packed || !seen.has_rows() || seen.device != of.seen.device)?;
        let seen = seen.with_entries(4)?;
        let fits = (seen.dtype, seen.shape) == (of.seen.dtype, of.seen.shape);
        fits.then_some(Read { tensor, seen, packed: of.packed })
    }

    /// Features of a call with so many query heads, from the package's tuple of them.
    fn features(&mut self, features: &Bound<'py, PyTuple>, heads: usize) -> Option<DescribedFeatures> {
        let at = |place| features.get_item(place).ok();
        let tuple = |place| at(place)?.cast_into::<PyTuple>().ok();
        quiet(!at(place::PAGES)?.is_none() || !at(place::BEFORE)?.is_none())?;
        quiet(tuple(place::SCALES)?.iter().any(|scale| !scale.is_none()))?;
        let [batch, longest_q, longest_kv] = [1, 2, 3].map(|size| at(size)?.extract::<usize>().ok());
        let (batch, longest_q, longest_kv) = (batch?, longest_q?, longest_kv?);
        let mut lengths = [None; 5];
        for ((address, of), array) in lengths.iter_mut().zip(LengthArray::ALL).zip(tuple(place::LENGTHS)?) {
            let cumulative = matches!(of, LengthArray::CumulativeQ | LengthArray::CumulativeKv);
            *address = self.elements(&array, ElementType::I32, batch + usize::from(cumulative))?;
        }
        let uneven = lengths.iter().any(Option::is_some);
        let lengths = uneven.then_some((batch, longest_q, longest_kv, lengths));
        let mut of_heads = Vec::new();
        for (name, place) in [("sinks", place::SINK), ("temperature", place::TEMPERATURE)] {
            if let Some(address) = self.elements(&at(place)?, ElementType::F32, heads)? {
                of_heads.push((name.to_owned(), address));
            }
        }
        let (score, mask) = (at(place::SCORE)?.extract().ok()?, at(place::SCORE + 1)?.extract().ok()?);
        let (floats, ints) = (at(place::SCORE + 2)?.extract().ok()?, at(place::SCORE + 3)?.extract().ok()?);
        let mut tables = Vec::new();
        for table in tuple(place::TABLES)?.iter() {
            let seen = self.see(&table)?;
            let dims = seen.dimensions;
            let (extents, strides) = (seen.shape[..dims].to_vec(), seen.strides[..dims].to_vec());
            tables.push((seen.address, table_code(seen.dtype)?, extents, strides));
        }
        let dropout = match self.elements(&at(place::DROPOUT + 1)?, ElementType::I32, 4)? {
            None => None,
            Some(state) => Some((at(place::DROPOUT)?.extract().ok()?, state)),
        };
        let invariant = String::new();
        Some((
            lengths, of_heads, score, mask, floats, ints, tables, [None; 3], None, None, dropout, invariant,
        ))
    }

    /// The address of so many dense elements of an array, or of its copy. The array may be absent.
    fn elements(&mut self, array: &Bound<'py, PyAny>, dtype: ElementType, len: usize) -> Option<Option<u64>> {
        if array.is_none() {
            return Some(None);
        }
        let Read { seen, .. } = self.read(array, 1, Seen::is_dense)?;
        (seen.dtype == dtype && seen.shape[0] == len).then_some(Some(seen.address))
    }
}
