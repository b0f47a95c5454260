//! Advice on continuing a search, from the possible gain by the roofline and the expected gain by the
//! search's own curve.
//!
//! The expected gain of twice as many candidates is the mean of two estimates:
//! - The tail of the times. Assume that the logarithms of good times fall off exponentially (the Gumbel
//!   domain, to which most distributions belong). Then the minimum of twice as many draws is lower by σ ln 2,
//!   where σ is the mean distance of the k best from the next one (Weissman, "Estimation of parameters and
//!   large quantiles based on the k largest observations", JASA 1978; Coles, "An Introduction to Statistical
//!   Modeling of Extreme Values", 2001, §4.3). The tail of real kernels ends at the roofline, so the true
//!   gain is smaller.
//! - The improvement of the second half of the candidates over the first. In a search that slows down, later
//!   gains are smaller.

use problem::Problem;
use serde::Serialize;

use super::config::Config;
use super::engine::Evolution;
use super::population::Population;
use super::rank;
use bench::{Mode, Peaks};
use ledger::TimeKind;
use predict::Gpu;

/// Minimum number of times for an estimate from the curve.
const MIN_SAMPLES: usize = 10;
/// Minimum number of times before a search counts as flat.
const MIN_SAMPLES_FLAT: usize = 48;
/// An expected log-gain below 0.2 % counts as none.
const NO_GAIN: f64 = 0.002;
/// An expected log-gain below 1 % is not worth more candidates.
const MIN_GAIN: f64 = 0.01;

/// The advice in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    Continue,
    Stop,
    /// A library is faster than what this search can be expected to find.
    UseALibrary,
}

impl What {
    /// The word in the ledger's decisions.
    pub const fn name(self) -> &'static str {
        match self {
            What::Continue => "continue",
            What::Stop => "stop",
            What::UseALibrary => "use_a_library",
        }
    }
}

/// A row of the advice table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdviceRow {
    pub criterion: &'static str,
    pub value: String,
    /// What the value means for the decision.
    pub says: String,
}

/// The advice with the figures that support it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub what: What,
    /// The reason in a sentence.
    pub why: String,
    pub rows: Vec<AdviceRow>,
    /// The shortest time that the device allows, µs.
    pub floor_us: Option<f64>,
    /// The speed-up of a perfect kernel.
    pub possible: Option<f64>,
    /// The expected speed-up from as many candidates again.
    pub expected: Option<f64>,
}

/// The expected logarithm of the speed-up from as many candidates again; `None` for a short curve.
pub fn expected_gain(curve: &[f64]) -> Option<f64> {
    if curve.len() < MIN_SAMPLES {
        return None;
    }
    let logs: Vec<f64> = curve.iter().map(|us| us.ln()).collect();
    let mut sorted = logs.clone();
    sorted.sort_by(f64::total_cmp);
    let k = (logs.len() / 5).clamp(4, 20);
    let sigma = sorted[..k].iter().map(|x| sorted[k] - x).sum::<f64>() / k as f64;
    let least = |part: &[f64]| part.iter().copied().fold(f64::INFINITY, f64::min);
    let half = logs.len() / 2;
    let late = (least(&logs[..half]) - least(&logs[half..])).max(0.0);
    Some(0.5 * (sigma * std::f64::consts::LN_2 + late))
}

/// Whether a search is finished: its second half found no better candidate, and no gain is expected.
pub fn is_flat(curve: &[f64]) -> bool {
    let least = |part: &[f64]| part.iter().copied().fold(f64::INFINITY, f64::min);
    let half = curve.len() / 2;
    curve.len() >= MIN_SAMPLES_FLAT
        && least(&curve[..half]) <= least(&curve[half..])
        && expected_gain(curve).is_some_and(|gain| gain < NO_GAIN)
}

/// The advice for a case.
pub(super) fn of(evolution: &Evolution, case: usize) -> Advice {
    let population = &evolution.searches[case].population;
    let problem = population.problem.problem();
    let peer_us = evolution.config.peer_us.filter(|_| case == 0);
    weigh(population, roof(&evolution.config, &problem), peer_us)
}

/// The shortest possible time of a problem, and its source.
#[derive(Clone, Debug, PartialEq)]
struct Roof {
    us: f64,
    by: String,
}

