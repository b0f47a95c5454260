//! The native CPU kernels of the backward pass against the oracle, for every feature.

use cpu::{CpuPlan, Isa};
use flashcore_judge::gradients::GradientReferences;
use flashcore_judge::inputs::{Style, draw, rows_of};
use flashcore_judge::values::{Inputs, Values};
use problem::{
    Band, DType, DTypes, ElementType, Gradients, Layout, Operand, Pass, Problem, SideLengths, Strides, Table,
    Tensor,
};

/// A gradient with its rows dense: those that belong to sequences.
fn dense(problem: &Problem, inputs: &Inputs, operand: Operand, values: &Values) -> Vec<f64> {
    let get = |i: usize| f64::from(values.get(i).unwrap());
    let Operand::Tensor(tensor) = operand else { return (0..values.len()).map(get).collect() };
    let (_, origin) = problem.span(tensor).unwrap();
    let ([_, heads, _, dim], strides) = (problem.extents(tensor), problem.strides(tensor));
    rows_of(&inputs.sequences(problem), tensor, heads)
        .flat_map(|(span, head, row)| {
            let start = origin as i64 + strides.offset(span.batch, head, span.start + row);
            (start as usize..start as usize + dim).map(get)
        })
        .collect()
}

fn check(name: &str, problem: &Problem, style: Style, plan: &CpuPlan) {
    let inputs = draw(problem, style, 3);
    let references = GradientReferences::of(problem, &inputs).unwrap();
    let found = inputs.gradients(problem, plan).unwrap();
    for operand in references.operands() {
        let values = dense(problem, &inputs, operand, &found[operand]);
        let figures = references.judge(operand, &values).unwrap();
        assert_eq!(figures.reasons(), [""; 0], "{name}, {operand}, {style:?}, {plan:?}\n{problem:?}");
    }
}

/// A backward problem with grouped heads, an odd number of rows and keys, and Dv ≠ D.
fn base(dtypes: impl Into<DTypes>, change: impl FnOnce(&mut Problem)) -> Problem {
    let mut p = Problem::new(2, 4, 75, 40, dtypes);
    (p.heads_kv, p.seq_kv, p.head_dim_v) = (2, 150, 24);
    p = p.with_layout(Layout::Bshd);
    change(&mut p);
    let tables = (0..p.programs.tables.len()).filter(|&i| p.programs.tables[i].dtype.is_float());
    let wants = Gradients { sinks: p.score.sink, tables: tables.map(|i| 1 << i).sum() };
    let p = p.with_pass(Pass::Backward { deterministic: false, d_lse: true, wants });
    p.check().unwrap();
    p
}

fn features(dtype: DType) -> Vec<(&'static str, Problem)> {
    let with = |change: fn(&mut Problem)| base(dtype, change);
    vec![
        ("plain", with(|_| {})),
        ("dropout", with(|p| (p.dropout, p.band) = (Some(0.25), Band::CAUSAL))),
        ("causal", with(|p| p.band = Band::CAUSAL)),
        ("rows without keys", with(|p| (p.seq_kv, p.band, p.score.sink) = (40, Band::CAUSAL, true))),
        ("window from the top left", with(|p| p.band = "window-top-left:9:30".parse().unwrap())),
        ("softcap", with(|p| p.score.softcap = Some(1.5))),
        ("negative scale", with(|p| p.score.scale = Some(-0.3))),
        (
            "packed",
            with(|p| {
                p.dropout = Some(0.5);
                p.lengths.q = SideLengths { packed: Some(120), used: true };
                p.lengths.kv = SideLengths { packed: Some(220), used: false };
                p.band = Band::CAUSAL;
                for tensor in Tensor::FORWARD {
                    let [_, heads, rows, dim] = p.extents(tensor);
                    p.set_strides(tensor, Layout::Bshd.strides(heads, rows, dim));
                }
            }),
        ),
        ("used lengths and padding", with(|p| (p.lengths.kv.used, p.lengths.left_padded) = (true, true))),
        (
            "a bias of all batches",
            with(|p| {
                p.dropout = Some(0.1);
                p.programs.score = Some("s + t0[b, h, q, k]".parse().unwrap());
                let strides = vec![0, 75 * 150, 150, 1];
                p.programs.tables =
                    vec![Table { strides, ..Table::dense(ElementType::F16, &[2, 4, 75, 150]) }];
            }),
        ),
        (
            "programs",
            with(|p| {
                p.programs.score = Some("tanh(s) * t0[h] - f0 * float(abs(q - k))".parse().unwrap());
                p.programs.mask = Some("(n1[q] >= n1[k % 75]) & ((q + k) % 3 != 1)".parse().unwrap());
                p.programs.floats = vec![0.01];
                p.programs.tables =
                    vec![Table::dense(ElementType::F32, &[4]), Table::dense(ElementType::I32, &[75])];
            }),
        ),
        (
            "strides",
            with(|p| {
                // As `sum().backward()` makes dO, with padded rows of dK and reversed rows of dQ.
                p.set_strides(Tensor::DOut, Strides { batch: 0, head: 0, row: 0 });
                p.set_strides(Tensor::Dk, Strides { batch: 150 * 128, head: 48, row: 128 });
                let dq = p.q;
                p.set_strides(Tensor::Dq, Strides { row: -dq.row, ..dq });
            }),
        ),
    ]
}

