//! Kernels that write keys and values into a cache in device memory.

use std::sync::{Arc, PoisonError};

use driver::{DeviceSlice, Expect, StreamRef};
use kernels::BufferKind;
use kernels::cache::{self, CacheArray, CacheWrite, LENGTHS, ROTATED};
use problem::{LengthArray, Operand};
use smallvec::SmallVec;

use super::Gpu;
use super::launches::{Launches, check_slice};
use super::loaded::{Code, Key};
use super::scratch::{OwnMemory, Purpose, ScratchLayout};
use crate::AttentionError;

/// Arrays of a launch that need no heap memory.
const INLINE: usize = 16;

/// The kernel of a write, loaded on a device, and the memory for its results. Any thread may use it.
#[derive(Debug)]
pub(crate) struct CacheWriter {
    arrays: Vec<CacheArray>,
    /// The places of the results that the next kernel reads, in the workspace.
    results: Vec<(usize, usize)>,
    launches: Launches,
    /// Memory of the results; `None` without results.
    workspace: Option<Arc<OwnMemory>>,
}

/// The results of a write, which the attention of the call reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written<'a> {
    /// The lengths after the append, i32.
    lengths: DeviceSlice<'a>,
    /// The rotated queries.
    queries: Option<DeviceSlice<'a>>,
}

impl<'a> Written<'a> {
    /// The result that takes the place of an operand.
    pub(crate) fn of(&self, operand: Operand) -> Option<DeviceSlice<'a>> {
        match operand {
            Operand::Lengths(LengthArray::UsedKv) => Some(self.lengths),
            Operand::Q => self.queries,
            _ => None,
        }
    }
}

fn is_result(array: &CacheArray) -> bool {
    matches!(array.name, LENGTHS | ROTATED)
}

impl Gpu {
    /// The kernel of a write, loaded and kept. Lengths, extents and strides need no new code.
    pub(crate) fn cache_writer(&self, write: &CacheWrite) -> Result<Arc<CacheWriter>, AttentionError> {
        driver::process::check()?;
        let known = self.writers.read().unwrap_or_else(PoisonError::into_inner).get(write);
        if let Some(known) = known {
            return Ok(known);
        }
        let writer = Arc::new(CacheWriter::new(self, write)?);
        Ok(self.writers.write().unwrap_or_else(PoisonError::into_inner).keep(*write, writer))
    }
}

impl CacheWriter {
    fn new(gpu: &Gpu, write: &CacheWrite) -> Result<CacheWriter, AttentionError> {
        let (code, contracts) = cache::bind(write, &gpu.arch)?;
        let arrays = write.arrays();
        let buffers: Vec<BufferKind> = arrays.iter().map(|array| BufferKind::Array(array.name)).collect();
        let key = Key {
            code: Code::Cache(code),
            expect: contracts.steps.iter().map(|step| Expect::of(&step.launch)).collect(),
        };
        let emit = || cache::emit(write, &gpu.arch);
        let launches = Launches::new((&gpu.context, &gpu.kernels), &buffers, contracts, key, emit)?;
        let mut layout = ScratchLayout::default();
        let results = arrays.iter().filter(|array| is_result(array));
        let results: Vec<_> =
            results.map(|array| (layout.add(Purpose::Results, array.bytes).1, array.bytes)).collect();
        let workspace = layout.allocations.first();
        let workspace = workspace
            .map(|&(purpose, bytes)| gpu.kernels.scratch.of_size(&gpu.context, purpose, bytes))
            .transpose()?;
        Ok(CacheWriter { arrays, results, launches, workspace })
    }

    /// The arrays that the caller provides, in their order.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &CacheArray> {
        self.arrays.iter().filter(|array| !is_result(array))
    }

    /// Bytes of device memory for the results.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.as_ref().map_or(0, |own| own.bytes())
    }

    /// Enqueues the write on the stream, and then the work of `then`, which reads the results. `inputs` are
    /// the arrays of [`CacheWriter::inputs`].
    pub(crate) fn enqueue(
        &self,
        stream: StreamRef<'_>,
        inputs: &[DeviceSlice<'_>],
        then: impl FnOnce(Option<Written<'_>>) -> Result<(), AttentionError>,
    ) -> Result<(), AttentionError> {
        let Some(workspace) = &self.workspace else {
            self.launch(stream, inputs, &[])?;
            return then(None);
        };
        let lease = workspace.lease(stream, stream.queue()?)?;
        // Another thread may use this queue, and then the same workspace.
        let turn = lease.turn();
        let part = |&(offset, bytes): &(usize, usize)| {
            // The layout has room for the part.
            lease.slice().part(offset, bytes).unwrap_or(DeviceSlice::EMPTY)
        };
        let results: SmallVec<[DeviceSlice<'_>; 2]> = self.results.iter().map(part).collect();
        let written = Written { lengths: results[0], queries: results.get(1).copied() };
        let done = self.launch(stream, inputs, &results).and_then(|()| then(Some(written)));
        drop(turn);
        drop(results);
        lease.launched(stream);
        done
    }

    fn launch(
        &self,
        stream: StreamRef<'_>,
        inputs: &[DeviceSlice<'_>],
        results: &[DeviceSlice<'_>],
    ) -> Result<(), AttentionError> {
        let (mut inputs, mut results) = (inputs.iter(), results.iter());
        let mut slices: SmallVec<[DeviceSlice<'_>; INLINE]> = SmallVec::new();
        for (array, &needed) in self.arrays.iter().zip(self.launches.needed()) {
            let next = if is_result(array) { results.next() } else { inputs.next() };
            let slice = next.copied().unwrap_or(DeviceSlice::EMPTY);
            check_slice(BufferKind::Array(array.name), needed, 1, slice)?;
            slices.push(slice);
        }
        self.launches.enqueue(stream, |index| slices[index])
    }
}
