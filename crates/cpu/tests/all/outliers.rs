//! Tests with one large element of Q, K or V, visible or hidden, on every instruction set of this machine and
//! on their counterparts in plain Rust.

#[path = "../../examples/outliers/problems.rs"]
mod problems;

use flashcore_cpu::{CpuPlan, Element, Isa};
use half::{bf16, f16};
use problem::{Band, DType, Layout, Problem, Tensor};
use problems::{Bounds, Case, attend};

fn everywhere() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().chain(Isa::PORTABLE)
}

/// A causal problem that is computed with integers and terms. For one of the corners it has more keys than
/// rows.
fn causal(dtype: DType, mask: Band) -> Problem {
    let keys = if mask == Band::CAUSAL { 160 } else { 130 };
    Problem::new(1, 2, 130, 64, dtype)
        .with_seq_kv(keys, Layout::Bshd)
        .with_layout(Layout::Bshd)
        .with_band(mask)
}

/// A case with its large element at row `row` of the first head, in column 5.
fn case(problem: &Problem, tensor: Tensor, row: usize, large: f32) -> Case {
    Case { problem: problem.clone(), tensor, at: [0, 0, row, 5], large, seed: 3 }
}

#[test]
fn random_problems_with_one_large_element() {
    for isa in everywhere() {
        let mut own = 0;
        for seed in 1..=80 {
            let case = Case::random(seed);
            let plan = case.plan(isa);
            let outcome = case.run(&plan).unwrap();
            own += usize::from(outcome.own);
            assert!(
                outcome.worst <= 1.0,
                "{isa}, seed {seed}: {} errs by {} of what is allowed; {plan:?} {case:?}",
                outcome.what,
                outcome.worst
            );
        }
        assert!(isa.wide() == isa || own > 2, "{isa}: only {own} problems in its own arithmetic");
    }
}

#[test]
fn every_tensor_and_place_and_size() {
    // One size for each type, mask and place: all sizes for any two of these.
    const SIZES: [f32; 3] = [100.0, 1000.0, 6e4];
    let of_types = DType::OUTPUTS.into_iter().enumerate();
    let kinds = of_types.flat_map(|(i, dtype)| {
        Band::NAMED.into_iter().enumerate().map(move |(j, mask)| (i + j, dtype, mask))
    });
    for (kind, dtype, mask) in kinds {
        let problem = causal(dtype, mask);
        // The first key, a key that the first rows do not see, and a key that only the last row sees.
        for (place, (tensor, row)) in [
            (Tensor::Q, 7),
            (Tensor::K, 0),
            (Tensor::K, 70),
            (Tensor::V, 0),
            (Tensor::V, 70),
            (Tensor::V, 129),
        ]
        .into_iter()
        .enumerate()
        {
            let case = case(&problem, tensor, row, SIZES[(kind + place) % SIZES.len()]);
            for isa in everywhere() {
                let outcome = case.run(&CpuPlan::widest(isa, 2, 100, 72)).unwrap();
                assert!(outcome.worst <= 1.0, "{isa} {} {} {case:?}", outcome.worst, outcome.what);
            }
        }
    }
}

