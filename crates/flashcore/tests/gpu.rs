//! The GPU path from end to end without a GPU. The driver is the fake one of `flashcore-driver`'s tests. A
//! launch runs in the emulator, in a child process of this test program that reads the launch from a file and
//! writes the memory that the kernel leaves.
#![cfg(target_os = "linux")]

#[path = "gpu/calls.rs"]
mod calls;
#[path = "../../driver/tests/fake/counts.rs"]
mod counts;
#[path = "gpu/gradients.rs"]
mod gradients;
#[path = "../../driver/tests/fake/harness.rs"]
mod harness;
#[path = "gpu/hopper.rs"]
mod hopper;
#[path = "gpu/merge.rs"]
mod merge;
#[path = "gpu/ring.rs"]
mod ring;
#[path = "../../driver/tests/fake/runner.rs"]
mod runner;

use driver::{Buffer, DriverError, Graph, Stream, bytes_of};
use flashcore::gpu::{Gpu, Operand, PlanSource, Prepared};
use flashcore::{
    AttentionError, Band, DType, Device, Element, Layout, Problem, Program, Quantization, Strides, Tensor,
    TensorView, TensorViewMut, attention, library, quantize, raw,
};
use half::f16;
use harness::{Folder, SCENARIO, all_pass};
use kernels::forward::mma::MmaPlan;
use kernels::forward::wgmma::{Ends, Tables, WgmmaPlan};
use kernels::{Family, Plan};
use problem::{ElementType, OperandMap, Operands, Table};
use tile::{Handout, Tail, Turns};

