//! The statistics of a race: log-ratios paired by round, a bootstrap interval over blocks of rounds, and a
//! noise floor from the first contestant raced against its A/A control.
//!
//! A round is a palindrome (A B B A, [`super::schedule`]). A contestant's mean log-time of a round is
//! therefore free of any drift that is linear over the round, and the difference of two contestants in one
//! round is free of common effects. Remaining errors of neighbouring rounds are correlated, because clocks
//! and temperatures move slowly. Rounds are therefore resampled in blocks that wrap around (Politis & Romano,
//! "A circular block-resampling procedure for stationary data", 1992). The block length grows with the cube
//! root of the number of rounds (Hall, Horowitz & Jing, "On blocking rules for the bootstrap with dependent
//! data", Biometrika 1995). The statistic is the mean of the middle half, a trimmed mean (Tukey & McLaughlin
//! 1963): interrupts do not move it, and unlike a median it does not stick to the timer's ticks.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// The verdict on contestant A against B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum SpeedVerdict {
    Faster,
    Slower,
    Undecided,
}

impl SpeedVerdict {
    pub const fn name(self) -> &'static str {
        match self {
            SpeedVerdict::Faster => "FASTER",
            SpeedVerdict::Slower => "SLOWER",
            SpeedVerdict::Undecided => "UNDECIDED",
        }
    }
}

/// The comparison of contestant A with contestant B.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// time(B) / time(A). Above 1, A is faster.
    pub ratio: f64,
    /// Lower end of the 95 % bootstrap interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// The noise floor as a ratio: the reach of A against its A/A control, but at least the margin.
    pub noise: f64,
    pub verdict: SpeedVerdict,
}

const RESAMPLES: usize = 2000;
/// The fraction of values that the trimmed mean drops at each end.
const TRIM: f64 = 0.25;

/// A 95 % interval of log-ratios with its estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The trimmed mean.
    pub middle: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// The largest distance of the interval's ends from 0.
    pub fn reach(&self) -> f64 {
        self.low.abs().max(self.high.abs())
    }
}

/// Compares A with B. Each slice holds the mean log-time of each round, for A, B and A's A/A control.
/// `margin` is the smallest difference that counts ([`super::stage::Mode::margin`]).
pub fn compare(a: &[f64], b: &[f64], aa: &[f64], margin: f64) -> Comparison {
    // The reach of the A/A control bounds the ratio that two equal contestants can show.
    judged(difference(a, b), difference(a, aa).reach().max(margin.ln_1p()))
}

/// The verdict on the A/A control itself: A against its A/A control. The noise is the margin alone, because
/// the control's own interval would excuse any result. A verdict other than UNDECIDED means that this device
/// separates equal contestants.
pub fn control(a: &[f64], aa: &[f64], margin: f64) -> Comparison {
    judged(difference(a, aa), margin.ln_1p())
}

fn difference(a: &[f64], b: &[f64]) -> Interval {
    let differences: Vec<f64> = b.iter().zip(a).map(|(b, a)| b - a).collect();
    interval(&differences)
}

/// Compares two contestants by the interval of their logarithms: faster or slower if the whole interval lies
/// beyond the noise, else undecided.
pub fn judged(found: Interval, noise: f64) -> Comparison {
    let verdict = match () {
        () if found.low > noise => SpeedVerdict::Faster,
        () if found.high < -noise => SpeedVerdict::Slower,
        () => SpeedVerdict::Undecided,
    };
    let Interval { middle, low, high } = found;
    Comparison { ratio: middle.exp(), low: low.exp(), high: high.exp(), noise: noise.exp(), verdict }
}

