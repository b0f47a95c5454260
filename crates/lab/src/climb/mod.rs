//! `climb`: every version of the kernel on the reference problem. Each version is checked, timed or predicted, and diagnosed.
//! The times in the log of the original kernels stand beside, marked as quoted.

mod card;
mod record;

use std::time::Instant;

use cpu::CpuPlan;
use emu::model::{Gpu, machine};
use emu::resources::Ptxas;
use kernels::ladder::{Expected, Reason};
use kernels::{Arch, KernelError, Plan};
use problem::{DType, Problem};
use serde_json::{Value, json};

use crate::bench::{BenchError, Race, median, race_cpu};
use crate::gate::{GateError, HazardRow, Settings, Verdict, bind, check_kernel};
use crate::launchfile::Bound;
use crate::study::{Study, analyse};
pub use card::{Card, Measured, measure, rank_correlation};
pub use record::{Quoted, Record, Recorded};

/// One rung before it is climbed.
#[derive(Clone, Debug)]
pub struct Rung {
    /// Its name.
    pub name: String,
    /// What it is, in a sentence.
    pub story: String,
    /// The kernel on one head of the problem: what is run whole, recorded and shown. Heads are alike, so what one costs and
    /// what can go wrong in it stand for all.
    pub head: Bound,
    /// The kernel on small problems with several heads and batches: what the gate's inputs and schedules are tried on.
    pub small: Vec<(&'static str, Bound)>,
    /// The kernel on the whole problem, whose time is predicted.
    pub whole: Bound,
    /// The verdict it must get.
    pub expected: Verdict,
    /// For a rung that must fail: a word of the right reason.
    pub reason: Option<String>,
    /// Time that the seeds give.
    pub quoted: Option<Quoted>,
    /// What was forecast for it at the time, µs.
    pub forecast_us: Option<(f64, f64)>,
}

/// One rung after.
pub struct Climbed {
    /// The rung.
    pub rung: Rung,
    /// Everything found.
    pub study: Study,
    /// Predicted time on an L4 of what the quoted time is of, µs.
    pub as_quoted_us: Option<f64>,
    /// Wall time that the study took, s.
    pub seconds: f64,
    /// The rung on this machine's GPU, where there is one.
    pub measured: Option<Measured>,
}

impl Rung {
    /// Time that the seeds give, µs on an L4.
    pub fn quoted_us(&self) -> Option<f64> {
        self.quoted.as_ref().map(|q| q.us)
    }
}

impl Climbed {
    /// Whether the verdict is the expected one, for the expected reason.
    pub fn as_expected(&self) -> bool {
        let reason = self.rung.reason.as_deref();
        self.study.check.verdict == self.rung.expected
            && reason.is_none_or(|word| self.study.check.reasons.iter().any(|r| r.contains(word)))
    }

    /// Measured time where there is one, else the predicted one on the first machine, µs.
    pub fn us(&self) -> Option<f64> {
        self.measured_us().or(self.predicted_us())
    }

    /// Predicted time on the first machine, µs.
    pub fn predicted_us(&self) -> Option<f64> {
        self.study.prediction().map(|p| p.us)
    }

    /// Measured time, µs.
    pub fn measured_us(&self) -> Option<f64> {
        self.measured.as_ref().and_then(Measured::us)
    }

    /// The forecast and its outcome, µs, where there are both.
    pub fn forecast_and_outcome(&self) -> Option<(f64, f64)> {
        self.predicted_us().zip(self.measured_us())
    }

    /// The rung in the JSON of `climb`.
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

/// The whole climb.
pub struct Climb {
    /// The problem.
    pub problem: Problem,
    /// Machines predicted for; the first is the one of the table.
    pub machines: Vec<Gpu>,
    /// The rungs in order.
    pub rungs: Vec<Climbed>,
    /// The native CPU kernels on the same problem, per dtype.
    pub cpu: Vec<Race>,
    /// Where registers come from.
    pub ptxas: Option<String>,
    /// The GPU that the rungs were measured on.
    pub card: Option<String>,
}

impl Climb {
    /// One object, as `climb --json` prints it.
    pub fn json(&self) -> Value {
        let cpu = self.cpu.iter().map(|race| {
            json!({
                "name": format!("cpu {}", race.problem.dtype), "verdict": "passed", "hazards": [],
                "max_diff": race.first().error.map(|e| e.max_diff), "us": race.first().us(), "us_kind": "measured",
                "bound": Value::Null, "findings": [],
            })
        });
        json!({
            "problem": crate::bench::problem_json(&self.problem),
            "device": self.machines.first().map(|m| m.name),
            "ptxas": self.ptxas,
            "card": self.card,
            "forecast": self.score(),
            "record": self.record(),
            "rungs": self.rungs.iter().map(Climbed::json).chain(cpu).collect::<Vec<_>>(),
        })
    }

    /// How good the forecasts were: median relative error, rank correlation, number of rungs. `None` without a card.
    pub fn score(&self) -> Option<Score> {
        let pairs: Vec<(f64, f64)> = self.rungs.iter().filter_map(Climbed::forecast_and_outcome).collect();
        (!pairs.is_empty()).then(|| Score::of(&pairs))
    }