#[test]
fn scenario() {
    match std::env::var(SCENARIO).as_deref() {
        Ok("slices") => slices(),
        Ok("device_memory") => [device_memory, addresses].iter().for_each(|test| test()),
        Ok("calls") => calls::calls(),
        Ok("gradients") => gradients::gradients(),
        Ok("merge") => merge::merge(),
        Ok("ring") => ring::ring(),
        Ok("lengths") => lengths(),
        Ok("fallbacks") => fallbacks(),
        Ok("hopper_fallbacks") => hopper_fallbacks(),
        Ok("hopper") => hopper::hopper(),
        Ok("full") => full(),
        Ok("programs") => programs(),
        Ok("quantization") => quantization(),
        Ok("scratch") => scratch(),
        Ok("old") => without("the CUDA driver supports CUDA 11.8, needed is 12.0 or later"),
        Ok("no_device") => without("device 0 does not exist; the driver sees 0 device(s)"),
        Ok("forbidden") => without("cuInit is not permitted: CUDA_ERROR_NOT_PERMITTED"),
        Ok("stub") => without("cuDriverGetVersion failed: CUDA_ERROR_STUB_LIBRARY"),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

#[test]
fn runner() {
    runner::emulate_given();
}

/// Values that f16 represents exactly.
fn ramp(n: usize, step: usize) -> Vec<f16> {
    (0..n).map(|i| f16::from_f32(((i * step) % 17) as f32 / 8.0 - 1.0)).collect()
}

fn close(ours: &[f16], exact: &[f64]) {
    assert_eq!(ours.len(), exact.len());
    for (ours, exact) in ours.iter().zip(exact) {
        assert!((f64::from(ours.to_f32()) - exact).abs() < 2e-3, "{ours} {exact}");
    }
}

fn close_lse(ours: &[f32], exact: &[f64]) {
    for (ours, exact) in ours.iter().zip(exact) {
        assert!(f64::from(*ours) == *exact || (f64::from(*ours) - exact).abs() < 1e-5, "{ours} {exact}");
    }
}

/// `attention()` on host slices: the best device is the GPU, gaps between output rows keep their values.
fn slices() {
    assert_eq!(Device::best(), Device::Cuda(0));
    let (q, k, v) = (ramp(4 * 20 * 16, 3), ramp(2 * 30 * 16, 5), ramp(2 * 30 * 16, 11));
    let view = |data, shape| TensorView::dense(data, shape, Layout::Bshd).unwrap();
    let call =
        attention(view(&q, [1, 4, 20, 16]), view(&k, [1, 2, 30, 16]), view(&v, [1, 2, 30, 16])).causal();
    let problem = Problem::new(1, 4, 20, 16, DType::F16).with_band(Band::CAUSAL);
    let mut problem = Problem { heads_kv: 2, seq_kv: 30, ..problem }.with_layout(Layout::Bshd);
    problem.out = Layout::Bhsd.strides(4, 20, 16);
    let oracle = oracle::oracle(&problem, &q, &k, &v).unwrap();
    let best = call.clone().run().unwrap();
    close(&best.data, &oracle.out);
    close_lse(&best.lse, &oracle.lse);
    assert_eq!(call.clone().device(Device::Cuda(0)).run().unwrap(), best);
    close(&call.clone().device(Device::Cpu).run().unwrap().data, &oracle.out);

    // Top-left alignment, with keys that no row sees and with rows that see all keys.
    let long = ramp(4 * 30 * 16, 3);
    for (rows, keys) in [(20, 30), (30, 20)] {
        let queries = TensorView::dense(&long[..4 * rows * 16], [1, 4, rows, 16], Layout::Bhsd).unwrap();
        let [k, v] =
            [&k, &v].map(|x| TensorView::dense(&x[..2 * keys * 16], [1, 2, keys, 16], Layout::Bhsd).unwrap());
        let call = attention(queries, k, v).causal_top_left();
        let [gpu, cpu] =
            [Device::Cuda(0), Device::Cpu].map(|device| call.clone().device(device).run().unwrap());
        close(&gpu.data, &cpu.data.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>());
        close_lse(&gpu.lse, &cpu.lse.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    }

    let seven = f16::from_f32(7.0);
    let mut gaps = vec![seven; 4 * 20 * 24];
    let strides = Strides { batch: 0, head: 20 * 24, row: 24 };
    call.run_into(TensorViewMut::strided(&mut gaps, [1, 4, 20, 16], strides).unwrap(), None).unwrap();
    for (row, dense) in gaps.chunks(24).zip(best.data.chunks(16)) {
        assert_eq!((&row[..16], &row[16..]), (dense, &[seven; 8][..]));
    }

    // Query rows with a negative stride, and one value row broadcast to all keys.
    let back = Strides { batch: 0, head: 20 * 16, row: -16 };
    let same = Strides { batch: 0, head: 0, row: 0 };
    let (q, one) = (ramp(2 * 20 * 16, 3), ramp(16, 7));
    let keys = TensorView::dense(&k, [1, 2, 30, 16], Layout::Bhsd).unwrap();
    let queries = TensorView::strided(&q, [1, 2, 20, 16], back).unwrap();
    for values in [keys, TensorView::strided(&one, [1, 2, 30, 16], same).unwrap()] {
        let on = |device: Device| attention(queries, keys, values).device(device).run().unwrap();
        let (gpu, cpu) = (on(Device::Cuda(0)), on(Device::Cpu));
        close(&gpu.data, &cpu.data.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>());
    }

    let data = vec![0.5f32; 8 * 16];
    let view = TensorView::dense(&data, [1, 1, 8, 16], Layout::Bhsd).unwrap();
    assert!(attention(view, view, view).run().unwrap().data.iter().all(|x| (x - 0.5).abs() < 1e-6));
    let wide = |n, step| ramp(n, step).into_iter().map(f16::to_f32).collect::<Vec<_>>();
    let (q, k, v) = (wide(4 * 20 * 16, 3), wide(2 * 30 * 16, 5), wide(2 * 30 * 16, 11));
    let [q, k, v] = [(&q, 4, 20), (&k, 2, 30), (&v, 2, 30)]
        .map(|(data, heads, rows)| TensorView::dense(data, [1, heads, rows, 16], Layout::Bshd).unwrap());
    let [gpu, cpu] =
        [Device::Cuda(0), Device::Cpu].map(|device| attention(q, k, v).device(device).run().unwrap());
    let near = |(gpu, cpu): (&f32, &f32)| (gpu - cpu).abs() < 1e-5;
    assert!(gpu.data.iter().zip(&cpu.data).all(near) && gpu.lse.iter().zip(&cpu.lse).all(near));
    let error = attention(view, view, view).device(Device::Cuda(3)).run().unwrap_err();
    assert_eq!(error, AttentionError::Driver(DriverError::NoDevice { ordinal: 3, count: 1 }));
}

/// Tensors in device memory, each `shift` bytes after the start of its buffer.
struct Tensors(Vec<Buffer>, usize);

impl Tensors {
    fn new(gpu: &Gpu, contents: [&[u8]; 5], shift: usize) -> Tensors {
        let buffer = |data: &[u8]| {
            let mut buffer = Buffer::new(gpu.context(), data.len() + shift).unwrap();
            buffer.upload(&[vec![0; shift], data.to_vec()].concat()).unwrap();
            buffer
        };
        Tensors(contents.map(buffer).into(), shift)
    }

    fn slice(&self, i: usize) -> driver::DeviceSlice<'_> {
        self.0[i].slice().part(self.1, self.0[i].bytes() - self.1).unwrap()
    }

    fn enqueue(&self, prepared: &Prepared, stream: &Stream) -> Result<(), AttentionError> {
        let [q, k, v, out, lse] = [0, 1, 2, 3, 4].map(|i| self.slice(i));
        prepared.enqueue(stream, q, k, v, out, Some(lse))
    }

    fn out(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.0[3].bytes()];
        self.0[3].download(&mut bytes).unwrap();
        bytes.split_off(self.1)
    }
}

/// One prepared kernel: aligned, misaligned and captured calls agree bit for bit. Slices that do not fit are
/// rejected.
fn device_memory() {
    let gpu = Gpu::open(0).unwrap();
    assert_eq!((gpu.arch().sm, gpu.arch().multiprocessors), (89, 132));
    let problem = Problem::new(1, 2, 20, 16, DType::F16).with_lse(true);
    let prepared = gpu.prepare(&problem, None).unwrap();
    assert!(std::sync::Arc::ptr_eq(&prepared, &gpu.prepare(&problem, None).unwrap()));
    assert_eq!((prepared.choice(), prepared.fallbacks().len()), (PlanSource::Default, 0));
    let stream = Stream::new(gpu.context()).unwrap();
    let (q, k, v) = (ramp(640, 3), ramp(640, 5), ramp(640, 11));
    let nan = vec![0xff; 1280];
    let contents = [bytes_of(&q), bytes_of(&k), bytes_of(&v), &nan, &nan[..160]];
    let tensors = Tensors::new(&gpu, contents, 0);
    tensors.enqueue(&prepared, &stream).unwrap();
    let out: Vec<f16> = tensors.out().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
    close(&out, &oracle::oracle(&problem, &q, &k, &v).unwrap().out);

    // In a capture, nothing runs before the graph's launch. The first misaligned call may load its variant
    // during the capture.
    let (captured, shifted) = (Tensors::new(&gpu, contents, 0), Tensors::new(&gpu, contents, 4));
    let graph = Graph::capture(&stream, |stream| {
        captured.enqueue(&prepared, stream)?;
        shifted.enqueue(&prepared, stream)
    })
    .unwrap();
    assert_eq!(captured.out(), nan);
    graph.launch(&stream).unwrap();
    assert!(captured.out() == tensors.out() && shifted.out() == tensors.out());

    let refuse = |outcome: Result<(), AttentionError>, words: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let [q, k, v, out, lse] = [0, 1, 2, 3, 4].map(|i| tensors.slice(i));
    let short = v.part(0, 1278).unwrap();
    refuse(prepared.enqueue(&stream, q, k, short, out, Some(lse)), "v has 1278 bytes of device memory");
    refuse(prepared.enqueue(&stream, q, k, v, out, None), "lse is missing");
    let odd = Tensors::new(&gpu, contents, 1);
    refuse(odd.enqueue(&prepared, &stream), "expected a multiple of 2 bytes");
    let unordered = Problem { heads_kv: 0, ..problem.clone() };
    refuse(gpu.prepare(&unordered, None).map(drop), "'0' for heads_kv");

    // Strides beyond the address space are rejected before anything is loaded.
    let far = Strides { batch: 0, head: i64::MAX, row: 16 };
    refuse(gpu.prepare(&Problem { k: far, ..problem.clone() }, None).map(drop), "k is too large");

    // Without batches or rows there is no launch; without keys the output is zero.
    let none = driver::DeviceSlice::EMPTY;
    let without = problem.clone().with_lse(false);
    let empty = gpu.prepare(&Problem { batch: 0, ..without.clone() }, None).unwrap();
    empty.enqueue(&stream, none, none, none, none, None).unwrap();
    let empty = gpu.prepare(&Problem { seq_q: 0, ..without }, None).unwrap();
    empty.enqueue(&stream, none, none, none, none, None).unwrap();
    let keyless = problem.with_seq_kv(0, Layout::Bhsd);
    gpu.prepare(&keyless, None).unwrap().enqueue(&stream, q, none, none, out, Some(lse)).unwrap();
    assert_eq!(tensors.out(), vec![0; 1280]);
    let mut lse = [0; 160];
    tensors.0[4].download(&mut lse).unwrap();
    assert!(lse.chunks(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) == f32::NEG_INFINITY));
}

