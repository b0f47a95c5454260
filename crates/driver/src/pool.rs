//! Stream-ordered memory: neither allocating nor freeing waits for the device.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::Arc;

use crate::context::Relaxed;
use crate::memory::{Kept, asked_for};
use crate::{Buffer, Context, DeviceSlice, DriverError, Stream, sys};

/// A pool of device memory. It is separate from the device's default pool, so that memory which other
/// libraries keep there is not affected. On devices without pools (some virtual GPUs), memory is allocated by
/// `cuMemAlloc`. A clone is the same pool.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    /// `None` if the device has no pools.
    raw: Option<sys::CUmemoryPool>,
}

// SAFETY: a handle; the driver's functions on it may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Pool {
    /// A pool that keeps up to `keep` bytes of freed memory for the next allocation.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn new(context: &Arc<Context>, keep: u64) -> Result<Pool, DriverError> {
        if !context.info().pools {
            return Ok(Pool(Arc::new(Inner { context: context.clone(), raw: None })));
        }
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let wanted = sys::CUmemPoolProps {
            allocation_type: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            handle_types: 0,
            location_type: sys::CU_MEM_LOCATION_TYPE_DEVICE,
            location_id: context.info().ordinal,
            security_attributes: std::ptr::null_mut(),
            reserved: [0; 64],
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are to live values.
        context.check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&mut raw, &wanted) })?;
        let pool = Pool(Arc::new(Inner { context: context.clone(), raw: Some(raw) }));
        let (mut keep, which) = (keep, sys::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
        // SAFETY: this attribute is a cuuint64_t; the pointer is to a live one.
        let result = unsafe { sys::cuMemPoolSetAttribute(raw, which, std::ptr::from_mut(&mut keep).cast()) };
        context.check("cuMemPoolSetAttribute", result)?;
        Ok(pool)
    }

    /// `bytes` bytes of uninitialised memory, for work on `stream` from now on.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    pub fn allocate(&self, stream: &Stream, bytes: usize) -> Result<PoolBuffer, DriverError> {
        let context = &self.0.context;
        context.same("the stream", stream.context())?;
        let Some(raw) = self.0.raw else {
            let (memory, address) = Buffer::new(context, bytes)?.into_memory();
            return Ok(PoolBuffer { memory, address, bytes });
        };
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: pool and stream are alive; the pointer is to a live address.
        let result =
            unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes.max(1), raw, stream.handle()) };
        context
            .check("cuMemAllocFromPoolAsync", result)
            .map_err(|error| asked_for(error, "pooled device memory", bytes))?;
        let memory = Arc::new(Allocation { address, stream: stream.clone(), _pool: self.clone() });
        Ok(PoolBuffer { memory, address, bytes })
    }

    /// Like [`Pool::allocate`], but the memory may be used on any stream once this call returns: it waits for
    /// `stream`. It is still freed in the order of `stream` (see [`PoolBuffer`]). The call is allowed while
    /// other streams are captured.
    ///
    /// # Errors
    /// As [`Pool::allocate`], and [`DriverError::Poisoned`] when a kernel failed.
    pub fn allocate_now(&self, stream: &Stream, bytes: usize) -> Result<PoolBuffer, DriverError> {
        let _entered = self.0.context.enter()?;
        let _relaxed = Relaxed::new()?;
        let buffer = self.allocate(stream, bytes)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Returns freed memory beyond `keep` bytes to the device.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn trim(&self, keep: usize) -> Result<(), DriverError> {
        let Some(raw) = self.0.raw else { return Ok(()) };
        let _entered = self.0.context.enter()?;
        // SAFETY: the pool is alive.
        self.0.context.check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(raw, keep) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(raw) = self.raw {
            let Some(_entered) = self.context.enter_to_drop() else { return };
            // SAFETY: made by `new`, destroyed once, after all of its buffers. A failure cannot be reported.
            let _ = unsafe { sys::cuMemPoolDestroy(raw) };
        }
    }
}

/// Memory of a [`Pool`]. When the buffer and all graphs that captured its use are dropped, the memory is
/// freed after the work that is on its stream at that time. Work on another stream that uses the memory must
/// be ordered before that: by an event for which the memory's stream waits, or by a wait of the caller.
#[derive(Debug)]
pub struct PoolBuffer {
    /// The memory: an [`Allocation`], or the memory of a [`Buffer`] if the device has no pools.
    memory: Kept,
    address: u64,
    bytes: usize,
}

impl PoolBuffer {
    /// The whole buffer.
    pub fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::of(&self.memory, self.address, self.bytes)
    }
}

/// An allocation by `cuMemAllocFromPoolAsync`.
struct Allocation {
    address: u64,
    stream: Stream,
    _pool: Pool,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(_entered) = self.stream.context().enter_to_drop() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: allocated from the pool, freed once. A failure here cannot be reported.
        let _ = unsafe { sys::cuMemFreeAsync(self.address, self.stream.handle()) };
    }
}
