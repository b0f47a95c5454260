//! The gain of a search over random samples.

use bench::{Comparison, Interval, SpeedVerdict, judged};
use serde::{Deserialize, Serialize};

use crate::Against;

/// The key of a final decision that says what the search gained over random samples: `gain` and `says`.
pub const CHANCE: &str = "random_sampling";

/// The best of one group beside the best of another one, by their races against the same baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// Time of the best random sample divided by that of the evolution's best.
    pub ratio: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
    /// The noise floor, as a ratio.
    pub noise: f64,
    pub verdict: SpeedVerdict,
}

/// The gain from two races against the same baseline. Their errors are independent, so the squares of the
/// log-errors add. `floor` is the noise floor of the run's races, as a ratio.
pub fn gain(ours: &Against, random: &Against, floor: f64) -> Gain {
    let ratio = (ours.ratio / random.ratio).ln();
    // `hypot` is not used: since glibc 2.35 it has a new symbol version, which a wheel for older systems
    // cannot use.
    let both = |a: f64, b: f64| (a.ln().powi(2) + b.ln().powi(2)).sqrt();
    let down = both(ours.ratio / ours.low, random.high / random.ratio);
    let up = both(ours.high / ours.ratio, random.ratio / random.low);
    let found = Interval { low: ratio - down, middle: ratio, high: ratio + up };
    let Comparison { ratio, low, high, noise, verdict } =
        judged(found, ours.noise.max(random.noise).max(floor).ln());
    Gain { ratio, low, high, noise, verdict }
}

impl Gain {
    /// The meaning of the verdict for the user.
    pub const fn says(&self) -> &'static str {
        match self.verdict {
            SpeedVerdict::Faster => "the evolution beats random sampling",
            SpeedVerdict::Slower => "random sampling beats the evolution",
            SpeedVerdict::Undecided => {
                "as many random samples do as well, as far as can be told: the operators of the search gained nothing here"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CandidateId;

    #[test]
    fn gains_over_blind_draws_know_their_doubt() {
        let against = |ratio: f64, width: f64| Against {
            incumbent: CandidateId(1),
            ratio,
            low: ratio / width,
            high: ratio * width,
            noise: 1.01,
            verdict: SpeedVerdict::Faster,
        };
        let clear = gain(&against(1.3, 1.02), &against(1.1, 1.02), 1.0);
        assert_eq!(clear.verdict, SpeedVerdict::Faster);
        assert!((clear.ratio - 1.3 / 1.1).abs() < 1e-12 && clear.low > 1.1 && clear.high < 1.25, "{clear:?}");
        assert_eq!(gain(&against(1.3, 1.2), &against(1.25, 1.2), 1.0).verdict, SpeedVerdict::Undecided);
        assert_eq!(gain(&against(1.0, 1.01), &against(1.2, 1.01), 1.0).verdict, SpeedVerdict::Slower);
        // A verdict needs the whole interval beyond the noise.
        assert_eq!(gain(&against(1.1, 1.045), &against(1.045, 1.01), 1.0).verdict, SpeedVerdict::Undecided);
        let same = against(1.2, 1.05);
        assert_eq!(gain(&same, &same, 1.0).verdict, SpeedVerdict::Undecided);
        // If the control deviates from 1 by more than the difference, the difference is noise.
        let doubtful = gain(&against(1.3, 1.02), &against(1.1, 1.02), 1.3);
        assert_eq!((doubtful.verdict, doubtful.noise), (SpeedVerdict::Undecided, 1.3));
    }
}
