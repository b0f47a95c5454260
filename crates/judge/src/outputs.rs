//! Decides whether an output is right. Tolerances come from the error of standard attention in the input
//! precision, as in FlashAttention's own tests, not from a loose constant.
//!
//! Twice that error is enough where an error has many independent causes. Where logits are f32, a few of
//! their roundings may decide: in a row whose two heaviest keys are nearly tied, the error δ of the
//! difference of their logits moves O by p₁ p₂ δ (v₁ − v₂). Standard attention draws δ once, in one order of
//! sums, and may draw it small. The ratio of two such errors has no bound (in three of ten pairs of normal
//! draws, the first exceeds twice the second in magnitude), so that right kernels were refused. The oracle
//! therefore predicts the standard deviation of each element by these roundings ([`Reference::deviation`]),
//! and six of them are allowed in addition. 16-bit logits of standard attention have errors far above those
//! of f32 logits, so that nothing is added there.

use std::ops::Range;

use oracle::Reference;
use problem::{DType, Problem, ProblemError, Sequence, Tensor};

use crate::figures::{Deviation, Distance, finite};
use crate::gradients::GradientReferences;
use crate::inputs::rows_in_sequences;
use crate::values::{Inputs, Values};

pub use crate::figures::ErrorFigures;

/// The standard for judging outputs: the oracle's output, and tolerances from the errors of standard
/// attention.
pub struct References {
    dim: usize,
    oracle: Reference,
    /// The oracle's O, rounded to the dtype.
    rounded: Values,
    /// The tolerances; all figures are 0.
    allowed: ErrorFigures,
    /// The standard for gradients, which replaces the others in the backward pass.
    gradients: Option<GradientReferences>,
}

