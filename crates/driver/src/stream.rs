//! Streams: queues of work on a device.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::context::Relaxed;
use crate::error::NEVER_ENDS;
use crate::memory::Kept;
use crate::{Context, DeviceSlice, DriverError, Event, sys};

/// `CU_STREAM_PER_THREAD`: a handle that names another stream in each thread.
const PER_THREAD: u64 = 2;

/// A line of work that the device does in order: what is put on one stream, or on one stream while it is captured into one
/// graph. Two launches of the same queue never run at once, whichever stream the graph is launched on, unless the launch allows
/// it; launches of different queues may. No other queue of this process ever equals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Queue {
    /// The driver's number of the stream; the stream's handle while a capture is under way, which is unique
    /// meanwhile.
    stream: u64,
    /// The calling thread where the handle names another stream in each.
    thread: Option<u64>,
    /// The driver's number of the capture under way on it.
    capture: Option<u64>,
}

impl Queue {
    /// Whether what joins the queue goes into a graph.
    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }
}

/// A stream: our own, the context's default one, or the caller's. A clone is the same stream.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
    /// Held while the stream joins a capture, and while something is enqueued for which that matters.
    steady: Mutex<()>,
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
        let _relaxed = Relaxed::new()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CU_STREAM_NON_BLOCKING;
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
    /// `raw` must be a stream of this context that outlives the result, its clones and what they are lent to
    /// (buffers of a [`Pool`](crate::Pool) and [`Transfer`](crate::Transfer)s among them). Where the caller
    /// captures the stream without [`Graph::capture`](crate::Graph::capture), the functions and memory that
    /// are used meanwhile must outlive the graph, and no other thread may begin the capture while a call of
    /// this crate enqueues work on the stream.
    pub unsafe fn from_raw(context: &Arc<Context>, raw: u64) -> Stream {
        Stream::of(context, raw as usize as sys::CUstream, false)
    }

    fn of(context: &Arc<Context>, raw: sys::CUstream, owned: bool) -> Stream {
        Stream(Arc::new(Inner { context: context.clone(), raw, owned, steady: Mutex::default() }))
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
            sys::CUDA_ERROR_NOT_READY => Ok(false),
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
        let mut status = sys::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the pointer is to a live status.
        let result = unsafe { sys::cuStreamIsCapturing(self.0.raw, &mut status) };
        context.check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The queue that a launch on the stream joins now.
    ///
    /// # Errors
    /// As [`Stream::is_capturing`], or when the capture under way has gone wrong.
    pub fn queue(&self) -> Result<Queue, DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        let thread = (self.raw() == PER_THREAD).then(this_thread);
        // A driver may refuse to number a stream that is captured, so that is asked second.
        if let Some(capture) = self.capture()? {
            return Ok(Queue { stream: self.raw(), thread, capture: Some(capture.number) });
        }
        let mut stream = self.raw();
        if thread.is_none() {
            // SAFETY: the stream is alive; the pointer is to a live number.
            context.check("cuStreamGetId", unsafe { sys::cuStreamGetId(self.0.raw, &mut stream) })?;
        }
        Ok(Queue { stream, thread, capture: None })
    }

    /// The capture under way on the stream. The context must be current.
    fn capture(&self) -> Result<Option<Capture>, DriverError> {
        let (mut status, mut number, mut graph) = (0, 0, std::ptr::null_mut());
        // SAFETY: the stream is alive; the first three pointers are to live values, and the others may be
        // null.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.0.raw,
                &mut status,
                &mut number,
                &mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        let context = self.context();
        context.check("cuStreamGetCaptureInfo", result)?;
        match status {
            sys::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(Capture { number, graph })),
            _ => Err(DriverError::Call {
                call: "cuStreamGetCaptureInfo",
                message: "the capture under way on the stream was invalidated by an earlier call".to_owned(),
            }),
        }
    }

    /// The driver's number of the capture under way on the stream. The context must be current.
    pub(crate) fn capture_number(&self) -> Result<Option<u64>, DriverError> {
        Ok(self.capture()?.map(|capture| capture.number))
    }

    /// Drops `kept` when the graph that the stream is captured into is gone, and with the graph all that was
    /// made of it (executable graphs, clones) and their launches.
    ///
    /// A thread of the driver drops `kept`, and may not call CUDA: what is dropped must not either.
    ///
    /// # Errors
    /// As [`Stream::queue`], when no capture is under way, or when the driver refuses; `kept` is dropped
    /// then.
    pub fn keep_with_graph(&self, kept: impl Send + 'static) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // Captures of ours do not end meanwhile.
        let _open = context.captures.lock();
        let Capture { graph, .. } = self.capture()?.ok_or_else(|| DriverError::Call {
            call: "cuGraphRetainUserObject",
            message: "the stream is not being captured".to_owned(),
        })?;
        let kept: Box<Box<dyn Send>> = Box::new(Box::new(kept));
        let (kept, mut object) = (Box::into_raw(kept).cast::<c_void>(), std::ptr::null_mut());
        let flags = sys::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC;
        // SAFETY: `object` is a live handle. The driver calls `drop_kept` once with `kept`, when no reference
        // is left.
        let result = unsafe { sys::cuUserObjectCreate(&mut object, kept, drop_kept, 1, flags) };
        if let Err(error) = context.check("cuUserObjectCreate", result) {
            // SAFETY: there is no object that has taken it.
            unsafe { drop_kept(kept) };
            return Err(error);
        }
        // SAFETY: the capture is under way, so that its graph is alive. The graph takes over the one
        // reference.
        let result =
            unsafe { sys::cuGraphRetainUserObject(graph, object, 1, sys::CU_GRAPH_USER_OBJECT_MOVE) };
        context.check("cuGraphRetainUserObject", result).inspect_err(|_| {
            // SAFETY: the reference was not moved, so it is still ours. A failure here has no one left to
            // tell.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }

    /// What is put on the stream from now on waits for the event.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // An event of a capture takes the stream into the capture.
        let _steady = self.steady();
        // SAFETY: stream and event are alive.
        context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.handle(), 0) })
    }

    /// Copies from ordinary memory to the device, after what is on the stream, and waits for it.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit; an error when the stream is captured.
    pub fn upload(&self, to: DeviceSlice<'_>, from: &[u8]) -> Result<(), DriverError> {
        to.fits(from.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_outside_captures()?;
        // SAFETY: `from` is alive until the stream has been waited for below; the destination has room.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), from.len(), self.0.raw) };
        context.check("cuMemcpyHtoDAsync", result)?;
        self.finish()
    }

    /// Copies from the device to ordinary memory, after what is on the stream, and waits for it.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit; an error when the stream is captured;
    /// [`DriverError::Poisoned`] when a kernel before it failed.
    pub fn download(&self, from: DeviceSlice<'_>, to: &mut [u8]) -> Result<(), DriverError> {
        from.fits(to.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_outside_captures()?;
        // SAFETY: `to` is alive and ours alone until the stream has been waited for below; the source is long enough.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), to.len(), self.0.raw)
        };
        context.check("cuMemcpyDtoHAsync", result)?;
        self.finish()
    }

    /// Waits for the stream even where another thread has found the context unusable: a copy of host memory
    /// is under way, and the memory is only lent. The context must be current.
    pub(crate) fn finish(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamSynchronize(self.0.raw) };
        self.context().check("cuStreamSynchronize", result)
    }

    /// Puts a copy within the device on the stream.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when it does not fit.
    pub fn copy(&self, to: DeviceSlice<'_>, from: DeviceSlice<'_>) -> Result<(), DriverError> {
        to.fits(from.bytes())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady =
            self.steady_keeping(|| [to, from].into_iter().filter_map(DeviceSlice::owner).collect())?;
        // SAFETY: device memory that is alive (the slices borrow it, or their maker answers for it), long
        // enough on both sides. It is freed after the copy, and a graph keeps it.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.bytes(), self.0.raw) };
        context.check("cuMemcpyDtoDAsync", result)
    }

    /// Puts the filling of memory with one byte on the stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill(&self, to: DeviceSlice<'_>, byte: u8) -> Result<(), DriverError> {
        if to.bytes() == 0 {
            return Ok(());
        }
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_keeping(|| to.owner().into_iter().collect())?;
        // SAFETY: device memory that is alive, as in `copy`.
        let result = unsafe { sys::cuMemsetD8Async(to.address(), byte, to.bytes(), self.0.raw) };
        context.check("cuMemsetD8Async", result)
    }

    /// Puts the filling of memory with one 32-bit word on the stream; what is left of the last word stays.
    ///
    /// # Errors
    /// When the address is no multiple of 4.
    pub fn fill_u32(&self, to: DeviceSlice<'_>, word: u32) -> Result<(), DriverError> {
        if to.bytes() < 4 {
            return Ok(());
        }
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_keeping(|| to.owner().into_iter().collect())?;
        // SAFETY: device memory that is alive, as in `copy`.
        let result = unsafe { sys::cuMemsetD32Async(to.address(), word, to.bytes() / 4, self.0.raw) };
        context.check("cuMemsetD32Async", result)
    }

    /// While the guard lives, the stream joins no capture.
    pub(crate) fn steady(&self) -> MutexGuard<'_, ()> {
        self.0.steady.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for a copy of host memory, which no graph may hold. The context must be current.
    pub(crate) fn steady_outside_captures(&self) -> Result<MutexGuard<'_, ()>, DriverError> {
        let steady = self.steady();
        if self.is_capturing()? {
            // A graph would copy again long after the memory is gone.
            return Err(DriverError::Call {
                call: "copy of host memory",
                message: "the stream is being captured; copy before or after".to_owned(),
            });
        }
        Ok(steady)
    }

    /// The same for work that a graph may hold: a capture of ours that the stream is part of keeps what
    /// `kept` gives. The context must be current.
    pub(crate) fn steady_keeping(
        &self,
        kept: impl FnOnce() -> Vec<Kept>,
    ) -> Result<MutexGuard<'_, ()>, DriverError> {
        let steady = self.steady();
        let captures = &self.context().captures;
        if captures.any()
            && let Some(number) = self.capture_number()?
        {
            captures.keep(number, kept());
        }
        Ok(steady)
    }
}

/// A capture under way.
struct Capture {
    /// Unique in the process.
    number: u64,
    graph: sys::CUgraph,
}

/// A number of the calling thread that no other thread ever has.
fn this_thread() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// Drops what [`Stream::keep_with_graph`] was given.
unsafe extern "C" fn drop_kept(kept: *mut c_void) {
    // SAFETY: made by `Box::into_raw` from this type, and given here once.
    let kept = unsafe { Box::from_raw(kept.cast::<Box<dyn Send>>()) };
    // Nothing may unwind into the driver.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(kept)));
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
