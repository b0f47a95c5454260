//! The words and CSS classes of groups, stages, races and kinds of times.

use ledger::{Arm, Stage, TimeKind, Trial};
use maud::{Markup, html};

pub const fn kind_words(kind: Option<TimeKind>) -> &'static str {
    match kind {
        Some(TimeKind::Measured) => "measured",
        Some(TimeKind::Predicted) => "predicted by the time model, not measured",
        None => "no times yet",
    }
}

pub fn kind_badge(kind: Option<TimeKind>) -> Markup {
    let class = match kind {
        Some(TimeKind::Measured) => "badge measured",
        Some(TimeKind::Predicted) => "badge predicted",
        None => "badge",
    };
    html! { span class=(class) { (kind_words(kind)) } }
}

pub const fn arm_class(arm: Arm) -> &'static str {
    match arm {
        Arm::Baseline => "baseline",
        Arm::Evolution => "evolution",
        Arm::Random => "random",
        Arm::Control => "control",
    }
}

pub const fn arm_name(arm: Arm) -> &'static str {
    match arm {
        Arm::Baseline => "baseline",
        Arm::Evolution => "evolution",
        Arm::Random => "random samples",
        Arm::Control => "control",
    }
}

pub const fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Propose => "propose",
        Stage::Screen => "screen",
        Stage::Check => "check",
        Stage::Microbench => "short timing",
        Stage::Race => "race",
        Stage::HeldOut => "held out",
    }
}

/// The name of a stage in a run whose times are of this kind.
pub const fn stage_in(stage: Stage, kind: Option<TimeKind>) -> &'static str {
    match (stage, kind) {
        (Stage::Microbench, Some(TimeKind::Predicted)) => "prediction",
        (Stage::Race, Some(TimeKind::Predicted)) => "comparison",
        _ => stage_name(stage),
    }
}

/// The name of a trial whose time is of this kind.
pub const fn trial_in(trial: Trial, kind: TimeKind) -> &'static str {
    match (kind, trial) {
        (TimeKind::Measured, Trial::Microbench) => "short timing",
        (TimeKind::Measured, Trial::Race) => "race",
        (TimeKind::Measured, Trial::HeldOut) => "held-out race",
        (TimeKind::Predicted, Trial::Microbench) => "prediction",
        (TimeKind::Predicted, Trial::Race) => "predicted comparison",
        (TimeKind::Predicted, Trial::HeldOut) => "predicted comparison, held out",
    }
}
