//! The oracle's gradients against central differences of the oracle's forward pass, and against nested loops
//! that take the softmax and its derivative in another form and read neither O nor the LSE.
//!
//! Faults of the kinds that an oracle could have are put into the loops, and the comparison must see each.

use flashcore_oracle::{GradientReference, gradients, oracle_with};
use problem::{
    Band, DType, ElementType, Elements, Gradients, LengthArray, Operand, OperandMap, Pass, Problem, Table,
    Tensor,
};

const BATCH: usize = 2;
const HEADS_Q: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 3;
const DIM_V: usize = 2;

/// The values of an operand.
enum Data {
    Floats(Vec<f32>),
    Ints(Vec<i32>),
}

impl Data {
    fn floats(&mut self) -> &mut [f32] {
        match self {
            Data::Floats(floats) => floats,
            Data::Ints(_) => panic!("integers"),
        }
    }
}

/// A forward problem with its inputs, and the gradients of its outputs.
struct Case {
    forward: Problem,
    inputs: OperandMap<Data>,
    d_out: Vec<f32>,
    d_lse: Vec<f32>,
}

/// Multiples of 1/64 between −1.5 and 1.5, so that a small power of two can be added exactly.
fn draw(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 193) as f32 / 64.0 - 1.5
    };
    (0..len).map(|_| next()).collect()
}

impl Case {
    fn new(rows: usize, keys: usize, change: impl FnOnce(&mut Problem)) -> Case {
        let mut forward = Problem::new(BATCH, HEADS_Q, rows, DIM, DType::F32).with_lse(true);
        (forward.heads_kv, forward.seq_kv, forward.head_dim_v) = (HEADS_KV, keys, DIM_V);
        change(&mut forward);
        for tensor in Tensor::FORWARD {
            let [_, heads, rows, dim] = forward.extents(tensor);
            forward.set_strides(tensor, problem::Layout::Bhsd.strides(heads, rows, dim));
        }
        forward.check().unwrap();
        let seeds = 1..;
        let of = |(spec, seed): (problem::OperandSpec, u64)| match spec.operand {
            Operand::Lengths(array) => (spec.operand, Data::Ints(lengths(array, &forward))),
            _ if spec.dtype == ElementType::I32 => (spec.operand, Data::Ints(vec![1; spec.elements])),
            _ => (spec.operand, Data::Floats(draw(spec.elements, seed))),
        };
        let inputs = forward.inputs().zip(seeds).map(of).collect();
        let [_, heads, rows, dim] = forward.extents(Tensor::Out);
        let elements = forward.extents(Tensor::Out)[0] * heads * rows * dim;
        let (d_out, d_lse) = (draw(elements, 98), draw(forward.lse_len(), 99));
        Case { forward, inputs, d_out, d_lse }
    }