#[test]
fn cpu_gradients_are_right() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        // The arithmetic is f32 for every type, so that 16-bit types need a few features only.
        let most = if dtype == DType::F32 { usize::MAX } else { 3 };
        for (name, problem) in features(dtype).into_iter().take(most) {
            let plan = CpuPlan::for_problem(&problem);
            check(name, &problem, Style::Normal, &CpuPlan { threads: 1, ..plan });
            // More threads than KV heads: the keys of a head are divided.
            check(name, &problem, Style::PoisonedPadding, &CpuPlan { threads: 9, ..plan });
        }
    }
}

#[test]
fn cpu_gradients_are_right_for_every_style_and_instruction_set() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let problem = base(dtype, |p| p.band = Band::CAUSAL);
        let styles = Style::ALL.into_iter().filter(|style| style.is_finite());
        for style in styles {
            check("causal", &problem, style, &CpuPlan::for_problem(&problem));
        }
        for isa in Isa::available().into_iter().chain([Isa::Portable]) {
            check(
                "causal",
                &problem,
                Style::Normal,
                &CpuPlan { isa, vectors: 1, tile_rows: 1, ..CpuPlan::for_problem(&problem) },
            );
        }
    }
}

/// A deterministic call returns equal bits for every number of threads, although the keys of its four KV
/// heads are divided, and a NaN stays where it belongs.
#[test]
fn cpu_gradients_are_repeatable_and_keep_a_nan_in_its_place() {
    let mut problem = base(DType::F32, |p| p.band = Band::CAUSAL);
    (problem.seq_q, problem.seq_kv) = (300, 300);
    let problem = problem.with_layout(Layout::Bhsd).with_pass(Pass::DETERMINISTIC);
    let mut inputs = draw(&problem, Style::Normal, 3);
    let plan = CpuPlan { threads: 4, ..CpuPlan::for_problem(&problem) };
    let first = inputs.gradients(&problem, &plan).unwrap();
    for threads in [1, 3, 9, 40] {
        assert_eq!(inputs.gradients(&problem, &CpuPlan { threads, ..plan }).unwrap(), first);
    }
    let row = 60;
    let d_out = Operand::Tensor(Tensor::DOut);
    let Values::F32(values) = &mut inputs.operands[d_out] else { panic!("f32") };
    values[row * 24] = f32::NAN;
    let found = inputs.gradients(&problem, &plan).unwrap();
    for (tensor, dim) in [(Tensor::Dq, 40), (Tensor::Dk, 40), (Tensor::Dv, 24)] {
        let values = &found[Operand::Tensor(tensor)];
        for line in 0..values.len() / dim {
            let is_nan = (line * dim..(line + 1) * dim).any(|i| values.get(i).unwrap().is_nan());
            let spoiled = if tensor == Tensor::Dq { line == row } else { line <= row };
            assert_eq!(is_nan, spoiled, "{tensor:?} row {line}");
        }
    }
}

#[test]
fn wrong_calls_are_refused_by_name() {
    let problem = base(DType::F16, |_| {});
    let plan = CpuPlan::for_problem(&problem);
    let refused =
        |inputs: &Inputs, problem: &Problem| inputs.gradients(problem, &plan).unwrap_err().to_string();
    let right = draw(&problem, Style::Normal, 1);
    let mut without = right.clone();
    without.operands.remove(Operand::Lse);
    assert!(refused(&without, &problem).contains("'0' for the number of elements of lse"));
    let mut other = right.clone();
    other.operands.insert(Operand::Tensor(Tensor::DOut), Values::F32(vec![0.0; 9]));
    assert!(refused(&other, &problem).contains("'f32' for the element type of d_out: expected f16"));
    let forward = problem.clone().with_lse(true);
    let inputs = draw(&forward, Style::Normal, 1);
    assert!(refused(&inputs, &forward).contains("'forward' for the pass: expected backward"));
}
