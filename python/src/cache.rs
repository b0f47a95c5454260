//! Keys and values that go to slots of a cache, on the host and on a GPU.
#![allow(unsafe_code, reason = "addresses and streams that Python hands over")]

use cpu::Executor;
use flashcore::gpu::Gpu;
use flashcore::raw::{self, Queue, SlotWrite, Tensor, View};
use problem::{DType, ElementType};
use pyo3::prelude::*;

use crate::call::{Place, Workers};
use crate::error::Error;
use crate::interrupt::Interruptible;

/// Address, shape and strides in elements, in the order page (or 1), row, head, dim.
type Rows = (u64, [usize; 4], [i64; 4]);

/// Address, number of elements, and stride.
type Factors = (u64, usize, i64);

/// Writes keys and values to slots of a cache ([`raw::write_slots`]). `dtypes` are the names of the types of
/// the new rows and of the caches. `slots` are an address, a number, and whether they have 64 bits.
#[pyfunction]
pub fn write_slots(
    py: Python<'_>,
    new: [Rows; 2],
    caches: [Rows; 2],
    dtypes: (String, String),
    slots: (u64, usize, bool),
    factors: Option<[Factors; 2]>,
    place: Place,
) -> Result<(), Error> {
    let (from, to): (DType, DType) = (dtypes.0.parse()?, dtypes.1.parse()?);
    let rows = |(address, shape, strides): &Rows, dtype: DType| {
        let ordered = |[page, row, head, dim]: [i64; 4]| [page, head, row, dim];
        let [page, row, head, dim] = *shape;
        let view = View::new(dtype.into(), &[page, head, row, dim], &ordered(*strides))?;
        Ok::<_, Error>(Tensor { address: *address, view })
    };
    let factor = |(address, elements, stride): Factors| {
        Ok::<_, Error>(Tensor { address, view: View::new(ElementType::F32, &[elements], &[stride])? })
    };
    let factors = factors.map(|[k, v]| Ok::<_, Error>([factor(k)?, factor(v)?])).transpose()?;
    let (slots, count, wide) = slots;
    let [keys, values] = [rows(&new[0], from)?, rows(&new[1], from)?];
    let [key_cache, value_cache] = [rows(&caches[0], to)?, rows(&caches[1], to)?];
    let write = SlotWrite { keys, values, key_cache, value_cache, slots, count, wide, factors };
    let (ordinal, handle) = place;
    let Some(ordinal) = ordinal else {
        let workers = Workers::new(handle);
        let executor = Interruptible::new(&workers);
        let queue = Queue::Host { executor: Some(&executor), threads: workers.threads() };
        // SAFETY: the package describes tensors whose storage it has measured and keeps alive during the
        // call. Writing to them from another Python thread meanwhile is a race of the caller's.
        let done = py.detach(|| unsafe { raw::write_slots(queue, &write) });
        return executor.exception().map_or_else(|| Ok(done?), |exception| Err(exception.into()));
    };
    py.detach(|| {
        let gpu = Gpu::open(ordinal)?;
        // SAFETY: as above. PyTorch's allocator orders a later reuse of the memory on the stream, which is
        // PyTorch's current one on the device: PyTorch never destroys that.
        unsafe { raw::write_slots(Queue::Stream { gpu: &gpu, handle }, &write) }?;
        Ok(())
    })
}
