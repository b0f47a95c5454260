//! Runs a plan on a machine and compares the result with attention in f64.

pub mod cases;
pub mod draw;
pub mod each;
pub mod factors;
pub mod fp8;
pub mod small_plan;
pub mod wgmma_plan;

use flashcore_kernels::{Arch, Plan, emit};
use half::{bf16, f16};
use problem::program::{Point, Precision};
use problem::{DType, E4m3, E5m2, Elements, Problem, Strides, Table, Tensor};
use ptx::{Arg, Kernel, Machine};

/// Inputs and outputs of one run, as stored in the kernel's buffers.
pub struct Run {
    problem: Problem,
    /// The bits of Q, K and V.
    inputs: [Vec<u32>; 3],
    /// The tables of the programs, of bf16.
    tables: Vec<Vec<bf16>>,
    out: Vec<u32>,
    lse: Vec<f32>,
}

/// Two bytes of a bit pattern that is NaN in every type. Kernels must not read it in inputs and must
/// overwrite it in outputs.
const POISON: u16 = 0x7FFF;

/// An element whose bytes are all poison.
pub const fn poison(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => (POISON as u32) << 16 | POISON as u32,
        DType::E4m3 | DType::E5m2 => POISON as u32 >> 8,
        _ => POISON as u32,
    }
}

pub fn decode(dtype: DType, bits: u32) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F32 => f32::from_bits(bits).into(),
        DType::E4m3 => E4m3::from_bits(bits as u8).to_f32().into(),
        DType::E5m2 => E5m2::from_bits(bits as u8).to_f32().into(),
        _ => f16::from_bits(bits as u16).to_f64(),
    }
}

pub fn encode(dtype: DType, value: f64) -> u32 {
    match dtype {
        DType::Bf16 => bf16::from_f64(value).to_bits().into(),
        DType::F32 => (value as f32).to_bits(),
        DType::E4m3 => E4m3::from_f32(value as f32).to_bits().into(),
        DType::E5m2 => E5m2::from_f32(value as f32).to_bits().into(),
        _ => f16::from_f64(value).to_bits().into(),
    }
}

/// The elements as they are stored in memory.
pub fn stored(dtype: DType, elements: &[u32]) -> Vec<u8> {
    let bytes = elements.iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(dtype.bytes()));
    bytes.collect()
}

pub fn loaded(dtype: DType, bytes: &[u8]) -> Vec<u32> {
    let element = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte));
    bytes.chunks_exact(dtype.bytes()).map(element).collect()
}

/// Draws from a roughly normal distribution of variance 1 (xorshift64*, sum of four uniforms).
fn draw_normal(state: &mut u64) -> f64 {
    let mut sum = 0.0;
    for _ in 0..4 {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        sum += (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64;
    }
    (sum - 2.0) * 3.0f64.sqrt()
}

/// Every row of a tensor: its index and its position in the buffer.
pub fn rows(problem: &Problem, tensor: Tensor) -> impl Iterator<Item = ([usize; 3], usize)> {
    let [batch, heads, seq, _] = problem.extents(tensor);
    let (_, origin) = problem.span(tensor).expect("the problem was checked");
    let strides: Strides = problem.strides(tensor);
    (0..batch).flat_map(move |b| {
        (0..heads).flat_map(move |h| {
            (0..seq).map(move |s| ([b, h, s], (origin as i64 + strides.offset(b, h, s)) as usize))
        })
    })
}

/// Draws of this size, times 1 for V.
pub fn input(problem: &Problem, tensor: Tensor, seed: u64, size: f64) -> Vec<u32> {
    let size = if tensor == Tensor::V { 1.0 } else { size };
    let (elements, _) = problem.span(tensor).expect("the problem was checked");
    let mut data = vec![poison(problem.dtypes.of(tensor)); elements];
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for (_, start) in rows(problem, tensor) {
        for element in &mut data[start..start + problem.extents(tensor)[3]] {
            *element = encode(problem.dtypes.of(tensor), size * draw_normal(&mut state));
            if problem.dtypes.tf32 {
                *element &= !0x1fff; // a tf32 number, so that Q Kᵀ has only the errors of sums
            }
        }
    }
    data
}

/// A table of bf16 with poison between its elements.
fn table(table: &Table, seed: u64) -> Vec<bf16> {
    let mut data = vec![bf16::from_bits(POISON); table.span()];
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let elements: usize = table.extents.iter().product();
    for element in 0..elements {
        let mut rest = element;
        let mut index = vec![0; table.extents.len()];
        for (at, &extent) in index.iter_mut().zip(&table.extents).rev() {
            (*at, rest) = ((rest % extent) as i64, rest / extent);
        }
        data[table.offset(index)] = bf16::from_f64(draw_normal(&mut state));
    }
    data
}

fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| to(v)).collect()
}

/// Emits the plan's program and runs it on fresh inputs.
pub fn run<M: Machine>(machine: &mut M, problem: &Problem, plan: &Plan, arch: &Arch, seed: u64) -> Run {
    run_of_size(machine, problem, plan, arch, (seed, 1.0))
}

