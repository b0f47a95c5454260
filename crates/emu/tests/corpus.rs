//! The kernels of `filetests/corpus`, compiled by NVRTC from sources of our own: right results and no alarm, in every
//! schedule, on ragged shapes.

use std::path::Path;

use flashcore_emu::{Buffer, Options, Schedule, run};
use half::f16;
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

/// Contents of a buffer, or its size when the kernel is to write it.
enum Data {
    In(Vec<u8>),
    InOut(Vec<u8>),
    Out(usize),
}

fn words<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| to(*v)).collect()
}

fn floats(values: &[f32]) -> Data {
    Data::In(words(values, f32::to_le_bytes))
}

fn halves(values: &[f32]) -> Data {
    Data::In(words(values, |v| f16::from_f32(v).to_le_bytes()))
}

/// Numbers between −1 and 1 (a linear congruential generator), exact in f16.
fn draw(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

const SCHEDULES: [(Schedule, u64); 3] = [(Schedule::Late, 0), (Schedule::Early, 1), (Schedule::Random, 2)];

struct Case {
    name: &'static str,
    grid: Dim3,
    block: Dim3,
    shared: u32,
    data: Vec<(&'static str, Data)>,
    /// Scalars after the buffers, which are passed in order.
    scalars: Vec<Arg>,
}

impl Case {
    /// Runs every schedule on both targets and hands each result's buffers to `check`.
    fn check(&self, check: impl Fn(&[Vec<u8>])) {
        for sm in [80, 89] {
            let kernel = self.kernel(sm);
            for (schedule, seed) in SCHEDULES {
                let (found, buffers) = self.run(&kernel, schedule, seed);
                assert!(found.is_empty(), "{} sm_{sm} {schedule:?}: {}", self.name, found.join("\n"));
                check(&buffers);
            }
        }
    }

    /// What a schedule finds, and what the buffers hold then.
    fn run(&self, kernel: &Kernel, schedule: Schedule, seed: u64) -> (Vec<String>, Vec<Vec<u8>>) {
        let mut buffers: Vec<Buffer> = self
            .data
            .iter()
            .map(|(_, data)| match data {
                Data::In(bytes) | Data::InOut(bytes) => Buffer::from_bytes(bytes),
                Data::Out(bytes) => Buffer::uninitialised(*bytes),
            })
            .collect();
        let options = Options { seed, schedule, ..Options::default() };
        let report = run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let found = report.hazards.iter().map(ToString::to_string).collect();
        (found, buffers.iter().map(Buffer::to_bytes).collect())
    }

    fn kernel(&self, sm: u32) -> Kernel {
        let file = format!("../../filetests/corpus/cuda_{}_sm{sm}.ptx", self.name);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let text = std::fs::read_to_string(&path).expect("a file of the corpus");
        let buffers: Vec<BufferSpec> = self
            .data
            .iter()
            .map(|(name, data)| {
                let (bytes, access) = match data {
                    Data::In(bytes) => (bytes.len(), Access::Read),
                    Data::InOut(bytes) => (bytes.len(), Access::ReadWrite),
                    Data::Out(bytes) => (*bytes, Access::Write),
                };
                BufferSpec { name: name.to_string(), bytes, access }
            })
            .collect();
        let pointers = (0..buffers.len()).map(|index| Arg::Buffer { index, offset: 0 });
        Kernel {
            module: ptx::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", self.name)),
            entry: self.name.to_string(),
            launch: Launch {
                grid: self.grid,
                cluster: Dim3(1, 1, 1),
                block: self.block,
                dynamic_shared: self.shared,
            },
            args: pointers.chain(self.scalars.iter().copied()).collect(),
            buffers,
        }
    }
}

fn read<T, const N: usize>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|c| from(c.try_into().expect("the right length"))).collect()
}

fn assert_close(name: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance, "{name}[{i}] is {g}, not {e}");
    }
}

fn f32s(bytes: &[u8]) -> Vec<f64> {
    read(bytes, f32::from_le_bytes).into_iter().map(f64::from).collect()
}