/// A call on addresses finds what was prepared, launches on the stream, and refuses operands by name.
#[allow(unsafe_code, reason = "the raw call takes addresses")]
fn addresses() {
    let gpu = Gpu::open(0).unwrap();
    let problem = Problem::new(1, 2, 20, 16, DType::F16);
    let stream = Stream::new(gpu.context()).unwrap();
    let (q, k, v) = (ramp(640, 3), ramp(640, 5), ramp(640, 11));
    let nan = vec![0xff; 1280];
    let sets = [[&q, &k, &v], [&v, &q, &k]].map(|[q, k, v]| [bytes_of(q), bytes_of(k), bytes_of(v)]);
    let mut sets = sets.map(|[q, k, v]| Tensors::new(&gpu, [q, k, v, &nan, &nan[..160]], 0));
    let of = |tensors: &Tensors, backwards: bool| -> OperandMap<raw::Tensor> {
        let tensor = |i| {
            let (mut strides, mut address) = (Layout::Bhsd.strides(2, 20, 16), tensors.slice(i).address());
            if backwards && (1..=2).contains(&i) {
                (strides.row, address) = (-16, address + 19 * 32);
            }
            raw::Tensor { address, view: raw::View::rows(DType::F16, [1, 2, 20, 16], strides) }
        };
        let all = [Operand::Q, Operand::K, Operand::V, Operand::OUT];
        all.into_iter().enumerate().map(|(i, operand)| (operand, tensor(i))).collect()
    };
    let options = raw::CallOptions::default();
    let queue = raw::Queue::Stream { gpu: &gpu, handle: stream.raw() };
    let exact = oracle::oracle(&problem, &q, &k, &v).unwrap().out; // the same for keys in another order
    let exact_others = oracle::oracle(&problem, &v, &q, &k).unwrap().out;
    let half = raw::CallOptions { scale: Some(0.125), ..options.clone() };
    let mut scaled = problem.clone();
    scaled.score.scale = Some(0.125);
    let exact_half = oracle::oracle(&scaled, &q, &k, &v).unwrap().out;
    // Calls that differ in addresses, strides or options from an earlier one, which the thread remembers.
    for (backwards, on, options, exact) in [
        (false, 0, &options, &exact),
        (true, 0, &options, &exact),
        (true, 1, &options, &exact_others),
        (false, 0, &half, &exact_half),
        (false, 1, &options, &exact_others),
        (true, 0, &options, &exact),
    ] {
        sets[on].0[3].upload(&nan).unwrap();
        let on = &sets[on];
        // SAFETY: the tensors are in device memory and outlive the launch.
        unsafe { raw::prepare(queue, &of(on, backwards), options).unwrap().enqueue() }.unwrap();
        let out: Vec<f16> = on.out().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        close(&out, exact);
    }
    // A call with reversed keys, repeated on other addresses, which come in another order.
    sets[1].0[3].upload(&nan).unwrap();
    let in_order = [Operand::OUT, Operand::V, Operand::Q, Operand::K];
    let given = |on: usize| in_order.map(|operand| (Some(operand), of(&sets[on], true)[operand].address));
    let repeated = raw::prepare(queue, &of(&sets[0], true), &options).unwrap().repeated(&given(0)).unwrap();
    let others = given(1).map(|(_, address)| address);
    // SAFETY: as above.
    unsafe { repeated.enqueue(stream.raw(), |index| others[index]) }.unwrap();
    let out: Vec<f16> = sets[1].out().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
    close(&out, &exact_others);
    for (address, expected) in [(1, "expected a multiple of 2 bytes"), (0, "address of q: expected that of")]
    {
        let odd = others.map(|other| if address == 0 { 0 } else { other + address });
        // SAFETY: the call is refused.
        let error = unsafe { repeated.enqueue(stream.raw(), |index| odd[index]) }.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }

    let operands = |backwards| of(&sets[0], backwards);
    let ready = raw::prepare(queue, &operands(false), &options).unwrap();
    assert!(std::sync::Arc::ptr_eq(ready.prepared().unwrap(), &gpu.prepare(&problem, None).unwrap()));
    assert_eq!(ready.workspace_size(), 0);
    let mut odd = operands(false);
    odd[Operand::V].address += 1;
    // SAFETY: as above.
    let error = unsafe { raw::prepare(queue, &odd, &options).unwrap().enqueue() }.unwrap_err().to_string();
    assert!(error.contains("for the address of v: expected a multiple of 2 bytes"), "{error}");
}

