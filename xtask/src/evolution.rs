//! Runs a whole evolution as a new user does: 45 seconds on this CPU. The test passes if the run ends and
//! every candidate is accounted for. Speed is not tested.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{XtaskError, quoted, run, target, wheel};

/// Length of the search, minutes. The search makes about a hundred candidates on two cores, and each of them
/// must end with a result. A longer search would not test more.
const MINUTES: &str = "0.75";
/// Time limit of a run: enough for a busy machine. A run that hangs is ended then.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
/// Time between two checks whether a command has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Evolves with the command line and checks the report, the ledger and the page, which stay in
/// `target/evolution`.
///
/// # Errors
/// When a command fails or something is missing from its results.
pub fn test(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    run(cargo().args(["build", "--workspace", "--features", wheel::ALL, "--quiet", "--bin", "flashcore"]))?;
    let target = target(root)?;
    let (program, folder) = (target.join("debug/flashcore"), target.join("evolution"));
    let io = |source| XtaskError::Io { path: folder.clone(), source };
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(io)?;
    }
    fs::create_dir_all(&folder).map_err(io)?;
    let flashcore = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.env("FLASHCORE_CONFIG_DIR", folder.join("config"));
        command.current_dir(&folder).args(args);
        command
    };
    let json = |args: &[&str], name: &str| json(&mut flashcore(args), &folder.join(name));
    let report =
        json(&["evolve", "--device", "cpu", "--minutes", MINUTES, "--no-keep", "--json"], "report.json")?;
    look_at_report(&report)?;
    let runs = json(&["ledger", "runs", "--json"], "runs.json")?;
    let rows = &runs["rows"];
    expect(rows[0]["last"][1] == "finished" && rows.as_array().is_some_and(|rows| rows.len() == 1), &runs)?;
    let check = json(&["ledger", "check", "--json"], "check.json")?;
    expect(check["sound"] == true, &check)?;
    run(flashcore(&["ledger", "export", "facts.jsonl"]).stdout(Stdio::null()))?;
    look_at_facts(&fs::read_to_string(folder.join("facts.jsonl")).map_err(io)?)?;
    run(flashcore(&["report", "--out", "evolution.html"]).stdout(Stdio::null()))?;
    let page = fs::read_to_string(folder.join("evolution.html")).map_err(io)?;
    expect(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"), "the page of the report")?;
    eprintln!("xtask: evolved {} candidates, each with its end", report["candidates"]["total"]);
    Ok(())
}

/// Checks the report that the command printed.
fn look_at_report(report: &Value) -> Result<(), XtaskError> {
    let number = |value: &Value| value.as_f64().is_some_and(|number| number > 0.0);
    expect(report["kind"] == "measured", &report["kind"])?;
    for found in [&report["baseline"], &report["best"], &report["random_arm"]["best"]] {
        expect(number(&found["us"]) && found["candidate"]["cpu"].is_object(), found)?;
    }
    let control = &report["control"];
    expect(number(&control["race"]["ratio"]) || control["rejection"].is_object(), control)?;
    let random = &report["random_arm"];
    expect(number(&random["candidates"]) && random["says"].is_string(), random)?;
    let counts = &report["candidates"];
    let sum = counts["evolution"].as_u64().zip(counts["random"].as_u64()).map(|(a, b)| a + b);
    expect(sum.is_some_and(|sum| sum > 10 && counts["total"].as_u64() == Some(sum)), counts)?;
    let what = report["decision"]["what"].as_str().unwrap_or_default();
    expect(["continue", "stop", "use_a_library"].contains(&what), &report["decision"])
}

/// Checks that every candidate, the control included, either raced or was rejected for a reason.
fn look_at_facts(lines: &str) -> Result<(), XtaskError> {
    let (mut made, mut ended) = (HashSet::new(), HashSet::new());
    for line in lines.lines() {
        let fact: Value =
            serde_json::from_str(line).map_err(|error| XtaskError::Check(format!("{error}: {line}")))?;
        match fact["table"].as_str() {
            Some("candidate") if fact["arm"] != "baseline" => made.insert(fact["id"].as_i64()),
            Some("rejection") => ended.insert(fact["candidate"].as_i64()),
            Some("measurement") if fact["trial"] == "race" => ended.insert(fact["candidate"].as_i64()),
            _ => continue,
        };
    }
    let open: Vec<_> = made.difference(&ended).collect();
    expect(made.len() > 10 && open.is_empty(), format!("{} candidates; without an end: {open:?}", made.len()))
}

fn expect(holds: bool, found: impl std::fmt::Display) -> Result<(), XtaskError> {
    if holds {
        Ok(())
    } else {
        Err(XtaskError::Check(format!("the results of the evolution are incomplete: {found}")))
    }
}

/// Runs a command that prints JSON, and ends it after `PATIENCE`. The output goes through a file, because a
/// full pipe would block the command.
fn json(command: &mut Command, path: &Path) -> Result<Value, XtaskError> {
    let text = quoted(command);
    eprintln!("$ {text}");
    let io = |source| XtaskError::Io { path: path.to_path_buf(), source };
    command.stdout(fs::File::create(path).map_err(io)?);
    let mut child = command.spawn().map_err(|source| XtaskError::Start { command: text.clone(), source })?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(io)? {
            break status;
        }
        if began.elapsed() > PATIENCE {
            child.kill().and_then(|()| child.wait()).map_err(io)?;
            let seconds = PATIENCE.as_secs();
            return Err(XtaskError::Check(format!("`{text}` did not come to its end in {seconds} s")));
        }
        std::thread::sleep(LOOK);
    };
    if !status.success() {
        return Err(XtaskError::Failed { command: text, status });
    }
    serde_json::from_slice(&fs::read(path).map_err(io)?)
        .map_err(|error| XtaskError::Check(format!("`{text}`: {error}")))
}
