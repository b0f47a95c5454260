//! Fuzzing of `flashcore check` with mutated kernels and launch files. Every input must give a typed error or
//! a verdict, and in limited time.
//!
//! A [`Campaign`] makes [`Case`]s and keeps those with new behaviour as seeds for more. `cargo xtask fuzz`
//! drives it.

mod mutate;
mod seeds;
pub mod tensors;

use std::collections::{BTreeMap, HashSet};

use emu::Schedule;
use predict::machine;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use check::gate::{GateError, Settings};
use check::launchfile::LaunchSpec;
use check::study::study;
use host::panics::{Panic, contain};
use judge::inputs::Style;

pub use seeds::{kernels, launch_for};

/// The input of `check`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub ptx: String,
    pub launch: String,
}

/// How far a case got. None of the stages is a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    NotParsed,
    LaunchRefused,
    NotLaunched,
    Incomplete,
    Failed,
    Passed,
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuzzOutcome {
    pub stage: Stage,
    /// The kind of answer: messages without names and numbers, and kinds of hazards.
    pub shape: String,
}

/// Warp instructions that a case may issue in total: a second or two.
const BUDGET: u64 = 1 << 20;
/// Maximum bytes of all buffers of a case; `WORK` limits the oracle's floating-point operations.
const LARGE: usize = 32 << 20;
const WORK: f64 = 1e9;
/// Maximum number of kept seeds in addition to those from files.
const POOL: usize = 2000;

/// Runs everything that `check` does, with a small budget: parse, verify, print and parse again, bind, check,
/// predict, diagnose.
///
/// # Panics
/// On a bug in this project; fuzzing looks for such bugs.
pub fn execute(case: &Case) -> FuzzOutcome {
    let outcome = |stage, text: &str| FuzzOutcome { stage, shape: shape(text) };
    let module = match ptx::parse(&case.ptx) {
        Ok(module) => module,
        Err(error) => return outcome(Stage::NotParsed, &error.to_string()),
    };
    let legal = module.check().is_ok();
    let printed = module.to_string();
    let again = ptx::parse(&printed);
    assert!(
        again.as_ref().is_ok_and(|again| *again == module),
        "a printed module does not read back: {again:?}"
    );
    // Invalid modules continue: the emulator must handle them on its own.
    let bound = match case.launch.parse::<LaunchSpec>().and_then(|spec| spec.bind(module.assume_verified())) {
        Ok(bound) => bound,
        Err(error) => return outcome(Stage::LaunchRefused, &error.to_string()),
    };
    let bytes: usize = bound.kernel.buffers.iter().map(|b| b.bytes).sum();
    if bytes > LARGE || bound.problem.as_ref().is_some_and(|p| p.flops() > WORK) {
        return outcome(Stage::NotLaunched, "larger than the time of a case allows");
    }
    let settings = Settings {
        runs: vec![(Style::Normal, 1, Schedule::Late), (Style::NonFinite, 2, Schedule::Random)],
        traced_ctas: 2,
        step_limit: BUDGET / 4,
        grid_limit: BUDGET,
        ..Settings::quick()
    };
    let study =
        match study(bound, Some(case.ptx.clone().into()), &settings, &[machine::L4, machine::H200], None) {
            Ok(study) => study,
            Err(
                error @ (GateError::Launch(_)
                | GateError::Oracle(_)
                | GateError::Reference(_)
                | GateError::Other(_)),
            ) => {
                return outcome(Stage::NotLaunched, &error.to_string());
            }
        };
    let findings = serde_json::to_value(&study.findings).unwrap_or_default();
    let json = study.check.json(&findings).to_string();
    assert!(!json.is_empty());
    let stage = match study.check.verdict {
        check::gate::Verdict::Passed => Stage::Passed,
        check::gate::Verdict::Failed => Stage::Failed,
        check::gate::Verdict::Incomplete => Stage::Incomplete,
    };
    let mut kinds: Vec<&str> = study.check.hazards.iter().map(|h| h.kind.name()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let found: Vec<&str> = study.findings.iter().map(|f| f.name.name()).collect();
    let reason = study.check.reasons.first().map_or("", String::as_str);
    FuzzOutcome { stage, shape: format!("{legal} {kinds:?} {found:?} {}", shape(reason)) }
}

/// A message without the parts that differ from case to case: quoted names, numbers, and lines after the
/// first.
fn shape(message: &str) -> String {
    let line = message.lines().next().unwrap_or("");
    let mut shape = String::new();
    let mut quoted = false;
    for word in line.split_whitespace() {
        let marks = word.matches(['`', '"', '\'']).count();
        if !quoted && marks == 0 && word.chars().all(|c| c.is_ascii_lowercase() || c == ',' || c == ':') {
            shape += word;
            shape.push(' ');
        }
        quoted ^= marks % 2 == 1;
    }
    shape.truncate(80);
    shape
}

/// An endless generator of cases.
pub struct Campaign {
    rng: SmallRng,
    files: Vec<Case>,
    pool: Vec<Case>,
    seen: HashSet<FuzzOutcome>,
    /// Number of cases by stage.
    pub counts: BTreeMap<Stage, u64>,
}

impl std::hash::Hash for FuzzOutcome {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.stage, &self.shape).hash(state);
    }
}

