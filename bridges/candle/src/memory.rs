//! The memory in which candle keeps the elements of a tensor: addresses on a device, and the call of
//! FlashCore there.
#![allow(unsafe_code, reason = "FlashCore takes addresses")]

use candle::backend::{BackendDevice, BackendStorage};
use candle::cpu_backend::CpuDevice;
use candle::{CpuStorage, DType, Error, Result, Shape, Storage, bail};
use flashcore::gpu::{Gpu, Operand};
use flashcore::raw::{self, CallOptions, OperandMap, Queue, Ready, View};

/// A kind of storage on which attention runs.
pub(crate) trait Memory: BackendStorage {
    /// The order in which the device works.
    type Stream;
    /// Keeps an address valid.
    type Guard<'a>
    where
        Self: 'a;

    /// The storage, if it is of this kind.
    fn of(storage: &Storage) -> Option<&Self>;
    fn into_storage(self) -> Storage;
    fn is_beside(&self, other: &Self) -> bool;
    fn stream(&self) -> Self::Stream;
    /// Memory for an output. Its contents do not matter unless `zeroed`.
    fn output(device: &Self::Device, shape: &Shape, dtype: DType, zeroed: bool) -> Result<Self>;
    /// The address of the first element.
    fn address<'a>(&'a self, stream: &'a Self::Stream) -> Result<(u64, Self::Guard<'a>)>;
    fn address_mut<'a>(&'a mut self, stream: &'a Self::Stream) -> Result<(u64, Self::Guard<'a>)>;
    /// The number of the GPU and the driver's handle of the stream; `None` in host memory.
    fn gpu_stream(&self, stream: &Self::Stream) -> Option<(usize, u64)>;
}

/// The operands of a call, whose storages are borrowed.
pub(crate) struct Bound<'a, S: Memory + 'a> {
    pub stream: &'a S::Stream,
    operands: OperandMap<raw::Tensor>,
    guards: Vec<S::Guard<'a>>,
}

impl<'a, S: Memory> Bound<'a, S> {
    pub fn new(stream: &'a S::Stream) -> Bound<'a, S> {
        Bound { stream, operands: OperandMap::default(), guards: Vec::with_capacity(8) }
    }

    /// Adds an input, whose first element is at `offset`.
    pub fn read(&mut self, operand: Operand, storage: &'a S, view: View, offset: usize) -> Result<()> {
        let (address, guard) = storage.address(self.stream)?;
        self.guards.push(guard);
        self.insert(operand, address, view, offset);
        Ok(())
    }

    /// Adds outputs that lie in one storage, each with its offset.
    pub fn write(&mut self, storage: &'a mut S, parts: &[(Operand, View, usize)]) -> Result<()> {
        let (address, guard) = storage.address_mut(self.stream)?;
        self.guards.push(guard);
        for &(operand, view, offset) in parts {
            self.insert(operand, address, view, offset);
        }
        Ok(())
    }

    /// The address of an operand; 0 for one that was not added.
    pub fn address(&self, operand: Operand) -> u64 {
        self.operands.get(operand).map_or(0, |tensor| tensor.address)
    }

    fn insert(&mut self, operand: Operand, address: u64, view: View, offset: usize) {
        let address = address + (offset * view.dtype().bytes()) as u64;
        self.operands.insert(operand, raw::Tensor { address, view });
    }

    /// Runs a call on the operands, which are memory of the device of `storage`, and passes it on.
    pub fn run(&self, storage: &S, options: &CallOptions, then: impl FnOnce(&Ready<'_>)) -> Result<()> {
        on_queue(storage, self.stream, |queue| {
            let ready = raw::prepare(queue, &self.operands, options).map_err(Error::wrap)?;
            // SAFETY: candle's layouts describe elements within their storages, and the views those of
            // outputs that were allocated by their shapes. Inputs are borrowed, and outputs are borrowed
            // uniquely, for `'a`. On a GPU, the guards order other work on the storages, which candle frees
            // in the stream's order.
            unsafe { ready.enqueue() }.map_err(Error::wrap)?;
            then(&ready);
            Ok(())
        })
    }
}

/// Hands over the queue of a device: the stream on the GPU of `storage`, or this host.
pub(crate) fn on_queue<S: Memory>(
    storage: &S,
    stream: &S::Stream,
    then: impl FnOnce(Queue<'_>) -> Result<()>,
) -> Result<()> {
    let stream = storage.gpu_stream(stream);
    let open = |(number, _)| Gpu::open(i32::try_from(number).map_err(Error::wrap)?).map_err(Error::wrap);
    let gpu = stream.map(open).transpose()?;
    then(match (&gpu, stream) {
        (Some(gpu), Some((_, handle))) => Queue::Stream { gpu, handle },
        _ => Queue::host(),
    })
}

impl Memory for CpuStorage {
    type Stream = ();
    type Guard<'a> = ();

    fn of(storage: &Storage) -> Option<&CpuStorage> {
        match storage {
            Storage::Cpu(storage) => Some(storage),
            _ => None,
        }
    }

    fn into_storage(self) -> Storage {
        Storage::Cpu(self)
    }

    fn is_beside(&self, _: &CpuStorage) -> bool {
        true
    }

    fn stream(&self) {}

    /// Always zeroed: FlashCore takes slices, which may not be uninitialised.
    fn output(device: &CpuDevice, shape: &Shape, dtype: DType, _: bool) -> Result<CpuStorage> {
        device.zeros_impl(shape, dtype)
    }

    fn address(&self, (): &()) -> Result<(u64, ())> {
        let address = match self {
            CpuStorage::F32(x) => x.as_ptr().expose_provenance(),
            CpuStorage::F16(x) => x.as_ptr().expose_provenance(),
            CpuStorage::BF16(x) => x.as_ptr().expose_provenance(),
            CpuStorage::U32(x) => x.as_ptr().expose_provenance(),
            CpuStorage::I32(x) => x.as_ptr().expose_provenance(),
            CpuStorage::I64(x) => x.as_ptr().expose_provenance(),
            CpuStorage::F8E4M3(x) => x.as_ptr().expose_provenance(),
            _ => bail!("flash-attn is only supported for f32/f16/bf16 ({:?})", self.dtype()),
        };
        Ok((address as u64, ()))
    }

    fn address_mut(&mut self, (): &()) -> Result<(u64, ())> {
        let address = match self {
            CpuStorage::F32(x) => x.as_mut_ptr().expose_provenance(),
            CpuStorage::F16(x) => x.as_mut_ptr().expose_provenance(),
            CpuStorage::BF16(x) => x.as_mut_ptr().expose_provenance(),
            CpuStorage::F8E4M3(x) => x.as_mut_ptr().expose_provenance(),
            _ => bail!("flash-attn is only supported for f32/f16/bf16 ({:?})", self.dtype()),
        };
        Ok((address as u64, ()))
    }

    fn gpu_stream(&self, (): &()) -> Option<(usize, u64)> {
        None
    }
}
