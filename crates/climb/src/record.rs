//! Compares the original kernels' measured times with the model's predictions for an L4.
//!
//! A quoted time is compared with the prediction for the problem that was timed. The first session of the log
//! timed two batches, the later sessions one ([`crate::ladder::RungKernel::quoted_batch`] gives the sources),
//! but the log's table does not distinguish them. The score under the assumption of one batch throughout is
//! reported too.

use kernels::Arch;
use predict::machine;
use problem::{DType, Problem};
use ptx::Launch;
use serde::Serialize;

use super::{Climb, Climbed, Rung, Score};
use crate::ladder::RungError;
use check::study::{Study, forecast};

/// A quoted time with its problem.
#[derive(Clone, Debug)]
pub struct Quoted {
    /// The time, µs on an L4.
    pub us: f64,
    /// Number of batches of the timed problem.
    pub batch: usize,
    /// The timed launch; `None` when the climb is on a problem other than the log's.
    pub launch: Option<Launch>,
}

impl Quoted {
    /// The log's time of a rung, for a climb of `problem`.
    pub(super) fn of(
        seed: &crate::ladder::Rung,
        problem: &Problem,
        arch: &Arch,
    ) -> Result<Option<Quoted>, RungError> {
        let Some(us) = seed.quoted_us else { return Ok(None) };
        let seeds = |batch| Problem::new(batch, 8, 512, 64, DType::F16);
        let launch = if *problem == seeds(1) {
            let timed = seeds(seed.quoted_batch).with_band(seed.mask);
            Some(seed.kernel.bind(&timed, arch)?.kernel.launch)
        } else {
            None
        };
        Ok(Some(Quoted { us, batch: seed.quoted_batch, launch }))
    }
}

/// Predicted time on an L4 for the quoted launch, µs.
pub(super) fn as_quoted(rung: &Rung, study: &Study) -> Option<f64> {
    let launch = rung.quoted.as_ref()?.launch.as_ref()?;
    let (resources, recorded) = (study.resources.as_ref()?, study.check.recorded.first()?);
    forecast(&rung.head.kernel, launch, &recorded.traces, resources, &machine::L4).ok().map(|p| p.us)
}

/// One quoted time and its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recorded {
    pub rung: String,
    /// Number of batches that were timed.
    pub batch: usize,
    /// Predicted time on an L4, µs.
    pub predicted_us: f64,
    /// Quoted time, µs.
    pub quoted_us: f64,
}

/// The model's predictions against the log's table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Rungs with a quoted time.
    pub rungs: Vec<Recorded>,
    /// The score, with each prediction for the timed problem.
    pub score: Score,
    /// The score if every quoted time were for one batch.
    pub score_as_one_batch: Score,
}

impl Climb {
    /// The log's table with the predictions for an L4. `None` when the climb is on another problem.
    pub fn record(&self) -> Option<Record> {
        let on_l4 = |rung: &Climbed| {
            let machines = rung.study.predictions.iter().filter_map(|p| p.as_ref().ok());
            machines.into_iter().find(|p| p.machine == machine::L4.name).map(|p| p.us)
        };
        let mut one_batch = Vec::new();
        let rungs: Vec<Recorded> = self
            .rungs
            .iter()
            .filter_map(|rung| {
                let (quoted, predicted_us) = (rung.rung.quoted.as_ref()?, rung.as_quoted_us?);
                one_batch.push((on_l4(rung)?, quoted.us));
                let (rung, batch) = (rung.rung.name.clone(), quoted.batch);
                Some(Recorded { rung, batch, predicted_us, quoted_us: quoted.us })
            })
            .collect();
        let pairs: Vec<(f64, f64)> = rungs.iter().map(|r| (r.predicted_us, r.quoted_us)).collect();
        let (score, score_as_one_batch) = (Score::of(&pairs), Score::of(&one_batch));
        (!rungs.is_empty()).then_some(Record { rungs, score, score_as_one_batch })
    }
}

impl Record {
    /// The comparison in two sentences.
    pub fn summary(&self) -> String {
        let two: Vec<&str> = self.rungs.iter().filter(|r| r.batch > 1).map(|r| r.rung.as_str()).collect();
        let percent = |score: &Score| 100.0 * score.median_error;
        format!(
            "Predicted times against the {} times of the original kernels' log of an L4: rank correlation {:.2}, \
             median error {:.0} %. The log's scripts timed {} with a batch of two, and the predictions are for the \
             same; for a batch of one: {:.2}, {:.0} %.",
            self.rungs.len(),
            self.score.spearman,
            percent(&self.score),
            two.join(", "),
            self.score_as_one_batch.spearman,
            percent(&self.score_as_one_batch),
        )
    }
}
