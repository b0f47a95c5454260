//! The race on a GPU. Every contestant is a CUDA graph that this module launches on its own stream between
//! its own events.

use std::sync::Arc;
use std::time::Instant;

use driver::{
    Buffer, Call, Context, DeviceSlice, DriverError, Event, Expect, Function, Graph, GraphExec, Stream,
};
use judge::values::{Inputs, Values};
use kernels::BufferKind;
use problem::{Operand, Problem, Tensor};
use serde_json::Value;

use super::race::{Race, RaceError, RaceInputs, Rules, race as run};
use super::row::Identity;
use super::sensors::{Reading, Sensors};
use super::stage::{Entrant, Slot, Stage, Timing, Work};
use crate::provenance::hash;
use check::launchfile::{Bound, Role};

/// Why a kernel or a library cannot race.
#[derive(Debug, thiserror::Error)]
pub enum ContestantError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The kernel takes a buffer that is not one of the problem's tensors.
    #[error("invalid buffer {0}: expected q, k, v, out or lse, the only buffers that a race fills and reads")]
    Buffer(String),
    /// A tensor's size differs from the span of its strides.
    #[error(
        "invalid value '{bytes}' for the bytes of {tensor}: expected {expected}, the span of its strides"
    )]
    Size {
        tensor: &'static str,
        /// Bytes given.
        bytes: usize,
        expected: usize,
    },
    /// The kernel comes without a problem, so its output cannot be judged.
    #[error(
        "the kernel was prepared without a problem, so its output cannot be checked: expected a \
    kernel prepared for a problem"
    )]
    NoProblem,
    /// A library has a name that is reserved for FlashCore kernels.
    #[error(transparent)]
    Name(#[from] super::stage::NotOurs),
}

/// Device memory of a contestant's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensors<'a> {
    pub q: DeviceSlice<'a>,
    pub k: DeviceSlice<'a>,
    pub v: DeviceSlice<'a>,
    pub out: DeviceSlice<'a>,
}

impl Tensors<'_> {
    fn check(&self, problem: &Problem) -> Result<(), ContestantError> {
        let all = [(Tensor::Q, self.q), (Tensor::K, self.k), (Tensor::V, self.v), (Tensor::Out, self.out)];
        for (tensor, slice) in all {
            let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
            let expected = elements * problem.dtypes.of(tensor).bytes();
            if slice.bytes() != expected {
                return Err(ContestantError::Size { tensor: tensor.name(), bytes: slice.bytes(), expected });
            }
        }
        Ok(())
    }
}

/// A contestant: its work captured in graphs, and the device memory of its tensors.
pub struct Contestant<'a> {
    entrant: Entrant,
    /// The race's problem with the strides of this contestant's tensors.
    problem: Problem,
    /// A graph of [`Entrant::calls`] calls.
    warm: GraphExec,
    /// A graph of one call.
    cold: GraphExec,
    inputs: [DeviceSlice<'a>; 3],
    out: Out<'a>,
    identity: Identity,
}

/// The memory of a contestant's output.
enum Out<'a> {
    Lent(DeviceSlice<'a>),
    Own(Buffer),
}

