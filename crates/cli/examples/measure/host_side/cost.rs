//! The cost of a start and of a call.

use std::time::Instant;

use bench::{median, quantile};
use driver::{Call, Context, Expect, Function, Graph, Stream};
use flashcore::AttentionError;
use flashcore::gpu::Gpu;
use problem::Problem;
use ptx::{Arg, Builder, Dim3, Kernel, Launch};
use serde_json::json;

use super::tensors::Tensors;
use super::{Outcome, tell};

/// Number of calls per measurement. A batch of `BATCH` calls is queued before each wait; the stream's queue
/// holds more.
const CALLS: usize = 10_000;
const BATCH: usize = 500;

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// The steps from process start to the first result of the reference problem.
pub fn first() -> Outcome {
    let problem = Problem::mission();
    let began = Instant::now();
    let context = Context::open(0)?;
    let context_ms = ms(began);
    let created = Instant::now();
    let gpu = Gpu::open(0)?;
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
    let prepare_ms = ms(created);
    let paused = Instant::now();
    let inputs = judge::inputs::draw(&problem, judge::inputs::Style::Normal, 1);
    // Drawing random numbers is not part of the library's time.
    let drawing = ms(paused);
    let stream = Stream::new(&context)?;
    let tensors = Tensors::of(&context, &problem, inputs, 0)?;
    let result = tensors.compute(&prepared, &stream)?;
    let first_ms = ms(created) - drawing;
    let stats = context.cache().stats();
    let start = json!({
        "context_ms": context_ms, "prepare_ms": prepare_ms, "first_ms": first_ms,
        "cache": { "hits": stats.hits, "misses": stats.misses, "stored": stats.stored,
                   "damaged": stats.damaged, "unwritable": stats.unwritable },
    });
    println!("START {start}");
    let judged = tensors.judge(&result).map(|figures| format!("{first_ms:.1} ms, error {}", figures.brief()));
    tell("first result", judged);
    Ok(())
}

/// The host's cost of a call in the steady state.
pub fn calls() -> Outcome {
    let gpu = Gpu::open(0)?;
    let (problem, context) = (Problem::mission(), gpu.context());
    let stream = Stream::new(context)?;
    let prepared = gpu.prepare(&problem, None)?;
    let tensors = Tensors::new(context, &problem, 1, 0)?;
    let [q, k, v, out, _] = tensors.slices()?;
    let (function, call) = prepared.parts();
    let slices = [q, k, v, out];
    let (idle, nothing) = nothing(context)?;
    let graph = Graph::capture(&stream, |stream| prepared.enqueue(stream, q, k, v, out, None))?;
    time("Prepared::enqueue", &stream, || prepared.enqueue(&stream, q, k, v, out, None))?;
    time("Function::launch, the same kernel", &stream, || Ok(function.launch(&stream, call, &slices)?))?;
    time("Function::launch, an empty kernel", &stream, || Ok(idle.launch(&stream, &nothing, &[])?))?;
    time("GraphExec::launch, one call in it", &stream, || Ok(graph.launch(&stream)?))?;
    time("Gpu::prepare, prepared before", &stream, || gpu.prepare(&problem, None).map(drop))?;
    tell("calls", Ok(format!("{CALLS} of each")));
    let resources = prepared.resources();
    println!("plan {:?}, {:?}: {resources:?}", prepared.plan(), prepared.choice());
    prepared.why().iter().for_each(|why| println!("  {why}"));
    Ok(())
}

/// An empty kernel.
fn nothing(context: &std::sync::Arc<Context>) -> Outcome<(Function, Call)> {
    let one = Dim3(1, 1, 1);
    let launch = Launch { cluster: one, ..Launch::new(one, Dim3(32, 1, 1)) };
    let kernel = Kernel {
        module: Builder::kernel("nothing").into_verified(context.info().target())?,
        entry: "nothing".to_owned(),
        launch,
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: Vec::<Arg>::new(),
    };
    Ok((Function::load(context, &kernel, &Expect::of(&launch))?, Call::of(&kernel)))
}

/// Times each call by the host's clock, without the waits between batches.
fn time(name: &str, stream: &Stream, mut call: impl FnMut() -> Result<(), AttentionError>) -> Outcome {
    for _ in 0..BATCH {
        call()?;
    }
    stream.synchronize()?;
    let (mut calls, mut batches) = (Vec::with_capacity(CALLS), Vec::new());
    for _ in 0..CALLS / BATCH {
        let began = Instant::now();
        let mut before = began;
        for _ in 0..BATCH {
            call()?;
            let now = Instant::now();
            calls.push((now - before).as_secs_f64() * 1e6);
            before = now;
        }
        batches.push(began.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
        stream.synchronize()?;
    }
    let measure = json!({
        "measure": name, "unit": "us", "median": median(&calls), "p99": quantile(&calls, 0.99),
        "batch_p99": quantile(&batches, 0.99), "calls": CALLS, "samples": batches,
    });
    println!("MEASURE {measure}");
    Ok(())
}