/// The roofline of a GPU's data sheet, on top of the time that an empty kernel takes.
fn of_gpu(floor_us: f64, gpu: Option<&Gpu>) -> Roof {
    let launch_us = gpu.map_or(0.0, |gpu| gpu.launch_us);
    let by = match launch_us > 0.0 {
        true => format!("{} by its data sheet and {launch_us} for the launch", digits(floor_us)),
        false => "by its data sheet".to_owned(),
    };
    Roof { us: floor_us + launch_us, by }
}

/// A time in µs with two significant digits, however short it is.
fn digits(us: f64) -> String {
    let digits = (1.0 - us.log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{us:.digits$}")
}

/// The roofline from a GPU's data sheet, or from this machine's measured peaks.
fn roof(config: &Config, problem: &Problem) -> Option<Roof> {
    if let Some(peaks) = Peaks::of(&config.device) {
        return Some(of_gpu(peaks.floor(problem, Mode::Warm).us(), Gpu::of_device(&config.device)));
    }
    let (floor, products) = config.peaks.as_ref()?.floor(problem)?;
    let by = match floor.bytes_us > floor.flops_us {
        true => "by the bandwidth measured here".to_owned(),
        false => format!("by the {:.0} GFLOP/s measured here in {}", products.flops / 1e9, products.isa),
    };
    Some(Roof { us: floor.us(), by })
}

/// Builds the advice from the population, the roof and a library's time.
fn weigh(population: &Population, roof: Option<Roof>, peer_us: Option<f64>) -> Advice {
    let floor_us = roof.as_ref().map(|roof| roof.us);
    let best_us = rank::best(population).and_then(|best| rank::us(population, best));
    let best_us = [best_us, population.baseline_us()].into_iter().flatten().min_by(f64::total_cmp);
    let possible = best_us.zip(floor_us).map(|(best, floor)| (best / floor).max(1.0));
    let gain = expected_gain(&population.curve).map(f64::exp);
    let expected = gain.map(|gain| possible.map_or(gain, |possible| gain.min(possible)));
    let noise = population.noise_floor().unwrap_or(1.0 + MIN_GAIN);
    let worth = (1.0 + MIN_GAIN).max(noise);
    let is_predicted = rank::best(population).is_some_and(|best| best.kind == Some(TimeKind::Predicted));
    let judge = if is_predicted { "the model" } else { "this machine" };
    let mut rows = Vec::new();
    let mut row = |criterion: &'static str, value: String, says: String| {
        rows.push(AdviceRow { criterion, value, says })
    };
    row(
        "still possible, by the roofline",
        possible.map_or("unknown".into(), |p| format!("{p:.2}×")),
        roof.map_or("the device's peaks are not known".into(), |Roof { us, by }| {
            format!("no kernel takes less than {} µs, {by}", digits(us))
        }),
    );
    row(
        "expected of another run of this size",
        expected.map_or("unknown".into(), |e| format!("{e:.3}×")),
        match expected {
            None => {
                format!("only {} of the {MIN_SAMPLES} times needed have been taken", population.curve.len())
            }
            Some(e) if e > worth => format!("more than the {worth:.3}× that {judge} can tell apart"),
            Some(_) => format!("less than the {worth:.3}× that {judge} can tell apart"),
        },
    );
    if let (Some(library), Some(best)) = (peer_us, best_us) {
        let says = if library < best { "the library is faster" } else { "the library is no faster" };
        row("a library's time", format!("{library:.2} µs"), format!("{says} than {best:.2} µs"));
    }
    let reachable = best_us.map(|best| best / expected.unwrap_or(1.0));
    let (what, why) = match (reachable, expected) {
        (None, _) => (What::UseALibrary, "no candidate passed its check and was timed".to_owned()),
        (Some(reachable), _) if peer_us.is_some_and(|library| library < reachable) => (
            What::UseALibrary,
            format!("it is faster than the {reachable:.2} µs that this search can be expected to reach"),
        ),
        (_, None) => (What::Continue, "too few candidates to judge by".to_owned()),
        (_, Some(e)) if e > worth => {
            (What::Continue, format!("another run of this size would gain about {e:.3}×"))
        }
        (_, Some(e)) => {
            let why = format!("another run of this size would gain about {e:.3}×, which {judge} cannot tell");
            (What::Stop, why)
        }
    };
    Advice { what, why, rows, floor_us, possible, expected }
}

