//! Plans on the device: compiled by many processes, compared with a plan that is known to be right, and
//! timed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use check::gate::contents;
use check::launchfile::Bound;
use driver::{
    Buffer, Call, Context, DeviceSlice, DriverError, Event, Expect, Function, Graph, GraphExec, Stream,
};
use kernels::{Arch, Family, Plan, ProgramBuffer, emit};
use problem::{DType, DTypes, Operand, Problem, Tensor};
use ptx::Kernel;

use super::Error;
use super::compiler::Compiler;

/// Number of compiling processes.
const COMPILERS: usize = 14;
/// Maximum absolute difference of two right outputs: some units in the last place of bf16 around 1.
const TOLERANCE: f32 = 0.03;
/// Bytes at each end of an output that are compared.
const SAMPLE_BYTES: usize = 1 << 19;
/// Minimum duration of a candidate's timing, µs.
const QUICK_US: f64 = 150.0;
/// A kernel that takes longer counts as hanging.
const HANGS: Duration = Duration::from_secs(4);

/// State on the device that is kept between problems.
pub struct Device {
    pub context: Arc<Context>,
    pub stream: Stream,
    pub arch: Arch,
    /// Functions by PTX and entry; `None` for rejected kernels.
    compiled: Mutex<HashMap<(String, String), Option<Function>>>,
    compilers: Vec<Compiler>,
    /// Some MiB of random values of each tensor, and their element type. Larger tensors repeat them.
    drawn: Mutex<(DTypes, Vec<Vec<u8>>)>,
}

/// A plan that runs.
pub struct Candidate {
    pub plan: Plan,
    pub registers: u32,
    /// Time of a call, µs.
    pub us: f64,
    /// The kernels in launch order.
    steps: Vec<(Function, Call)>,
    /// The program's buffers in order.
    buffers: Vec<Memory>,
}

/// A buffer of a program.
enum Memory {
    /// One of the problem's tensors, by its index.
    Tensor(usize),
    /// A counter, scratch memory or a temporary.
    Own(Buffer),
}

/// A problem's tensors, and the output of a right plan.
pub struct Tensors {
    problem: Problem,
    /// Q, K, V and O.
    buffers: Vec<Buffer>,
    right: Vec<f32>,
}

impl Device {
    pub fn open() -> Result<Device, Error> {
        let context = Context::open(0)?;
        let info = context.info();
        let arch = Arch::of(info.sm()).ok_or("this GPU is not a target of the kernels")?;
        let arch = Arch { multiprocessors: info.sms, ..arch };
        Ok(Device {
            stream: Stream::new(&context)?,
            context,
            arch,
            compiled: Mutex::default(),
            compilers: Vec::new(),
            drawn: Mutex::new((DType::F32.into(), Vec::new())),
        })
    }

    /// Starts the compiling processes.
    pub fn with_compilers(self) -> Result<Device, Error> {
        let compilers = (0..COMPILERS).map(|_| Compiler::start()).collect::<Result<_, _>>()?;
        Ok(Device { compilers, ..self })
    }

    /// Compiles plans and drops those that spill.
    pub fn compile(&self, problem: &Problem, plans: Vec<Plan>) -> Vec<Candidate> {
        let work = Mutex::new(plans.into_iter());
        let done = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for compiler in &self.compilers {
                let (work, done) = (&work, &done);
                scope.spawn(move || {
                    while let Some(plan) = work.lock().unwrap_or_else(PoisonError::into_inner).next() {
                        if let Some(candidate) = self.candidate(problem, plan, Some(compiler)) {
                            done.lock().unwrap_or_else(PoisonError::into_inner).push(candidate);
                        }
                    }
                });
            }
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn candidate(&self, problem: &Problem, plan: Plan, compiler: Option<&Compiler>) -> Option<Candidate> {
        let program = emit(problem, &plan, &self.arch).ok()?;
        let load = |kernel: &Kernel| {
            let function = self.function(kernel, || {
                if let Some(compiler) = compiler {
                    compiler.compile(problem, &plan);
                }
            })?;
            Some((function, Call::of(kernel)))
        };
        let steps: Vec<_> = program.kernels().iter().map(load).collect::<Option<_>>()?;
        let memory = |buffer: &ProgramBuffer| {
            let is_tensor = |tensor: &Tensor| buffer.kind == Operand::Tensor(*tensor).into();
            match Tensor::FORWARD.iter().position(is_tensor) {
                Some(index) => Ok(Memory::Tensor(index)),
                None => Buffer::zeroed(&self.context, buffer.bytes).map(Memory::Own),
            }
        };
        let buffers = program.contracts.buffers.iter().map(memory).collect::<Result<_, _>>().ok()?;
        let registers = steps.iter().map(|(function, _)| function.resources().registers).max()?;
        Some(Candidate { plan, registers, us: f64::INFINITY, steps, buffers })
    }

    /// The kernel's function. A new kernel is compiled by `ahead` before it is loaded.
    pub fn function(&self, kernel: &Kernel, ahead: impl FnOnce()) -> Option<Function> {
        let text = (kernel.module.to_string(), kernel.entry.clone());
        let lock = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&text) {
            // A kernel with equal code may need more shared memory at launch. Its code is then loaded again.
            if let Some(function) = known
                && function.resident_ctas(&kernel.launch).is_ok_and(|ctas| ctas > 0)
            {
                return Some(function.clone());
            }
        } else {
            ahead();
        }
        let expect = Expect { local_bytes: Some(0), ..Expect::of(&kernel.launch) };
        let function = match Function::load(&self.context, kernel, &expect) {
            Ok(function) => Some(function),
            Err(DriverError::Admission { .. }) => None,
            Err(error) => {
                eprintln!("{error}");
                None
            }
        };
        lock().insert(text, function.clone());
        function
    }

