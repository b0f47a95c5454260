//! One call of attention on addresses: for Python, C, and bridges to other frameworks.
//!
//! A caller describes each operand of the pass by a [`Tensor`]: an address, a shape and strides. Operands
//! have the names of [`problem::Operand`], so a new operand needs no new argument here. [`prepare`] checks
//! the shapes and finds or compiles the kernel for such a problem. [`Ready::enqueue`] launches it on the
//! caller's stream, or computes in host memory.
//!
//! ```
//! use flashcore::gpu::Operand;
//! use flashcore::raw::{self, CallOptions, OperandMap, Queue, Tensor, View};
//! use flashcore::{Band, ElementType};
//!
//! let (x, mut out) = ([0.5f32; 2 * 8], [0.0f32; 2 * 8]); // one head, two rows, head dim 8
//! let view = View::new(ElementType::F32, &[1, 1, 2, 8], &[16, 16, 8, 1])?;
//! let tensor = |address: *const f32| Tensor { address: address as u64, view };
//! let mut operands = OperandMap::default();
//! for input in [Operand::Q, Operand::K, Operand::V] {
//!     operands.insert(input, tensor(x.as_ptr()));
//! }
//! operands.insert(Operand::OUT, tensor(out.as_mut_ptr()));
//! let options = CallOptions { band: Band::CAUSAL, ..CallOptions::default() };
//! // SAFETY: the addresses are those of arrays with such shapes, which outlive the call.
//! unsafe { raw::prepare(Queue::host(), &operands, &options)?.enqueue()? };
//! assert_eq!(out, x);
//! # Ok::<(), flashcore::AttentionError>(())
//! ```
#![allow(unsafe_code, reason = "addresses that a caller hands over")]

mod append;
mod calls;
mod device;
mod host;
mod merge;
mod recent;
mod repeated;
mod rotary;
mod rows;
mod shapes;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use cpu::{CpuPlan, Executor};
use driver::{DeviceSlice, StreamRef};
use problem::{Band, ElementType, Operand, OperandSpec, Pass, Problem, ProblemError, Program, Strides};
use smallvec::SmallVec;

use crate::AttentionError;
pub use crate::error::refused;
use crate::gpu::{Gpu, Prepared, Written};
use crate::known::{Key, Wish};
pub use append::Append;
pub use calls::{Described, Interface, keep_call, launch_again};
pub(crate) use host::plan_for;
pub use merge::{Merge, merge_states};
pub use problem::OperandMap;
pub use repeated::Repeated;
pub use rotary::Rotary;
pub(crate) use shapes::problem_of;
pub use slots::{SlotWrite, prepare_slots, write_slots};

/// Element type, shape and strides of an operand, of at most four dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    dtype: ElementType,
    dimensions: usize,
    shape: [usize; 4],
    strides: [i64; 4],
}

impl View {
    /// A view with strides in elements.
    ///
    /// # Errors
    /// When there are more than four dimensions, or not as many strides as dimensions.
    pub fn new(dtype: ElementType, shape: &[usize], strides: &[i64]) -> Result<View, AttentionError> {
        let dimensions = shape.len();
        if dimensions > 4 || strides.len() != dimensions {
            return Err(refused(
                "a tensor",
                "number of dimensions",
                format!("{dimensions} with {} strides", strides.len()),
                "at most 4, each with a stride",
            ));
        }
        let mut view = View { dtype, dimensions, shape: [1; 4], strides: [0; 4] };
        view.shape[..dimensions].copy_from_slice(shape);
        view.strides[..dimensions].copy_from_slice(strides);
        Ok(view)
    }

    /// A view of dense elements, the last dimension contiguous.
    ///
    /// # Errors
    /// When there are more than four dimensions.
    pub fn dense(dtype: ElementType, shape: &[usize]) -> Result<View, AttentionError> {
        let mut view = View::new(dtype, shape, &vec![0; shape.len()])?;
        let mut stride = 1i64;
        for i in (0..view.dimensions).rev() {
            view.strides[i] = stride;
            stride = stride.saturating_mul(i64::try_from(shape[i]).unwrap_or(i64::MAX));
        }
        Ok(view)
    }