impl<'a> Contestant<'a> {
    /// A peer library as captured graphs: `warm` holds `calls` calls and `cold` holds one. The graphs read
    /// and write tensors with `problem`'s strides.
    ///
    /// # Errors
    /// When the name is reserved for FlashCore kernels or a tensor has the wrong size.
    pub fn peer(
        name: &str,
        problem: Problem,
        warm: GraphExec,
        calls: u32,
        cold: GraphExec,
        tensors: Tensors<'a>,
    ) -> Result<Contestant<'a>, ContestantError> {
        tensors.check(&problem)?;
        let (entrant, identity) = (Entrant::peer(name, calls)?, Identity::default());
        let Tensors { q, k, v, out } = tensors;
        Ok(Contestant { entrant, problem, warm, cold, inputs: [q, k, v], out: Out::Lent(out), identity })
    }

    /// A FlashCore program, loaded and captured here. It reads the given inputs and writes an output buffer
    /// of its own. `variant` and `plan` go into its name and its rows.
    ///
    /// # Errors
    /// When the driver rejects the kernel, or the kernel takes buffers other than a problem's tensors.
    pub fn kernel(
        stream: &Stream,
        bound: &Bound,
        inputs: [DeviceSlice<'a>; 3],
        calls: u32,
        variant: Option<&str>,
        plan: Option<Value>,
    ) -> Result<Contestant<'a>, ContestantError> {
        let problem = bound.problem.clone().ok_or(ContestantError::NoProblem)?;
        let context = stream.context();
        let steps = load(context, bound)?;
        let mut own = Vec::new();
        for (spec, role) in bound.kernel.buffers.iter().zip(&bound.roles) {
            own.push(match role {
                Role::Operand(operand) if operand.is_output(problem.pass.kind()) => {
                    Some(Buffer::new(context, spec.bytes)?)
                }
                Role::Operand(Operand::Tensor(_)) => None,
                Role::Internal(BufferKind::Scratch | BufferKind::Temporary(_)) => {
                    Some(Buffer::new(context, spec.bytes)?)
                }
                Role::Internal(BufferKind::Counter) => Some(Buffer::zeroed(context, spec.bytes)?),
                _ => {
                    return Err(ContestantError::Buffer(spec.name.clone()));
                }
            });
        }
        let slices: Vec<DeviceSlice<'_>> = (bound.roles.iter().zip(&own))
            .map(|(role, own)| match role {
                Role::Operand(Operand::Q) => inputs[0],
                Role::Operand(Operand::K) => inputs[1],
                Role::Operand(Operand::V) => inputs[2],
                _ => own.as_ref().map_or(DeviceSlice::EMPTY, Buffer::slice),
            })
            .collect();
        let place = bound.roles.iter().position(|role| *role == Role::Operand(Operand::OUT));
        let out = place.map_or(DeviceSlice::EMPTY, |place| slices[place]);
        Tensors { q: inputs[0], k: inputs[1], v: inputs[2], out }.check(&problem)?;
        let (warm, cold) = (capture(stream, &steps, calls, &slices)?, capture(stream, &steps, 1, &slices)?);
        // The graphs keep the other buffers alive.
        let out = place.and_then(|place| own.swap_remove(place));
        Ok(Contestant {
            entrant: Entrant::ours(variant, calls),
            warm,
            cold,
            problem,
            inputs,
            out: out.map_or(Out::Lent(DeviceSlice::EMPTY), Out::Own),
            identity: Identity { plan, kernel_hash: Some(hash(bound.kernel.module.to_string().as_bytes())) },
        })
    }

    pub fn entrant(&self) -> &Entrant {
        &self.entrant
    }

    /// The plan and the hash that go into the contestant's rows.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    fn inputs(&self) -> [(Tensor, DeviceSlice<'a>); 3] {
        let [q, k, v] = self.inputs;
        [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v)]
    }

    fn out(&self) -> DeviceSlice<'_> {
        match &self.out {
            Out::Lent(slice) => *slice,
            Out::Own(buffer) => buffer.slice(),
        }
    }
}

/// Loads the kernels of a program.
fn load(context: &Arc<Context>, bound: &Bound) -> Result<Vec<(Function, Call)>, DriverError> {
    let steps = bound.steps();
    let loaded = steps
        .map(|kernel| Ok((Function::load(context, kernel, &Expect::of(&kernel.launch))?, Call::of(kernel))));
    loaded.collect()
}

/// A graph of `calls` calls of a program, each of which launches all kernels.
fn capture(
    stream: &Stream,
    steps: &[(Function, Call)],
    calls: u32,
    slices: &[DeviceSlice<'_>],
) -> Result<GraphExec, DriverError> {
    Graph::capture(stream, |stream| {
        let mut launches = (0..calls).flat_map(|_| steps);
        launches.try_for_each(|(function, call)| function.launch(stream, call, slices))
    })
}

/// Races contestants on a device, on a stream of its own.
///
/// # Errors
/// When the driver fails. Times taken before then do not count.
pub fn race(
    context: &Arc<Context>,
    drawn: &RaceInputs,
    contestants: &[Contestant<'_>],
    rules: &Rules,
) -> Result<Race, RaceError<DriverError>> {
    let mut stage = GpuStage::new(context, contestants).map_err(RaceError::Stage)?;
    let entrants: Vec<Entrant> = contestants.iter().map(|c| c.entrant.clone()).collect();
    run(&mut stage, drawn, &entrants, rules)
}

/// Bytes written to flush L2: several times the size of any L2, and enough work to keep the device busy while
/// the host queues the timed work.
const FLUSH_BYTES: usize = 256 << 20;

/// A GPU as a [`Stage`].
pub struct GpuStage<'a> {
    contestants: &'a [Contestant<'a>],
    stream: Stream,
    sources: Vec<Source<'a>>,
    flush: Buffer,
    start: Event,
    end: Event,
    sensors: Sensors,
    /// Whether persisting L2 lines can be reset: from sm_80 on.
    resets_persisting: bool,
}

