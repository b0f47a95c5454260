//! Kernels with counters and scratch on a real GPU: what the emulator and the fake driver cannot show.
//! Without a GPU of sm_90 these tests do nothing. With `FLASHCORE_REQUIRE_GPU` set, they fail instead.

#[allow(dead_code, reason = "the other cases are for the fake driver")]
#[path = "gpu/ring.rs"]
mod ring;

use std::sync::Arc;
use std::time::{Duration, Instant};

use driver::{Buffer, Graph, GroupId, Stream, bytes_of, devices};
use flashcore::gpu::{Gpu, Prepared};
use flashcore::parallel::SequenceSplit;
use flashcore::{AttentionError, Band, DType, Layout, Problem, Quantization, Tensor, quantize};
use half::f16;
use kernels::forward::wgmma::{Ends, WgmmaPlan};
use kernels::{Arch, Plan};
use tile::{Handout, Tail};

const SEQ: usize = 4096;
/// A number of heads with which the tiles of no head dim below divide evenly among 132 or 114 SMs.
const HEADS: usize = 5;
const ROUNDS: usize = 200;
const STREAMS: usize = 4;

fn gpu() -> Option<Arc<Gpu>> {
    let required = std::env::var_os("FLASHCORE_REQUIRE_GPU").is_some();
    match Gpu::open(0) {
        Ok(gpu) if gpu.arch().sm == 90 => Some(gpu),
        Ok(gpu) if required => panic!("{gpu:?} is not of sm_90"),
        Err(error) if required => panic!("{error}"),
        other => {
            filetest::not_run(
                other.err().map_or("the GPU is not of sm_90".to_owned(), |error| error.to_string()),
            );
            None
        }
    }
}

fn problem(dim: usize) -> Problem {
    Problem::new(1, HEADS, SEQ, dim, DType::F16).with_lse(true)
}

/// A plan whose CTAs take tiles from a counter, and a plan whose CTAs share the last tiles through scratch.
fn plans(arch: &Arch, problem: &Problem) -> [Plan; 2] {
    let default = WgmmaPlan::default_for(problem, arch);
    let dynamic = WgmmaPlan { handout: Handout::Dynamic, tail: Tail::Whole, ..default.clone() };
    let shared = WgmmaPlan { ends: Ends::Common, handout: Handout::Static, tail: Tail::Shared, ..default };
    [dynamic, shared].map(Plan::Wgmma)
}

/// Size in bytes of the buffer `name` of the plan's kernel.
fn bytes(arch: &Arch, problem: &Problem, plan: &Plan, name: &str) -> Option<usize> {
    let kernel = kernels::emit(problem, plan, arch).unwrap().kernel(0);
    kernel.buffers.iter().find(|buffer| buffer.name == name).map(|buffer| buffer.bytes)
}

/// The plans below have the counters and scratch that these tests are about. This test needs no GPU.
#[test]
fn the_plans_have_counters_and_scratch() {
    for dim in [64, 128] {
        let (arch, problem) = (Arch::SM_90, problem(dim));
        for (plan, scratch) in plans(&arch, &problem).iter().zip([false, true]) {
            assert_eq!(plan.check(&problem, &arch), Ok(()), "{plan:?}");
            assert!(bytes(&arch, &problem, plan, "counter").is_some(), "{plan:?}");
            assert_eq!(bytes(&arch, &problem, plan, "scratch").is_some(), scratch, "{plan:?}");
        }
    }
}