    /// A tensor `[batch, head, row, dim]` whose last dimension is contiguous.
    pub fn rows(dtype: impl Into<ElementType>, shape: [usize; 4], strides: Strides) -> View {
        let Strides { batch, head, row } = strides;
        View { dtype: dtype.into(), dimensions: 4, shape, strides: [batch, head, row, 1] }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> ElementType {
        self.dtype
    }

    /// Number of elements in each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.dimensions]
    }

    /// Distance in elements between neighbours in each dimension.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.dimensions]
    }

    fn elements(&self) -> usize {
        self.shape().iter().fold(1, |product, &extent| product.saturating_mul(extent))
    }

    /// Whether the elements follow each other without gaps, the last dimension contiguous.
    fn is_dense(&self) -> bool {
        let mut next = 1i128;
        let mut dims = self.shape().iter().zip(self.strides()).rev();
        dims.all(|(&extent, &stride)| {
            let fits = extent <= 1 || i128::from(stride) == next;
            next = next.saturating_mul(extent as i128);
            fits
        })
    }
}

/// An operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The address of the element whose indices are all 0. With a negative stride, other elements lie below.
    pub address: u64,
    /// Type, shape and strides.
    pub view: View,
}

/// Options that change the answer. The default is the forward pass without a mask.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallOptions {
    /// Which outputs are computed. [`Operand::Lse`] is given exactly if the pass returns the LSE.
    pub pass: Pass,
    /// Which keys a query sees, by position.
    pub band: Band,
    /// Factor on Q Kᵀ. `None` means `1/√head_dim`.
    pub scale: Option<f32>,
    /// Upper bound of the logits' magnitude.
    pub softcap: Option<f32>,
    /// The probability of dropout ([`Problem::dropout`]); its state is an operand.
    pub dropout: Option<f32>,
    /// Whether GPUs may round f32 inputs to tf32 for products.
    pub tf32: bool,
    /// The program for the score. Its tables are operands.
    pub score: Option<Program>,
    /// The program for the mask.
    pub mask: Option<Program>,
    /// The programs' float parameters.
    pub floats: Vec<f32>,
    /// The programs' integer parameters.
    pub ints: Vec<i32>,
    /// The longest sequences of packed queries and of packed keys, or more. `None` means all rows.
    pub longest: [Option<usize>; 2],
    /// Rows that share a descale factor of Q, of K and of V. 0 means one factor per batch entry and KV head.
    pub scale_rows: [u32; 3],
}

/// Where a call runs.
#[derive(Clone, Copy)]
pub enum Queue<'a> {
    /// In host memory, now.
    Host {
        /// The threads that compute; `None` for those of this library.
        executor: Option<&'a dyn Executor>,
        /// Most threads that the plan may use.
        threads: usize,
    },
    /// On a stream of a GPU, in its order.
    Stream {
        /// The device.
        gpu: &'a Gpu,
        /// The driver's handle of the stream (`CUstream`).
        handle: u64,
    },
}

impl Queue<'_> {
    /// The threads of this library, in host memory.
    pub fn host() -> Queue<'static> {
        Queue::Host { executor: None, threads: cpu::threads() }
    }
}

impl fmt::Debug for Queue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Queue::Host { threads, .. } => write!(f, "Host({threads} threads)"),
            Queue::Stream { gpu, handle } => write!(f, "Stream({gpu:?}, {handle:#x})"),
        }
    }
}

/// Whether V is a view of the first columns of K in memory.
fn v_in_k(operands: &OperandMap<Tensor>) -> bool {
    let [Some(k), Some(v)] = [Operand::K, Operand::V].map(|operand| operands.get(operand)) else {
        return false;
    };
    let ([of_k @ .., k_dim], [of_v @ .., v_dim]) = (k.view.shape(), v.view.shape()) else { return false };
    let steps = of_k.iter().zip(k.view.strides()).zip(v.view.strides());
    let mut steps = steps.map(|((&extent, of_k), of_v)| extent == 1 || of_k == of_v);
    let alike = k.address == v.address && k.view.dtype() == v.view.dtype();
    alike && of_k == of_v && v_dim < k_dim && steps.all(|alike| alike)
}

