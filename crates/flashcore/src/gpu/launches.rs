//! Loaded kernels of a program with the arguments of their launches and the memory of their own.

use std::sync::Arc;

use driver::{Call, Context, DeviceSlice, Function, StreamRef};
use kernels::{BufferKind, Contracts, KernelError, Program, ProgramBuffer, Step};
use smallvec::{SmallVec, smallvec};

use super::loaded::{Kernels, Key};
use super::scratch::{Lease, OwnMemory, Purpose, ScratchLayout};
use crate::AttentionError;
use crate::error::refused;

/// Buffers of a launch that need no heap memory.
pub(super) const INLINE: usize = 8;

/// The loaded kernels of a program and their launch arguments.
#[derive(Debug)]
pub(super) struct Launches {
    /// The kernels in launch order.
    steps: Vec<Launched>,
    /// One per buffer of the program.
    sources: Vec<Source>,
    /// Counters, scratch and temporaries of all kernels.
    own: Vec<Arc<OwnMemory>>,
    /// Minimum bytes of each of the caller's buffers.
    needed: Vec<usize>,
}

/// A loaded kernel and its launch arguments.
#[derive(Debug)]
pub(super) struct Launched {
    pub function: Function,
    pub call: Call,
}

/// Where a launch takes a buffer from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The buffer of the caller's operand with this index.
    Caller(usize),
    /// A part of the program's own memory of this index in [`Launches::own`].
    Own { index: usize, offset: usize, bytes: usize },
}

impl Launches {
    /// `callers` are the buffers that the caller provides. `emit` is called when the kernels of `key` are
    /// not loaded yet.
    pub(super) fn new(
        (context, kernels): (&Arc<Context>, &Kernels),
        callers: &[BufferKind],
        contracts: Contracts,
        key: Key,
        emit: impl FnOnce() -> Result<Program, KernelError>,
    ) -> Result<Launches, AttentionError> {
        let (sources, own) = sources(&contracts, callers)?;
        let mut needed = vec![0; callers.len()];
        for (source, buffer) in sources.iter().zip(&contracts.buffers) {
            if let Source::Caller(index) = *source {
                needed[index] = buffer.bytes;
            }
        }
        let names: Vec<String> =
            contracts.buffers.iter().map(|buffer| buffer.kind.name().to_owned()).collect();
        let call = |step: Step| {
            let call = Call::with_maps(step.launch, step.args, step.tensor_maps, names.clone());
            call.check(context).map(|()| call)
        };
        let calls = contracts.steps.into_iter().map(call).collect::<Result<Vec<_>, _>>()?;
        let functions = kernels.load(context, key, emit)?;
        let launched = |(function, call): (&Function, Call)| Launched { function: function.clone(), call };
        let steps = functions.iter().zip(calls).map(launched).collect();
        let own = own.allocations.into_iter();
        let own = own.map(|(purpose, bytes)| kernels.scratch.of_size(context, purpose, bytes));
        let own = own.collect::<Result<_, _>>()?;
        Ok(Launches { steps, sources, own, needed })
    }

    /// The kernel that is launched first.
    pub(super) fn first(&self) -> &Launched {
        &self.steps[0]
    }

    /// Bytes of the counters, scratch and temporaries of all kernels.
    pub(super) fn own_bytes(&self) -> usize {
        self.own.iter().map(|own| own.bytes()).sum()
    }

    /// Minimum bytes of each of the caller's buffers.
    pub(super) fn needed(&self) -> &[usize] {
        &self.needed
    }

    /// Launches all kernels. `slice` gives the caller's slices, by the numbers of its operands.
    pub(super) fn enqueue<'s>(
        &self,
        stream: StreamRef<'_>,
        slice: impl Fn(usize) -> DeviceSlice<'s>,
    ) -> Result<(), AttentionError> {
        let mut leases: SmallVec<[Lease<'_>; 2]> = SmallVec::new();
        if !self.own.is_empty() {
            let queue = stream.queue()?;
            for own in &self.own {
                leases.push(own.lease(stream, queue)?);
            }
        }
        let mut all: SmallVec<[DeviceSlice<'_>; INLINE]> = smallvec![DeviceSlice::EMPTY; self.sources.len()];
        for (buffer, source) in all.iter_mut().zip(&self.sources) {
            *buffer = match *source {
                Source::Caller(index) => slice(index),
                // `of_size` gives at least the bytes of the layout, so the part exists.
                Source::Own { index, offset, bytes } => {
                    leases[index].slice().part(offset, bytes).unwrap_or(DeviceSlice::EMPTY)
                }
            };
        }
        // Another thread may use this queue, and then the same scratch.
        let turn = leases.iter().find_map(Lease::turn);
        let result =
            self.steps.iter().try_for_each(|Launched { function, call }| function.launch(stream, call, &all));
        drop(turn);
        drop(all);
        // Also after an error: the kernels before the one that failed use the memory.
        leases.into_iter().for_each(|lease| lease.launched(stream));
        Ok(result?)
    }
}

/// Where each buffer of a program comes from, and the program's own memory. An error when it has a buffer
/// that is neither among the `callers`' nor its own.
fn sources(
    contracts: &Contracts,
    callers: &[BufferKind],
) -> Result<(Vec<Source>, ScratchLayout), AttentionError> {
    let mut own = ScratchLayout::default();
    let source = |&ProgramBuffer { kind, bytes }: &ProgramBuffer| {
        if let Some(index) = callers.iter().position(|&caller| caller == kind) {
            return Ok::<_, AttentionError>(Source::Caller(index));
        }
        let purpose = Purpose::of(kind).ok_or_else(|| AttentionError::Unsupported {
            argument: "plan",
            value: format!("a kernel with the buffer {kind}"),
            accepted: format!("kernels with {}, counters, scratch and temporaries alone", names(callers)),
        })?;
        let (index, offset) = own.add(purpose, bytes);
        Ok(Source::Own { index, offset, bytes })
    };
    let sources = contracts.buffers.iter().map(source).collect::<Result<_, _>>()?;
    Ok((sources, own))
}

fn names(kinds: &[BufferKind]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

/// Checks a slice of the caller's against the size and the alignment of its operand, in bytes. An operand
/// with elements has an address.
pub(super) fn check_slice(
    kind: BufferKind,
    needed: usize,
    accepted: u64,
    slice: DeviceSlice<'_>,
) -> Result<(), AttentionError> {
    let (bytes, address) = (slice.bytes(), slice.address());
    if bytes < needed {
        return Err(AttentionError::DeviceSlice { tensor: kind.name(), bytes, needed });
    }
    if address == 0 && needed > 0 {
        let expected = "that of device memory".to_owned();
        return Err(refused(kind.name(), "address", "0x0", expected));
    }
    if !address.is_multiple_of(accepted) {
        return Err(AttentionError::Alignment { tensor: kind.name(), address, accepted });
    }
    Ok(())
}