/// Codes and factors in device memory are those of host memory, by one kernel, by two, and with smoothed keys
/// by three, also from a graph.
fn quantization() {
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let problem = Problem::new(1, 4, 100, 32, DType::F16).with_heads_kv(2, Layout::Bshd);
    let plain = Quantization::per_head(DType::E4m3);
    let refuse = |outcome: Result<(), AttentionError>, words: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    for (tensor, heads) in [(Tensor::Q, 4), (Tensor::K, 2)] {
        let data = ramp(heads * 100 * 32, 7);
        let options = Quantization { rows: Some(64), hadamard: Some(3), smooth_keys: true, ..plain };
        let expected = quantize(&problem, tensor, &data, &options).unwrap();
        let (bytes, factors) = (expected.codes.len(), expected.factors.len());
        let mut from = Buffer::new(gpu.context(), 2 * bytes).unwrap();
        from.upload(bytes_of(&data)).unwrap();
        let quantizer = gpu.prepare_quantization(&problem, tensor, &options).unwrap();
        let outputs = [(); 2].map(|()| [bytes, 4 * factors].map(|n| Buffer::new(gpu.context(), n).unwrap()));
        let enqueue = |stream: &Stream, [codes, factors]: &[Buffer; 2]| {
            quantizer.enqueue(stream, from.slice(), codes.slice(), factors.slice())
        };
        enqueue(&stream, &outputs[0]).unwrap();
        let graph = Graph::capture(&stream, |stream| enqueue(stream, &outputs[1])).unwrap();
        graph.launch(&stream).unwrap();
        for [codes, factors] in &outputs {
            let (mut found, mut of_kernel) = (vec![0; bytes], vec![0; 4 * expected.factors.len()]);
            codes.download(&mut found).unwrap();
            factors.download(&mut of_kernel).unwrap();
            assert!(found == expected.codes && of_kernel == bytes_of(&expected.factors), "{tensor:?}");
        }
        let [codes, factors] = outputs[0].each_ref().map(Buffer::slice);
        let short = codes.part(0, bytes - 1).unwrap();
        refuse(quantizer.enqueue(&stream, from.slice(), short, factors), "_codes has");
        let shifted = from.slice().part(8, 2 * bytes - 8).unwrap();
        refuse(quantizer.enqueue(&stream, shifted, codes, factors), "bytes of device memory");
        let larger = Buffer::new(gpu.context(), 2 * bytes + 8).unwrap();
        let shifted = larger.slice().part(8, 2 * bytes).unwrap();
        refuse(quantizer.enqueue(&stream, shifted, codes, factors), "expected a multiple of 16 bytes");
    }
    let (capped, smooth) = (problem.clone().with_softcap(5.0), Quantization { smooth_keys: true, ..plain });
    let words = "'true' for smooth_keys: expected false with a softcap";
    refuse(gpu.prepare_quantization(&capped, Tensor::K, &smooth).map(drop), words);
    let none = Quantization { dtype: DType::F16, ..plain };
    refuse(gpu.prepare_quantization(&problem, Tensor::K, &none).map(drop), "'f16' for dtype: expected e4m3");
}

