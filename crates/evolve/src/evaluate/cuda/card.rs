//! The interface to a GPU that evaluations use.

use std::sync::Arc;
use std::time::Instant;

use driver::{
    Buffer, Call, Context, DeviceInfo, DeviceSlice, DriverError, Event, Function, Gpu, Graph, GraphExec, Key,
    Stream,
};
use kernels::Arch;
use problem::{Problem, Tensor};
use ptx::{Kernel, Machine};

use super::watched::Watched;
use crate::evaluate::subject::TaskFault;
use bench::gpu::{Contestant, ContestantError, GpuStage};
use bench::provenance::Provenance;
use bench::{Mode, Peaks, Race, RaceError, RaceInputs, Rules, race, suites};
use check::launchfile::Bound;
use ledger::{Environment, Reason, TimeKind};

/// The resources of a compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread, bytes: spills and private arrays.
    pub local_bytes: u32,
    /// Static shared memory per CTA, bytes.
    pub static_shared: u32,
    /// The machine code, if it is available.
    pub code: Option<Vec<u8>>,
}

/// A GPU or a substitute. After a fault with the reason `hangs` or `crashed`, this process cannot use the
/// device any more.
pub trait Card: Send {
    /// The machine on which the gate runs kernels.
    type Machine: Machine;

    /// The architecture that plans are checked against.
    fn arch(&self) -> Arch;

    /// The environment of the figures.
    fn environment(&self) -> Environment;

    /// Whether times are measured or predicted.
    fn kind(&self) -> TimeKind;

    fn machine(&mut self) -> &mut Self::Machine;

    /// Translates a machine's error into the fault of a kernel.
    fn fault(error: <Self::Machine as Machine>::Error) -> TaskFault;

    /// Compiles a kernel or loads it from a cache, so that it is ready to run.
    ///
    /// # Errors
    /// When the compiler rejects the kernel, or it needs more resources than the device has.
    fn build(&mut self, kernel: &Kernel) -> Result<Built, TaskFault>;

    /// Times of a call, µs, one per sample, for about `seconds`. `contents` are the contents of the kernel's
    /// buffers.
    ///
    /// # Errors
    /// When the kernel fails.
    fn time(&mut self, bound: &Bound, contents: &[Vec<u8>], seconds: f64) -> Result<Vec<f64>, TaskFault>;

    /// Races a candidate, which comes first, against an incumbent. Calls `turn` before each turn.
    ///
    /// # Errors
    /// When the device fails, or one of the two cannot race.
    fn race(
        &mut self,
        drawn: &RaceInputs,
        pair: [&Bound; 2],
        seconds: f64,
        turn: &mut dyn FnMut(),
    ) -> Result<Race, TaskFault>;
}

/// Target duration of one sample, µs: long enough for the timer.
const SAMPLE_US: f64 = 150.0;
/// Maximum number of calls in one sample.
const MOST_CALLS: f64 = 40.0;
/// Range of the number of samples: fewer give no interval, and more bring no benefit.
const SAMPLES: std::ops::RangeInclusive<usize> = 7..=60;

/// Number of functions after which loaded modules are unloaded.
const KEPT: u32 = 32;

/// A GPU through its driver.
pub struct GpuCard {
    gpu: Gpu,
    arch: Arch,
    stream: Stream,
    events: [Event; 2],
    /// Number of functions requested since modules were last unloaded.
    built: u32,
}

impl GpuCard {
    /// Opens a device; 0 is the first.
    ///
    /// # Errors
    /// When there is no such device, or no kernel supports its architecture.
    pub fn open(ordinal: i32) -> Result<GpuCard, TaskFault> {
        let gpu = Gpu::open(ordinal).map_err(|error| TaskFault::new(Reason::Device, error))?;
        let (context, info) = (gpu.context().clone(), gpu.info().clone());
        let arch = Arch::of(info.sm()).ok_or_else(|| {
            let accepted = Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", ");
            TaskFault::new(
                Reason::Device,
                format!("invalid value 'sm_{}' for {}: expected {accepted}", info.sm(), info.name),
            )
        })?;
        let made = |error: DriverError| fault_of(error);
        Ok(GpuCard {
            arch: Arch { multiprocessors: info.sms, ..arch },
            stream: Stream::new(&context).map_err(made)?,
            events: [Event::new(&context).map_err(made)?, Event::new(&context).map_err(made)?],
            gpu,
            built: 0,
        })
    }

    pub fn info(&self) -> &DeviceInfo {
        self.gpu.info()
    }

    fn function(&mut self, kernel: &Kernel) -> Result<Function, DriverError> {
        // A search builds thousands of kernels, and each takes device memory.
        self.built += 1;
        if self.built > KEPT {
            self.gpu.unload();
            self.built = 0;
        }
        self.gpu.function(kernel)
    }

    /// Time of one launch of a graph, µs.
    fn sample(&self, graph: &GraphExec) -> Result<f64, DriverError> {
        let [start, end] = &self.events;
        // The first launch warms L2, and keeps the device busy while the host queues the other launches.
        graph.launch(&self.stream)?;
        start.record(&self.stream)?;
        graph.launch(&self.stream)?;
        end.record(&self.stream)?;
        end.synchronize()?;
        start.elapsed_us(end)
    }

    fn samples(
        &mut self,
        bound: &Bound,
        contents: &[Vec<u8>],
        seconds: f64,
    ) -> Result<Vec<f64>, DriverError> {
        let mut steps = Vec::new();
        for kernel in bound.steps() {
            steps.push((self.function(kernel)?, Call::of(kernel)));
        }
        let context = self.gpu.context();
        let mut buffers = Vec::with_capacity(contents.len());
        for bytes in contents {
            let buffer = Buffer::new(context, bytes.len())?;
            self.stream.upload(buffer.slice(), bytes)?;
            buffers.push(buffer);
        }
        let slices: Vec<DeviceSlice> = buffers.iter().map(Buffer::slice).collect();
        let graph = |calls: u32| {
            Graph::capture(&self.stream, |stream| -> Result<(), DriverError> {
                let mut launches = (0..calls).flat_map(|_| &steps);
                launches.try_for_each(|(function, call)| function.launch(stream, call, &slices))
            })
        };
        let began = Instant::now();
        let one = self.sample(&graph(1)?)?;
        let calls = (SAMPLE_US / one.max(0.1)).clamp(1.0, MOST_CALLS) as u32;
        let graph = graph(calls)?;
        let mut samples = Vec::new();
        while samples.len() < *SAMPLES.start()
            || (samples.len() < *SAMPLES.end() && began.elapsed().as_secs_f64() < seconds)
        {
            samples.push(self.sample(&graph)? / f64::from(calls));
        }
        Ok(samples)
    }
}

