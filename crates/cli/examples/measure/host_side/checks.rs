//! Checks of results against the oracle, of the interface on host slices, of rejected input, and of a
//! kernel's fault.

use driver::{Buffer, DeviceSlice, DriverError, Expect, Function, Stream};
use flashcore::gpu::Gpu;
use flashcore::{Device, Layout, Strides, TensorView, TensorViewMut, attention};
use half::f16;
use judge::inputs::{Style, draw};
use judge::values::Values;
use kernels::Plan;
use problem::{Band, DType, Operand, Problem};
use ptx::{Arg, Builder, Dim3, Kernel, Launch, Machine};

use super::tensors::Tensors;
use super::{Outcome, ensure, tell};

/// One problem for each feature of the interface.
fn problems() -> Vec<(&'static str, Problem)> {
    let p = Problem::new;
    let mut wide_values = p(1, 2, 70, 64, DType::F16);
    wide_values.head_dim_v = 96;
    let mut padded = p(2, 2, 50, 64, DType::F16);
    padded.out = Strides { batch: 2 * 50 * 96 + 16, head: 50 * 96 + 8, row: 96 };
    let mut backwards = p(2, 2, 50, 64, DType::F16).with_band(Band::CAUSAL);
    (backwards.k.row, backwards.out.row) = (-64, -64);
    let mut shared = p(2, 2, 50, 64, DType::F16);
    (shared.k.batch, shared.v.row, shared.q.head) = (0, 0, 0);
    let mut odd = p(2, 2, 50, 64, DType::F16);
    odd.k = Strides { batch: 2 * 50 * 67, head: 50 * 67, row: 67 };
    let mut negative_scale = p(1, 2, 100, 64, DType::F16);
    negative_scale.score.scale = Some(-0.3);
    vec![
        ("mission f16", Problem::mission()),
        ("mission bf16 causal", p(1, 8, 512, 64, DType::Bf16).with_band(Band::CAUSAL)),
        ("ragged", p(2, 3, 77, 40, DType::F16).with_seq_kv(333, Layout::Bhsd)),
        (
            "ragged causal",
            p(1, 2, 301, 128, DType::Bf16).with_band(Band::CAUSAL).with_seq_kv(517, Layout::Bshd),
        ),
        ("grouped heads", p(2, 8, 130, 64, DType::F16).with_heads_kv(2, Layout::Bshd)),
        (
            "one key head, causal",
            p(1, 8, 200, 128, DType::F16).with_band(Band::CAUSAL).with_heads_kv(1, Layout::Bhsd),
        ),
        ("no keys", p(2, 2, 33, 64, DType::Bf16).with_seq_kv(0, Layout::Bhsd)),
        (
            "rows without keys",
            p(1, 2, 90, 64, DType::F16).with_band(Band::CAUSAL).with_seq_kv(37, Layout::Bhsd),
        ),
        ("one row", p(1, 4, 1, 128, DType::F16).with_seq_kv(1000, Layout::Bhsd)),
        ("head_dim 256", p(1, 2, 200, 256, DType::Bf16)),
        ("head_dim 8", p(1, 2, 65, 8, DType::F16)),
        ("wider values", wide_values.with_layout(Layout::Bshd)),
        ("padded output rows", padded),
        ("backward strides", backwards),
        ("broadcast", shared),
        ("odd strides", odd),
        ("negative scale", negative_scale),
    ]
}

/// Computes each problem aligned, and with every tensor two bytes off. Both results must be right, and
/// bit-identical where one kernel computes both. Misaligned tensors that tensor maps do not support use
/// another family, whose results must be reproducible.
pub fn numbers() -> Outcome {
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(gpu.context())?;
    for (name, problem) in problems() {
        let check = || -> Outcome<String> {
            let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
            let aligned = Tensors::new(gpu.context(), &problem, 7, 0)?;
            let result = aligned.compute(&prepared, &stream)?;
            let figures = aligned.judge(&result)?;
            let shifted = Tensors::new(gpu.context(), &problem, 7, 2)?;
            let moved = shifted.compute(&prepared, &stream)?;
            shifted.judge(&moved).map_err(|error| format!("two bytes off: {error}"))?;
            let one_kernel = matches!(prepared.plan(), Plan::Mma(_));
            let same = if one_kernel { result } else { shifted.compute(&prepared, &stream)? };
            ensure(moved == same, || "two bytes off, other bits".to_owned())?;
            let fallbacks = prepared.fallbacks().iter().map(|f| format!("; fell back: {}", f.reason));
            Ok(format!("error {}{}", figures.brief(), fallbacks.collect::<String>()))
        };
        tell(name, check());
    }
    tell("no rows", no_rows(&gpu, &stream));
    Ok(())
}

