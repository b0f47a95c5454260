//! Checks of streams, graphs, copies, pools and threads.

use driver::{Call, Event, Expect, Function, Graph, Pinned, Pool, Stream, TensorMap};
use flashcore::AttentionError;
use flashcore::gpu::Gpu;
use problem::{Band, DType, Operand, Problem};
use ptx::{
    Arg, Builder, Dim3, Element, Kernel, L2Promotion, Launch, Swizzle, Target, TargetSuffix, TensorMapSpec,
};

use super::tensors::Tensors;
use super::{Outcome, ensure, tell};

const THREADS: u64 = 8;
const REPEATS: usize = 50;

pub fn all() -> Outcome {
    let gpu = Gpu::open(0)?;
    tell("repeats give the same bits", repeats(&gpu));
    tell("a graph gives the same bits", graph(&gpu));
    tell("prepared while captured", prepared_while_captured(&gpu));
    tell("streams in order", order(&gpu));
    tell("the default stream", default_stream(&gpu));
    tell("pool", pool(&gpu));
    tell("threads", threads(&gpu));
    tell("clusters and overlapping launches", attributes(&gpu));
    tell("code for this architecture alone", architecture_specific(&gpu));
    tell("tensor map", tensor_map(&gpu));
    Ok(())
}

fn repeats(gpu: &Gpu) -> Outcome<String> {
    let problem = Problem::mission().with_band(Band::CAUSAL);
    let (prepared, stream) =
        (gpu.prepare(&problem.clone().with_lse(true), None)?, Stream::new(gpu.context())?);
    let tensors = Tensors::new(gpu.context(), &problem, 11, 0)?;
    let first = tensors.compute(&prepared, &stream)?;
    for i in 0..REPEATS {
        ensure(tensors.compute(&prepared, &stream)? == first, || format!("repeat {i} differs"))?;
    }
    Ok(format!("{REPEATS}"))
}

fn graph(gpu: &Gpu) -> Outcome<String> {
    let problem = Problem::mission();
    let (prepared, stream) =
        (gpu.prepare(&problem.clone().with_lse(true), None)?, Stream::new(gpu.context())?);
    let tensors = Tensors::new(gpu.context(), &problem, 12, 0)?;
    let direct = tensors.compute(&prepared, &stream)?;
    let graph =
        Graph::capture(&stream, |stream| (0..3).try_for_each(|_| tensors.enqueue(&prepared, stream)))?;
    for _ in 0..3 {
        tensors.poison(&stream)?;
        graph.launch(&stream)?;
        ensure(tensors.download(&stream)? == direct, || "the replay differs".to_owned())?;
    }
    Ok("3 calls, 3 replays".to_owned())
}

/// Neither loading a module nor the first misaligned call may break a capture.
fn prepared_while_captured(gpu: &Gpu) -> Outcome<String> {
    let problem = Problem::new(1, 2, 99, 96, DType::Bf16);
    let stream = Stream::new(gpu.context())?;
    let (aligned, shifted) =
        (Tensors::new(gpu.context(), &problem, 13, 0)?, Tensors::new(gpu.context(), &problem, 13, 2)?);
    let graph = Graph::capture(&stream, |stream| -> Result<(), AttentionError> {
        let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
        aligned.enqueue(&prepared, stream)?;
        shifted.enqueue(&prepared, stream)
    })?;
    graph.launch(&stream)?;
    aligned.judge(&aligned.download(&stream)?)?;
    shifted.judge(&shifted.download(&stream)?)?;
    Ok(String::new())
}

/// Inputs are uploaded on one stream by pinned copies, and the other stream waits for them.
fn order(gpu: &Gpu) -> Outcome<String> {
    let (problem, context) = (Problem::mission(), gpu.context());
    let (copies, compute) = (Stream::new(context)?, Stream::new(context)?);
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
    let tensors = Tensors::new(context, &problem, 14, 0)?;
    let [q, k, v, ..] = tensors.slices()?;
    let contents = [Operand::Q, Operand::K, Operand::V].map(|operand| tensors.inputs[operand].to_bytes());
    // The values that a kernel would read if it did not wait for the upload.
    for slice in [q, k, v] {
        copies.fill(slice, 0xff)?;
    }
    tensors.poison(&compute)?;
    context.synchronize()?;
    let mut transfers = Vec::new();
    for (slice, bytes) in [q, k, v].into_iter().zip(&contents) {
        let mut pinned = Pinned::new(context, bytes.len())?;
        pinned.as_mut_slice().copy_from_slice(bytes);
        transfers.push(pinned.upload(&copies, slice)?);
    }
    let up = Event::new(context)?;
    up.record(&copies)?;
    compute.wait(&up)?;
    tensors.enqueue(&prepared, &compute)?;
    let result = tensors.download(&compute)?;
    let figures = tensors.judge(&result)?;
    for (transfer, bytes) in transfers.into_iter().zip(&contents) {
        ensure(transfer.wait()?.as_slice() == bytes.as_slice(), || "pinned memory changed".to_owned())?;
    }
    let [.., out, _] = tensors.slices()?;
    let down = Pinned::new(context, out.bytes())?.download(&copies, out)?.wait()?;
    ensure(down.as_slice() == result.out, || "the pinned download differs".to_owned())?;
    Ok(figures.brief())
}

fn default_stream(gpu: &Gpu) -> Outcome<String> {
    let problem = Problem::mission();
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
    let tensors = Tensors::new(gpu.context(), &problem, 15, 0)?;
    let default = Stream::default_of(gpu.context());
    let result = tensors.compute(&prepared, &default)?;
    Ok(tensors.judge(&result)?.brief())
}

