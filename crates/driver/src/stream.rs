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

/// `CU_STREAM_PER_THREAD`: a handle that names a different stream in each thread.
const PER_THREAD: u64 = 2;

/// An ordered line of work: the work on one stream, or the work of one stream that is captured into one
/// graph. Two launches of the same queue never run concurrently, whichever stream the graph is launched on,
/// unless the launch allows it. Launches of different queues may run concurrently. The value of a queue is
/// unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Queue {
    /// The driver's number of the stream. During a capture it is the stream's handle, which is unique during
    /// that time.
    stream: u64,
    /// The calling thread, if the handle names a different stream in each thread.
    thread: Option<u64>,
    /// The driver's number of the capture in progress on the stream.
    capture: Option<u64>,
}

impl Queue {
    /// Whether work on this queue goes into a graph.
    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }
}

/// A stream: one of our own, the context's default stream, or the caller's. A clone is the same stream.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
    /// Held while the stream joins a capture, and while work is enqueued that must know whether the stream is
    /// captured.
    steady: Mutex<()>,
}

// SAFETY: a stream is a handle; the driver's functions on it may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream that does not synchronise with any other stream, including the default one. It is
    /// destroyed with its last clone, after its work.
    ///
    /// # Errors
    /// When the driver cannot create the stream.
    pub fn new(context: &Arc<Context>) -> Result<Stream, DriverError> {
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CU_STREAM_NON_BLOCKING;
        // SAFETY: the context is current; the pointer is to a live handle.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream::of(context, raw, true))
    }

    /// The context's default stream, which PyTorch uses unless another stream is given. The default stream
    /// cannot be captured.
    pub fn default_of(context: &Arc<Context>) -> Stream {
        Stream::of(context, std::ptr::null_mut(), false)
    }

    /// The caller's stream: a `CUstream` or `cudaStream_t`, 0 for the default stream. It is not destroyed.
    ///
    /// # Safety
    /// `raw` must be a stream of this context that outlives the result, its clones, everything that borrows
    /// them (including buffers of a [`Pool`](crate::Pool) and [`Transfer`](crate::Transfer)s), and each
    /// [`GraphExec`](crate::GraphExec) whose last launch is on it. If the caller captures the stream without
    /// [`Graph::capture`](crate::Graph::capture), the functions and memory used in the capture must outlive
    /// the graph. No other thread may then begin the capture while a call of this crate enqueues work on the
    /// stream.
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

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: the stream is alive.
        context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.raw) })
    }

    /// Waits until all work on the stream is done, but at most for `limit`. A kernel that takes longer is
    /// treated as one that never ends, and the context becomes unusable: only the end of the process stops a
    /// kernel.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed or did not end. All later calls then return this error.
    pub fn synchronize_within(&self, limit: Duration) -> Result<(), DriverError> {
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > limit {
                let cause = format!("{NEVER_ENDS} within {} s", limit.as_secs_f64());
                return Err(self.context().poison("cuStreamQuery", cause));
            }
            // For the first 2 ms the loop polls without sleeping, so that the wait for a short kernel is as
            // exact as the driver's.
            if start.elapsed() > Duration::from_millis(2) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    /// Whether all work on the stream is done.
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

    /// Whether work that is enqueued on the stream goes into a graph instead of to the device.
    ///
    /// # Errors
    /// When the driver cannot tell: for the default stream while another stream is captured.
    pub fn is_capturing(&self) -> Result<bool, DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        let mut status = sys::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the pointer is to a live status.
        let result = unsafe { sys::cuStreamIsCapturing(self.0.raw, &mut status) };
        context.check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The queue that a launch on the stream would join now.
    ///
    /// # Errors
    /// As [`Stream::is_capturing`], or when the capture in progress has failed.
    pub fn queue(&self) -> Result<Queue, DriverError> {
        StreamRef::from(self).queue()
    }

    /// The driver's number of the capture in progress on the stream. The context must be current.
    pub(crate) fn capture_number(&self) -> Result<Option<u64>, DriverError> {
        StreamRef::from(self).capture_number()
    }

    /// Drops `kept` when the graph of the stream's capture no longer exists, and with it everything made from
    /// the graph (executable graphs, clones) and their launches.
    ///
    /// A thread of the driver drops `kept`. That thread may not call CUDA, so the destructor of `kept` must
    /// not either.
    ///
    /// # Errors
    /// As [`Stream::queue`], when no capture is in progress, or when the driver returns an error; `kept` is
    /// dropped then.
    pub fn keep_with_graph(&self, kept: impl Send + 'static) -> Result<(), DriverError> {
        StreamRef::from(self).keep_with_graph(kept)
    }

    /// Makes later work on the stream wait for the event.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // An event that was recorded in a capture makes the stream join the capture.
        let _steady = self.steady();
        // SAFETY: stream and event are alive.
        context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.handle(), 0) })
    }

    /// Copies from pageable host memory to the device, after the work on the stream. Waits for the copy.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `to` is too short; an error when the stream is captured.
    pub fn upload(&self, to: DeviceSlice<'_>, from: &[u8]) -> Result<(), DriverError> {
        to.fits(from.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_outside_captures()?;
        // SAFETY: `from` is alive until the wait for the stream below; the destination is long enough.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), from.len(), self.0.raw) };
        context.check("cuMemcpyHtoDAsync", result)?;
        self.finish()
    }

    /// Copies from the device to pageable host memory, after the work on the stream. Waits for the copy.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `from` is too short; an error when the stream is captured;
    /// [`DriverError::Poisoned`] when a kernel before the copy failed.
    pub fn download(&self, from: DeviceSlice<'_>, to: &mut [u8]) -> Result<(), DriverError> {
        from.fits(to.len())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady = self.steady_outside_captures()?;
        // SAFETY: `to` is alive and exclusively ours until the wait for the stream below; the source is long
        // enough.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), to.len(), self.0.raw)
        };
        context.check("cuMemcpyDtoHAsync", result)?;
        self.finish()
    }

    /// Waits for the stream, even if another thread has found the context unusable: a copy of borrowed host
    /// memory is in progress. The context must be current.
    pub(crate) fn finish(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamSynchronize(self.0.raw) };
        self.context().check("cuStreamSynchronize", result)
    }

    /// Enqueues a copy within the device on the stream.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `to` is too short.
    pub fn copy(&self, to: DeviceSlice<'_>, from: DeviceSlice<'_>) -> Result<(), DriverError> {
        to.fits(from.bytes())?;
        let context = self.context();
        let _entered = context.enter()?;
        let _steady =
            self.steady_keeping(|| [to, from].into_iter().filter_map(DeviceSlice::owner).collect())?;
        // SAFETY: device memory that is alive (the slices borrow it, or the maker of the slice guarantees
        // it), long enough on both sides. It is freed after the copy (memory of a pool on another stream: as
        // its documentation asks), and a graph keeps it alive.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.bytes(), self.0.raw) };
        context.check("cuMemcpyDtoDAsync", result)
    }

    /// Enqueues filling the memory with one byte.
    ///
    /// # Errors
    /// When the driver returns an error.
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

    /// Enqueues filling the memory with one 32-bit word. Bytes after the last whole word are not written.
    ///
    /// # Errors
    /// When the address is not a multiple of 4.
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

    /// The work on the stream up to now.
    pub(crate) fn last_work(&self) -> LastWork {
        LastWork { stream: self.clone(), thread: (self.raw() == PER_THREAD).then(this_thread) }
    }

    /// While the guard lives, the stream joins no capture.
    pub(crate) fn steady(&self) -> MutexGuard<'_, ()> {
        self.0.steady.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like [`Stream::steady`], for copies of host memory, which no graph may contain. The context must be
    /// current.
    pub(crate) fn steady_outside_captures(&self) -> Result<MutexGuard<'_, ()>, DriverError> {
        let steady = self.steady();
        if self.is_capturing()? {
            // A launch of the graph would copy again, long after the memory is freed.
            return Err(DriverError::Call {
                call: "copy of host memory",
                message: "the stream is being captured; copy before or after".to_owned(),
            });
        }
        Ok(steady)
    }

    /// [`StreamRef::steady_keeping`].
    pub(crate) fn steady_keeping(
        &self,
        kept: impl FnOnce() -> Vec<Kept>,
    ) -> Result<Option<MutexGuard<'_, ()>>, DriverError> {
        StreamRef::from(self).steady_keeping(kept)
    }
}

