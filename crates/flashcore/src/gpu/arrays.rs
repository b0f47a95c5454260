//! Kernels on arrays in device memory that are no attention: writes into a cache, and merges.

use std::sync::{Arc, PoisonError};

use driver::{DeviceSlice, Expect, StreamRef};
use kernels::cache::{self, CacheWrite, LENGTHS, ROTATED};
use kernels::merge::{self, StateMerge};
use kernels::{Arch, BufferKind, Contracts, KernelArray, KernelError, Program};
use problem::{LengthArray, Operand};
use smallvec::SmallVec;

use super::Gpu;
use super::launches::{Launches, check_slice};
use super::loaded::{Code, Key};
use super::scratch::{OwnMemory, Purpose, ScratchLayout};
use crate::AttentionError;

/// Arrays of a launch that need no heap memory.
const INLINE: usize = 16;

/// The work of a kernel that is no attention.
#[expect(clippy::large_enum_variant, reason = "the value lives for one call, which need not allocate")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArrayWork {
    /// Writes keys and values into a cache.
    Write(CacheWrite),
    /// Merges results over different keys.
    Merge(StateMerge),
}

impl ArrayWork {
    fn arrays(&self) -> Vec<KernelArray> {
        match self {
            ArrayWork::Write(write) => write.arrays(),
            ArrayWork::Merge(merge) => merge.arrays(),
        }
    }

    fn bind(&self, arch: &Arch) -> Result<(Code, Contracts), KernelError> {
        Ok(match self {
            ArrayWork::Write(write) => {
                let (code, contracts) = cache::bind(write, arch)?;
                (Code::Cache(code), contracts)
            }
            ArrayWork::Merge(merge) => {
                let (code, contracts) = merge::bind(merge, arch)?;
                (Code::Merge(code), contracts)
            }
        })
    }

    fn emit(&self, arch: &Arch) -> Result<Program, KernelError> {
        match self {
            ArrayWork::Write(write) => cache::emit(write, arch),
            ArrayWork::Merge(merge) => merge::emit(merge, arch),
        }
    }
}

/// A kernel that is loaded on a device, and the memory for the results that the next kernel reads. Any thread
/// may use it.
#[derive(Debug)]
pub(crate) struct ArrayKernel {
    arrays: Vec<KernelArray>,
    /// The places of these results in the workspace.
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

fn is_result(array: &KernelArray) -> bool {
    matches!(array.name, LENGTHS | ROTATED)
}

impl Gpu {
    /// The kernel of a work, loaded and kept. Lengths, extents and strides need no new code.
    pub(crate) fn array_kernel(&self, work: &ArrayWork) -> Result<Arc<ArrayKernel>, AttentionError> {
        driver::process::check()?;
        let known = self.array_kernels.read().unwrap_or_else(PoisonError::into_inner).get(work);
        if let Some(known) = known {
            return Ok(known);
        }
        let kernel = Arc::new(ArrayKernel::new(self, work)?);
        Ok(self.array_kernels.write().unwrap_or_else(PoisonError::into_inner).keep(*work, kernel))
    }
}

impl ArrayKernel {
    fn new(gpu: &Gpu, work: &ArrayWork) -> Result<ArrayKernel, AttentionError> {
        let (code, contracts) = work.bind(&gpu.arch)?;
        let arrays = work.arrays();
        let buffers: Vec<BufferKind> = arrays.iter().map(|array| BufferKind::Array(array.name)).collect();
        let key = Key { code, expect: contracts.steps.iter().map(|step| Expect::of(&step.launch)).collect() };
        let emit = || work.emit(&gpu.arch);
        let launches = Launches::new((&gpu.context, &gpu.kernels), &buffers, contracts, key, emit)?;
        let mut layout = ScratchLayout::default();
        let results = arrays.iter().filter(|array| is_result(array));
        let results: Vec<_> =
            results.map(|array| (layout.add(Purpose::Results, array.bytes).1, array.bytes)).collect();
        let workspace = layout.allocations.first();
        let workspace = workspace
            .map(|&(purpose, bytes)| gpu.kernels.scratch.of_size(&gpu.context, purpose, bytes))
            .transpose()?;
        Ok(ArrayKernel { arrays, results, launches, workspace })
    }

    /// The arrays that the caller provides, in their order, among them those that are written for it.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &KernelArray> {
        self.arrays.iter().filter(|array| !is_result(array))
    }

    /// Bytes of device memory for the results.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.as_ref().map_or(0, |own| own.bytes())
    }

    /// Enqueues the kernel on the stream, and then the work of `then`, which reads the results. `inputs` are
    /// the arrays of [`ArrayKernel::inputs`].
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
