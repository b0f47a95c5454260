//! The CTAs that a check with a time budget ran.

use std::fmt;

use serde::{Serialize, Serializer};

/// Why a cluster of CTAs was chosen. A grid without clusters has clusters of one CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// The first or the last on each axis of the grid.
    Corner,
    /// Executed an instruction, or a set of instructions, that no earlier chosen cluster executed.
    Instructions,
    /// One step from a corner along one axis, or the cluster after one of `Instructions`.
    Neighbour,
    /// Writes to a 128-byte line to which another cluster also writes; one pair for each distance between the
    /// two clusters.
    SharedLine,
    /// The first, middle or last on each axis: the middles of edges and faces, and the centre.
    Middle,
    /// Spread evenly over the grid, in consecutive pairs, as many as the time allows.
    Spread,
}

impl Choice {
    /// The choice in words, after a number of CTAs.
    const fn words(self) -> &'static str {
        match self {
            Choice::Corner => "at corners of the grid",
            Choice::Instructions => "for their instructions",
            Choice::Neighbour => "beside one of these",
            Choice::SharedLine => "that share output lines",
            Choice::Middle => "in the middle of edges and faces",
            Choice::Spread => "spread over the grid",
        }
    }
}

/// The CTAs that a check with a time budget ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// The budget in seconds.
    pub seconds: f64,
    /// The CTAs of the grid.
    pub ctas: u64,
    /// CTAs that ran at least once in a run of the check.
    pub ctas_run: u64,
    /// CTAs that ran in every run.
    pub ctas_in_every_run: u64,
    /// CTAs that ran once to see which instructions they execute.
    pub ctas_searched: u64,
    /// The runs that a check without a budget makes.
    pub runs_planned: usize,
    /// Why every run has all CTAs; `None` if runs may have only some.
    pub all_ctas: Option<&'static str>,
    /// The CTAs that ran, by the reason for which they were chosen: the first CTA of each cluster.
    #[serde(serialize_with = "rows")]
    pub chosen: Vec<(Choice, Vec<u64>)>,
}

/// The choices as objects.
fn rows<S: Serializer>(chosen: &[(Choice, Vec<u64>)], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Row<'a> {
        why: Choice,
        ctas: &'a [u64],
    }
    serializer.collect_seq(chosen.iter().map(|(why, ctas)| Row { why: *why, ctas }))
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = self.all_ctas {
            return write!(f, "all CTAs: {reason}");
        }
        let chosen = self.chosen.iter().map(|(choice, ctas)| format!("{} {}", ctas.len(), choice.words()));
        let clusters =
            if self.chosen.is_empty() { "none".to_owned() } else { chosen.collect::<Vec<_>>().join(", ") };
        write!(
            f,
            "CTAs or clusters: {clusters}; {} of {} CTAs were searched",
            self.ctas_searched, self.ctas
        )?;
        if self.ctas_in_every_run < self.ctas_run {
            write!(f, "; {} ran in every run", self.ctas_in_every_run)?;
        }
        Ok(())
    }
}