impl References {
    /// Computes the oracle and standard attention in the input precision.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn of(problem: &Problem, inputs: &Inputs) -> Result<References, ProblemError> {
        References::of_rows(problem, inputs, None)
    }

    /// Like [`References::of`]; with `wanted`, only for the rows whose element is set, in the order of the
    /// LSE. Gradients have all rows.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn of_rows(
        problem: &Problem,
        inputs: &Inputs,
        wanted: Option<&[bool]>,
    ) -> Result<References, ProblemError> {
        if problem.pass.is_backward() {
            let nothing = Reference { out: Vec::new(), lse: Vec::new(), deviation: Vec::new() };
            let gradients = Some(GradientReferences::of(problem, inputs)?);
            return Ok(References { gradients, ..References::new(problem, nothing.clone(), &nothing) });
        }
        let [oracle, standard] = References::outputs(problem, inputs, wanted)?;
        Ok(References::new(problem, oracle, &standard))
    }

    /// The outputs of the oracle and of standard attention in the input precision, for the rows of
    /// [`References::of_rows`].
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn outputs(
        problem: &Problem,
        inputs: &Inputs,
        wanted: Option<&[bool]>,
    ) -> Result<[Reference; 2], ProblemError> {
        let mut rows = dense_rows(problem, &inputs.sequences(problem));
        rows.retain(|&row| wanted.is_none_or(|wanted| wanted[row]));
        let gather = |reference: Reference| gather(reference, &rows, problem.head_dim_v);
        let (exact, standard) = inputs.both_references(problem, wanted)?;
        Ok([gather(exact), gather(standard)])
    }

    /// Builds references from the oracle's output and standard attention's output on the same inputs.
    pub fn new(problem: &Problem, oracle: Reference, standard: &Reference) -> References {
        let roundoff = problem.dtypes.out.unit_roundoff();
        let dim = problem.head_dim_v.max(1);
        let rows = oracle.out.len() / dim;
        let theirs = Distance::of(&standard.out, &oracle.out, dim);
        let largest = finite(&oracle.out).fold(0.0, |m: f64, x| m.max(x.abs()));
        let (_, of_lse) = lse_error(&standard.lse, &oracle.lse);
        let largest_lse = finite(&oracle.lse).fold(1.0, |m: f64, x| m.max(x.abs()));
        let roundings = 64.0 + problem.head_dim as f64;
        let logits = Deviation::above(&oracle.deviation, &oracle.out, dim, 0.0);
        let drift = if problem.dtypes.weight_roundoff() > roundoff { mean_error(&theirs, rows) } else { 0.0 };
        let allowed = ErrorFigures {
            // The kernel rounds its output once more than the error bound of a sum covers.
            max_abs_allowed: 2.0 * theirs.max_abs + 2.0 * roundoff * largest + logits.max_abs,
            rel_allowed: 2.0 * theirs.rel + roundoff + logits.rel,
            row_rel_allowed: 2.0 * theirs.row_rel + 2.0 * roundoff + logits.row_rel,
            // A common factor can come from the rounding of the output, from the f32 rounding of 1 / sum, and
            // from the mean of the rounding errors of P where P has fewer bits than O. Errors of logits add
            // at most their relative error, by Cauchy and Schwarz; rows that are nearly equal have equal
            // errors.
            bias_allowed: 2.0 * theirs.bias + drift.max(roundoff) + DType::F32.unit_roundoff() + logits.rel,
            // LSE is f32: twice the error of the standard computation, plus the cost of f32 sums of head_dim
            // products and of the logarithm (64 roundings of the largest term).
            lse_allowed: 2.0 * of_lse + roundings * DType::F32.unit_roundoff() * largest_lse,
            ..ErrorFigures::default()
        };
        let rounded: Vec<f32> = oracle.out.iter().map(|&x| x as f32).collect();
        let rounded = Values::round(problem.dtypes.out, &rounded);
        References { dim, oracle, rounded, allowed, gradients: None }
    }

    /// Adds what an output in f32 costs on a GPU; the errors allowed of 16-bit outputs, whose rounding is
    /// coarser, stay the same. These are errors of logits, which an exponential turns into relative errors of
    /// weights, and the truncation of sums by tensor cores, which has one direction where all terms have one
    /// sign.
    #[must_use]
    pub fn of_gpu(mut self, problem: &Problem) -> References {
        self.gradients = self.gradients.map(|gradients| gradients.of_gpu(problem));
        if problem.dtypes.out != DType::F32 {
            return self;
        }
        let unit = DType::F32.unit_roundoff();
        let largest = |values: &[f64]| finite(values).fold(0.0, |m: f64, x| m.max(x.abs()));
        // A logit is a sum of head_dim products; the base-2 exponential of the hardware adds a few units.
        let logits = (64.0 + problem.head_dim as f64) * unit * largest(&self.oracle.lse).max(1.0);
        let keys = problem.seq_kv as f64;
        let sums = match problem.dtypes.v {
            // 13 bits are kept below the largest term of a sum of 32 products.
            DType::E4m3 | DType::E5m2 => 1.0 / 4096.0,
            // The tensor core adds 16 products of 16-bit types at a time, or 8 of tf32. f32 takes three such
            // additions for 8 keys, tf32 one. Each addition loses half a unit of 2^-23 of a sum that is on
            // average half of its last value.
            DType::F16 | DType::Bf16 => keys / 16.0 * unit / 2.0,
            DType::F32 if problem.dtypes.tf32 => keys / 8.0 * unit / 2.0,
            DType::F32 => 3.0 * keys / 8.0 * unit / 2.0,
        };
        let relative = logits + sums;
        self.allowed.max_abs_allowed += 2.0 * relative * largest(&self.oracle.out);
        self.allowed.rel_allowed += relative;
        self.allowed.row_rel_allowed += 2.0 * relative;
        self.allowed.bias_allowed += relative;
        self
    }

    /// The standard for gradients; `None` in the forward pass.
    pub const fn gradients(&self) -> Option<&GradientReferences> {
        self.gradients.as_ref()
    }

    /// Number of elements of O.
    pub fn elements(&self) -> usize {
        self.oracle.out.len()
    }

    /// Judges the rows of an output that belong to sequences, dense in the order batch entry, head, row, and,
    /// if given, their LSE.
    pub fn judge(&self, out: &[f64], lse: Option<&[f64]>) -> ErrorFigures {
        let ours = Distance::of(out, &self.oracle.out, self.dim);
        let (max_diff, allclose_1e3) = self.as_the_original_kernels(out);
        let (unlike, lse_error) = lse.map_or((0, 0.0), |lse| lse_error(lse, &self.oracle.lse));
        ErrorFigures {
            max_abs: ours.max_abs,
            rel: ours.rel,
            row_rel: ours.row_rel,
            bias: ours.bias,
            cosine: ours.cosine,
            lse: lse_error,
            lse_allowed: if lse.is_some() { self.allowed.lse_allowed } else { 0.0 },
            max_diff,
            allclose_1e3,
            non_finite: ours.non_finite + unlike,
            ..self.allowed
        }
    }

    /// Judges an output of which only bounds are known, because its type is coarser than the problem's: of
    /// the numbers that an element may represent, the one nearest to the oracle's counts.
    pub fn judge_bounds(&self, out: &[(f64, f64)]) -> ErrorFigures {
        let oracle = &self.oracle.out;
        let nearest = |(&(low, high), &exact): (&(f64, f64), &f64)| exact.max(low).min(high);
        let values: Vec<f64> = out.iter().zip(oracle).map(nearest).collect();
        self.judge(&values, None)
    }

    fn as_the_original_kernels(&self, out: &[f64]) -> (f64, bool) {
        let (mut max_diff, mut close) = (0.0f64, true);
        for (index, &x) in out.iter().enumerate() {
            let expected = self.rounded.get(index).map_or(f64::NAN, f64::from);
            if !x.is_finite() && !expected.is_finite() {
                continue;
            }
            let diff = (x - expected).abs();
            // As in torch, one NaN makes the maximum NaN. `f64::max` would drop it.
            max_diff = if max_diff.is_nan() || diff.is_nan() { f64::NAN } else { max_diff.max(diff) };
            close &= diff <= 1e-3 + 1e-3 * expected.abs();
        }
        (max_diff, close)
    }
}

