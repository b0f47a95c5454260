//! Runs a backward plan on a machine and compares the gradients with those in f64.

use flashcore_kernels::{Arch, BufferKind, Plan, ProgramBuffer, emit};
use problem::{DType, Elements, LengthArray, Operand, OperandMap, Problem, Sequence, Tensor};
use ptx::{Kernel, Machine};

use crate::common::{decode, encode, input, loaded, poison, stored};

/// The inputs of a backward pass, and what the forward pass returned for them.
pub struct Inputs {
    problem: Problem,
    /// The bits of the tensors, in the order of their buffers.
    tensors: OperandMap<Vec<u32>>,
    lengths: OperandMap<Vec<i32>>,
    lse: Vec<f32>,
    d_lse: Vec<f32>,
    sinks: Vec<f32>,
    /// Each gradient's elements in f64, NaN outside its rows, and the largest error of each.
    expected: OperandMap<Vec<(f64, f64)>>,
}

/// A head of a sequence, dense, in f64.
struct Head {
    scores: Scores,
    dq: Vec<(f64, f64)>,
    /// dK and dV of the head's queries alone.
    dk: Vec<(f64, f64)>,
    dv: Vec<(f64, f64)>,
}

struct Scores {
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Inputs {
    /// Random inputs. `lengths` has the arrays of lengths.
    pub fn draw(problem: &Problem, lengths: OperandMap<Vec<i32>>, seed: u64) -> Inputs {
        let mut tensors = OperandMap::default();
        for tensor in [Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut] {
            tensors.insert(tensor.into(), input(problem, tensor, seed + 7 * tensor as u64, 1.0));
        }
        let (elements, _) = problem.span(Tensor::Out).unwrap();
        tensors.insert(Operand::OUT, vec![poison(problem.dtypes.out); elements]);
        let numbers = |count: usize, step: usize| {
            (0..count).map(|i| ((i * step) % 17) as f32 / 8.0 - 1.0).collect::<Vec<f32>>()
        };
        let d_lse = if problem.pass.d_lse() { numbers(problem.lse_len(), 5) } else { Vec::new() };
        let sinks = if problem.score.sink { numbers(problem.heads_q, 3) } else { Vec::new() };
        let lse = vec![f32::NAN; problem.lse_len()];
        let nothing =
            |tensor: Tensor| (tensor.into(), vec![(f64::NAN, 0.0); problem.span(tensor).unwrap().0]);
        let expected = Tensor::GRADIENTS.into_iter().map(nothing).collect();
        let problem = problem.clone();
        let mut inputs = Inputs { problem, tensors, lengths, lse, d_lse, sinks, expected };
        inputs.compute();
        inputs
    }

    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    fn sequences(&self) -> Vec<Sequence> {
        let arrays = self.lengths.map(|_, lengths| Elements::I32(lengths));
        self.problem.sequences(&arrays).unwrap()
    }

    /// The index of a row's number in the LSE.
    fn number(&self, sequence: &Sequence, head: usize, row: usize) -> usize {
        let [_, _, rows, _] = self.problem.extents(Tensor::Q);
        (sequence.q.batch * self.problem.heads_q + head) * rows + sequence.q.start + row
    }

    /// The place of a row of a sequence in a tensor.
    fn place(&self, tensor: Tensor, sequence: &Sequence, head: usize, row: usize) -> usize {
        let span = if tensor.is_of_keys() { sequence.kv } else { sequence.q };
        let (_, origin) = self.problem.span(tensor).unwrap();
        let offset = self.problem.strides(tensor).offset(span.batch, head, span.start + row);
        (origin as i64 + offset) as usize
    }

    /// All rows of a head in a tensor.
    fn rows(&self, tensor: Tensor, sequence: &Sequence, head: usize) -> Vec<Vec<f64>> {
        let span = if tensor.is_of_keys() { sequence.kv } else { sequence.q };
        let dim = self.problem.extents(tensor)[3];
        let data = &self.tensors[tensor.into()];
        let row = |row| {
            let place = self.place(tensor, sequence, head, row);
            data[place..place + dim]
                .iter()
                .map(|&bits| decode(self.problem.dtypes.of(tensor), bits))
                .collect()
        };
        (0..span.len).map(row).collect()
    }

    /// Computes O, the LSE and the expected gradients.
    fn compute(&mut self) {
        for sequence in self.sequences() {
            for kv_head in 0..self.problem.heads_kv {
                let group = self.problem.group_size();
                let mut sums: Option<[Vec<(f64, f64)>; 2]> = None;
                for head in kv_head * group..(kv_head + 1) * group {
                    let Head { scores, dq, dk, dv } = self.head(&sequence, head);
                    self.keep_scores(&sequence, head, &scores);
                    self.expect(Tensor::Dq, (&sequence, head), &dq);
                    match &mut sums {
                        None => sums = Some([dk, dv]),
                        Some(sums) => {
                            for (sums, parts) in sums.iter_mut().zip([dk, dv]) {
                                let pairs = sums.iter_mut().zip(parts);
                                pairs.for_each(|(a, b)| *a = (a.0 + b.0, a.1 + b.1));
                            }
                        }
                    }
                }
                let [dk, dv] = sums.expect("a group has heads");
                self.expect(Tensor::Dk, (&sequence, kv_head), &dk);
                self.expect(Tensor::Dv, (&sequence, kv_head), &dv);
            }
        }
    }

    fn keep_scores(&mut self, sequence: &Sequence, head: usize, Scores { out, lse }: &Scores) {
        let (dtype, dim) = (self.problem.dtypes.out, self.problem.head_dim_v);
        for row in 0..sequence.q.len {
            let place = self.place(Tensor::Out, sequence, head, row);
            let number = self.number(sequence, head, row);
            for (d, &value) in out[row * dim..][..dim].iter().enumerate() {
                self.tensors[Operand::OUT][place + d] = encode(dtype, value);
            }
            self.lse[number] = lse[row] as f32;
        }
    }

    /// The forward and the backward pass of a head, with the errors that the roundings of P, dS and O, and
    /// f32 arithmetic allow.
    fn head(&self, sequence: &Sequence, head: usize) -> Head {
        let p = &self.problem;
        let kv_head = head / p.group_size();
        let [q, d_out] = [Tensor::Q, Tensor::DOut].map(|tensor| self.rows(tensor, sequence, head));
        let [k, v] = [Tensor::K, Tensor::V].map(|tensor| self.rows(tensor, sequence, kv_head));
        let (seq_q, seq_kv) = (sequence.q.len, sequence.kv.len);
        let (scale, unit) = (f64::from(p.softmax_scale()), p.dtypes.out.unit_roundoff());
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let size = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
        let mut result = Head {
            scores: Scores { out: Vec::new(), lse: Vec::new() },
            dq: Vec::new(),
            dk: vec![(0.0, 0.0); seq_kv * p.head_dim],
            dv: vec![(0.0, 0.0); seq_kv * p.head_dim_v],
        };
        for (row, (q, d_out)) in q.iter().zip(&d_out).enumerate() {
            let visible = p.band.keys(row, seq_q, seq_kv);
            let keys = visible.start..visible.end.max(visible.start);
            let logits: Vec<f64> = keys.clone().map(|j| p.score.logit(scale, dot(q, &k[j]))).collect();
            let sink = self.sinks.get(head).map_or(f64::NEG_INFINITY, |&sink| sink.into());
            let max = logits.iter().copied().fold(sink, f64::max);
            let exponents = logits.iter().chain([&sink]);
            let sum: f64 =
                exponents.map(|x| if *x == f64::NEG_INFINITY { 0.0 } else { (x - max).exp() }).sum();
            let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp() / sum).collect();
            let mut out = vec![0.0; p.head_dim_v];
            for (j, weight) in keys.clone().zip(&weights) {
                out.iter_mut().zip(&v[j]).for_each(|(o, v)| *o += weight * v);
            }
            let d_lse = self.d_lse.get(self.number(sequence, head, row)).map_or(0.0, |&d| f64::from(d));
            let delta = dot(&out, d_out) - d_lse;
            let delta_error = (unit + 1e-6) * size(&out, d_out) + 1e-6 * d_lse.abs();
            let mut dq = vec![(0.0, 0.0); p.head_dim];
            for (j, &weight) in keys.zip(&weights) {
                let dp = dot(d_out, &v[j]);
                let slope = match p.score.softcap {
                    None => 1.0,
                    Some(cap) => 1.0 - (p.score.logit(scale, dot(q, &k[j])) / f64::from(cap)).powi(2),
                };
                // The tangent may have an error of 2^-11. S = Q Kᵀ, L and exp2 are f32.
                let of_cap = if p.score.softcap.is_some() { 4e-3 } else { 0.0 };
                let of_weight = 1e-5 + 4e-7 * (scale.abs() * size(q, &k[j]) + max.abs()) + of_cap;
                // Half of the least subnormal number.
                let least = if p.dtypes.out == DType::F16 { 2f64.powi(-25) } else { 0.0 };
                let ds = weight * (dp - delta) * slope;
                let of_ds = weight * (delta_error + 1e-6 * size(d_out, &v[j]))
                    + (unit + of_weight) * ds.abs()
                    + of_cap * weight * (dp - delta).abs()
                    + least;
                let add = |sums: &mut [(f64, f64)], factor: (f64, f64), row: &[f64]| {
                    for (sum, x) in sums.iter_mut().zip(row) {
                        *sum = (sum.0 + factor.0 * x, sum.1 + (factor.1 + 2e-6 * factor.0.abs()) * x.abs());
                    }
                };
                add(&mut dq, (scale * ds, scale.abs() * of_ds), &k[j]);
                add(&mut result.dk[j * p.head_dim..][..p.head_dim], (scale * ds, scale.abs() * of_ds), q);
                let of_p = (weight, (unit + of_weight) * weight + least);
                add(&mut result.dv[j * p.head_dim_v..][..p.head_dim_v], of_p, d_out);
            }
            result.dq.extend(dq);
            result.scores.out.extend(out);
            result.scores.lse.push(if sum == 0.0 { f64::NEG_INFINITY } else { max + sum.ln() });
        }
        result
    }

