//! Pinned host memory, which the device copies to and from by itself while the host goes on.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::context::Relaxed;
use crate::memory::asked_for;
use crate::{Context, DeviceSlice, DriverError, Event, Stream, sys};

/// Page-locked host memory, zeroed when made and freed when dropped.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that is this value's alone.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zeros.
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
        // SAFETY: just allocated, at least that long.
        unsafe { start.write_bytes(0, bytes.max(1)) };
        Ok(Pinned { context: context.clone(), start, bytes })
    }

    /// Its contents.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: alive, written since it was made, and no copy is under way while we own it.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its contents, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Puts the copy of all of it to the device on the stream. The memory comes back from [`Transfer::wait`].
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit.
    pub fn upload(self, stream: &Stream, to: DeviceSlice<'_>) -> Result<Transfer, DriverError> {
        to.fits(self.bytes)?;
        Transfer::begin(self, stream, |pinned| {
            // SAFETY: the transfer keeps the memory until the copy is done; the destination has room.
            let result = unsafe {
                sys::cuMemcpyHtoDAsync_v2(to.address(), pinned.start.cast(), pinned.bytes, stream.handle())
            };
            stream.context().check("cuMemcpyHtoDAsync", result)
        })
    }

    /// Puts the copy of as many bytes from the device on the stream. The memory comes back from [`Transfer::wait`].
    ///
    /// # Errors
    /// [`DriverError::Copy`] when there are not so many.
    pub fn download(self, stream: &Stream, from: DeviceSlice<'_>) -> Result<Transfer, DriverError> {
        from.fits(self.bytes)?;
        Transfer::begin(self, stream, |pinned| {
            // SAFETY: the transfer keeps the memory, which no one else sees, until the copy is done.
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
        // SAFETY: the address came from cuMemHostAlloc and is freed once. A failure has no one left to tell.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

/// A copy under way. It owns the host memory until the copy is done; dropped, it waits. Where the driver does
/// not say that the copy is done, the memory is leaked.
#[derive(Debug)]
pub struct Transfer {
    /// `None` once it was given back.
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
        // From here on the memory is freed only where the copy is known to be done.
        let pinned = ManuallyDrop::new(pinned);
        copy(&pinned)?;
        if let Err(error) = done.record(stream) {
            // Without the event only the stream says when the copy is done.
            stream.finish()?;
            drop(ManuallyDrop::into_inner(pinned));
            return Err(error);
        }
        Ok(Transfer { pinned: Some(ManuallyDrop::into_inner(pinned)), done })
    }

    /// Waits for the copy and gives the memory back.
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
            // The copy may be under way still: of a kernel before it that never ends, say. The memory is
            // leaked.
            std::mem::forget(pinned);
        }
    }
}