/// The index of each row that belongs to a sequence among the rows `[batch, head, row]` of the dense output
/// and of the LSE, in the order batch entry, head, row.
pub fn dense_rows(problem: &Problem, sequences: &[Sequence]) -> Vec<usize> {
    rows_in_sequences(problem, Tensor::Out, sequences)
}

/// The first byte outside the rows, which have elements of `size` bytes, that no longer has the initial
/// pattern of ones.
pub fn written_between(bytes: &[u8], rows: &[Range<usize>], size: usize) -> Option<usize> {
    let mut covered = vec![false; bytes.len()];
    for row in rows {
        covered[row.start * size..row.end * size].fill(true);
    }
    bytes.iter().zip(&covered).position(|(&byte, &covered)| !covered && byte != 0xff)
}

/// The given rows of a reference.
fn gather(reference: Reference, rows: &[usize], dim: usize) -> Reference {
    if rows.iter().enumerate().all(|(i, &row)| i == row) && rows.len() == reference.lse.len() {
        return reference;
    }
    let of_elements =
        |all: &[f64]| rows.iter().flat_map(|&row| all[row * dim..(row + 1) * dim].iter().copied()).collect();
    Reference {
        out: of_elements(&reference.out),
        lse: rows.iter().map(|&row| reference.lse[row]).collect(),
        deviation: of_elements(&reference.deviation),
    }
}

/// The number of rows whose LSE is finite in only one of the two, and the largest error of the other rows.
fn lse_error(lse: &[f64], exact: &[f64]) -> (u64, f64) {
    let (mut unlike, mut worst) = (0, 0.0f64);
    for (&x, &exact) in lse.iter().zip(exact) {
        if x.is_finite() != exact.is_finite() || (exact == f64::NEG_INFINITY && x != exact) {
            unlike += 1;
        } else if exact.is_finite() {
            worst = worst.max((x - exact).abs());
        }
    }
    (unlike, worst)
}

