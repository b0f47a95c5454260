//! Graphs: work that is captured from a stream once and launched many times.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::Kept;
use crate::stream::LastWork;
use crate::{Context, DriverError, Stream, sys};

/// Objects that a graph keeps alive, by address.
type Keep = HashMap<usize, Kept>;

/// The captures by this crate that are in progress in a context, by the driver's capture number, with the
/// objects that their graphs must keep alive. A stream that joins a capture through an event has the
/// capture's number. So has a second [`Stream`] of the captured handle.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// Number of captures in progress. Read without the lock at each launch.
    open: AtomicUsize,
    /// Locked while a capture begins or ends.
    keep: Mutex<HashMap<u64, Keep>>,
}

impl Captures {
    /// Whether a capture by this crate may be in progress.
    pub(crate) fn any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// No capture by this crate begins or ends while the guard lives.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<u64, Keep>> {
        self.keep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the graph of a capture keep `kept` alive. A number that is not in the map belongs to another
    /// library's capture, or to a capture that has ended.
    pub(crate) fn keep(&self, number: u64, kept: Vec<Kept>) {
        if let Some(keep) = self.lock().get_mut(&number) {
            keep.extend(kept.into_iter().map(|kept| (Arc::as_ptr(&kept).addr(), kept)));
        }
    }
}

/// A captured graph, not yet instantiated.
#[derive(Debug)]
pub struct Graph(sys::CUgraph);

impl Graph {
    /// Captures what `body` enqueues on the stream, without running it, and instantiates the graph. The
    /// stream must not be the default stream, and `body` must not wait for the stream.
    ///
    /// The graph keeps the modules of its kernels and the memory of the slices that they use, on all streams
    /// that join the capture. Memory of [`DeviceSlice::from_raw`](crate::DeviceSlice::from_raw) is not kept.
    ///
    /// # Errors
    /// The error of `body`, or the driver's error about the capture. In both cases the stream is no longer
    /// captured.
    pub fn capture<E: From<DriverError>>(
        stream: &Stream,
        body: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<GraphExec, E> {
        let capture = Capture::begin(stream)?;
        body(stream)?;
        Ok(capture.end()?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: returned by cuStreamEndCapture, destroyed once. A failure here cannot be reported.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// A capture in progress. Dropping it cancels the capture.
struct Capture<'a> {
    stream: &'a Stream,
    number: u64,
    open: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, DriverError> {
        let context = stream.context();
        let _entered = context.enter()?;
        let _steady = stream.steady();
        let mut keep = context.captures.lock();
        // In this mode, other threads may allocate and load modules during the capture.
        let mode = sys::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) };
        context.check("cuStreamBeginCapture", result)?;
        context.captures.open.fetch_add(1, Ordering::SeqCst);
        let number = stream.capture_number();
        let mut capture = Capture { stream, number: 0, open: true };
        // On an error, the lock is released before the capture is dropped: ending a capture takes the same
        // lock.
        match number {
            Ok(Some(number)) => {
                capture.number = number;
                keep.insert(number, HashMap::new());
                Ok(capture)
            }
            other => {
                drop(keep);
                drop(capture);
                Err(other.err().unwrap_or(DriverError::Call {
                    call: "cuStreamBeginCapture",
                    message: "the driver has begun no capture".to_owned(),
                }))
            }
        }
    }

    fn end(mut self) -> Result<GraphExec, DriverError> {
        self.open = false;
        let context = self.stream.context();
        let (graph, keep) = self.finish();
        let graph = graph?;
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; the pointer is to a live handle.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph.0, 0) };
        context.check("cuGraphInstantiate", result)?;
        Ok(GraphExec {
            executable: Mutex::new(Executable { raw, launched: None }),
            owner: Some(Owner { context: context.clone(), keep: Arc::new(keep) }),
        })
    }

    fn finish(&self) -> (Result<Graph, DriverError>, Keep) {
        let context = self.stream.context();
        let _entered = context.enter_to_drop();
        let mut keep = context.captures.lock();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the capture began on this stream and thread; the pointer is to a live handle.
        let result = unsafe { sys::cuStreamEndCapture(self.stream.handle(), &mut raw) };
        context.captures.open.fetch_sub(1, Ordering::SeqCst);
        let keep = keep.remove(&self.number).unwrap_or_default();
        // A failed capture gives a null graph, which needs no destruction.
        let graph = (!raw.is_null()).then_some(Graph(raw));
        let ended = context.check("cuStreamEndCapture", result).and_then(|()| {
            graph.ok_or(DriverError::Call {
                call: "cuStreamEndCapture",
                message: "the driver gave no graph".to_owned(),
            })
        });
        (ended, keep)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            // The error that cancelled the capture is the one to report.
            let _ = self.finish();
        }
    }
}

