//! The climb studies the rungs of the ladder on the reference problem, one after the other. Each rung is
//! checked, timed or predicted, and diagnosed. The published times of the original kernels are shown with
//! them, marked as quoted.

mod card;
pub mod ladder;
mod record;

use std::time::Instant;

use cpu::CpuPlan;
use kernels::{Arch, Family, Plan};
use predict::resources::Ptxas;
use predict::{Gpu, machine};
use problem::{DType, DTypes, Problem};
use serde_json::{Value, json};

use bench::{BenchError, Race, race_cpu};
pub use card::{Card, Measured, measure};
use check::forecast::Fit;
use check::gate::{GateError, HazardRow, Settings, Verdict, bind, check_kernel};
use check::launchfile::Bound;
use check::study::{Study, analyse};
use ladder::{Expected, Reason, RungError};
pub use record::{Quoted, Record, Recorded};

/// One rung before it is studied.
#[derive(Clone, Debug)]
pub struct Rung {
    pub name: String,
    /// A description in one sentence.
    pub story: String,
    /// The kernel on one head of the problem, which is run completely, recorded and shown. All heads have
    /// equal cost and equal possible errors, so one represents all.
    pub head: Bound,
    /// The kernel on small problems with several heads and batches, for the gate's styles and schedules.
    pub small: Vec<(&'static str, Bound)>,
    /// The kernel on the whole problem, for the predicted time.
    pub whole: Bound,
    pub expected: Verdict,
    /// For a rung that must fail: a word that the reason must contain.
    pub reason: Option<String>,
    /// The time stated by the original kernels.
    pub quoted: Option<Quoted>,
    /// The forecast that was published with the quoted time, µs.
    pub forecast_us: Option<(f64, f64)>,
}

/// One rung with its results.
pub struct Climbed {
    pub rung: Rung,
    pub study: Study,
    /// Predicted time on an L4 for the quoted problem, µs.
    pub as_quoted_us: Option<f64>,
    /// Duration of the study, s.
    pub seconds: f64,
    /// The measurements on this machine's GPU, if there is one.
    pub measured: Option<Measured>,
}

impl Rung {
    /// The element types of the rung's inputs and output, in a climb of `problem`.
    pub fn dtypes(&self, problem: &Problem) -> DTypes {
        self.whole.problem.as_ref().map_or(problem.dtypes, |own| own.dtypes)
    }

    /// The time stated by the original kernels, µs on an L4.
    pub fn quoted_us(&self) -> Option<f64> {
        self.quoted.as_ref().map(|q| q.us)
    }
}

impl Climbed {
    /// Whether the verdict and its reason are the expected ones.
    pub fn as_expected(&self) -> bool {
        let reason = self.rung.reason.as_deref();
        self.study.check.verdict == self.rung.expected
            && reason.is_none_or(|word| self.study.check.reasons.iter().any(|r| r.contains(word)))
    }

    /// The measured time, else the predicted one on the first machine, µs.
    pub fn us(&self) -> Option<f64> {
        self.measured_us().or(self.predicted_us())
    }

    pub fn predicted_us(&self) -> Option<f64> {
        self.study.prediction().map(|p| p.us)
    }

    pub fn measured_us(&self) -> Option<f64> {
        self.measured.as_ref().and_then(Measured::us)
    }

    /// The predicted and the measured time, µs, if both exist.
    pub fn forecast_and_outcome(&self) -> Option<(f64, f64)> {
        self.predicted_us().zip(self.measured_us())
    }