/// Emits the plan's program and runs it on fresh inputs. Queries and keys are about as large as `size`.
pub fn run_of_size<M: Machine>(
    machine: &mut M,
    problem: &Problem,
    plan: &Plan,
    arch: &Arch,
    draw: (u64, f64),
) -> Run {
    let program = emit(problem, plan, arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    run_steps(machine, problem, &program.kernels(), draw).unwrap_or_else(|e| panic!("{plan:?}: {e}"))
}

/// Runs a kernel of the problem on fresh inputs.
#[allow(dead_code, reason = "not every test changes a kernel")]
pub fn run_kernel<M: Machine>(
    machine: &mut M,
    problem: &Problem,
    kernel: &Kernel,
    seed: u64,
) -> Result<Run, M::Error> {
    run_steps(machine, problem, std::slice::from_ref(kernel), (seed, 1.0))
}

/// Runs the kernels of a program on fresh inputs.
fn run_steps<M: Machine>(
    machine: &mut M,
    problem: &Problem,
    steps: &[Kernel],
    (seed, size): (u64, f64),
) -> Result<Run, M::Error> {
    let kernel = &steps[0];
    let inputs = [Tensor::Q, Tensor::K, Tensor::V].map(|t| input(problem, t, seed + 7 * t as u64, size));
    let tables: Vec<Vec<bf16>> =
        (0..).zip(&problem.programs.tables).map(|(i, of)| table(of, seed + 100 + i)).collect();
    let mut contents: Vec<Vec<u8>> = Vec::new();
    for spec in &kernel.buffers {
        let number = spec.name.strip_prefix("table_").and_then(|number| number.parse::<usize>().ok());
        let data = match spec.name.as_str() {
            _ if number.is_some() => bytes(&tables[number.unwrap_or(0)], bf16::to_le_bytes),
            "q" => stored(problem.dtypes.q, &inputs[0]),
            "k" => stored(problem.dtypes.k, &inputs[1]),
            "v" => stored(problem.dtypes.v, &inputs[2]),
            // A counter must be zero before and after a launch.
            "counter" => vec![0; spec.bytes],
            _ => bytes(&vec![POISON; spec.bytes / 2], u16::to_le_bytes),
        };
        contents.push(data);
    }
    let mut buffers: Vec<M::Buffer> = contents
        .iter()
        .zip(&kernel.buffers)
        .map(|(data, spec)| {
            assert_eq!(data.len(), spec.bytes, "{}", spec.name);
            let mut buffer = machine.allocate(spec.bytes).expect("memory");
            // Scratch memory and temporaries may have any contents.
            let name = spec.name.as_str();
            if ["q", "k", "v", "out", "lse", "counter"].contains(&name) || name.starts_with("table_") {
                machine.upload(&mut buffer, data).expect("upload");
            }
            buffer
        })
        .collect();
    for kernel in steps {
        machine.launch(kernel, &mut buffers.iter_mut().collect::<Vec<_>>())?;
    }
    for (buffer, data) in buffers.iter().zip(&mut contents) {
        machine.download(buffer, data).expect("download");
    }
    let named = |name| kernel.buffers.iter().position(|spec| spec.name == name).map(|i| &contents[i]);
    let out = loaded(problem.dtypes.out, named("out").expect("an output"));
    assert!(
        named("counter").is_none_or(|data| data.iter().all(|&byte| byte == 0)),
        "the counter is left in use"
    );
    let lse = named("lse").map_or_else(Vec::new, |data| {
        data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    });
    Ok(Run { problem: problem.clone(), inputs, tables, out, lse })
}

impl Run {
    /// The raw bits of O and the LSE.
    #[allow(dead_code, reason = "not every test compares runs")]
    pub fn bits(&self) -> (Vec<u32>, Vec<u32>) {
        (self.out.clone(), self.lse.iter().map(|value| value.to_bits()).collect())
    }

    fn row(&self, tensor: Tensor, index: [usize; 3]) -> Vec<f64> {
        let (_, origin) = self.problem.span(tensor).expect("the problem was checked");
        let [b, h, s] = index;
        let start = (origin as i64 + self.problem.strides(tensor).offset(b, h, s)) as usize;
        let data = if tensor == Tensor::Out { &self.out } else { &self.inputs[tensor as usize] };
        let (dim, dtype) = (self.problem.extents(tensor)[3], self.problem.dtypes.of(tensor));
        data[start..start + dim].iter().map(|&bits| decode(dtype, bits)).collect()
    }

    /// The rows of each batch entry and KV head, one after the other.
    fn heads(&self, tensor: Tensor) -> Vec<Vec<f64>> {
        let [batch, heads, rows, _] = self.problem.extents(tensor);
        let head = |b, h| (0..rows).flat_map(|s| self.row(tensor, [b, h, s])).collect();
        (0..batch).flat_map(|b| (0..heads).map(move |h| head(b, h))).collect()
    }

    fn point(&self, [batch, head, query]: [usize; 3], key: usize, score: f64) -> Point {
        let (query_length, key_length) = (self.problem.seq_q, self.problem.seq_kv);
        Point { score, query, key, batch, head, query_length, key_length }
    }

    /// Whether the mask program lets a row see a key. The program must not read tables.
    fn sees(&self, row: [usize; 3], key: usize) -> bool {
        let programs = &self.problem.programs;
        let Some(mask) = &programs.mask else { return true };
        let point = self.point(row, key, 0.0);
        mask.evaluate(programs, &[], &point, Precision::Exact, &mut Vec::new()).is_true()
    }

    /// The logit after the score program.
    fn scored(&self, row: [usize; 3], key: usize, logit: f64) -> f64 {
        let programs = &self.problem.programs;
        let Some(score) = &programs.score else { return logit };
        let tables: Vec<Elements<'_>> = self.tables.iter().map(|table| Elements::Bf16(table)).collect();
        let point = self.point(row, key, logit);
        score.evaluate(programs, &tables, &point, Precision::Exact, &mut Vec::new()).float()
    }

    /// Compares every output with f64 arithmetic on the same inputs. The bound is the rounding of P and of O
    /// to their types (relative error at most `u` each), plus 1e-5 for f32 sums and `ex2.approx`. With 8-bit
    /// inputs, the bound adds 2^-8 for the truncated sums of scores and 2^-10 for those of O.
    pub fn check(&self) {
        let p = &self.problem;
        let [of_p, of_out] = [p.dtypes.weight_roundoff(), p.dtypes.out.unit_roundoff()];
        let (sums, of_logits) =
            if p.dtypes.has_fp8() { (2f64.powi(-8) + 2f64.powi(-10), 4e-3) } else { (1e-5, 2e-5) };
        let mut written = vec![false; self.out.len()];
        let [all_keys, all_values] = [Tensor::K, Tensor::V].map(|tensor| self.heads(tensor));
        for (i, ([b, h, s], start)) in rows(p, Tensor::Out).enumerate() {
            let kv_head = h / p.group_size();
            let q = self.row(Tensor::Q, [b, h, s]);
            let head = b * p.heads_kv + kv_head;
            let (keys_of_head, values_of_head) = (&all_keys[head], &all_values[head]);
            let visible = p.band.keys(s, p.seq_q, p.seq_kv);
            let keys = (visible.start..visible.end).filter(|&key| self.sees([b, h, s], key));
            let keys: Vec<usize> = keys.collect();
            let logits: Vec<f64> = keys
                .iter()
                .map(|&j| {
                    let key = &keys_of_head[j * p.head_dim..(j + 1) * p.head_dim];
                    let dot: f64 = q.iter().zip(key).map(|(a, b)| a * b).sum();
                    self.scored([b, h, s], j, p.score.logit(p.softmax_scale().into(), dot))
                })
                .collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|l| (l - max).exp()).sum();
            let mut want = vec![(0.0, 0.0); p.head_dim_v];
            for (&j, logit) in keys.iter().zip(&logits) {
                let weight = (logit - max).exp() / sum;
                for (w, v) in want.iter_mut().zip(&values_of_head[j * p.head_dim_v..(j + 1) * p.head_dim_v]) {
                    *w = (w.0 + weight * v, w.1 + weight * v.abs());
                }
            }
            for (d, (got, (value, magnitude))) in
                self.row(Tensor::Out, [b, h, s]).into_iter().zip(want).enumerate()
            {
                let bound = (of_p * magnitude + of_out * value.abs()) * 1.01 + sums * magnitude + 1e-7;
                assert!(
                    (got - value).abs() <= bound,
                    "{p:?}\nbatch {b} head {h} row {s} column {d}: {got}, should be {value} ± {bound}"
                );
            }
            written[start..start + p.head_dim_v].fill(true);
            if !self.lse.is_empty() {
                let want = if keys.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
                let got = f64::from(self.lse[i]);
                let close = got == want || (got - want).abs() <= of_logits * (1.0 + want.abs());
                assert!(close, "{p:?}\nbatch {b} head {h} row {s}: LSE {got}, should be {want}");
            }
        }
        for (i, &bits) in self.out.iter().enumerate() {
            assert!(
                written[i] || bits == poison(p.dtypes.out),
                "{p:?}\nelement {i} of out lies between rows and was written"
            );
        }
    }
}

/// The text of a kernel reads back as its module, arguments have the sizes of the parameters, and tensor
/// maps, which come first, fit their buffers.
pub fn assert_contract(kernel: &Kernel) {
    let module = ptx::parse(&kernel.module.to_string()).expect("what is printed is parsed");
    assert_eq!(module, *kernel.module);
    let entry = kernel.module.function(&kernel.entry).unwrap();
    let params: Vec<u32> = entry.params.iter().map(|p| p.bytes()).collect();
    assert_eq!(params, kernel.args.iter().map(|a| a.bytes()).collect::<Vec<_>>());
    for (i, map) in kernel.tensor_maps.iter().enumerate() {
        map.check_in(&kernel.buffers).unwrap();
        assert_eq!((map.buffer, kernel.args[i].clone()), (i, Arg::TensorMap { index: i }));
    }
}