/// Attention in f64 for one head: rows of `d` numbers.
fn attention(q: &[f32], k: &[f32], v: &[f32], d: usize, scale: f64, causal: bool) -> Vec<f64> {
    let (seq_q, seq_kv) = (q.len() / d, k.len() / d);
    let mut out = vec![0.0; q.len()];
    for row in 0..seq_q {
        let visible = if causal { (row + 1 + seq_kv).saturating_sub(seq_q).min(seq_kv) } else { seq_kv };
        let dot = |j: usize| -> f64 {
            (0..d).map(|x| f64::from(q[row * d + x]) * f64::from(k[j * d + x])).sum::<f64>() * scale
        };
        let logits: Vec<f64> = (0..visible).map(dot).collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|s| (s - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for x in 0..d {
            let value: f64 = weights.iter().enumerate().map(|(j, w)| w * f64::from(v[j * d + x])).sum();
            out[row * d + x] = if sum > 0.0 { value / sum } else { 0.0 };
        }
    }
    out
}

/// Heads, and numbers of each, of the attention kernels.
const HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Q, K and V.
fn attention_inputs(seq_q: usize, seq_kv: usize) -> [Vec<f32>; 3] {
    [(seq_q, 1), (seq_kv, 2), (seq_kv, 3)].map(|(seq, seed)| draw(HEADS * seq * HEAD_DIM, seed))
}

/// Attention by a kernel of that name, whose CTAs of 128 threads have `tile` queries each.
fn attention_case(name: &'static str, tile: usize, shared: u32, qkv: &[Vec<f32>; 3], causal: bool) -> Case {
    let seq = |x: &Vec<f32>| x.len() / HEADS / HEAD_DIM;
    let [q, k, v] = qkv;
    Case {
        name,
        grid: Dim3(seq(q).div_ceil(tile) as u32, HEADS as u32, 1),
        block: Dim3(128, 1, 1),
        shared,
        data: vec![("q", halves(q)), ("k", halves(k)), ("v", halves(v)), ("out", Data::Out(2 * q.len()))],
        scalars: vec![
            Arg::I32(seq(q) as i32),
            Arg::I32(seq(k) as i32),
            Arg::F32(0.125),
            Arg::I32(i32::from(causal)),
        ],
    }
}

fn check_attention(name: &'static str, tile: usize, shared: u32, seq_q: usize, seq_kv: usize) {
    let qkv = attention_inputs(seq_q, seq_kv);
    let head = |x: &Vec<f32>, h: usize| x.chunks(x.len() / HEADS).nth(h).expect("a head").to_vec();
    for causal in [false, true] {
        let expected: Vec<f64> = (0..HEADS)
            .flat_map(|h| {
                let [q, k, v] = qkv.each_ref().map(|x| head(x, h));
                attention(&q, &k, &v, HEAD_DIM, 0.125, causal)
            })
            .collect();
        attention_case(name, tile, shared, &qkv, causal).check(|buffers| {
            let out: Vec<f64> = read(&buffers[3], f16::from_le_bytes).into_iter().map(f64::from).collect();
            assert_close(name, &out, &expected, 1e-3);
        });
    }
}

#[test]
fn flash() {
    check_attention("flash", 64, 3 * 64 * 72 * 2, 100, 130);
}

#[test]
fn wmma_attention() {
    check_attention("wmma_attention", 32, 0, 50, 70);
}

#[test]
fn each_barrier_of_wmma_attention_is_needed() {
    let case = attention_case("wmma_attention", 32, 0, &attention_inputs(50, 70), false);
    let whole = case.kernel(80);
    let barriers = |kernel: &Kernel| -> Vec<usize> {
        let is_barrier =
            |s: &ptx::Statement| matches!(s, ptx::Statement::Inst(i) if matches!(i.op, ptx::Op::Bar { .. }));
        let body = kernel.module.entries().next().and_then(|f| f.body.as_ref()).expect("a body");
        body.statements.iter().enumerate().filter(|(_, s)| is_barrier(s)).map(|(at, _)| at).collect()
    };
    let places = barriers(&whole);
    assert_eq!(places.len(), 4);
    for at in places {
        let mut kernel = whole.clone();
        for item in &mut kernel.module.items {
            if let ptx::Item::Function(ptx::Function { body: Some(body), .. }) = item {
                body.statements.remove(at);
            }
        }
        let found = SCHEDULES.iter().flat_map(|(schedule, seed)| case.run(&kernel, *schedule, *seed).0);
        assert!(found.into_iter().any(|f| f.starts_with("race")), "without the barrier at {at}");
    }
}

#[test]
fn matmul() {
    let (m, n, depth) = (70, 90, 96);
    let (a, b) = (draw(m * depth, 4), draw(n * depth, 5));
    let case = Case {
        name: "matmul",
        grid: Dim3(2, 2, 1),
        block: Dim3(128, 1, 1),
        shared: 0,
        data: vec![("a", halves(&a)), ("b", halves(&b)), ("c", Data::Out(4 * m * n))],
        scalars: vec![Arg::I32(m as i32), Arg::I32(n as i32), Arg::I32(depth as i32)],
    };
    let dot = |i: usize| -> f64 {
        let (row, col) = (i / n, i % n);
        (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[col * depth + k])).sum()
    };
    let expected: Vec<f64> = (0..m * n).map(dot).collect();
    case.check(|buffers| assert_close("matmul", &f32s(&buffers[2]), &expected, 2e-5));
}