    pub fn json(&self) -> Value {
        let (check, prediction) = (&self.study.check, self.study.prediction());
        let machines = self.study.predictions.iter().filter_map(|p| p.as_ref().ok());
        json!({
            "name": self.rung.name,
            "story": self.rung.story,
            "verdict": check.verdict,
            "as_expected": self.as_expected(),
            "reasons": check.reasons,
            "hazards": check.hazards.iter().map(HazardRow::from).collect::<Vec<_>>(),
            "max_diff": check.error.map(|e| e.max_diff),
            "error": check.error,
            "quantisation": check.quantisation,
            "us": self.us(),
            "us_kind": if self.measured_us().is_some() { "measured" } else { "predicted" },
            "us_predicted": self.predicted_us(),
            "measured": self.measured,
            "us_on": machines.map(|p| (p.machine.to_owned(), json!([p.us_low, p.us, p.us_high]))).collect::<serde_json::Map<_, _>>(),
            "us_quoted": self.rung.quoted_us(),
            "quoted_batch": self.rung.quoted.as_ref().map(|q| q.batch),
            "us_predicted_as_quoted": self.as_quoted_us,
            "us_forecast": self.rung.forecast_us,
            "bound": prediction.map(|p| p.bound),
            "split": prediction.map(|p| p.split.clone()),
            "findings": self.study.findings,
            "resources": self.study.resources,
            "seconds": self.seconds,
        })
    }
}

/// The results of a whole climb.
pub struct Climb {
    pub problem: Problem,
    /// Machines with predicted times. The table shows the first one.
    pub machines: Vec<Gpu>,
    pub rungs: Vec<Climbed>,
    /// The native CPU kernels on the same problem, for each dtype.
    pub cpu: Vec<Race>,
    /// The source of the register counts.
    pub ptxas: Option<String>,
    /// The GPU on which the rungs were measured.
    pub card: Option<String>,
}

impl Climb {
    /// The object that `climb --json` prints.
    pub fn json(&self) -> Value {
        let cpu = self.cpu.iter().map(|race| {
            json!({
                "name": format!("cpu {}", race.problem.dtypes), "verdict": "passed", "hazards": [],
                "max_diff": race.first().error.map(|e| e.max_diff), "us": race.first().us(), "us_kind": "measured",
                "bound": Value::Null, "findings": [],
            })
        });
        json!({
            "problem": bench::problem_json(&self.problem),
            "device": self.machines.first().map(|m| m.name),
            "ptxas": self.ptxas,
            "card": self.card,
            "forecast": self.score(),
            "record": self.record(),
            "rungs": self.rungs.iter().map(Climbed::json).chain(cpu).collect::<Vec<_>>(),
        })
    }

    /// The quality of the forecasts over the measured rungs; `None` without a device.
    pub fn score(&self) -> Option<Score> {
        let pairs: Vec<(f64, f64)> = self.rungs.iter().filter_map(Climbed::forecast_and_outcome).collect();
        (!pairs.is_empty()).then(|| Score::of(&pairs))
    }

    /// Rungs whose verdict or reason is not the expected one.
    pub fn surprises(&self) -> Vec<&str> {
        self.rungs.iter().filter(|r| !r.as_expected()).map(|r| r.rung.name.as_str()).collect()
    }
}

/// The quality of forecasts.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Score {
    /// Number of rungs that were both predicted and measured.
    pub rungs: usize,
    /// Median of |predicted / measured − 1|.
    pub median_error: f64,
    /// Spearman's rank correlation.
    pub spearman: f64,
}

impl Score {
    /// Computes the score from pairs of a forecast and a measured time.
    pub fn of(pairs: &[(f64, f64)]) -> Score {
        let Fit { count, spearman, median_error } = Fit::of(pairs);
        Score { rungs: count, median_error, spearman }
    }
}

/// Why a climb ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClimbError {
    /// A rung cannot be launched.
    #[error("version {rung}: {source}")]
    Gate { rung: String, source: GateError },
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The oracle rejects a rung's problem.
    #[error("measuring: {0}")]
    Measure(GateError),
}

/// What to climb, and with which settings.
pub struct Options<'a> {
    pub problem: Problem,
    pub settings: Settings,
    /// ptxas, if present.
    pub ptxas: Option<&'a Ptxas>,
    /// Duration of each CPU measurement, s. `None` leaves the CPU out.
    pub cpu_seconds: Option<f64>,
    /// Machines to predict for. The table shows the first one.
    pub machines: Vec<Gpu>,
}

impl Options<'_> {
    /// The machines to predict for: the device itself if the time model has it, an L4, on which the original
    /// kernels were timed, and an H200.
    pub fn machines_for(device: Option<&str>) -> Vec<Gpu> {
        let known = device.and_then(Gpu::of_device);
        let mut machines = vec![machine::L4, machine::H200];
        if let Some(known) = known {
            machines.retain(|m| m.name != known.name);
            machines.insert(0, known.clone());
        }
        machines
    }
}