    fn elements(&self) -> OperandMap<Elements<'_>> {
        self.inputs.map(|_, data| match data {
            Data::Floats(floats) => Elements::from(&floats[..]),
            Data::Ints(ints) => Elements::from(&ints[..]),
        })
    }

    /// The loss `Σ dO·O + Σ dLSE·LSE` over the rows of sequences that have mass.
    fn loss(&self) -> f64 {
        let reference = oracle_with(&self.forward, &self.elements()).unwrap();
        let of = |values: &[f64], weights: &[f32]| -> f64 {
            let terms = values.iter().zip(weights).filter(|(value, _)| value.is_finite());
            terms.map(|(value, &weight)| value * f64::from(weight)).sum()
        };
        of(&reference.out, &self.d_out) + of(&reference.lse, &self.d_lse)
    }

    fn backward(&self) -> Problem {
        let float = |(i, table): (usize, &Table)| u8::from(table.dtype == ElementType::F32) << i;
        let tables = self.forward.programs.tables.iter().enumerate().map(float).sum();
        let wants = Gradients { sinks: self.forward.score.sink, tables };
        self.forward.clone().with_pass(Pass::Backward { deterministic: false, d_lse: true, wants })
    }

    fn gradients(&self) -> GradientReference {
        let forward = oracle_with(&self.forward, &self.elements()).unwrap();
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (out, lse) = (narrow(&forward.out), narrow(&forward.lse));
        let inputs = self
            .elements()
            .with(Operand::OUT, &out[..])
            .with(Operand::Lse, &lse[..])
            .with(Operand::Tensor(Tensor::DOut), &self.d_out[..])
            .with(Operand::DLse, &self.d_lse[..]);
        gradients(&self.backward(), &inputs).unwrap()
    }

    /// Compares every gradient with central differences. Returns the number of elements that are not 0.
    fn check_differences(mut self, name: &str) -> usize {
        const STEP: f32 = 1.0 / 4096.0;
        let found = self.gradients();
        let mut nonzero = 0;
        for (gradient, values) in found.values.iter() {
            let of = match gradient {
                Operand::Tensor(tensor) => Operand::Tensor(tensor.primal()),
                Operand::DSinks => Operand::Sinks,
                Operand::DTable(table) => Operand::Table(table),
                other => panic!("{other} is no gradient"),
            };
            assert_eq!(values.len(), self.inputs.get_mut(of).unwrap().floats().len(), "{name}: {gradient}");
            let largest = values.iter().filter(|x| x.is_finite()).fold(1.0, |most: f64, x| most.max(x.abs()));
            for (i, &value) in values.iter().enumerate() {
                let mut at = |step: f32| {
                    let element = &mut self.inputs.get_mut(of).unwrap().floats()[i];
                    let before = std::mem::replace(element, *element + step);
                    let loss = self.loss();
                    self.inputs.get_mut(of).unwrap().floats()[i] = before;
                    loss
                };
                let difference = (at(STEP) - at(-STEP)) / (2.0 * f64::from(STEP));
                if value.is_nan() {
                    assert_eq!(difference, 0.0, "{name}: {gradient}[{i}] belongs to no sequence");
                    continue;
                }
                let error = (value - difference).abs();
                assert!(error < 1e-5 * largest, "{name}: {gradient}[{i}] is {value}, not {difference}");
                nonzero += usize::from(value != 0.0);
            }
        }
        nonzero
    }
}

/// Uneven lengths with an empty sequence, a short one and rows that belong to none.
fn lengths(array: LengthArray, problem: &Problem) -> Vec<i32> {
    let [rows, keys] = [problem.seq_q as i32, problem.seq_kv as i32];
    match array {
        LengthArray::CumulativeQ => vec![0, rows - 2, rows],
        LengthArray::CumulativeKv => vec![0, keys - 4, keys],
        LengthArray::UsedQ => vec![rows - 1, 1],
        LengthArray::UsedKv => vec![keys, 0],
        LengthArray::LeftPad => vec![2, 0],
    }
}

fn with_score(text: &'static str, tables: Vec<Table>) -> impl FnOnce(&mut Problem) {
    move |p| {
        p.programs.score = Some(text.parse().unwrap());
        p.programs.floats = vec![0.75];
        p.programs.tables = tables;
    }
}

