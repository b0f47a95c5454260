//! The verdict of a search on one problem, in one sentence: the terminal, the pages and the list of runs show
//! this sentence.

use bench::SpeedVerdict::{Faster, Slower, Undecided};

use crate::{Against, CandidateId, TimeKind};

/// A noise floor above this ratio comes from a busy machine: on a quiet one it is below.
const BUSY: f64 = 1.02;

/// Above this noise floor the times of a run compare nothing: no plan gains as much over a good baseline.
const UNUSABLE: f64 = 1.5;

/// The facts that decide the verdict of a search on one problem.
#[derive(Clone, Copy, Debug)]
pub struct Conclusion<'a> {
    /// Whether the times are measured or predicted; `None` while there is none.
    pub kind: Option<TimeKind>,
    /// The first of the ranking and its last race against the baseline.
    pub best: Option<(CandidateId, Option<Against>)>,
    /// The promoted candidate and its last race.
    pub promoted: Option<(CandidateId, Against)>,
    /// The reason why the best candidate that beat the baseline was not promoted.
    pub refused: Option<&'a str>,
    /// The noise floor of the run's races, as a ratio.
    pub floor: Option<f64>,
}

impl Conclusion<'_> {
    /// Whether a candidate beats the baseline by more than the noise.
    pub fn is_gain(&self) -> bool {
        let best = self.best.and_then(|(_, race)| race);
        self.promoted.is_some() || best.is_some_and(|race| race.in_run(self.floor).verdict == Faster)
    }

    /// The verdict as a sentence.
    pub fn words(&self) -> String {
        let is_predicted = self.kind == Some(TimeKind::Predicted);
        let speed = |(id, race): (CandidateId, Against)| {
            let is = if is_predicted { "is predicted to be" } else { "is" };
            let Against { ratio, low, high, .. } = race;
            format!("candidate {} {is} {ratio:.3}× as fast as the baseline ({low:.3} to {high:.3})", id.0)
        };
        if let Some(winner) = self.promoted {
            let all = if is_predicted { "measure it on the device" } else { "it won all its races" };
            return format!("Found a faster plan: {}; {all}.", speed(winner));
        }
        let Some((id, race)) = self.best else { return "No candidate has a time.".to_owned() };
        let Some(race) = race.map(|race| race.in_run(self.floor)) else {
            return match is_predicted {
                true => "No candidate was compared with the baseline.".to_owned(),
                false => "No verdict: no candidate was raced against the baseline.".to_owned(),
            };
        };
        match (race.verdict, self.refused) {
            (Slower, _) => "No plan found that is faster than the baseline.".to_owned(),
            (Undecided, _) => undecided(race, is_predicted),
            (Faster, Some(why)) => format!("No plan is kept: {}, but {why}.", speed((id, race))),
            (Faster, None) => format!("So far, {}.", speed((id, race))),
        }
    }
}

/// The verdict where the comparison of the best candidate does not decide.
fn undecided(race: Against, is_predicted: bool) -> String {
    let Against { ratio, low, high, noise, .. } = race;
    let floor = percent(noise);
    match (is_predicted, noise > BUSY) {
        _ if ratio >= noise => format!(
            "No plan found that is faster than the baseline: the best is undecided at {ratio:.3}× ({low:.3} to {high:.3})."
        ),
        (true, _) => format!(
            "No plan found that the model can tell from the baseline: it is uncertain by {floor}. Measure on the device."
        ),
        (false, _) if noise > UNUSABLE => format!(
            "No verdict: timings of one plan differed by a factor of up to {noise:.1} here, so that this machine \
             cannot compare plans. Use a quiet machine."
        ),
        (false, true) => format!("No plan found that beats the noise of {floor}: try a quiet machine."),
        (false, false) => format!("No plan found that beats the noise of {floor}."),
    }
}

/// The excess of a ratio over 1 in percent, with a decimal below 10 %; from 2 on the ratio.
fn percent(ratio: f64) -> String {
    let excess = (ratio - 1.0) * 100.0;
    match excess {
        ..9.95 => format!("{excess:.1} %"),
        ..100.0 => format!("{excess:.0} %"),
        _ => format!("a factor of {ratio:.1}"),
    }
}

