//! What a run is: problems, target, budget, and how it searches. Kept in the ledger as the run's configuration, so that a run goes
//! on from the ledger alone.

use kernels::Arch;
use kernels::select::Shape;
use problem::{Layout, Problem};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::bandit::Operator;
use super::candidate::Candidate;
use super::proposer::Sandbox;
use super::space::Space;
use super::task::Target;
use crate::bench::CpuPeaks;

/// The traverse techniques of EvoEngineer (arXiv 2510.03760): what guides a new candidate, and which population it comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Configuration {
    /// From the best alone, by blind changes.
    Free,
    /// From the best, with what helped elsewhere and what the diagnosis says.
    Insight,
    /// From elites of all niches, with crossing, steps and insights.
    #[default]
    Full,
}

impl Configuration {
    /// Every one.
    pub const ALL: [Configuration; 3] = [Configuration::Free, Configuration::Insight, Configuration::Full];

    /// As the command line takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Configuration::Free => "free",
            Configuration::Insight => "insight",
            Configuration::Full => "full",
        }
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Configuration> {
        Configuration::ALL.into_iter().find(|configuration| configuration.name() == name)
    }

    /// Its operators, beside a proposer where one is given.
    pub const fn operators(self) -> &'static [Operator] {
        match self {
            Configuration::Free => &[Operator::Mutate, Operator::Restart],
            Configuration::Insight => &[Operator::Insight, Operator::Mutate, Operator::Neighbour],
            Configuration::Full => &[
                Operator::Insight,
                Operator::Neighbour,
                Operator::Mutate,
                Operator::Cross,
                Operator::Restart,
            ],
        }
    }

    /// Whether parents come from all niches.
    pub const fn has_niches(self) -> bool {
        matches!(self, Configuration::Full)
    }
}

/// A problem of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// What is to be computed.
    pub problem: Shape,
    /// What is to be beaten.
    pub baseline: Candidate,
    /// What the search begins with, and where each comes from.
    pub seeds: Vec<(String, Candidate)>,
    /// Blind draws beside these, of which the time model's best go on.
    pub draws: usize,
    /// On what else a winner is tried before it is promoted, and against what there.
    pub held_out: Vec<(Shape, Candidate)>,
    /// What ships for the problem, where that is not the baseline: the winner is raced against it, too.
    pub shipped: Option<Candidate>,
}

/// A run. All that chance and other runs could change is in it, so that it goes on from the ledger as if it had not stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Where candidates are to be fast.
    pub target: Target,
    /// The device, as its driver or the time model names it.
    pub device: String,
    /// What kernels are made for; none for a CPU.
    pub arch: Option<Arch>,
    /// The problems: each has a search of its own, and what helps one is tried on the others.
    pub cases: Vec<Case>,
    /// How it searches.
    pub configuration: Configuration,
    /// What chance begins with.
    pub seed: u64,
    /// Candidates of both arms together, over all problems; without a limit, seconds end it.
    pub candidates: Option<usize>,
    /// Seconds of the whole run.
    pub seconds: Option<f64>,
    /// The part of the candidates that is drawn blindly.
    pub random_share: f64,
    /// Families to draw from; all where none is named.
    pub families: Vec<String>,
    /// What helped in other runs: a family, what changed, and how many times as fast that was.
    pub wins: Vec<(String, Value, f64)>,
    /// A program that proposes candidates.
    pub proposer: Option<String>,
    /// The sandbox that the proposer runs in, where one was asked for.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Candidates that race at the end, of each problem.
    pub finalists: usize,
    /// Seconds of a short timing and of a race.
    pub timing: [f64; 2],
    /// Whether a search ends before its budget when nothing more is to be expected.
    pub early_stop: bool,
    /// What the best library takes on the first problem, µs, where someone measured it.
    pub peer_us: Option<f64>,
    /// The program that began it: only what the same one found out earlier is taken over. Of none that is named, the commit says it.
    #[serde(default)]
    pub program: Option<String>,
    /// What this machine's processor was measured to do when the run began; of a GPU data sheets say it.
    #[serde(default)]
    pub peaks: Option<CpuPeaks>,
}

impl Config {
    /// A run on these cases, to be changed as needed.
    pub fn new(target: Target, device: &str, arch: Option<Arch>, cases: Vec<Case>) -> Config {
        let timing = match target {
            Target::Cpu => [0.15, 1.5],
            Target::Cuda { .. } => [0.05, 1.0],
            Target::Model { .. } => [0.0, 0.0],
        };
        Config {
            target,
            device: device.to_owned(),
            arch,
            cases,
            configuration: Configuration::Full,
            seed: 1,
            candidates: None,
            seconds: None,
            random_share: 0.5,
            families: Vec::new(),
            wins: Vec::new(),
            proposer: None,
            sandbox: None,
            finalists: 3,
            timing,
            early_stop: true,
            peer_us: None,
            program: None,
            peaks: None,
        }
    }

    /// What may be drawn for a case.
    pub fn space(&self, case: &Case) -> Space {
        match self.arch {
            Some(arch) => Space::gpu(&case.problem.problem(), &arch, &self.families),
            None => Space::cpu(&case.problem.problem()),
        }
    }
}

/// The problems beside one: half and twice the length, which the search does not see.
pub fn neighbours(shape: &Shape) -> Vec<Shape> {
    let scaled = |times: usize, over: usize| Shape {
        seq_q: (shape.seq_q * times / over).max(1),
        seq_kv: (shape.seq_kv * times / over).max(1),
        ..*shape
    };
    let mut found = vec![scaled(1, 2), scaled(2, 1)];
    found
        .retain(|other| other != shape && Problem::check(&other.problem().with_layout(Layout::Bhsd)).is_ok());
    found
}

/// How much may be under way at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tasks that need no device.
    pub host: usize,
    /// Tasks that need it: one being timed and one that waits beside.
    pub device: usize,
    /// Both together.
    pub together: usize,
    /// Candidates that are begun and neither timed nor rejected. There are enough of them that candidates which passed their
    /// check wait for the device, and the device never waits for candidates.
    pub open: usize,
}

impl Limits {
    /// One task at a time: what timings on this machine's own processor need.
    pub const ALONE: Limits = Limits { host: 1, device: 1, together: 1, open: 1 };

    /// For so many threads beside one device.
    pub const fn beside_device(threads: usize) -> Limits {
        Limits { host: threads, device: 2, together: threads + 2, open: 2 * threads + 4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_problems_are_others_of_the_kind() {
        let mission = Shape::of(&Problem::mission());
        let seqs: Vec<usize> = neighbours(&mission).iter().map(|shape| shape.seq_q).collect();
        assert_eq!(seqs, [256, 1024]);
        let decode = Shape { seq_q: 1, seq_kv: 1000, ..mission };
        assert_eq!(
            neighbours(&decode).iter().map(|s| (s.seq_q, s.seq_kv)).collect::<Vec<_>>(),
            [(1, 500), (2, 2000)]
        );
    }

    #[test]
    fn a_configuration_survives_the_ledger() {
        let problem = Problem::mission();
        let baseline = Candidate::Cpu(cpu::CpuPlan::for_problem(&problem));
        let case = Case {
            problem: Shape::of(&problem),
            seeds: vec![("seed:default".to_owned(), baseline.clone())],
            baseline,
            draws: 0,
            held_out: Vec::new(),
            shipped: None,
        };
        let config = Config::new(Target::Cpu, "any", None, vec![case]);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
        for configuration in Configuration::ALL {
            assert_eq!(Configuration::named(configuration.name()), Some(configuration));
        }
    }
}
