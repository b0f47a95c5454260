//! Graphs: work captured from a stream once and launched many times.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};

use crate::module::Module;
use crate::{Context, DriverError, Stream};

/// Work captured from a stream, not yet ready to launch.
#[derive(Debug)]
pub struct Graph(sys::CUgraph);

impl Graph {
    /// Captures what `body` puts on the stream, which then has not run, and makes it ready to launch. The stream must not be
    /// the default one, and `body` must wait for nothing on it.
    ///
    /// The graph keeps the modules of its kernels, not the memory that they are given: that must outlive it.
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
    open: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, DriverError> {
        let context = stream.context();
        let _entered = context.enter()?;
        // Other threads may allocate and load meanwhile.
        let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) };
        context.check("cuStreamBeginCapture", result)?;
        stream.record();
        Ok(Capture { stream, open: true })
    }

    fn end(mut self) -> Result<GraphExec, DriverError> {
        self.open = false;
        let context = self.stream.context();
        let (graph, modules) = self.finish();
        let graph = graph?;
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; the pointer is to a live handle.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph.0, 0) };
        context.check("cuGraphInstantiate", result)?;
        Ok(GraphExec {
            raw: Mutex::new(raw),
            owner: Some(Owner { context: context.clone(), _modules: modules }),
        })
    }

    fn finish(&self) -> (Result<Graph, DriverError>, Vec<Arc<Module>>) {
        let context = self.stream.context();
        let modules = self.stream.recorded();
        let _entered = context.enter_to_drop();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the capture was begun on this stream and thread; the pointer is to a live handle.
        let result = unsafe { sys::cuStreamEndCapture(self.stream.handle(), &mut raw) };
        // A capture that went wrong gives a null graph, which needs no destruction.
        let graph = (!raw.is_null()).then_some(Graph(raw));
        let ended = context.check("cuStreamEndCapture", result).and_then(|()| {
            graph.ok_or(DriverError::Call {
                call: "cuStreamEndCapture",
                message: "the driver gave no graph".to_owned(),
            })
        });
        (ended, modules)
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
    /// The graph names functions of these.
    _modules: Vec<Arc<Module>>,
}

// SAFETY: a handle, used by one thread at a time: see `raw`.
unsafe impl Send for GraphExec {}
// SAFETY: as above.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// The caller's graph: a `CUgraphExec` or `cudaGraphExec_t`. It is not destroyed.
    ///
    /// # Safety
    /// `raw` must be an instantiated graph that outlives the result and that no one launches at the same time.
    pub unsafe fn from_raw(raw: u64) -> GraphExec {
        GraphExec { raw: Mutex::new(raw as usize as sys::CUgraphExec), owner: None }
    }

    /// Puts the graph on a stream.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        let context = stream.context();
        if let Some(owner) = &self.owner {
            context.same("the graph", &owner.context)?;
        }
        let _entered = context.enter()?;
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
