//! What is asked of a GPU.

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
use crate::bench::gpu::{Contestant, ContestantError, GpuStage};
use crate::bench::{Deck, Mode, Peaks, Race, RaceError, Rules, race, suites};
use crate::evolve::evaluate::subject::Fault;
use crate::launchfile::Bound;
use crate::ledger::{Environment, TimeKind};
use crate::provenance::Provenance;

/// What came of building a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// A thread's registers.
    pub registers: u32,
    /// Bytes of local memory of a thread: spills, and arrays that are its own.
    pub local_bytes: u32,
    /// Bytes of static shared memory of a CTA.
    pub static_shared: u32,
    /// The machine code, where it is at hand.
    pub code: Option<Vec<u8>>,
}

/// A GPU, or what stands for one. After a fault with the reason `hangs` or `crashed` it is of no use to this process any more.
pub trait Card: Send {
    /// How the gate runs kernels on it.
    type Machine: Machine;

    /// What plans are checked against.
    fn arch(&self) -> Arch;

    /// Where figures come from.
    fn environment(&self) -> Environment;

    /// Whether its times are measured.
    fn kind(&self) -> TimeKind;

    /// The machine.
    fn machine(&mut self) -> &mut Self::Machine;

    /// What a machine's error says of the kernel that ran.
    fn fault(error: <Self::Machine as Machine>::Error) -> Fault;

    /// Compiles a kernel, or takes it from a cache, so that it is at hand when it is to run.
    ///
    /// # Errors
    /// When its compiler refuses it, or it takes more than there is.
    fn build(&mut self, kernel: &Kernel) -> Result<Built, Fault>;

    /// Times of a call, µs, one for each sample, in about as many seconds; `contents` is what its buffers hold.
    ///
    /// # Errors
    /// When the kernel fails.
    fn time(&mut self, bound: &Bound, contents: &[Vec<u8>], seconds: f64) -> Result<Vec<f64>, Fault>;

    /// Races a candidate, which comes first, against an incumbent, and says before each turn that one begins.
    ///
    /// # Errors
    /// When the device breaks down, or one of the two cannot race.
    fn race(
        &mut self,
        deck: &Deck,
        pair: [&Bound; 2],
        seconds: f64,
        turn: &mut dyn FnMut(),
    ) -> Result<Race, Fault>;
}

/// Work of one sample, µs: enough for the timer, whatever the kernel takes.
const SAMPLE_US: f64 = 150.0;
/// Most calls of one sample.
const MOST_CALLS: f64 = 40.0;
/// Samples: no interval without the least, no use of more than the most.
const SAMPLES: std::ops::RangeInclusive<usize> = 7..=60;

/// Functions that stay loaded.
const KEPT: u32 = 32;

/// A GPU through its driver.
pub struct GpuCard {
    gpu: Gpu,
    arch: Arch,
    stream: Stream,
    events: [Event; 2],
    /// Functions that were asked for since modules were unloaded.
    built: u32,
}