/// The operands of a problem in their order, each with the address of its lowest element.
type Memory = SmallVec<[(OperandSpec, u64); 6]>;

/// A call that is checked, and whose plan is chosen, with its kernel compiled and loaded: [`Ready::enqueue`]
/// only computes or launches.
#[derive(Debug)]
pub struct Ready<'a> {
    memory: Memory,
    on: On<'a>,
}

#[expect(clippy::large_enum_variant, reason = "the value lives for one call, which need not allocate")]
enum On<'a> {
    /// Without rows, there is nothing to do.
    Nothing,
    Host {
        executor: Option<&'a dyn Executor>,
        problem: Problem,
        plan: CpuPlan,
        append: Option<append::Appending>,
    },
    Stream {
        gpu: &'a Gpu,
        handle: u64,
        prepared: Arc<Prepared>,
        /// The append, which is launched before.
        write: Option<device::DeviceWork>,
    },
    HostSlots {
        executor: Option<&'a dyn Executor>,
        write: SlotWrite,
    },
    StreamSlots {
        gpu: &'a Gpu,
        handle: u64,
        write: device::DeviceWork,
    },
}

impl fmt::Debug for On<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            On::Nothing => write!(f, "Nothing"),
            On::Host { plan, .. } => write!(f, "Host({plan:?})"),
            On::Stream { prepared, handle, .. } => write!(f, "Stream({handle:#x}, {:?})", prepared.plan()),
            On::HostSlots { write, .. } => write!(f, "HostSlots({write:?})"),
            On::StreamSlots { handle, write, .. } => write!(f, "StreamSlots({handle:#x}, {write:?})"),
        }
    }
}

/// Checks a call, and finds or makes what was prepared for its problem. The contents of the operands are not
/// read. On a GPU, the first call for a problem compiles a kernel and allocates its memory; a later call
/// neither compiles nor allocates and is allowed while a stream is captured.
///
/// Q, K, V and O have the dimensions batch, head, row and dim in this order, whatever their strides; the last
/// is contiguous. Packed tensors have a batch extent of 1. With a page table `[batch, page]`, K and V are
/// pools of pages in place of batch entries. Arrays of lengths, sinks and the LSE are dense:
/// `[batch + 1]` or `[batch]`, `[head]`, and `[batch, head, row]` or `[head, row]`. Descale factors are
/// `[batch, kv_head]` or `[batch, kv_head, block]`. Gradients have the shapes of their tensors. A call that
/// continues from a result ([`Pass::Forward`]) has its O in the type, shape and strides of the output.
///
/// # Errors
/// When operands are missing or do not fit each other, when no kernel supports the problem, or when the
/// device fails. Each message names the argument.
pub fn prepare<'a>(
    queue: Queue<'a>,
    operands: &OperandMap<Tensor>,
    options: &CallOptions,
) -> Result<Ready<'a>, AttentionError> {
    prepare_append(queue, operands, options, None)
}

