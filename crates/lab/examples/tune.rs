//! Finds the fastest plans of the mma family on a GPU: `tune FOLDER SUITE …`, with the suites `mission`, `small` and `ampere`. For
//! each problem every candidate is timed in a graph, the fastest again in turns; `FOLDER/tuned.jsonl` gets the
//! winners as rows of the table that ships (`kernels::select`), `FOLDER/candidates.jsonl` everything.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use driver::{Buffer, Call, Context, DeviceSlice, DriverError, Event, Expect, Function, Graph, GraphExec, Stream};
use flashcore_lab::bench::median;
use flashcore_lab::gate::contents;
use flashcore_lab::launchfile::Bound;
use flashcore_lab::provenance::Provenance;
use flashcore_lab::store::append_line;
use kernels::forward::mma::{Grid, MmaPlan, QueryHome};
use kernels::select::{Kind, Shape, TunedRow};
use kernels::{Arch, Plan, emit};
use problem::{DType, Mask, Problem};
use ptx::Kernel;
use serde_json::json;
use tile::{Order, Rescale};

type Error = Box<dyn std::error::Error>;

/// Work that one timing of a candidate should take at least, µs.
const QUICK_US: f64 = 150.0;
/// Candidates that are timed again, and in how many rounds.
const FINALISTS: usize = 5;
const ROUNDS: usize = 15;
/// Largest difference of two right outputs, absolute: some units in the last place of bf16 around 1.
const TOLERANCE: f32 = 0.03;
/// What is compared at each end of an output.
const SAMPLE_BYTES: usize = 1 << 19;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((folder, suites)) = args.split_first().filter(|(_, suites)| !suites.is_empty()) else {
        eprintln!("usage: tune FOLDER mission|small|ampere …");
        return ExitCode::from(3);
    };
    match run(&PathBuf::from(folder), suites) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn suite(name: &str) -> Option<Vec<Problem>> {
    let masks = [Mask::None, Mask::Causal];
    let mut problems = Vec::new();
    match name {
        "mission" => {
            for dtype in [DType::F16, DType::Bf16] {
                problems.extend(masks.map(|mask| Problem::new(1, 8, 512, 64, dtype).with_mask(mask)));
            }
        }
        "small" => {
            for (dim, mask) in [64, 128].into_iter().flat_map(|d| masks.map(|m| (d, m))) {
                for (batch, heads) in [(1, 8), (1, 32), (4, 16)] {
                    let of = |seq| Problem::new(batch, heads, seq, dim, DType::Bf16).with_mask(mask);
                    problems.extend([128, 256, 512, 1024].map(of));
                }
            }
        }
        "ampere" => {
            for (dim, mask) in [64, 128, 256].into_iter().flat_map(|d| masks.map(|m| (d, m))) {
                let of = |seq| Problem::new(16_384 / seq, 2048 / dim, seq, dim, DType::Bf16).with_mask(mask);
                problems.extend([512, 1024, 2048, 4096, 8192, 16_384].map(of));
            }
        }
        _ => return None,
    }
    Some(problems)
}

/// Rows, warps, warps that share rows, and the keys of a block that go with them: shapes that were among the fastest on some
/// problem when every shape was tried, and their neighbours.
const TILES: [(u32, u32, u32, &[u32]); 11] = [
    (16, 4, 4, &[64, 128, 256]),
    (16, 8, 8, &[128, 256]),
    (32, 4, 2, &[64, 128, 256]),
    (32, 4, 4, &[128, 256]),
    (32, 8, 4, &[128, 256]),
    (48, 3, 1, &[48, 96]),
    (64, 8, 2, &[64, 128]),
    (64, 4, 1, &[32, 48, 64, 80, 96, 128]),
    (64, 2, 1, &[32, 48, 64, 80]),
    (128, 4, 1, &[32, 48, 64, 96, 128]),
    (128, 8, 1, &[32, 48, 64, 80, 96, 128]),
];

/// Every plan worth a try.
fn candidates(problem: &Problem, arch: &Arch) -> Vec<MmaPlan> {
    let base = MmaPlan::default_for(problem, arch);
    let rows = (problem.batch * problem.heads_q * problem.seq_q) as u32;
    // CTAs of 64 rows, in multiples of the multiprocessors.
    let waves = f64::from(rows) / 64.0 / f64::from(arch.multiprocessors);
    let grids = if problem.mask == Mask::Causal && waves > 1.0 {
        vec![Grid::HeadsFirst, Grid::RowsFirst]
    } else {
        vec![base.grid]
    };
    let orders = [
        (Order::InTurn, Rescale::Beyond(8)),
        (Order::ScoresAhead, Rescale::Beyond(8)),
        (Order::ScoresAhead, Rescale::Always),
    ];
    let mut plans = vec![base.clone()];
    for (block_m, warps, kv_warps, keys) in TILES {
        let few_rows = block_m < 64 || kv_warps > 1;
        if (few_rows && waves > 4.0) || (block_m > 64 && waves < 1.5) {
            continue;
        }
        for &block_n in keys {
            for (stages, queries) in [1, 2, 3, 4].into_iter().flat_map(|s| HOMES.map(|q| (s, q))) {
                let useful = stages * block_n <= (problem.seq_kv as u32).max(2 * block_n);
                if !useful || (stages > 2 && waves > 8.0) || (stages == 1 && waves < 1.0) {
                    continue;
                }
                for (order, rescale) in orders {
                    for &grid in &grids {
                        let tile = MmaPlan { block_m, block_n, warps, kv_warps, ..base.clone() };
                        plans.push(MmaPlan { stages, queries, order, rescale, grid, ..tile });
                    }
                }
            }
        }
    }
    plans.retain(|plan| plan.check(problem, arch).is_ok());
    plans.dedup();
    plans
}