/// A new length loads no new module: the text is the same, and so is the function. Out of memory does not
/// reject a kernel for good.
fn lengths() {
    let gpu = Gpu::open(0).unwrap();
    let function = |rows: usize, lse: bool| {
        let problem = Problem::new(1, 2, rows, 64, DType::F16).with_lse(lse);
        let prepared = gpu.prepare(&problem, None)?;
        Ok::<_, AttentionError>(format!("{:?}", prepared.parts().0)) // with the driver's handle
    };
    let first = function(300, true).unwrap();
    assert!((301..304).all(|rows| function(rows, true).unwrap() == first));
    assert_ne!(function(300, false).unwrap(), first);

    // One plan for problems that differ in what a launch is told: all launch one kernel, with other
    // arguments.
    let decoded = |batch, keys, window, cap| {
        let problem = Problem::new(batch, 8, 1, 64, DType::F16).with_softcap(cap);
        problem.with_seq_kv(keys, Layout::Bhsd).with_band(Band::window(window, 0))
    };
    let of = decoded(1, 1001, 100, 30.0);
    let plan = Plan::Mma(MmaPlan { splits: 1, ..MmaPlan::default_for(&of, gpu.arch()) });
    let launched = |problem: &Problem| {
        let prepared = gpu.prepare(problem, Some(&plan)).unwrap();
        let (function, call) = prepared.parts();
        (format!("{function:?}"), call.args().to_vec())
    };
    let (function, args) = launched(&of);
    for other in [decoded(1, 1002, 100, 30.0), decoded(5, 1001, 37, 30.0), decoded(1, 2003, 100, 20.0)] {
        let (same, others) = launched(&other);
        assert!(same == function && others != args, "{other:?}");
    }
    assert_ne!(launched(&decoded(1, 1024, 100, 30.0)).0, function, "blocks end where the keys end");

    let problem = Problem::new(1, 2, 300, 64, DType::F16);
    let counting = Family::Wgmma.default_for(&problem, gpu.arch()).unwrap();
    let everything: Vec<Buffer> = std::iter::from_fn(|| Buffer::new(gpu.context(), 1024).ok()).collect();
    let error = gpu.prepare(&problem, Some(&counting)).unwrap_err();
    assert!(matches!(error, AttentionError::Driver(DriverError::OutOfMemory { .. })), "{error}");
    drop(everything);
    gpu.prepare(&problem, Some(&counting)).unwrap();
}