/// Numbers between -1 and 1, different for each seed.
fn draw(count: usize, seed: u32) -> Vec<f16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f16::from_f32(state as f32 / (1u64 << 31) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

struct Inputs([Buffer; 3]);

impl Inputs {
    fn new(gpu: &Gpu, dim: usize) -> Inputs {
        Inputs([1, 2, 3].map(|seed| {
            let data = draw(HEADS * SEQ * dim, seed);
            let mut buffer = Buffer::new(gpu.context(), 2 * data.len()).unwrap();
            buffer.upload(bytes_of(&data)).unwrap();
            buffer
        }))
    }
}

/// A stream with its own outputs.
struct Lane {
    stream: Stream,
    out: Buffer,
    lse: Buffer,
}

impl Lane {
    fn new(gpu: &Gpu, dim: usize) -> Lane {
        let buffer = |bytes| Buffer::new(gpu.context(), bytes).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        Lane { stream, out: buffer(HEADS * SEQ * dim * 2), lse: buffer(HEADS * SEQ * 4) }
    }

    /// Enqueues the computation of this lane's outputs on `stream`.
    fn enqueue(&self, prepared: &Prepared, inputs: &Inputs, stream: &Stream) -> Result<(), AttentionError> {
        let [q, k, v] = inputs.0.each_ref().map(Buffer::slice);
        prepared.enqueue(stream, q, k, v, self.out.slice(), Some(self.lse.slice()))
    }

    /// Fills the outputs with NaN, so that a launch that skips a tile fails the test.
    fn poison(&self) {
        self.stream.fill(self.out.slice(), 0xff).unwrap();
        self.stream.fill(self.lse.slice(), 0xff).unwrap();
    }

    fn outputs(&self) -> Vec<u8> {
        let mut outputs = vec![0; self.out.bytes() + self.lse.bytes()];
        let (out, lse) = outputs.split_at_mut(self.out.bytes());
        self.stream.download(self.out.slice(), out).unwrap();
        self.stream.download(self.lse.slice(), lse).unwrap();
        outputs
    }
}

/// Four streams, and two graphs that were captured from one stream and are launched on two others, all
/// concurrent. The outputs equal those of a single launch bit for bit.
#[test]
fn launches_that_run_at_once_share_nothing() {
    let Some(gpu) = gpu() else { return };
    for dim in [64, 128] {
        let (problem, inputs) = (problem(dim), Inputs::new(&gpu, dim));
        for plan in plans(gpu.arch(), &problem) {
            let prepared = gpu.prepare(&problem, Some(&plan)).unwrap();
            let lanes: Vec<Lane> = (0..STREAMS + 2).map(|_| Lane::new(&gpu, dim)).collect();
            lanes[0].poison();
            lanes[0].enqueue(&prepared, &inputs, &lanes[0].stream).unwrap();
            let alone = lanes[0].outputs();
            let nan =
                alone[..lanes[0].out.bytes()].chunks(2).any(|x| f16::from_le_bytes([x[0], x[1]]).is_nan());
            assert!(!nan, "a launch alone leaves elements unwritten");
            let graphs = [STREAMS, STREAMS + 1].map(|lane| {
                Graph::capture(&lanes[0].stream, |stream| lanes[lane].enqueue(&prepared, &inputs, stream))
                    .unwrap()
            });
            for round in 0..ROUNDS {
                lanes.iter().for_each(Lane::poison);
                // Each round starts with another lane.
                for lane in (0..lanes.len()).map(|i| (i + round) % lanes.len()) {
                    let stream = &lanes[lane].stream;
                    match lane.checked_sub(STREAMS) {
                        None => lanes[lane].enqueue(&prepared, &inputs, stream).unwrap(),
                        Some(graph) => graphs[graph].launch(stream).unwrap(),
                    }
                }
                for (index, lane) in lanes.iter().enumerate() {
                    assert!(lane.outputs() == alone, "dim {dim}, {plan:?}: round {round}, lane {index}");
                }
            }
        }
    }
}

/// Codes and factors of the GPU are those of the CPU, bit for bit, with smoothed keys too.
#[test]
fn quantised_tensors_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let stream = Stream::new(gpu.context()).unwrap();
    for (dim, heads_kv, rows) in [(64, 5, None), (128, 5, Some(64)), (128, 1, Some(128)), (80, 5, None)] {
        let problem = Problem::new(2, HEADS, 1000, dim, DType::F16).with_heads_kv(heads_kv, Layout::Bshd);
        let data = draw(2 * HEADS * 1000 * dim, dim as u32);
        let mut from = Buffer::new(gpu.context(), 2 * data.len()).unwrap();
        from.upload(bytes_of(&data)).unwrap();
        for (tensor, dtype, hadamard) in [
            (Tensor::Q, DType::E4m3, Some(1)),
            (Tensor::Q, DType::E5m2, None),
            (Tensor::K, DType::E4m3, Some(1)),
            (Tensor::K, DType::E5m2, None),
        ] {
            let plain = Quantization::per_head(dtype);
            let options = Quantization { rows, hadamard, smooth_keys: true, ..plain };
            let expected = quantize(&problem, tensor, &data, &options).unwrap();
            let sizes = [expected.codes.len(), 4 * expected.factors.len()];
            let [codes, factors] = sizes.map(|bytes| Buffer::new(gpu.context(), bytes).unwrap());
            let quantizer = gpu.prepare_quantization(&problem, tensor, &options).unwrap();
            quantizer.enqueue(&stream, from.slice(), codes.slice(), factors.slice()).unwrap();
            stream.synchronize().unwrap();
            let [mut found, mut of_kernel] = sizes.map(|bytes| vec![0; bytes]);
            codes.download(&mut found).unwrap();
            factors.download(&mut of_kernel).unwrap();
            let is_equal = found == expected.codes && of_kernel == bytes_of(&expected.factors);
            assert!(is_equal, "{tensor:?}, dim {dim}, heads_kv {heads_kv}, {options:?}");
        }
    }
}

