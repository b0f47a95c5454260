//! The gain of the search over random samples, and the ratio of one race.

use ledger::{Against, Arm, Ranked};
use maud::{Markup, html};

use super::axis::{grouped, ratio};
use super::below;
use super::view::{Chance, ProblemView};

/// The gain of the search over random samples and the control: first by races, then by short timings,
/// which are the luckiest of many.
pub fn gains(view: &ProblemView) -> Markup {
    let race = |ranked: &Option<Ranked>| {
        let (ranked, baseline) = (ranked.as_ref()?, view.baseline.as_ref()?);
        ranked.against.filter(|race| race.incumbent == baseline.candidate)
    };
    let other_race = view.best.as_ref().and_then(|ranked| ranked.against);
    let is_predicted = view.is_predicted();
    html! {
        p {
            @match (race(&view.best), other_race) {
                (Some(best), _) => {
                    (if is_predicted { "Compared with" } else { "Raced against" }) " the baseline, the best came out at "
                    b { (ratio(best.ratio)) } " (" (ratio(best.low)) " to " (ratio(best.high)) "), " (best.verdict.name()) ". "
                }
                (None, Some(other)) => {
                    "The best was compared with #" (other.incumbent.0) " (" (raced_ratio(&other))
                    "), and not with the baseline: its speed-up is a ratio of separate times. "
                }
                (None, None) if is_predicted => "The best was not compared with the baseline yet. ",
                (None, None) => {
                    "The best has not raced yet: there are only short timings, each the luckiest of many. "
                }
            }
            @if let Some(control) = race(&view.control) {
                "The control, which is the baseline again as if it were new: " (raced_ratio(&control)) ". "
            }
            @if let Some(floor) = view.noise_floor {
                @let kind = view.best.as_ref().map(|best| best.kind);
                @let words = below(floor, kind);
                (words[..1].to_uppercase()) (words[1..]) ". "
            }
        }
        @if let Some(Chance { gain, says }) = &view.chance {
            p {
                "Was the search worth more than chance? "
                @if let Some(found) = gain {
                    "The evolution's best against the best of as many random samples: " (ratio(found.ratio)) " ("
                    (ratio(found.low)) " to " (ratio(found.high)) "), " (found.verdict.name()) ": "
                }
                (says) "."
            }
        }
        @if !is_predicted { (by_short_timings(view)) }
    }
}

/// The best of each group by short timings alone.
fn by_short_timings(view: &ProblemView) -> Markup {
    let best = |arm| view.curve(arm).and_then(|c| Some((c.best_us()?, c.tried)));
    html! {
        p.soft {
            @match (best(Arm::Evolution), best(Arm::Random)) {
                (Some((evolution, tried)), Some((random, drawn))) => {
                    "By short timings alone, "
                    @if evolution < random { "the evolution's best is " (ratio(random / evolution)) " as fast as the best random sample" }
                    @else if evolution > random { "the best random sample is " (ratio(evolution / random)) " as fast as the evolution's best" }
                    @else { "the evolution and random sampling found the same time" }
                    ", after " (grouped(tried)) " and " (grouped(drawn)) " candidates"
                    @if let Some(at_equal) = equal(view, drawn.min(tried)) {
                        "; at " (grouped(drawn.min(tried))) " each, " (ratio(at_equal))
                    }
                    "."
                }
                _ => "No random sample has a time yet.",
            }
        }
    }
}

fn raced_ratio(race: &Against) -> Markup {
    html! { (ratio(race.ratio)) " (" (ratio(race.low)) " to " (ratio(race.high)) "), " (race.verdict.name()) }
}

/// time(random) / time(evolution) for the best of the first `tried` candidates of each.
fn equal(view: &ProblemView, tried: i64) -> Option<f64> {
    let best = |arm| {
        let steps = &view.curve(arm)?.steps;
        steps.iter().rev().find(|s| s.candidates <= tried).map(|s| s.us)
    };
    Some(best(Arm::Random)? / best(Arm::Evolution)?)
}
