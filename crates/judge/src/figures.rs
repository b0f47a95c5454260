//! The figures by which an output is judged: distances from the exact result, and what they may be.

use rayon::prelude::*;

/// The errors of an output against the oracle, each with its tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct ErrorFigures {
    pub max_abs: f64,
    /// Tolerance of `max_abs`: twice the error of standard attention in the input precision, plus two
    /// roundings of the largest element, plus what roundings of f32 logits may cost. The other tolerances
    /// have the same parts.
    pub max_abs_allowed: f64,
    /// Relative Frobenius error, ‖O − O*‖ / ‖O*‖.
    pub rel: f64,
    pub rel_allowed: f64,
    /// The largest relative error of a row. A stale or lost row would be hidden in the error of the whole
    /// tensor.
    pub row_rel: f64,
    pub row_rel_allowed: f64,
    /// |⟨O, O*⟩ / ⟨O*, O*⟩ − 1|. Rounding leaves the slope at 1; a dropped term or a wrong scale changes it.
    pub bias: f64,
    pub bias_allowed: f64,
    /// 1 − cos(O, O*).
    pub cosine: f64,
    /// Largest error of the LSE; 0 when no LSE was requested.
    pub lse: f64,
    pub lse_allowed: f64,
    /// `max_diff` as the original kernels print it: the difference from the oracle rounded to the dtype.
    pub max_diff: f64,
    /// `allclose(rtol = 1e-3, atol = 1e-3)` as the original kernels used it; printed, but not part of the
    /// decision.
    pub allclose_1e3: bool,
    /// Number of elements that are finite in the output and not in the oracle, or the reverse.
    pub non_finite: u64,
}

impl ErrorFigures {
    /// The figures that exceed their tolerance, in words; empty when the output is right.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.non_finite > 0 {
            reasons.push(format!(
                "{} elements are NaN or Inf where the oracle is finite, or the reverse",
                self.non_finite
            ));
        }
        let figures = [
            ("largest error", self.max_abs, self.max_abs_allowed),
            ("relative error", self.rel, self.rel_allowed),
            ("worst row's relative error", self.row_rel, self.row_rel_allowed),
            ("bias", self.bias, self.bias_allowed),
            ("largest error of LSE", self.lse, self.lse_allowed),
        ];
        for (name, value, allowed) in figures {
            if value > allowed || value.is_nan() {
                reasons.push(format!("{name} is {value:.3e}, at most {allowed:.3e} is allowed"));
            }
        }
        reasons
    }

    /// The figures with their tolerances multiplied by `slack`.
    pub fn with_slack(self, slack: f64) -> ErrorFigures {
        ErrorFigures {
            max_abs_allowed: slack * self.max_abs_allowed,
            rel_allowed: slack * self.rel_allowed,
            row_rel_allowed: slack * self.row_rel_allowed,
            bias_allowed: slack * self.bias_allowed,
            lse_allowed: slack * self.lse_allowed,
            ..self
        }
    }

    /// Largest error and its tolerance for tables; `NaN` when an element is NaN or infinite and the oracle's
    /// element is not.
    pub fn brief(&self) -> String {
        if self.non_finite > 0 {
            return format!("NaN / {:.1e}", self.max_abs_allowed);
        }
        format!("{:.1e} / {:.1e}", self.max_abs, self.max_abs_allowed)
    }

    /// The worse of two runs for each figure. A figure keeps its own tolerance.
    pub fn worst(self, other: ErrorFigures) -> ErrorFigures {
        let worse = |a: (f64, f64), b: (f64, f64)| {
            let excess = |(value, allowed): (f64, f64)| value / allowed.max(f64::MIN_POSITIVE);
            if excess(b) > excess(a) || b.0.is_nan() { b } else { a }
        };
        let (a, b) = (self, other);
        let (max_abs, max_abs_allowed) =
            worse((a.max_abs, a.max_abs_allowed), (b.max_abs, b.max_abs_allowed));
        let (rel, rel_allowed) = worse((a.rel, a.rel_allowed), (b.rel, b.rel_allowed));
        let (row_rel, row_rel_allowed) =
            worse((a.row_rel, a.row_rel_allowed), (b.row_rel, b.row_rel_allowed));
        let (bias, bias_allowed) = worse((a.bias, a.bias_allowed), (b.bias, b.bias_allowed));
        let (lse, lse_allowed) = worse((a.lse, a.lse_allowed), (b.lse, b.lse_allowed));
        ErrorFigures {
            max_abs,
            max_abs_allowed,
            rel,
            rel_allowed,
            row_rel,
            row_rel_allowed,
            bias,
            bias_allowed,
            lse,
            lse_allowed,
            cosine: a.cosine.max(b.cosine),
            max_diff: a.max_diff.max(b.max_diff),
            allclose_1e3: a.allclose_1e3 && b.allclose_1e3,
            non_finite: a.non_finite + b.non_finite,
        }
    }
}