impl Against {
    /// The race within its run: below the noise floor of all races, as a ratio, it is undecided. A race alone
    /// knows only its own noise.
    pub fn in_run(self, floor: Option<f64>) -> Against {
        let noise = self.noise.max(floor.unwrap_or(1.0));
        let is_within = self.ratio < noise && self.ratio > 1.0 / noise;
        Against { noise, verdict: if is_within { Undecided } else { self.verdict }, ..self }
    }
}

#[cfg(test)]
mod tests {
    use bench::SpeedVerdict;

    use super::*;

    fn race(ratio: f64, verdict: SpeedVerdict) -> Against {
        Against {
            incumbent: CandidateId(1),
            ratio,
            low: ratio - 0.01,
            high: ratio + 0.01,
            noise: 1.004,
            verdict,
        }
    }

    fn said(kind: TimeKind, race: Against, floor: f64, refused: Option<&str>) -> String {
        let best = Some((CandidateId(7), Some(race)));
        Conclusion { kind: Some(kind), best, promoted: None, refused, floor: Some(floor) }.words()
    }

    #[test]
    fn a_search_has_one_sentence() {
        use TimeKind::{Measured, Predicted};
        let faster = race(1.05, Faster);
        assert_eq!(
            said(Measured, faster, 1.09, Some("it is below the noise")),
            "No plan found that beats the noise of 9.0 %: try a quiet machine."
        );
        assert_eq!(
            said(Measured, race(1.001, Undecided), 1.0, None),
            "No plan found that beats the noise of 0.4 %."
        );
        assert_eq!(
            said(Measured, race(1.2, Undecided), 1.1, None),
            "No plan found that is faster than the baseline: the best is undecided at 1.200× (1.190 to 1.210)."
        );
        assert_eq!(
            said(Measured, faster, 14.43, None),
            "No verdict: timings of one plan differed by a factor of up to 14.4 here, so that this machine cannot \
             compare plans. Use a quiet machine."
        );
        assert!(said(Predicted, faster, 2.53, None).contains("uncertain by a factor of 2.5. Measure"));
        assert_eq!(
            said(Measured, race(0.8, Slower), 1.1, None),
            "No plan found that is faster than the baseline."
        );
        assert_eq!(
            said(Measured, faster, 1.02, Some("its second race was lost")),
            "No plan is kept: candidate 7 is 1.050× as fast as the baseline (1.040 to 1.060), but its second race was lost."
        );
        assert!(said(Measured, faster, 1.02, None).starts_with("So far, candidate 7 is 1.050×"));
        let told = said(Predicted, faster, 1.431, None);
        assert_eq!(
            told,
            "No plan found that the model can tell from the baseline: it is uncertain by 43 %. Measure on the device."
        );
        let promoted = Some((CandidateId(7), faster));
        let all = Conclusion { kind: Some(Measured), best: None, promoted, refused: None, floor: None };
        assert_eq!(
            all.words(),
            "Found a faster plan: candidate 7 is 1.050× as fast as the baseline (1.040 to 1.060); it won all its races."
        );
        assert!(all.is_gain());
        let none = Conclusion { kind: None, best: None, promoted: None, refused: None, floor: None };
        assert_eq!(none.words(), "No candidate has a time.");
        let unraced = Conclusion { best: Some((CandidateId(7), None)), ..none };
        assert_eq!(unraced.words(), "No verdict: no candidate was raced against the baseline.");
    }

    #[test]
    fn a_race_below_the_noise_of_its_run_is_undecided() {
        let found = |ratio, verdict, floor| race(ratio, verdict).in_run(floor).verdict;
        assert_eq!(found(1.05, Faster, Some(1.09)), Undecided);
        assert_eq!(found(0.95, Slower, Some(1.09)), Undecided);
        assert_eq!(found(1.05, Faster, Some(1.02)), Faster);
        assert_eq!(found(1.05, Faster, None), Faster);
    }
}