/// Waits until at most `most` bytes of device memory are in use beyond `before`. Destroyed graphs are
/// reported by a thread of the driver, so this may take time.
fn given_back(gpu: &Gpu, before: usize, most: usize) {
    let start = Instant::now();
    loop {
        gpu.trim().unwrap();
        let taken = before.saturating_sub(gpu.context().free_memory().unwrap().0);
        if taken <= most {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{taken} bytes are not given back; at most {most}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Scratch of destroyed graphs and of idle streams is reused and freed.
#[test]
fn scratch_is_given_back() {
    let Some(gpu) = gpu() else { return };
    let (dim, context) = (128, gpu.context());
    let (problem, inputs) = (problem(dim), Inputs::new(&gpu, dim));
    let [_, plan] = plans(gpu.arch(), &problem);
    let scratch = bytes(gpu.arch(), &problem, &plan, "scratch").unwrap();
    let prepared = gpu.prepare(&problem, Some(&plan)).unwrap();
    let lane = Lane::new(&gpu, dim);
    let capture = || Graph::capture(&lane.stream, |stream| lane.enqueue(&prepared, &inputs, stream)).unwrap();
    lane.enqueue(&prepared, &inputs, &lane.stream).unwrap();
    let alone = lane.outputs();
    // The driver allocates its own memory for graphs at the first graph.
    let first = capture();
    first.launch(&lane.stream).unwrap();
    lane.stream.synchronize().unwrap();
    drop(first);
    let (before, _) = context.free_memory().unwrap();

    // One graph after another, launched and dropped while it runs.
    for round in 0..200 {
        let graph = capture();
        graph.launch(&lane.stream).unwrap();
        drop(graph);
        if round % 50 == 49 {
            assert!(lane.outputs() == alone, "round {round}");
        }
    }
    lane.stream.synchronize().unwrap();
    given_back(&gpu, before, 2 * scratch);
    // All graphs at once.
    let graphs: Vec<_> = (0..60).map(|_| capture()).collect();
    let taken = before.saturating_sub(context.free_memory().unwrap().0);
    assert!(taken >= 50 * scratch, "graphs that are alive share scratch: {taken} bytes for 60");
    graphs.iter().try_for_each(|graph| graph.launch(&lane.stream)).unwrap();
    drop(graphs);
    assert!(lane.outputs() == alone);
    given_back(&gpu, before, 2 * scratch);
    // One stream per request. The first four streams keep their places, and a pool holds memory in larger
    // pieces.
    for _ in 0..100 {
        let stream = Stream::new(context).unwrap();
        lane.enqueue(&prepared, &inputs, &stream).unwrap();
        stream.synchronize().unwrap();
    }
    assert!(lane.outputs() == alone);
    given_back(&gpu, before, 10 * scratch);
    // One stream per request without waiting for each.
    let lanes: Vec<Lane> = (0..20).map(|_| Lane::new(&gpu, dim)).collect();
    for _ in 0..3 {
        lanes.iter().try_for_each(|lane| lane.enqueue(&prepared, &inputs, &lane.stream)).unwrap();
    }
    assert!(lanes.iter().all(|lane| lane.outputs() == alone));
    drop(lanes);
    given_back(&gpu, before, 10 * scratch);
}

/// A ring over the GPUs of this host, each of which is a rank.
#[test]
fn shards_go_around_the_gpus_of_a_host() {
    let Some(_) = gpu() else { return };
    let found = devices().and_then(|gpus| GroupId::new().map(|_| gpus.len()));
    let ranks = match found {
        Ok(ranks) if ranks > 1 => ranks,
        other => {
            let why =
                other.map_or_else(|error| error.to_string(), |_| "one GPU, and two are needed".to_owned());
            return filetest::not_run(why);
        }
    };
    for (split, dim, band) in [
        (SequenceSplit::zigzag(&[0, 1000], ranks), 64, Band::CAUSAL),
        (SequenceSplit::by_documents(&[0, 300, 301, 1100], ranks), 128, Band::CAUSAL),
        (SequenceSplit::contiguous(&[0, 900], ranks), 64, Band::window(200, 0)),
    ] {
        ring::compute(&split.unwrap(), dim, band, |rank| rank as i32);
    }
}
