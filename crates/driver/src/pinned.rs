//! Pinned host memory, which the device can copy to and from while the host continues.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::context::Relaxed;
use crate::memory::asked_for;
use crate::{Context, DeviceSlice, DriverError, Event, Stream, sys};

/// Page-locked host memory. Zeroed when allocated and freed when dropped.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that only this value refers to.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` bytes of zeros.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned, DriverError> {
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live pointer.
        let result = unsafe { sys::cuMemHostAlloc(&mut start, bytes.max(1), 0) };
        context.check("cuMemHostAlloc", result).map_err(|error| asked_for(error, "pinned memory", bytes))?;
        let start = start.cast::<u8>();
        // SAFETY: just allocated with at least this length.
        unsafe { start.write_bytes(0, bytes.max(1)) };
        Ok(Pinned { context: context.clone(), start, bytes })
    }

    /// The contents.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is alive and initialised, and no copy is in progress while `self` owns it.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The contents, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Enqueues a copy of the whole memory to the device. [`Transfer::wait`] returns the memory.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `to` is too short.
    pub fn upload(self, stream: &Stream, to: DeviceSlice<'_>) -> Result<Transfer, DriverError> {
        to.fits(self.bytes)?;
        Transfer::begin(self, stream, |pinned| {
            // SAFETY: the transfer keeps the memory until the copy is done; the destination is long enough.
            let result = unsafe {
                sys::cuMemcpyHtoDAsync_v2(to.address(), pinned.start.cast(), pinned.bytes, stream.handle())
            };
            stream.context().check("cuMemcpyHtoDAsync", result)
        })
    }

    /// Enqueues a copy from the device that fills the whole memory. [`Transfer::wait`] returns the memory.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `from` is too short.
    pub fn download(self, stream: &Stream, from: DeviceSlice<'_>) -> Result<Transfer, DriverError> {
        from.fits(self.bytes)?;
        Transfer::begin(self, stream, |pinned| {
            // SAFETY: the transfer keeps the memory, which nothing else refers to, until the copy is done.
            let result = unsafe {
                sys::cuMemcpyDtoHAsync_v2(pinned.start.cast(), from.address(), pinned.bytes, stream.handle())
            };
            stream.context().check("cuMemcpyDtoHAsync", result)
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_drop() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: the address came from cuMemHostAlloc and is freed once. A failure cannot be reported.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

/// A copy in progress. It owns the host memory until the copy is done. Dropping it waits for the copy. If the
/// driver cannot confirm that the copy is done, the memory is leaked.
#[derive(Debug)]
pub struct Transfer {
    /// `None` once the memory was returned.
    pinned: Option<Pinned>,
    done: Event,
}

impl Transfer {
    fn begin(
        pinned: Pinned,
        stream: &Stream,
        copy: impl FnOnce(&Pinned) -> Result<(), DriverError>,
    ) -> Result<Transfer, DriverError> {
        let context = stream.context();
        context.same("the pinned memory", &pinned.context)?;
        let done = Event::new(context)?;
        let _entered = context.enter()?;
        let _steady = stream.steady_outside_captures()?;
        // From here on, the memory is freed only if the copy is known to be done.
        let pinned = ManuallyDrop::new(pinned);
        copy(&pinned)?;
        if let Err(error) = done.record(stream) {
            // Without the event, only the stream shows when the copy is done.
            stream.finish()?;
            drop(ManuallyDrop::into_inner(pinned));
            return Err(error);
        }
        Ok(Transfer { pinned: Some(ManuallyDrop::into_inner(pinned)), done })
    }

    /// Waits for the copy and returns the memory.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel before it failed.
    pub fn wait(mut self) -> Result<Pinned, DriverError> {
        self.done.synchronize()?;
        match self.pinned.take() {
            Some(pinned) => Ok(pinned),
            None => Err(DriverError::Call {
                call: "wait",
                message: "the memory was given back before".to_owned(),
            }),
        }
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// As [`Transfer::wait`].
    pub fn is_done(&self) -> Result<bool, DriverError> {
        self.done.is_done()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take()
            && self.done.synchronize().is_err()
        {
            // The copy may still be in progress, for example behind a kernel that never ends. The memory is
            // leaked.
            std::mem::forget(pinned);
        }
    }
}