#[test]
fn softmax() {
    let (rows, cols) = (3, 301);
    let x = draw(rows * cols, 6);
    let case = Case {
        name: "softmax",
        grid: Dim3(rows as u32, 1, 1),
        block: Dim3(128, 1, 1),
        shared: 0,
        data: vec![("x", floats(&x)), ("y", Data::Out(4 * rows * cols))],
        scalars: vec![Arg::I32(cols as i32)],
    };
    let expected: Vec<f64> = x
        .chunks(cols)
        .flat_map(|row| {
            let weights: Vec<f64> = row.iter().map(|v| f64::from(*v).exp()).collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(move |w| w / sum)
        })
        .collect();
    case.check(|buffers| assert_close("softmax", &f32s(&buffers[1]), &expected, 1e-7));
}

#[test]
fn layernorm() {
    let (rows, cols) = (3, 600);
    let (x, weight, bias) = (draw(rows * cols, 7), draw(cols, 8), draw(cols, 9));
    let case = Case {
        name: "layernorm",
        grid: Dim3(rows as u32, 1, 1),
        block: Dim3(96, 1, 1),
        shared: 0,
        data: vec![
            ("x", floats(&x)),
            ("weight", floats(&weight)),
            ("bias", floats(&bias)),
            ("y", Data::Out(4 * rows * cols)),
        ],
        scalars: vec![Arg::I32(cols as i32 / 4), Arg::F32(1e-5)],
    };
    let expected: Vec<f64> = x
        .chunks(cols)
        .flat_map(|row| {
            let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / cols as f64;
            let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / cols as f64;
            let scaled = |(i, v): (usize, &f32)| {
                (f64::from(*v) - mean) / (variance + 1e-5).sqrt() * f64::from(weight[i]) + f64::from(bias[i])
            };
            row.iter().enumerate().map(scaled).collect::<Vec<_>>()
        })
        .collect();
    case.check(|buffers| assert_close("layernorm", &f32s(&buffers[3]), &expected, 1e-5));
}

#[test]
fn transpose() {
    let (rows, cols) = (45, 70);
    let x = draw(rows * cols, 10);
    let case = Case {
        name: "transpose",
        grid: Dim3(3, 2, 1),
        block: Dim3(32, 8, 1),
        shared: 0,
        data: vec![("in", floats(&x)), ("out", Data::Out(4 * rows * cols))],
        scalars: vec![Arg::I32(rows as i32), Arg::I32(cols as i32)],
    };
    let expected: Vec<f64> = (0..rows * cols).map(|i| f64::from(x[i % rows * cols + i / rows])).collect();
    case.check(|buffers| assert_close("transpose", &f32s(&buffers[1]), &expected, 0.0));
}