/// A [`Stream`], or a stream of the caller, for the time of a call. Making one allocates nothing.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    context: &'a Arc<Context>,
    raw: sys::CUstream,
    steady: Option<&'a Mutex<()>>,
}

impl<'a> From<&'a Stream> for StreamRef<'a> {
    fn from(stream: &'a Stream) -> StreamRef<'a> {
        let Inner { context, raw, steady, .. } = &*stream.0;
        StreamRef { context, raw: *raw, steady: Some(steady) }
    }
}

impl<'a> StreamRef<'a> {
    /// The caller's stream, as [`Stream::from_raw`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn from_raw(context: &'a Arc<Context>, raw: u64) -> StreamRef<'a> {
        StreamRef { context, raw: raw as usize as sys::CUstream, steady: None }
    }

    /// The context it belongs to.
    pub fn context(self) -> &'a Arc<Context> {
        self.context
    }

    /// The driver's handle, 0 for the default stream.
    pub fn raw(self) -> u64 {
        self.raw as usize as u64
    }

    pub(crate) fn handle(self) -> sys::CUstream {
        self.raw
    }

    /// The queue that a launch on the stream would join now.
    ///
    /// # Errors
    /// As [`Stream::is_capturing`], or when the capture in progress has failed.
    pub fn queue(self) -> Result<Queue, DriverError> {
        let context = self.context();
        // The handles up to this one name a stream of the thread's context, others a stream of their own.
        let _entered = if self.raw() <= PER_THREAD { Some(context.enter()?) } else { None };
        let thread = (self.raw() == PER_THREAD).then(this_thread);
        // A driver may refuse to return the number of a captured stream, so the number is queried second.
        if let Some(capture) = self.capture()? {
            return Ok(Queue { stream: self.raw(), thread, capture: Some(capture.number) });
        }
        let mut stream = self.raw();
        if thread.is_none() {
            // SAFETY: the stream is alive; the pointer is to a live number.
            context.call_within("cuStreamGetId", || unsafe { sys::cuStreamGetId(self.raw, &mut stream) })?;
        }
        Ok(Queue { stream, thread, capture: None })
    }

    /// The capture in progress on the stream, if any.
    fn capture(self) -> Result<Option<Capture>, DriverError> {
        let (mut status, mut number, mut graph) = (0, 0, std::ptr::null_mut());
        // SAFETY: the stream is alive; the first three pointers are to live values, and the others may be
        // null.
        let ask = || unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.raw,
                &mut status,
                &mut number,
                &mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        self.context().call_within("cuStreamGetCaptureInfo", ask)?;
        match status {
            sys::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(Capture { number, graph })),
            _ => Err(DriverError::Call {
                call: "cuStreamGetCaptureInfo",
                message: "the capture under way on the stream was invalidated by an earlier call".to_owned(),
            }),
        }
    }

    /// The driver's number of the capture in progress on the stream. The context must be current.
    pub(crate) fn capture_number(self) -> Result<Option<u64>, DriverError> {
        Ok(self.capture()?.map(|capture| capture.number))
    }

    /// [`Stream::keep_with_graph`].
    ///
    /// # Errors
    /// As there.
    pub fn keep_with_graph(self, kept: impl Send + 'static) -> Result<(), DriverError> {
        let context = self.context();
        let _entered = context.enter()?;
        // While this lock is held, captures by this crate do not end.
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
            // SAFETY: no object was created, so `kept` is still ours.
            unsafe { drop_kept(kept) };
            return Err(error);
        }
        // SAFETY: the capture is in progress, so its graph is alive. The graph takes over the one reference.
        let result =
            unsafe { sys::cuGraphRetainUserObject(graph, object, 1, sys::CU_GRAPH_USER_OBJECT_MOVE) };
        context.check("cuGraphRetainUserObject", result).inspect_err(|_| {
            // SAFETY: the reference was not moved, so it is still ours. A failure here cannot be reported.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }

    /// While the guard lives, the stream joins no capture. For work that a graph may contain: if a capture by
    /// this crate includes the stream, the graph holds the value of `kept()`, so that it is not freed.
    pub(crate) fn steady_keeping(
        self,
        kept: impl FnOnce() -> Vec<Kept>,
    ) -> Result<Option<MutexGuard<'a, ()>>, DriverError> {
        let steady = self.steady.map(|steady| steady.lock().unwrap_or_else(PoisonError::into_inner));
        let captures = &self.context.captures;
        if captures.any() {
            let _entered = self.context().enter()?;
            if let Some(number) = self.capture_number()? {
                captures.keep(number, kept());
            }
        }
        Ok(steady)
    }
}