fn no_rows(gpu: &Gpu, stream: &Stream) -> Outcome<String> {
    for change in [(0, 4, 16), (2, 4, 0), (2, 0, 16)] {
        let (batch, heads, seq_q) = change;
        let mut problem = Problem::new(2, 4, 16, 64, DType::F16);
        (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q) = (batch, heads, heads, seq_q);
        let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
        let none = DeviceSlice::EMPTY;
        prepared.enqueue(stream, none, none, none, none, Some(none))?;
        stream.synchronize()?;
    }
    Ok(String::new())
}

/// `attention()` on host slices.
pub fn interface() -> Outcome {
    let problem =
        Problem::new(1, 4, 100, 64, DType::F16).with_band(Band::CAUSAL).with_heads_kv(2, Layout::Bshd);
    let inputs = draw(&problem, Style::Normal, 3);
    let (Values::F16(q), Values::F16(k), Values::F16(v)) =
        (&inputs[Operand::Q], &inputs[Operand::K], &inputs[Operand::V])
    else {
        return Err("the draw has another type".into());
    };
    let of = |data, heads| TensorView::dense(data, [1, heads, 100, 64], Layout::Bshd);
    let call = attention(of(q, 4)?, of(k, 2)?, of(v, 2)?).causal();
    let oracle = inputs.oracle(&problem)?;
    let close =
        |data: &[f16]| data.iter().zip(&oracle.out).all(|(x, o)| (f64::from(x.to_f32()) - o).abs() < 2e-3);
    tell(
        "best device is the GPU",
        ensure(Device::best() == Device::Cuda(0), || format!("{:?}", Device::best())).map(|()| String::new()),
    );
    let best = call.clone().run()?;
    let named = call.clone().device(Device::Cuda(0)).run()?;
    tell(
        "attention()",
        ensure(close(&best.data), || "far from the oracle".to_owned()).map(|()| String::new()),
    );
    tell(
        "attention() on the GPU by name",
        ensure(named == best, || "another result".to_owned()).map(|()| String::new()),
    );
    tell("output with gaps", gaps(&call, &best.data));
    tell("f32", f32_is_right_on_both());
    Ok(())
}

/// A strided output: rows are written, and the gaps between them keep their contents.
fn gaps(call: &flashcore::Attention<'_, f16>, dense: &[f16]) -> Outcome<String> {
    let mut data = vec![f16::from_f32(7.0); 4 * 100 * 80];
    let strides = Strides { batch: 0, head: 100 * 80, row: 80 };
    call.clone().run_into(TensorViewMut::strided(&mut data, [1, 4, 100, 64], strides)?, None)?;
    for (row, expected) in data.chunks(80).zip(dense.chunks(64)) {
        ensure(&row[..64] == expected, || "a row differs from the dense result".to_owned())?;
        ensure(row[64..].iter().all(|x| x.to_f32() == 7.0), || "a gap was written".to_owned())?;
    }
    Ok(String::new())
}

fn f32_is_right_on_both() -> Outcome<String> {
    let data = vec![0.5f32; 2 * 8 * 16];
    let view = TensorView::dense(&data, [1, 2, 8, 16], Layout::Bhsd)?;
    let out = attention(view, view, view).run()?;
    ensure(out.data.iter().all(|x| (x - 0.5).abs() < 1e-6), || "wrong on the CPU".to_owned())?;
    let out = attention(view, view, view).device(Device::Cuda(0)).run()?;
    ensure(out.data.iter().all(|x| (x - 0.5).abs() < 1e-6), || "wrong on the GPU by name".to_owned())?;
    Ok(String::new())
}

