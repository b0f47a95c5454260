//! What of a problem a family computes.

use problem::Problem;

use crate::PlanError;

/// Parts of a problem that not every family computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Sequence lengths that differ between batch entries ([`problem::Lengths`]).
    pub lengths: bool,
    /// Attention sinks ([`problem::Score::sink`]).
    pub sink: bool,
    /// Score and mask programs ([`problem::Programs`]).
    pub programs: bool,
}

impl Features {
    /// The features that a problem needs.
    pub fn of(problem: &Problem) -> Features {
        Features {
            lengths: !problem.lengths.is_even(),
            sink: problem.score.sink,
            programs: !problem.programs.is_empty(),
        }
    }

    /// The first of the `wanted` features that this set lacks.
    fn lacks(self, wanted: Features) -> Option<&'static str> {
        [
            ("uneven lengths", wanted.lengths && !self.lengths),
            ("attention sinks", wanted.sink && !self.sink),
            ("score and mask programs", wanted.programs && !self.programs),
        ]
        .into_iter()
        .find_map(|(name, lacks)| lacks.then_some(name))
    }

    /// Whether the set has all features that a problem needs.
    pub fn cover(self, problem: &Problem) -> bool {
        self.lacks(Features::of(problem)).is_none()
    }

    /// Refuses a problem that needs more than this set.
    pub(crate) fn check(self, problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        match self.lacks(Features::of(problem)) {
            None => Ok(()),
            Some(name) => Err(PlanError::Feature { family, name }),
        }
    }
}
