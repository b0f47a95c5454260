//! Graphs: work captured from a stream once and launched many times.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::Kept;
use crate::{Context, DriverError, Stream, sys};

/// What a graph keeps, by address.
type Keep = HashMap<usize, Kept>;

/// The captures of this crate that are under way in a context, by the driver's number, and what their graphs
/// must keep. A stream that joins a capture by an event, and a second [`Stream`] of the captured handle, have
/// the capture's number.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// How many there are, to be asked without the lock: at each launch.
    open: AtomicUsize,
    /// Locked while a capture begins or ends.
    keep: Mutex<HashMap<u64, Keep>>,
}

impl Captures {
    /// Whether a capture of this crate may be under way.
    pub(crate) fn any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// No capture of this crate begins or ends while the guard lives.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<u64, Keep>> {
        self.keep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the graph of a capture keep this. A number that is not here is another library's, or of a capture
    /// that has ended meanwhile.
    pub(crate) fn keep(&self, number: u64, kept: Vec<Kept>) {
        if let Some(keep) = self.lock().get_mut(&number) {
            keep.extend(kept.into_iter().map(|kept| (Arc::as_ptr(&kept).addr(), kept)));
        }
    }
}

/// Work captured from a stream, not yet ready to launch.
#[derive(Debug)]
pub struct Graph(sys::CUgraph);

impl Graph {
    /// Captures what `body` puts on the stream, which then has not run, and makes it ready to launch. The stream must not be
    /// the default one, and `body` must wait for nothing on it.
    ///
    /// The graph keeps the modules of its kernels and the memory of the slices that they are given, on
    /// whichever streams the capture spreads to. Memory of
    /// [`DeviceSlice::from_raw`](crate::DeviceSlice::from_raw) is not kept.
    ///
    /// # Errors
    /// What `body` gave, or what the driver found wrong with the capture; the stream is out of capture either way.
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
        // SAFETY: given by cuStreamEndCapture, destroyed once. A failure here has no one left to tell.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// A capture under way; dropped, it is called off.
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
        // Other threads may allocate and load meanwhile.
        let mode = sys::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) };
        context.check("cuStreamBeginCapture", result)?;
        context.captures.open.fetch_add(1, Ordering::SeqCst);
        let number = stream.capture_number();
        let mut capture = Capture { stream, number: 0, open: true };
        // Dropped at an error, which the lock would keep from ending.
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
            raw: Mutex::new(raw),
            owner: Some(Owner { context: context.clone(), keep: Arc::new(keep) }),
        })
    }

    fn finish(&self) -> (Result<Graph, DriverError>, Keep) {
        let context = self.stream.context();
        let _entered = context.enter_to_drop();
        let mut keep = context.captures.lock();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the capture was begun on this stream and thread; the pointer is to a live handle.
        let result = unsafe { sys::cuStreamEndCapture(self.stream.handle(), &mut raw) };
        context.captures.open.fetch_sub(1, Ordering::SeqCst);
        let keep = keep.remove(&self.number).unwrap_or_default();
        // A capture that went wrong gives a null graph, which needs no destruction.
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
            // The error that called it off is the one to tell.
            let _ = self.finish();
        }
    }
}

/// A graph ready to launch.
#[derive(Debug)]
pub struct GraphExec {
    /// Locked for the time of a launch: a graph may not be launched by two threads at once (CUDA Driver API, "Graph object
    /// thread safety").
    raw: Mutex<sys::CUgraphExec>,
    /// `None` for the caller's graph, which is not destroyed.
    owner: Option<Owner>,
}

#[derive(Debug)]
struct Owner {
    context: Arc<Context>,
    /// The graph names functions of these modules and addresses of this memory.
    keep: Arc<Keep>,
}

// SAFETY: a handle, used by one thread at a time: see `raw`.
unsafe impl Send for GraphExec {}
// SAFETY: as above.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// The caller's graph: a `CUgraphExec` or `cudaGraphExec_t`. It is not destroyed.
    ///
    /// # Safety
    /// `raw` must be an instantiated graph that outlives the result, that no one launches at the same time,
    /// and whose functions and memory stay as long as it is launched.
    pub unsafe fn from_raw(raw: u64) -> GraphExec {
        GraphExec { raw: Mutex::new(raw as usize as sys::CUgraphExec), owner: None }
    }

    /// Puts the graph on a stream. One executable graph never runs beside itself: the driver puts its
    /// launches in order, on whichever streams they are.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        let context = stream.context();
        if let Some(owner) = &self.owner {
            context.same("the graph", &owner.context)?;
        }
        let _entered = context.enter()?;
        // On a stream that is captured, the graph becomes a part of another.
        let kept = || self.owner.iter().map(|owner| owner.keep.clone() as Kept).collect();
        let _steady = stream.steady_keeping(kept)?;
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: graph and stream are alive; the lock keeps other threads away.
        context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(*raw, stream.handle()) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner {
            let Some(_entered) = owner.context.enter_to_drop() else { return };
            // SAFETY: instantiated by us, destroyed once; a launch under way is let end. A failure has no one to tell.
            let raw = *self.raw.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = unsafe { sys::cuGraphExecDestroy(raw) };
        }
    }
}