/// Invalid input returns the expected error, and the context stays usable.
pub fn refusals() -> Outcome {
    let gpu = Gpu::open(0)?;
    let context = gpu.context();
    let stream = Stream::new(context)?;
    let problem = Problem::mission();
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
    let tensors = Tensors::new(context, &problem, 5, 0)?;
    let [q, k, v, out, lse] = tensors.slices()?;
    fn part(slice: DeviceSlice<'_>, from: usize, bytes: usize) -> DeviceSlice<'_> {
        slice.part(from, bytes).unwrap_or(DeviceSlice::EMPTY)
    }
    let odd = part(q, 1, q.bytes() - 1);
    let short = part(k, 0, k.bytes() - 2);
    let padded = Buffer::new(context, q.bytes() + 16)?;
    let off_by_one = part(padded.slice(), 1, q.bytes());
    refused("short slice", "k has", prepared.enqueue(&stream, q, short, v, out, Some(lse)));
    refused("odd and short slice", "q has", prepared.enqueue(&stream, odd, k, v, out, Some(lse)));
    refused(
        "odd address",
        "expected a multiple of 2",
        prepared.enqueue(&stream, off_by_one, k, v, out, Some(lse)),
    );
    refused("lse missing", "lse is missing", prepared.enqueue(&stream, q, k, v, out, None));
    let without = gpu.prepare(&problem, None)?;
    refused("lse not expected", "without it", without.enqueue(&stream, q, k, v, out, Some(lse)));
    refused("out of memory", "out of memory", Buffer::new(context, 1 << 50).map(drop));
    refused("device 99", "device 99 does not exist", driver::Context::open(99).map(drop));
    let (_, call) = prepared.parts();
    let launch = call.launch();
    let kernel = kernels::emit(&problem, prepared.plan(), gpu.arch())?.kernel(0);
    let strict = Expect { max_registers: 16, ..Expect::of(launch) };
    refused("admission", "registers per thread", Function::load(context, &kernel, &strict).map(drop));
    refused(
        "head_dim 600",
        "expected 1 to 576",
        gpu.prepare(&Problem::new(1, 1, 8, 600, DType::F16), None).map(drop),
    );
    let module = Builder::kernel(&kernel.entry).into_verified(ptx::Target::sm(120))?;
    let newer = Kernel { module, ..kernel };
    refused(
        "a newer target",
        "its code is for sm_120",
        Function::load(context, &newer, &Expect::of(launch)).map(drop),
    );
    let judged = tensors.compute(&prepared, &stream).and_then(|result| tensors.judge(&result));
    tell("right after all refusals", judged.map(|figures| figures.brief()));
    Ok(())
}

fn refused<E: std::fmt::Display>(name: &str, words: &str, outcome: Result<(), E>) {
    let verdict = match outcome {
        Ok(()) => Err("it was taken".into()),
        Err(error) if error.to_string().contains(words) => Ok(error.to_string()),
        Err(error) => Err(error.to_string().into()),
    };
    tell(name, verdict);
}

/// A kernel that writes to address 0: its context reports the fault from then on, and the process continues.
pub fn fault() -> Outcome {
    let gpu = Gpu::open(0)?;
    let problem = Problem::mission();
    let prepared = gpu.prepare(&problem.clone().with_lse(true), None)?;
    let stream = Stream::new(gpu.context())?;
    let tensors = Tensors::new(gpu.context(), &problem, 5, 0)?;
    let mut k = Builder::kernel("wild");
    let to = k.param_pointer("to");
    let word = k.param_u32("word");
    k.st(to, word);
    let one = Dim3(1, 1, 1);
    let wild = Kernel {
        module: k.into_verified(gpu.info().target())?,
        entry: "wild".to_owned(),
        launch: Launch { cluster: one, ..Launch::new(one, one) },
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: vec![Arg::Null, Arg::U32(1)],
    };
    let mut machine = driver::Gpu::open(0)?;
    let first = machine.launch(&wild, &mut []).err().ok_or("the kernel did not fail")?;
    let named = matches!(&first, DriverError::Poisoned { cause, .. } if cause.contains("ILLEGAL_ADDRESS"));
    tell("a kernel's fault is named", ensure(named, || first.to_string()).map(|()| first.to_string()));
    let later = [
        tensors.enqueue(&prepared, &stream).err().map(|e| e.to_string()),
        Buffer::new(gpu.context(), 4).err().map(|e| e.to_string()),
        stream.synchronize().err().map(|e| e.to_string()),
    ];
    let same = later.iter().all(|error| error.as_deref() == Some(first.to_string().as_str()));
    tell("and told by every later call", ensure(same, || format!("{later:?}")).map(|()| String::new()));
    Ok(())
}
