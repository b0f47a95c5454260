//! Decides whether gradients are right.
//!
//! The standard is the oracle in f64 on the inputs of the pass: O, the LSE and dO are inputs. The tolerance
//! is twice the error that P and dS cause when they are rounded to the type of the inputs before they are
//! multiplied, as kernels round them, and six standard deviations of the errors of sums, logits and
//! exponentials in f32 ([`GradientReference::deviation`](oracle::GradientReference)).
//!
//! A row of a gradient may be nearly 0 by cancellation, where its relative error has no bound: the error of a
//! row is relative to an eighth of the root mean square of all rows at least.

use problem::{DType, Operand, Problem, ProblemError};

use crate::figures::{Deviation, Distance, ErrorFigures, finite};
use crate::inputs::rows_in_sequences;
use crate::values::Inputs;

/// The share of the root mean square of all rows that the error of a smaller row is relative to.
const SMALLEST_ROW: f64 = 0.125;

/// The standard for judging the gradients of one problem.
pub struct GradientReferences {
    parts: Vec<Part>,
}

/// The standard for one gradient.
struct Part {
    operand: Operand,
    /// Elements of a row; of a gradient that is no tensor, all elements.
    dim: usize,
    exact: Vec<f64>,
    floor: f64,
    /// The tolerances; all figures are 0.
    allowed: ErrorFigures,
}

impl GradientReferences {
    /// Computes the oracle, and the gradients with the roundings of kernels.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn of(problem: &Problem, inputs: &Inputs) -> Result<GradientReferences, ProblemError> {
        let elements = inputs.elements();
        let exact = oracle::gradients(problem, &elements)?;
        let rounded = oracle::gradients_in_precision(problem, &elements)?;
        let sequences = inputs.sequences(problem);
        let parts = exact.values.iter().map(|(operand, values)| {
            let all = [values, &rounded.values[operand], &exact.deviation[operand]];
            let (dim, [values, rounded, deviation]) = match operand {
                Operand::Tensor(tensor) => {
                    let rows = rows_in_sequences(problem, tensor, &sequences);
                    let dim = problem.extents(tensor)[3];
                    let of_row = |row: usize| row * dim..(row + 1) * dim;
                    (dim, all.map(|all| rows.iter().flat_map(|&row| all[of_row(row)].to_vec()).collect()))
                }
                _ => (values.len().max(1), all.map(Vec::clone)),
            };
            Part::new(problem, operand, dim, values, &rounded, &deviation)
        });
        Ok(GradientReferences { parts: parts.collect() })
    }

    /// Adds what gradients in f32 cost on a GPU: errors of the exponential and of logits, and the truncation
    /// of sums by tensor cores. The errors allowed of 16-bit gradients, whose rounding is coarser, stay
    /// equal.
    #[must_use]
    pub fn of_gpu(mut self, problem: &Problem) -> GradientReferences {
        let unit = DType::F32.unit_roundoff();
        let terms = problem.seq_q.max(problem.seq_kv) as f64;
        let relative = 8.0 * (64.0 + problem.head_dim as f64 + 3.0 * terms / 8.0) * unit;
        for part in self.parts.iter_mut().filter(|part| dtype_of(problem, part.operand) == DType::F32) {
            let largest = finite(&part.exact).fold(0.0, |most: f64, x| most.max(x.abs()));
            part.allowed.max_abs_allowed += relative * largest;
            part.allowed.rel_allowed += relative;
            part.allowed.row_rel_allowed += relative / SMALLEST_ROW;
            part.allowed.bias_allowed += relative;
        }
        self
    }

    /// The gradients, in the order of the problem's operands.
    pub fn operands(&self) -> impl Iterator<Item = Operand> {
        self.parts.iter().map(|part| part.operand)
    }

    /// Judges a gradient. The rows of a tensor are those that belong to sequences, dense in the order batch
    /// entry, head, row. `None` if the pass has no such gradient.
    pub fn judge(&self, operand: Operand, values: &[f64]) -> Option<ErrorFigures> {
        let part = self.parts.iter().find(|part| part.operand == operand)?;
        let ours = Distance::above(values, &part.exact, part.dim, part.floor);
        let missing = part.exact.len().abs_diff(values.len()) as u64;
        Some(ErrorFigures {
            max_abs: ours.max_abs,
            rel: ours.rel,
            row_rel: ours.row_rel,
            bias: ours.bias,
            cosine: ours.cosine,
            max_diff: ours.max_abs,
            non_finite: ours.non_finite + missing,
            ..part.allowed
        })
    }
}

/// The type of a gradient.
fn dtype_of(problem: &Problem, operand: Operand) -> DType {
    match operand {
        Operand::Tensor(tensor) => problem.dtypes.of(tensor),
        _ => DType::F32,
    }
}

