//! The gate's verdict and findings.

use std::fmt;

use emu::trace::CtaTrace;
use emu::{Counters, Hazard, Printed};
use judge::outputs::ErrorFigures;
use predict::Gpu;
use predict::resources::{Resources, occupancy};
use serde::{Deserialize, Serialize};

use super::{Coverage, Sample};
use crate::reference::Judgement;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// No hazard, and every output that was judged is within its tolerance. Without a problem or a reference,
    /// no output is judged.
    #[serde(alias = "proven")]
    Passed,
    /// Something could not be checked: an unsupported instruction, or a kernel that did not end in time.
    Incomplete,
    /// Wrong, for the reasons given.
    #[serde(alias = "refuted")]
    Failed,
}

impl Verdict {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Passed => "passed",
            Verdict::Incomplete => "incomplete",
            Verdict::Failed => "failed",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A hazard in the JSON of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HazardRow {
    /// `race`, `uninitialised_read`, ….
    pub kind: &'static str,
    /// Line of the PTX; 0 for the whole kernel.
    pub line: u32,
    /// Line of the other access.
    pub other_line: Option<u32>,
    /// The threads, as `CTA c warp w lane l`.
    pub threads: Vec<String>,
    /// The address as `name[offset]`.
    pub address: Option<String>,
    pub message: String,
}

impl From<&Hazard> for HazardRow {
    fn from(hazard: &Hazard) -> HazardRow {
        HazardRow {
            kind: hazard.kind.name(),
            line: hazard.line,
            other_line: hazard.other_line,
            threads: hazard.threads.iter().map(ToString::to_string).collect(),
            address: hazard.place.as_ref().map(ToString::to_string),
            message: hazard.message.clone(),
        }
    }
}

/// Counters and traces of one kernel in one run, for the time model.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub counters: Counters,
    pub traces: Vec<CtaTrace>,
}

impl From<emu::Report> for Recorded {
    fn from(report: emu::Report) -> Recorded {
        Recorded { counters: report.counters, traces: report.traces }
    }
}

/// All findings of the gate.
#[derive(Clone, Debug)]
pub struct CheckReport {
    pub verdict: Verdict,
    /// Why the verdict is not *passed*, in words; empty otherwise.
    pub reasons: Vec<String>,
    /// Every hazard, once for each (kind, line, other line).
    pub hazards: Vec<Hazard>,
    /// Findings that do not fail the check: see [`emu::HazardKind::fails`].
    pub notes: Vec<Hazard>,
    /// Questions that the runs left open, in words. They do not change the verdict.
    pub warnings: Vec<String>,
    /// The output of `printf` in the first run.
    pub printed: Vec<Printed>,
    /// Whether CTAs may communicate.
    pub(super) communicates: bool,
    /// The worst error over all runs; `None` when there was nothing to judge.
    pub error: Option<ErrorFigures>,
    /// How each output compares with its reference, by the worst run.
    pub judgements: Vec<Judgement>,
    /// The relative error that quantising the inputs causes. It is reported separately and does not change
    /// the verdict.
    pub quantisation: Option<f64>,
    /// Number of runs in the emulator.
    pub runs: u32,
    /// The instructions that the runs executed; `None` until a run has ended.
    pub coverage: Option<Coverage>,
    /// The counters of the first run, over all kernels.
    pub counters: Counters,
    /// The records of the first run, one for each kernel in launch order.
    pub recorded: Vec<Recorded>,
    /// Warp instructions issued over all runs.
    pub steps: u64,
    /// The CTAs that ran, if the check had a budget.
    pub sample: Option<Sample>,
    /// The buffers after the first run, if the settings keep them and that run ended.
    pub outputs: Vec<Vec<u8>>,
}

