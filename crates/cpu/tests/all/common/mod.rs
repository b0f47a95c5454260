//! Random tensors, poisoned outputs, and the comparison of a kernel with the oracle.

use flashcore_cpu::{CpuPlan, Element, Isa, Rows, attention};
use half::{bf16, f16};
use oracle::{Reference, oracle, reference_in_precision};
use problem::{DType, Operands, Problem, Tensor};
use rand::{Rng, SeedableRng, rngs::SmallRng};

/// Inputs of a problem. Each buffer has the length of its tensor's span.
#[derive(Clone)]
pub struct Inputs<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
}

impl<T: Element> Inputs<T> {
    /// Independent uniform draws, Q and K in ±`logits`, V in ±1.
    pub fn random(problem: &Problem, seed: u64, logits: f32) -> Inputs<T> {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut draw = |tensor, size: f32| {
            let (elements, _) = problem.span(tensor).unwrap();
            (0..elements).map(|_| T::from_f32(rng.random_range(-size..size))).collect()
        };
        Inputs { q: draw(Tensor::Q, logits), k: draw(Tensor::K, logits), v: draw(Tensor::V, 1.0) }
    }

    /// Q, K and V as inputs of a call.
    pub fn operands(&self) -> Operands<'_> {
        Operands::qkv(T::elements(&self.q), T::elements(&self.k), T::elements(&self.v))
    }
}

/// A plan with small blocks, so that small problems have many blocks.
pub fn small_plan(isa: Isa) -> CpuPlan {
    CpuPlan { rows: Rows::Group, ..CpuPlan::widest(isa, 2, 40, 24) }
}

/// Runs a kernel into poisoned buffers. Returns O as `[batch, head, row, dim]` and the LSE. Elements of the
/// buffer that belong to no row must keep their poison.
pub fn run<T: Element>(problem: &Problem, inputs: &Inputs<T>, plan: &CpuPlan) -> (Vec<f64>, Vec<f32>) {
    let [batch, heads, rows, _] = problem.extents(Tensor::Out);
    let mut lse = vec![POISON; batch * heads * rows];
    let out = run_into(problem, inputs, Some(&mut lse), plan);
    assert!(lse.iter().all(|&x| x != POISON));
    (out, lse)
}

/// Like [`run`], without an LSE.
pub fn run_out<T: Element>(problem: &Problem, inputs: &Inputs<T>, plan: &CpuPlan) -> Vec<f64> {
    run_into(problem, inputs, None, plan)
}

/// A number that every type represents and that no test's output equals.
pub const POISON: f32 = -61440.0;

fn run_into<T: Element>(
    problem: &Problem,
    inputs: &Inputs<T>,
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Vec<f64> {
    let (elements, origin) = problem.span(Tensor::Out).unwrap();
    let mut out = vec![T::from_f32(POISON); elements];
    let [batch, heads, rows, dim] = problem.extents(Tensor::Out);
    attention(problem, &inputs.q, &inputs.k, &inputs.v, &mut out, lse, plan).unwrap();
    let mut dense = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for row in 0..rows {
                let start = (origin as i64 + problem.out.offset(b, h, row)) as usize;
                dense.extend(out[start..start + dim].iter().map(|x| f64::from(x.to_f32())));
                out[start..start + dim].fill(T::from_f32(POISON));
            }
        }
    }
    assert!(out.iter().all(|x| x.to_f32() == POISON), "wrote outside of its rows");
    assert!(dense.iter().all(|&x| x != f64::from(POISON)));
    dense
}

/// Whether `got` is within `tolerance` of `want`. NaN and infinities must match.
fn close(got: f64, want: f64, tolerance: f64) -> bool {
    if want.is_finite() {
        (got - want).abs() <= tolerance
    } else {
        got == want || (got.is_nan() && want.is_nan())
    }
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// Compares one kernel run with the oracle. The tolerance is twice the error of standard attention in the
/// input precision, plus the minimum error of f32 sums of that length and of rounding O.
pub fn check<T: Element>(problem: &Problem, inputs: &Inputs<T>, plan: &CpuPlan) {
    let want = oracle(problem, &inputs.q, &inputs.k, &inputs.v).unwrap();
    let naive = reference_in_precision(problem, &inputs.q, &inputs.k, &inputs.v).unwrap();
    let (out, lse) = run(problem, inputs, plan);
    let lse: Vec<f64> = lse.into_iter().map(f64::from).collect();
    close_to(problem, plan, (&out, &lse), &want, &naive);
    // 16-bit integers are only used for calls without an LSE.
    close_to(problem, plan, (&run_out(problem, inputs, plan), &lse), &want, &naive);
}

/// Compares O and the LSE with the oracle's.
pub fn close_to(
    problem: &Problem,
    plan: &CpuPlan,
    (out, lse): (&[f64], &[f64]),
    want: &Reference,
    naive: &Reference,
) {
    let finite = |x: &[f64]| x.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs()));
    // Logits are f32 sums. Their error, in ulps of the largest logit, adds to the error of O in full.
    let logit = finite(&want.lse) * 8.0 * f64::from(f32::EPSILON);
    let floor = finite(&want.out)
        * (problem.dtypes.out.unit_roundoff() * 1.01 + logit + 16.0 * f64::from(f32::EPSILON));
    let tolerance = 2.0 * worst(&naive.out, &want.out) + floor;
    for (i, (&got, &want)) in out.iter().zip(&want.out).enumerate() {
        assert!(
            close(got, want, tolerance),
            "O[{i}] = {got}, not {want} ± {tolerance:.1e}; {plan:?} {problem:?}"
        );
    }
    let tolerance = 2.0 * worst(&naive.lse, &want.lse)
        + logit
        + 16.0 * f64::from(f32::EPSILON) * (1.0 + finite(&want.lse));
    for (i, (&got, &want)) in lse.iter().zip(&want.lse).enumerate() {
        assert!(
            close(got, want, tolerance),
            "LSE[{i}] = {got}, not {want} ± {tolerance:.1e}; {plan:?} {problem:?}"
        );
    }
}

/// Checks every dtype on every instruction set of this machine.
pub fn check_everywhere(problem: &Problem, seed: u64, logits: f32) {
    for isa in Isa::available() {
        for dtype in DType::OUTPUTS {
            let mut problem = problem.clone();
            problem.dtypes = dtype.into();
            let plan = small_plan(isa);
            match dtype {
                DType::F32 => check(&problem, &Inputs::<f32>::random(&problem, seed, logits), &plan),
                DType::F16 => check(&problem, &Inputs::<f16>::random(&problem, seed, logits), &plan),
                DType::Bf16 => check(&problem, &Inputs::<bf16>::random(&problem, seed, logits), &plan),
                dtype => unreachable!("{dtype} is no type of O"),
            }
        }
    }
}
