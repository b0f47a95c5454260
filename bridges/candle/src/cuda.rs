//! Attention on candle's CUDA devices, in candle's memory and on candle's stream. candle and FlashCore use
//! the device's primary context. Nothing here waits for the device.
#![allow(unsafe_code, reason = "FlashCore takes addresses and a stream")]

use std::sync::Arc;

use candle::backend::{BackendDevice, BackendStorage};
use candle::cuda_backend::CudaStorageSlice as Slice;
use candle::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle::{CudaDevice, CudaStorage, DType, DeviceLocation, Result, Shape, Storage, bail};

use crate::memory::Memory;

impl Memory for CudaStorage {
    type Stream = Arc<CudaStream>;
    type Guard<'a> = SyncOnDrop<'a>;

    fn of(storage: &Storage) -> Option<&CudaStorage> {
        match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        }
    }

    fn into_storage(self) -> Storage {
        Storage::Cuda(self)
    }

    fn is_beside(&self, other: &CudaStorage) -> bool {
        self.device.same_device(&other.device)
    }

    fn stream(&self) -> Arc<CudaStream> {
        self.device.cuda_stream()
    }

    fn output(device: &CudaDevice, shape: &Shape, dtype: DType, zeroed: bool) -> Result<CudaStorage> {
        if zeroed {
            return device.zeros_impl(shape, dtype);
        }
        // SAFETY: the kernel writes each element before candle reads one.
        unsafe { device.alloc_uninit(shape, dtype) }
    }

    fn address<'a>(&'a self, stream: &'a Arc<CudaStream>) -> Result<(u64, SyncOnDrop<'a>)> {
        Ok(match &self.slice {
            Slice::F32(x) => x.device_ptr(stream),
            Slice::F16(x) => x.device_ptr(stream),
            Slice::BF16(x) => x.device_ptr(stream),
            Slice::U32(x) => x.device_ptr(stream),
            Slice::I32(x) => x.device_ptr(stream),
            Slice::I64(x) => x.device_ptr(stream),
            Slice::F8E4M3(x) => x.device_ptr(stream),
            _ => bail!("flash-attn is only supported for f32/f16/bf16 ({:?})", self.dtype()),
        })
    }

    fn address_mut<'a>(&'a mut self, stream: &'a Arc<CudaStream>) -> Result<(u64, SyncOnDrop<'a>)> {
        Ok(match &mut self.slice {
            Slice::F32(x) => x.device_ptr_mut(stream),
            Slice::F16(x) => x.device_ptr_mut(stream),
            Slice::BF16(x) => x.device_ptr_mut(stream),
            Slice::F8E4M3(x) => x.device_ptr_mut(stream),
            _ => bail!("flash-attn is only supported for f32/f16/bf16"),
        })
    }

    fn gpu_stream(&self, stream: &Arc<CudaStream>) -> Option<(usize, u64)> {
        match self.device.location() {
            DeviceLocation::Cuda { gpu_id } => Some((gpu_id, stream.cu_stream() as u64)),
            _ => None,
        }
    }
}
