//! Runs a plan on 8-bit inputs, optionally with a modified program, and compares the result with attention in
//! f64.

use super::{decode, draw_normal, encode};
use emu::{Emulator, Options};
use flashcore_kernels::{Arch, BufferKind, Plan, Program, ProgramBuffer, emit};
use problem::{Band, DType, DTypes, Layout, Operand, OperandMap, Problem, Tensor};
use ptx::Machine;

pub const WINDOW: Band = Band { before: Some(50), ..Band::CAUSAL };

/// Rows, keys, head dim, types and band of problems: both 8-bit types, ragged ends, masks, row widths.
pub const SHAPES: [(usize, usize, usize, &str, Band); 9] = [
    (64, 64, 64, "e4m3", Band::FULL),
    (70, 133, 64, "e4m3", Band::FULL),
    (100, 100, 64, "e5m2:f16", Band::CAUSAL),
    (17, 150, 128, "e4m3/e5m2/e4m3", Band::CAUSAL),
    (130, 200, 128, "e5m2/e4m3/e5m2", WINDOW),
    (40, 150, 48, "e5m2", Band::FULL),
    (66, 130, 80, "e4m3:f16", Band::CAUSAL_TOP_LEFT),
    (50, 97, 96, "e4m3", Band::FULL),
    (80, 160, 256, "e4m3", Band::FULL),
];

/// A problem of two heads with the given types, such as `e4m3/e4m3/bf16`.
pub fn problem(seq_q: usize, seq_kv: usize, dim: usize, types: &str, band: Band) -> Problem {
    let dtypes: DTypes = types.parse().expect("types");
    let problem = Problem::new(1, 2, seq_q, dim, dtypes).with_band(band);
    problem.with_seq_kv(seq_kv, Layout::Bshd).with_lse(true)
}

/// Inputs of a run and its output.
pub struct Run {
    problem: Problem,
    /// The elements of Q, K, V and O.
    tensors: OperandMap<Vec<f64>>,
    factors: OperandMap<Vec<f32>>,
    lse: Vec<f32>,
}

/// Runs a program on fresh inputs. `edit` modifies the program first.
pub fn run(problem: &Problem, plan: &Plan, arch: &Arch, seed: u64, edit: impl FnOnce(&mut Program)) -> Run {
    run_with_factors(problem, plan, arch, seed, edit, |_| {})
}

/// Like [`run`]. `spoil` modifies the descale factors first.
pub fn run_with_factors(
    problem: &Problem,
    plan: &Plan,
    arch: &Arch,
    seed: u64,
    edit: impl FnOnce(&mut Program),
    spoil: impl FnOnce(&mut OperandMap<Vec<f32>>),
) -> Run {
    let mut program = emit(problem, plan, arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    edit(&mut program);
    let codes = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
        let (elements, origin) = problem.span(tensor).expect("the problem was checked");
        let dtype = problem.dtypes.of(tensor);
        // The elements between the rows are NaN codes.
        let mut data = vec![if dtype.is_fp8() { 0x7F } else { 0x7FFF }; elements];
        let mut state = (seed + 7 * tensor as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let [batch, heads, rows, dim] = problem.extents(tensor);
        for (b, h, s) in
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |s| (b, h, s))))
        {
            let start = (origin as i64 + problem.strides(tensor).offset(b, h, s)) as usize;
            data[start..start + dim]
                .iter_mut()
                .for_each(|code| *code = encode(dtype, draw_normal(&mut state)));
        }
        (tensor.into(), data)
    });
    let mut tensors = OperandMap::from_iter(codes);
    let factors = problem.scales.each().map(|(tensor, _)| {
        let factor = |i: usize| 0.4 + 0.3 * (i % 5) as f32 + 0.1 * tensor as usize as f32;
        (Operand::Descale(tensor), (0..problem.scale_len(tensor)).map(factor).collect())
    });
    let mut factors = factors.collect();
    spoil(&mut factors);
    let bytes = |data: &[u32], dtype: DType| -> Vec<u8> {
        data.iter().flat_map(|code| code.to_le_bytes()[..dtype.bytes()].to_vec()).collect()
    };
    let mut machine = Emulator::new(Options { seed, ..Options::default() });
    let mut buffers: Vec<_> = Vec::new();
    for &ProgramBuffer { kind, bytes: size } in &program.contracts.buffers {
        let content = match kind {
            BufferKind::Operand(Operand::OUT | Operand::Lse) => Some(vec![0xFF; size]),
            BufferKind::Operand(operand @ Operand::Tensor(tensor)) => {
                Some(bytes(&tensors[operand], problem.dtypes.of(tensor)))
            }
            BufferKind::Operand(operand @ Operand::Descale(_)) => {
                Some(factors[operand].iter().flat_map(|factor| factor.to_le_bytes()).collect())
            }
            BufferKind::Operand(Operand::Sinks) => {
                Some((0..problem.heads_q).flat_map(|h| (h as f32 - 1.0).to_le_bytes()).collect())
            }
            BufferKind::Counter => Some(vec![0; size]),
            // Temporaries may have any contents.
            _ => None,
        };
        let mut buffer = machine.allocate(size).expect("memory");
        if let Some(content) = content {
            machine.upload(&mut buffer, &content).expect("upload");
        }
        buffers.push(buffer);
    }
    for kernel in program.kernels() {
        let mut buffers: Vec<_> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut buffers).unwrap_or_else(|e| panic!("{plan:?} {problem:?}: {e}"));
    }
    let mut read = |operand: Operand| {
        let at = program.contracts.buffers.iter().position(|buffer| buffer.kind == operand.into())?;
        let mut data = vec![0; program.contracts.buffers[at].bytes];
        machine.download(&buffers[at], &mut data).expect("download");
        Some(data)
    };
    let out = read(Operand::OUT).expect("an output");
    let lse = read(Operand::Lse).unwrap_or_default();
    let code = |bytes: &[u8]| bytes.iter().rev().fold(0, |code, &byte| code << 8 | u32::from(byte));
    tensors.insert(Operand::OUT, out.chunks_exact(problem.dtypes.out.bytes()).map(code).collect());
    let lse = lse.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let tensors = tensors.map(|operand, codes| {
        let Operand::Tensor(tensor) = operand else { panic!("{operand} is no tensor") };
        codes.iter().map(|&code| decode(problem.dtypes.of(tensor), code)).collect()
    });
    Run { problem: problem.clone(), tensors, factors, lse }
}

