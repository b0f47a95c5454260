//! Prints the report of a run for people.

use std::io::Write;

use serde_json::Value;

use crate::error::CliError;
use crate::table;
use crate::terminal::one_line;

/// Prints the result of a run.
pub fn print(out: &mut impl Write, report: &Value) -> Result<(), CliError> {
    let several = report["problems"].as_array();
    let cases: Vec<&Value> = several.map_or_else(|| vec![report], |cases| cases.iter().collect());
    for case in cases {
        print_case(out, case)?;
        writeln!(out)?;
    }
    let seconds = &report["seconds"];
    writeln!(
        out,
        "run {} of {}: {:.1} s of evaluators, {:.1} s of them with the device",
        report["run"],
        one_line(report["ledger"].as_str().unwrap_or_default()),
        number(&seconds["evaluators"]),
        number(&seconds["device"]),
    )?;
    let cost = &report["cost"];
    match (cost["device_seconds"].as_f64(), cost["price"].as_f64()) {
        (Some(held), price) if held > 0.0 => {
            let price = price.map_or(" (--price gives its cost)".to_owned(), |price| {
                format!(", cost {price:.4} at {} an hour", cost["price_per_hour"])
            });
            writeln!(out, "device time: {held:.1} s{price}")?;
        }
        _ => {}
    }
    Ok(())
}

fn print_case(out: &mut impl Write, case: &Value) -> Result<(), CliError> {
    let predicted =
        if case["kind"] == "predicted" { " (all times are predicted by the time model)" } else { "" };
    writeln!(out, "{} on {}{predicted}", text(&case["words"]), text(&case["device"]))?;
    let rows = [
        ("baseline", &case["baseline"]),
        ("best", &case["best"]),
        ("best random sample", &case["random_arm"]["best"]),
    ];
    let rows: Vec<Vec<String>> =
        rows.iter().filter(|(_, who)| who.is_object()).map(|(name, who)| line(name, who)).collect();
    table::print(out, &["", "time µs", "candidate", "by", "plan"], &rows)?;
    match case["speedup"].as_f64() {
        Some(speedup) => writeln!(
            out,
            "best against baseline: {speedup:.3}× ({:.3} to {:.3}), {}",
            number(&case["interval"][0]),
            number(&case["interval"][1]),
            text(&case["verdict"])
        )?,
        None => writeln!(out, "best against baseline: not raced")?,
    }
    let gain = &case["random_arm"]["gain"];
    let equal = &case["random_arm"]["at_equal_budget"];
    writeln!(
        out,
        "random sampling: {}{}; of {} candidates each, by short timings: {} µs against {} µs",
        text(&case["random_arm"]["says"]),
        gain["ratio"].as_f64().map_or(String::new(), |ratio| {
            format!(" ({ratio:.3}×, {:.3} to {:.3})", number(&gain["low"]), number(&gain["high"]))
        }),
        equal["candidates"],
        shown(&equal["evolution_us"], 2),
        shown(&equal["random_us"], 2),
    )?;
    let control = &case["control"];
    writeln!(
        out,
        "control (the baseline against itself): {} {}×",
        control["verdict"].as_str().unwrap_or("not raced"),
        shown(&control["race"]["ratio"], 3)
    )?;
    for held in case["held_out"].as_array().into_iter().flatten() {
        writeln!(out, "held out, {}: {}", shape(&held["problem"]), held_out(held))?;
    }
    if let Some(ratio) = case["shipped"]["race"]["ratio"].as_f64() {
        writeln!(
            out,
            "what ships against candidate {}: {ratio:.3}× its speed, {}",
            case["shipped"]["race"]["incumbent"],
            text(&case["shipped"]["race"]["verdict"])
        )?;
    }
    promotion(out, case)?;
    let skipped: Vec<&str> = case["skipped"].as_array().into_iter().flatten().map(text).collect();
    if !skipped.is_empty() {
        writeln!(out, "no time was left for: {}", skipped.join("; "))?;
    }
    operators(out, case)?;
    let rejected = case["rejected"].as_object().into_iter().flatten();
    let rejected: Vec<String> = rejected.map(|(reason, count)| format!("{count} {reason}")).collect();
    writeln!(out, "rejected: {}", rejected.join(", "))?;
    let [verdicts, times] = ["verdicts", "times"].map(|what| case["taken_over"][what].as_u64().unwrap_or(0));
    if verdicts + times > 0 {
        writeln!(
            out,
            "taken over from earlier runs: {verdicts} verdicts of the gate, {times} short timings"
        )?;
    }
    decision(out, &case["decision"])
}