#[cfg(test)]
mod tests {
    use kernels::select::Shape;
    use problem::Problem;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn roof(us: f64) -> Option<Roof> {
        Some(Roof { us, by: String::new() })
    }

    /// Draws whose logarithms fall off exponentially below 10, with mean distance `scale`.
    fn draws(count: usize, scale: f64, seed: u64) -> Vec<f64> {
        let mut rng = SmallRng::seed_from_u64(seed);
        (0..count).map(|_| (10.0 + scale * (1.0 - rng.random::<f64>()).ln()).exp()).collect()
    }

    /// For an exponential tail, doubling the draws gains on average what the estimate says.
    #[test]
    fn the_gain_of_twice_as_many_is_foreseen() {
        let (mut foreseen, mut came) = (0.0, 0.0);
        for seed in 0..200 {
            let all = draws(200, 0.1, seed);
            let least = |part: &[f64]| part.iter().copied().fold(f64::INFINITY, f64::min).ln();
            foreseen += expected_gain(&all[..100]).unwrap();
            came += least(&all[..100]) - least(&all);
        }
        assert!((foreseen / came - 1.0).abs() < 0.15, "{foreseen} {came}");
    }

    /// On a problem of 10 ns the launch is nearly all of the shortest time.
    #[test]
    fn the_shortest_time_of_a_gpu_has_a_launch() {
        let roof = of_gpu(0.0123, Gpu::named("H200"));
        assert_eq!(roof.by, "0.012 by its data sheet and 1.2 for the launch");
        assert!((roof.us - 1.2123).abs() < 1e-9, "{roof:?}");
        assert_eq!((digits(1.2123), digits(2270.4)), ("1.2".to_owned(), "2270".to_owned()));
    }

    #[test]
    fn a_search_that_found_all_is_flat() {
        let mut done: Vec<f64> = (0..30).map(|i| 20.0 - f64::from(i) * 0.3).collect();
        assert!(!is_flat(&done));
        done.extend((0..60).map(|i| 11.3 + f64::from(i % 7) * 0.001));
        assert!(is_flat(&done), "{:?}", expected_gain(&done));
        assert!(!is_flat(&draws(200, 0.3, 1)));
        assert_eq!(expected_gain(&[1.0; 5]), None);
    }

    #[test]
    fn the_table_decides() {
        let mut population = Population::new(Shape::of(&Problem::mission()), 0);
        assert_eq!(weigh(&population, None, None).what, What::UseALibrary, "nothing was timed");
        let new = ledger::NewCandidate {
            run: ledger::RunId(1),
            problem: population.problem,
            candidate: crate::Candidate::Cpu(cpu::CpuPlan::for_problem(&Problem::mission())),
            arm: ledger::Arm::Baseline,
            operator: "baseline".into(),
            parents: Vec::new(),
            changes: serde_json::json!({}),
        };
        let id = ledger::CandidateId(1);
        population.admit(id, &new);
        let time = super::super::member::Time { low: 9.0, us: 10.0, high: 11.0 };
        population.members.get_mut(&id).unwrap().time = Some(time);
        assert_eq!(weigh(&population, roof(2.0), None).what, What::Continue, "too few");
        population.curve = draws(100, 0.2, 3);
        let go_on = weigh(&population, roof(2.0), None);
        assert_eq!((go_on.what, go_on.possible), (What::Continue, Some(5.0)));
        assert_eq!(weigh(&population, roof(2.0), Some(4.0)).what, What::UseALibrary);
        assert_eq!(weigh(&population, roof(2.0), Some(12.0)).what, What::Continue);
        population.curve = vec![10.0; 100];
        let stop = weigh(&population, roof(2.0), None);
        assert_eq!(stop.what, What::Stop);
        // At the roofline no gain is possible, whatever the curve says.
        population.curve = draws(100, 0.2, 3);
        assert_eq!(weigh(&population, roof(10.0), None).what, What::Stop);
    }
}