/// A driver whose compiler spills: the default plan is rejected and the safe plan taken. A plan that the
/// caller gives is taken despite its spills.
fn fallbacks() {
    let gpu = Gpu::open(0).unwrap();
    let problem = Problem::new(1, 2, 20, 16, DType::F16);
    let prepared = gpu.prepare(&problem, None).unwrap();
    assert_eq!(prepared.choice(), PlanSource::Safe);
    let [fallback] = prepared.fallbacks() else { panic!("{:?}", prepared.fallbacks()) };
    assert_eq!(fallback.source, PlanSource::Default);
    assert!(
        fallback
            .reason
            .to_string()
            .contains("invalid value '80' for local bytes per thread: expected at most 64")
    );
    let given = Plan::default_for(&problem, gpu.arch()).unwrap();
    let prepared = gpu.prepare(&problem, Some(&given)).unwrap();
    assert_eq!(
        (prepared.plan(), prepared.choice(), prepared.resources().local),
        (&given, PlanSource::Given, 80)
    );
}

/// A device of 9.0: its own families are tried first. Problems that they do not support go to the `mma`
/// family.
fn hopper_fallbacks() {
    let gpu = Gpu::open(0).unwrap();
    let problem = Problem::new(1, 2, 100, 64, DType::F16);
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None).unwrap();
    let families: Vec<&str> = prepared.fallbacks().iter().map(|fallback| fallback.plan.family()).collect();
    // The predicted plan may be of any family.
    assert!(families.ends_with(&["small_at_once", "mma"]), "{families:?}");
    assert_eq!(prepared.plan().family(), "mma");
    assert_eq!(prepared.choice(), PlanSource::Safe);
    // Rows at addresses where no tensor map can begin.
    let mut odd = problem.clone();
    (odd.k.row, odd.k.head) = (65, 6500);
    let prepared = gpu.prepare(&odd, None).unwrap();
    assert!(prepared.fallbacks().iter().all(|fallback| fallback.plan.family() == "mma"));
    // A plan that the caller gives is not replaced. With rows that its tensor maps do not support, it is an
    // error.
    let given = Family::SmallAtOnce.default_for(&problem, gpu.arch()).unwrap();
    let prepared = gpu.prepare(&problem, Some(&given)).unwrap();
    assert_eq!((prepared.plan(), prepared.parts().1.has_tensor_maps()), (&given, true));
    let error = gpu.prepare(&odd, Some(&given)).unwrap_err().to_string();
    assert!(error.contains("invalid value '6500' for k head stride"), "{error}");
}