/// The result of the best candidate on a held-out problem.
fn held_out(held: &Value) -> String {
    match held["end"].as_str() {
        Some("not_tried") => "not tried".to_owned(),
        Some("not_computed") => "cannot compute it".to_owned(),
        Some("wrong") => "wrong there".to_owned(),
        Some("failed") => format!("its race was not run to its end ({})", text(&held["reason"])),
        _ => format!("{} {}×", text(&held["race"]["verdict"]), shown(&held["race"]["ratio"], 3)),
    }
}

/// The promoted candidate, or why the best candidate that beat the baseline is not promoted.
fn promotion(out: &mut impl Write, case: &Value) -> Result<(), CliError> {
    let (promoted, refused) = (&case["promoted"], &case["refused"]);
    if promoted.is_object() {
        let no_row = promoted["no_row"].as_str();
        let no_row = no_row.map(|why| format!(" (no row of the table of tuned plans: {why})"));
        writeln!(
            out,
            "promoted: candidate {}, {}× the baseline's speed{}",
            promoted["id"],
            shown(&promoted["race"]["ratio"], 3),
            no_row.unwrap_or_default()
        )?;
    }
    if refused.is_object() {
        writeln!(
            out,
            "not promoted: candidate {} beat the baseline, but {}",
            refused["id"],
            text(&refused["why"])
        )?;
    }
    Ok(())
}

fn operators(out: &mut impl Write, case: &Value) -> Result<(), CliError> {
    let accounts = case["operators"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = accounts
        .map(|account| {
            let (pulls, earned) = (number(&account["pulls"]), number(&account["earned"]));
            vec![
                text(&account["operator"]).to_owned(),
                format!("{pulls}"),
                format!("{earned:.1}"),
                format!("{:.3}", earned / pulls),
            ]
        })
        .collect();
    if !rows.is_empty() {
        table::print(out, &["operator", "candidates", "earned", "each"], &rows)?;
    }
    Ok(())
}

fn decision(out: &mut impl Write, decision: &Value) -> Result<(), CliError> {
    let rows: Vec<Vec<String>> = decision["rows"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| ["criterion", "value", "says"].map(|key| text(&row[key]).to_owned()).to_vec())
        .collect();
    table::print(out, &["looked at", "is", "which means"], &rows)?;
    writeln!(out, "decision: {}: {}", text(&decision["what"]).replace('_', " "), text(&decision["why"]))?;
    Ok(())
}

fn line(name: &str, who: &Value) -> Vec<String> {
    let candidate = &who["candidate"];
    let plan = ["gpu", "cpu"].iter().find_map(|kind| candidate.get(kind));
    vec![
        name.to_owned(),
        shown(&who["us"], 2),
        who["id"].to_string(),
        text(&who["operator"]).to_owned(),
        plan.map_or("a kernel of its own".to_owned(), Value::to_string),
    ]
}

fn shape(shape: &Value) -> String {
    serde_json::from_value(shape.clone()).map_or_else(|_| shape.to_string(), |shape| evolve::words(&shape))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("–")
}

/// A number with this many digits after the point, or a dash if there is none.
fn shown(value: &Value, digits: usize) -> String {
    value.as_f64().map_or_else(|| "–".to_owned(), |number| format!("{number:.digits$}"))
}

/// A number, or NaN if there is none.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ends_on_held_out_problems_are_words() {
        let raced = json!({ "end": "raced", "race": { "verdict": "SLOWER", "ratio": 0.5 } });
        assert_eq!(held_out(&raced), "SLOWER 0.500×");
        assert_eq!(held_out(&json!({ "end": "not_computed", "race": null })), "cannot compute it");
        assert_eq!(held_out(&json!({ "end": "not_tried", "race": null })), "not tried");
        let failed = json!({ "end": "failed", "race": null, "reason": "hangs" });
        assert_eq!(held_out(&failed), "its race was not run to its end (hangs)");
    }
}
