//! The result of a check as SARIF 2.1.0, which code hosts show next to the source lines
//! (<https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>).

use std::path::Path;

use check::causes::Cause;
use check::gate::Verdict;
use check::names::demangle;
use check::sources::{SourceCall, SourceLine};
use check::study::Study;
use ptx::Statement;
use serde_json::{Value, json};

use crate::findings::{Found, sentence};
use crate::unjudged::Unjudged;

const SCHEMA: &str = "https://json.schemastore.org/sarif-2.1.0.json";

/// The log of one check. `file` is the kernel's file, `launch` its launch file.
pub fn log(study: &Study, found: &Found, file: &Path, launch: Option<&Path>) -> Value {
    let mut results = Vec::new();
    let entry = entry(study, file);
    for (causes, level) in [(&found.causes, "error"), (&found.notes, "note")] {
        results.extend(causes.iter().map(|cause| of_cause(cause, level, file, &entry)));
    }
    let (rule, level) = match study.check.verdict {
        Verdict::Incomplete => ("incomplete", "warning"),
        Verdict::Passed | Verdict::Failed => ("wrong_result", "error"),
    };
    let said = |rule: &str, level: &str, text: &String| {
        let message = json!({ "text": text });
        json!({ "ruleId": rule, "level": level, "message": message, "locations": [entry] })
    };
    results.extend(found.reasons.iter().map(|reason| said(rule, level, reason)));
    results.extend(found.warnings.iter().map(|warning| said("little_to_judge", "warning", warning)));
    let rules = rules(&results, found);
    for result in &mut results {
        let index = rules.iter().position(|rule| rule["id"] == result["ruleId"]);
        result["ruleIndex"] = json!(index);
    }
    log_of(&results, &rules, file, launch, &demangle(&study.bound.kernel.entry))
}

/// The log of a kernel that did not run.
pub fn unjudged(unjudged: &Unjudged, launch: Option<&Path>) -> Value {
    let Unjudged { file, kernel, at, line, .. } = unjudged;
    let mut place = location(*line, at, &None, file);
    place["logicalLocations"] = json!([{ "name": kernel, "kind": "function" }]);
    let message = json!({ "text": unjudged.to_string() });
    let mut results =
        [json!({ "ruleId": "incomplete", "level": "warning", "message": message, "locations": [place] })];
    let none = Found { causes: Vec::new(), notes: Vec::new(), reasons: Vec::new(), warnings: Vec::new() };
    let rules = rules(&results, &none);
    results[0]["ruleIndex"] = json!(0);
    log_of(&results, &rules, file, launch, kernel)
}

fn log_of(results: &[Value], rules: &[Value], file: &Path, launch: Option<&Path>, kernel: &str) -> Value {
    // A code host takes several logs together only if their ids differ.
    let id = match launch {
        Some(launch) => format!("flashcore/{}/", launch.display()),
        None => format!("flashcore/{}:{kernel}/", file.display()),
    };
    json!({
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{
            "automationDetails": { "id": id },
            "tool": { "driver": {
                "name": "FlashCore",
                "semanticVersion": env!("CARGO_PKG_VERSION"),
                "informationUri": env!("CARGO_PKG_REPOSITORY"),
                "rules": rules,
            }},
            "invocations": [{ "executionSuccessful": true }],
            "columnKind": "unicodeCodePoints",
            "results": results,
        }],
    })
}

/// The rules of the results, each once.
fn rules(results: &[Value], found: &Found) -> Vec<Value> {
    let mut rules: Vec<Value> = Vec::new();
    for result in results {
        if rules.iter().any(|rule| rule["id"] == result["ruleId"]) {
            continue;
        }
        let id = result["ruleId"].as_str().unwrap_or_default();
        let cause = found.causes.iter().chain(&found.notes).find(|cause| cause.kind.name() == id);
        let help =
            cause.map_or("Compare the kernel with what its launch file says.", |cause| cause.cure.as_ref());
        rules.push(json!({
            "id": id,
            "name": id,
            "shortDescription": { "text": id.replace('_', " ") },
            "help": { "text": help },
            "helpUri": format!("{}/blob/main/docs/src/reference/hazards.md", env!("CARGO_PKG_REPOSITORY")),
            "defaultConfiguration": { "level": result["level"] },
        }));
    }
    rules
}

