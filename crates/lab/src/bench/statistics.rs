//! The law of time: log-ratios paired by round, a bootstrap interval over blocks of rounds, and a noise floor from the
//! first contestant raced against its twin.
//!
//! A round is a palindrome (A B B A, [`super::schedule`]), so a contestant's mean log-time of a round is free of any drift
//! that is linear over the round, and its difference from another's in the same round is free of what both shared. What
//! is left between neighbouring rounds is correlated (clocks and temperatures move slowly), so rounds are resampled in
//! blocks that wrap around (Politis & Romano, "A circular block-resampling procedure for stationary data", 1992), of a
//! length that grows with the cube root of their number (Hall, Horowitz & Jing, "On blocking rules for the bootstrap
//! with dependent data", Biometrika 1995). The statistic is the mean of the middle half, a trimmed mean (Tukey &
//! McLaughlin 1963): interrupts do not move it, and unlike a median it does not stick to the timer's ticks.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// Who is faster, as far as the samples tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs, reason = "self-evident")]
pub enum SpeedVerdict {
    Faster,
    Slower,
    Undecided,
}

impl SpeedVerdict {
    /// The word in tables.
    pub const fn name(self) -> &'static str {
        match self {
            SpeedVerdict::Faster => "FASTER",
            SpeedVerdict::Slower => "SLOWER",
            SpeedVerdict::Undecided => "UNDECIDED",
        }
    }
}

/// One contestant against another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// time(B) / time(A): above 1, A is faster.
    pub ratio: f64,
    /// Lower end of the 95 % bootstrap interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Ratio that A reaches against its twin: a difference below it says nothing.
    pub noise: f64,
    /// The verdict on A.
    pub verdict: SpeedVerdict,
}

/// Resamples of the bootstrap.
const RESAMPLES: usize = 2000;
/// Part of the values that is left out at each end of a mean.
const TRIM: f64 = 0.25;

/// An interval of log-ratios with the estimate inside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Trimmed mean.
    pub middle: f64,
    /// 2.5 % of the resamples lie below.
    pub low: f64,
    /// 2.5 % lie above.
    pub high: f64,
}

impl Interval {
    /// How far from 0 the interval reaches.
    pub fn reach(&self) -> f64 {
        self.low.abs().max(self.high.abs())
    }
}

/// Compares A with B. Each slice holds one mean log-time for each round, of A, of B, and of A's twin.
pub fn compare(a: &[f64], b: &[f64], twin: &[f64]) -> Comparison {
    let differences = |x: &[f64]| -> Vec<f64> { x.iter().zip(a).map(|(x, a)| x - a).collect() };
    let found = interval(&differences(b));
    // The control's interval says how far from 1 the ratio of equals can come out.
    let noise = interval(&differences(twin)).reach();
    let verdict = match () {
        () if found.low > noise => SpeedVerdict::Faster,
        () if found.high < -noise => SpeedVerdict::Slower,
        () => SpeedVerdict::Undecided,
    };
    let Interval { middle, low, high } = found;
    Comparison { ratio: middle.exp(), low: low.exp(), high: high.exp(), noise: noise.exp(), verdict }
}

/// The 95 % interval of the trimmed mean. The seed is fixed: one set of samples has one interval.
pub fn interval(values: &[f64]) -> Interval {
    let n = values.len();
    if n < 2 {
        return Interval { middle: trimmed_mean(values), low: f64::NEG_INFINITY, high: f64::INFINITY };
    }
    let block = (n as f64).cbrt().ceil() as usize;
    let mut rng = SmallRng::seed_from_u64(1);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut resample = Vec::with_capacity(n + block);
            while resample.len() < n {
                let start = rng.random_range(0..n);
                resample.extend((start..start + block).map(|i| values[i % n]));
            }
            resample.truncate(n);
            trimmed_mean(&resample)
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let cut = RESAMPLES / 40;
    Interval { middle: trimmed_mean(values), low: means[cut], high: means[RESAMPLES - 1 - cut] }
}

