//! Prints the report of a run as text.

use std::io::Write;

use evolve::{Candidate, CaseReport, End, HeldOutEnd, Report, Shown};
use ledger::{Gain, TimeKind};
use serde_json::json;

use crate::error::CliError;
use crate::table;
use crate::terminal::one_line;

/// Prints the result of a run.
pub fn print(out: &mut impl Write, report: &Report) -> Result<(), CliError> {
    if let Some(words) = report.load.and_then(|load| load.words()) {
        writeln!(out, "This machine was busy when the run began: {words}. Its times are unreliable.\n")?;
    }
    for case in report.cases.all() {
        print_case(out, case)?;
        writeln!(out)?;
    }
    writeln!(
        out,
        "run {} of {}: {:.1} s of work, {:.1} s of them with the device",
        report.run.0,
        one_line(&report.ledger.to_string_lossy()),
        report.seconds.evaluators,
        report.seconds.device,
    )?;
    if let Some(cost) = report.cost.filter(|cost| cost.device_seconds > 0.0) {
        let price = match (cost.price, cost.price_per_hour) {
            (Some(price), Some(hour)) => format!(", cost {price:.4} at {hour} an hour"),
            _ => " (--price gives its cost)".to_owned(),
        };
        writeln!(out, "device held for {:.1} s, idle time included{price}", cost.device_seconds)?;
    }
    Ok(())
}

fn print_case(out: &mut impl Write, case: &CaseReport) -> Result<(), CliError> {
    let is_predicted = case.kind == Some(TimeKind::Predicted);
    let predicted = if is_predicted { " (all times are predicted by the time model)" } else { "" };
    writeln!(out, "{} on {}{predicted}", case.words, case.device)?;
    writeln!(out, "{}\n", case.conclusion)?;
    let rows =
        [("baseline", &case.baseline), ("best", &case.best), ("best random sample", &case.random_arm.best)];
    let rows: Vec<Vec<String>> =
        rows.iter().filter_map(|(name, who)| Some(line(name, who.as_ref()?))).collect();
    table::print(out, &["", "time µs", "candidate", "by", "plan"], &rows)?;
    match (case.speedup, case.interval, case.verdict) {
        (Some(speedup), Some([low, high]), Some(verdict)) => {
            let floor = case.noise_floor.map_or(String::new(), |floor| match is_predicted {
                true => format!("; the model cannot tell differences below {floor:.3}× apart"),
                false => format!("; differences below {floor:.3}× are noise in this run"),
            });
            let verdict = verdict.name();
            writeln!(out, "best against baseline: {speedup:.3}× ({low:.3} to {high:.3}), {verdict}{floor}")?
        }
        _ => writeln!(out, "best against baseline: not compared")?,
    }
    let (gain, equal) = (case.random_arm.gain, case.random_arm.at_equal_budget);
    let gain = gain.map_or(String::new(), |gain| {
        let Gain { ratio, low, high, noise, verdict } = gain;
        format!(" ({ratio:.3}×, {low:.3} to {high:.3}, noise {noise:.3}×: {})", verdict.name())
    });
    let timed = equal.evolution_us.or(equal.random_us).map_or(String::new(), |_| {
        let [ours, random] = [equal.evolution_us, equal.random_us].map(|us| shown(us, 2));
        let by = if is_predicted { "predicted" } else { "by short timings" };
        let each = equal.candidates;
        format!("; of {each} candidates each (ours with those given), {by}: {ours} µs against {random} µs")
    });
    writeln!(out, "random sampling: {}{gain}{timed}", case.random_arm.says)?;
    let control = case
        .control
        .race
        .map_or("not compared".to_owned(), |race| format!("{} {:.3}×", race.verdict.name(), race.ratio));
    writeln!(out, "control (the baseline against itself): {control}")?;
    for held in &case.held_out {
        writeln!(out, "held out, {}: {}", held.problem, held_out(held))?;
    }
    if let Some(race) = case.shipped.as_ref().and_then(|shipped| shipped.race) {
        writeln!(
            out,
            "shipped plan against candidate {}: {:.3}× its speed, {}",
            race.incumbent.0,
            race.ratio,
            race.verdict.name()
        )?;
    }
    promotion(out, case)?;
    if !case.skipped.is_empty() {
        writeln!(out, "no time was left for: {}", case.skipped.join("; "))?;
    }
    let rejected: Vec<String> = case
        .rejected
        .iter()
        .map(|(reason, count)| format!("{count} {}", reason.name().replace('_', " ")))
        .collect();
    if !rejected.is_empty() {
        writeln!(out, "rejected: {}", rejected.join(", "))?;
    }
    let taken_over = case.taken_over;
    if taken_over.verdicts + taken_over.times > 0 {
        writeln!(
            out,
            "taken over from earlier runs: {} verdicts of the gate, {} short timings",
            taken_over.verdicts, taken_over.times
        )?;
    }
    let advice = &case.decision;
    let rows: Vec<Vec<String>> = (advice.rows.iter())
        .map(|row| vec![row.criterion.to_owned(), row.value.clone(), row.says.clone()])
        .collect();
    table::print(out, &["looked at", "is", "which means"], &rows)?;
    writeln!(out, "decision: {}: {}", advice.what.name().replace('_', " "), advice.why)?;
    Ok(())
}

