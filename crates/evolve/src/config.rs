//! The configuration of a run: problems, target, budget and search method. The ledger stores it with the run,
//! so that a run can be resumed from the ledger alone.

use kernels::Arch;
use kernels::select::Shape;
use problem::{Layout, Problem};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::proposer::Sandbox;
use super::space::Space;
use super::task::Target;
use bench::{CpuPeaks, Load};
use ledger::{Candidate, MadeBy, Operator};

/// The search strategies, after the traverse techniques of EvoEngineer (arXiv 2510.03760): the guidance and
/// the population behind a new candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Configuration {
    /// Random changes of the best candidate alone.
    Free,
    /// Changes of the best candidate, guided by values that helped elsewhere and by the diagnosis. Runs of
    /// earlier versions stored it as `insight`.
    #[serde(alias = "insight")]
    Guided,
    /// Changes of the elites of all niches, with crossover, steps and guided changes.
    #[default]
    Full,
}

impl Configuration {
    pub const ALL: [Configuration; 3] = [Configuration::Free, Configuration::Guided, Configuration::Full];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Configuration::Free => "free",
            Configuration::Guided => "guided",
            Configuration::Full => "full",
        }
    }

    pub fn named(name: &str) -> Option<Configuration> {
        Configuration::ALL.into_iter().find(|configuration| configuration.name() == name)
    }

    /// The operators of this configuration. If a proposer is given, it is added to these.
    pub const fn operators(self) -> &'static [Operator] {
        match self {
            Configuration::Free => &[Operator::Mutate, Operator::Restart],
            Configuration::Guided => &[Operator::Guided, Operator::Mutate, Operator::Neighbour],
            Configuration::Full => {
                &[Operator::Guided, Operator::Neighbour, Operator::Mutate, Operator::Cross, Operator::Restart]
            }
        }
    }

    /// Whether parents come from all niches.
    pub const fn has_niches(self) -> bool {
        matches!(self, Configuration::Full)
    }
}

/// A problem of a run with its initial candidates and its references.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub problem: Shape,
    /// The candidate to beat.
    pub baseline: Candidate,
    /// The initial candidates, each with its source.
    pub seeds: Vec<(MadeBy, Candidate)>,
    /// Number of additional random samples. Those with the best predictions continue.
    pub draws: usize,
    /// Held-out problems on which a winner is tested before its promotion, each with the candidate to beat
    /// there.
    pub held_out: Vec<(Shape, Candidate)>,
    /// The shipped plan for the problem, if it is not the baseline. The winner is raced against it too.
    pub shipped: Option<Candidate>,
}

/// A win of another run. Its serde form was an array of the three fields, which is still read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EarlierWin {
    pub family: String,
    pub changes: Value,
    /// The speed-up.
    pub gain: f64,
}

/// The configuration of a run. It contains every random seed and all results of other runs that the search
/// uses, so that a resumed run behaves as if it had not stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Where candidates are evaluated.
    pub target: Target,
    /// The device's name in its driver or in the time model.
    pub device: String,
    /// The architecture of the kernels; `None` for a CPU.
    pub arch: Option<Arch>,
    /// The problems. Each has its own search, and gene values that help in one search are tried in the
    /// others.
    pub cases: Vec<Case>,
    pub configuration: Configuration,
    /// The random seed.
    pub seed: u64,
    /// Number of candidates of both arms over all problems. Without this limit, the run ends after `seconds`.
    pub candidates: Option<usize>,
    /// Duration of the whole run, s.
    pub seconds: Option<f64>,
    /// The fraction of candidates that are random samples.
    pub random_share: f64,
    /// Families to draw from; all families if empty.
    pub families: Vec<String>,
    /// Wins of other runs.
    pub wins: Vec<EarlierWin>,
    /// The command line of a program that proposes candidates.
    pub proposer: Option<String>,
    /// The sandbox of the proposer, if one was requested.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Number of candidates per problem that race at the end.
    pub finalists: usize,
    /// Duration of a short timing and of a race, s.
    pub timing: [f64; 2],
    /// Whether a search ends before its budget when no gain is expected.
    pub early_stop: bool,
    /// The time of the best library on the first problem, µs, if it is known.
    pub peer_us: Option<f64>,
    /// Whether a promoted plan of a CPU is not kept for the calls of this user.
    #[serde(default)]
    pub no_keep: bool,
    /// The program that began the run. Results of earlier runs are used only if they come from the same
    /// program. Without a name, the commit identifies the program.
    #[serde(default)]
    pub program: Option<String>,
    /// Measured peaks of this machine's processor at the start of the run. A GPU's peaks come from data
    /// sheets.
    #[serde(default)]
    pub peaks: Option<CpuPeaks>,
    /// The load of this machine's processor before the run.
    #[serde(default)]
    pub load: Option<Load>,
}

impl Config {
    /// A run on the given cases with default settings.
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
            no_keep: false,
            program: None,
            peaks: None,
            load: None,
        }
    }

    /// The search space of a case.
    pub fn space(&self, case: &Case) -> Space {
        match self.arch {
            Some(arch) => Space::gpu(&case.problem.problem(), &arch, &self.families),
            None => Space::cpu(&case.problem.problem()),
        }
    }
}

/// The neighbouring problems with half and twice the length, which the search does not use.
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

/// Limits on concurrent work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of tasks that need no device.
    pub host: usize,
    /// Maximum number of tasks that need the device: one that is being timed, and one that waits.
    pub device: usize,
    /// Maximum number of tasks of both kinds together.
    pub together: usize,
    /// Maximum number of candidates that are neither timed nor rejected. Candidates that passed the gate are
    /// kept waiting for the device, so that the device is not idle.
    pub open: usize,
}

impl Limits {
    /// One task at a time, as timings on this machine's own processor require.
    pub const ALONE: Limits = Limits { host: 1, device: 1, together: 1, open: 1 };

    /// Limits for `threads` host threads and one device.
    pub const fn beside_device(threads: usize) -> Limits {
        Limits { host: threads, device: 2, together: threads + 2, open: 2 * threads + 4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stored_wins_of_other_runs_are_read() {
        let win =
            EarlierWin { family: "mma".to_owned(), changes: json!({ "block_n": [64, 128] }), gain: 1.25 };
        for stored in [json!(["mma", { "block_n": [64, 128] }, 1.25]), json!(win)] {
            assert_eq!(serde_json::from_value::<EarlierWin>(stored.clone()).unwrap(), win);
            assert_eq!(serde_json::from_str::<EarlierWin>(&stored.to_string()).unwrap(), win);
        }
    }

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
            seeds: vec![(Operator::Seed.with("default"), baseline.clone())],
            baseline,
            draws: 0,
            held_out: Vec::new(),
            shipped: None,
        };
        let config = Config::new(Target::Cpu, "any", None, vec![case]);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
        let named = text.replace("\"full\"", "\"insight\"");
        let known = serde_json::from_str::<Config>(&named).unwrap().configuration;
        assert_eq!(known, Configuration::Guided, "the name in earlier versions");
        // A run of an earlier version does not have the setting.
        let earlier = text.replace("\"no_keep\":false,", "");
        assert!(earlier != text && serde_json::from_str::<Config>(&earlier).unwrap() == config);
        for configuration in Configuration::ALL {
            assert_eq!(Configuration::named(configuration.name()), Some(configuration));
        }
    }
}