/// Counters and scratch: launches that may run concurrently never share a place, and a place is reused once
/// the launches that used it are done.
fn scratch() {
    let gpu = Gpu::open(0).unwrap();
    let context = gpu.context();
    let problem = Problem::new(1, 5, 4096, 64, DType::F16);
    let plan = WgmmaPlan {
        ends: Ends::Common,
        handout: Handout::Static,
        tail: Tail::Shared,
        ..WgmmaPlan::default_for(&problem, gpu.arch())
    };
    let prepared = gpu.prepare(&problem, Some(&Plan::Wgmma(plan.clone()))).unwrap();
    let kernel = kernels::emit(&problem, &Plan::Wgmma(plan), gpu.arch()).unwrap().kernel(0);
    let bytes = kernel.buffers.iter().find(|buffer| buffer.name == "scratch").unwrap().bytes;
    // A power of two or three quarters of one.
    let power = bytes.next_power_of_two();
    let place = if bytes <= power / 4 * 3 { power / 4 * 3 } else { power };
    let [q, k, v, out] = [(); 4].map(|()| Buffer::new(context, 5 * 4096 * 64 * 2).unwrap());
    let enqueue = |stream: &Stream| {
        prepared.enqueue(stream, q.slice(), k.slice(), v.slice(), out.slice(), None).unwrap();
        Ok::<(), AttentionError>(())
    };
    // Places of scratch beyond those that exist now. Counters are allocated 64 at a time and are small.
    let free = || context.free_memory().unwrap().0;
    let start = free();
    let places = || (start - free()) / place;
    let stream = || Stream::new(context).unwrap();

    // The kernel comes with one place. Each live graph takes one.
    let first = stream();
    let capture = || Graph::capture(&first, enqueue).unwrap();
    for _ in 0..50 {
        drop(capture());
    }
    assert_eq!(places(), 0);
    let graphs: Vec<_> = (0..6).map(|_| capture()).collect();
    assert_eq!(places(), 5);
    drop(graphs);
    drop(capture());
    assert_eq!(places(), 0, "more is kept than for the next graph");
    // A capture that fails after two launches into one graph.
    for _ in 0..3 {
        let error = Graph::capture(&first, |stream| {
            (0..2).try_for_each(|_| enqueue(stream))?;
            stream.synchronize()?;
            Ok::<(), AttentionError>(())
        });
        assert!(error.is_err());
    }
    assert_eq!(places(), 0);

    // The first four streams keep their places. All other idle streams share one place.
    let streams: Vec<Stream> = (0..4).map(|_| stream()).collect();
    streams.iter().try_for_each(enqueue).unwrap();
    assert_eq!(places(), 3);
    for _ in 0..50 {
        enqueue(&stream()).unwrap();
    }
    assert_eq!(places(), 4);
    // Streams that are not idle do not share a place.
    let hold = std::env::var("FAKE_HOLD").unwrap();
    std::fs::write(&hold, "").unwrap();
    let busy: Vec<Stream> = (0..6).map(|_| stream()).collect();
    for _ in 0..3 {
        busy.iter().try_for_each(enqueue).unwrap();
        streams.iter().try_for_each(enqueue).unwrap();
    }
    assert_eq!(places(), 10);
    gpu.trim().unwrap();
    assert_eq!(places(), 10, "taken from launches that are not done");
    std::fs::remove_file(&hold).unwrap();
    // Places are also reused while a stream is captured.
    let graph = Graph::capture(&first, |first| {
        (0..6).try_for_each(|_| enqueue(&stream()))?;
        enqueue(first)
    });
    assert_eq!(places(), 10);
    drop(graph);
    gpu.trim().unwrap();
    assert_eq!(places(), 3, "more is left than the four streams'");
}

/// A plan of two kernels: threads that use one stream at once, and a captured graph, get right results.
fn programs() {
    let gpu = Gpu::open(0).unwrap();
    let problem = Problem::new(1, 2, 3, 16, DType::F16).with_lse(true);
    let problem = Problem { seq_kv: 200, ..problem }.with_layout(Layout::Bhsd);
    let default = MmaPlan::default_for(&problem, gpu.arch());
    let plan = MmaPlan { splits: 3, block_m: 64, block_n: 32, warps: 4, kv_warps: 1, ..default };
    let prepared = gpu.prepare(&problem, Some(&Plan::Mma(plan))).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let (k, v) = (ramp(2 * 200 * 16, 5), ramp(2 * 200 * 16, 11));
    let nan = [0xff; 192];
    let tensors =
        |q: &[f16]| Tensors::new(&gpu, [bytes_of(q), bytes_of(&k), bytes_of(&v), &nan, &nan[..24]], 0);
    let judge = |q: &[f16], tensors: &Tensors| {
        let out: Vec<f16> = tensors.out().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        close(&out, &oracle::oracle(&problem, q, &k, &v).unwrap().out);
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (prepared, stream, tensors, judge) = (&prepared, &stream, &tensors, &judge);
            scope.spawn(move || {
                let q = ramp(96, 3 + 2 * thread);
                let tensors = tensors(&q);
                tensors.enqueue(prepared, stream).unwrap();
                judge(&q, &tensors);
            });
        }
    });
    let queries = [3, 7].map(|step| ramp(96, step));
    let captured = queries.each_ref().map(|q| tensors(q));
    let graph = Graph::capture(&stream, |stream| {
        captured.iter().try_for_each(|tensors| tensors.enqueue(&prepared, stream))
    })
    .unwrap();
    assert!(captured.iter().all(|tensors| tensors.out() == nan));
    graph.launch(&stream).unwrap();
    queries.iter().zip(&captured).for_each(|(q, tensors)| judge(q, tensors));
}

