//! Memory that is allocated and freed in the order of a stream: neither waits for the device.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};

use crate::memory::asked_for;
use crate::{Buffer, Context, DeviceSlice, DriverError, Stream};

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
        // SAFETY: a plain C struct for which all-zero bytes are a valid value.
        let mut wanted: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        wanted.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = context.info().ordinal;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are to live values.
        context.check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&mut raw, &wanted) })?;
        let pool = Pool(Arc::new(Inner { context: context.clone(), raw: Some(raw) }));
        let (mut keep, which) = (keep, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
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
            let buffer = Buffer::new(context, bytes)?;
            return Ok(PoolBuffer { slice: buffer.slice(), home: Home::Plain(buffer) });
        };
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: pool and stream are alive; the pointer is to a live address.
        let result =
            unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes.max(1), raw, stream.handle()) };
        context
            .check("cuMemAllocFromPoolAsync", result)
            .map_err(|error| asked_for(error, "pooled device memory", bytes))?;
        let home = Home::Pool { _pool: self.clone(), stream: stream.clone() };
        Ok(PoolBuffer { slice: DeviceSlice::new(address, bytes), home })
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

/// Memory of a [`Pool`]. Dropped, it is freed after what is on its stream by then.
#[derive(Debug)]
pub struct PoolBuffer {
    slice: DeviceSlice,
    home: Home,
}

#[derive(Debug)]
enum Home {
    Pool {
        _pool: Pool,
        stream: Stream,
    },
    /// It frees itself, and the driver waits for the device then.
    Plain(Buffer),
}

impl PoolBuffer {
    /// All of it.
    pub fn slice(&self) -> DeviceSlice {
        self.slice
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        match &self.home {
            Home::Pool { stream, .. } => {
                let Some(_entered) = stream.context().enter_to_drop() else { return };
                // SAFETY: allocated from the pool, freed once. A failure here has no one left to tell.
                let _ = unsafe { sys::cuMemFreeAsync(self.slice.address(), stream.handle()) };
            }
            Home::Plain(buffer) => debug_assert_eq!(buffer.slice(), self.slice),
        }
    }
}