#[test]
fn gradients_are_central_differences() {
    let dense = |extents: &[usize]| Table::dense(ElementType::F32, extents);
    let bias = Table { strides: vec![0, 35, 7, 1], ..dense(&[BATCH, HEADS_Q, 5, 7]) };
    let row_bias = Table { strides: vec![7, 0, 0, 1], ..dense(&[BATCH, HEADS_Q, 5, 7]) };
    let banded = |band: Band| move |p: &mut Problem| p.band = band;
    let window = Band::window(2, 1);
    let cases: Vec<(&str, Case)> = vec![
        ("plain", Case::new(5, 7, |_| {})),
        ("causal", Case::new(5, 7, banded(Band::CAUSAL))),
        ("causal, rows without keys", Case::new(7, 4, banded(Band::CAUSAL))),
        ("causal from the top left", Case::new(5, 7, banded(Band::CAUSAL_TOP_LEFT))),
        ("window", Case::new(6, 8, banded(window))),
        ("softcap", Case::new(5, 7, |p| p.score.softcap = Some(0.75))),
        ("negative scale", Case::new(5, 7, |p| (p.score.scale, p.score.softcap) = (Some(-0.7), Some(1.5)))),
        ("sinks", Case::new(6, 4, |p| (p.score.sink, p.band) = (true, Band::CAUSAL))),
        ("used lengths", Case::new(5, 6, |p| (p.lengths.q.used, p.lengths.kv.used) = (true, true))),
        (
            "packed",
            Case::new(6, 7, |p| {
                (p.lengths.q.packed, p.lengths.kv.packed) = (Some(8), Some(9));
                p.band = Band::CAUSAL;
            }),
        ),
        (
            "dropout",
            Case::new(5, 7, |p| {
                (p.dropout, p.band, p.score.softcap) = (Some(0.25), Band::CAUSAL, Some(0.75))
            }),
        ),
        ("left padding", Case::new(5, 7, |p| (p.lengths.left_padded, p.band) = (true, Band::CAUSAL))),
        ("bias of all batches", Case::new(5, 7, with_score("s + t0[b, h, q, k]", vec![bias]))),
        ("bias of all rows and heads", Case::new(5, 7, with_score("s + t0[b, h, q, k]", vec![row_bias]))),
        (
            "ALiBi",
            Case::new(5, 7, with_score("s - t0[h] * float(abs(q + k_len - q_len - k))", vec![dense(&[4])])),
        ),
        (
            "two tables, one of them read twice",
            Case::new(
                5,
                7,
                with_score(
                    "tanh(s * t1[b]) * t0[h, q] + exp2(f0 * t0[h, k - q])",
                    vec![dense(&[4, 5]), dense(&[2])],
                ),
            ),
        ),
        (
            "every operation",
            Case::new(
                5,
                7,
                with_score(
                    "x = s * s + 1.5; y = select(q > k, sqrt(x), log2(x)); max(y, t0[h]) / (abs(t0[k % 4]) + x) \
                     - min(s, f0) * -y",
                    vec![dense(&[4])],
                ),
            ),
        ),
        ("mask program", Case::new(5, 7, |p| p.programs.mask = Some("(q + k) % 3 != h".parse().unwrap()))),
    ];
    for (name, case) in cases {
        let nonzero = case.check_differences(name);
        assert!(nonzero > 80, "{name}: {nonzero} gradients");
    }
}

/// Faults of an oracle of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The scale is missing in dQ.
    NoScale,
    /// D is that of the previous row.
    StaleDelta,
    /// The gradient of the LSE is left out.
    NoLseGradient,
    /// The derivative of the cap is missing.
    NoCapSlope,
    /// dV has the weight of the next key.
    NextWeight,
    /// dK and dV lack the last query head of each group.
    LostHead,
    /// dbias of a head is added to the next head.
    NextHeadBias,
    /// dsink has no sign.
    SinkSign,
    /// D is left out.
    NoDelta,
    /// The last key is lost.
    LostKey,
}

impl Fault {
    const ALL: [Fault; 10] = [
        Fault::NoScale,
        Fault::StaleDelta,
        Fault::NoLseGradient,
        Fault::NoCapSlope,
        Fault::NextWeight,
        Fault::LostHead,
        Fault::NextHeadBias,
        Fault::SinkSign,
        Fault::NoDelta,
        Fault::LostKey,
    ];
}

