//! Kernels on arrays in device memory that are no attention, by addresses.

use std::sync::Arc;

use driver::{DeviceSlice, StreamRef};
use kernels::KernelArray;
use kernels::cache::{CacheWrite, HeadRows, Rotation, RowPlaces};
use problem::{DType, ElementType, LengthArray, Operand, OperandMap, Problem, Strides};
use smallvec::SmallVec;

use super::Tensor;
use super::append::{Appending, is_local};
use crate::AttentionError;
use crate::gpu::{ArrayKernel, ArrayWork, Gpu, Written};

/// Elements of which the address of a row may be a multiple, at most.
const ALIGNED: u64 = 16;

/// A kernel that is ready to launch.
#[derive(Debug)]
pub(super) struct DeviceWork {
    kernel: Arc<ArrayKernel>,
    /// Address and bytes of each array of the caller.
    arrays: Vec<(u64, usize)>,
}

impl DeviceWork {
    /// The kernel of a work, whose arrays have these addresses. `address` is asked in their order.
    pub(super) fn new(
        gpu: &Gpu,
        work: &ArrayWork,
        mut address: impl FnMut(&str) -> Option<u64>,
    ) -> Result<DeviceWork, AttentionError> {
        let kernel = gpu.array_kernel(work)?;
        let find = |array: &KernelArray| {
            let missing = AttentionError::OperandWanted { operand: array.name, wanted: true };
            Ok::<_, AttentionError>((address(array.name).ok_or(missing)?, array.bytes))
        };
        let arrays = kernel.inputs().map(find).collect::<Result<_, _>>()?;
        Ok(DeviceWork { kernel, arrays })
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        self.kernel.workspace_bytes()
    }

    /// Enqueues the kernel, and then the work that reads its results.
    ///
    /// # Safety
    /// As [`super::Ready::enqueue`], of the arrays.
    pub(super) unsafe fn enqueue(
        &self,
        stream: StreamRef<'_>,
        then: impl FnOnce(Option<Written<'_>>) -> Result<(), AttentionError>,
    ) -> Result<(), AttentionError> {
        let slice = |&(start, bytes): &(u64, usize)| {
            // SAFETY: the caller's contract.
            unsafe { DeviceSlice::from_raw(start, bytes) }
        };
        let slices: SmallVec<[DeviceSlice<'_>; 16]> = self.arrays.iter().map(slice).collect();
        self.kernel.enqueue(stream, &slices, then)
    }
}

/// A tensor of four dimensions.
pub(super) fn head_rows(tensor: &Tensor) -> HeadRows {
    let [batch, head, row, _] = tensor.view.strides;
    HeadRows { extents: tensor.view.shape, strides: Strides { batch, head, row } }
}

/// The largest number of elements, up to [`ALIGNED`], of which all addresses are multiples.
pub(super) fn aligned<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> usize {
    let of = |tensor: &Tensor| {
        let elements = tensor.address / tensor.view.dtype.bytes() as u64;
        1 << elements.trailing_zeros().min(ALIGNED.trailing_zeros())
    };
    tensors.into_iter().map(of).min().unwrap_or(ALIGNED as usize)
}

/// The float type of the elements, which was checked.
pub(super) fn float(tensor: &Tensor) -> DType {
    match tensor.view.dtype {
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::Bf16,
        _ => DType::F32,
    }
}

impl Appending {
    /// The write of an append in device memory.
    pub(super) fn on_device(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        operands: &OperandMap<Tensor>,
    ) -> Result<DeviceWork, AttentionError> {
        let (append, [q, k, v]) = self.parts();
        let new = [append.keys, append.values];
        let rotation = append.rotary.as_ref().map(|rotary| Rotation {
            dtype: float(&rotary.cos),
            positions: rotary.cos.view.shape[0],
            strides: [rotary.cos, rotary.sin].map(|table| table.view.strides[0]),
            pairs: rotary.cos.view.shape[1],
            interleaved: rotary.interleaved,
            has_positions: rotary.positions.is_some(),
            queries: head_rows(q),
            packed: problem.lengths.q.packed.is_some(),
            local: is_local(problem),
        });
        let write = CacheWrite {
            from: float(&new[0]),
            to: problem.dtypes.k,
            new: new.map(|tensor| head_rows(&tensor)),
            caches: [head_rows(k), head_rows(v)],
            places: RowPlaces::Sequences {
                batch: problem.batch,
                packed: append.starts.is_some(),
                pages: problem.storage.pages().map(|pages| pages.per_sequence),
                capacity: problem.seq_kv,
            },
            rotation,
            factors: self.factors.map(|factors| {
                let [batch, head, ..] = factors?.view.strides;
                Some([batch, head])
            }),
            aligned: aligned(new.iter().chain([k, v]).chain(rotation.map(|_| q))),
        };
        let operand = |operand| operands.get(operand).map(|tensor| tensor.address);
        let rotary = |part: fn(&super::Rotary) -> Option<Tensor>| {
            append.rotary.as_ref().and_then(part).map(|tensor| tensor.address)
        };
        DeviceWork::new(gpu, &ArrayWork::Write(write), |name| match name {
            "k_new" => Some(append.keys.address),
            "v_new" => Some(append.values.address),
            "k" => Some(k.address),
            "v" => Some(v.address),
            "q" => Some(q.address),
            "cache_seqlens" => operand(Operand::Lengths(LengthArray::UsedKv)),
            "cu_seqlens_q" => operand(Operand::Lengths(LengthArray::CumulativeQ)),
            "cu_seqlens_k_new" => append.starts.map(|starts| starts.address),
            "page_table" => operand(Operand::PageTable),
            "k_descale" => self.factors[0].map(|factors| factors.address),
            "v_descale" => self.factors[1].map(|factors| factors.address),
            "rotary_cos" => rotary(|rotary| Some(rotary.cos)),
            "rotary_sin" => rotary(|rotary| Some(rotary.sin)),
            _ => rotary(|rotary| rotary.positions),
        })
    }
}