/// The error of an output, relative to the error that the rounding of P and O explains.
#[derive(Debug)]
pub struct Error {
    /// Root mean square of the error divided by that of the output.
    pub relative: f64,
    /// Largest ratio of an error to its bound.
    pub worst: f64,
}

impl Run {
    fn row(&self, tensor: Tensor, [b, h, s]: [usize; 3]) -> &[f64] {
        let (_, origin) = self.problem.span(tensor).expect("the problem was checked");
        let start = (origin as i64 + self.problem.strides(tensor).offset(b, h, s)) as usize;
        &self.tensors[tensor.into()][start..start + self.problem.extents(tensor)[3]]
    }

    /// The descale factor of a row of a KV head; NaN if it is not accepted.
    fn descale(&self, tensor: Tensor, [batch, head, row]: [usize; 3]) -> f64 {
        self.problem.scales.of(tensor).map_or(1.0, |layout| {
            let factor = self.factors[Operand::Descale(tensor)][layout.index(batch, head, row)];
            Problem::accepted_factor(tensor, factor).into()
        })
    }

    /// Compares with f64 arithmetic. The bound is the rounding of P to its type (a relative error of at most
    /// `u`, and half of the smallest number where a row's largest probability is 2^8), the rounding of O, and
    /// the truncated sums of 8-bit products: 2^-12 of the largest partial sum, for each of the steps.
    /// Elements that must be NaN are only checked to be NaN.
    pub fn error(&self) -> Error {
        let p = &self.problem;
        let [of_p, of_out] = [p.dtypes.weights(), p.dtypes.out].map(DType::unit_roundoff);
        let (mut squares, mut of_errors, mut worst) = (0.0, 0.0, 0.0f64);
        let mut lse = self.lse.iter();
        for (b, h, s) in
            (0..p.batch).flat_map(|b| (0..p.heads_q).flat_map(move |h| (0..p.seq_q).map(move |s| (b, h, s))))
        {
            let kv_head = h / p.group_size();
            let q = self.row(Tensor::Q, [b, h, s]);
            let visible = p.band.keys(s, p.seq_q, p.seq_kv);
            let of_query = f64::from(p.softmax_scale()) * self.descale(Tensor::Q, [b, kv_head, s]);
            let logit = |j: usize| {
                let key = self.row(Tensor::K, [b, kv_head, j]);
                let scale = of_query * self.descale(Tensor::K, [b, kv_head, j]);
                p.score.logit(scale, q.iter().zip(key).map(|(a, b)| a * b).sum())
            };
            let keys = visible.start..visible.end;
            let logits: Vec<f64> = keys.clone().map(logit).collect();
            let sink = p.score.sink.then_some(h as f64 - 1.0);
            let max = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let of_keys: f64 = logits.iter().map(|l| (l - max).exp()).sum();
            let sum = of_keys + sink.map_or(0.0, |sink| (sink - max).exp());
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut want = vec![[0.0; 3]; p.head_dim_v];
            for (j, logit) in keys.zip(&logits) {
                let weight = (logit - max).exp() / sum;
                let factor = self.descale(Tensor::V, [b, kv_head, j]);
                let tiny = 2f64.powi(-17) * (largest - max).exp() / sum;
                for (w, v) in want.iter_mut().zip(self.row(Tensor::V, [b, kv_head, j])) {
                    let v = factor * v;
                    *w = [w[0] + weight * v, w[1] + weight * v.abs(), w[2] + tiny * v.abs()];
                }
            }
            for (got, [value, magnitude, tiny]) in self.row(Tensor::Out, [b, h, s]).iter().zip(want) {
                if value.is_nan() {
                    worst = if got.is_nan() { worst } else { f64::INFINITY };
                    continue;
                }
                let truncated = if p.dtypes.v.is_fp8() { 2f64.powi(-10) } else { 1e-5 };
                let scores = if p.dtypes.q.is_fp8() { 2f64.powi(-8) } else { 0.0 };
                let bound = of_p * magnitude
                    + of_out * value.abs() * 1.01
                    + tiny
                    + (truncated + scores) * magnitude
                    + 1e-7;
                let error = got - value;
                worst = worst.max(if error.is_nan() { f64::INFINITY } else { error.abs() / bound });
                squares += value * value;
                of_errors += error * error;
            }
            if p.pass.lse() {
                let got = f64::from(*lse.next().expect("an LSE of each row"));
                let want = if sum == 0.0 { f64::NEG_INFINITY } else { max + sum.ln() };
                let close = got == want
                    || got.is_nan() && want.is_nan()
                    || (got - want).abs() <= 4e-3 * (1.0 + want.abs());
                worst = if close { worst } else { f64::INFINITY };
            }
        }
        let relative = if of_errors == 0.0 { 0.0 } else { f64::sqrt(of_errors / squares) };
        Error { relative: if relative.is_nan() { f64::INFINITY } else { relative }, worst }
    }