/// The result of the best candidate on a held-out problem.
fn held_out(held: &HeldOutEnd) -> String {
    match (held.end, held.race, held.reason) {
        (End::NotTried, ..) => "not tried".to_owned(),
        (End::NotComputed, ..) => "its plan does not support this problem, and is not used there".to_owned(),
        (End::Wrong, ..) => "wrong there".to_owned(),
        (End::Raced, Some(race), _) => format!("{} {:.3}×", race.verdict.name(), race.ratio),
        (_, _, Some(reason)) => format!("its race was not run to its end ({reason})"),
        _ => "its race was not run to its end".to_owned(),
    }
}

/// The promoted candidate.
fn promotion(out: &mut impl Write, case: &CaseReport) -> Result<(), CliError> {
    if let Some(promoted) = &case.promoted {
        // A CPU plan needs no row of the table of GPU kernels: it is kept for this user.
        let no_row = promoted
            .no_row
            .filter(|_| !promoted.kept)
            .map(|why| format!(" (no row of the table of tuned plans: {why})"));
        writeln!(
            out,
            "promoted: candidate {}, {}× the baseline's speed{}",
            promoted.id.0,
            shown(promoted.evidence.race.map(|race| race.ratio), 3),
            no_row.unwrap_or_default()
        )?;
    }
    Ok(())
}

fn line(name: &str, who: &Shown) -> Vec<String> {
    let plan = match &who.candidate {
        Candidate::Gpu(plan) => json!(plan).to_string(),
        Candidate::Cpu(plan) => json!(plan).to_string(),
        Candidate::Kernel(_) => "a kernel of its own".to_owned(),
    };
    vec![name.to_owned(), shown(who.us, 2), who.id.0.to_string(), who.operator.to_string(), plan]
}

/// A number with this many digits after the point, or a dash if there is none.
fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |number| format!("{number:.digits$}"))
}

#[cfg(test)]
mod tests {
    use bench::SpeedVerdict;
    use kernels::select::Shape;
    use ledger::{Against, CandidateId, Reason};
    use problem::Problem;

    use super::*;

    #[test]
    fn ends_on_held_out_problems_are_words() {
        let problem = Shape::of(&Problem::mission());
        let said = |end, race, reason| held_out(&HeldOutEnd { problem, end, race, reason });
        let verdict = SpeedVerdict::Slower;
        let incumbent = CandidateId(1);
        let race = Against { incumbent, ratio: 0.5, low: 0.4, high: 0.6, noise: 1.01, verdict };
        assert_eq!(said(End::Raced, Some(race), None), "SLOWER 0.500×");
        assert_eq!(
            said(End::NotComputed, None, None),
            "its plan does not support this problem, and is not used there"
        );
        assert_eq!(said(End::NotTried, None, None), "not tried");
        let failed = said(End::Failed, None, Some(Reason::Hangs));
        assert_eq!(failed, "its race was not run to its end (hangs)");
    }
}