impl Part {
    fn new(
        problem: &Problem,
        operand: Operand,
        dim: usize,
        exact: Vec<f64>,
        rounded: &[f64],
        deviation: &[f64],
    ) -> Part {
        let roundoff = dtype_of(problem, operand).unit_roundoff();
        let rows = exact.len().div_ceil(dim.max(1)).max(1);
        let squares: f64 = finite(&exact).map(|x| x * x).sum();
        let floor = SMALLEST_ROW * (squares / rows as f64).sqrt();
        let dim = dim.max(1);
        let theirs = Distance::above(rounded, &exact, dim, floor);
        let errors = Deviation::above(deviation, &exact, dim, floor);
        let largest = finite(&exact).fold(0.0, |most: f64, x| most.max(x.abs()));
        let allowed = ErrorFigures {
            max_abs_allowed: 2.0 * theirs.max_abs + 2.0 * roundoff * largest + errors.max_abs,
            rel_allowed: 2.0 * theirs.rel + roundoff + errors.rel,
            row_rel_allowed: 2.0 * theirs.row_rel + 2.0 * roundoff + errors.row_rel,
            bias_allowed: 2.0 * theirs.bias + roundoff + errors.rel,
            allclose_1e3: true,
            ..ErrorFigures::default()
        };
        Part { operand, dim, exact, floor, allowed }
    }
}

#[cfg(test)]
mod tests {
    use problem::{Band, ElementType, Gradients, Layout, Pass, Table, Tensor};

    use super::*;
    use crate::inputs::{Style, draw};
    use crate::values::Values;

    /// A problem with grouped heads, sinks and a bias, and every gradient.
    fn problem(dtype: DType) -> Problem {
        let mut p = Problem::new(1, 4, 40, 16, dtype).with_band(Band::CAUSAL);
        (p.heads_kv, p.seq_kv, p.score.sink) = (2, 48, true);
        p.programs.score = Some("s + t0[h, q, k]".parse().unwrap());
        p.programs.tables = vec![Table::dense(ElementType::F32, &[4, 40, 48])];
        let wants = Gradients { sinks: true, tables: 1 };
        p.with_layout(Layout::Bhsd).with_pass(Pass::Backward { deterministic: false, d_lse: true, wants })
    }

    /// The figures that exceed their tolerance, of all gradients, after a change to the right gradients.
    fn reasons(
        problem: &Problem,
        change: impl FnOnce(&Inputs, &mut problem::OperandMap<Vec<f64>>),
    ) -> Vec<(Operand, String)> {
        let inputs = draw(problem, Style::Normal, 5);
        let references = GradientReferences::of(problem, &inputs).unwrap();
        let mut values = oracle::gradients_in_precision(problem, &inputs.elements()).unwrap().values;
        change(&inputs, &mut values);
        let reasons = references.operands().flat_map(|operand| {
            let figures = references.judge(operand, &values[operand]).unwrap();
            figures.reasons().into_iter().map(move |reason| (operand, reason))
        });
        reasons.collect()
    }

    const DQ: Operand = Operand::Tensor(Tensor::Dq);
    const DK: Operand = Operand::Tensor(Tensor::Dk);
    const DV: Operand = Operand::Tensor(Tensor::Dv);

    #[test]
    fn right_gradients_pass_and_faults_are_seen_in_their_gradient() {
        for dtype in DType::OUTPUTS {
            let problem = &problem(dtype);
            assert_eq!(reasons(problem, |_, _| {}), [], "{dtype}");
            let seen = |change: &dyn Fn(&Inputs, &mut problem::OperandMap<Vec<f64>>)| {
                let mut operands: Vec<Operand> =
                    reasons(problem, change).into_iter().map(|(operand, _)| operand).collect();
                operands.dedup();
                operands
            };
            let scaled = |operand| {
                move |_: &Inputs, g: &mut problem::OperandMap<Vec<f64>>| {
                    g[operand].iter_mut().for_each(|x| *x *= 1.02);
                }
            };
            for operand in [DQ, DK, DV, Operand::DSinks, Operand::DTable(0)] {
                assert_eq!(seen(&scaled(operand)), [operand], "a wrong factor in {dtype}");
            }
            // D of the next row: O is shifted by a row.
            let stale = seen(&|inputs, gradients| {
                let mut inputs = inputs.clone();
                let mut bytes = inputs[Operand::OUT].to_bytes();
                bytes.rotate_left(16 * dtype.bytes());
                inputs[Operand::OUT] = Values::from_bytes(dtype, &bytes);
                *gradients = oracle::gradients_in_precision(problem, &inputs.elements()).unwrap().values;
            });
            assert_eq!(stale, [DQ, DK, Operand::DSinks, Operand::DTable(0)]);
            // P of another tile of keys.
            assert_eq!(seen(&|_, gradients| gradients[DV].rotate_left(8 * 16)), [DV]);
            // The gradient of the bias of the next head.
            assert_eq!(
                seen(&|_, gradients| gradients[Operand::DTable(0)].rotate_left(40 * 48)),
                [Operand::DTable(0)]
            );
            assert_eq!(seen(&|_, gradients| gradients[DK][17] = f64::NAN), [DK]);
            assert_eq!(seen(&|_, gradients| gradients[DV].truncate(1)), [DV]);
        }
    }

    /// dS in a type with three bits less than that of the inputs.
    #[test]
    fn another_rounding_is_seen() {
        for (dtype, coarse) in [(DType::F16, DType::Bf16), (DType::F32, DType::F16)] {
            let found = reasons(&problem(dtype), |inputs, gradients| {
                let coarse = oracle::gradients_rounded(&problem(dtype), &inputs.elements(), coarse).unwrap();
                *gradients = coarse.values;
            });
            let operands: Vec<Operand> = found.iter().map(|(operand, _)| *operand).collect();
            assert!([DQ, DK, DV].iter().all(|operand| operands.contains(operand)), "{dtype}: {found:?}");
        }
    }
}
