//! Tests that the gate's inputs expose kernels whose reference (the number subtracted before the exponential)
//! moves probabilities out of the useful range of their type.

use emu::Schedule;
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::{Arch, Family, Plan};
use problem::{DType, Layout, Problem};
use ptx::Kernel;

/// A problem of several key blocks in every family, not all of them full.
fn problem(dtype: DType) -> Problem {
    Problem::new(1, 1, 64, 64, dtype).with_seq_kv(400, Layout::Bhsd)
}

fn bound(problem: &Problem, plan: &Plan) -> Bound {
    let step = kernels::emit(problem, plan, &Arch::SM_90).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    Bound::of_program(step, problem)
}

/// The kernel with a constant of its text replaced. The text must contain the constant.
fn with_constant(bound: &Bound, from: f32, to: f32) -> Bound {
    let word = |x: f32| format!("0f{:08X}", x.to_bits());
    let text = bound.kernel.module.to_string();
    assert!(text.contains(&word(from)), "no {from} in {text}");
    let module = ptx::parse(&text.replace(&word(from), &word(to))).unwrap().verify().unwrap();
    Bound { kernel: Kernel { module, ..bound.kernel.clone() }, ..bound.clone() }
}

fn gate(bound: &Bound, style: Style) -> CheckReport {
    let settings = Settings { runs: vec![(style, 1, Schedule::Late)], ..Settings::quick() };
    check_kernel(bound, &settings).unwrap()
}

/// With sums by products, references may exceed maxima by the plan's limit; 40 powers of two are too many.
#[test]
fn tiny_values_are_lost_where_probabilities_are_too_small() {
    let problem = problem(DType::Bf16);
    let plan = Family::Wgmma.default_for(&problem, &Arch::SM_90).unwrap();
    let right = bound(&problem, &plan);
    let check = gate(&right, Style::TinyValues);
    assert_eq!(check.verdict, Verdict::Passed, "{plan:?} {:?}", check.reasons);
    let check = gate(&with_constant(&right, 15.0, 40.0), Style::TinyValues);
    assert_eq!(check.verdict, Verdict::Failed, "{plan:?}");
}