/// The first row of a top-left causal problem sees only the first key.
fn first_row<T: Element>() {
    let problem = causal(T::DTYPE, Band::CAUSAL_TOP_LEFT);
    let none = case(&problem, Tensor::Q, 7, 1.0);
    let large = [Tensor::Q, Tensor::K, Tensor::V].into_iter().flat_map(|tensor| {
        [(5, 100.0), (5, 1000.0), (5, 6e4), (129, 6e4)].map(|(row, large)| (tensor, row, large))
    });
    for case in
        large.map(|(tensor, row, large)| case(&problem, tensor, row, large)).chain(std::iter::once(none))
    {
        let inputs = case.inputs::<T>();
        for isa in everywhere() {
            let plan = CpuPlan::with_isa(&problem, isa);
            let (out, _) = attend(&problem, &inputs, &plan, false).unwrap();
            // Heads are interleaved in the inputs and consecutive in `out`. Draws are about 1.
            for head in 0..2 {
                let row = head * problem.seq_q * 64;
                for (d, (got, want)) in out[row..][..64].iter().zip(&inputs[2][head * 64..]).enumerate() {
                    let want = f64::from(want.to_f32());
                    let roundoff = T::DTYPE.unit_roundoff().max(f64::from(f32::EPSILON));
                    assert!(
                        (got - want).abs() <= roundoff * (1.0 + want.abs()),
                        "{isa} head {head}: {got}, not V[0][{d}] = {want}; {case:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_first_row_of_a_causal_problem_is_the_first_value() {
    first_row::<f32>();
    first_row::<f16>();
    first_row::<bf16>();
}

/// A case, computed with and without an LSE.
fn lse_or_none<T: Element>(case: &Case) {
    let problem = &case.problem;
    let inputs = case.inputs::<T>();
    let bounds = Bounds::of(problem, &inputs).unwrap();
    for isa in everywhere() {
        let plan = CpuPlan::with_isa(problem, isa);
        let (with, _) = attend(problem, &inputs, &plan, true).unwrap();
        let (without, _) = attend(problem, &inputs, &plan, false).unwrap();
        for (i, (a, b)) in with.iter().zip(&without).enumerate() {
            assert!((a - b).abs() <= bounds.out[i], "{isa} O[{i}] = {a} with an LSE, {b} without; {case:?}");
        }
        assert!(isa.wide() != isa || with == without, "{isa}");
    }
}

#[test]
fn a_call_with_an_lse_agrees_with_one_without() {
    for (tensor, row) in [(Tensor::Q, 7), (Tensor::K, 40), (Tensor::V, 0), (Tensor::V, 129)] {
        for large in [1.0, 100.0, 1000.0, 6e4] {
            for mask in Band::NAMED {
                lse_or_none::<f16>(&case(&causal(DType::F16, mask), tensor, row, large));
                lse_or_none::<bf16>(&case(&causal(DType::Bf16, mask), tensor, row, large));
            }
        }
    }
    lse_or_none::<f32>(&case(&causal(DType::F32, Band::CAUSAL), Tensor::V, 129, 6e4));
}

/// Changes elements at keys from 100 on, which rows before them do not see.
fn hidden<T: Most>(mask: Band) {
    let problem = causal(T::DTYPE, mask);
    let usual = case(&problem, Tensor::Q, 7, 1.0).inputs::<T>();
    let bounds = Bounds::of(&problem, &usual).unwrap();
    let first = 100;
    let sees = |row| problem.band.keys(row, problem.seq_q, problem.seq_kv).end > first;
    for tensor in [1, 2] {
        for other in [0.0, 100.0, 1000.0, 6e4, T::MOST, f32::INFINITY, f32::NAN] {
            for only in [true, false] {
                let mut inputs = usual.clone();
                // One element, or all elements of these keys in both heads.
                let changed = &mut inputs[tensor][first * 128..];
                let count = if only { 1 } else { changed.len() };
                changed[..count].fill(T::from_f32(other));
                for isa in everywhere() {
                    let plan = CpuPlan::with_isa(&problem, isa);
                    let of = |inputs| attend(&problem, inputs, &plan, false).unwrap().0;
                    let (before, after) = (of(&usual), of(&inputs));
                    for (i, (a, b)) in before.iter().zip(&after).enumerate() {
                        let row = i / 64 % problem.seq_q;
                        // If V is not finite, f32 sums have another order.
                        let same = isa.wide() == isa && (tensor == 1 || other.is_finite());
                        let allowed = if same { 0.0 } else { bounds.out[i] };
                        assert!(
                            sees(row) || (a - b).abs() <= allowed,
                            "{isa} {mask} {other} in tensor {tensor}: O[{i}] was {a}, became {b}"
                        );
                    }
                }
            }
        }
    }
}

/// A type with its largest finite number.
trait Most: Element {
    const MOST: f32;
}

impl Most for f32 {
    const MOST: f32 = f32::MAX;
}

impl Most for f16 {
    const MOST: f32 = 65504.0;
}

impl Most for bf16 {
    const MOST: f32 = 3.389_531_4e38;
}

#[test]
fn what_a_mask_hides_changes_no_visible_row() {
    for mask in [Band::CAUSAL, Band::CAUSAL_TOP_LEFT] {
        hidden::<f32>(mask);
        hidden::<f16>(mask);
        hidden::<bf16>(mask);
    }
}