    pub fn check(&self) {
        let error = self.error();
        let relative = 0.6 * self.problem.dtypes.weights().unit_roundoff()
            + self.problem.dtypes.out.unit_roundoff()
            + 4e-3;
        assert!(
            error.worst <= 1.0 && error.relative <= relative,
            "{:?}: {error:?}, accepted: {relative}",
            self.problem
        );
    }
}

/// A change of a program that makes its result wrong.
pub type Fault<'a> = &'a dyn Fn(&mut Program);

/// Checks that programs with one fault each have a large error, and the program without a fault a small one.
/// `run` runs the program with a change.
pub fn faults_are_seen(run: impl Fn(Fault<'_>) -> Run, faults: &[(&str, Fault<'_>)]) {
    let right = run(&|_| {}).error();
    assert!(right.worst <= 1.0 && right.relative < 0.05, "{right:?}");
    for (fault, change) in faults {
        let error = run(change).error();
        assert!(error.worst > 1.0 && error.relative > 0.1, "{fault}: {error:?}");
    }
}

/// A fault of the attention kernel: the scores are scaled twice.
pub fn scale_twice(program: &mut Program) {
    let step = program.contracts.steps.last_mut().expect("a kernel");
    let factor = step.args.iter_mut().find_map(|arg| match arg {
        ptx::Arg::F32(factor) => Some(factor),
        _ => None,
    });
    *factor.expect("the factor of the scores") *= 0.125;
}

/// A fault of the attention kernel: the sums of a row leave out the factor of P.
pub fn forget_the_factor_of_p(program: &mut Program) {
    edit_text(program, |text| {
        lines(text, |line, _| match line.trim().strip_prefix("rcp.approx.ftz.f32 ") {
            None => Some(line.to_owned()),
            Some(operands) => {
                let sum = operands.split(", ").nth(1)?.trim_end_matches(';');
                Some(format!("mul.f32 {sum}, {sum}, 0f3B800000;\n{line}"))
            }
        })
    });
}

/// Changes the text of the last kernel, which is the attention kernel.
pub fn edit_text(program: &mut Program, change: impl Fn(&str) -> String) {
    let text = program.module.to_string();
    let mutant = change(&text);
    assert!(mutant != text, "the change finds nothing to change");
    program.module = ptx::parse(&mutant).expect("PTX").verify().expect("well-formed PTX");
}

/// Maps the lines of a text: each is kept, replaced or dropped.
pub fn lines(text: &str, change: impl Fn(&str, Option<&str>) -> Option<String>) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let changed = (0..lines.len()).filter_map(|i| change(lines[i], lines.get(i + 1).copied()));
    changed.map(|line| line + "\n").collect()
}