/// Input tensors that contestants share, and two further sets of values for them.
struct Source<'a> {
    problem: Problem,
    live: [(Tensor, DeviceSlice<'a>); 3],
    staged: [[Buffer; 3]; 2],
}

impl<'a> Source<'a> {
    fn new(context: &Arc<Context>, contestant: &Contestant<'a>) -> Result<Source<'a>, DriverError> {
        let live = contestant.inputs();
        let set = || -> Result<[Buffer; 3], DriverError> {
            let buffer = |i: usize| Buffer::new(context, live[i].1.bytes());
            Ok([buffer(0)?, buffer(1)?, buffer(2)?])
        };
        Ok(Source { problem: contestant.problem.clone(), live, staged: [set()?, set()?] })
    }
}

impl<'a> GpuStage<'a> {
    /// Allocates the staging memory for the inputs of all contestants.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(context: &Arc<Context>, contestants: &'a [Contestant<'a>]) -> Result<Self, DriverError> {
        let mut sources: Vec<Source<'a>> = Vec::new();
        for contestant in contestants {
            let live = contestant.inputs();
            let known =
                |s: &Source<'_>| s.live == live && strides(&s.problem) == strides(&contestant.problem);
            if !sources.iter().any(known) {
                sources.push(Source::new(context, contestant)?);
            }
        }
        Ok(GpuStage {
            contestants,
            stream: Stream::new(context)?,
            sources,
            flush: Buffer::new(context, FLUSH_BYTES.max(4 * context.info().l2))?,
            start: Event::new(context)?,
            end: Event::new(context)?,
            sensors: Sensors::of(&context.info().uuid),
            resets_persisting: context.info().sm() >= 80,
        })
    }

    fn launch(&self, who: usize, work: Work) -> Result<(), DriverError> {
        let contestant = &self.contestants[who];
        match work {
            Work::Single => contestant.cold.launch(&self.stream),
            Work::Batches(batches) => (0..batches).try_for_each(|_| contestant.warm.launch(&self.stream)),
        }
    }
}

fn strides(problem: &Problem) -> [problem::Strides; 3] {
    [problem.q, problem.k, problem.v]
}

impl Stage for GpuStage<'_> {
    type Error = DriverError;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), DriverError> {
        for source in &self.sources {
            for ((tensor, _), buffer) in source.live.iter().zip(&source.staged[slot as usize]) {
                let laid = inputs[(*tensor).into()].clone().scatter(&source.problem, *tensor);
                self.stream.upload(buffer.slice(), &laid.to_bytes())?;
            }
        }
        Ok(())
    }

    fn load(&mut self, slot: Slot) -> Result<(), DriverError> {
        for source in &self.sources {
            for ((_, live), staged) in source.live.iter().zip(&source.staged[slot as usize]) {
                if live.bytes() > 0 {
                    self.stream.copy(*live, staged.slice())?;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DriverError> {
        let context = self.stream.context();
        if self.resets_persisting
            && let Err(error) = context.reset_persisting_l2()
        {
            // A device that cannot reset persisting L2 lines has none. An error of a poisoned context is
            // passed on.
            if context.poisoned().is_some() {
                return Err(error);
            }
            self.resets_persisting = false;
        }
        self.stream.fill(self.flush.slice(), 0x5a)
    }

    fn poison(&mut self, who: usize) -> Result<(), DriverError> {
        // A pattern of all ones is NaN in f16, bf16 and f32.
        self.stream.fill(self.contestants[who].out(), 0xff)
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), DriverError> {
        self.launch(who, work)
    }

    fn time(&mut self, who: usize, work: Work) -> Result<Timing, DriverError> {
        self.start.record(&self.stream)?;
        self.launch(who, work)?;
        self.end.record(&self.stream)?;
        self.start.synchronize()?;
        let seen = Instant::now();
        self.end.synchronize()?;
        let host_us = seen.elapsed().as_secs_f64() * 1e6;
        Ok(Timing { us: self.start.elapsed_us(&self.end)?, host_us })
    }

    fn output(&mut self, who: usize) -> Result<Values, DriverError> {
        let contestant = &self.contestants[who];
        let mut bytes = vec![0; contestant.out().bytes()];
        self.stream.download(contestant.out(), &mut bytes)?;
        Ok(Values::from_bytes(contestant.problem.dtypes.out, &bytes).gather(&contestant.problem, Tensor::Out))
    }

    fn read(&mut self) -> Reading {
        self.sensors.read()
    }
}

/// Why a [`Workbench`] cannot use a kernel.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No kernel with this number was prepared.
    #[error(
        "invalid value '{number}' for the number of a kernel: expected less than {count}, the number of \
        prepared kernels"
    )]
    Number {
        number: usize,
        /// Number of prepared kernels.
        count: usize,
    },
}