/// [`prepare`] for a call that appends keys and values to its cache first ([`Append`]). [`Ready::enqueue`]
/// writes them into K and V of the operands. If it refuses lengths or entries of the page table in host
/// memory, the cache is as it was. Those in device memory are not seen by the host: a row without a place in
/// the cache is left out, lengths end at the capacity, and positions at the last row of the tables.
///
/// # Errors
/// As [`prepare`], and when the new rows do not fit the cache.
pub fn prepare_append<'a>(
    queue: Queue<'a>,
    operands: &OperandMap<Tensor>,
    options: &CallOptions,
    append: Option<&Append>,
) -> Result<Ready<'a>, AttentionError> {
    if let (Queue::Stream { gpu, handle }, None) = (queue, append)
        && let Some((prepared, memory)) = recent::find(gpu, operands, options)
    {
        prepared.prepare_variant(|index| memory[index].1)?;
        return Ok(Ready { memory, on: On::Stream { gpu, handle, prepared, write: None } });
    }
    let mut problem = problem_of(operands, |tensor| &tensor.view, options)?;
    if v_in_k(operands) {
        // Strides of extents of 1, which may differ, have no effect.
        (problem.v, problem.v_in_k) = (problem.k, true);
    }
    let append = append.map(|append| append.checked(&problem, operands)).transpose()?;
    if problem.is_empty() {
        problem.with_a_row().check()?;
        if append.is_some() && problem.batch > 0 {
            return Err(refused("q", "number of rows", "0", "1 or more in a call that appends keys"));
        }
        return Ok(Ready { memory: Memory::new(), on: On::Nothing });
    }
    Ok(match queue {
        Queue::Host { executor, threads } => {
            let Some(append) = append else {
                let plan = plan_for(&problem, threads)?;
                let memory = memory(&problem, operands)?;
                return Ok(Ready { memory, on: On::Host { executor, problem, plan, append: None } });
            };
            problem.check()?; // with the strides that Q has in memory
            let memory = memory(&problem, operands)?;
            let problem = append.prepared(problem);
            let plan = plan_for(&problem, threads)?;
            Ready { memory, on: On::Host { executor, problem, plan, append: Some(append) } }
        }
        Queue::Stream { gpu, handle } => {
            let write = append.map(|append| append.on_device(gpu, &problem, operands)).transpose()?;
            let problem = append.map_or(Ok(problem.clone()), |append| {
                problem.check()?; // with the strides that Q has in memory
                Ok::<_, AttentionError>(append.prepared(problem))
            })?;
            let prepared = gpu.prepared(Key { problem, wish: Wish::Best })?;
            let memory = memory(prepared.problem(), operands)?;
            // The addresses decide between variants of the kernel by their alignment. Rotated queries begin
            // at a multiple of 256.
            let rotates = append.is_some_and(|append| append.rotates());
            let is_rotated = |index: usize| rotates && memory[index].0.operand == Operand::Q;
            prepared.prepare_variant(|index| if is_rotated(index) { 0 } else { memory[index].1 })?;
            if append.is_none() {
                recent::keep(gpu, operands, options, &prepared, &memory);
            }
            Ready { memory, on: On::Stream { gpu, handle, prepared, write } }
        }
    })
}