    /// Rungs whose verdict or reason is not the expected one.
    pub fn surprises(&self) -> Vec<&str> {
        self.rungs.iter().filter(|r| !r.as_expected()).map(|r| r.rung.name.as_str()).collect()
    }
}

/// How good forecasts were.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Score {
    /// Rungs that were both predicted and measured.
    pub rungs: usize,
    /// Median of |predicted / measured − 1|.
    pub median_error: f64,
    /// Spearman's rank correlation.
    pub spearman: f64,
}

impl Score {
    /// Of pairs of a forecast and its outcome.
    pub fn of(pairs: &[(f64, f64)]) -> Score {
        let errors: Vec<f64> = pairs.iter().map(|(predicted, us)| (predicted / us - 1.0).abs()).collect();
        Score { rungs: pairs.len(), median_error: median(&errors), spearman: rank_correlation(pairs) }
    }
}

/// Why a climb ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClimbError {
    /// A rung cannot even be launched.
    #[error("version {rung}: {source}")]
    Gate {
        /// Its name.
        rung: String,
        /// Why.
        source: GateError,
    },
    /// The CPU kernels failed.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The oracle refused a rung's problem.
    #[error("measuring: {0}")]
    Measure(GateError),
}

/// What is climbed, and how.
pub struct Options<'a> {
    /// The problem.
    pub problem: Problem,
    /// The gate's settings.
    pub settings: Settings,
    /// ptxas, where present.
    pub ptxas: Option<&'a Ptxas>,
    /// Seconds for each CPU measurement.
    pub cpu_seconds: f64,
    /// Machines to predict for, the one of the table first.
    pub machines: Vec<Gpu>,
}

impl Options<'_> {
    /// The machines to predict for: the device itself where the table has it, an L4, on which the seeds were timed, and an
    /// H200.
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

/// Climbs, and measures every rung where there is a card; `progress` is told the name of each rung before and the result
/// after.
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
    for dtype in DType::ALL {
        progress(Progress::Start("cpu"));
        let problem = Problem { dtype, ..options.problem.clone() };
        cpu.push(race_cpu(&problem, &CpuPlan::for_problem(&problem), None, options.cpu_seconds)?);
    }
    let ptxas = options.ptxas.map(|p| p.version().to_owned());
    Ok(Climb { problem: options.problem.clone(), machines, rungs: climbed, cpu, ptxas, card })
}

/// All forecasts stand by now; here come the outcomes.
fn measure_all<C: Card>(card: &mut C, climbed: &mut [Climbed]) -> Result<(), GateError> {
    let kernels: Vec<&Bound> = climbed.iter().map(|c| &c.rung.whole).collect();
    let measured = measure(card, &kernels)?;
    climbed.iter_mut().zip(measured).for_each(|(climbed, measured)| climbed.measured = Some(measured));
    Ok(())
}

/// Runs a whole head once for counters and traces, checks the small problems under every style and schedule, then predicts
/// the time of all heads.
fn examine(rung: &Rung, options: &Options, machines: &[Gpu]) -> Result<Study, GateError> {
    let mut check = check_kernel(&rung.head, &options.settings.first_run())?;
    let without_traces = Settings { traced_ctas: 0, ..options.settings.clone() };
    for (name, bound) in &rung.small {
        if check.verdict == Verdict::Passed {
            check.absorb(check_kernel(bound, &without_traces)?, name);
        }
    }
    Ok(analyse(rung.head.clone(), &rung.whole.kernel.launch, None, check, machines, options.ptxas))
}

/// What a climb tells while it goes on.
pub enum Progress<'a> {
    /// A rung begins.
    Start(&'a str),
    /// A rung is done.
    Done(&'a Climbed),
}

/// All rungs on the problem: the seeds' story, then the fused family, where their option C leads.
///
/// # Errors
/// When a kernel cannot be made for the problem.
pub fn rungs(problem: &Problem, arch: &Arch) -> Result<Vec<Rung>, KernelError> {
    let seeds = kernels::ladder::rungs().into_iter().map(|seed| {
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
            ..rung(seed.name, seed.story, &Plan::Ladder { rung: seed.plan }, &problem, arch)?
        };
        Ok(rung)
    });
    let fused = fused(problem, arch);
    seeds.chain(std::iter::once(fused)).collect()
}

/// The fused family's kernel for the problem.
///
/// # Errors
/// When it cannot be made.
pub fn fused(problem: &Problem, arch: &Arch) -> Result<Rung, KernelError> {
    let story = "both products on tensor cores, the online softmax in registers, copies in stages";
    rung("fused", story, &Plan::default_for(problem, arch)?, problem, arch)
}

fn rung(name: &str, story: &str, plan: &Plan, problem: &Problem, arch: &Arch) -> Result<Rung, KernelError> {
    let like = |batch: usize, heads: usize, seq: usize| Problem {
        band: problem.band,
        score: problem.score,
        ..Problem::new(batch, heads, seq, problem.head_dim, problem.dtype)
    };
    let bound = |problem: &Problem| bind(plan, problem, arch);
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