/// The mean of what is left without the lowest and the highest quarter; NaN of nothing.
pub fn trimmed_mean(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = (TRIM * sorted.len() as f64) as usize;
    let kept = &sorted[cut..sorted.len() - cut];
    kept.iter().sum::<f64>() / kept.len() as f64
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
    use super::super::schedule::palindrome;
    use super::*;

    const ROUNDS: usize = 24;

    /// A machine's noise: a factor for each turn, in the order of the turns.
    trait Noise: FnMut(&mut SmallRng, usize) -> f64 {}
    impl<F: FnMut(&mut SmallRng, usize) -> f64> Noise for F {}

    fn normal(rng: &mut SmallRng) -> f64 {
        (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * (std::f64::consts::TAU * rng.random::<f64>()).cos()
    }

    /// Races A, B (of `factor` times A's time) and A's twin, in the order of the real schedule.
    fn race(seed: u64, factor: f64, mut noise: impl Noise) -> Comparison {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut logs = [vec![], vec![], vec![]];
        let mut turn = 0;
        for round in 0..ROUNDS {
            let mut sums = [0.0; 3];
            for lane in palindrome(3, seed, round as u64) {
                let us = if lane == 1 { 100.0 * factor } else { 100.0 } * noise(&mut rng, turn);
                sums[lane] += us.ln() / 2.0;
                turn += 1;
            }
            (0..3).for_each(|lane| logs[lane].push(sums[lane]));
        }
        compare(&logs[0], &logs[1], &logs[2])
    }

    fn undecided_of_100(mut noise: impl FnMut(&mut SmallRng, usize) -> f64) -> usize {
        (0..100).filter(|&s| race(s, 1.0, &mut noise).verdict == SpeedVerdict::Undecided).count()
    }

    #[test]
    fn equals_are_undecided_whatever_the_noise() {
        let mut state = 0.0;
        // Correlation of 0.9 from turn to turn: over the six turns of a round it falls to a half.
        let autocorrelated = |rng: &mut SmallRng, _: usize| {
            state = 0.9 * state + 0.01 * normal(rng);
            1.0 + state
        };
        assert!(undecided_of_100(|rng, _| 1.0 + 0.01 * normal(rng)) >= 95, "white");
        assert!(
            undecided_of_100(|rng, t| (1.0 + 0.002 * t as f64) * (1.0 + 0.005 * normal(rng))) >= 95,
            "drift"
        );
        assert!(undecided_of_100(autocorrelated) >= 95, "autocorrelated");
        // Cauchy: not even a mean; and an interrupt in one turn of twenty.
        let tails = |rng: &mut SmallRng, _: usize| (0.003 * normal(rng) / normal(rng).abs().max(1e-3)).exp();
        assert!(undecided_of_100(tails) >= 95, "heavy tails");
        let spikes = |rng: &mut SmallRng, _: usize| {
            if rng.random::<f64>() < 0.05 { 3.0 } else { 1.0 + 0.01 * normal(rng) }
        };
        assert!(undecided_of_100(spikes) >= 95, "spikes");
        // The clock falls by a tenth and comes back.
        let steps =
            |rng: &mut SmallRng, t: usize| if t / 40 % 2 == 1 { 1.1 } else { 1.0 } * (1.0 + 0.003 * normal(rng));
        assert!(undecided_of_100(steps) >= 95, "steps of the clock");
        assert_eq!(undecided_of_100(|_, _| 1.0), 100, "no noise at all");
    }

    #[test]
    fn differences_are_found_through_noise() {
        let found =
            |factor: f64, verdict: SpeedVerdict, noise: &mut dyn FnMut(&mut SmallRng, usize) -> f64| {
                (0..100).filter(|&s| race(s, factor, &mut *noise).verdict == verdict).count()
            };
        let mut white = |rng: &mut SmallRng, _: usize| 1.0 + 0.01 * normal(rng);
        assert!(found(1.03, SpeedVerdict::Faster, &mut white) >= 95);
        assert!(found(0.97, SpeedVerdict::Slower, &mut white) >= 95);
        let mut drift = |rng: &mut SmallRng, t: usize| (1.0 + 0.002 * t as f64) * (1.0 + 0.005 * normal(rng));
        assert!(found(1.02, SpeedVerdict::Faster, &mut drift) >= 95);
        let mut spikes = |rng: &mut SmallRng, _: usize| {
            if rng.random::<f64>() < 0.02 { 3.0 } else { 1.0 + 0.01 * normal(rng) }
        };
        let found = found(1.05, SpeedVerdict::Faster, &mut spikes);
        assert!(found >= 90, "{found}");
    }

    #[test]
    fn the_ratio_and_its_interval() {
        let found = race(7, 1.2, |rng: &mut SmallRng, _: usize| 1.0 + 0.01 * normal(rng));
        assert!(found.low < 1.2 && 1.2 < found.high && found.high - found.low < 0.05, "{found:?}");
        assert_eq!(found, race(7, 1.2, |rng: &mut SmallRng, _: usize| 1.0 + 0.01 * normal(rng)));
        assert_eq!(compare(&[], &[], &[]).verdict, SpeedVerdict::Undecided);
        assert_eq!(compare(&[0.0], &[1.0], &[0.0]).verdict, SpeedVerdict::Undecided);
    }

    #[test]
    fn quantiles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[]).is_nan());
        assert_eq!(trimmed_mean(&[0.0, 1.0, 2.0, 3.0, 1000.0]), 2.0);
    }
}
