//! A GPU as a machine for checks: launches kernels one after the other and waits for each.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ptx::{Kernel, Machine, Target};

use crate::{
    Buffer, Call, Context, DeviceInfo, DeviceSlice, DriverError, Event, Expect, Function, Printed, Resources,
    Stream,
};

/// Time limit of a kernel on a machine for checks. A kernel that takes longer is considered to be in an
/// endless loop.
const LIMIT: Duration = Duration::from_secs(30);

/// A GPU as a machine that runs kernels, one after the other, on the default stream. It implements
/// [`ptx::Machine`], as the emulator does, for checks and measurements. [`Function`] is the fast,
/// asynchronous way.
pub struct Gpu {
    context: Arc<Context>,
    stream: Stream,
    /// The loaded functions, by PTX text and name of the entry.
    loaded: HashMap<(String, String), Function>,
}

impl Gpu {
    /// Opens the device with this ordinal; 0 is the first.
    ///
    /// # Errors
    /// As [`Context::open`].
    pub fn open(ordinal: i32) -> Result<Gpu, DriverError> {
        let context = Context::open(ordinal)?;
        Ok(Gpu { stream: Stream::default_of(&context), context, loaded: HashMap::new() })
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.context.info()
    }

    /// The device's context, for streams, graphs and functions.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The device's portable target: `sm_90`, not `sm_90a`.
    pub fn target(&self) -> Target {
        self.info().target()
    }

    /// Compiles the kernel, if it is not loaded yet, and returns its resources.
    ///
    /// # Errors
    /// [`DriverError::Compile`] with the compiler's log.
    pub fn load(&mut self, kernel: &Kernel) -> Result<Resources, DriverError> {
        Ok(self.function(kernel)?.resources())
    }

    /// Runs the kernel `launches` times in a row and returns the mean time of a launch in µs, measured
    /// between two events on the stream. One launch before the measurement is not counted. The buffers do not
    /// change, so data that fits in L2 is warm.
    ///
    /// # Errors
    /// As [`Machine::launch`].
    pub fn time(
        &mut self,
        kernel: &Kernel,
        buffers: &mut [&mut Buffer],
        launches: u32,
    ) -> Result<f64, DriverError> {
        let (function, slices) = self.prepare(kernel, buffers)?;
        let call = Call::of(kernel);
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        let enqueue = || function.launch(&self.stream, &call, &slices);
        enqueue()?;
        start.record(&self.stream)?;
        for _ in 0..launches {
            enqueue()?;
        }
        end.record(&self.stream)?;
        Ok(start.elapsed_us(&end)? / f64::from(launches.max(1)))
    }

    /// Drops the loaded kernels. A [`Function`] that a caller holds stays loaded.
    pub fn unload(&mut self) {
        self.loaded.clear();
    }

    /// The kernel's function; loads it on the first call.
    ///
    /// # Errors
    /// As [`Gpu::load`].
    pub fn function(&mut self, kernel: &Kernel) -> Result<Function, DriverError> {
        let printed = Printed::new(kernel);
        let expect = Expect::of(&kernel.launch);
        let key = (printed.text().to_owned(), kernel.entry.clone());
        if let Some(function) = self.loaded.get(&key) {
            function.allow_shared(expect.dynamic_shared)?;
            return Ok(function.clone());
        }
        let function = Function::load_printed(&self.context, &printed, &expect)?;
        self.loaded.insert(key, function.clone());
        Ok(function)
    }

    /// Checks the launch contract and returns the kernel's function and the memory of its buffers.
    fn prepare<'b>(
        &mut self,
        kernel: &Kernel,
        buffers: &'b [&mut Buffer],
    ) -> Result<(Function, Vec<DeviceSlice<'b>>), DriverError> {
        let slices: Vec<DeviceSlice<'b>> = buffers.iter().map(|buffer| buffer.slice()).collect();
        check(kernel, &slices)?;
        Ok((self.function(kernel)?, slices))
    }
}

impl Machine for Gpu {
    type Buffer = Buffer;
    type Error = DriverError;

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, DriverError> {
        Buffer::new(&self.context, bytes)
    }

    fn upload(&mut self, buffer: &mut Buffer, data: &[u8]) -> Result<(), DriverError> {
        buffer.upload(data)
    }

    fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Buffer]) -> Result<(), DriverError> {
        let (function, slices) = self.prepare(kernel, buffers)?;
        function.launch(&self.stream, &Call::of(kernel), &slices)?;
        self.stream.synchronize_within(LIMIT)
    }

    fn download(&mut self, buffer: &Buffer, data: &mut [u8]) -> Result<(), DriverError> {
        buffer.download(data)
    }
}

/// Checks the launch contract against the buffers.
fn check(kernel: &Kernel, slices: &[DeviceSlice<'_>]) -> Result<(), DriverError> {
    let refuse = |reason: String| DriverError::Contract { entry: kernel.entry.clone(), reason };
    if slices.len() != kernel.buffers.len() {
        return Err(refuse(format!("it takes {} buffers, {} are given", kernel.buffers.len(), slices.len())));
    }
    for (spec, slice) in kernel.buffers.iter().zip(slices) {
        if slice.bytes() < spec.bytes {
            let (name, need, have) = (&spec.name, spec.bytes, slice.bytes());
            return Err(refuse(format!("buffer {name} needs {need} bytes and has {have}")));
        }
    }
    Ok(())
}