    /// Draws the problem's tensors and computes the expected output by `plan`.
    pub fn tensors(&self, problem: &Problem, plan: &Plan) -> Result<Tensors, Error> {
        let mut buffers = Vec::new();
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if drawn.0 != problem.dtypes {
            // Not a power of two, so that tensors with large strides do not repeat a row.
            let some = Problem::new(1, 1, 9973, 136, problem.dtypes);
            let plan = Family::Mma.default_for(&some, &self.arch)?;
            *drawn =
                (problem.dtypes, contents(&Bound::of_program(emit(&some, &plan, &self.arch)?, &some), 1));
        }
        for (tensor, some) in Tensor::FORWARD.into_iter().zip(&drawn.1) {
            let bytes = problem.operand(Operand::Tensor(tensor)).ok_or("the problem lacks a tensor")?.bytes();
            let mut data = some.repeat(bytes.div_ceil(some.len()));
            data.truncate(bytes);
            let mut buffer = Buffer::new(&self.context, data.len())?;
            buffer.upload(&data)?;
            buffers.push(buffer);
        }
        let mut tensors = Tensors { problem: problem.clone(), buffers, right: Vec::new() };
        let reference = self.candidate(problem, plan.clone(), None).ok_or("the first plan spills")?;
        self.graph(&reference, &tensors, 1)?.launch(&self.stream)?;
        tensors.right = self.samples(&tensors)?;
        Ok(tensors)
    }

    /// Sets the candidate's time; infinite if its output is wrong.
    ///
    /// # Errors
    /// When the kernel fails or does not end. Afterwards the device cannot be used any more.
    pub fn try_out(&self, candidate: &mut Candidate, tensors: &Tensors) -> Result<(), Error> {
        self.stream.fill(tensors.buffers[3].slice(), 0xff)?;
        let once = self.graph(candidate, tensors, 1)?;
        once.launch(&self.stream)?;
        self.wait()?;
        let ours = self.samples(tensors)?;
        let close = ours.iter().zip(&tensors.right).all(|(a, b)| (a - b).abs() <= TOLERANCE);
        if !close {
            eprintln!("WRONG: {:?} {:?}", tensors.problem, candidate.plan);
            return Ok(());
        }
        let one = self.time(&once, 1)?;
        let calls = (QUICK_US / one).clamp(1.0, 20.0) as u32;
        let graph = self.graph(candidate, tensors, calls)?;
        for _ in 0..3 {
            candidate.us = candidate.us.min(self.time(&graph, calls)?);
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), Error> {
        let start = Instant::now();
        while !self.stream.is_done()? {
            if start.elapsed() > HANGS {
                return Err("it does not end".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// A graph of `calls` launches.
    pub fn graph(&self, c: &Candidate, tensors: &Tensors, calls: u32) -> Result<GraphExec, DriverError> {
        let slice = |memory| match memory {
            &Memory::Tensor(index) => tensors.buffers[index].slice(),
            Memory::Own(buffer) => buffer.slice(),
        };
        let slices: Vec<DeviceSlice> = c.buffers.iter().map(slice).collect();
        Graph::capture(&self.stream, |stream| {
            let mut launches = (0..calls).flat_map(|_| &c.steps);
            launches.try_for_each(|(function, call)| function.launch(stream, call, &slices))
        })
    }

    /// The first and last values of the output. Errors of a wrong plan show at both ends; the gate makes the
    /// final decision.
    fn samples(&self, tensors: &Tensors) -> Result<Vec<f32>, DriverError> {
        let out = tensors.buffers[3].slice();
        let bytes = out.bytes().min(SAMPLE_BYTES);
        let mut all = Vec::new();
        for offset in [0, out.bytes() - bytes] {
            let mut part = vec![0; bytes];
            if let Some(slice) = out.part(offset, bytes) {
                self.stream.download(slice, &mut part)?;
            }
            all.extend(part.chunks_exact(2).map(|pair| {
                let bits = u16::from_le_bytes([pair[0], pair[1]]);
                match tensors.problem.dtypes.q {
                    DType::Bf16 => half::bf16::from_bits(bits).to_f32(),
                    _ => half::f16::from_bits(bits).to_f32(),
                }
            }));
        }
        Ok(all)
    }

    /// Time of one call, µs.
    pub fn time(&self, graph: &GraphExec, calls: u32) -> Result<f64, DriverError> {
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        start.record(&self.stream)?;
        graph.launch(&self.stream)?;
        end.record(&self.stream)?;
        end.synchronize()?;
        Ok(start.elapsed_us(&end)? / f64::from(calls))
    }
}
