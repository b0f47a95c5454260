//! Tests of kernels with score and mask programs: the properties on which their text depends, and spills of
//! the default plans.

use crate::common::factors;
use crate::tools::{self, Facts};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Expr, Layout, Pass, PassKind, Problem, Program, Programs, Table};
use ptx::Kernel;

fn problem(dim: usize, dtype: DType) -> Problem {
    Problem::new(2, 16, 2048, dim, dtype).with_heads_kv(4, Layout::Bshd)
}

fn program(expr: Expr) -> Option<Program> {
    Some(Program::new(&expr).unwrap())
}

/// Parameters, strides and extents are launch parameters: problems that differ only in these share one text.
#[test]
fn the_text_does_not_depend_on_values() {
    let with = |seq_kv, slope_stride, row_stride, extent, float, int: i32| {
        let mut p = problem(64, DType::F16).with_seq_kv(seq_kv, Layout::Bshd);
        let table = |extents: &[usize], strides: &[i64]| Table {
            dtype: ElementType::F32,
            extents: extents.to_vec(),
            strides: strides.to_vec(),
        };
        let tables = vec![
            table(&[2, 16], &[slope_stride, 1]),
            table(&[2, 16, 2048, 2048], &[0, 2048 * row_stride, row_stride, 1]),
            table(&[16, extent], &[extent as i64, 1]),
        ];
        let score = lib::alibi(0) + (lib::bias(1) - lib::score()) * lib::float(0);
        let score = score + (lib::relative_bias(2, lib::int(0)) - lib::score());
        let mask = lib::chunk(lib::int(1)) | lib::dilated(lib::int(2));
        let ints = vec![int, int + 1, int + 2];
        let (score, mask) = (program(score), program(mask));
        p.programs = Programs { score, mask, floats: vec![float], ints, tables };
        p.score.sink = true;
        p
    };
    for family in Family::of_pass(PassKind::Forward) {
        let text = |p: &Problem| {
            let plan = family.default_for(p, &Arch::SM_90).unwrap();
            emit(p, &plan, &Arch::SM_90).unwrap().module.to_string()
        };
        // As many keys as the CTAs of the family can hold.
        let keys = if family == Family::SmallAtOnce { 256 } else { 2048 };
        let [one, other] = [with(keys, 0, 2048, 100, 1.0, 5), with(keys, 16, 4096, 333, -0.5, 900)];
        assert_eq!(text(&one), text(&other), "{family:?}");
    }
}

/// Problems of real models: Gemma 2's cap with a window, GPT-OSS' sinks, ALiBi, a bias tensor, and Llama 4's
/// chunks.
fn of_models(dim: usize, dtype: DType) -> Vec<(&'static str, Problem)> {
    let mut capped = problem(dim, dtype).with_band(Band::window(511, 0)).with_softcap(30.0);
    capped.score.sink = true;
    let with = |band: Band, score: Option<Expr>, mask: Option<Expr>, table: Table| {
        let mut p = problem(dim, dtype).with_band(band);
        let program = |expr: Expr| Program::new(&expr).unwrap();
        p.programs = Programs {
            score: score.map(program),
            mask: mask.map(program),
            tables: vec![table],
            ..p.programs
        };
        p
    };
    let sink = |band: Band| {
        let mut p = problem(dim, dtype).with_band(band);
        p.score.sink = true;
        p
    };
    let continues = |band: Band| {
        let p = problem(dim, dtype).with_band(band);
        p.with_pass(Pass::Forward { lse: true, continues: true, invariant: None })
    };
    let mut chunked = problem(dim, dtype).with_band(Band::CAUSAL);
    chunked.programs.mask = program(lib::chunk(lib::int(0)));
    chunked.programs.ints = vec![512];
    let slopes = Table { strides: vec![0, 1], ..Table::dense(ElementType::F32, &[2, 16]) };
    let of_scores = |dtype| Table::dense(dtype, &[2, 16, 2048, 2048]);
    let documents = Table::dense(ElementType::I32, &[2, 2048]);
    vec![
        ("cap, window and sink", capped),
        ("sink", sink(Band::FULL)),
        ("causal and sink", sink(Band::CAUSAL)),
        ("window and sink", sink(Band::window(127, 0))),
        ("an earlier result", continues(Band::FULL)),
        ("causal and an earlier result", continues(Band::CAUSAL)),
        ("alibi", with(Band::CAUSAL, Some(lib::alibi(0)), None, slopes)),
        ("bias", with(Band::FULL, Some(lib::bias(0)), None, of_scores(ElementType::Bf16))),
        ("mask", with(Band::FULL, None, Some(lib::mask_tensor(0)), of_scores(ElementType::U8))),
        ("documents", with(Band::CAUSAL, None, Some(lib::document(0)), documents)),
        ("chunks", chunked),
    ]
}

#[test]
fn default_plans_do_not_spill() {
    let mut cases = Vec::new();
    for (dim, dtype) in [(64, DType::Bf16), (128, DType::F16), (256, DType::F16)] {
        for (name, problem) in of_models(dim, dtype) {
            for arch in [Arch::SM_80, Arch::SM_90] {
                cases.extend(defaults(&format!("{name} D{dim}"), &problem, &arch));
            }
        }
    }
    none_spills(&cases);
}

/// 8-bit inputs with programs, without descale factors and beside those of heads and of blocks of rows.
#[test]
fn default_plans_beside_factors_do_not_spill() {
    let mut cases = Vec::new();
    for (dim, types, rows) in [
        (64, "e4m3", [None; 3]),
        (64, "e4m3", [Some(0); 3]),
        (64, "e5m2", [Some(64); 3]),
        (128, "e4m3", [Some(0); 3]),
        (128, "e4m3", [Some(64); 3]),
        (128, "e4m3/e4m3/bf16", [Some(128), Some(64), None]),
        (192, "e4m3", [Some(0); 3]),
    ] {
        for (name, mut problem) in of_models(dim, DType::E4m3) {
            if problem.programs.is_empty() {
                continue;
            }
            problem.dtypes = types.parse().unwrap();
            let problem = factors::with_factors(problem, rows);
            for arch in [Arch::SM_89, Arch::SM_90] {
                let name = format!("{name} D{dim} {types}, factors of {rows:?} rows");
                cases.extend(defaults(&name, &problem, &arch));
            }
        }
    }
    none_spills(&cases);
}

/// The default plan of each family and its kernel.
fn defaults(name: &str, problem: &Problem, arch: &Arch) -> Vec<(String, Plan, Kernel)> {
    let plans = Family::of_pass(PassKind::Forward)
        .filter_map(|family| Some((family, family.default_for(problem, arch).ok()?)));
    let emitted = plans.map(|(family, plan)| {
        let kernel = emit(problem, &plan, arch).unwrap().kernel(0);
        (format!("{name} {family:?} sm_{}", arch.sm), plan, kernel)
    });
    emitted.collect()
}

fn none_spills(cases: &[(String, Plan, Kernel)]) {
    let kernels: Vec<&Kernel> = cases.iter().map(|(.., kernel)| kernel).collect();
    let Some(facts) = tools::facts(&kernels) else { return };
    let spilling =
        cases.iter().zip(facts).filter_map(|((what, plan, _), Facts { registers, spills, .. })| {
            println!("{what}: {registers} registers, {spills} bytes spilled");
            (spills > 0).then(|| format!("{what}: {spills} bytes, {plan:?}"))
        });
    let spilling: Vec<String> = spilling.collect();
    assert!(spilling.is_empty(), "{}", spilling.join("\n"));
}