const HOMES: [QueryHome; 2] = [QueryHome::Registers, QueryHome::Shared];

/// What stays on the device between problems.
struct Bench {
    context: Arc<Context>,
    stream: Stream,
    arch: Arch,
    compiled: Mutex<HashMap<String, Option<Function>>>,
}

struct Candidate {
    plan: MmaPlan,
    call: Call,
    function: Function,
    us: f64,
}

impl Bench {
    /// Compiles the plans that are new, by several threads; leaves out those that spill.
    fn compile(&self, problem: &Problem, plans: Vec<MmaPlan>) -> Vec<Candidate> {
        let work = Mutex::new(plans.into_iter());
        let done = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    while let Some(plan) = work.lock().ok().and_then(|mut w| w.next()) {
                        let Ok(kernel) = emit(problem, &Plan::Mma(plan.clone()), &self.arch) else {
                            continue;
                        };
                        if let Some(function) = self.function(&kernel) {
                            let candidate = Candidate { plan, call: Call::of(&kernel), function, us: f64::INFINITY };
                            done.lock().unwrap_or_else(|e| e.into_inner()).push(candidate);
                        }
                    }
                });
            }
        });
        done.into_inner().unwrap_or_default()
    }

    fn function(&self, kernel: &Kernel) -> Option<Function> {
        let text = kernel.module.to_string();
        let lock = || self.compiled.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = lock().get(&text) {
            return known.clone();
        }
        let expect = Expect {
            local_bytes: Some(0),
            dynamic_shared: kernel.launch.dynamic_shared,
            ..Expect::of(&kernel.launch)
        };
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

    /// A graph of `calls` launches.
    fn graph(&self, c: &Candidate, slices: &[DeviceSlice], calls: u32) -> Result<GraphExec, DriverError> {
        Graph::capture(&self.stream, |stream| {
            (0..calls).try_for_each(|_| c.function.launch(stream, &c.call, slices))
        })
    }

    /// The first and the last of an output's values: a wrong plan shows in both, and the gate has the last word.
    fn samples(&self, out: DeviceSlice, dtype: DType) -> Result<Vec<f32>, DriverError> {
        let bytes = out.bytes().min(SAMPLE_BYTES);
        let mut all = Vec::new();
        for offset in [0, out.bytes() - bytes] {
            let mut part = vec![0; bytes];
            if let Some(slice) = out.part(offset, bytes) {
                self.stream.download(slice, &mut part)?;
            }
            all.extend(part.chunks_exact(2).map(|pair| {
                let bits = u16::from_le_bytes([pair[0], pair[1]]);
                match dtype {
                    DType::Bf16 => half::bf16::from_bits(bits).to_f32(),
                    _ => half::f16::from_bits(bits).to_f32(),
                }
            }));
        }
        Ok(all)
    }

    /// µs of one call.
    fn time(&self, graph: &GraphExec, calls: u32) -> Result<f64, DriverError> {
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        start.record(&self.stream)?;
        graph.launch(&self.stream)?;
        end.record(&self.stream)?;
        end.synchronize()?;
        Ok(start.elapsed_us(&end)? / f64::from(calls))
    }
}

fn run(folder: &Path, suites: &[String]) -> Result<(), Error> {
    std::fs::create_dir_all(folder)?;
    let context = Context::open(0)?;
    let (major, minor) = context.info().capability;
    let arch = Arch::of(major * 10 + minor).ok_or("this GPU is not a target of the kernels")?;
    let provenance = Provenance::of_gpu(context.info());
    let stream = Stream::new(&context)?;
    let bench = Bench { context, stream, arch, compiled: Mutex::default() };
    for name in suites {
        let problems =
            suite(name).ok_or_else(|| format!("no suite {name}; accepted: mission, small, ampere"))?;
        for problem in problems {
            let start = Instant::now();
            match tune(&bench, &problem, folder, &provenance) {
                Ok(line) => println!("{line}  ({:.1} s)", start.elapsed().as_secs_f64()),
                Err(error) => println!("{problem:?}: {error}"),
            }
        }
    }
    Ok(())
}

