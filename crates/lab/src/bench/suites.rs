//! The problems that races are held on, as data: the command line and the Python package use the same.

use problem::{DType, Mask, Problem};

/// A named list of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// The problem that the seeds tried to win, in both element types, with and without mask.
    Mission,
    /// Its neighbours: grids that do not fill a GPU.
    Small,
    /// 16k tokens of hidden size 2048, the grid on which attention libraries publish their rates.
    Forward,
    /// The same, for what `mma.sync` reaches on it.
    Ampere,
}

impl Suite {
    /// Every suite.
    pub const ALL: [Suite; 4] = [Suite::Mission, Suite::Small, Suite::Forward, Suite::Ampere];

    /// The name in rows and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Suite::Mission => "mission",
            Suite::Small => "small",
            Suite::Forward => "forward",
            Suite::Ampere => "ampere",
        }
    }

    /// The suite of that name.
    pub fn named(name: &str) -> Option<Suite> {
        Suite::ALL.into_iter().find(|suite| suite.name() == name)
    }

    /// Its problems.
    pub fn problems(self) -> Vec<Problem> {
        match self {
            Suite::Mission => {
                let dtypes = [DType::F16, DType::Bf16].into_iter();
                dtypes.flat_map(|dtype| masked(Problem::new(1, 8, 512, 64, dtype))).collect()
            }
            Suite::Small => {
                let mut problems = Vec::new();
                for dim in [64, 128] {
                    for (batch, heads) in [(1, 8), (1, 32), (4, 16)] {
                        for seq in [128, 256, 512, 1024] {
                            problems.extend(masked(Problem::new(batch, heads, seq, dim, DType::Bf16)));
                        }
                    }
                }
                problems
            }
            Suite::Forward | Suite::Ampere => {
                let mut problems = Vec::new();
                for dim in [64, 128, 256] {
                    for seq in [512, 1024, 2048, 4096, 8192, 16384] {
                        problems.extend(masked(Problem::new(
                            TOKENS / seq,
                            HIDDEN / dim,
                            seq,
                            dim,
                            DType::Bf16,
                        )));
                    }
                }
                problems
            }
        }
    }
}

const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;

fn masked(problem: Problem) -> [Problem; 2] {
    Mask::ALL.map(|mask| problem.clone().with_mask(mask))
}

/// Calls in a row for a warm time: many where one is about as long as the timer's and the launch's own time.
pub fn calls(problem: &Problem) -> u32 {
    match problem.flops() {
        // Under about 50 µs on the fastest device.
        flops if flops < 2e10 => 20,
        flops if flops < 2e11 => 5,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_hold_what_they_say() {
        let count = |suite: Suite| suite.problems().len();
        assert_eq!(Suite::ALL.map(count), [4, 48, 36, 36]);
        for problem in Suite::ALL.into_iter().flat_map(Suite::problems) {
            problem.check().unwrap();
        }
        assert!(
            Suite::Forward
                .problems()
                .iter()
                .all(|p| p.batch * p.seq_q == TOKENS && p.heads_q * p.head_dim == HIDDEN)
        );
        assert!(Suite::Mission.problems().contains(&Problem::mission()));
        assert_eq!(Suite::named("small"), Some(Suite::Small));
        assert_eq!(
            (calls(&Problem::mission()), calls(&Problem::new(1, 32, 16384, 64, DType::Bf16))),
            (20, 1)
        );
    }
}