/// The work that is on a stream at some time.
#[derive(Debug)]
pub(crate) struct LastWork {
    stream: Stream,
    /// The thread, for a handle that names a different stream in each thread.
    thread: Option<u64>,
}

impl LastWork {
    /// Waits for the work, from a destructor: the context must be current. `false` if that is not possible,
    /// because the stream is being captured or is another thread's. After an error of the device, nothing
    /// runs any more.
    pub(crate) fn finish(self) -> bool {
        if self.thread.is_some_and(|thread| thread != this_thread()) {
            return false;
        }
        // Other streams may be captured meanwhile.
        let Ok(_relaxed) = Relaxed::new() else { return false };
        let Ok(_steady) = self.stream.steady_outside_captures() else { return false };
        let _ = self.stream.finish();
        true
    }
}

/// A capture in progress.
struct Capture {
    /// The driver's number of the capture, unique in the process.
    number: u64,
    graph: sys::CUgraph,
}

/// A number of the calling thread that no other thread ever gets.
fn this_thread() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// Drops a value that was passed to [`Stream::keep_with_graph`].
unsafe extern "C" fn drop_kept(kept: *mut c_void) {
    // SAFETY: made by `Box::into_raw` from this type, and passed here once.
    let kept = unsafe { Box::from_raw(kept.cast::<Box<dyn Send>>()) };
    // A panic must not unwind into the driver.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(kept)));
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned {
            let Some(_entered) = self.context.enter_to_drop() else { return };
            // SAFETY: made by `new`, destroyed once; the driver completes its work first. A failure cannot be
            // reported.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