/// Runs the climb and measures every rung if there is a device. `progress` gets the name of each rung before
/// its study and the result after it.
///
/// # Errors
/// When a rung cannot be launched or the CPU kernels fail.
pub fn climb<C: Card>(
    options: &Options,
    rungs: Vec<Rung>,
    card: Option<&mut C>,
    mut progress: impl FnMut(Progress),
) -> Result<Climb, ClimbError> {
    let machines = options.machines.clone();
    let mut climbed = Vec::with_capacity(rungs.len());
    for rung in rungs {
        progress(Progress::Start(&rung.name));
        let start = Instant::now();
        let study = examine(&rung, options, &machines)
            .map_err(|source| ClimbError::Gate { rung: rung.name.clone(), source })?;
        let as_quoted_us = record::as_quoted(&rung, &study);
        let seconds = start.elapsed().as_secs_f64();
        climbed.push(Climbed { rung, study, as_quoted_us, seconds, measured: None });
        if let Some(last) = climbed.last() {
            progress(Progress::Done(last));
        }
    }
    let card = card.map(|card| {
        progress(Progress::Start(card.name()));
        measure_all(card, &mut climbed).map(|()| card.name().to_owned())
    });
    let card = card.transpose().map_err(ClimbError::Measure)?;
    let mut cpu = Vec::new();
    if let Some(seconds) = options.cpu_seconds {
        for dtype in DType::OUTPUTS {
            progress(Progress::Start("cpu"));
            let problem = Problem { dtypes: dtype.into(), ..options.problem.clone() };
            cpu.push(race_cpu(&problem, &CpuPlan::for_problem(&problem), None, seconds)?);
        }
    }
    let ptxas = options.ptxas.map(|p| p.version().to_owned());
    Ok(Climb { problem: options.problem.clone(), machines, rungs: climbed, cpu, ptxas, card })
}

/// Measures all rungs. Their forecasts were made before.
fn measure_all<C: Card>(card: &mut C, climbed: &mut [Climbed]) -> Result<(), GateError> {
    let kernels: Vec<&Bound> = climbed.iter().map(|c| &c.rung.whole).collect();
    let measured = measure(card, &kernels)?;
    climbed.iter_mut().zip(measured).for_each(|(climbed, measured)| climbed.measured = Some(measured));
    Ok(())
}

/// Checks the small problems under every style and schedule, runs one whole head for counters and traces, and
/// predicts the time of all heads.
fn examine(rung: &Rung, options: &Options, machines: &[Gpu]) -> Result<Study, GateError> {
    let mut check = check_kernel(&rung.head, &options.settings.first_run())?;
    let without_traces = Settings { traced_ctas: 0, ..options.settings.clone() };
    for (name, bound) in &rung.small {
        if check.verdict == Verdict::Passed {
            check.absorb(check_kernel(bound, &without_traces)?, name);
        }
    }
    Ok(analyse(rung.head.clone(), Some(&rung.whole), None, check, machines, options.ptxas))
}