/// Three standard deviations of the bias that unbiased rounding errors of P have over `rows` rows. All
/// columns of a row share the errors of its P.
fn mean_error(distance: &Distance, rows: usize) -> f64 {
    3.0 * distance.rel / (rows.max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Style, draw};
    use cpu::CpuPlan;
    use problem::{Band, DTypes, Operand, ScaleLayout, Scales};

    struct Answer {
        problem: Problem,
        out: Vec<f64>,
        lse: Vec<f64>,
        oracle: Reference,
        standard: Reference,
    }

    impl Answer {
        fn new(problem: Problem, style: Style) -> Answer {
            let inputs = draw(&problem, style, 3);
            let (out, lse) = inputs.attention(&problem, &CpuPlan::for_problem(&problem)).unwrap();
            let (oracle, standard) = inputs.both_references(&problem, None).unwrap();
            Answer {
                out: (0..out.len()).filter_map(|i| out.get(i)).map(f64::from).collect(),
                lse: lse.iter().map(|&x| f64::from(x)).collect(),
                oracle,
                standard,
                problem,
            }
        }

        fn reasons(&self) -> Vec<String> {
            References::new(&self.problem, self.oracle.clone(), &self.standard)
                .judge(&self.out, Some(&self.lse))
                .reasons()
        }
    }

    fn problems() -> Vec<Problem> {
        let layout = problem::Layout::Bhsd;
        let fp8 =
            ["e4m3", "e5m2:f16", "e4m3/e4m3/f16", "e5m2/e4m3/bf16:f32"].map(|text| text.parse().unwrap());
        DType::OUTPUTS
            .map(DTypes::uniform)
            .into_iter()
            .chain(fp8)
            .flat_map(|dtype| {
                [
                    Problem::new(1, 2, 70, 64, dtype),
                    Problem::new(1, 2, 33, 32, dtype).with_band(Band::CAUSAL),
                    Problem::new(1, 1, 9, 16, dtype).with_seq_kv(5, layout).with_band(Band::CAUSAL),
                    Problem::new(1, 1, 3, 16, dtype).with_seq_kv(0, layout),
                ]
            })
            .collect()
    }

    #[test]
    fn native_kernels_pass_on_every_style() {
        for problem in problems() {
            let fp8 = Style::FP8.into_iter().filter(|_| problem.dtypes.has_fp8());
            for style in Style::ALL.into_iter().chain(fp8) {
                let answer = Answer::new(problem.clone(), style);
                assert_eq!(answer.reasons(), [""; 0], "{style:?} {problem:?}");
            }
        }
    }

    #[test]
    fn small_sins_are_seen() {
        for dtype in DType::OUTPUTS.map(DTypes::uniform) {
            let right = Answer::new(Problem::new(1, 2, 70, 64, dtype), Style::Normal);
            let with = |change: &dyn Fn(&mut Answer)| {
                let mut wrong = Answer::new(right.problem.clone(), Style::Normal);
                change(&mut wrong);
                wrong.reasons()
            };
            assert!(
                !with(&|a| a.out.iter_mut().for_each(|x| *x *= 1.03)).is_empty(),
                "a biased {dtype} output"
            );
            assert!(!with(&|a| a.out.copy_within(0..64, 64)).is_empty(), "a stale {dtype} row");
            assert!(!with(&|a| a.out[17] = f64::NAN).is_empty(), "one NaN");
            assert!(!with(&|a| a.lse[3] += 0.02).is_empty(), "a wrong {dtype} LSE");
            // One key of 70 is dropped, like an off-by-one error in a loop bound.
            let mut shorter = right.problem.clone();
            shorter.seq_kv -= 1;
            let dropped = draw(&right.problem, Style::Normal, 3).oracle(&shorter).unwrap();
            assert!(!with(&|a| a.out.clone_from(&dropped.out)).is_empty(), "a dropped key in {dtype}");
        }
    }

    /// Faults of 8-bit kernels: a factor that is applied twice, a factor of P that is missing in the sum, and
    /// values of a neighbouring key.
    #[test]
    fn sins_of_eight_bit_kernels_are_seen() {
        let scales = |p: Problem| Problem {
            scales: Scales {
                q: Some(ScaleLayout::per_head(2)),
                k: Some(ScaleLayout::TENSOR),
                v: Some(ScaleLayout::per_block(2, 70, 64)),
            },
            ..p
        };
        for types in ["e4m3", "e5m2:f16"] {
            let dtypes: DTypes = types.parse().unwrap();
            let problem = scales(Problem::new(1, 2, 70, 64, dtypes));
            let right = Answer::new(problem.clone(), Style::Normal);
            assert_eq!(right.reasons(), [""; 0], "{types}");
            let inputs = draw(&problem, Style::Normal, 3);
            let with = |change: &dyn Fn(&mut Inputs)| {
                let mut changed = inputs.clone();
                change(&mut changed);
                let wrong = changed.oracle(&problem).unwrap();
                let references = References::new(&problem, right.oracle.clone(), &right.standard);
                references.judge(&wrong.out, Some(&wrong.lse)).reasons()
            };
            assert_eq!(with(&|_| {}), [""; 0]);
            let squared = |factors: &mut Vec<f32>| factors.iter_mut().for_each(|x| *x *= *x);
            for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
                assert!(!with(&|inputs| squared(factors(inputs, tensor))).is_empty());
            }
            assert!(!with(&|inputs| factors(inputs, Tensor::V).rotate_left(1)).is_empty());
            assert!(
                !with(&|inputs| {
                    let mut bytes = inputs[Operand::V].to_bytes();
                    bytes.rotate_left(64);
                    inputs[Operand::V] = Values::from_bytes(problem.dtypes.v, &bytes);
                })
                .is_empty()
            );
        }
    }

    fn factors(inputs: &mut Inputs, tensor: Tensor) -> &mut Vec<f32> {
        let Values::F32(factors) = &mut inputs[Operand::Descale(tensor)] else { panic!("factors are f32") };
        factors
    }

    #[test]
    fn one_nan_makes_max_diff_nan_wherever_it_stands() {
        for index in [0, 17, 70 * 64 - 1] {
            let mut answer = Answer::new(Problem::new(1, 1, 70, 64, DType::F16), Style::Normal);
            answer.out[index] = f64::NAN;
            let references = References::new(&answer.problem, answer.oracle.clone(), &answer.standard);
            let figures = references.judge(&answer.out, Some(&answer.lse));
            assert!(figures.max_diff.is_nan(), "a NaN at {index} gives {}", figures.max_diff);
            assert!(!figures.allclose_1e3);
        }
    }

    #[test]
    fn all_masked_rows_must_be_zero_with_lse_minus_infinity() {
        let problem = Problem::new(1, 1, 4, 16, DType::F16).with_seq_kv(0, problem::Layout::Bhsd);
        let mut answer = Answer::new(problem, Style::Normal);
        assert_eq!(answer.reasons(), [""; 0]);
        answer.lse[0] = -1e30;
        assert!(!answer.reasons().is_empty());
        let mut answer = Answer::new(answer.problem.clone(), Style::Normal);
        answer.out[5] = 1e-3;
        assert!(!answer.reasons().is_empty());
    }
}
