//! Events: points in the work of a stream.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::Arc;

use crate::context::Relaxed;
use crate::{Context, DriverError, StreamRef, sys};

/// A point in the work of a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: an event is a handle; the driver's functions on it may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that records time. The resolution is about 0.5 µs.
    ///
    /// # Errors
    /// When the driver cannot create the event.
    pub fn new(context: &Arc<Context>) -> Result<Event, DriverError> {
        Event::with_flags(context, sys::CU_EVENT_DEFAULT)
    }

    /// An event without time, which has less overhead on the device.
    ///
    /// # Errors
    /// When the driver cannot create the event.
    pub fn without_time(context: &Arc<Context>) -> Result<Event, DriverError> {
        Event::with_flags(context, sys::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event, DriverError> {
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live handle.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks the point after all work that is on the stream.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<(), DriverError> {
        let stream = stream.into();
        self.context.same("the stream", stream.context())?;
        let _entered = self.context.enter()?;
        // SAFETY: event and stream are alive.
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.handle()) })
    }

    /// Waits until the stream has reached the event.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel before it failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Whether the stream has reached the event. The call is allowed while a stream is captured, but not for
    /// an event that was recorded in the capture.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let _entered = self.context.enter()?;
        let _relaxed = Relaxed::new()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.context.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Time in µs of the device's clock from `self` to `later`. Waits for `later`.
    ///
    /// # Errors
    /// When either event was never recorded or records no time, or when a kernel before `later` failed.
    pub fn elapsed_us(&self, later: &Event) -> Result<f64, DriverError> {
        later.synchronize()?;
        let _entered = self.context.enter()?;
        let mut ms = 0f32;
        // SAFETY: both events are alive; the pointer is to a live f32.
        let result = unsafe { sys::cuEventElapsedTime(&mut ms, self.raw, later.raw) };
        self.context.check("cuEventElapsedTime", result)?;
        Ok(f64::from(ms) * 1e3)
    }

    pub(crate) fn handle(&self) -> sys::CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_drop() else { return };
        // SAFETY: made by `new`, destroyed once. A failure here cannot be reported.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