/// The 95 % interval of the trimmed mean: a percentile interval, widened for small samples (`widening`). The
/// seed is fixed, so that a set of samples always has the same interval.
pub fn interval(values: &[f64]) -> Interval {
    let n = values.len();
    if n < 2 {
        return Interval { middle: trimmed_mean(values), low: f64::NEG_INFINITY, high: f64::INFINITY };
    }
    let block = (n as f64).cbrt().ceil() as usize;
    // A resample is kept as the number of times that each rank was drawn, so none has to be sorted.
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let mut ranks = vec![0; n];
    order.iter().enumerate().for_each(|(rank, &i)| ranks[i] = rank);
    let sorted: Vec<f64> = order.iter().map(|&i| values[i]).collect();
    let mut counts = vec![0; n];
    let mut rng = SmallRng::seed_from_u64(1);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            counts.fill(0);
            let mut missing = n;
            while missing > 0 {
                let start = rng.random_range(0..n);
                let drawn = block.min(missing);
                (start..start + drawn).for_each(|i| counts[ranks[i % n]] += 1);
                missing -= drawn;
            }
            trimmed_mean_of_counts(&sorted, &counts)
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let cut = RESAMPLES / 40;
    let (middle, wider) = (trimmed_mean(values), widening(n, block));
    let [low, high] = [means[cut], means[RESAMPLES - 1 - cut]].map(|end| middle + wider * (end - middle));
    Interval { middle, low, high }
}

/// The factor by which a percentile interval is too narrow at small `n`. Blocks of length b around the
/// sample's own mean underestimate the variance by the factor 1 − b/n. The spread is itself an estimate,
/// hence Student's t(n − 1) instead of the normal quantile. Without the factor, nominal 95 % intervals of
/// normal values cover 83 % at n = 5, 84 % at 9 and 93 % at 24.
fn widening(n: usize, block: usize) -> f64 {
    let (n, block) = (n as f64, block as f64);
    student(n - 1.0) / NORMAL * (n / (n - block).max(1.0)).sqrt()
}

/// The normal distribution's quantile at 97.5 %.
const NORMAL: f64 = 1.959_964;