/// Kernels on a device that are timed one at a time. A race does not apply, because they compute different
/// things.
pub struct Workbench {
    stream: Stream,
    start: Event,
    end: Event,
    busy: Buffer,
    ready: Vec<Ready>,
}

struct Ready {
    steps: Vec<(Function, Call)>,
    buffers: Vec<Buffer>,
    /// The captured graph with its number of calls.
    graph: Option<(u32, GraphExec)>,
}

impl Workbench {
    /// Opens a workbench on a device.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn open(ordinal: i32) -> Result<Workbench, WorkbenchError> {
        let context = Context::open(ordinal)?;
        Ok(Workbench {
            stream: Stream::new(&context)?,
            start: Event::new(&context)?,
            end: Event::new(&context)?,
            busy: Buffer::new(&context, FLUSH_BYTES)?,
            ready: Vec::new(),
        })
    }

    pub fn info(&self) -> &driver::DeviceInfo {
        self.stream.context().info()
    }

    /// Loads a program and allocates its buffers with the given contents.
    ///
    /// # Errors
    /// When the driver rejects the kernel or memory is exhausted.
    pub fn prepare(&mut self, bound: &Bound, contents: &[Vec<u8>]) -> Result<(), WorkbenchError> {
        let context = self.stream.context();
        let steps = load(context, bound)?;
        let mut buffers = Vec::new();
        for bytes in contents {
            let buffer = Buffer::new(context, bytes.len())?;
            self.stream.upload(buffer.slice(), bytes)?;
            buffers.push(buffer);
        }
        self.ready.push(Ready { steps, buffers, graph: None });
        Ok(())
    }

    /// Mean time of a call, µs, over `calls` calls in one graph. An untimed launch of the graph goes first.
    ///
    /// # Errors
    /// When no kernel has this number, or the kernel fails.
    pub fn time(&mut self, number: usize, calls: u32) -> Result<f64, WorkbenchError> {
        let count = self.ready.len();
        let ready = self.ready.get_mut(number).ok_or(WorkbenchError::Number { number, count })?;
        if ready.graph.as_ref().is_none_or(|(of, _)| *of != calls) {
            let slices: Vec<DeviceSlice<'_>> = ready.buffers.iter().map(Buffer::slice).collect();
            let graph = capture(&self.stream, &ready.steps, calls, &slices)?;
            ready.graph = Some((calls, graph));
        }
        let Some((_, graph)) = &ready.graph else { return Ok(f64::NAN) };
        // Keeps the device busy while the host queues the timed work.
        self.stream.fill(self.busy.slice(), 0x5a)?;
        graph.launch(&self.stream)?;
        self.start.record(&self.stream)?;
        graph.launch(&self.stream)?;
        self.end.record(&self.stream)?;
        Ok(self.start.elapsed_us(&self.end)? / f64::from(calls.max(1)))
    }

    /// The contents of a kernel's buffers.
    ///
    /// # Errors
    /// When no kernel has this number, or a kernel failed.
    pub fn contents(&mut self, number: usize) -> Result<Vec<Vec<u8>>, WorkbenchError> {
        let count = self.ready.len();
        let ready = self.ready.get(number).ok_or(WorkbenchError::Number { number, count })?;
        let mut contents = Vec::new();
        for buffer in &ready.buffers {
            let mut bytes = vec![0; buffer.bytes()];
            self.stream.download(buffer.slice(), &mut bytes)?;
            contents.push(bytes);
        }
        Ok(contents)
    }
}
