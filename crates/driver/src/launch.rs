#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use ptx::{Arg, Kernel, Machine};

use crate::module::{Loaded, Resources, resources};
use crate::{Buffer, DriverError, Gpu};

/// Shared memory that a kernel may use without asking for more.
const DEFAULT_SHARED: u32 = 48 * 1024;

impl Gpu {
    /// Compiles the kernel unless that is done already, and says what it uses.
    ///
    /// # Errors
    /// [`DriverError::Compile`] with the compiler's log.
    pub fn load(&mut self, kernel: &Kernel) -> Result<Resources, DriverError> {
        let function = self.function(kernel)?;
        resources(function)
    }

    fn function(&mut self, kernel: &Kernel) -> Result<sys::CUfunction, DriverError> {
        let text = kernel.module.to_string();
        if !self.loaded.contains_key(&text) {
            let loaded = Loaded::compile(&text, &kernel.module.target.to_string())?;
            self.loaded.insert(text.clone(), loaded);
        }
        let loaded = self.loaded.get_mut(&text).ok_or_else(|| DriverError::Contract {
            entry: kernel.entry.clone(),
            reason: "the module is not loaded".to_owned(),
        })?;
        loaded.function(&kernel.entry)
    }

    /// Runs the kernel `launches` times in a row and gives the mean time of one, µs, between two events on the stream. One
    /// launch before is not counted. Buffers stay where they are, so what fits in L2 is warm.
    ///
    /// # Errors
    /// As [`Machine::launch`].
    pub fn time(
        &mut self,
        kernel: &Kernel,
        buffers: &mut [&mut Buffer],
        launches: u32,
    ) -> Result<f64, DriverError> {
        let stream = result::stream::null();
        let function = self.prepare(kernel, buffers)?;
        enqueue(function, kernel, buffers, stream)?;
        let start = Event::record(stream)?;
        for _ in 0..launches {
            enqueue(function, kernel, buffers, stream)?;
        }
        Ok(start.until(&Event::record(stream)?)? / f64::from(launches.max(1)))
    }

    /// The kernel's function, compiled and ready for its shared memory, after the contract was checked.
    fn prepare(&mut self, kernel: &Kernel, buffers: &[&mut Buffer]) -> Result<sys::CUfunction, DriverError> {
        check(kernel, buffers)?;
        let function = self.function(kernel)?;
        let shared = kernel.launch.dynamic_shared;
        if shared > DEFAULT_SHARED {
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            unsafe { result::function::set_function_attribute(function, which, shared as i32) }
                .map_err(DriverError::call("cuFuncSetAttribute"))?;
        }
        Ok(function)
    }
}

/// Puts what [`Gpu::prepare`] gave on the stream, without waiting for it.
fn enqueue(
    function: sys::CUfunction,
    kernel: &Kernel,
    buffers: &[&mut Buffer],
    stream: sys::CUstream,
) -> Result<(), DriverError> {
    let launch = kernel.launch;
    let mut values: Vec<u64> = kernel.args.iter().map(|arg| value(*arg, buffers)).collect();
    let mut params: Vec<*mut c_void> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
    let mut attribute: sys::CUlaunchAttribute = cluster_attribute(kernel);
    let config = sys::CUlaunchConfig {
        gridDimX: launch.grid.0,
        gridDimY: launch.grid.1,
        gridDimZ: launch.grid.2,
        blockDimX: launch.block.0,
        blockDimY: launch.block.1,
        blockDimZ: launch.block.2,
        sharedMemBytes: launch.dynamic_shared,
        hStream: stream,
        attrs: &mut attribute,
        numAttrs: u32::from(launch.cluster.count() > 1),
    };
    // SAFETY: `params` has one pointer per parameter of the entry (`check` compared count and sizes), each to 8 live
    // bytes; the driver copies them before it returns. What the kernel does with its pointers is the kernel's proof, not
    // ours.
    let status =
        unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) };
    status.result().map_err(DriverError::call("cuLaunchKernelEx"))
}

/// A point in the stream's time, destroyed when dropped.
struct Event(sys::CUevent);