/// Allocates far more than the device has, a piece at a time. Then the pool releases its memory.
fn pool(gpu: &Gpu) -> Outcome<String> {
    let context = gpu.context();
    let stream = Stream::new(context)?;
    let (before, total) = context.free_memory()?;
    let pool = Pool::new(context, 1 << 30)?;
    let piece = 256 << 20;
    let rounds = 2 * total / piece;
    for i in 0..rounds {
        let buffer = pool.allocate(&stream, piece)?;
        stream.fill(buffer.slice(), i as u8)?;
    }
    stream.synchronize()?;
    pool.trim(0)?;
    drop(pool);
    let (after, _) = context.free_memory()?;
    ensure(before.saturating_sub(after) < piece, || format!("{} bytes are missing", before - after))?;
    Ok(format!("{rounds} pieces of 256 MiB"))
}

fn threads(gpu: &Gpu) -> Outcome<String> {
    let problem = Problem::new(1, 4, 257, 64, DType::F16);
    let work = |seed: u64| -> Result<(), String> {
        let run = || -> Outcome {
            // Every second thread has its own problem, so that several kernels are compiled at the same time.
            let problem = Problem { seq_q: 257 - (seed as usize % 2) * seed as usize, ..problem.clone() };
            let problem = problem.with_layout(problem::Layout::Bhsd);
            let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
            let stream = Stream::new(gpu.context())?;
            let tensors = Tensors::new(gpu.context(), &problem, seed, 2 * (seed as usize % 3))?;
            let first = tensors.compute(&prepared, &stream)?;
            tensors.judge(&first)?;
            for _ in 0..REPEATS {
                ensure(tensors.compute(&prepared, &stream)? == first, || "a repeat differs".to_owned())?;
            }
            Ok(())
        };
        run().map_err(|error| format!("thread {seed}: {error}"))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a panic".to_owned())?)
    })?;
    Ok(format!("{THREADS} threads, {REPEATS} repeats"))
}

/// Each CTA stores its number, with clusters, and with launches that may overlap.
fn attributes(gpu: &Gpu) -> Outcome<String> {
    let context = gpu.context();
    let mut k = Builder::kernel("number");
    let to = k.param_pointer("to");
    let cta = k.special(ptx::SpecialReg::CtaidX);
    let place = k.index(to, cta, 4);
    k.st(place, cta);
    let launch = Launch {
        cluster: Dim3(4, 1, 1),
        dynamic_shared: 64 << 10,
        ..Launch::new(Dim3(64, 1, 1), Dim3(32, 1, 1))
    };
    let kernel = Kernel {
        module: k.into_verified(gpu.info().target())?,
        entry: "number".to_owned(),
        launch,
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: Vec::<Arg>::new(),
    };
    let number = Function::load(context, &kernel, &Expect::of(&launch))?;
    let stream = Stream::new(context)?;
    let buffer = driver::Buffer::new(context, 256)?;
    for overlapping in [false, true] {
        let launch = Launch { overlapping, ..launch };
        stream.fill(buffer.slice(), 0xff)?;
        let call = Call::new(launch, vec![Arg::Buffer { index: 0, offset: 0 }]);
        number.launch(&stream, &call, &[buffer.slice()])?;
        number.launch(&stream, &call, &[buffer.slice()])?;
        let mut bytes = [0; 256];
        stream.download(buffer.slice(), &mut bytes)?;
        let expected: Vec<u8> = (0..64u32).flat_map(u32::to_le_bytes).collect();
        ensure(bytes.as_slice() == expected, || format!("overlapping {overlapping}: wrong numbers"))?;
    }
    Ok(format!("{} CTAs resident", number.resident_ctas(&launch)?))
}

/// Architecture-specific targets such as `sm_90a`: linked for that target by name, and cached like others.
fn architecture_specific(gpu: &Gpu) -> Outcome<String> {
    let target = Target { suffix: TargetSuffix::ArchSpecific, ..gpu.info().target() };
    if target.sm < 90 {
        return Ok(format!("sm_{} has none", target.sm));
    }
    let one = Dim3(1, 1, 1);
    let launch = Launch { cluster: one, ..Launch::new(one, Dim3(32, 1, 1)) };
    let kernel = Kernel {
        module: Builder::kernel("specific").into_verified(target)?,
        entry: "specific".to_owned(),
        launch,
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: Vec::<Arg>::new(),
    };
    let (context, stream) = (gpu.context(), Stream::new(gpu.context())?);
    let before = context.cache().stats();
    for _ in 0..2 {
        Function::load(context, &kernel, &Expect::of(&launch))?.launch(&stream, &Call::of(&kernel), &[])?;
    }
    stream.synchronize()?;
    let after = context.cache().stats();
    ensure(after.hits > before.hits, || format!("not cached: {after:?}"))?;
    Ok(target.to_string())
}

fn tensor_map(gpu: &Gpu) -> Outcome<String> {
    let buffer = driver::Buffer::new(gpu.context(), 8 * 512 * 128)?;
    let spec = TensorMapSpec {
        buffer: 0,
        offset: 0,
        element: Element::F16,
        extents: vec![64, 512, 8],
        strides: vec![128, 512 * 128],
        box_extents: vec![64, 128, 1],
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::default(),
        wraps: false,
    };
    let smaller = TensorMapSpec { box_extents: vec![64, 64, 1], ..spec.clone() };
    ensure(
        TensorMap::encode(&spec, buffer.slice())? != TensorMap::encode(&smaller, buffer.slice())?,
        || "two boxes, one map".to_owned(),
    )?;
    Ok(String::new())
}