/// Translates a driver's error into a candidate's fault.
pub(super) fn fault_of(error: DriverError) -> TaskFault {
    let reason = match &error {
        error if error.is_hang() => Reason::Hangs,
        DriverError::Poisoned { .. } => Reason::Crashed,
        DriverError::Compile { .. } => Reason::Compile,
        DriverError::Admission { .. } => Reason::Resources,
        DriverError::Contract { .. } | DriverError::TensorMap(_) | DriverError::Call { .. } => Reason::Launch,
        DriverError::OutOfMemory { .. } | DriverError::Copy { .. } => Reason::Memory,
        // No driver, no device, another device, a forked process: nothing that the candidate did.
        _ => Reason::Device,
    };
    TaskFault::new(reason, error)
}

impl Card for GpuCard {
    type Machine = Gpu;

    fn arch(&self) -> Arch {
        self.arch
    }

    fn environment(&self) -> Environment {
        let Provenance { device, driver, compiler, commit, .. } = Provenance::of_gpu(self.gpu.info());
        Environment { device, driver, compiler, commit }
    }

    fn kind(&self) -> TimeKind {
        TimeKind::Measured
    }

    fn machine(&mut self) -> &mut Gpu {
        &mut self.gpu
    }

    fn fault(error: DriverError) -> TaskFault {
        fault_of(error)
    }

    fn build(&mut self, kernel: &Kernel) -> Result<Built, TaskFault> {
        let resources = self.function(kernel).map_err(fault_of)?.resources();
        let info = self.gpu.info();
        // The cache holds code from the driver's linker. Code from the driver's loader cannot be read.
        let key = Key::new(&kernel.module.to_string(), info.sm(), &info.compiler());
        Ok(Built {
            registers: resources.registers,
            local_bytes: resources.local,
            static_shared: resources.shared,
            code: self.gpu.context().cache().get(&key),
        })
    }

    fn time(&mut self, bound: &Bound, contents: &[Vec<u8>], seconds: f64) -> Result<Vec<f64>, TaskFault> {
        self.samples(bound, contents, seconds).map_err(fault_of)
    }

    fn race(
        &mut self,
        drawn: &RaceInputs,
        pair: [&Bound; 2],
        seconds: f64,
        turn: &mut dyn FnMut(),
    ) -> Result<Race, TaskFault> {
        let context = self.gpu.context().clone();
        let inputs = inputs(&context, &drawn.problem).map_err(fault_of)?;
        let slices = [inputs[0].slice(), inputs[1].slice(), inputs[2].slice()];
        let calls = suites::calls(&drawn.problem);
        let contestant = |bound: &Bound, name: &str| {
            Contestant::kernel(&self.stream, bound, slices, calls, Some(name), None).map_err(|error| {
                match error {
                    ContestantError::Driver(error) => fault_of(error),
                    other => TaskFault::new(Reason::Launch, other),
                }
            })
        };
        let contestants = [contestant(pair[0], "candidate")?, contestant(pair[1], "incumbent")?];
        let rules = Rules::new(Mode::Warm, seconds, Peaks::of(&context.info().name));
        let entrants = contestants.each_ref().map(|contestant| contestant.entrant().clone());
        let mut stage = Watched { stage: GpuStage::new(&context, &contestants).map_err(fault_of)?, turn };
        race(&mut stage, drawn, &entrants, &rules).map_err(|error| match error {
            RaceError::Stage(error) => fault_of(error),
            RaceError::Nobody => TaskFault::new(Reason::Crashed, error),
        })
    }
}

/// Allocates device memory for a problem's inputs.
fn inputs(context: &Arc<Context>, problem: &Problem) -> Result<[Buffer; 3], DriverError> {
    let buffer = |tensor: Tensor| {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        Buffer::new(context, elements * problem.dtypes.of(tensor).bytes())
    };
    Ok([buffer(Tensor::Q)?, buffer(Tensor::K)?, buffer(Tensor::V)?])
}