/// The gradients by nested loops: with cap, sinks, bias `[head, row, key]`, and keys up to
/// `row + keys − rows`.
fn plain(case: &Case, cap: f64, fault: Option<Fault>) -> [Vec<f64>; 5] {
    let of = |operand| case.elements().floats(operand).iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let [q, k, v] = [Operand::Q, Operand::K, Operand::V].map(of);
    let (sinks, bias) = (of(Operand::Sinks), of(Operand::Table(0)));
    let (rows, keys) = (case.forward.seq_q, case.forward.seq_kv);
    let is = |other| fault == Some(other);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let (mut d_sinks, mut d_bias) = (vec![0.0; HEADS_Q], vec![0.0; bias.len()]);
    let scale = 1.0 / (DIM as f64).sqrt();
    for (batch, head) in (0..BATCH).flat_map(|batch| (0..HEADS_Q).map(move |head| (batch, head))) {
        let group = HEADS_Q / HEADS_KV;
        let of_keys = batch * HEADS_KV + head / group;
        let mut stale = 0.0;
        for row in 0..rows {
            let line = (batch * HEADS_Q + head) * rows + row;
            let seen = (row + keys + 1).saturating_sub(rows).min(keys - usize::from(is(Fault::LostKey)));
            let mut scores = Vec::new();
            for key in 0..seen {
                let products = (0..DIM).map(|d| q[line * DIM + d] * k[(of_keys * keys + key) * DIM + d]);
                scores.push((scale * products.sum::<f64>() / cap).tanh());
            }
            let logit = |key: usize| scores[key] * cap + bias[(head * rows + row) * keys + key];
            let sink = sinks[head].exp();
            let sum = sink + (0..seen).map(|key| logit(key).exp()).sum::<f64>();
            let weights: Vec<f64> = (0..seen).map(|key| logit(key).exp() / sum).collect();
            let d_weight = |key: usize| -> f64 {
                (0..DIM_V)
                    .map(|d| f64::from(case.d_out[line * DIM_V + d]) * v[(of_keys * keys + key) * DIM_V + d])
                    .sum()
            };
            let mean: f64 = (0..seen).map(|key| weights[key] * d_weight(key)).sum();
            let d_lse = if is(Fault::NoLseGradient) { 0.0 } else { f64::from(case.d_lse[line]) };
            let delta = match fault {
                Some(Fault::StaleDelta) => std::mem::replace(&mut stale, mean - d_lse),
                Some(Fault::NoDelta) => 0.0,
                _ => mean - d_lse,
            };
            d_sinks[head] -= sink / sum * delta * if is(Fault::SinkSign) { -1.0 } else { 1.0 };
            for key in 0..seen {
                let d_logit = weights[key] * (d_weight(key) - delta);
                let of_head = if is(Fault::NextHeadBias) { (head + 1) % HEADS_Q } else { head };
                d_bias[(of_head * rows + row) * keys + key] += d_logit;
                let slope = if is(Fault::NoCapSlope) { 1.0 } else { 1.0 - scores[key] * scores[key] };
                let d_score = d_logit * slope;
                let lost = is(Fault::LostHead) && head % group == group - 1;
                for d in 0..DIM {
                    let (at, of_key) = (line * DIM + d, (of_keys * keys + key) * DIM + d);
                    dq[at] += if is(Fault::NoScale) { 1.0 } else { scale } * d_score * k[of_key];
                    dk[of_key] += if lost { 0.0 } else { scale * d_score * q[at] };
                }
                let weight = if is(Fault::NextWeight) { weights[(key + 1) % seen] } else { weights[key] };
                for d in 0..DIM_V {
                    let gradient = f64::from(case.d_out[line * DIM_V + d]);
                    dv[(of_keys * keys + key) * DIM_V + d] += if lost { 0.0 } else { weight * gradient };
                }
            }
        }
    }
    [dq, dk, dv, d_sinks, d_bias]
}

