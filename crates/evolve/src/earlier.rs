//! Uses results of earlier runs in the ledger for kernels of this run, so that no kernel is checked or timed
//! twice.
//!
//! A verdict holds wherever the same kernel computes the same problem. A time does not, because clocks,
//! temperature and other load differ. Instead of the time, the ratio to the baseline's kernel within the
//! earlier run is used: this ratio and the baseline's time in this run give the time for ranking. Races are
//! always run again.

use std::collections::HashMap;

use serde::Serialize;

use super::engine::Evolution;
use super::error::EvolveError;
use super::member::Member;
use super::population::Population;
use super::task::{Finding, Outcome, Stage, Task};
use bench::SpeedVerdict;
use check::gate::Verdict;
use ledger::{
    Against, CandidateId, CheckFact, EarlierKernel, Ledger, LedgerError, MeasurementFact, Reason, Rejection,
    Trial,
};

/// The beginning of the text that states the origin of a result.
const TAKEN_OVER: &str = "taken over from";

/// The kernels of earlier runs for one problem.
#[derive(Clone, Debug, Default)]
pub(super) struct Earlier {
    kernels: Vec<EarlierKernel>,
    /// Indices of equal kernels by hash, the oldest first.
    by_hash: HashMap<String, Vec<usize>>,
}

/// A time of an earlier run.
struct Timed<'a> {
    kernel: &'a EarlierKernel,
    /// Speed-up over the baseline's kernel in that run: low, expected, high.
    ratio: [f64; 3],
}

impl Earlier {
    pub(super) fn new(kernels: Vec<EarlierKernel>) -> Earlier {
        let mut by_hash: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, kernel) in kernels.iter().enumerate() {
            for hash in &kernel.hashes {
                by_hash.entry(hash.clone()).or_default().push(place);
            }
        }
        Earlier { kernels, by_hash }
    }

    /// Equal kernels in earlier runs.
    fn same<'a>(&'a self, member: &'a Member) -> impl Iterator<Item = &'a EarlierKernel> {
        let hashes =
            member.screening.iter().flat_map(|s| [Some(&s.ptx_hash), s.sass_hash.as_ref()]).flatten();
        hashes
            .filter_map(|hash| self.by_hash.get(hash))
            .flatten()
            .filter_map(|&place| self.kernels.get(place))
    }

    fn failed<'a>(&'a self, member: &'a Member) -> Option<(&'a EarlierKernel, &'a (Reason, String))> {
        self.same(member).find_map(|kernel| Some((kernel, kernel.failed.as_ref()?)))
    }

    fn passed<'a>(&'a self, member: &'a Member) -> Option<&'a EarlierKernel> {
        self.same(member).find(|kernel| kernel.passed)
    }

    /// Whether there is a time that may be used once the baseline has its own time.
    pub(super) fn has_time(&self, member: &Member) -> bool {
        self.same(member).any(|kernel| kernel.us.is_some())
    }

    /// The time from the latest run that timed both the candidate's and the baseline's kernel.
    fn time<'a>(&'a self, member: &'a Member, baseline: &'a Member) -> Option<Timed<'a>> {
        let of = |kernel: &'a EarlierKernel| {
            let [low, us, high] = kernel.us?;
            let beside = self.same(baseline).filter(|other| other.run == kernel.run);
            let [_, theirs, _] = beside.filter_map(|other| other.us).next()?;
            Some(Timed { kernel, ratio: [theirs / high, theirs / us, theirs / low] })
        };
        self.same(member).filter_map(of).max_by_key(|timed| timed.kernel.run)
    }
}

/// Whether an outcome comes from an earlier run.
pub(super) fn is_taken_over(outcome: &Outcome) -> bool {
    match &outcome.finding {
        Finding::Timed { measurement, .. } => measurement.samples.is_empty(),
        Finding::Judged(check) => check.reasons.first().is_some_and(|reason| reason.starts_with(TAKEN_OVER)),
        Finding::Rejected(rejection) => rejection.detail.starts_with(TAKEN_OVER),
        Finding::Screened { .. } => false,
    }
}