impl GpuCard {
    /// Opens a device; 0 is the first.
    ///
    /// # Errors
    /// When there is none, or it is not one that kernels are made for.
    pub fn open(ordinal: i32) -> Result<GpuCard, Fault> {
        let gpu = Gpu::open(ordinal).map_err(|error| Fault::new("device", error))?;
        let (context, info) = (gpu.context().clone(), gpu.info().clone());
        let arch = Arch::of(info.sm()).ok_or_else(|| {
            let accepted = Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", ");
            Fault::new("device", format!("{} is sm_{}; accepted: {accepted}", info.name, info.sm()))
        })?;
        let made = |error: DriverError| told(error);
        Ok(GpuCard {
            arch: Arch { multiprocessors: info.sms, ..arch },
            stream: Stream::new(&context).map_err(made)?,
            events: [Event::new(&context).map_err(made)?, Event::new(&context).map_err(made)?],
            gpu,
            built: 0,
        })
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        self.gpu.info()
    }

    fn function(&mut self, kernel: &Kernel) -> Result<Function, DriverError> {
        // A search makes thousands, and each takes memory of the device.
        self.built += 1;
        if self.built > KEPT {
            self.gpu.unload();
            self.built = 0;
        }
        self.gpu.function(kernel)
    }

    /// µs of a graph's launch.
    fn sample(&self, graph: &GraphExec) -> Result<f64, DriverError> {
        let [start, end] = &self.events;
        // Warms L2, and keeps the device busy while the host puts the rest in line.
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
        let function = self.function(&bound.kernel)?;
        let context = self.gpu.context();
        let mut buffers = Vec::with_capacity(contents.len());
        for bytes in contents {
            let buffer = Buffer::new(context, bytes.len())?;
            self.stream.upload(buffer.slice(), bytes)?;
            buffers.push(buffer);
        }
        let slices: Vec<DeviceSlice> = buffers.iter().map(Buffer::slice).collect();
        let call = Call::of(&bound.kernel);
        let graph = |calls: u32| {
            Graph::capture(&self.stream, |stream| -> Result<(), DriverError> {
                (0..calls).try_for_each(|_| function.launch(stream, &call, &slices))
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

/// A driver's error as a candidate's fate.
pub(super) fn told(error: DriverError) -> Fault {
    let reason = match &error {
        error if error.is_hang() => "hangs",
        DriverError::Poisoned { .. } => "crashed",
        DriverError::Compile { .. } => "compile",
        DriverError::Admission { .. } => "resources",
        DriverError::Contract { .. } | DriverError::TensorMap(_) | DriverError::Call { .. } => "launch",
        DriverError::OutOfMemory { .. } | DriverError::Copy { .. } => "memory",
        DriverError::NoDriver
        | DriverError::DriverTooOld { .. }
        | DriverError::MissingSymbol { .. }
        | DriverError::NoDevice { .. }
        | DriverError::NoPermission { .. }
        | DriverError::Forked
        | DriverError::OtherDevice { .. } => "device",
    };
    Fault::new(reason, error)
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

    fn fault(error: DriverError) -> Fault {
        told(error)
    }

    fn build(&mut self, kernel: &Kernel) -> Result<Built, Fault> {
        let resources = self.function(kernel).map_err(told)?.resources();
        let info = self.gpu.info();
        // What the driver's linker made is in the cache; what its loader makes it keeps to itself.
        let key = Key::new(&kernel.module.to_string(), info.sm(), &info.compiler());
        Ok(Built {
            registers: resources.registers,
            local_bytes: resources.local,
            static_shared: resources.shared,
            code: self.gpu.context().cache().get(&key),
        })
    }

    fn time(&mut self, bound: &Bound, contents: &[Vec<u8>], seconds: f64) -> Result<Vec<f64>, Fault> {
        self.samples(bound, contents, seconds).map_err(told)
    }

    fn race(
        &mut self,
        deck: &Deck,
        pair: [&Bound; 2],
        seconds: f64,
        turn: &mut dyn FnMut(),
    ) -> Result<Race, Fault> {
        let context = self.gpu.context().clone();
        let inputs = inputs(&context, &deck.problem).map_err(told)?;
        let slices = [inputs[0].slice(), inputs[1].slice(), inputs[2].slice()];
        let calls = suites::calls(&deck.problem);
        let contestant = |bound: &Bound, name: &str| {
            Contestant::kernel(&self.stream, bound, slices, calls, Some(name), None).map_err(|error| {
                match error {
                    ContestantError::Driver(error) => told(error),
                    other => Fault::new("launch", other),
                }
            })
        };
        let contestants = [contestant(pair[0], "candidate")?, contestant(pair[1], "incumbent")?];
        let rules = Rules::new(Mode::Warm, seconds, Peaks::of(&context.info().name));
        let entrants = contestants.each_ref().map(|contestant| contestant.entrant().clone());
        let mut stage = Watched { stage: GpuStage::new(&context, &contestants).map_err(told)?, turn };
        race(&mut stage, deck, &entrants, &rules).map_err(|error| match error {
            RaceError::Stage(error) => told(error),
            RaceError::Nobody => Fault::new("crashed", error),
        })
    }
}

/// Device memory for a problem's inputs.
fn inputs(context: &Arc<Context>, problem: &Problem) -> Result<[Buffer; 3], DriverError> {
    let buffer = |tensor: Tensor| {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        Buffer::new(context, elements * problem.dtype.bytes())
    };
    Ok([buffer(Tensor::Q)?, buffer(Tensor::K)?, buffer(Tensor::V)?])
}