/// An instantiated graph, ready to launch.
///
/// Dropping it waits for its launches, so that the modules and the memory that it keeps outlive them. If the
/// stream of the last launch cannot be waited for, modules and memory are kept until the process ends: when
/// the stream is being captured, or is another thread's default stream.
#[derive(Debug)]
pub struct GraphExec {
    /// Locked during a launch: two threads may not launch a graph at once (CUDA Driver API, "Graph object
    /// thread safety").
    executable: Mutex<Executable>,
    /// `None` for the caller's graph, which is not destroyed.
    owner: Option<Owner>,
}

#[derive(Debug)]
struct Executable {
    raw: sys::CUgraphExec,
    /// The work up to the last launch that no capture has taken up. The driver orders the launches of a
    /// graph, so earlier ones have ended when it has.
    launched: Option<LastWork>,
}

#[derive(Debug)]
struct Owner {
    context: Arc<Context>,
    /// The modules and the memory that the graph refers to.
    keep: Arc<Keep>,
}

// SAFETY: handles, used by one thread at a time: see `executable`.
unsafe impl Send for GraphExec {}
// SAFETY: as above.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// The caller's graph, a `CUgraphExec` or `cudaGraphExec_t`. It is not destroyed.
    ///
    /// # Safety
    /// `raw` must be an instantiated graph that outlives the result and that no one else launches at the same
    /// time. Its functions and memory must stay valid as long as it is launched.
    pub unsafe fn from_raw(raw: u64) -> GraphExec {
        let raw = raw as usize as sys::CUgraphExec;
        GraphExec { executable: Mutex::new(Executable { raw, launched: None }), owner: None }
    }

    /// Launches the graph on a stream. One executable graph never runs concurrently with itself: the driver
    /// orders its launches, also on different streams.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        let context = stream.context();
        if let Some(owner) = &self.owner {
            context.same("the graph", &owner.context)?;
        }
        let _entered = context.enter()?;
        // On a captured stream, the graph becomes a part of another graph.
        let mut is_captured = false;
        let _steady = stream.steady_keeping(|| {
            is_captured = true;
            self.owner.iter().map(|owner| owner.keep.clone() as Kept).collect()
        })?;
        let mut executable = self.executable.lock().unwrap_or_else(PoisonError::into_inner);
        if self.owner.is_some() && !is_captured {
            executable.launched = Some(stream.last_work());
        }
        // SAFETY: graph and stream are alive; the lock excludes other threads.
        context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(executable.raw, stream.handle()) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner {
            let Some(_entered) = owner.context.enter_to_drop() else { return };
            let executable = self.executable.get_mut().unwrap_or_else(PoisonError::into_inner);
            if executable.launched.take().is_some_and(|work| !work.finish()) {
                std::mem::forget(owner.keep.clone());
            }
            // SAFETY: instantiated by us, destroyed once. A failure cannot be reported.
            let _ = unsafe { sys::cuGraphExecDestroy(executable.raw) };
        }
    }
}
