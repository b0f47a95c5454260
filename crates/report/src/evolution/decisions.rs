//! The decisions of a search with their reasons.

use kernels::select::Shape;
use maud::{Markup, html};
use serde_json::Value;

use super::axis::{ratio, time};
use super::{Links, view};
use ledger::{Against, Decided};

/// The decisions with the figures behind them.
pub fn decisions(decisions: &[Decided], links: Links) -> Markup {
    if decisions.is_empty() {
        return html! { p.soft { "Nothing was decided yet." } };
    }
    html! {
        div.scroll { table.decisions.stacks {
            thead { tr { th { "decision" } th { "candidate" } th { "because" } th { "when" } } }
            tbody { @for d in decisions {
                tr {
                    td { b { (d.decision.what.replace('_', " ")) } }
                    td data-label="candidate" { @match d.decision.candidate { Some(id) => (links.number(id)), None => "–" } }
                    td { (because(&d.decision.why)) }
                    td.n { (view::moment(d.at)) }
                }
            } }
        } }
    }
}

/// The reason of a decision: a sentence and a table of criteria if there is one, else the figures.
fn because(why: &Value) -> Markup {
    let rows = why["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| value.as_str().map_or_else(|| in_line(value), str::to_owned);
    html! {
        @if rows.is_empty() { (evidence(why)) } @else {
            p { (text(&why["why"])) }
            table.criteria { tbody { @for row in rows {
                tr { td.soft { (text(&row["criterion"])) } td.n { (text(&row["value"])) } td { (text(&row["says"])) } }
            } } }
        }
    }
}

/// The evidence for or against a decision.
fn evidence(why: &Value) -> Markup {
    let Value::Object(fields) = why else { return figures(why) };
    let name = |key: &str| match key {
        "why" => "because".to_owned(),
        "us" => "µs".to_owned(),
        "kind" => "times are".to_owned(),
        "race" => "latest race".to_owned(),
        "shipped" => "against the shipped plan".to_owned(),
        "held_out" => "held-out problems".to_owned(),
        other => other.replace('_', " "),
    };
    // For a held-out problem: the race, or why there was none.
    let held_out = |values: &[Value]| {
        let race = |v: &Value| in_line(if v["race"].is_null() { &v["end"] } else { &v["race"] });
        values
            .iter()
            .map(|v| format!("{}: {}", in_line(&v["problem"]), race(v)))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let value = |key: &str, value: &Value| match (key, value) {
        ("held_out", Value::Array(values)) => held_out(values),
        (_, value) => in_line(value),
    };
    // The short timing says nothing beside a race, and its figure differs from the time of the ranking.
    let is_shown = |key: &str, of: &Value| {
        !of.is_null() && (key != "us" || fields.get("race").is_none_or(Value::is_null))
    };
    html! {
        ul.figures { @for (key, of) in fields.iter().filter(|(key, of)| is_shown(key, of)) {
            li { span.soft { (name(key)) } " " (value(key, of)) }
        } }
    }
}

/// An object as a list of names and values; any other value is printed unchanged.
pub fn figures(value: &Value) -> Markup {
    html! {
        @match value {
            Value::Object(fields) => ul.figures { @for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                li { span.soft { (name.replace('_', " ")) } " " (in_line(value)) }
            } },
            other => (in_line(other)),
        }
    }
}

/// A value in a few words, for example a race as its ratio, or a problem as its shape.
pub fn in_line(value: &Value) -> String {
    let list = |values: &[Value]| values.iter().map(in_line).collect::<Vec<_>>().join("; ");
    match value {
        Value::String(text) => text.replace('_', " "),
        Value::Number(n) if n.is_f64() => time(n.as_f64().unwrap_or(f64::NAN)),
        Value::Array(values) => list(values),
        Value::Object(fields) => {
            if let Ok(race) = serde_json::from_value::<Against>(value.clone()) {
                let (low, high) = (ratio(race.low), ratio(race.high));
                return format!("{} ({low} to {high}), {}", ratio(race.ratio), race.verdict.name());
            }
            if let Ok(problem) = serde_json::from_value::<Shape>(value.clone()) {
                return problem.title();
            }
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            fields
                .map(|(name, value)| format!("{} {}", name.replace('_', " "), in_line(value)))
                .collect::<Vec<_>>()
                .join(" ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use problem::Problem;
    use serde_json::json;

    use super::*;

    #[test]
    fn reasons_in_a_few_words() {
        let race = json!({ "incumbent": 3, "ratio": 1.25, "low": 1.2, "high": 1.3, "noise": 0.01, "verdict": "FASTER" });
        let held = json!([{ "problem": Shape::of(&Problem::mission()), "end": "raced", "race": race }]);
        let text =
            because(&json!({ "race": race, "us": 12.3456, "held_out": held, "kind": null })).into_string();
        assert!(text.contains("1.25× (1.20× to 1.30×), FASTER") && !text.contains("12.35"), "{text}");
        assert!(text.contains("held-out problems</span> f16 B1 H8 S512 D64: 1.25×"), "{text}");
        assert!(text.contains("latest race</span>") && !text.contains("µs</span>"), "{text}");
        assert!(!text.contains("kind") && !text.contains("times are"), "{text}");
        let untried =
            json!([{ "problem": Shape::of(&Problem::mission()), "end": "not_tried", "race": null }]);
        let text = because(&json!({ "held_out": untried, "why": "it was slow" })).into_string();
        assert!(
            text.contains("S512 D64: not tried") && text.contains("because</span> it was slow"),
            "{text}"
        );
        let row = json!({ "criterion": "floor", "value": "3 µs", "says": "there is room" });
        let text = because(&json!({ "why": "Go on.", "rows": [row], "possible": 2.0 })).into_string();
        assert!(
            text.contains("Go on.") && text.contains("there is room") && !text.contains("possible"),
            "{text}"
        );
    }
}
