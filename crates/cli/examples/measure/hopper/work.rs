//! The worker's part of each case.

use std::path::Path;
use std::time::Instant;

use bench::provenance::Provenance;
use bench::{Answer, Origin, median, problem_json, quantile, suites};
use check::launchfile::{Bound, Role};
use driver::{
    Buffer, Call, Context, DeviceSlice, DriverError, Event, Expect, Function, Graph, GraphExec, Resources,
    Stream,
};
use host::store::append_line;
use judge::values::Values;
use kernels::{Arch, BufferKind, Plan, emit};
use problem::{KeyPlaces, Operand, Operands, Problem, Storage, Tensor};
use serde_json::json;

use super::Error;
use super::case::Case;

/// The beginning of the line of a case without faults.
pub const RIGHT: &str = "ok ";
/// Exit code of a worker that asks for a new one after its last case, because its device may be unusable.
pub const AGAIN: i32 = 77;

/// Number of launches that must be bit-identical.
const REPEATS: usize = 3;
/// Number of timed graphs.
const ROUNDS: usize = 15;

/// Runs the cases and prints one line for each.
pub fn run(rows: &Path, cases: &[Case], from: usize) -> Result<bool, Error> {
    let context = Context::open(0)?;
    let info = context.info();
    let arch = Arch::of(info.sm()).ok_or("this GPU is not a target of the kernels")?;
    let arch = Arch { multiprocessors: info.sms, ..arch };
    let provenance = Provenance::of_gpu(info);
    let mut all = true;
    for case in &cases[from..] {
        let mut found = Found::default();
        let result = case.plan(&arch).and_then(|plan| {
            found.plan = Some(plan.clone());
            try_out(&context, case, &plan, &arch, &mut found)
        });
        let fault = match result {
            Err(error) => Some(format!("FAILS  {error}")),
            Ok(()) => found.fault.clone(),
        };
        all &= fault.is_none();
        let row = json!({
            "case": case.to_string(), "problem": problem_json(&case.problem), "plan": found.plan, "fault": fault,
            "us": found.us, "us_low": found.range[0], "us_high": found.range[1], "error": found.error,
            "registers": found.resources.map(|r| r.registers), "local": found.resources.map(|r| r.local),
            "shared": found.shared, "resident_ctas": found.resident, "compile_ms": found.compile_ms, "ctas": found.ctas,
            "driver": provenance.driver, "commit": provenance.commit, "run": provenance.run, "when": provenance.when,
        });
        append_line(rows, &row.to_string())?;
        match &fault {
            Some(fault) => println!("{}: {case}{}", fault.replace('\n', " "), found.tail()),
            None => {
                let rate = case.problem.flops() / found.us * 1e-6;
                let bytes = case.problem.bytes() / found.us * 1e-6;
                println!(
                    "{RIGHT}{:9.2} µs {rate:4.0} TFLOP/s {bytes:5.2} TB/s: {case}{}",
                    found.us,
                    found.tail()
                );
            }
        }
        if context.poisoned().is_some() {
            std::process::exit(AGAIN);
        }
    }
    Ok(all)
}

/// The results of a case so far.
#[derive(Default)]
struct Found {
    plan: Option<Plan>,
    fault: Option<String>,
    us: f64,
    range: [f64; 2],
    error: Option<String>,
    resources: Option<Resources>,
    shared: u32,
    resident: u32,
    ctas: u64,
    compile_ms: f64,
}

impl Found {
    fn tail(&self) -> String {
        let Some(r) = self.resources else { return String::new() };
        let error = self.error.as_deref().unwrap_or("-");
        format!(
            ", error {error}, {} regs {} local, {} KB, {} × {} CTAs, JIT {:.0} ms",
            r.registers,
            r.local,
            self.shared >> 10,
            self.ctas,
            self.resident,
            self.compile_ms
        )
    }
}

/// A case's kernel with its buffers on the device.
struct Setup<'a> {
    bound: &'a Bound,
    stream: Stream,
    function: Function,
    call: Call,
    buffers: Vec<Buffer>,
}

fn try_out(
    context: &std::sync::Arc<Context>,
    case: &Case,
    plan: &Plan,
    arch: &Arch,
    found: &mut Found,
) -> Result<(), Error> {
    let bound = Bound::of_program(emit(&case.problem, plan, arch)?, &case.problem);
    let launch = bound.kernel.launch;
    let began = Instant::now();
    let function = Function::load(context, &bound.kernel, &Expect::of(&launch))?;
    found.compile_ms = began.elapsed().as_secs_f64() * 1e3;
    found.resources = Some(function.resources());
    found.shared = launch.dynamic_shared + function.resources().shared;
    found.ctas = launch.grid.count();
    found.resident = function.resident_ctas(&launch)?;
    let mut buffers = Vec::new();
    for spec in &bound.kernel.buffers {
        buffers.push(Buffer::zeroed(context, spec.bytes)?);
    }
    let (stream, call) = (Stream::new(context)?, Call::of(&bound.kernel));
    let mut setup = Setup { bound: &bound, stream, function, call, buffers };
    let answer = Answer::draw(&Problem { storage: Storage::Rows, ..case.problem.clone() }, 1)?;
    setup.fill(&answer)?;
    found.fault = setup.judge(&answer, found)?;
    if found.fault.is_none() {
        let calls = suites::calls(&case.problem);
        let times = setup.time(calls)?;
        (found.us, found.range) = (median(&times), [0.05, 0.95].map(|at| quantile(&times, at)));
        found.fault = setup.judge(&answer, found)?.map(|fault| format!("{fault} (after graphs of {calls})"));
    }
    Ok(())
}