fn tune(bench: &Bench, problem: &Problem, folder: &Path, provenance: &Provenance) -> Result<String, Error> {
    let plans = candidates(problem, &bench.arch);
    let tried = plans.len();
    let mut found = bench.compile(problem, plans);
    let default = Plan::Mma(MmaPlan::default_for(problem, &bench.arch));
    let base = emit(problem, &default, &bench.arch)?;
    let bound = Bound::of_kernel(base.clone(), problem)?;
    let mut buffers = Vec::new();
    for data in contents(&bound, 1) {
        let mut buffer = Buffer::new(&bench.context, data.len())?;
        buffer.upload(&data)?;
        buffers.push(buffer);
    }
    let slices: Vec<DeviceSlice> = buffers.iter().map(Buffer::slice).collect();
    let reference = bench.function(&base).ok_or("the default plan spills")?;
    reference.launch(&bench.stream, &Call::of(&base), &slices)?;
    bench.stream.synchronize()?;
    let right = bench.samples(slices[3], problem.dtype)?;

    for c in &mut found {
        bench.stream.fill(slices[3], 0xFF)?;
        let once = bench.graph(c, &slices, 1)?;
        once.launch(&bench.stream)?;
        bench.stream.synchronize()?;
        let ours = bench.samples(slices[3], problem.dtype)?;
        let close = ours.iter().zip(&right).all(|(a, b)| (a - b).abs() <= TOLERANCE);
        if !close {
            eprintln!("WRONG: {problem:?} {:?}", c.plan);
            continue;
        }
        let one = bench.time(&once, 1)?;
        let calls = (QUICK_US / one).clamp(1.0, 20.0) as u32;
        let graph = bench.graph(c, &slices, calls)?;
        for _ in 0..3 {
            c.us = c.us.min(bench.time(&graph, calls)?);
        }
    }
    found.sort_by(|a, b| a.us.total_cmp(&b.us));
    for c in &found {
        let row = json!({ "problem": Shape::of(problem), "plan": c.plan, "us": c.us, "registers": c.function.resources().registers });
        append_line(&folder.join("candidates.jsonl"), &row.to_string())?;
    }
    finals(bench, problem, &slices, found, provenance, folder, tried)
}

/// The fastest again, in turns.
fn finals(
    bench: &Bench,
    problem: &Problem,
    slices: &[DeviceSlice],
    mut found: Vec<Candidate>,
    provenance: &Provenance,
    folder: &Path,
    tried: usize,
) -> Result<String, Error> {
    let default = MmaPlan::default_for(problem, &bench.arch);
    let position = found.iter().position(|c| c.plan == default);
    if let Some(position) = position.filter(|&p| p >= FINALISTS) {
        found.swap(position, FINALISTS);
    }
    let timed = found.len();
    found.truncate(FINALISTS + 1);
    let calls = (QUICK_US / found.first().ok_or("no candidate")?.us).clamp(1.0, 20.0) as u32;
    let graphs = found.iter().map(|c| bench.graph(c, slices, calls)).collect::<Result<Vec<_>, _>>()?;
    let mut times = vec![Vec::new(); found.len()];
    for round in 0..ROUNDS {
        for i in 0..graphs.len() {
            let i = (i + round) % graphs.len();
            times[i].push(bench.time(&graphs[i], calls)?);
        }
    }
    let medians: Vec<f64> = times.iter().map(|t| median(t)).collect();
    let best = (0..found.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap_or(0);
    let of_default = found.iter().position(|c| c.plan == default).map_or(f64::NAN, |i| medians[i]);
    let info = bench.context.info();
    let row = TunedRow {
        device: info.name.clone(),
        sm: bench.arch.sm,
        multiprocessors: info.sms,
        problem: Shape::of(problem),
        plan: Plan::Mma(found[best].plan.clone()),
        us: medians[best],
        kind: Kind::Measured,
        driver: provenance.driver.clone(),
        commit: provenance.commit.clone().unwrap_or_default(),
        run: provenance.run.clone(),
        when: provenance.when.clone(),
    };
    append_line(&folder.join("tuned.jsonl"), &serde_json::to_string(&row)?)?;
    let p = &found[best].plan;
    let flops = problem_flops(problem);
    Ok(format!(
        "D{:3} S{:5} B{:2} H{:2} {:?} {:?}: {:8.2} µs {:4.0} TFLOP/s (default {:8.2})  m{} n{} w{} kv{} s{} {:?} {:?} {:?} {:?} {} regs; {timed} of {tried}",
        problem.head_dim,
        problem.seq_q,
        problem.batch,
        problem.heads_q,
        problem.dtype,
        problem.mask,
        medians[best],
        flops / medians[best] / 1e6,
        of_default,
        p.block_m,
        p.block_n,
        p.warps,
        p.kv_warps,
        p.stages,
        p.queries,
        p.grid,
        p.order,
        p.rescale,
        found[best].function.resources().registers,
    ))
}

fn problem_flops(p: &Problem) -> f64 {
    let all = 4.0 * (p.batch * p.heads_q * p.seq_q * p.seq_kv * p.head_dim) as f64;
    if p.mask == Mask::Causal { all / 2.0 } else { all }
}