fn words(kernel: &EarlierKernel) -> String {
    format!("{TAKEN_OVER} candidate {} of run {}", kernel.candidate.0, kernel.run.0)
}

impl Evolution {
    /// The outcome of a task that an earlier run provides, if any.
    pub(super) fn known_earlier(&self, task: &Task) -> Result<Option<Outcome>, EvolveError> {
        let Some(search) = self.owner(task.candidate) else { return Ok(None) };
        let (population, earlier) = (&search.population, &search.earlier);
        let member = population.members.get(&task.candidate).filter(|member| member.counts());
        let Some(member) = member else { return Ok(None) };
        let finding = match task.stage {
            Stage::Check => verdict(&self.ledger, earlier, member)?,
            Stage::Microbench => time(&self.ledger, earlier, population, member)?,
            Stage::Propose | Stage::Screen | Stage::Race | Stage::HeldOut => None,
        };
        Ok(finding.map(|finding| {
            let (candidate, stage, problem) = (task.candidate, task.stage, task.problem);
            Outcome { candidate, stage, problem, seconds: 0.0, device_seconds: 0.0, finding }
        }))
    }
}

fn verdict(ledger: &Ledger, earlier: &Earlier, member: &Member) -> Result<Option<Finding>, LedgerError> {
    if let Some((kernel, (reason, detail))) = earlier.failed(member) {
        let (stage, detail) = (Stage::Check, format!("{}: {detail}", words(kernel)));
        return Ok(Some(Finding::Rejected(Rejection { stage, reason: *reason, detail })));
    }
    let Some(kernel) = earlier.passed(member) else { return Ok(None) };
    Ok(check(ledger, kernel.candidate, Stage::Check, words(kernel))?.map(Finding::Judged))
}

/// The verdict of a stage on an earlier candidate, with a text that states its origin. The emulator's verdict
/// comes first, the device's last.
fn check(
    ledger: &Ledger,
    candidate: CandidateId,
    stage: Stage,
    words: String,
) -> Result<Option<CheckFact>, LedgerError> {
    let checks = ledger.candidate(candidate)?.checks;
    let mut passed = checks.into_iter().filter(|check| check.verdict == Verdict::Passed);
    let found = if stage == Stage::Check { passed.next() } else { passed.next_back() };
    Ok(found.map(|check| CheckFact { reasons: vec![words], seconds: 0.0, ..check }))
}

fn time(
    ledger: &Ledger,
    earlier: &Earlier,
    population: &Population,
    member: &Member,
) -> Result<Option<Finding>, LedgerError> {
    let baseline = population.baseline.and_then(|id| population.members.get(&id));
    let timed = baseline
        .zip(population.baseline_us())
        .and_then(|(baseline, us)| Some((baseline.id, us, baseline.kind?, earlier.time(member, baseline)?)));
    let Some((incumbent, baseline_us, kind, Timed { kernel, ratio: [low, ratio, high] })) = timed else {
        return Ok(None);
    };
    let beside = format!("{}: {ratio:.3}× the speed of the baseline's kernel there", words(kernel));
    let check = check(ledger, kernel.candidate, Stage::Microbench, beside)?;
    let (noise, verdict) = (high / low, SpeedVerdict::Undecided);
    let measurement = MeasurementFact {
        trial: Trial::Microbench,
        kind,
        problem: member.problem,
        // No sample was measured in this run.
        samples: Vec::new(),
        us: baseline_us / ratio,
        low_us: baseline_us / high,
        high_us: baseline_us / low,
        against: Some(Against { incumbent, ratio, low, high, noise, verdict }),
    };
    Ok(check.map(|check| Finding::Timed { check: Some(check), measurement }))
}

/// Numbers of results of earlier runs that a search used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TakenOver {
    pub verdicts: usize,
    pub times: usize,
}

impl TakenOver {
    pub(super) fn learn(&mut self, outcome: &Outcome) {
        if is_taken_over(outcome) {
            match outcome.stage {
                Stage::Microbench => self.times += 1,
                _ => self.verdicts += 1,
            }
        }
    }
}