impl Event {
    /// A point after everything that was put on the stream.
    fn record(stream: sys::CUstream) -> Result<Event, DriverError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(DriverError::call("cuEventCreate"))?;
        let event = Event(event);
        // SAFETY: the event was just made; the stream is the default one of the current context.
        unsafe { result::event::record(event.0, stream) }.map_err(DriverError::call("cuEventRecord"))?;
        Ok(event)
    }

    /// µs from `self` to `later`, which is waited for.
    fn until(&self, later: &Event) -> Result<f64, DriverError> {
        // SAFETY: both events are alive and recorded.
        unsafe {
            result::event::synchronize(later.0).map_err(DriverError::call("cuEventSynchronize"))?;
            result::event::elapsed(self.0, later.0)
        }
        .map(|ms| f64::from(ms) * 1e3)
        .map_err(DriverError::call("cuEventElapsedTime"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once. A failure here has no one left to tell.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

impl Machine for Gpu {
    type Buffer = Buffer;
    type Error = DriverError;

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, DriverError> {
        Buffer::allocate(bytes)
    }

    fn upload(&mut self, buffer: &mut Buffer, data: &[u8]) -> Result<(), DriverError> {
        buffer.upload(data)
    }

    fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Buffer]) -> Result<(), DriverError> {
        let function = self.prepare(kernel, buffers)?;
        enqueue(function, kernel, buffers, result::stream::null())?;
        result::ctx::synchronize().map_err(DriverError::call("cuCtxSynchronize"))
    }

    fn download(&mut self, buffer: &Buffer, data: &mut [u8]) -> Result<(), DriverError> {
        buffer.download(data)
    }
}

/// Holds the contract against the entry and the buffers.
fn check(kernel: &Kernel, buffers: &[&mut Buffer]) -> Result<(), DriverError> {
    let refuse = |reason: String| DriverError::Contract { entry: kernel.entry.clone(), reason };
    let entry = kernel
        .module
        .function(&kernel.entry)
        .ok_or_else(|| refuse("the module has no entry of that name".to_owned()))?;
    let wanted: Vec<u32> = entry.params.iter().map(ptx::Param::bytes).collect();
    let given: Vec<u32> = kernel.args.iter().map(|arg| arg.bytes()).collect();
    if wanted != given {
        return Err(refuse(format!("its parameters take {wanted:?} bytes, the contract gives {given:?}")));
    }
    if buffers.len() != kernel.buffers.len() {
        return Err(refuse(format!(
            "it takes {} buffers, {} are given",
            kernel.buffers.len(),
            buffers.len()
        )));
    }
    for (spec, buffer) in kernel.buffers.iter().zip(buffers) {
        if buffer.bytes() < spec.bytes {
            let (name, need, have) = (&spec.name, spec.bytes, buffer.bytes());
            return Err(refuse(format!("buffer {name} needs {need} bytes and has {have}")));
        }
    }
    for arg in &kernel.args {
        if let Arg::Buffer { index, .. } = arg
            && *index >= buffers.len()
        {
            return Err(refuse(format!("an argument names buffer {index} of {}", buffers.len())));
        }
    }
    Ok(())
}

/// The bits of an argument; the driver reads as many low bytes as the parameter has.
fn value(arg: Arg, buffers: &[&mut Buffer]) -> u64 {
    match arg {
        Arg::Buffer { index, offset } => buffers[index].address.wrapping_add(offset),
        Arg::Null => 0,
        Arg::U32(v) => u64::from(v),
        Arg::I32(v) => u64::from(v as u32),
        Arg::U64(v) => v,
        Arg::I64(v) => v as u64,
        Arg::F32(v) => u64::from(v.to_bits()),
    }
}

fn cluster_attribute(kernel: &Kernel) -> sys::CUlaunchAttribute {
    // SAFETY: a plain C struct for which all-zero bytes are a valid value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    let cluster = kernel.launch.cluster;
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = cluster.0;
    attribute.value.clusterDim.y = cluster.1;
    attribute.value.clusterDim.z = cluster.2;
    attribute
}