#[test]
fn histogram() {
    let data: Vec<u32> = (0..700u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let case = Case {
        name: "histogram",
        grid: Dim3(3, 1, 1),
        block: Dim3(96, 1, 1),
        shared: 0,
        data: vec![("words", Data::In(words(&data, u32::to_le_bytes))), ("bins", Data::InOut(vec![0; 1024]))],
        scalars: vec![Arg::I32(data.len() as i32)],
    };
    let mut expected = vec![0u32; 256];
    data.iter().flat_map(|w| w.to_le_bytes()).for_each(|b| expected[usize::from(b)] += 1);
    case.check(|buffers| assert_eq!(read(&buffers[1], u32::from_le_bytes), expected));
}

#[test]
fn scan() {
    let data: Vec<i32> = (0..700).map(|i| i * i % 37 - 11).collect();
    let case = Case {
        name: "scan",
        grid: Dim3(3, 1, 1),
        block: Dim3(256, 1, 1),
        shared: 0,
        data: vec![("in", Data::In(words(&data, i32::to_le_bytes))), ("out", Data::Out(4 * data.len()))],
        scalars: vec![Arg::I32(data.len() as i32)],
    };
    let expected: Vec<i32> = data
        .chunks(256)
        .flat_map(|part| {
            part.iter().scan(0, |sum, v| {
                *sum += v;
                Some(*sum)
            })
        })
        .collect();
    case.check(|buffers| assert_eq!(read(&buffers[1], i32::from_le_bytes), expected));
}

/// CTAs that communicate: the last one to arrive merges what the others left in global memory.
#[test]
fn split_reduce() {
    let (heads, splits, seq_kv) = (2, 3, 200);
    let (q, k, v) = (draw(heads * 64, 11), draw(heads * seq_kv * 64, 12), draw(heads * seq_kv * 64, 13));
    let case = Case {
        name: "split_reduce",
        grid: Dim3(splits as u32, heads as u32, 1),
        block: Dim3(64, 1, 1),
        shared: 0,
        data: vec![
            ("q", floats(&q)),
            ("k", floats(&k)),
            ("v", floats(&v)),
            ("partial", Data::Out(4 * heads * splits * 66)),
            ("counters", Data::InOut(vec![0; 4 * heads])),
            ("out", Data::Out(4 * heads * 64)),
        ],
        scalars: vec![Arg::I32(seq_kv as i32), Arg::F32(0.125)],
    };
    let expected: Vec<f64> = (0..heads)
        .flat_map(|h| {
            let kv = h * seq_kv * 64..(h + 1) * seq_kv * 64;
            attention(&q[h * 64..][..64], &k[kv.clone()], &v[kv], 64, 0.125, false)
        })
        .collect();
    case.check(|buffers| assert_close("split_reduce", &f32s(&buffers[5]), &expected, 1e-5));
}

/// Calls, a jump table, local arrays, votes, matches, conversions: no alarm, and the integer results that Rust gives too.
#[test]
fn dispatch() {
    let data: Vec<i32> = (0..100).map(|i| i * 7 % 41 - 9).collect();
    let case = Case {
        name: "dispatch",
        grid: Dim3(2, 1, 1),
        block: Dim3(64, 1, 1),
        shared: 0,
        data: vec![
            ("in", Data::In(words(&data, i32::to_le_bytes))),
            ("out", Data::Out(4 * data.len())),
            ("wide", Data::Out(8 * data.len())),
        ],
        scalars: vec![Arg::I32(data.len() as i32)],
    };
    let bias = [0.5f32, -0.25, 1.0 / 3.0, 2.0];
    let expected: Vec<f64> = data
        .iter()
        .map(|&x| {
            let f = bias[(x & 3) as usize] * x as f32;
            let w = f64::from(f);
            w + w.mul_add(2.0, 1.0)
                + w.sin()
                + w.tanh()
                + w.abs().sqrt()
                + (i64::from(x) * 0x1_2345_6789) as f64
        })
        .collect();
    case.check(|buffers| {
        let wide: Vec<f64> = read(&buffers[2], f64::from_le_bytes);
        // Against f64 mathematics: f32 sine and power of arguments up to 80.
        assert_close("dispatch", &wide, &expected, 1e-3);
    });
}
