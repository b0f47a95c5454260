//! The law of time: paired log-ratios, a bootstrap interval, and a noise floor from the contestant raced against itself.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// Who is faster, as far as the samples tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs, reason = "self-evident")]
pub enum SpeedVerdict {
    Faster,
    Slower,
    Undecided,
}

/// One contestant against another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Median of time(B) / time(A): above 1, A is faster.
    pub ratio: f64,
    /// Lower end of the 95 % bootstrap interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Ratio that A reaches against itself: a difference below it says nothing.
    pub noise: f64,
    /// The verdict on A.
    pub verdict: SpeedVerdict,
}

/// Times of one A/B/B/A round, µs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "in the order in which they were taken")]
pub struct Round {
    pub a1: f64,
    pub b1: f64,
    pub b2: f64,
    pub a2: f64,
}

/// Resamples of the bootstrap.
const RESAMPLES: usize = 2000;

/// Compares A with B over rounds.
pub fn compare(rounds: &[Round]) -> Comparison {
    let ratios: Vec<f64> = rounds.iter().flat_map(|r| [(r.b1 / r.a1).ln(), (r.b2 / r.a2).ln()]).collect();
    let control: Vec<f64> = rounds.iter().map(|r| (r.a2 / r.a1).ln()).collect();
    let (low, high) = bootstrap(&ratios);
    // The control's interval says how far from 1 the ratio of equals can come out.
    let (control_low, control_high) = bootstrap(&control);
    let noise = control_low.abs().max(control_high.abs());
    let verdict = match () {
        () if low > noise => SpeedVerdict::Faster,
        () if high < -noise => SpeedVerdict::Slower,
        () => SpeedVerdict::Undecided,
    };
    let ratio = median(&ratios).exp();
    Comparison { ratio, low: low.exp(), high: high.exp(), noise: noise.exp(), verdict }
}

/// The 95 % interval of the median. The seed is fixed: one set of samples has one interval.
fn bootstrap(values: &[f64]) -> (f64, f64) {
    if values.is_empty() {
        return (f64::NEG_INFINITY, f64::INFINITY);
    }
    let mut rng = SmallRng::seed_from_u64(1);
    let mut resample = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            resample.iter_mut().for_each(|x| *x = values[rng.random_range(0..values.len())]);
            median(&resample)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    (medians[RESAMPLES / 40], medians[RESAMPLES - 1 - RESAMPLES / 40])
}

/// The median; NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The quantile at `at` in [0, 1], interpolated; NaN of nothing.
pub fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let position = at * sorted.len().saturating_sub(1) as f64;
    let (below, above) = (position.floor() as usize, position.ceil() as usize);
    match (sorted.get(below), sorted.get(above)) {
        (Some(x), Some(y)) => x + (y - x) * (position - below as f64),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(factor: f64, noise: f64) -> Vec<Round> {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut sample = |us: f64| us * (1.0 + noise * (rng.random::<f64>() - 0.5));
        (0..30)
            .map(|_| Round {
                a1: sample(100.0),
                b1: sample(100.0 * factor),
                b2: sample(100.0 * factor),
                a2: sample(100.0),
            })
            .collect()
    }

    #[test]
    fn verdicts() {
        assert_eq!(compare(&rounds(1.2, 0.1)).verdict, SpeedVerdict::Faster);
        assert_eq!(compare(&rounds(0.8, 0.1)).verdict, SpeedVerdict::Slower);
        assert_eq!(compare(&rounds(1.0, 0.1)).verdict, SpeedVerdict::Undecided);
        assert_eq!(compare(&rounds(1.02, 0.6)).verdict, SpeedVerdict::Undecided);
        assert_eq!(compare(&[]).verdict, SpeedVerdict::Undecided);
        let found = compare(&rounds(1.2, 0.1));
        assert!(found.low < 1.2 && 1.2 < found.high, "{found:?}");
    }

    #[test]
    fn a_drift_is_no_difference() {
        // The machine slows down steadily: pairs taken side by side do not care.
        let drift = |i: usize| 100.0 * (1.0 + 0.02 * i as f64);
        let rounds: Vec<Round> = (0..20)
            .map(|i| Round {
                a1: drift(4 * i),
                b1: drift(4 * i + 1),
                b2: drift(4 * i + 2),
                a2: drift(4 * i + 3),
            })
            .collect();
        assert_eq!(compare(&rounds).verdict, SpeedVerdict::Undecided);
    }

    #[test]
    fn quantiles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[]).is_nan());
    }
}
