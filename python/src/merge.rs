//! Merging results over different keys, on the host and on a GPU.
#![allow(unsafe_code, reason = "addresses and streams that Python hands over")]

use flashcore::gpu::Gpu;
use flashcore::raw::{self, Merge, Queue};
use pyo3::prelude::*;

use crate::call::Place;
use crate::error::Error;

/// Merges dense results ([`raw::merge_states`]). `parts` has the addresses of rows and of their LSEs, and
/// `to` those of the results; `extents` are batch, row, head and dim.
#[pyfunction]
pub fn merge_states(
    py: Python<'_>,
    parts: Vec<[u64; 2]>,
    to: [u64; 2],
    extents: [usize; 4],
    dtype: &str,
    place: Place,
) -> Result<(), Error> {
    let merge = Merge { dtype: dtype.parse()?, extents, parts: &parts, to };
    let (ordinal, handle) = place;
    py.detach(|| {
        let gpu = ordinal.map(Gpu::open).transpose()?;
        let queue = gpu.as_deref().map_or(Queue::host(), |gpu| Queue::Stream { gpu, handle });
        // SAFETY: the package describes dense tensors that it keeps alive during the call, and results that
        // it has just allocated. PyTorch's allocator orders a later reuse of the memory on the stream, which
        // is PyTorch's current one on the device: PyTorch never destroys that.
        unsafe { raw::merge_states(queue, &merge) }?;
        Ok(())
    })
}