impl Campaign {
    /// Starts from `files`, which must not be empty.
    pub fn new(files: Vec<Case>, seed: u64) -> Campaign {
        let rng = SmallRng::seed_from_u64(seed);
        Campaign { rng, files, pool: Vec::new(), seen: HashSet::new(), counts: BTreeMap::new() }
    }

    /// Number of different answers seen so far.
    pub fn kinds(&self) -> usize {
        self.seen.len()
    }

    fn seed(&mut self) -> Case {
        let fresh = self.pool.is_empty() || self.rng.random_range(0..3) == 0;
        let from = if fresh { &self.files } else { &self.pool };
        from.choose(&mut self.rng).cloned().unwrap_or(Case { ptx: String::new(), launch: String::new() })
    }

    /// The next case: mostly a mutated kernel, sometimes a mutated launch file, sometimes both.
    pub fn next_case(&mut self) -> Case {
        let (mut case, donor) = (self.seed(), self.seed());
        let rng = &mut self.rng;
        match rng.random_range(0..10) {
            0 => case.launch = mutate::mutate(rng, &case.launch, &donor.launch),
            1 => case.launch = mutate::renumber(rng, &case.launch),
            2 => {
                case.launch = mutate::renumber(rng, &case.launch);
                case.ptx = mutate::mutate(rng, &case.ptx, &donor.ptx);
            }
            3 => case.launch = donor.launch,
            4 => case.ptx = mutate::renumber(rng, &case.ptx),
            _ => case.ptx = mutate::mutate(rng, &case.ptx, &donor.ptx),
        }
        case
    }

    /// Runs a case, counts it, and keeps it as a seed when its answer is of a new kind.
    ///
    /// # Errors
    /// The panic in which the case ended.
    pub fn run(&mut self, case: &Case) -> Result<Stage, Panic> {
        let outcome = contain(|| execute(case))?;
        let stage = outcome.stage;
        *self.counts.entry(stage).or_default() += 1;
        if stage > Stage::NotParsed && self.seen.insert(outcome) {
            if self.pool.len() < POOL {
                self.pool.push(case.clone());
            } else {
                let at = self.rng.random_range(0..POOL);
                self.pool[at] = case.clone();
            }
        }
        Ok(stage)
    }
}

/// Removes lines from a case as long as `still` holds, in at most `tries` trials.
pub fn minimise(case: &Case, mut tries: u32, still: impl Fn(&Case) -> bool) -> Case {
    let mut least = case.clone();
    let parts: [fn(&mut Case) -> &mut String; 2] = [|c| &mut c.ptx, |c| &mut c.launch];
    for part in parts {
        let mut chunk = part(&mut least).lines().count() / 2;
        while chunk > 0 {
            let mut at = 0;
            loop {
                let lines: Vec<String> = part(&mut least).lines().map(str::to_owned).collect();
                if at >= lines.len() || tries == 0 {
                    break;
                }
                let end = (at + chunk).min(lines.len());
                let mut trial = least.clone();
                *part(&mut trial) = [&lines[..at], &lines[end..]].concat().join("\n") + "\n";
                tries -= 1;
                if still(&trial) {
                    least = trial;
                } else {
                    at = end;
                }
            }
            chunk /= 2;
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn filetests() -> Vec<Case> {
        kernels(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests")).unwrap()
    }

    /// A short smoke test; `cargo xtask fuzz --seconds 60` runs a minute.
    #[test]
    fn hostile_inputs_get_answers() {
        let mut seeds = filetests();
        assert!(seeds.len() > 50, "{}", seeds.len());
        seeds.retain(|case| case.ptx.len() < 6000);
        let mut campaign = Campaign::new(seeds, 1);
        for _ in 0..300 {
            let case = campaign.next_case();
            if let Err(panic) = campaign.run(&case) {
                panic!("{panic}\n{}\n{}", case.ptx, case.launch);
            }
        }
        let reached: Vec<Stage> = campaign.counts.keys().copied().collect();
        for stage in [Stage::NotParsed, Stage::LaunchRefused, Stage::Failed, Stage::Passed] {
            assert!(reached.contains(&stage), "{stage:?} was not reached: {:?}", campaign.counts);
        }
    }

    #[test]
    fn minimising_keeps_what_matters() {
        let case = Case { ptx: "a\nb\nc\nd\ne\n".into(), launch: "x\ny\n".into() };
        let least = minimise(&case, 100, |c| c.ptx.contains('d') && c.launch.contains('y'));
        assert_eq!(least, Case { ptx: "d\n".into(), launch: "y\n".into() });
    }
}