/// Distances between two tensors over the elements that are finite in the exact tensor.
pub(crate) struct Distance {
    pub(crate) max_abs: f64,
    pub(crate) rel: f64,
    pub(crate) row_rel: f64,
    pub(crate) bias: f64,
    pub(crate) cosine: f64,
    pub(crate) non_finite: u64,
}

impl Distance {
    pub(crate) fn of(x: &[f64], exact: &[f64], dim: usize) -> Distance {
        Distance::above(x, exact, dim, 0.0)
    }

    /// The error of a row whose norm is below `floor` is relative to `floor`.
    pub(crate) fn above(x: &[f64], exact: &[f64], dim: usize, floor: f64) -> Distance {
        let mut total = Sums::default();
        let (mut row_rel, mut max_abs, mut non_finite) = (0.0f64, 0.0f64, 0);
        let rows = x.par_chunks(dim).zip(exact.par_chunks(dim)).with_min_len(ROWS_AT_ONCE);
        // Merged in row order, so that the figures do not depend on thread timing.
        for (row, most, unlike) in rows.map(|(x, exact)| of_row(x, exact)).collect::<Vec<_>>() {
            max_abs = max_abs.max(most);
            non_finite += unlike;
            row_rel = row_rel.max(row.rel_above(floor));
            total.merge(&row);
        }
        let (rel, bias, cosine) = (total.rel(), total.bias(), total.cosine());
        Distance { max_abs, rel, row_rel, bias, cosine, non_finite }
    }
}

/// [`DEVIATIONS`] standard deviations of O by the roundings of f32 logits: of its largest element, of the
/// tensor and of a row, the last two relative.
pub(crate) struct Deviation {
    pub(crate) max_abs: f64,
    pub(crate) rel: f64,
    pub(crate) row_rel: f64,
}

impl Deviation {
    /// From the deviation of each element of `exact`, with the `floor` of [`Distance::above`].
    pub(crate) fn above(deviation: &[f64], exact: &[f64], dim: usize, floor: f64) -> Deviation {
        let (mut max_abs, mut row_rel, mut total) = (0.0f64, 0.0f64, Sums::default());
        for (deviation, exact) in deviation.chunks(dim).zip(exact.chunks(dim)) {
            let mut row = Sums::default();
            for (&deviation, &exact) in deviation.iter().zip(exact).filter(|(_, exact)| exact.is_finite()) {
                max_abs = max_abs.max(deviation);
                row.add(exact + deviation, exact);
            }
            row_rel = row_rel.max(row.rel_above(floor));
            total.merge(&row);
        }
        let [max_abs, rel, row_rel] = [max_abs, total.rel(), row_rel].map(|x| DEVIATIONS * x);
        Deviation { max_abs, rel, row_rel }
    }
}

/// Number of standard deviations that an error may have. Normal errors of 10⁷ rows exceed six of them once
/// in 50 draws.
const DEVIATIONS: f64 = 6.0;

/// Minimum number of rows per thread. For fewer rows, waking a thread costs more than it saves.
const ROWS_AT_ONCE: usize = 256;

/// A row's sums, its largest error, and the number of elements that are finite in only one of the two.
fn of_row(x: &[f64], exact: &[f64]) -> (Sums, f64, u64) {
    let (mut row, mut max_abs, mut non_finite) = (Sums::default(), 0.0f64, 0);
    for (&x, &exact) in x.iter().zip(exact) {
        match (x.is_finite(), exact.is_finite()) {
            (true, true) => {
                max_abs = max_abs.max((x - exact).abs());
                row.add(x, exact);
            }
            (false, false) => {}
            (true, false) | (false, true) => non_finite += 1,
        }
    }
    (row, max_abs, non_finite)
}

#[derive(Default)]
struct Sums {
    error: f64,
    exact: f64,
    cross: f64,
    other: f64,
}

impl Sums {
    fn add(&mut self, x: f64, exact: f64) {
        self.error += (x - exact) * (x - exact);
        self.exact += exact * exact;
        self.cross += x * exact;
        self.other += x * x;
    }

    fn merge(&mut self, row: &Sums) {
        self.error += row.error;
        self.exact += row.exact;
        self.cross += row.cross;
        self.other += row.other;
    }

    /// 0 when both are zero; infinite for a nonzero output against zeros.
    fn rel(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.exact).sqrt() }
    }

    /// Like [`Sums::rel`], relative to `floor` at least.
    fn rel_above(&self, floor: f64) -> f64 {
        if self.exact.sqrt() >= floor { self.rel() } else { self.error.sqrt() / floor }
    }

    fn bias(&self) -> f64 {
        if self.exact == 0.0 { 0.0 } else { (self.cross / self.exact - 1.0).abs() }
    }

    fn cosine(&self) -> f64 {
        let norms = (self.exact * self.other).sqrt();
        if norms == 0.0 { 0.0 } else { (1.0 - self.cross / norms).max(0.0) }
    }
}

pub(crate) fn finite(values: &[f64]) -> impl Iterator<Item = f64> {
    values.iter().copied().filter(|x| x.is_finite())
}
