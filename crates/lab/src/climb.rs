//! The main job: the mission problem climbed rung by rung. Each rung is proven or refuted, timed or predicted, and its root
//! cause named; the seeds' own figures stand beside, marked as quoted.

use std::time::Instant;

use cpu::CpuPlan;
use emu::model::{Gpu, machine};
use emu::resources::Ptxas;
use kernels::ladder::{Expected, Reason};
use kernels::{Arch, KernelError, Plan};
use problem::{DType, Problem, ProblemError};
use serde_json::{Value, json};

use crate::bench::{BenchError, Race, race_cpu};
use crate::gate::{GateError, HazardRow, Settings, Verdict, prove};
use crate::launchfile::Bound;
use crate::study::{Study, analyse};

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
    /// For a rung that must be refuted: a word of the right reason.
    pub reason: Option<String>,
    /// Time that the seeds give, µs on an L4.
    pub quoted_us: Option<f64>,
    /// What was forecast for it at the time, µs.
    pub forecast_us: Option<(f64, f64)>,
}

/// One rung after.
pub struct Climbed {
    /// The rung.
    pub rung: Rung,
    /// Everything found.
    pub study: Study,
    /// Wall time that the study took, s.
    pub seconds: f64,
}

impl Climbed {
    /// Whether the verdict is the expected one, for the expected reason.
    pub fn as_expected(&self) -> bool {
        let reason = self.rung.reason.as_deref();
        self.study.proof.verdict == self.rung.expected
            && reason.is_none_or(|word| self.study.proof.reasons.iter().any(|r| r.contains(word)))
    }

    /// Predicted time on the first machine, µs.
    pub fn us(&self) -> Option<f64> {
        self.study.prediction().map(|p| p.us)
    }

    /// The rung in the JSON of `climb`.
    pub fn json(&self) -> Value {
        let (proof, prediction) = (&self.study.proof, self.study.prediction());
        let machines = self.study.predictions.iter().filter_map(|p| p.as_ref().ok());
        json!({
            "name": self.rung.name,
            "story": self.rung.story,
            "verdict": proof.verdict,
            "as_expected": self.as_expected(),
            "reasons": proof.reasons,
            "hazards": proof.hazards.iter().map(HazardRow::from).collect::<Vec<_>>(),
            "max_diff": proof.error.map(|e| e.max_diff),
            "error": proof.error,
            "quantisation": proof.quantisation,
            "us": self.us(),
            "us_kind": "predicted",
            "us_on": machines.map(|p| (p.machine.to_owned(), json!([p.us_low, p.us, p.us_high]))).collect::<serde_json::Map<_, _>>(),
            "us_quoted": self.rung.quoted_us,
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
}

impl Climb {
    /// One object, as `climb --json` prints it.
    pub fn json(&self) -> Value {
        let cpu = self.cpu.iter().map(|race| {
            json!({
                "name": format!("cpu {}", race.problem.dtype), "verdict": "proven", "hazards": [],
                "max_diff": race.first().error.map(|e| e.max_diff), "us": race.first().us(), "us_kind": "measured",
                "bound": Value::Null, "findings": [],
            })
        });
        json!({
            "problem": crate::bench::problem_json(&self.problem),
            "device": self.machines.first().map(|m| m.name),
            "ptxas": self.ptxas,
            "rungs": self.rungs.iter().map(Climbed::json).chain(cpu).collect::<Vec<_>>(),
        })
    }

    /// Rungs whose verdict or reason is not the expected one.
    pub fn surprises(&self) -> Vec<&str> {
        self.rungs.iter().filter(|r| !r.as_expected()).map(|r| r.rung.name.as_str()).collect()
    }
}

/// Why a climb ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClimbError {
    /// A rung cannot even be launched.
    #[error("rung {rung}: {source}")]
    Gate {
        /// Its name.
        rung: String,
        /// Why.
        source: GateError,
    },
    /// The CPU kernels failed.
    #[error(transparent)]
    Bench(#[from] BenchError),
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
}

/// Climbs; `progress` is told the name of each rung before and the result after.
///
/// # Errors
/// When a rung cannot be launched or the CPU kernels fail.
pub fn climb(
    options: &Options,
    rungs: Vec<Rung>,
    mut progress: impl FnMut(Progress),
) -> Result<Climb, ClimbError> {
    let machines = vec![machine::L4, machine::H200];
    let mut climbed = Vec::with_capacity(rungs.len());
    for rung in rungs {
        progress(Progress::Start(&rung.name));
        let start = Instant::now();
        let study = examine(&rung, options, &machines)
            .map_err(|source| ClimbError::Gate { rung: rung.name.clone(), source })?;
        climbed.push(Climbed { rung, study, seconds: start.elapsed().as_secs_f64() });
        if let Some(last) = climbed.last() {
            progress(Progress::Done(last));
        }
    }
    let mut cpu = Vec::new();
    for dtype in DType::ALL {
        progress(Progress::Start("cpu"));
        let problem = Problem { dtype, ..options.problem.clone() };
        cpu.push(race_cpu(&problem, &CpuPlan::for_problem(&problem), None, options.cpu_seconds)?);
    }
    let ptxas = options.ptxas.map(|p| p.version().to_owned());
    Ok(Climb { problem: options.problem.clone(), machines, rungs: climbed, cpu, ptxas })
}

/// Proof on the small problems under every style and schedule; one run of a whole head for counters and traces; then the
/// time of all heads.
fn examine(rung: &Rung, options: &Options, machines: &[Gpu]) -> Result<Study, GateError> {
    let mut proof = prove(&rung.head, &options.settings.first_run())?;
    let without_traces = Settings { traced_ctas: 0, ..options.settings.clone() };
    for (name, bound) in &rung.small {
        if proof.verdict == Verdict::Proven {
            proof.absorb(prove(bound, &without_traces)?, name);
        }
    }
    Ok(analyse(rung.head.clone(), &rung.whole.kernel.launch, None, proof, machines, options.ptxas))
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
        let problem = problem.clone().with_mask(seed.mask);
        let (expected, reason) = match seed.expected {
            Expected::Proven => (Verdict::Proven, None),
            Expected::Refuted(Reason::Race) => (Verdict::Refuted, Some("race at".to_owned())),
        };
        let rung = Rung {
            expected,
            reason,
            quoted_us: seed.quoted_us,
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
        mask: problem.mask,
        scale: problem.scale,
        ..Problem::new(batch, heads, seq, problem.head_dim, problem.dtype)
    };
    let bound = |problem: &Problem| bound(plan, problem, arch);
    Ok(Rung {
        name: name.to_owned(),
        story: story.to_owned(),
        head: bound(&like(1, 1, problem.seq_q))?,
        small: vec![
            ("two batches of one tile", bound(&like(2, 1, 64))?),
            ("two heads", bound(&like(1, 2, 128))?),
        ],
        whole: bound(problem)?,
        expected: Verdict::Proven,
        reason: None,
        quoted_us: None,
        forecast_us: None,
    })
}

fn bound(plan: &Plan, problem: &Problem, arch: &Arch) -> Result<Bound, KernelError> {
    let kernel = kernels::emit(problem, plan, arch)?;
    // Every family names its buffers as `emit` promises.
    Bound::of_kernel(kernel, problem).map_err(|_| {
        let accepted = "q, k, v, out, lse, q_codes, k_codes, v_codes, scales";
        ProblemError::UnknownName { what: "buffer of the kernel", value: plan.family().to_owned(), accepted }
            .into()
    })
}