/// Student's quantile at 97.5 % by expansion around the normal one (Fisher & Cornish 1960). The error is
/// below 1 % from 4 degrees of freedom on.
fn student(freedom: f64) -> f64 {
    let (z, v) = (NORMAL, freedom);
    let terms = [
        (z.powi(3) + z) / 4.0,
        (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0,
        (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0,
    ];
    z + terms[0] / v + terms[1] / v.powi(2) + terms[2] / v.powi(3)
}

/// The mean without the lowest and the highest quarter; NaN for an empty slice.
pub fn trimmed_mean(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = (TRIM * sorted.len() as f64) as usize;
    let kept = &sorted[cut..sorted.len() - cut];
    kept.iter().sum::<f64>() / kept.len() as f64
}

/// The trimmed mean of a sample that holds each of the `sorted` values as often as `counts` says.
fn trimmed_mean_of_counts(sorted: &[f64], counts: &[usize]) -> f64 {
    let n: usize = counts.iter().sum();
    let cut = (TRIM * n as f64) as usize;
    let kept = n - 2 * cut;
    let (mut below, mut added, mut sum) = (0, 0, 0.0);
    for (value, count) in sorted.iter().zip(counts) {
        // How many of these copies lie between the two cuts.
        let skipped = (*count).min(cut - below);
        below += skipped;
        let copies = (count - skipped).min(kept - added);
        (0..copies).for_each(|_| sum += value);
        added += copies;
    }
    sum / kept as f64
}

/// The median; NaN for an empty slice.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The interpolated quantile at `at` in [0, 1]; NaN for an empty slice.
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

    /// A simulated machine's noise: a factor for each turn, in the order of the turns.
    trait Noise: FnMut(&mut SmallRng, usize) -> f64 {}
    impl<F: FnMut(&mut SmallRng, usize) -> f64> Noise for F {}

    fn normal(rng: &mut SmallRng) -> f64 {
        (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * (std::f64::consts::TAU * rng.random::<f64>()).cos()
    }

    /// Races A, B (whose time is `factor` times A's) and A's A/A control in the order of the real schedule.
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
        compare(&logs[0], &logs[1], &logs[2], 0.0)
    }

    fn undecided_of_100(mut noise: impl FnMut(&mut SmallRng, usize) -> f64) -> usize {
        (0..100).filter(|&s| race(s, 1.0, &mut noise).verdict == SpeedVerdict::Undecided).count()
    }

    #[test]
    fn equals_are_undecided_whatever_the_noise() {
        let mut state = 0.0;
        // Turns correlate with 0.9; over the six turns of a round the correlation falls to a half.
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
        // A Cauchy distribution, which has no mean; then an interrupt in one turn of twenty.
        let tails = |rng: &mut SmallRng, _: usize| (0.003 * normal(rng) / normal(rng).abs().max(1e-3)).exp();
        assert!(undecided_of_100(tails) >= 95, "heavy tails");
        let spikes = |rng: &mut SmallRng, _: usize| {
            if rng.random::<f64>() < 0.05 { 3.0 } else { 1.0 + 0.01 * normal(rng) }
        };
        assert!(undecided_of_100(spikes) >= 95, "spikes");
        // The clock falls by a tenth and recovers.
        let steps =
            |rng: &mut SmallRng, t: usize| if t / 40 % 2 == 1 { 1.1 } else { 1.0 } * (1.0 + 0.003 * normal(rng));
        assert!(undecided_of_100(steps) >= 95, "steps of the clock");
        assert_eq!(undecided_of_100(|_, _| 1.0), 100, "no noise at all");
    }

    #[test]
    fn counts_and_copies_have_one_trimmed_mean() {
        let mut rng = SmallRng::seed_from_u64(3);
        for n in 1..40 {
            let mut sorted: Vec<f64> = (0..n).map(|_| normal(&mut rng)).collect();
            sorted.sort_by(f64::total_cmp);
            let mut counts = vec![0; n];
            (0..n).for_each(|_| counts[rng.random_range(0..n)] += 1);
            let copies =
                sorted.iter().zip(&counts).flat_map(|(&value, &count)| std::iter::repeat_n(value, count));
            let copies: Vec<f64> = copies.collect();
            assert_eq!(trimmed_mean_of_counts(&sorted, &counts), trimmed_mean(&copies));
        }
    }

    #[test]
    fn a_difference_within_the_margin_is_none() {
        let [a, near, far] = [0.0, 0.008, 0.013].map(|log| vec![log; 12]);
        assert_eq!(compare(&a, &near, &a, 0.0).verdict, SpeedVerdict::Faster);
        assert_eq!(compare(&a, &near, &a, 0.01).verdict, SpeedVerdict::Undecided);
        assert_eq!(compare(&a, &far, &a, 0.01).verdict, SpeedVerdict::Faster);
        assert_eq!(compare(&far, &a, &far, 0.01).verdict, SpeedVerdict::Slower);
    }

    #[test]
    fn intervals_hold_as_often_as_they_say() {
        for n in [5, 9, 24] {
            let holds = |seed: &u64| {
                let mut rng = SmallRng::seed_from_u64(*seed);
                let values: Vec<f64> = (0..n).map(|_| normal(&mut rng)).collect();
                let found = interval(&values);
                found.low <= 0.0 && 0.0 <= found.high
            };
            // The expected count is 380 of 400, with a standard deviation of 4.4.
            let held = (0..400).filter(holds).count();
            assert!((367..=393).contains(&held), "{held} of 400 at n = {n}");
        }
    }

    #[test]
    fn a_twin_that_differs_is_told() {
        let [a, near, far] = [0.0, 0.008, 0.013].map(|log| vec![log; 12]);
        let verdicts = [&near, &far].map(|aa| control(&a, aa, 0.01).verdict);
        assert_eq!(verdicts, [SpeedVerdict::Undecided, SpeedVerdict::Faster]);
        assert_eq!(control(&far, &a, 0.01).verdict, SpeedVerdict::Slower);
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
        assert_eq!(compare(&[], &[], &[], 0.0).verdict, SpeedVerdict::Undecided);
        assert_eq!(compare(&[0.0], &[1.0], &[0.0], 0.0).verdict, SpeedVerdict::Undecided);
    }

    #[test]
    fn quantiles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[]).is_nan());
        assert_eq!(trimmed_mean(&[0.0, 1.0, 2.0, 3.0, 1000.0]), 2.0);
    }
}
