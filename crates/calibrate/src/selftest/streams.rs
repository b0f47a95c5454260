//! One launch runs on several streams at once, in varying order. Its outputs must be bit-identical each time.

use driver::{Buffer, Call, DriverError, Expect, Function, Gpu, Stream};
use judge::inputs::Style;
use kernels::Arch;
use problem::Problem;

use super::{Check, FEW, Making, Settings};
use check::gate::{Feed, bind};
use check::launchfile::{Bound, Role};

/// Number of concurrent streams.
const STREAMS: usize = 4;

/// Every variant of the plan, on a problem that leaves SMs to concurrent launches.
pub fn streams(gpu: &Gpu, arch: &Arch, settings: &Settings, progress: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut checks = Vec::new();
    for &(dtype, dim, variants) in &settings.kinds {
        let problem = Problem::new(1, 5, 333, dim, dtype);
        for variant in settings.variants(variants) {
            let Some((problem, plan)) = variant.plan(&problem, arch) else { continue };
            let mut making = Making::new(
                "streams",
                format!("{} {dtype} dim {dim}, {}", variant.family.name(), variant.name),
            );
            match bind(&plan, &problem, arch) {
                Ok(bound) => {
                    let rounds =
                        if variant.is_default() { settings.repeats } else { settings.repeats.min(FEW) };
                    if let Err(error) = at_once(gpu, &bound, rounds, &mut making) {
                        making.fail(error.to_string());
                    }
                }
                Err(error) => making.fail(error.to_string()),
            }
            checks.push(making.done());
            checks.last().into_iter().for_each(&mut *progress);
        }
    }
    checks
}

/// Launches on all streams `rounds` times, each stream with its own outputs, and compares the results.
fn at_once(gpu: &Gpu, bound: &Bound, rounds: u32, making: &mut Making) -> Result<(), DriverError> {
    let context = gpu.context();
    let mut steps = Vec::new();
    for kernel in bound.steps() {
        steps.push((Function::load(context, kernel, &Expect::of(&kernel.launch))?, Call::of(kernel)));
    }
    let Some(feed) = Feed::draw(bound, Style::Normal, 3) else { return Ok(()) };
    let contents: Vec<Vec<u8>> = feed.buffers(bound).iter().map(emu::Buffer::to_bytes).collect();
    let mut lanes: Vec<(Stream, Vec<Buffer>)> = Vec::new();
    for _ in 0..STREAMS {
        let mut buffers = Vec::new();
        for bytes in &contents {
            let mut buffer = Buffer::new(context, bytes.len())?;
            buffer.upload(bytes)?;
            buffers.push(buffer);
        }
        lanes.push((Stream::new(context)?, buffers));
    }
    let output = |role: &Role| bound.is_output(*role);
    let mut first: Option<Vec<u8>> = None;
    for round in 0..rounds as usize {
        // Each round starts with another stream, and every other round runs backwards.
        let order =
            (0..STREAMS).map(|i| (i * if round % 2 == 0 { 1 } else { STREAMS - 1 } + round) % STREAMS);
        for lane in order {
            let (stream, buffers) = &lanes[lane];
            let slices: Vec<_> = buffers.iter().map(Buffer::slice).collect();
            for (function, call) in &steps {
                function.launch(stream, call, &slices)?;
            }
            making.check.cases += 1;
        }
        for (stream, _) in &lanes {
            stream.synchronize()?;
        }
        for (lane, (_, buffers)) in lanes.iter_mut().enumerate() {
            let mut outputs = Vec::new();
            for ((buffer, role), start) in buffers.iter_mut().zip(&bound.roles).zip(&contents) {
                if output(role) {
                    let mut bytes = vec![0; buffer.bytes()];
                    buffer.download(&mut bytes)?;
                    outputs.extend(bytes);
                    // The output is poisoned again, so that a launch without effect fails.
                    buffer.upload(start)?;
                }
            }
            if first.get_or_insert_with(|| outputs.clone()) != &outputs {
                making.fail(format!("round {round}, stream {lane} differs from the first launch"));
            }
        }
    }
    Ok(())
}