/// The result of one cause in the kernel at `entry`.
fn of_cause(cause: &Cause, level: &str, file: &Path, entry: &Value) -> Value {
    let mut related = Vec::new();
    if let Some(line) = cause.other_line {
        related.push((
            "the other access".to_owned(),
            location(line, &cause.other_source, &cause.other_text, file),
        ));
    }
    for source in [&cause.source, &cause.other_source].into_iter().flatten() {
        related.extend(source.inlined_at.iter().map(|call| {
            let into = call.function.as_ref().map_or_else(String::new, |name| format!(" into {name}"));
            (format!("inlined here{into}"), of_call(call))
        }));
    }
    let related = related.into_iter().enumerate().map(|(id, (text, mut location))| {
        location["id"] = json!(id);
        location["message"] = json!({ "text": text });
        location
    });
    let kernel = entry["logicalLocations"][0]["name"].as_str().unwrap_or_default();
    let mut place = location(cause.line, &cause.source, &cause.text, file);
    if cause.line == 0 {
        // The finding belongs to the whole kernel.
        place = entry.clone();
    }
    let within = cause.source.as_ref().and_then(|source| source.function.as_deref());
    place["logicalLocations"] = match within.filter(|within| *within != kernel) {
        Some(within) => json!([{ "name": within, "kind": "function" }, entry["logicalLocations"][0]]),
        None => entry["logicalLocations"].clone(),
    };
    json!({
        "ruleId": cause.kind.name(),
        "level": level,
        "message": { "text": format!("{}. Kernel: {kernel}. Cure: {}.", sentence(cause), cause.cure) },
        "locations": [place],
        "relatedLocations": related.collect::<Vec<_>>(),
        "occurrenceCount": cause.count,
    })
}

/// The place of a source line; without one, of the line of the PTX file.
fn location(ptx_line: u32, source: &Option<SourceLine>, ptx: &Option<String>, file: &Path) -> Value {
    let (name, line, column, text) = match source {
        Some(source) => (source.file.clone(), source.line, source.column, &source.text),
        None => (file.display().to_string(), ptx_line.max(1), 0, ptx),
    };
    let mut region = json!({ "startLine": line });
    if column > 0 {
        region["startColumn"] = json!(column);
    }
    if let Some(text) = text {
        region["snippet"] = json!({ "text": text });
    }
    physical(&name, &region)
}

fn of_call(call: &SourceCall) -> Value {
    physical(&call.file, &json!({ "startLine": call.line }))
}

fn physical(file: &str, region: &Value) -> Value {
    json!({ "physicalLocation": { "artifactLocation": { "uri": uri(file) }, "region": region } })
}

/// The place of the kernel itself: its first instruction with a source line.
fn entry(study: &Study, file: &Path) -> Value {
    let kernel = &study.bound.kernel;
    let body = kernel.module.function(&kernel.entry).and_then(|function| function.body.as_ref());
    let lines = body.into_iter().flat_map(|body| &body.statements).filter_map(|statement| match statement {
        Statement::Inst(inst) => Some(inst.line),
        Statement::Label(_) | Statement::Pragma(_) => None,
    });
    let source = lines.clone().find_map(|line| study.sources.line(line));
    let mut location = location(lines.min().unwrap_or(1), &source, &None, file);
    let name = demangle(&kernel.entry);
    location["logicalLocations"] =
        json!([{ "name": name, "decoratedName": kernel.entry, "kind": "function" }]);
    location
}

/// A file name as a reference of a URI: relative names stay relative.
pub fn uri(file: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
    let escaped: String = file
        .bytes()
        .map(|byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect();
    if file.starts_with('/') { format!("file://{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::uri;

    #[test]
    fn names_of_files_become_references() {
        assert_eq!(uri("src/row 1.cu"), "src/row%201.cu");
        assert_eq!(uri("/a/é:b.cu"), "file:///a/%C3%A9%3Ab.cu");
    }
}
