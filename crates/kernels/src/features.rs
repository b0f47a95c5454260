//! The features of problems that families support.

use problem::Problem;

use crate::PlanError;

/// Features of a problem that not every family supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Sequence lengths that differ between batch entries ([`problem::Lengths`]).
    pub lengths: bool,
    /// Attention sinks ([`problem::Score::sink`]).
    pub sink: bool,
    /// A factor on the scores of each query head ([`problem::Score::temperature`]).
    pub temperature: bool,
    /// Dropout of probabilities ([`Problem::dropout`]).
    pub dropout: bool,
    /// A result over other keys, from which the call continues ([`problem::Pass::Forward`]).
    pub continues: bool,
    /// Score and mask programs ([`problem::Programs`]).
    pub programs: bool,
    /// 8-bit inputs ([`problem::DTypes`]).
    pub fp8: bool,
    /// Descale factors per batch entry and KV head ([`problem::Scales`]).
    pub scales: bool,
    /// Descale factors per block of rows.
    pub block_scales: bool,
    /// Keys and values in pages ([`problem::Storage`]).
    pub pages: bool,
}

impl Features {
    /// Every feature: those of a family that computes all problems.
    pub(crate) const ALL: Features = Features {
        lengths: true,
        sink: true,
        temperature: true,
        dropout: true,
        continues: true,
        programs: true,
        fp8: true,
        scales: true,
        block_scales: true,
        pages: true,
    };

    /// The features that a problem needs.
    pub fn of(problem: &Problem) -> Features {
        Features {
            lengths: !problem.lengths.is_even(),
            sink: problem.score.sink,
            temperature: problem.score.temperature,
            dropout: problem.dropout.is_some(),
            continues: problem.pass.continues(),
            programs: !problem.programs.is_empty(),
            fp8: problem.dtypes.has_fp8(),
            scales: !problem.scales.is_empty(),
            block_scales: problem.scales.are_per_block(),
            pages: problem.storage.pages().is_some(),
        }
    }

    /// The name of the first of the `wanted` features that this set lacks.
    fn lacks(self, wanted: Features) -> Option<&'static str> {
        [
            ("uneven lengths", wanted.lengths && !self.lengths),
            ("attention sinks", wanted.sink && !self.sink),
            ("a temperature per head", wanted.temperature && !self.temperature),
            ("dropout", wanted.dropout && !self.dropout),
            ("an earlier result", wanted.continues && !self.continues),
            ("score and mask programs", wanted.programs && !self.programs),
            ("8-bit inputs", wanted.fp8 && !self.fp8),
            ("descale factors", wanted.scales && !self.scales),
            ("descale factors per block of rows", wanted.block_scales && !self.block_scales),
            ("keys and values in pages", wanted.pages && !self.pages),
        ]
        .into_iter()
        .find_map(|(name, lacks)| lacks.then_some(name))
    }

    /// Whether the set contains all features that a problem needs.
    pub fn cover(self, problem: &Problem) -> bool {
        self.lacks(Features::of(problem)).is_none()
    }

    /// Rejects a problem that needs a feature outside this set.
    pub(crate) fn check(self, problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        match self.lacks(Features::of(problem)) {
            None => Ok(()),
            Some(name) => Err(PlanError::Feature { family, name }),
        }
    }
}
