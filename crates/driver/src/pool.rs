//! Memory that is allocated and freed in the order of a stream: neither waits for the device.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::Arc;

use crate::context::Relaxed;
use crate::memory::{Kept, asked_for};
use crate::{Buffer, Context, DeviceSlice, DriverError, Stream, sys};

/// A pool of device memory of our own, so that what other libraries keep in the device's default pool stays as it is.
/// Where the device has no pools (some virtual GPUs), memory is allocated the ordinary way. A clone is the same pool.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    /// `None` where the device has no pools.
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
    /// When the driver refuses.
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

    /// `bytes` of uninitialised memory, for work on the stream from now on.
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

    /// The same, for work on any stream from the return of this call on: it waits for the stream. It may be called while
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

    /// Gives freed memory beyond `keep` bytes back to the device.
    ///
    /// # Errors
    /// When the driver refuses.
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
            // SAFETY: made by `new`, destroyed once, and every buffer of it is gone. A failure has no one left to tell.
            let _ = unsafe { sys::cuMemPoolDestroy(raw) };
        }
    }
}

/// Memory of a [`Pool`]. When the buffer and all graphs that were captured from its use are dropped, it is
/// freed after what is on its stream by then.
#[derive(Debug)]
pub struct PoolBuffer {
    /// An [`Allocation`], or a [`Buffer`]'s memory where the device has no pools.
    memory: Kept,
    address: u64,
    bytes: usize,
}

impl PoolBuffer {
    /// All of it.
    pub fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::of(&self.memory, self.address, self.bytes)
    }
}

/// What `cuMemAllocFromPoolAsync` gave.
struct Allocation {
    address: u64,
    stream: Stream,
    _pool: Pool,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(_entered) = self.stream.context().enter_to_drop() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: allocated from the pool, freed once. A failure here has no one left to tell.
        let _ = unsafe { sys::cuMemFreeAsync(self.address, self.stream.handle()) };
    }
}