/// A report on the progress of a climb.
pub enum Progress<'a> {
    Start(&'a str),
    Done(&'a Climbed),
}

/// All rungs on the problem: the engineer's log of kernels, then the fused family, to which option C of that
/// log leads, and on architectures with 8-bit products the fused kernel of 8-bit inputs.
///
/// # Errors
/// When a kernel cannot be emitted for the problem.
pub fn rungs(problem: &Problem, arch: &Arch) -> Result<Vec<Rung>, RungError> {
    let seeds = ladder::rungs().into_iter().map(|seed| {
        let quoted = Quoted::of(&seed, problem, arch)?;
        let problem = problem.clone().with_band(seed.mask);
        let (expected, reason) = match seed.expected {
            Expected::Passed => (Verdict::Passed, None),
            Expected::Failed(Reason::Race) => (Verdict::Failed, Some("race at".to_owned())),
        };
        let rung = Rung {
            expected,
            reason,
            quoted,
            forecast_us: seed.forecast_us,
            ..rung(seed.name, seed.story, &problem, |problem| seed.kernel.bind(problem, arch))?
        };
        Ok(rung)
    });
    let fused = fused(problem, arch);
    seeds.chain(std::iter::once(fused)).chain(fp8_mma(problem, arch)).collect()
}

/// The rung of the fused family's kernel for the problem.
///
/// # Errors
/// When the kernel cannot be emitted.
pub fn fused(problem: &Problem, arch: &Arch) -> Result<Rung, RungError> {
    let story = "both products on tensor cores, the online softmax in registers, copies in stages";
    let plan = Plan::default_for(problem, arch)?;
    rung("fused", story, problem, |problem| Ok(bind(&plan, problem, arch)?))
}

/// The rung of the family `mma` on the problem with e4m3 inputs, for comparison with the log's kernels that
/// store 8 bits and compute in f32; `None` on an architecture without 8-bit products. The oracle judges it on
/// the dequantised inputs.
pub fn fp8_mma(problem: &Problem, arch: &Arch) -> Option<Result<Rung, RungError>> {
    let story = "8-bit products on tensor cores; the log's 8-bit storage with scalar arithmetic took 2047 µs";
    let dtypes = DTypes { out: problem.dtypes.out, ..DType::E4m3.into() };
    let problem = problem.clone().with_dtypes(dtypes);
    let of = || {
        let plan = Family::Mma.default_for(&problem, arch)?;
        rung("fp8_mma", story, &problem, |problem| Ok(bind(&plan, problem, arch)?))
    };
    arch.multiplies_fp8().then(of)
}

/// The rung of the kernel that `bound` gives for a problem.
fn rung(
    name: &str,
    story: &str,
    problem: &Problem,
    bound: impl Fn(&Problem) -> Result<Bound, RungError>,
) -> Result<Rung, RungError> {
    let like = |batch: usize, heads: usize, seq: usize| Problem {
        band: problem.band,
        score: problem.score,
        ..Problem::new(batch, heads, seq, problem.head_dim, problem.dtypes)
    };
    Ok(Rung {
        name: name.to_owned(),
        story: story.to_owned(),
        head: bound(&like(1, 1, problem.seq_q))?,
        small: vec![
            ("two batches of one tile", bound(&like(2, 1, 64))?),
            ("two heads", bound(&like(1, 2, 128))?),
        ],
        whole: bound(problem)?,
        expected: Verdict::Passed,
        reason: None,
        quoted: None,
        forecast_us: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bench::gpu::Workbench;

    /// The last rung of an L4, on 8-bit inputs, passes the check and has a predicted time.
    #[test]
    fn the_rung_on_8_bit_inputs_passes() {
        let problem = Problem::mission();
        assert!(fp8_mma(&problem, &Arch::SM_80).is_none());
        let rung = fp8_mma(&problem, &Arch::SM_89).unwrap().unwrap();
        assert_eq!(rung.dtypes(&problem).to_string(), "e4m3:f16");
        let ptxas = Ptxas::find().ok();
        let options = Options {
            settings: Settings::quick(),
            ptxas: ptxas.as_ref(),
            cpu_seconds: None,
            machines: Options::machines_for(None),
            problem: problem.clone(),
        };
        let fused = fused(&problem, &Arch::SM_89).unwrap();
        let climb = climb::<Workbench>(&options, vec![fused, rung], None, |_| ()).unwrap();
        assert_eq!(climb.surprises(), [""; 0], "{:?}", climb.rungs[1].study.check.reasons);
        for climbed in &climb.rungs {
            let (check, prediction) = (&climbed.study.check, climbed.study.prediction().unwrap());
            let error = check.error.unwrap();
            let causes: Vec<&str> =
                climbed.study.findings.iter().map(|finding| finding.name.name()).collect();
            println!(
                "{} {:.6} {} {:.2} µs, {}, {causes:?}",
                climbed.rung.name,
                error.max_diff,
                error.brief(),
                prediction.us,
                prediction.bound.name(),
            );
        }
        let [fused, fp8] = [0, 1].map(|i| climb.rungs[i].predicted_us().unwrap());
        assert!(fp8 < 1.2 * fused, "{fp8} µs, in f16 {fused} µs");
    }
}