#[test]
fn gradients_are_those_of_plain_loops() {
    let (rows, keys, cap) = (7, 6, 1.25);
    let case = Case::new(rows, keys, |p| {
        (p.band, p.score.sink, p.score.softcap) = (Band::CAUSAL, true, Some(cap));
        p.programs.score = Some("s + t0[b, h, q, k]".parse().unwrap());
        let extents = [BATCH, HEADS_Q, rows, keys];
        let strides = vec![0, (rows * keys) as i64, keys as i64, 1];
        p.programs.tables = vec![Table { strides, ..Table::dense(ElementType::F32, &extents) }];
    });
    let found = case.gradients();
    let operands = [Tensor::Dq, Tensor::Dk, Tensor::Dv].map(Operand::Tensor);
    let operands = operands.into_iter().chain([Operand::DSinks, Operand::DTable(0)]);
    let error = |fault| {
        let errors = operands.clone().zip(plain(&case, f64::from(cap), fault)).map(|(operand, plain)| {
            let found = &found.values[operand];
            assert_eq!(found.len(), plain.len());
            found.iter().zip(&plain).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
        });
        errors.fold(0.0, f64::max)
    };
    assert!(error(None) < 1e-6, "{}", error(None));
    for fault in Fault::ALL {
        assert!(error(Some(fault)) > 1e-2, "{fault:?}: {}", error(Some(fault)));
    }
}

/// A row whose gradients are NaN spoils its own dQ and the keys that it sees, and nothing else.
#[test]
fn a_nan_in_d_out_stays_in_its_row_and_its_keys() {
    let mut case = Case::new(5, 5, |p| p.band = Band::CAUSAL);
    let (head, row) = (1, 2);
    case.d_out[(head * 5 + row) * DIM_V] = f32::NAN;
    let found = case.gradients();
    for (tensor, dim) in [(Tensor::Dq, DIM), (Tensor::Dk, DIM), (Tensor::Dv, DIM_V)] {
        for (line, numbers) in found.values[tensor.into()].chunks(dim).enumerate() {
            let spoiled = match tensor {
                Tensor::Dq => line == head * 5 + row,
                _ => line <= row, // KV head 0 of batch entry 0
            };
            assert_eq!(numbers.iter().any(|x| x.is_nan()), spoiled, "{tensor:?} row {line}");
        }
    }
}

/// The sums of the gradients over keys, which hold without another implementation: Σ dV = Σ dO, and
/// Σ ⟨Q, dQ⟩ = Σ ⟨K, dK⟩ for each KV head.
#[test]
fn sums_over_keys_are_known() {
    let case = Case::new(6, 9, |p| p.band = Band::CAUSAL);
    let found = case.gradients();
    let inputs = case.elements();
    let group = HEADS_Q / HEADS_KV;
    for kv_head in 0..BATCH * HEADS_KV {
        let of = |all: &[f64], heads: usize, rows: usize, dim: usize| {
            all[kv_head * heads * rows * dim..(kv_head + 1) * heads * rows * dim].to_vec()
        };
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let product = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let of_queries = product(
            of(&wide(inputs.floats(Operand::Q)), group, 6, DIM),
            of(&found.values[Tensor::Dq.into()], group, 6, DIM),
        );
        let of_keys = product(
            of(&wide(inputs.floats(Operand::K)), 1, 9, DIM),
            of(&found.values[Tensor::Dk.into()], 1, 9, DIM),
        );
        assert!((of_queries - of_keys).abs() < 1e-9 && of_keys.abs() > 1e-3, "{of_queries} {of_keys}");
        for d in 0..DIM_V {
            let sum = |all: Vec<f64>| all.iter().skip(d).step_by(DIM_V).sum::<f64>();
            let of_values = sum(of(&found.values[Tensor::Dv.into()], 1, 9, DIM_V));
            let of_outputs = sum(of(&wide(&case.d_out), group, 6, DIM_V));
            assert!((of_values - of_outputs).abs() < 1e-5, "{of_values} {of_outputs}");
        }
    }
}
