//! Right answers pass on many draws. A bound that is too tight rejects right candidates of a search.

use cpu::{CpuPlan, Isa, Lanes};
use flashcore_judge::inputs::{Style, draw};
use flashcore_judge::outputs::References;
use flashcore_judge::values::{Inputs, Values};
use problem::{Band, DType, DTypes, Layout, Operand, Problem};

/// Draws of each style.
const SEEDS: u64 = 4;

/// Problems that the review found refused, and others of several head dims, groups and bands.
fn problems(dtypes: DTypes) -> Vec<Problem> {
    let dense = |batch, heads, rows, dim| Problem::new(batch, heads, rows, dim, dtypes);
    let grouped = |heads, kv: usize, rows, dim| dense(1, heads, rows, dim).with_heads_kv(kv, Layout::Bhsd);
    vec![
        dense(2, 2, 71, 64),
        dense(1, 4, 71, 128),
        grouped(8, 2, 71, 64),
        dense(1, 2, 71, 256).with_seq_kv(203, Layout::Bhsd),
        dense(1, 4, 71, 64).with_band(Band::CAUSAL),
        grouped(4, 1, 1, 128).with_seq_kv(203, Layout::Bhsd),
        dense(1, 2, 33, 32).with_band(Band::window(8, 3)),
        dense(1, 2, 40, 48).with_softcap(20.0),
    ]
}

/// Plans whose sums have different orders.
fn plans(problem: &Problem) -> Vec<CpuPlan> {
    let dims = Isa::available().into_iter().find(|isa| isa.has_dims());
    let of_dims = |isa| CpuPlan { lanes: Lanes::Dims, splits: 3, ..CpuPlan::widest(isa, 1, 48, 32) };
    [CpuPlan::for_problem(problem), CpuPlan::widest(Isa::Portable, 1, 16, 24)]
        .into_iter()
        .chain(dims.map(of_dims))
        .collect()
}

fn values(problem: &Problem, style: Style, seed: u64) -> Vec<String> {
    let inputs = draw(problem, style, seed);
    let references = References::of(problem, &inputs).unwrap();
    let Problem { batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, dtypes, .. } = problem;
    let shape = format!("{batch},{heads_q}/{heads_kv},{seq_q}x{seq_kv},{head_dim},{dtypes}");
    let of_plan = |plan: CpuPlan| {
        let (out, lse) = inputs.attention(problem, &plan).unwrap();
        let out: Vec<f64> = (0..out.len()).filter_map(|i| out.get(i)).map(f64::from).collect();
        let lse: Vec<f64> = lse.into_iter().map(f64::from).collect();
        let case = format!("{style:?}, seed {seed}, {plan:?}, {shape}");
        let reasons = references.judge(&out, Some(&lse)).reasons().into_iter();
        reasons.map(move |reason| format!("{case}: {reason}"))
    };
    plans(problem).into_iter().flat_map(of_plan).collect()
}

#[test]
fn right_answers_pass_on_every_draw() {
    let fp8 = ["e4m3", "e5m2:f16"].map(|text| text.parse().unwrap());
    let mut refused = Vec::new();
    for dtypes in DType::OUTPUTS.map(DTypes::uniform).into_iter().chain(fp8) {
        let styles = || Style::ALL.into_iter().chain(Style::FP8.into_iter().filter(|_| dtypes.has_fp8()));
        for problem in problems(dtypes) {
            for (style, seed) in styles().flat_map(|style| (0..SEEDS).map(move |seed| (style, seed))) {
                refused.extend(values(&problem, style, seed));
            }
        }
    }
    assert_eq!(refused, [""; 0]);
}

/// Wrong f32 answers are seen on the inputs on which bounds are widest: products in tf32, whose logits have
/// 2^13 times larger errors, a scale that is off by 2^-10, and a key that is dropped or read in place of its
/// neighbour.
#[test]
fn wrong_answers_are_refused_on_difficult_draws() {
    let styles = [Style::Normal, Style::HugeLogits, Style::Outlier, Style::Spike, Style::Rising];
    for problem in problems(DTypes::uniform(DType::F32)) {
        for (style, seed) in styles.into_iter().flat_map(|style| (0..SEEDS).map(move |seed| (style, seed))) {
            let inputs = draw(&problem, style, seed);
            let references = References::of(&problem, &inputs).unwrap();
            let refused = |wrong: &Problem, inputs: &Inputs| {
                let wrong = inputs.reference_in_precision(wrong).unwrap();
                !references.judge(&wrong.out, Some(&wrong.lse)).reasons().is_empty()
            };
            let case = format!("{style:?}, seed {seed}, {problem:?}");
            assert!(!refused(&problem, &inputs), "{case}");
            let tf32 = Problem { dtypes: DTypes::TF32, ..problem.clone() };
            assert!(refused(&tf32, &inputs), "tf32, {case}");
            let mut scaled = problem.clone();
            scaled.score.scale = Some(problem.softmax_scale() * (1.0 + 1.0 / 1024.0));
            assert!(refused(&scaled, &inputs), "a wrong scale, {case}");
            let mut dropped = problem.clone();
            dropped.seq_kv -= 1;
            // Among huge logits, the last key may have no weight in any row.
            let is_seen = style != Style::HugeLogits;
            assert!(!is_seen || refused(&dropped, &inputs), "a dropped key, {case}");
            let mut moved = inputs.clone();
            let mut bytes = inputs[Operand::V].to_bytes();
            bytes.rotate_left(4 * problem.head_dim_v);
            moved[Operand::V] = Values::from_bytes(DType::F32, &bytes);
            assert!(refused(&problem, &moved), "a neighbour's value, {case}");
        }
    }
}