impl CheckReport {
    /// A report without any run.
    pub(super) fn empty() -> CheckReport {
        CheckReport {
            verdict: Verdict::Passed,
            reasons: Vec::new(),
            hazards: Vec::new(),
            notes: Vec::new(),
            warnings: Vec::new(),
            printed: Vec::new(),
            communicates: false,
            error: None,
            judgements: Vec::new(),
            quantisation: None,
            runs: 0,
            coverage: None,
            counters: Counters::default(),
            recorded: Vec::new(),
            steps: 0,
            sample: None,
            outputs: Vec::new(),
        }
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.verdict = Verdict::Failed;
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    /// Adds the comparison of an output with its reference.
    pub(super) fn judge(&mut self, judgement: Judgement) {
        judgement.reason().into_iter().for_each(|reason| self.fail(reason));
        let same = |known: &&mut Judgement| (&known.output, &known.by) == (&judgement.output, &judgement.by);
        match self.judgements.iter_mut().find(same) {
            Some(known) => *known = known.clone().worst(judgement),
            None => self.judgements.push(judgement),
        }
    }

    /// Whether any output was compared with a reference.
    pub fn is_judged(&self) -> bool {
        self.error.is_some() || !self.judgements.is_empty()
    }

    pub(super) fn leave_incomplete(&mut self, reason: String) {
        self.verdict = self.verdict.max(Verdict::Incomplete);
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    /// Makes the verdict incomplete when the runs executed less than this share of the instructions.
    pub fn require_coverage(&mut self, percent: f64) {
        let Some(coverage) = &self.coverage else { return };
        if coverage.percent() < percent {
            self.leave_incomplete(format!("{percent} % were asked for, and {coverage}"));
        }
    }

    /// Makes the verdict incomplete when there was no run.
    pub(super) fn close(&mut self) {
        if self.runs == 0 && self.verdict == Verdict::Passed {
            self.leave_incomplete("nothing was run".to_owned());
        }
    }

    pub(super) fn add_hazards(&mut self, hazards: Vec<Hazard>) {
        for hazard in hazards {
            let known =
                |h: &Hazard| (h.kind, h.line, h.other_line) == (hazard.kind, hazard.line, hazard.other_line);
            if self.hazards.iter().chain(&self.notes).any(known) {
                continue;
            }
            if hazard.fails() {
                self.fail(hazard.to_string());
                self.hazards.push(hazard);
            } else {
                self.notes.push(hazard);
            }
        }
    }

    pub(super) fn warn(&mut self, warning: String) {
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }

    /// Makes the verdict incomplete when an SM has too few registers for one CTA of the launch. `resources`
    /// are those of the assembled kernel. The emulator itself checks shared memory, whose size depends on the
    /// architecture.
    pub fn require_room(&mut self, launch: &ptx::Launch, resources: &Resources, gpu: &Gpu) {
        if let Err(error) = occupancy(gpu, launch.block.count(), resources.registers, 0) {
            self.leave_incomplete(format!("{} cannot run the launch: {error}", gpu.name));
        }
    }

    /// Merges the findings of another check, including its counters and traces if it recorded any.
    pub fn absorb(&mut self, other: CheckReport, name: &str) {
        self.verdict = self.verdict.max(other.verdict);
        self.reasons.extend(other.reasons.into_iter().map(|reason| format!("{name}: {reason}")));
        self.hazards.extend(other.hazards);
        self.notes.extend(other.notes);
        other.warnings.into_iter().for_each(|warning| self.warn(format!("{name}: {warning}")));
        self.error = match (self.error, other.error) {
            (Some(a), Some(b)) => Some(a.worst(b)),
            (a, b) => a.or(b),
        };
        self.judgements.extend(other.judgements);
        self.quantisation = self.quantisation.or(other.quantisation);
        self.runs += other.runs;
        self.steps += other.steps;
        if other.recorded.iter().any(|recorded| !recorded.traces.is_empty()) {
            self.counters = other.counters;
            self.coverage = other.coverage;
            self.recorded = other.recorded;
        }
    }

    /// The JSON that `check` prints; `findings` are the diagnosis.
    pub fn json(&self, findings: &serde_json::Value) -> serde_json::Value {
        serde_json::json!({
            "verdict": self.verdict,
            "reasons": self.reasons,
            "hazards": self.hazards.iter().map(HazardRow::from).collect::<Vec<_>>(),
            "notes": self.notes.iter().map(HazardRow::from).collect::<Vec<_>>(),
            "warnings": self.warnings,
            "judged": self.is_judged(),
            "judgements": self.judgements,
            "error": self.error,
            "quantisation": self.quantisation,
            "runs": self.runs,
            "budget": self.sample,
            "coverage": self.coverage.as_ref().map(Coverage::json),
            "findings": findings,
            "counters": self.counters,
        })
    }
}