/// A device without free memory: the CPU computes, unless the caller named the GPU.
fn full() {
    let data: Vec<f16> = ramp(4096, 3);
    let view = TensorView::dense(&data, [1, 1, 256, 16], Layout::Bhsd).unwrap();
    let out = attention(view, view, view).run().unwrap();
    let exact = oracle::oracle(&Problem::new(1, 1, 256, 16, f16::DTYPE), &data, &data, &data).unwrap();
    close(&out.data, &exact.out);
    let error = attention(view, view, view).device(Device::Cuda(0)).run().unwrap_err();
    assert!(matches!(error, AttentionError::Driver(DriverError::OutOfMemory { .. })), "{error}");
}

/// Without a usable GPU, the CPU computes. A caller that names the GPU gets the reason as an error.
fn without(reason: &str) {
    assert_eq!(Device::best(), Device::Cpu);
    let data = ramp(8 * 16, 3);
    let view = TensorView::dense(&data, [1, 1, 8, 16], Layout::Bhsd).unwrap();
    let exact = oracle::oracle(&Problem::new(1, 1, 8, 16, f16::DTYPE), &data, &data, &data).unwrap();
    close(&attention(view, view, view).run().unwrap().data, &exact.out);
    for error in [Gpu::open(0).map(drop), attention(view, view, view).device(Device::Cuda(0)).run().map(drop)]
    {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

const HOPPER: (&str, &str) = ("FAKE_SM", "90");
const HOPPERS_THREADS: (&str, &str) = ("FAKE_THREADS", "512");

#[test]
fn every_scenario_passes_whose_launches_run_in_the_emulator() {
    let runner = std::env::current_exe().unwrap();
    let emulated = [("FAKE_RUNNER", runner.to_str().unwrap()), ("FAKE_SM", "89")];
    let scenarios: [(&str, &[(&str, &str)]); 13] = [
        ("slices", &[]),
        ("slices", &[HOPPER]),
        ("gradients", &[("FAKE_THREADS", "256")]),
        ("ring", &[]),
        ("ring", &[HOPPER, HOPPERS_THREADS]),
        ("hopper", &[HOPPER, HOPPERS_THREADS]),
        ("merge", &[("FAKE_THREADS", "256")]),
        ("device_memory", &[]),
        ("programs", &[]),
        ("quantization", &[]),
        ("quantization", &[HOPPER]),
        ("fallbacks", &[("FAKE_LOCAL", "80")]),
        ("full", &[("FAKE_MEMORY", "10000")]),
    ];
    all_pass(&emulated, &scenarios);
}

#[test]
fn every_scenario_passes_whose_launches_do_not_run() {
    let folder = Folder::new("hold");
    let hold = folder.0.join("hold");
    let scenarios: [(&str, &[(&str, &str)]); 8] = [
        ("calls", &[HOPPER, HOPPERS_THREADS]),
        ("scratch", &[HOPPER, HOPPERS_THREADS, ("FAKE_HOLD", hold.to_str().unwrap())]),
        ("lengths", &[HOPPER, HOPPERS_THREADS, ("FAKE_MEMORY", "65536")]),
        ("hopper_fallbacks", &[("FAKE_LOCAL", "80")]),
        ("old", &[("FAKE_VERSION", "11080")]),
        ("no_device", &[("FAKE_INIT", "100")]),
        ("forbidden", &[("FAKE_INIT", "800")]),
        // The stub library of the CUDA toolkit, which has the driver library's name and is only for linkers.
        ("stub", &[("FAKE_STUB", "34")]),
    ];
    all_pass(&[], &scenarios);
}