    /// Emits the plan's program, runs it and returns the bits of the gradients.
    pub fn run<M: Machine>(&self, machine: &mut M, plan: &Plan, arch: &Arch) -> OperandMap<Vec<u32>> {
        let program = emit(&self.problem, plan, arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
        self.run_kernels(machine, &program.contracts.buffers, &program.kernels())
            .unwrap_or_else(|e| panic!("{:?}\n{plan:?}: {e}", self.problem))
    }

    /// Runs the kernels of a program of the problem and returns the bits of the gradients.
    pub fn run_kernels<M: Machine>(
        &self,
        machine: &mut M,
        specs: &[ProgramBuffer],
        kernels: &[Kernel],
    ) -> Result<OperandMap<Vec<u32>>, M::Error> {
        let p = &self.problem;
        let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let mut buffers = Vec::new();
        for spec in specs {
            let mut buffer = machine.allocate(spec.bytes)?;
            let data = match spec.kind {
                BufferKind::Operand(Operand::Tensor(tensor)) => match self.tensors.get(tensor.into()) {
                    Some(bits) => Some(stored(p.dtypes.of(tensor), bits)),
                    None => {
                        let poisoned = vec![poison(p.dtypes.of(tensor)); spec.bytes / 2];
                        Some(stored(p.dtypes.of(tensor), &poisoned))
                    }
                },
                BufferKind::Operand(Operand::Lse) => Some(floats(&self.lse)),
                BufferKind::Operand(Operand::DLse) => Some(floats(&self.d_lse)),
                BufferKind::Operand(Operand::Lengths(array)) => {
                    let lengths = &self.lengths[Operand::Lengths(array)];
                    Some(lengths.iter().flat_map(|n| n.to_le_bytes()).collect())
                }
                BufferKind::Temporary(_) => None,
                BufferKind::Counter => Some(vec![0; spec.bytes]),
                other => panic!("a backward kernel has no {other}"),
            };
            if let Some(data) = data {
                assert_eq!(data.len(), spec.bytes, "{}", spec.kind);
                machine.upload(&mut buffer, &data)?;
            }
            buffers.push(buffer);
        }
        for kernel in kernels {
            machine.launch(kernel, &mut buffers.iter_mut().collect::<Vec<_>>())?;
        }
        let mut gradients = OperandMap::default();
        for (spec, buffer) in specs.iter().zip(&buffers) {
            if let BufferKind::Operand(Operand::Tensor(tensor)) = spec.kind
                && Tensor::GRADIENTS.contains(&tensor)
            {
                let mut bytes = vec![0; spec.bytes];
                machine.download(buffer, &mut bytes)?;
                gradients.insert(tensor.into(), loaded(p.dtypes.of(tensor), &bytes));
            }
            if spec.kind == BufferKind::Counter {
                let mut bytes = vec![0; spec.bytes];
                machine.download(buffer, &mut bytes)?;
                assert!(bytes.iter().all(|&byte| byte == 0), "the counter is not ready for the next launch");
            }
        }
        Ok(gradients)
    }

    /// The first element of a gradient that is too far from the expected one.
    pub fn fault(&self, gradients: &OperandMap<Vec<u32>>) -> Option<String> {
        let p = &self.problem;
        Tensor::GRADIENTS.into_iter().find_map(|tensor| {
            let dtype = p.dtypes.of(tensor);
            let pairs = gradients[tensor.into()].iter().zip(&self.expected[tensor.into()]);
            pairs.enumerate().find_map(|(i, (&bits, &(value, error)))| {
                if value.is_nan() {
                    let fault = || format!("element {i} of {tensor:?} belongs to no row and was written");
                    return (bits != poison(dtype)).then(fault);
                }
                let got = decode(dtype, bits);
                let bound = 1.05 * (error + dtype.unit_roundoff() * value.abs()) + 1e-6;
                let fault = || format!("element {i} of {tensor:?}: {got}, should be {value} ± {bound}");
                // False for a NaN.
                let is_close = (got - value).abs() <= bound;
                (!is_close).then(fault)
            })
        })
    }

    fn expect(&mut self, tensor: Tensor, (sequence, head): (&Sequence, usize), values: &[(f64, f64)]) {
        let dim = self.problem.extents(tensor)[3];
        for (row, values) in values.chunks_exact(dim).enumerate() {
            let place = self.place(tensor, sequence, head, row);
            self.expected[tensor.into()][place..place + dim].copy_from_slice(values);
        }
    }
}

/// No arrays of lengths.
pub fn even() -> OperandMap<Vec<i32>> {
    OperandMap::default()
}

/// Arrays of lengths.
pub fn uneven<const N: usize>(arrays: [(LengthArray, &[i32]); N]) -> OperandMap<Vec<i32>> {
    arrays.into_iter().map(|(array, lengths)| (Operand::Lengths(array), lengths.to_vec())).collect()
}