/// A page table without order: neighbours lie far from each other, and each page occurs once.
fn page_table(problem: &Problem) -> Vec<i32> {
    let Some(pages) = problem.storage.pages() else { return Vec::new() };
    // A prime number, larger than the number of pages.
    let page = |entry: usize| (entry as u64 * 2_654_435_761 % pages.count as u64) as i32;
    (0..problem.batch * pages.per_sequence).map(page).collect()
}

/// Dense keys or values in their pages.
fn in_pages(problem: &Problem, tensor: Tensor, table: &[i32], dense: &[u8]) -> Vec<u8> {
    let operands = Operands::default().with(Operand::PageTable, table);
    let places = KeyPlaces::of(problem, &operands);
    let ([_, heads, _, dim], element) = (problem.extents(tensor), problem.dtypes.of(tensor).bytes());
    let mut pool = vec![0; problem.span(tensor).map_or(0, |(elements, _)| elements) * element];
    for (number, row) in dense.chunks_exact(dim * element).enumerate() {
        let (head, key) = (number / problem.seq_kv, number % problem.seq_kv);
        let (page, at) = places.place(head / heads, key);
        let start = problem.strides(tensor).offset(page, head % heads, at) as usize * element;
        pool[start..start + row.len()].copy_from_slice(row);
    }
    pool
}

impl Setup<'_> {
    fn slice(&self, role: Role) -> Option<DeviceSlice<'_>> {
        self.bound.roles.iter().position(|r| *r == role).map(|i| self.buffers[i].slice())
    }

    fn fill(&mut self, answer: &Answer) -> Result<(), Error> {
        let Some(problem) = &self.bound.problem else { return Err("no problem".into()) };
        let table = page_table(problem);
        for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
            let values = answer.inputs[tensor.into()].clone();
            let laid = match (tensor, problem.storage) {
                (Tensor::K | Tensor::V, Storage::Pages(_)) => {
                    in_pages(problem, tensor, &table, &values.to_bytes())
                }
                _ => values.scatter(problem, tensor).to_bytes(),
            };
            if let Some(slice) = self.slice(Role::Operand(tensor.into())) {
                self.stream.upload(slice, &laid)?;
            }
        }
        if let Some(slice) = self.slice(Role::Operand(Operand::PageTable)) {
            let bytes: Vec<u8> = table.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.stream.upload(slice, &bytes)?;
        }
        Ok(())
    }

    fn launch(&self) -> Result<(), DriverError> {
        let slices: Vec<DeviceSlice<'_>> = self.buffers.iter().map(Buffer::slice).collect();
        self.function.launch(&self.stream, &self.call, &slices)
    }

    fn contents(&self, role: Role) -> Result<Vec<u8>, DriverError> {
        let Some(slice) = self.slice(role) else { return Ok(Vec::new()) };
        let mut bytes = vec![0; slice.bytes()];
        self.stream.download(slice, &mut bytes)?;
        Ok(bytes)
    }

    /// Launches the kernel several times, each time into an output filled with NaN. Returns what is wrong
    /// with the outputs.
    fn judge(&self, answer: &Answer, found: &mut Found) -> Result<Option<String>, Error> {
        let Some(problem) = &self.bound.problem else { return Err("no problem".into()) };
        let mut first = None;
        for repeat in 0..REPEATS {
            for role in [Role::Operand(Operand::OUT), Role::Operand(Operand::Lse)] {
                self.slice(role).map_or(Ok(()), |slice| self.stream.fill(slice, 0xff))?;
            }
            self.launch()?;
            self.stream.synchronize()?;
            let outputs =
                [self.contents(Role::Operand(Operand::OUT))?, self.contents(Role::Operand(Operand::Lse))?];
            if self.contents(Role::Internal(BufferKind::Counter))?.iter().any(|&byte| byte != 0) {
                return Ok(Some("WRONG  the counter is not at 0 after a launch".to_owned()));
            }
            let values = Values::from_bytes(problem.dtypes.out, &outputs[0]).gather(problem, Tensor::Out);
            match answer.judge(&values, Origin::Ours) {
                Ok(figures) => found.error = Some(figures.brief()),
                Err(fault) => return Ok(Some(format!("WRONG  {fault}"))),
            }
            if first.get_or_insert_with(|| outputs.clone()) != &outputs {
                return Ok(Some(format!("DIFFERS  launch {repeat} from the first")));
            }
        }
        Ok(None)
    }

    /// Time of a call, µs, in graphs of `calls` calls.
    fn time(&mut self, calls: u32) -> Result<Vec<f64>, Error> {
        let context = self.stream.context();
        let graph: GraphExec = Graph::capture(&self.stream, |_| (0..calls).try_for_each(|_| self.launch()))?;
        let (start, end) = (Event::new(context)?, Event::new(context)?);
        let busy = Buffer::new(context, 64 << 20)?;
        graph.launch(&self.stream)?;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            // Keeps the device busy while the host queues the rest.
            self.stream.fill(busy.slice(), 0x5a)?;
            graph.launch(&self.stream)?;
            start.record(&self.stream)?;
            graph.launch(&self.stream)?;
            end.record(&self.stream)?;
            end.synchronize()?;
            times.push(start.elapsed_us(&end)? / f64::from(calls));
        }
        Ok(times)
    }
}
