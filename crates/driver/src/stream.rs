//! Streams: queues of work on a device.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureStatus as Capture};

use crate::error::NEVER_ENDS;
use crate::module::Module;
use crate::{Context, DeviceSlice, DriverError, Event};

/// A line of work that the device does in order: what is put on one stream, or on one stream while it is captured into one
/// graph. Two launches of the same queue never run at once, whichever stream the graph is launched on, unless the launch allows
/// it; launches of different queues may. No other queue of this process ever equals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Queue {
    /// The driver's number of the stream.
    stream: u64,
    /// The driver's number of the capture under way on it.
    capture: Option<u64>,
}

/// A stream: our own, the context's default one, or the caller's. A clone is the same stream.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
    /// Whether [`Graph::capture`](crate::Graph::capture) is under way on it.
    recording: AtomicBool,
    /// Modules whose kernels were launched meanwhile: the graph must keep them.
    recorded: Mutex<Vec<Arc<Module>>>,
}

// SAFETY: a stream is a handle; the driver's functions on it may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream that waits for no other, the default one included. Destroyed with its last clone, after its work.
    ///
    /// # Errors
    /// When the driver has no room for it.
    pub fn new(context: &Arc<Context>) -> Result<Stream, DriverError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the pointer is to a live handle.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream::of(context, raw, true))
    }

    /// The context's default stream, the one that PyTorch uses unless told otherwise. It cannot be captured.
    pub fn default_of(context: &Arc<Context>) -> Stream {
        Stream::of(context, std::ptr::null_mut(), false)
    }

    /// The caller's stream: a `CUstream` or `cudaStream_t`, 0 for the default one. It is not destroyed.
    ///
    /// # Safety
    /// `raw` must be a stream of this context that outlives the result, its clones and what they are lent to (buffers of
    /// a [`Pool`](crate::Pool) and [`Transfer`](crate::Transfer)s among them).
    pub unsafe fn from_raw(context: &Arc<Context>, raw: u64) -> Stream {
        Stream::of(context, raw as usize as sys::CUstream, false)
    }

    fn of(context: &Arc<Context>, raw: sys::CUstream, owned: bool) -> Stream {
        let (recording, recorded) = (AtomicBool::new(false), Mutex::new(Vec::new()));
        Stream(Arc::new(Inner { context: context.clone(), raw, owned, recording, recorded }))
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// The driver's handle, 0 for the default stream.
    pub fn raw(&self) -> u64 {
        self.0.raw as usize as u64
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.0.raw
    }

    /// Waits until everything on the stream is done.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: the stream is alive.
        context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.raw) })
    }

    /// The same for at most `limit`. A kernel that takes longer is taken to wait for ever, and the context for lost: nothing can
    /// stop a kernel but the end of its process.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed or did not end, and from then on in all calls.
    pub fn synchronize_within(&self, limit: Duration) -> Result<(), DriverError> {
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > limit {
                let cause = format!("{NEVER_ENDS} within {} s", limit.as_secs_f64());
                return Err(self.context().poison("cuStreamQuery", cause));
            }
            // Short kernels are waited for as closely as by the driver.
            if start.elapsed() > Duration::from_millis(2) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    /// Whether everything on the stream is done.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => context.check("cuStreamQuery", result).map(|()| true),
        }
    }

    /// Whether what is put on the stream goes into a graph instead of to the device.
    ///
    /// # Errors
    /// When the driver cannot say: of the default stream while another one is captured.
    pub fn is_capturing(&self) -> Result<bool, DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        let mut status = Capture::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the pointer is to a live status.
        let result = unsafe { sys::cuStreamIsCapturing(self.0.raw, &mut status) };
        context.check("cuStreamIsCapturing", result)?;
        Ok(status != Capture::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The queue that a launch on the stream joins now.
    ///
    /// # Errors
    /// As [`Stream::is_capturing`].
    pub fn queue(&self) -> Result<Queue, DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        let (mut stream, mut capture, mut status) = (0, 0, Capture::CU_STREAM_CAPTURE_STATUS_NONE);
        // SAFETY: the stream is alive; the pointer is to a live number.
        context.check("cuStreamGetId", unsafe { sys::cuStreamGetId(self.0.raw, &mut stream) })?;
        // SAFETY: the stream is alive; the first two pointers are to live values, and the others may be null.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.0.raw,
                &mut status,
                &mut capture,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        context.check("cuStreamGetCaptureInfo", result)?;
        let capturing = status != Capture::CU_STREAM_CAPTURE_STATUS_NONE;
        Ok(Queue { stream, capture: capturing.then_some(capture) })
    }

    /// What is put on the stream from now on waits for the event.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: stream and event are alive.
        context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.handle(), 0) })
    }

    /// Copies from ordinary memory to the device, after what is on the stream, and waits for it.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit.
    pub fn upload(&self, to: DeviceSlice, from: &[u8]) -> Result<(), DriverError> {
        to.fits(from.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: `from` is alive until the stream has been waited for below; the destination has room.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), from.len(), self.0.raw) };
        context.check("cuMemcpyHtoDAsync", result)?;
        self.synchronize()
    }

    /// Copies from the device to ordinary memory, after what is on the stream, and waits for it.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit; [`DriverError::Poisoned`] when a kernel before it failed.
    pub fn download(&self, from: DeviceSlice, to: &mut [u8]) -> Result<(), DriverError> {
        from.fits(to.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: `to` is alive and ours alone until the stream has been waited for below; the source is long enough.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), to.len(), self.0.raw)
        };
        context.check("cuMemcpyDtoHAsync", result)?;
        self.synchronize()
    }

    /// Puts a copy within the device on the stream.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit.
    pub fn copy(&self, to: DeviceSlice, from: DeviceSlice) -> Result<(), DriverError> {
        to.fits(from.bytes())?;
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: device memory of this context (the makers of the slices answer for that), long enough on both sides.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.bytes(), self.0.raw) };
        context.check("cuMemcpyDtoDAsync", result)
    }

    /// Puts the filling of memory with one byte on the stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill(&self, to: DeviceSlice, byte: u8) -> Result<(), DriverError> {
        if to.bytes() == 0 {
            return Ok(());
        }
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: device memory of this context (the maker of the slice answers for that).
        let result = unsafe { sys::cuMemsetD8Async(to.address(), byte, to.bytes(), self.0.raw) };
        context.check("cuMemsetD8Async", result)
    }

    /// Puts the filling of memory with one 32-bit word on the stream; what is left of the last word stays.
    ///
    /// # Errors
    /// When the address is no multiple of 4.
    pub fn fill_u32(&self, to: DeviceSlice, word: u32) -> Result<(), DriverError> {
        if to.bytes() < 4 {
            return Ok(());
        }
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: as above.
        let result = unsafe { sys::cuMemsetD32Async(to.address(), word, to.bytes() / 4, self.0.raw) };
        context.check("cuMemsetD32Async", result)
    }

    /// From here to [`Stream::recorded`] each module that is launched from is kept.
    pub(crate) fn record(&self) {
        self.0.recording.store(true, Ordering::Release);
    }

    pub(crate) fn recorded(&self) -> Vec<Arc<Module>> {
        self.0.recording.store(false, Ordering::Release);
        std::mem::take(&mut *self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Tells the stream which module a kernel on it came from.
    pub(crate) fn launched(&self, module: &Arc<Module>) {
        if !self.0.recording.load(Ordering::Acquire) {
            return;
        }
        let mut recorded = self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if !recorded.iter().any(|known| Arc::ptr_eq(known, module)) {
            recorded.push(module.clone());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned {
            let Some(_entered) = self.context.enter_to_drop() else { return };
            // SAFETY: made by `new`, destroyed once; the driver lets its work end. A failure has no one left to tell.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