impl Ready<'_> {
    /// Bytes of device memory that a launch uses besides its operands. The library allocates and keeps that
    /// memory: once per stream and graph that launches.
    pub fn workspace_size(&self) -> usize {
        match &self.on {
            On::Nothing | On::Host { .. } | On::HostSlots { .. } => 0,
            On::StreamSlots { write, .. } => write.workspace_bytes(),
            On::Stream { prepared, write, .. } => {
                let of_write = write.as_ref().map_or(0, device::DeviceWork::workspace_bytes);
                prepared.workspace_bytes() + of_write
            }
        }
    }

    /// The kernels of attention that are launched; `None` in host memory, and for a call without rows.
    pub fn prepared(&self) -> Option<&Arc<Prepared>> {
        match &self.on {
            On::Stream { prepared, .. } => Some(prepared),
            _ => None,
        }
    }

    /// Computes attention, or writes to slots: in host memory before it returns, or enqueued on the stream.
    /// It never waits for a device, and may be captured in a graph, under the conditions of
    /// [`Prepared::enqueue`].
    ///
    /// # Errors
    /// When the lengths in host memory do not fit, when an address is null or not aligned, or when the device
    /// fails. Nothing has been written then, unless a device failed.
    ///
    /// # Safety
    /// - Each operand's address, shape, strides and type describe memory of the host, or of the GPU, which
    ///   holds all its elements. So do those of an append, whose call may write K and V. Inputs are
    ///   initialised. In host memory, no other thread writes inputs or uses outputs during the call, and
    ///   outputs overlap no other operand.
    /// - In device memory, the operands stay allocated until the work that is enqueued has run, and other
    ///   work that writes them is ordered with the stream, as for any kernel.
    /// - The handle is a stream of the GPU's primary context, or 0 for the default stream, and lives until
    ///   this returns.
    pub unsafe fn enqueue(&self) -> Result<(), AttentionError> {
        match &self.on {
            On::Nothing => Ok(()),
            // SAFETY: this function's own contract.
            On::HostSlots { executor, write } => unsafe { write.on_host(*executor) },
            On::StreamSlots { gpu, handle, write } => {
                // SAFETY: the caller vouches for the handle and the tensors of the write.
                unsafe { write.enqueue(StreamRef::from_raw(gpu.context(), *handle), |_| Ok(())) }
            }
            On::Host { executor, problem, plan, append } => {
                // SAFETY: the memory is that of the operands, by their shapes, and the rest is this
                // function's own contract.
                unsafe { host::compute(*executor, problem, &self.memory, plan, append.as_ref()) }
            }
            On::Stream { gpu, handle, prepared, write } => {
                let slice = |index: usize| {
                    let (spec, start) = self.memory[index];
                    // SAFETY: as above.
                    unsafe { DeviceSlice::from_raw(start, spec.bytes()) }
                };
                // SAFETY: the caller vouches for the handle.
                let stream = unsafe { StreamRef::from_raw(gpu.context(), *handle) };
                let Some(write) = write else { return prepared.launch(stream, slice) };
                let launch = |written: Option<Written<'_>>| {
                    let of_write = |operand| written.and_then(|written| written.of(operand));
                    let read =
                        |index: usize| of_write(self.memory[index].0.operand).unwrap_or_else(|| slice(index));
                    prepared.launch(stream, read)
                };
                // SAFETY: the append is one of the call's.
                unsafe { write.enqueue(stream, launch) }
            }
        }
    }
}

/// The operands of a problem in their order, each with the address of its lowest element in memory.
fn memory(problem: &Problem, operands: &OperandMap<Tensor>) -> Result<Memory, AttentionError> {
    let mut given = operands.iter().peekable();
    let mut all = Memory::new();
    for spec in problem.operands() {
        let wanted =
            |operand: Operand, wanted| AttentionError::OperandWanted { operand: operand.name(), wanted };
        let Some((operand, tensor)) = given.next_if(|(operand, _)| *operand <= spec.operand) else {
            return Err(wanted(spec.operand, true));
        };
        if operand != spec.operand {
            return Err(wanted(operand, false));
        }
        all.push((spec, start(problem, spec, tensor)?));
    }
    match given.next() {
        Some((operand, _)) => Err(AttentionError::OperandWanted { operand: operand.name(), wanted: false }),
        None => Ok(all),
    }
}

/// The address of an operand's lowest element. The problem was made from the views, so tensors, tables and
/// factors have the elements of the problem; the numbers of the other arrays are compared here.
fn start(problem: &Problem, spec: OperandSpec, tensor: &Tensor) -> Result<u64, AttentionError> {
    let Tensor { address, view } = tensor;
    let argument = spec.operand.name();
    if view.dtype != spec.dtype {
        let (dtype, expected) = (view.dtype.name(), spec.dtype.name());
        return Err(ProblemError::OperandType { argument, dtype, expected }.into());
    }
    match spec.operand {
        Operand::Tensor(_) | Operand::OutBefore => {
            let tensor = match spec.operand {
                Operand::Tensor(tensor) => tensor,
                _ => problem::Tensor::Out,
            };
            let (_, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: argument })?;
            Ok(address.wrapping_sub((origin * spec.dtype.bytes()) as u64))
        }
        Operand::Table(_) | Operand::Descale(_) => Ok(*address),
        _ => {
            let (len, expected) = (view.elements(), spec.elements);
            if len != expected {
                return Err(ProblemError::Lengths { argument, len, expected }.into());
            }
            if !view.is_dense() {
                let value = format!("{:?} for shape {:?}", view.strides(), view.shape());
                let expected = "dense elements".to_owned();
                return Err(refused(argument, "strides", value, expected));
            }
            Ok(*address)
        }
    }
}
